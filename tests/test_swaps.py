"""Preempted requests in host memory: which blocks move, when, and what a failure undoes.

Most of it happens in a pool of 4 blocks: "old" has 4 tokens in block 0, "A" 9 in 1, 2 and 3.
In the second step "old" needs a block, so "A" leaves.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
from engine_support import SIZE, plan, report, run, run_steps, scheduler_over, table

from kvcore import BlockManager, Reason, Scheduler, Slots, Step, SwapCandidate, Verdict


def short_of_blocks(host_blocks: int = 8, **options: Any) -> tuple[Scheduler, BlockManager]:
    host = BlockManager(host_blocks, SIZE)
    scheduler = scheduler_over(4, host=host, **options)
    scheduler.add("old", 4)
    scheduler.add("A", 9)
    return scheduler, host


def with_a_in_host_memory(**options: Any) -> tuple[Scheduler, BlockManager]:
    scheduler, host = short_of_blocks(**options)
    assert run_steps(scheduler, 2).swapped_out == ["A"]
    assert scheduler.swapped == ["A"]
    return scheduler, host


def held(*managers: BlockManager) -> list[int]:
    return [bm.pool.num_used for bm in managers]


def test_a_request_goes_out_and_comes_back_block_by_block() -> None:
    """Freed blocks are handed out again in the order 3, 2, 1; "old" takes the first."""
    scheduler, host = short_of_blocks()
    run(scheduler)
    step = plan(scheduler)
    assert (step.swapped_out, step.swap_out.tolist()) == (["A"], [[1, 0], [2, 1], [3, 2]])
    assert (step, step.stalled, step.preempted) == ([], ["old"], [])
    assert (scheduler.running, scheduler.swapped) == (["old"], [])
    assert held(scheduler.bm, host) == [4, 3], "until the copies are done both ends hold"
    report(scheduler, step)
    assert (scheduler.swapped, held(scheduler.bm, host)) == (["A"], [1, 3])

    step = run(scheduler)
    assert (step, table(scheduler, "old"), step.slots.tolist()) == (["old"], [0, 3], [12])
    assert step.swapped_in == [], "it needs 3 blocks, the one for its next token included"
    scheduler.finish("old")

    step = plan(scheduler)
    assert (step.swapped_in, step.swap_in.tolist()) == (["A"], [[0, 2], [1, 1], [2, 3]])
    assert (step, step.prefills) == ([], []), "it decodes when it is there"
    assert (scheduler.running, scheduler.swapped) == (["A"], [])
    assert held(scheduler.bm, host) == [3, 3], "until the copies are done both ends hold"
    report(scheduler, step)
    assert held(scheduler.bm, host) == [3, 0]

    step = run(scheduler)
    assert (step, step.slots.tolist(), step.lengths.tolist()) == (["A"], [13], [10])
    counted = {name: number for name, number in scheduler.counters.as_dict().items() if number}
    assert counted == {
        "requests_added": 2,
        "finished": 1,
        "preemptions_swap": 1,
        "swap_out_blocks": 3,
        "swap_in_blocks": 3,
        "prefill_tokens": 4 + 9,
        "sampled_tokens": 2 + 2,
    }


def test_the_figures_of_the_steps_that_copy() -> None:
    scheduler, _ = short_of_blocks()
    run(scheduler)
    stats = run(scheduler).stats
    assert (stats.swapped_out, stats.swapped_in, stats.preempted, stats.stalled) == (1, 0, 0, 1)
    assert (stats.running, stats.waiting, stats.swapped, stats.used) == (1, 0, 0, 4)
    stats = run(scheduler).stats
    assert (stats.running, stats.waiting, stats.swapped, stats.used) == (1, 0, 1, 2)
    scheduler.finish("old")
    stats = run(scheduler).stats
    assert (stats.swapped_out, stats.swapped_in, stats.preempted, stats.stalled) == (0, 1, 0, 0)
    assert (stats.running, stats.waiting, stats.swapped, stats.used) == (1, 0, 0, 3)


def test_a_prompt_under_way_is_computed_again_instead() -> None:
    scheduler, host = short_of_blocks(token_budget=8)
    assert run(scheduler).prefills == [("old", 0, 4), ("A", 0, 4)]
    step = run(scheduler)
    assert (step, step.swapped_out, step.preempted) == (["old"], [], ["A"])
    assert held(host) == [0]


def test_it_may_take_all_that_is_left_of_host_memory() -> None:
    _, host = with_a_in_host_memory(host_blocks=3)
    assert held(host) == [3]


def test_without_enough_host_memory_it_is_computed_again() -> None:
    scheduler, host = short_of_blocks(host_blocks=2)
    run(scheduler)
    step = run(scheduler)
    assert (step, step.swapped_out, step.preempted) == (["old"], [], ["A"])
    assert (held(host), scheduler.counters.preemptions_swap) == ([0], 0)
    assert list(scheduler.waiting) == [("A", 10)], "the token that it sampled included"


@pytest.mark.parametrize("is_swapped", [True, False])
def test_the_rule_is_asked_with_what_either_way_costs(is_swapped: bool) -> None:
    asked: list[SwapCandidate] = []

    def rule(candidate: SwapCandidate) -> bool:
        asked.append(candidate)
        return is_swapped

    scheduler, host = short_of_blocks(swap=rule)
    run(scheduler)
    step = run(scheduler)
    assert [candidate[1:] for candidate in asked] == [(9, 3)]
    assert asked[0].request.seq == "A"
    assert (step.swapped_out, step.preempted) == ((["A"], []) if is_swapped else ([], ["A"]))
    assert held(host) == [3 if is_swapped else 0]


# --- Copies that fail ----------------------------------------------------------------------


def test_when_the_copy_to_the_host_fails_it_stays_and_runs_on() -> None:
    scheduler, host = short_of_blocks()
    run(scheduler)
    step = plan(scheduler)
    assert report(scheduler, step, swap_failed=["A", "nobody"]) == []
    assert (scheduler.running, scheduler.swapped) == (["old", "A"], [])
    assert (held(scheduler.bm, host), table(scheduler, "A")) == ([4, 0], [1, 2, 3])
    scheduler.finish("old")
    step = run(scheduler)
    assert (step, step.slots.tolist()) == (["A"], [13])


def test_when_the_copy_to_the_host_fails_the_next_step_may_try_again() -> None:
    scheduler, host = short_of_blocks()
    run(scheduler)
    run(scheduler, swap_failed=["A"])
    step = run(scheduler)
    assert (step, step.stalled, step.swapped_out) == ([], ["old"], ["A"])
    assert (scheduler.swapped, held(scheduler.bm, host)) == (["A"], [1, 3])


def test_when_the_copy_from_the_host_fails_it_stays_there_and_tries_again() -> None:
    scheduler, host = with_a_in_host_memory()
    scheduler.finish("old")
    step = plan(scheduler)
    assert step.swapped_in == ["A"]
    report(scheduler, step, swap_failed=["A"])
    assert (scheduler.running, scheduler.swapped) == ([], ["A"])
    assert held(scheduler.bm, host) == [0, 3]
    step = run(scheduler)
    assert (step.swapped_in, step.swap_in[:, 0].tolist()) == (["A"], [0, 1, 2])
    assert held(scheduler.bm, host) == [3, 0]
    assert run(scheduler) == ["A"]


@pytest.mark.parametrize("way", ["out", "in"])
def test_its_limit_is_kept_after_a_failure(way: str) -> None:
    """While it is away, the steps of "B" look for those who reach a limit, and find nobody."""
    scheduler = scheduler_over(5, host=BlockManager(8, SIZE))
    for seq, n_tokens, max_tokens in (("old", 4, None), ("B", 1, None), ("A", 9, 2)):
        scheduler.add(seq, n_tokens, max_tokens=max_tokens)
    run(scheduler)
    step = run(scheduler, swap_failed=["A"] if way == "out" else [])
    assert (step, step.swapped_out) == (["B"], ["A"])
    scheduler.finish("old")
    if way == "in":
        assert run(scheduler, swap_failed=["A"]).swapped_in == ["A"]
        assert run(scheduler).swapped_in == ["A"]
    step = plan(scheduler)
    assert (step, report(scheduler, step)) == (["B", "A"], ["A"])
    assert scheduler.counters.finished == 2


# --- Blocks that stay ----------------------------------------------------------------------


def sharing(num_blocks: int, more: int) -> tuple[Scheduler, BlockManager]:
    """Prompts of 5 tokens, and of the first 4 of them and ``more`` besides: they share block 0."""
    host = BlockManager(8, SIZE)
    scheduler = scheduler_over(num_blocks, host=host, prefix_caching=True)
    scheduler.add("A", tokens=range(5))
    run(scheduler)
    scheduler.add("B", tokens=[*range(4), *[9] * more])
    step = run(scheduler)
    assert (step, step.prefills) == (["A"], [("B", 4, more)])
    assert (table(scheduler, "A")[0], table(scheduler, "B")[0]) == (0, 0)
    return scheduler, host


def test_a_shared_block_stays_and_is_not_copied() -> None:
    """In step 5 "A" needs a third block. "B" has 11 tokens in block 0 and two of its own."""
    scheduler, host = sharing(4, 5)
    step = run_steps(scheduler, 3)
    assert (step.swapped_out, step.swap_out.tolist()) == (["B"], [[2, 0], [3, 1]])
    assert (scheduler.bm.ref[0], held(scheduler.bm, host)) == (2, [2, 2])
    scheduler.finish("A")
    assert (scheduler.bm.ref[0], held(scheduler.bm, host)) == (1, [1, 2]), "held for B alone"
    assert run(scheduler, swap_failed=["B"]).swapped_in == ["B"]
    assert (scheduler.bm.ref[0], held(scheduler.bm, host)) == (1, [1, 2]), "also after a failure"
    step = run(scheduler)
    assert (step.swapped_in, len(step.swap_in), table(scheduler, "B")[0]) == (["B"], 2, 0)
    assert (scheduler.bm.ref[0], held(scheduler.bm, host)) == (1, [3, 0])
    assert (run(scheduler), scheduler.counters.recomputed_tokens) == (["B"], 0)


def test_whoever_shares_everything_has_nothing_to_copy_and_is_computed_again() -> None:
    """Two samples of one prompt before they come apart; the blocks of others are theirs too."""
    scheduler = scheduler_over(4, host=BlockManager(8, SIZE))
    scheduler.add("old", 4)
    scheduler.add("G", 4, siblings=["S"])
    run(scheduler)
    outside = scheduler.bm.pool.take_many(2)
    step = run(scheduler)
    assert (step, step.swapped_out, step.preempted) == (["old"], [], ["G", "S"])
    scheduler.bm.pool.release_many(outside)


def test_who_runs_alone_gets_what_those_in_host_memory_kept() -> None:
    """In step 5 "A" needs a third block, and "B" leaves. It keeps the block that they share.

    Nobody else holds that once "A" has gone, and "old" grows to 20 tokens in the other 5.
    For the next one "B" is given up.
    """
    host = BlockManager(8, SIZE)
    scheduler = scheduler_over(6, host=host, prefix_caching=True)
    scheduler.add("A", tokens=range(5))
    run(scheduler)
    scheduler.add("old", 1)
    scheduler.add("B", tokens=[*range(4), *[9] * 9])
    step = run(scheduler)
    assert step.prefills == [("old", 0, 1), ("B", 4, 9)]
    step = run_steps(scheduler, 3)
    assert (step, step.stalled, step.swapped_out) == (["old"], ["A"], ["B"])
    run_steps(scheduler, 4)
    scheduler.finish("A")
    for length in range(9, 21):
        step = run(scheduler)
        assert (step, step.lengths.tolist(), step.swapped_in) == (["old"], [length], [])
    assert (scheduler.swapped, held(scheduler.bm, host)) == (["B"], [6, 3])
    step = run(scheduler)
    assert (step, step.preempted, table(scheduler, "old")[-1]) == (["old"], ["B"], 0)
    assert (scheduler.swapped, held(scheduler.bm, host)) == ([], [6, 0])
    counters = scheduler.counters
    assert counters.preemptions_swap == counters.preemptions_recompute == 1
    assert list(scheduler.waiting) == [("B", 16)], "15 that it had, and one that it sampled"
    scheduler.finish("old")
    assert run(scheduler).prefills == [("B", 0, 16)]
    assert counters.recomputed_tokens == 15


# --- When they come back -------------------------------------------------------------------


def test_nobody_comes_back_in_a_step_in_which_somebody_leaves() -> None:
    """Outside 2 blocks are held until the fourth step.

    In the third "old" needs a block and "B" leaves; in the fourth "old" needs another, and
    each of the three samples too. 3 blocks are there, so the group leaves with the 3 blocks
    that are not shared, and 2 are left. "B" could have its 1. It waits for the next step.
    """
    host = BlockManager(8, SIZE)
    scheduler = scheduler_over(8, host=host)
    outside = scheduler.bm.pool.take_many(2)
    scheduler.add("old", 3)
    scheduler.add("G", 6, siblings=["G2", "G3"])
    scheduler.add("B", 1)
    step = run_steps(scheduler, 3)
    assert (step, step.stalled, step.swapped_out) == (["G", "G2", "G3"], ["old"], ["B"])
    scheduler.bm.pool.release_many(outside)
    step = run(scheduler)
    assert (step, step.swapped_out) == (["old"], ["G", "G2", "G3"])
    assert len(step.swap_out) == 3, "the first block of the prompt stays"
    assert (step.swapped_in, step.stats.free) == ([], 2)
    assert scheduler.swapped == ["B", "G", "G2", "G3"]
    step = run(scheduler)
    assert (step, step.swapped_in) == (["old"], ["B"])
    assert scheduler.swapped == ["G", "G2", "G3"]
    for seq in ("old", "B"):
        scheduler.finish(seq)
    step = run(scheduler)
    assert (step.swapped_in, len(step.swap_in)) == (["G", "G2", "G3"], 3)
    first = {table(scheduler, seq)[0] for seq in step.swapped_in}
    assert len(first) == 1, "what they shared is still shared"
    assert held(scheduler.bm, host) == [4, 0]


def test_with_steps_in_flight_blocks_come_when_the_copies_are_done() -> None:
    """The result of the first step comes after "A" has left, and still counts."""
    scheduler, host = short_of_blocks(in_flight=1)
    first, second = plan(scheduler), plan(scheduler)
    assert (second.swapped_out, second.stalled) == (["A"], ["old"])
    report(scheduler, first)
    assert (scheduler.counters.sampled_tokens, scheduler.counters.ignored_results) == (2, 0)
    third = plan(scheduler)
    assert (third, third.stalled, third.swapped_in) == ([], ["old"], [])
    assert (scheduler.swapped, held(scheduler.bm, host)) == ([], [4, 3])
    report(scheduler, second)
    assert (scheduler.swapped, held(scheduler.bm, host)) == (["A"], [1, 3])
    scheduler.finish("old")
    fourth = plan(scheduler)
    fifth = plan(scheduler)
    assert (fourth.swapped_in, fifth, fifth.stalled) == (["A"], [], [])
    report(scheduler, fourth)
    sixth = plan(scheduler)
    assert (sixth, sixth.lengths.tolist()) == (["A"], [10])
    report(scheduler, sixth)
    assert held(scheduler.bm, host) == [3, 0]


@pytest.mark.parametrize("in_flight", [0, 1])
def test_it_goes_on_with_the_token_that_it_sampled_last(in_flight: int) -> None:
    """10 is sampled in the first step, which with steps in flight is reported after it left."""
    host = BlockManager(8, SIZE)
    scheduler = scheduler_over(4, host=host, prefix_caching=True, in_flight=in_flight)
    scheduler.add("old", tokens=[51, 52, 53, 54])
    scheduler.add("A", tokens=range(1, 10))
    first = plan(scheduler)
    if not in_flight:
        report(scheduler, first, [55, 10])
    second = plan(scheduler)
    assert second.swapped_out == ["A"]
    if in_flight:
        report(scheduler, first, [55, 10])
    report(scheduler, second, [])
    run(scheduler, [56])
    scheduler.finish("old")
    assert run(scheduler, []).swapped_in == ["A"]
    assert scheduler.bm.tokens("A").tolist() == list(range(1, 10))
    run(scheduler, [11])
    run(scheduler, [12])
    assert scheduler.bm.tokens("A").tolist() == list(range(1, 12))


def test_what_comes_back_may_be_found_again_once_the_copies_are_done() -> None:
    """Meanwhile its blocks were given to somebody else, and nothing of it was cached."""
    scheduler = scheduler_over(4, host=BlockManager(8, SIZE), prefix_caching=True)
    prompt = range(1, 10)
    scheduler.add("old", 4)
    scheduler.add("A", tokens=prompt)
    assert run_steps(scheduler, 2).swapped_out == ["A"]
    scheduler.bm.evict(3)
    assert scheduler.bm.match(prompt) == 0
    scheduler.finish("old")
    step = plan(scheduler)
    assert (step.swapped_in, scheduler.bm.match(prompt)) == (["A"], 0)
    report(scheduler, step)
    assert scheduler.bm.match(prompt) == 8


def test_it_keeps_its_resources_there_and_gives_them_back_when_it_ends() -> None:
    slots = Slots("state slots", 3)
    scheduler, _ = with_a_in_host_memory(resources=[slots])
    assert slots.available == 1
    scheduler.abort("A")
    assert slots.available == 2


# --- The end, at every stage ---------------------------------------------------------------


def leaving(in_flight: int) -> tuple[Scheduler, BlockManager, Step | None]:
    scheduler, host = short_of_blocks(in_flight=in_flight)
    run(scheduler)
    step = plan(scheduler)
    assert step.swapped_out == ["A"]
    return scheduler, host, step


def there(in_flight: int) -> tuple[Scheduler, BlockManager, Step | None]:
    return *with_a_in_host_memory(in_flight=in_flight), None


def returning(in_flight: int) -> tuple[Scheduler, BlockManager, Step | None]:
    scheduler, host = with_a_in_host_memory(in_flight=in_flight)
    scheduler.finish("old")
    step = plan(scheduler)
    assert step.swapped_in == ["A"]
    return scheduler, host, step


def back(in_flight: int) -> tuple[Scheduler, BlockManager, Step | None]:
    scheduler, host, step = returning(in_flight)
    assert step is not None
    report(scheduler, step)
    assert scheduler.running == ["A"]
    return scheduler, host, None


@pytest.mark.parametrize("verb", ["abort", "finish"])
@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("stage", [leaving, there, returning, back])
def test_it_can_be_ended_at_every_stage(stage: Any, in_flight: int, verb: str) -> None:
    scheduler, host, step = stage(in_flight)
    end = getattr(scheduler, verb)
    before = scheduler.counters.aborted + scheduler.counters.finished
    assert end("A")
    assert not end("A")
    scheduler.bm.check()
    host.check()
    assert scheduler.swapped == []
    assert "A" not in scheduler.running
    if step is not None:
        assert report(scheduler, step, finished=["A"]) == []
    assert scheduler.counters.aborted + scheduler.counters.finished == before + 1
    assert (len(host), held(host)) == (0, [0])
    scheduler.add("A", 1)
    assert scheduler.why("A").reason is Reason.FITS, "its id is free, and it is in nobody's way"
    assert run(scheduler).prefills == [("A", 0, 1)]
    scheduler.finish("A")
    scheduler.finish("old")
    assert held(scheduler.bm, host) == [0, 0]


def test_a_late_result_may_end_it_while_it_leaves() -> None:
    scheduler, host = short_of_blocks(in_flight=1)
    first, second = plan(scheduler), plan(scheduler)
    assert second.swapped_out == ["A"]
    assert report(scheduler, first, finished=["A"]) == ["A"]
    assert report(scheduler, second) == []
    assert (scheduler.swapped, held(host)) == ([], [0])
    assert run(scheduler) == ["old"]
    assert (scheduler.counters.sampled_tokens, held(scheduler.bm)) == (3, [2])


def test_both_managers_are_empty_at_the_end() -> None:
    """Four grow from 3 to 12 tokens in 7 blocks, where 12 are asked for."""
    host = BlockManager(6, SIZE)
    scheduler = scheduler_over(7, host=host)
    ids: list[Hashable] = list("ABCD")
    for seq in ids:
        scheduler.add(seq, 3, max_tokens=10)
    run_steps(scheduler, 100)
    assert held(scheduler.bm, host) == [0, 0]
    counters = scheduler.counters
    assert (counters.finished, counters.sampled_tokens) == (4, 40)
    assert counters.preemptions_swap > 0
    assert counters.swap_out_blocks == counters.swap_in_blocks
    assert counters.prefill_tokens == 4 * 3 + counters.recomputed_tokens


@pytest.mark.parametrize(
    ("host", "error", "said"),
    [
        ("x", TypeError, "host must be a BlockManager, got 'x'"),
        (BlockManager(8, 2 * SIZE), ValueError, "host has blocks of 8 tokens"),
    ],
)
def test_a_host_that_cannot_take_the_blocks_is_refused(
    host: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        scheduler_over(4, host=host)


def test_the_pool_itself_is_no_host() -> None:
    bm = BlockManager(4, SIZE)
    with pytest.raises(ValueError, match="over the very pool"):
        Scheduler(bm, 0, token_budget=8, host=bm)


def test_who_has_a_namesake_in_host_memory_is_computed_again() -> None:
    scheduler, host = short_of_blocks()
    host.allocate("A", 1)
    assert run_steps(scheduler, 2).preempted == ["A"]
    assert host.lens["A"] == 1


def test_who_finds_its_id_taken_when_it_comes_back_is_ended_and_the_taker_is_not() -> None:
    scheduler, host = with_a_in_host_memory()
    scheduler.finish("old")
    scheduler.bm.allocate("A", 1)
    step = run(scheduler)
    assert step.rejected == {"A": Verdict(Reason.LIVE_ID, needed=0, available=3)}
    assert (scheduler.swapped, scheduler.running) == ([], [])
    assert held(scheduler.bm, host) == [1, 0]


def test_the_end_of_one_in_host_memory_leaves_alone_who_has_taken_its_id() -> None:
    scheduler, host = with_a_in_host_memory()
    scheduler.bm.allocate("A", 1)
    assert scheduler.abort("A")
    assert held(scheduler.bm, host) == [2, 0]
