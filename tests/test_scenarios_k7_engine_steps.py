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
