"""Clusters K7 and K8 under engine steps: policies, host memory, groups, windows, resources."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import pytest

from kvcore import (
    BlockManager,
    LowestPriority,
    OutOfBlocks,
    Priority,
    Reason,
    RequestRefused,
    Scheduler,
    Slots,
    Step,
)

SIZE = 4


def scheduler_over(num_blocks: int, watermark: int = 0, **options: Any) -> Scheduler:
    options.setdefault("token_budget", 64)
    return Scheduler(BlockManager(num_blocks, SIZE), watermark, **options)


def run(scheduler: Scheduler, **results: Any) -> Step:
    """One step and its results, every invariant checked."""
    step = scheduler.step()
    scheduler.bm.check()
    scheduler.update(step, **results)
    scheduler.bm.check()
    return step


def admitted(step: Step) -> list[Hashable]:
    return [seq for seq, _, _ in step.prefills]


@pytest.mark.parametrize("in_flight", [0, 1])
def test_K7_01_preempted_work_is_admitted_again_and_everything_finishes(in_flight: int) -> None:
    """Three of 12 blocks each in the end, two of which fit."""
    scheduler = scheduler_over(24, in_flight=in_flight)
    for seq in "ABC":
        scheduler.add(seq, 2 * SIZE, max_tokens=10 * SIZE + 1)
    steps: list[Step] = []
    preempted: list[Hashable] = []
    for _ in range(200):
        steps.append(scheduler.step())
        preempted += steps[-1].preempted
        if len(steps) > in_flight:
            scheduler.update(steps.pop(0))
        scheduler.bm.check()
    assert (scheduler.running, list(scheduler.waiting)) == ([], [])
    assert scheduler.counters.finished == 3
    assert scheduler.bm.num_available == 24
    assert 1 <= len(preempted) <= 3
    assert "A" not in preempted


@pytest.mark.parametrize("watermark", [0, 1])
def test_K7_02_a_request_larger_than_the_pool_fails_alone(watermark: int) -> None:
    scheduler = scheduler_over(49, watermark)
    with pytest.raises(RequestRefused, match=f"needs 63 blocks and can have {49 - watermark}"):
        scheduler.add("large", 62 * SIZE + 1)
    scheduler.waiting.append(("large", 62 * SIZE + 1))
    scheduler.add("next", 10)
    step = run(scheduler)
    assert step.rejected["large"][:3] == (Reason.NEVER_FITS, 63, 49 - watermark)
    assert (admitted(step), list(scheduler.waiting)) == (["next"], [])


def test_K7_03_the_reserve_counts_in_the_longest_prompt() -> None:
    """A prompt in chunks may be as long as one at once, and decodes into the reserve."""
    scheduler = scheduler_over(13, 1, token_budget=2 * SIZE)
    with pytest.raises(RequestRefused):
        scheduler.add("A", 12 * SIZE + 1)
    scheduler.add("A", 12 * SIZE)
    for number in range(6):
        step = run(scheduler)
        assert step.prefills == [("A", number * 2 * SIZE, 2 * SIZE)]
    assert run(scheduler) == ["A"]
    assert scheduler.bm.num_available == 0


@pytest.mark.parametrize("in_flight", [0, 1])
def test_K7_04_the_last_running_sequence_outgrows_the_pool_and_ends_with_a_reason(
    in_flight: int,
) -> None:
    scheduler = scheduler_over(2, in_flight=in_flight)
    scheduler.add("A", 2 * SIZE)
    first = scheduler.step()
    assert first.completed == ["A"]
    if in_flight == 0:
        scheduler.update(first)
    step = scheduler.step()
    assert step.rejected == {"A": (Reason.OUTGREW_POOL, 3, 2, 0, 0)}
    assert (step, step.preempted, scheduler.running) == ([], [], [])
    scheduler.update(first)
    assert scheduler.bm.num_available == 2
    scheduler.add("B", 1)
    assert admitted(run(scheduler)) == ["B"]
    assert run(scheduler) == ["B"]


def test_K7_07_running_sequences_count_against_the_most_that_may_run() -> None:
    scheduler = scheduler_over(100, max_running=2)
    for seq in "ABC":
        scheduler.add(seq, 4)
    assert admitted(run(scheduler)) == ["A", "B"]
    for _ in range(10):
        assert run(scheduler) == ["A", "B"]
        assert scheduler.why("C").reason is Reason.MAX_RUNNING
    scheduler.finish("A")
    step = run(scheduler)
    assert (step, admitted(step)) == (["B"], ["C"])


def test_K7_08_one_call_visits_each_request_at_most_once() -> None:
    scheduler = scheduler_over(4)
    scheduler.add("A", 1)
    scheduler.add("B", 3 * SIZE - 1)
    scheduler.add("C", 3 * SIZE)
    step = run(scheduler)
    assert admitted(step) == ["A", "B"]
    for _ in range(4 * SIZE):
        step = run(scheduler)
        seen = [*step, *admitted(step), *step.preempted, *step.rejected]
        assert len(seen) == len(set(seen))
        if step.preempted:
            assert [seq for seq, _ in scheduler.waiting] == ["B", "C"]
    assert list(step.rejected) == ["A"]
    assert scheduler.counters.preemptions_recompute == 1


def test_K7_08_victims_of_one_step_keep_their_order_at_the_front() -> None:
    """Two that share a full block need one each, and two must yield for that."""
    scheduler = scheduler_over(5)
    scheduler.add("A", SIZE, siblings=["A2"])
    scheduler.add("B", 1)
    scheduler.add("C", 1)
    run(scheduler)
    scheduler.bm.pool.take_many(2)
    scheduler.add("never started", 1)
    step = run(scheduler)
    assert (step, step.preempted) == (["A", "A2"], ["C", "B"])
    assert [seq for seq, _ in scheduler.waiting] == ["B", "C", "never started"]


@pytest.mark.parametrize("watermark", [0, 1])
def test_K7_09_admission_waits_for_room_for_the_whole_prompt(watermark: int) -> None:
    """That its first chunk would fit lets nobody in, so nobody is preempted for the rest."""
    size = 16
    bm = BlockManager(10, size)
    scheduler = Scheduler(bm, watermark, token_budget=4 + size)
    for number in range(4):
        scheduler.add(number, 1)
    run(scheduler)
    outside = bm.pool.take_many(5).tolist()
    scheduler.add("long", 5 * size)
    for available in (1, 4 + watermark):
        while bm.num_available < available:
            bm.pool.release_many([outside.pop()])
        step = run(scheduler)
        assert (step, admitted(step)) == ([0, 1, 2, 3], [])
        reason = Reason.BLOCKS if available < 5 else Reason.WATERMARK
        assert scheduler.why("long") == (reason, 5, available, 0, watermark)
    bm.pool.release_many(outside)
    for chunk in range(5):
        step = run(scheduler)
        assert (step, step.preempted) == ([0, 1, 2, 3], [])
        assert step.prefills == [("long", chunk * size, size)]


def test_K7_10_a_victim_has_no_part_in_the_step_and_its_tokens_go_to_others() -> None:
    """Neither slots nor drafts: the budget is what it would be without it."""
    scheduler = scheduler_over(
        4, order=Priority(), victim=LowestPriority(), token_budget=12, draft_tokens=2
    )
    scheduler.add("old", 1, priority=2)
    scheduler.add("A", 9)
    run(scheduler)
    assert scheduler.bm.num_available == 0
    scheduler.add("H", 9, priority=1)
    step = run(scheduler)
    assert (step, step.preempted) == (["old"], ["A"])
    assert (step.counts.tolist(), len(step.slots)) == ([3], 3)
    assert step.prefills == [("H", 0, 9)]
    assert "A" not in scheduler.bm


def test_K7_12_a_preempted_request_returns_before_one_that_never_started() -> None:
    scheduler = scheduler_over(4)
    scheduler.add("old", 4)
    scheduler.add("A", 4)
    for _ in range(4):
        run(scheduler)
    scheduler.add("B", 4)
    while "A" in scheduler.running:
        step = run(scheduler)
    assert step.preempted == ["A"]
    step = run(scheduler)
    assert (admitted(step), scheduler.why("B").reason) == ([], Reason.BEHIND), "B would fit"
    scheduler.finish("old")
    assert admitted(run(scheduler))[0] == "A"


def test_K7_13_a_more_important_request_evicts_in_the_call_that_finds_no_room() -> None:
    scheduler = scheduler_over(4, order=Priority(), victim=LowestPriority())
    scheduler.add("A", 13)
    run(scheduler)
    scheduler.add("H", 4, priority=1)
    step = run(scheduler)
    assert (step.preempted, admitted(step)) == (["A"], ["H"])
    scheduler.add("equal", 4, priority=1)
    assert run(scheduler).preempted == [], "equal importance never evicts"


def test_K7_14_nobody_is_evicted_where_that_would_not_help() -> None:
    scheduler = scheduler_over(6, order=Priority(), victim=LowestPriority())
    scheduler.add("L1", 2)
    scheduler.add("L2", 2)
    run(scheduler)
    outside = scheduler.bm.pool.take_many(4)
    scheduler.add("H", 20, priority=1)
    for _ in range(2):
        step = run(scheduler)
        assert (step, step.preempted) == (["L1", "L2"], [])
    assert scheduler.why("H")[:3] == (Reason.BLOCKS, 5, 0)
    scheduler.bm.pool.release_many(outside)


def test_K7_15_a_victim_whose_blocks_a_step_still_touches_is_the_only_one() -> None:
    """The blocks come when the step in flight is done: until then the request waits."""
    scheduler = scheduler_over(3, order=Priority(), victim=LowestPriority(), in_flight=1)
    for seq in "ABC":
        scheduler.add(seq, 1)
    first = scheduler.step()
    scheduler.add("D", 1, priority=1)
    second = scheduler.step()
    assert (second.preempted, admitted(second)) == (["C"], [])
    scheduler.update(first)
    third = scheduler.step()
    scheduler.bm.check()
    assert third.preempted == []
    scheduler.update(second)
    fourth = third if admitted(third) else scheduler.step()
    assert (admitted(fourth), scheduler.counters.preemptions_recompute) == (["D"], 1)
    scheduler.bm.check()


def swapping(num_blocks: int, host_blocks: int, watermark: int = 0) -> Scheduler:
    return scheduler_over(num_blocks, watermark, host=BlockManager(host_blocks, SIZE))


def swapped_out(scheduler: Scheduler, old: int, new: int) -> None:
    """Let "old" push "A" to host memory by growing."""
    scheduler.add("old", old)
    scheduler.add("A", new)
    step = run(scheduler)
    while not step.swapped_out:
        step = run(scheduler)
    assert (step.swapped_out, scheduler.swapped) == (["A"], ["A"])


def test_K7_16_nobody_new_enters_before_the_oldest_in_host_memory_returns() -> None:
    scheduler = swapping(4, 8)
    swapped_out(scheduler, 2, 9)
    scheduler.add("B", 2)
    while "old" in scheduler.running:
        step = run(scheduler)
        assert admitted(step) == [], "there is room for B, but A comes first"
        assert scheduler.why("B").reason is Reason.SWAPPED_BEFORE
        if scheduler.bm.lens["old"] > 6:
            scheduler.finish("old")
    step = run(scheduler)
    assert step.swapped_in == ["A"]
    assert len(step.swap_in) == 3
    assert "A" in run(scheduler)


@pytest.mark.parametrize("host_blocks", [1, 2])
def test_K7_17_a_group_that_finds_no_host_memory_is_computed_again(host_blocks: int) -> None:
    scheduler = swapping(8, host_blocks)
    scheduler.add("old", 3)
    scheduler.add("G", 9, siblings=["G2"])
    step = run(scheduler)
    while not step.preempted:
        step = run(scheduler)
        assert step.swapped_out == []
    assert step.preempted == ["G", "G2"]
    scheduler.finish("old")
    while scheduler.running != ["G", "G2"] or step.prefills:
        step = run(scheduler)
    assert run(scheduler) == ["G", "G2"]


def test_K7_18_an_idle_machine_can_always_bring_one_back() -> None:
    """It needs the block under the watermark as well."""
    scheduler = swapping(5, 8, watermark=1)
    swapped_out(scheduler, 1, 9)
    scheduler.bm.pool.take_many(1)
    scheduler.finish("old")
    assert (scheduler.bm.num_available, scheduler.why("A").needed) == (4, 4)
    step = run(scheduler)
    assert step.swapped_in == ["A"]
    assert run(scheduler) == ["A"]


def test_K7_19_an_append_may_take_the_reserve_and_an_admission_may_not() -> None:
    scheduler = scheduler_over(4, 1)
    scheduler.add("A", 2 * SIZE)
    run(scheduler)
    scheduler.bm.pool.take_many(1)
    scheduler.add("new", 1)
    assert scheduler.why("new") == (Reason.WATERMARK, 1, 1, 0, 1)
    step = run(scheduler)
    assert (step, admitted(step)) == (["A"], [])
    assert scheduler.bm.num_available == 0
    assert scheduler.why("new").reason is Reason.BLOCKS


def test_K7_20_can_and_do_agree_on_a_windowed_prompt() -> None:
    scheduler = scheduler_over(5, window=2 * SIZE)
    bm = scheduler.bm
    outside = bm.pool.take_many(2)
    scheduler.add("W", 5 * SIZE)
    assert not bm.can_allocate(5 * SIZE)
    with pytest.raises(OutOfBlocks):
        bm.allocate("by hand", 5 * SIZE)
    assert admitted(run(scheduler)) == []
    assert scheduler.why("W")[:3] == (Reason.BLOCKS, 5, 3)
    bm.pool.release_many(outside)
    assert bm.can_allocate(5 * SIZE)
    assert admitted(run(scheduler)) == ["W"]
    assert bm.num_available == 3, "what lies outside the window is given back"


def test_K7_23_blocks_are_counted_and_not_tokens() -> None:
    """Six at a boundary, five free blocks: one yields before anything is appended."""
    scheduler = scheduler_over(11)
    for seq in "ABCDEF":
        scheduler.add(seq, SIZE)
    run(scheduler)
    assert scheduler.bm.num_available == 5
    step = run(scheduler)
    assert (step, step.preempted) == (list("ABCDE"), ["F"])


@pytest.mark.parametrize("short", range(3))
def test_K7_25_one_missing_block_costs_the_newest_and_two_decode(short: int) -> None:
    scheduler = scheduler_over(3)
    for place, seq in enumerate("ABC"):
        scheduler.add(seq, SIZE if place == short else 1)
    run(scheduler)
    step = run(scheduler)
    assert (step, step.preempted, step.rejected) == (["A", "B"], ["C"], {})


@pytest.mark.parametrize("n_tokens", [0, -1])
def test_K7_26_an_empty_prompt_is_refused_and_the_next_request_works(n_tokens: int) -> None:
    scheduler = scheduler_over(4)
    with pytest.raises(ValueError, match=f"n_tokens.* {n_tokens}"):
        scheduler.add("empty", n_tokens)
    scheduler.waiting.append(("empty", n_tokens))
    scheduler.add("next", 1)
    step = run(scheduler)
    assert step.rejected["empty"].reason is Reason.BAD_LENGTH
    assert (admitted(step), list(scheduler.waiting)) == (["next"], [])


def test_K7_27_a_second_resource_is_part_of_admission() -> None:
    slots = Slots("state slots", 3)
    scheduler = scheduler_over(10, resources=[slots])
    for seq in "ABCD":
        scheduler.add(seq, 2)
    step = run(scheduler)
    assert admitted(step) == ["A", "B", "C"]
    assert (scheduler.bm.num_available, slots.available) == (7, 0), "nothing is taken for D"
    assert scheduler.why("D")[:3] == (Reason.RESOURCE, 1, 0)
    scheduler.finish("B")
    assert slots.available == 1
    assert admitted(run(scheduler)) == ["D"]


def test_K7_28_ten_thousand_steps_at_full_use() -> None:
    scheduler = scheduler_over(12, token_budget=16)
    draw = random.Random(28)
    for number in range(10_000):
        if len(scheduler.waiting) < 3:
            scheduler.add(number, draw.randint(1, 12), max_tokens=draw.randint(1, 12))
        step = scheduler.step()
        if draw.random() < 0.02 and scheduler.running:
            scheduler.abort(draw.choice(scheduler.running))
        scheduler.update(step)
        if number % 10 == 0:
            scheduler.bm.check()
    assert scheduler.counters.preemptions_recompute > 500
    assert scheduler.counters.finished > 3_000
    assert sum(len(request.members) for request in scheduler._roster.swapped) == 0


def test_K8_04_what_a_group_frees_is_counted_in_physical_blocks() -> None:
    bm = BlockManager(8, SIZE)
    bm.allocate("A", 10)
    bm.fork("A", "B")
    bm.fork("A", "C")
    nobody = bm.rows([])

    def available(*gone: str) -> int:
        return bm.plan_append(nobody, without=bm.rows(gone)).available

    assert (available(), available("A", "B"), available("A", "B", "C")) == (5, 5, 8)
    assert bm.plan_append(bm.rows("ABC")).needed == 2, "the last of them writes in place"
    assert bm.plan_append(bm.rows("BC"), without=bm.rows("A")).needed == 1


def test_K8_05_siblings_without_room_for_their_copy_wait_for_it() -> None:
    """The fork needs no block; the first token of one of the two does."""
    scheduler = scheduler_over(3, token_budget=SIZE)
    bm = scheduler.bm
    scheduler.add("A", 6, siblings=["B"])
    run(scheduler)
    outside = bm.pool.take_many(1)
    assert run(scheduler).forks == [("A", "B")]
    table = bm.table("A").tolist()
    for _ in range(3):
        step = run(scheduler)
        assert (step, step.stalled, step.preempted) == ([], ["A", "B"], [])
        assert bm.table("A") == bm.table("B") == table
    bm.pool.release_many(outside)
    step = run(scheduler)
    assert (step, step.copies.tolist()) == (["A", "B"], [[table[1], bm.table("A")[1]]])
    assert bm.table("B") == table, "the last one writes in place"


def test_K8_06_of_three_siblings_two_copy_and_the_last_writes_in_place() -> None:
    scheduler = scheduler_over(8)
    bm = scheduler.bm
    scheduler.add("A", 6, siblings=["B", "C"])
    run(scheduler)
    full, partial = bm.table("A")
    step = run(scheduler)
    assert step == ["A", "B", "C"]
    assert step.copies.tolist() == [[partial, bm.table(seq)[1]] for seq in "AB"]
    assert bm.table("C") == [full, partial]
    assert step.slots.tolist() == [bm.slots(seq)[-1] for seq in "ABC"]
    assert bm.pool.num_used == 4
    assert len(run(scheduler).copies) == 0


def test_K8_07_a_block_that_is_still_saved_is_not_reused_after_a_preemption() -> None:
    scheduler = scheduler_over(4)
    bm = scheduler.bm
    scheduler.add("old", 3)
    scheduler.add("A", 9)
    run(scheduler)
    saved = bm.tables["A"][0]
    bm.pin(saved)
    step = run(scheduler)
    while not step.preempted:
        step = run(scheduler)
    assert step.preempted == ["A"]
    while bm.num_available:
        step = run(scheduler)
        assert saved not in bm.tables["old"].tolist()
    scheduler.finish("old")
    assert bm.num_available == 3
    bm.unpin(saved)
    assert bm.num_available == 4
    bm.check()


@pytest.mark.parametrize("ended_by", ["finished", "max_tokens", "abort"])
def test_K8_08_a_block_that_a_later_step_still_writes_is_not_handed_out(ended_by: str) -> None:
    """The result of one step ends A while the next, in which A has a part, is in flight."""
    scheduler = scheduler_over(2, in_flight=1)
    bm = scheduler.bm
    scheduler.add("A", 5, max_tokens=2 if ended_by == "max_tokens" else None)
    prompt = scheduler.step()
    first = scheduler.step()
    scheduler.update(prompt)
    second = scheduler.step()
    assert (first, second) == (["A"], [] if ended_by == "max_tokens" else ["A"])
    assert scheduler.update(first, finished="A" if ended_by == "finished" else ()) == (
        [] if ended_by == "abort" else ["A"]
    )
    if ended_by == "abort":
        assert scheduler.abort("A")
    if ended_by != "max_tokens":
        assert (bm.num_available, bm.gauges().fenced) == (0, 2)
        with pytest.raises(OutOfBlocks):
            bm.allocate("B", 1)
        scheduler.add("B", 1)
        third = scheduler.step()
        assert admitted(third) == []
        assert scheduler.update(second) == []
        assert scheduler.counters.ignored_results == 1
    assert bm.num_available == 2
    bm.allocate("elsewhere", 2 * SIZE)
    bm.check()


def test_K8_08_a_scheduler_waits_for_the_fence_instead_of_preempting() -> None:
    scheduler = scheduler_over(3, in_flight=1)
    bm = scheduler.bm
    for seq, n_tokens in (("A", SIZE), ("B", 1), ("C", 1)):
        scheduler.add(seq, n_tokens)
    first = scheduler.step()
    scheduler.finish("C")
    assert (bm.num_available, bm.gauges().fenced) == (0, 1)
    second = scheduler.step()
    assert (second, second.stalled, second.preempted) == (["B"], ["A"], [])
    scheduler.update(first)
    third = scheduler.step()
    assert (third, third.stalled) == (["A", "B"], [])
    bm.check()
