"""Groups of samples and beams: born together, what they share, how they yield and end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
from engine_support import SIZE, plan, report, run, run_steps, scheduler_over, table

from kvcore import BlockManager, LowestPriority, Priority, Reason, Scheduler, Slots, Step

# --- How they begin ------------------------------------------------------------------------


def test_siblings_begin_with_the_step_that_completes_the_prompt() -> None:
    scheduler = scheduler_over(8, token_budget=4)
    scheduler.add("G", 5, siblings=["S", "T"])
    step = run(scheduler)
    assert (step.prefills, step.forks, scheduler.running) == ([("G", 0, 4)], [], ["G"])
    step = plan(scheduler)
    assert (step.prefills, step.completed) == ([("G", 4, 1)], ["G"])
    assert step.forks == [("G", "S"), ("G", "T")]
    assert (step, step.sampled) == ([], ["G", "S", "T"])
    report(scheduler, step)
    assert scheduler.running == ["G", "S", "T"]
    assert [table(scheduler, seq) for seq in "GST"] == [[0, 1]] * 3
    assert (scheduler.bm.pool.num_used, scheduler.bm.ref[1]) == (2, 3)
    counters = scheduler.counters
    assert (counters.requests_added, counters.prefill_tokens, counters.sampled_tokens) == (1, 5, 3)


def test_all_but_the_last_copy_the_block_that_they_share() -> None:
    """Token 5 of each goes into the second place of a block: copies 2 and 3, and block 1."""
    scheduler = scheduler_over(8)
    scheduler.add("G", 5, siblings=["S", "T"])
    run(scheduler)
    step = run(scheduler)
    assert (step, step.slots.tolist()) == (["G", "S", "T"], [9, 13, 5])
    assert step.copies.tolist() == [[1, 2], [1, 3]]
    assert [table(scheduler, seq) for seq in "GST"] == [[0, 2], [0, 3], [0, 1]]
    assert len(run(scheduler).copies) == 0


def test_with_steps_in_flight_the_last_copies_too() -> None:
    """The step before still reads block 1, which is free when both are reported."""
    scheduler = scheduler_over(8, in_flight=1)
    scheduler.add("G", 5, siblings=["S", "T"])
    first, second = plan(scheduler), plan(scheduler)
    assert second.copies.tolist() == [[1, 2], [1, 3], [1, 4]]
    assert second.slots.tolist() == [9, 13, 17]
    report(scheduler, first)
    assert scheduler.bm.pool.num_used == 5
    report(scheduler, second)
    assert scheduler.bm.pool.num_used == 4


def test_a_prompt_of_full_blocks_needs_no_copy() -> None:
    scheduler = scheduler_over(8)
    scheduler.add("G", 4, siblings=["S", "T"])
    run(scheduler)
    step = run(scheduler)
    assert (len(step.copies), step.slots.tolist()) == (0, [4, 8, 12])


def test_a_group_enters_with_a_block_for_each_sibling() -> None:
    """2 for the prompt and 1 for each of two siblings: 4, and then the watermark."""
    scheduler = scheduler_over(6, 1)
    outside = scheduler.bm.pool.take_many(2)
    scheduler.add("G", 5, siblings=["S", "T"])
    assert run(scheduler).prefills == []
    assert scheduler.why("G") == (Reason.WATERMARK, 4, 4, 0, 1)
    scheduler.bm.pool.release_many(outside[:1])
    assert run(scheduler).prefills == [("G", 0, 5)]
    scheduler.bm.pool.release_many(outside[1:])


def test_places_are_kept_for_siblings_that_are_still_to_come() -> None:
    """Three may run: the group takes all places with its first chunk."""
    scheduler = scheduler_over(8, token_budget=4, max_running=3)
    scheduler.add("G", 5, siblings=["S", "T"])
    scheduler.add("B", 1)
    for running in (["G"], ["G", "S", "T"]):
        assert run(scheduler).stats.waiting == 1
        assert scheduler.running == running
        assert scheduler.why("B").reason is Reason.MAX_RUNNING
    scheduler.finish("S")
    assert run(scheduler).prefills == [("B", 0, 1)]
    assert scheduler.running == ["G", "T", "B"]


def test_a_group_waits_for_places_for_all_of_it() -> None:
    scheduler = scheduler_over(8, max_running=3)
    for seq in "AB":
        scheduler.add(seq, 1)
    run(scheduler)
    scheduler.add("G", 1, siblings=["S"])
    assert run(scheduler).prefills == []
    scheduler.finish("A")
    assert run(scheduler).prefills == [("G", 0, 1)]


def test_a_group_keeps_its_resources_until_the_last_has_ended() -> None:
    slots = Slots("state slots", 3)
    scheduler = scheduler_over(8, resources=[slots])
    scheduler.add("G", 1, siblings=["S"])
    run(scheduler)
    assert slots.available == 1
    scheduler.finish("G")
    assert slots.available == 1
    scheduler.finish("S")
    assert slots.available == 3


def test_what_is_sampled_is_in_the_order_of_the_groups() -> None:
    scheduler = scheduler_over(12)
    scheduler.add("A", 1)
    run(scheduler)
    scheduler.add("G", 1, siblings=["S"])
    scheduler.add("H", 1, siblings=["T"])
    step = run(scheduler)
    assert (step.completed, step.sampled) == (["G", "H"], ["A", "G", "S", "H", "T"])


def test_each_goes_on_from_the_prompt_with_a_token_of_its_own() -> None:
    scheduler = scheduler_over(8, prefix_caching=True)
    scheduler.add("G", tokens=[1, 2, 3, 4, 5], siblings=["S"])
    run(scheduler, [10, 20])
    run(scheduler, [11, 21])
    run(scheduler, [12, 22])
    assert scheduler.bm.tokens("G").tolist() == [1, 2, 3, 4, 5, 10, 11]
    assert scheduler.bm.tokens("S").tolist() == [1, 2, 3, 4, 5, 20, 21]


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_each_has_the_limit_of_the_request(max_tokens: int) -> None:
    scheduler = scheduler_over(8)
    scheduler.add("G", 5, siblings=["S", "T"], max_tokens=max_tokens)
    step = plan(scheduler)
    assert step.sampled == ([] if max_tokens == 0 else ["G", "S", "T"])
    if max_tokens == 2:
        assert report(scheduler, step) == []
        step = plan(scheduler)
    assert report(scheduler, step) == ["G", "S", "T"]
    assert (scheduler.counters.finished, scheduler.counters.sampled_tokens) == (3, 3 * max_tokens)
    assert scheduler.bm.num_available == 8


@pytest.mark.parametrize(
    ("siblings", "said"),
    [
        (["S", "S"], "siblings: 'S' comes twice"),
        (["G"], "siblings: 'G' comes twice"),
        (["S", "A"], "siblings: 'A' is a live sequence already"),
    ],
)
def test_ids_that_are_taken_are_refused(siblings: list[str], said: str) -> None:
    scheduler = scheduler_over(8)
    scheduler.add("A", 1)
    run(scheduler)
    with pytest.raises(ValueError, match=said):
        scheduler.add("G", 1, siblings=siblings)
    assert not scheduler.waiting


def test_an_id_that_was_taken_meanwhile_is_left_out_and_the_others_begin() -> None:
    scheduler = scheduler_over(8, token_budget=4)
    scheduler.add("G", 5, siblings=["S", "T"])
    run(scheduler)
    scheduler.bm.allocate("S", 1)
    step = run(scheduler)
    assert (step.forks, step.sampled) == ([("G", "T")], ["G", "T"])
    assert step.rejected == {"S": (Reason.LIVE_ID, 0, 0, 0, 0)}
    assert run(scheduler) == ["G", "T"]


# --- Beams ---------------------------------------------------------------------------------


def beams(**options: Any) -> Scheduler:
    """They share a prompt of 5 tokens. The next step writes 10 for "G" and 20 for "S"."""
    scheduler = scheduler_over(8, prefix_caching=True, **options)
    scheduler.add("G", tokens=[1, 2, 3, 4, 5], siblings=["S"])
    run(scheduler, [10, 20])
    return scheduler


def test_a_beam_goes_on_from_another_with_the_token_that_was_chosen_for_it() -> None:
    scheduler = beams()
    step = run(scheduler, [11, 21], parents={"S": "G"})
    assert step.copies.tolist() == [[1, 2]]
    assert (table(scheduler, "G"), table(scheduler, "S")) == ([0, 2], [0, 2])
    assert (scheduler.bm.ref[1], scheduler.bm.ref[2]) == (0, 2)
    step = run(scheduler, [12, 22])
    assert step.copies.tolist() == [[2, 3]], "one of the two copies what both go on from"
    assert scheduler.bm.tokens("G").tolist() == [1, 2, 3, 4, 5, 10, 11]
    assert scheduler.bm.tokens("S").tolist() == [1, 2, 3, 4, 5, 10, 21]


def test_beams_may_change_places() -> None:
    scheduler = beams()
    run(scheduler, [11, 21], parents={"S": "G", "G": "S"})
    assert (table(scheduler, "G"), table(scheduler, "S")) == ([0, 1], [0, 2])
    run(scheduler, [12, 22])
    assert scheduler.bm.tokens("G").tolist() == [1, 2, 3, 4, 5, 20, 11]
    assert scheduler.bm.tokens("S").tolist() == [1, 2, 3, 4, 5, 10, 21]


def test_a_beam_may_go_on_from_one_that_ends_with_this_step() -> None:
    scheduler = beams()
    step = plan(scheduler)
    assert report(scheduler, step, [11, 21], parents={"S": "G"}, finished=["G"]) == ["G"]
    assert (scheduler.running, table(scheduler, "S"), scheduler.bm.ref[2]) == (["S"], [0, 2], 1)
    run(scheduler, [22])
    assert scheduler.bm.tokens("S").tolist() == [1, 2, 3, 4, 5, 10, 21]


def test_a_beam_that_goes_on_from_one_of_unknown_tokens_publishes_nothing_more() -> None:
    """In the second step "S" finds no block, and nobody tells what "G" samples.

    So of "G" 5 tokens are known, and of what goes on from it no more, whatever "S" sampled.
    """
    scheduler = scheduler_over(4, prefix_caching=True)
    scheduler.add("G", tokens=[1, 2, 3, 4], siblings=["S"])
    run(scheduler, [10, 20])
    outside = scheduler.bm.pool.take_many(2)
    step = run(scheduler)
    assert (step, step.stalled) == (["G"], ["S"])
    scheduler.bm.pool.release_many(outside)
    run(scheduler, [12, 21], parents={"S": "G"})
    run(scheduler, [13, 22])
    for seq in "GS":
        assert scheduler.bm.lens[seq] == 7
        assert scheduler.bm.tokens(seq).tolist() == [1, 2, 3, 4, 10]


def test_beams_that_are_still_computed_again_do_not_move() -> None:
    scheduler = preempted(steps=5, token_budget=8)
    scheduler.finish("old")
    run(scheduler)
    step = plan(scheduler)
    assert step.prefills == [("G", 8, 4), ("S", 8, 3)]
    with pytest.raises(ValueError, match="'S' is no running beam beside 'G'"):
        scheduler.update(step, parents={"G": "S"})
    assert not step.is_updated


def test_beams_on_their_way_to_host_memory_do_not_move() -> None:
    scheduler = scheduler_over(7, host=BlockManager(8, SIZE))
    scheduler.add("old", 3)
    scheduler.add("G", 9, siblings=["S"])
    run_steps(scheduler, 4)
    step = plan(scheduler)
    assert step.swapped_out == ["G", "S"]
    with pytest.raises(ValueError, match="'G' is no running beam beside 'S'"):
        scheduler.update(step, parents={"S": "G"})
    assert not step.is_updated
    report(scheduler, step)
    assert scheduler.swapped == ["G", "S"]


def test_a_beam_that_is_gone_goes_on_from_nobody() -> None:
    scheduler = scheduler_over(8)
    scheduler.add("G", 5, siblings=["S", "T"])
    run(scheduler)
    step = plan(scheduler)
    scheduler.abort("S")
    with pytest.raises(ValueError, match="'S' is no running beam beside 'T'"):
        scheduler.update(step, parents={"T": "S"})
    report(scheduler, step, parents={"S": "G", "T": "G"})
    assert table(scheduler, "T") == table(scheduler, "G")


@pytest.mark.parametrize(
    ("parents", "said"),
    [
        ({"S": "A"}, "'A' is no running beam beside 'S'"),
        ({"S": "G", "A": "G"}, "'G' is no running beam beside 'A'"),
        ({"S": "nobody"}, "'nobody' is no running beam beside 'S'"),
    ],
)
def test_beams_move_within_their_group_only(parents: dict[Any, Any], said: str) -> None:
    scheduler = beams()
    scheduler.add("A", tokens=[7])
    step = plan(scheduler)
    with pytest.raises(ValueError, match=said):
        scheduler.update(step, parents=parents)
    assert not step.is_updated
    assert (table(scheduler, "G"), table(scheduler, "S")) == ([0, 2], [0, 1])
    report(scheduler, step)


def test_beams_need_steps_that_wait_for_their_results() -> None:
    scheduler = beams(in_flight=1)
    with pytest.raises(ValueError, match="parents: beams cannot be moved while the next step"):
        scheduler.update(plan(scheduler), parents={"S": "G"})


# --- How they yield ------------------------------------------------------------------------


def short_of_blocks(
    num_blocks: int, steps: int = 4, siblings: tuple[str, ...] = ("S",), **options: Any
) -> Scheduler:
    """Until "G" and its siblings have grown from 9 tokens to 12, and "old" from 3 to 6.

    "old" has 2 blocks. They share 2 and have 1 each; in the next step each needs another.
    """
    scheduler = scheduler_over(num_blocks, **options)
    scheduler.add("old", 3)
    scheduler.add("G", 9, siblings=siblings)
    run_steps(scheduler, steps)
    assert [scheduler.bm.lens[seq] for seq in "GS"] == [12, 12]
    assert scheduler.bm.pool.num_used == 2 + 2 + 1 + len(siblings)
    return scheduler


def preempted(**options: Any) -> Scheduler:
    """Each had sampled a fourth token, which was not written: 13 tokens are known."""
    scheduler = short_of_blocks(7, **options)
    step = run(scheduler)
    assert (step, step.preempted) == (["old"], ["G", "S"])
    assert list(scheduler.waiting) == [("G", 13)]
    return scheduler


def test_a_group_yields_as_one_and_comes_back_as_one() -> None:
    """It needs 4 blocks, and 2 more for "S", which shares the 2 full ones of the prompt.

    They are computed once: those of "S" after the first 8 tokens are there. "G" waits for it
    with its last token, so that they go on together.
    """
    scheduler = preempted()
    assert scheduler.why("G") == (Reason.BLOCKS, 6, 5, 0, 0)
    scheduler.finish("old")
    step = run(scheduler)
    assert (step.prefills, step.completed) == ([("G", 0, 12)], [])
    assert scheduler.running == ["G", "S"]
    step = run(scheduler)
    assert (step, step.prefills) == ([], [("G", 12, 1), ("S", 8, 5)])
    assert step.completed == ["G", "S"]
    assert table(scheduler, "G")[:2] == table(scheduler, "S")[:2]
    assert scheduler.bm.pool.num_used == 6
    assert run(scheduler) == ["G", "S"]
    counters = scheduler.counters
    assert (counters.preemptions_recompute, counters.admission_blocked_blocks) == (2, 0)
    assert counters.prefill_tokens == 3 + 9 + 13 + 5
    assert counters.recomputed_tokens == 12 + 4
    assert counters.sampled_tokens == (1 + 4) + 2 * 4 + 2 + 2


def test_a_group_comes_back_in_chunks_none_before_what_it_reads() -> None:
    scheduler = preempted(steps=5, token_budget=8)
    scheduler.finish("old")
    prefills = [run(scheduler).prefills for _ in range(3)]
    first, second, third = prefills
    assert (first, second) == ([("G", 0, 8)], [("G", 8, 4), ("S", 8, 3)])
    assert third == [("G", 12, 1), ("S", 11, 2)]
    assert run(scheduler) == ["G", "S"]


def test_each_of_a_group_comes_back_with_its_own_tokens() -> None:
    """Three blocks of "G" are still cached. "S" shares two, and computes its last 5 tokens."""
    scheduler = scheduler_over(7, prefix_caching=True)
    scheduler.add("old", tokens=[50, 51, 52])
    scheduler.add("G", tokens=range(1, 10), siblings=["S"])
    for number in range(4):
        run(scheduler, [60 + number, 10 + number, 20 + number])
    assert run(scheduler, [64]).preempted == ["G", "S"]
    scheduler.finish("old")
    step = run(scheduler, [14, 24])
    assert step.prefills == [("G", 12, 1), ("S", 8, 5)]
    run(scheduler, [15, 25])
    prompt = list(range(1, 10))
    assert scheduler.bm.tokens("G").tolist() == [*prompt, 10, 11, 12, 13, 14]
    assert scheduler.bm.tokens("S").tolist() == [*prompt, 20, 21, 22, 23, 24]
    assert scheduler.counters.recomputed_tokens == 4


def test_of_what_is_computed_again_only_what_is_computed_is_published() -> None:
    """Four tokens a step: in its return "G" gets 1, which it leaves, so of 5 "S" gets 3."""
    scheduler = scheduler_over(7, prefix_caching=True, token_budget=4)
    scheduler.add("old", tokens=[50, 51, 52])
    scheduler.add("G", tokens=range(1, 10), siblings=["S"])
    sampled: dict[Hashable, int] = {"old": 60, "G": 10, "S": 20}

    def run_telling() -> Step:
        step = plan(scheduler)
        tokens = [sampled[seq] for seq in step.sampled]
        for seq in step.sampled:
            sampled[seq] += 1
        report(scheduler, step, tokens)
        return step

    steps = [run_telling() for _ in range(8)]
    assert steps[3].completed == ["G"]
    assert steps[7].preempted == ["G", "S"]
    scheduler.finish("old")
    text = [*range(1, 10), 20, 21, 22, 23]
    assert run_telling().prefills == [("S", 8, 3)]
    assert (scheduler.bm.published("S"), scheduler.bm.match(text)) == (2, 8)
    assert run_telling().prefills == [("G", 12, 1), ("S", 11, 2)]
    assert (scheduler.bm.published("S"), scheduler.bm.match(text)) == (3, 12)


def test_a_group_comes_back_when_there_is_room_for_the_next_tokens_as_well() -> None:
    """Each has 11 tokens and sampled the twelfth: 4 blocks and 2 more, of which 5 are there."""
    scheduler = scheduler_over(7)
    outside = scheduler.bm.pool.take_many(2)
    scheduler.add("old", 2)
    scheduler.add("G", 9, siblings=["S"])
    assert run_steps(scheduler, 4).preempted == ["G", "S"]
    scheduler.bm.pool.release_many(outside)
    assert list(scheduler.waiting) == [("G", 12)]
    assert scheduler.why("G") == (Reason.BLOCKS, 6, 5, 0, 0)


def test_a_group_comes_back_when_there_are_places_for_all_of_it() -> None:
    """Two may run. Who is more important pushes both out, though it takes one place."""
    scheduler = scheduler_over(8, max_running=2, order=Priority(), victim=LowestPriority())
    scheduler.add("G", 1, siblings=["S"])
    run(scheduler)
    scheduler.add("H", 1, priority=1)
    step = run(scheduler)
    assert (step.preempted, step.prefills) == (["G", "S"], [("H", 0, 1)])
    run(scheduler)
    assert (scheduler.running, scheduler.why("G").reason) == (["H"], Reason.MAX_RUNNING)
    scheduler.finish("H")
    assert run(scheduler).prefills[0] == ("G", 0, 2)
    assert scheduler.running == ["G", "S"]


def test_a_group_that_is_interrupted_in_its_prompt_still_has_its_siblings_to_come() -> None:
    scheduler = scheduler_over(5, token_budget=8)
    scheduler.add("old", 4)
    scheduler.add("G", 12, siblings=["S"])
    assert run(scheduler).prefills == [("old", 0, 4), ("G", 0, 4)]
    outside = scheduler.bm.pool.take_many(1)
    step = run(scheduler)
    assert (step, step.preempted) == (["old"], ["G"])
    scheduler.bm.pool.release_many(outside)
    scheduler.finish("old")
    assert run(scheduler).prefills == [("G", 0, 8)]
    step = run(scheduler)
    assert (step.prefills, step.forks) == ([("G", 8, 4)], [("G", "S")])
    assert run(scheduler) == ["G", "S"]


# --- The end of one of them, at every stage ------------------------------------------------


def waiting() -> tuple[Scheduler, Step | None]:
    scheduler = scheduler_over(8, host=BlockManager(8, SIZE))
    scheduler.add("G", 9, siblings=["S"])
    return scheduler, None


def in_the_prompt() -> tuple[Scheduler, Step | None]:
    scheduler = scheduler_over(8, host=BlockManager(8, SIZE), token_budget=4)
    scheduler.add("G", 9, siblings=["S"])
    run(scheduler)
    return scheduler, None


def decoding() -> tuple[Scheduler, Step | None]:
    scheduler = short_of_blocks(9, host=BlockManager(8, SIZE))
    scheduler.finish("old")
    step = plan(scheduler)
    assert step == ["G", "S"]
    return scheduler, step


def waiting_again() -> tuple[Scheduler, Step | None]:
    scheduler = preempted(host=BlockManager(1, SIZE))
    scheduler.finish("old")
    return scheduler, None


def computed_again() -> tuple[Scheduler, Step | None]:
    """The first has computed 8 of 13 tokens, the other nothing yet."""
    scheduler = preempted(steps=5, host=BlockManager(1, SIZE), token_budget=8)
    scheduler.finish("old")
    assert run(scheduler).prefills == [("G", 0, 8)]
    return scheduler, None


def leaving() -> tuple[Scheduler, Step | None]:
    """One block of each is copied; the two that they share stay."""
    scheduler = short_of_blocks(7, host=BlockManager(8, SIZE))
    step = plan(scheduler)
    assert (step.swapped_out, len(step.swap_out)) == (["G", "S"], 2)
    scheduler.finish("old")
    return scheduler, step


def away() -> tuple[Scheduler, Step | None]:
    scheduler, step = leaving()
    assert step is not None
    report(scheduler, step)
    assert (scheduler.swapped, scheduler.bm.pool.num_used) == (["G", "S"], 2)
    return scheduler, None


def returning() -> tuple[Scheduler, Step | None]:
    scheduler, _ = away()
    step = plan(scheduler)
    assert (step.swapped_in, len(step.swap_in)) == (["G", "S"], 2)
    return scheduler, step


STAGES = [waiting, in_the_prompt, decoding, waiting_again, computed_again, leaving, away, returning]


@pytest.mark.parametrize("one", ["G", "S"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_is_aborted_and_the_other_goes_on(
    stage: Callable[[], tuple[Scheduler, Step | None]], one: str
) -> None:
    """Before they have come apart, the first takes the other along."""
    scheduler, step = stage()
    host = scheduler._swapping.host
    assert host is not None
    assert scheduler.abort(one)
    assert not scheduler.abort(one)
    scheduler.bm.check()
    host.host.check()
    if step is not None:
        report(scheduler, step)
    other = "S" if one == "G" else "G"
    begun = stage not in (waiting, in_the_prompt)
    left = [other] if begun or one == "S" else []
    run_steps(scheduler, 5)
    assert (scheduler.running, list(scheduler.waiting), scheduler.swapped) == (left, [], [])
    assert run(scheduler) == left
    if left:
        length = scheduler.bm.lens[other]
        assert scheduler.bm.pool.num_used == -(-length // SIZE), "nothing of the one is left"
        assert scheduler.finish(other)
    assert (scheduler.bm.pool.num_used, host.host.pool.num_used, len(host.host)) == (0, 0, 0)
    assert scheduler.counters.aborted == 1


def test_when_the_first_has_gone_the_others_come_back_with_all_their_tokens() -> None:
    """4 blocks for the next, and 2 more for the last, which goes on sharing 8 tokens."""
    scheduler = short_of_blocks(8, siblings=("S", "T"))
    assert run(scheduler).preempted == ["G", "S", "T"]
    scheduler.abort("G")
    assert list(scheduler.waiting) == [("S", 13)]
    assert scheduler.why("S") == (Reason.FITS, 6, 6, 0, 0)
    assert run(scheduler).prefills == [("S", 0, 12)]
    scheduler.finish("old")
    assert run(scheduler).prefills == [("S", 12, 1), ("T", 8, 5)]
    assert run(scheduler) == ["S", "T"]
    assert scheduler.counters.recomputed_tokens == 12 + 4


def test_one_that_ends_leaves_the_shared_blocks_to_the_other() -> None:
    """Two shared blocks of the prompt, and one of its own for each."""
    scheduler, step = decoding()
    assert step is not None
    report(scheduler, step)
    assert scheduler.bm.pool.num_used == 2 + 2 + 2
    scheduler.finish("G")
    assert scheduler.bm.pool.num_used == 4
    assert table(scheduler, "S")[:2] == [1, 2]


def test_a_copy_that_fails_for_one_fails_for_the_group() -> None:
    scheduler, step = leaving()
    assert step is not None
    report(scheduler, step, swap_failed=["S"])
    assert (scheduler.running, scheduler.swapped) == (["G", "S"], [])
    assert scheduler.bm.pool.num_used == 4
    assert run(scheduler) == ["G", "S"]

    scheduler, step = returning()
    assert step is not None
    report(scheduler, step, swap_failed=["G"])
    assert (scheduler.running, scheduler.swapped) == ([], ["G", "S"])
    assert run(scheduler).swapped_in == ["G", "S"]
    assert run(scheduler) == ["G", "S"]
