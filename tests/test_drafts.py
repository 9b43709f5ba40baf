"""Speculative tokens: their slots, what is kept of them, and what of that is published.

With k drafts a decode writes the last token and k guesses. Of these the first ones may be
accepted, and one token more is sampled after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_support import plan, report, run, scheduler_over, table

from kvcore import Scheduler, Step


def counts_of(step: Step) -> list[int]:
    assert step.counts is not None
    counts: list[int] = step.counts.tolist()
    return counts


# --- Slots ---------------------------------------------------------------------------------


def test_what_a_step_has_handed_out_stays_as_it_was() -> None:
    scheduler = scheduler_over(8, draft_tokens=2)
    scheduler.add("A", 3)
    scheduler.add("B", 4)
    run(scheduler)
    step = plan(scheduler)
    lengths, stats = step.lengths, step.stats
    report(scheduler, step, rejected=[2, 1])
    assert lengths.tolist() == [6, 7]
    assert step.stats == stats


def test_every_decode_gets_slots_for_its_drafts_and_gives_back_the_rejected() -> None:
    """Block 0 has the 3 tokens of "A", block 1 the 4 of "B". They take blocks 2 and 3.

    Both drafts of "A" are rejected: block 2 goes to the back of the free ones.
    """
    scheduler = scheduler_over(8, draft_tokens=2)
    scheduler.add("A", 3)
    scheduler.add("B", 4)
    run(scheduler)
    step = plan(scheduler)
    assert (step, counts_of(step), step.lengths.tolist()) == (["A", "B"], [3, 3], [6, 7])
    assert step.slots.tolist() == [3, 8, 9, 12, 13, 14]
    assert (step.stats.draft_tokens, step.stats.decode_kv_tokens) == (4, 13)
    assert report(scheduler, step, rejected=[2, 1]) == []
    assert [scheduler.bm.lens[seq] for seq in "AB"] == [4, 6]
    assert (table(scheduler, "A"), table(scheduler, "B")) == ([0], [1, 3])
    assert list(scheduler.bm.free) == [4, 5, 6, 7, 2]

    step = plan(scheduler)
    assert (counts_of(step), step.lengths.tolist()) == ([3, 3], [7, 9])
    assert step.slots.tolist() == [16, 17, 18, 14, 15, 20]
    report(scheduler, step)
    assert [scheduler.bm.lens[seq] for seq in "AB"] == [7, 9], "none are rejected by default"
    counters = scheduler.counters
    assert (counters.draft_tokens, counters.rejected_draft_tokens) == (8, 3)
    assert counters.sampled_tokens == 2 + (1 + 2) + (3 + 3)


@pytest.mark.parametrize(("rejected", "blocks"), [(0, 3), (2, 3), (3, 2), (6, 2), (7, 1)])
def test_drafts_may_span_blocks(rejected: int, blocks: int) -> None:
    """Positions 3 to 10: the last of block 0, all of block 1, three of block 2."""
    scheduler = scheduler_over(8, draft_tokens=7)
    scheduler.add("A", 3)
    run(scheduler)
    step = plan(scheduler)
    assert step.slots.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    report(scheduler, step, rejected=[rejected])
    assert (scheduler.bm.lens["A"], table(scheduler, "A")) == (11 - rejected, [0, 1, 2][:blocks])
    assert plan(scheduler).lengths.tolist() == [19 - rejected]


def test_samples_write_their_drafts_into_blocks_of_their_own() -> None:
    """They share block 1, of which 1 token is written. One copies it, the other stays."""
    scheduler = scheduler_over(8, draft_tokens=2)
    scheduler.add("G", 5, siblings=["S"])
    run(scheduler)
    step = run(scheduler, rejected=[2, 0])
    assert (step, step.copies.tolist()) == (["G", "S"], [[1, 2]])
    assert step.slots.tolist() == [9, 10, 11, 5, 6, 7]
    assert [scheduler.bm.lens[seq] for seq in "GS"] == [6, 8]


def test_drafts_count_as_tokens_of_the_step() -> None:
    """Of 10 tokens 2 sequences take 3 each. Only 3 may run, for each may need 3."""
    scheduler = scheduler_over(20, token_budget=10, draft_tokens=2)
    scheduler.add("A", 1)
    scheduler.add("B", 1)
    run(scheduler)
    scheduler.add("C", 9)
    scheduler.add("D", 1)
    step = run(scheduler)
    assert (step, counts_of(step), step.prefills) == (["A", "B"], [3, 3], [("C", 0, 4)])
    assert (scheduler.max_running, scheduler.running) == (3, ["A", "B", "C"])


# --- Limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "counts"),
    [(1, []), (2, [1]), (3, [2]), (5, [4]), (6, [4, 1]), (9, [4, 4]), (10, [4, 4, 1])],
)
def test_no_slot_is_given_past_the_limit(max_tokens: int, counts: list[int]) -> None:
    """The first token comes with the prompt; then up to 4 with every decode."""
    scheduler = scheduler_over(8, draft_tokens=3)
    scheduler.add("A", 4, max_tokens=max_tokens)
    step = plan(scheduler)
    for count in counts:
        assert report(scheduler, step) == []
        step = plan(scheduler)
        assert counts_of(step) == [count]
    assert report(scheduler, step) == ["A"]
    assert scheduler.counters.sampled_tokens == max_tokens
    assert scheduler.counters.draft_tokens == max_tokens - 1 - len(counts)
    assert scheduler.bm.num_available == 8


def test_whoever_has_drafts_rejected_at_its_limit_goes_on() -> None:
    """Six tokens, so 5 are written after the prompt: 1, then 4 of which 1 is rejected, then 1."""
    scheduler = scheduler_over(8, draft_tokens=3)
    scheduler.add("A", 4, max_tokens=6)
    run(scheduler)
    for count, rejected, length in ((4, 3, 5), (4, 1, 8)):
        step = plan(scheduler)
        assert (counts_of(step), report(scheduler, step, rejected=[rejected])) == ([count], [])
        assert scheduler.bm.lens["A"] == length
    step = plan(scheduler)
    assert (counts_of(step), report(scheduler, step, rejected=[0])) == ([1], ["A"])
    counters = scheduler.counters
    assert (counters.sampled_tokens, counters.finished) == (6, 1)
    assert (counters.draft_tokens, counters.rejected_draft_tokens) == (6, 4)


def test_each_has_its_own_limit() -> None:
    scheduler = scheduler_over(8, draft_tokens=3)
    for seq, max_tokens in (("A", 3), ("B", None), ("C", 2)):
        scheduler.add(seq, 4, max_tokens=max_tokens)
    run(scheduler)
    step = plan(scheduler)
    assert (counts_of(step), len(step.slots)) == ([2, 4, 1], 7)
    assert report(scheduler, step, rejected=[1, 3, 0]) == ["C"]
    step = plan(scheduler)
    assert (step, counts_of(step)) == (["A", "B"], [1, 4])
    assert report(scheduler, step) == ["A"]


# --- Shortage ------------------------------------------------------------------------------


def test_drafts_are_given_up_before_anybody_yields() -> None:
    """One block is left. For the next tokens alone only "A" needs one; with drafts both do."""
    scheduler = scheduler_over(3, draft_tokens=2)
    scheduler.add("A", 4)
    scheduler.add("B", 3)
    run(scheduler)
    step = run(scheduler)
    assert (step, step.preempted, step.stalled) == (["A", "B"], [], [])
    assert (counts_of(step), step.slots.tolist()) == ([1, 1], [8, 7])
    step = run(scheduler)
    assert (step, step.preempted, counts_of(step)) == (["A"], ["B"], [1]), "not even one for B"
    step = run(scheduler)
    assert (counts_of(step), step.slots.tolist()) == ([3], [10, 11, 4])


def test_with_one_block_more_they_are_kept() -> None:
    scheduler = scheduler_over(4, draft_tokens=2)
    scheduler.add("A", 4)
    scheduler.add("B", 3)
    run(scheduler)
    assert counts_of(run(scheduler)) == [3, 3]


# --- What is published ---------------------------------------------------------------------


def test_what_was_accepted_is_published_and_nothing_else() -> None:
    """Token 4 is sampled with the prompt. Of three drafts 5 is accepted, and 6 sampled.

    So 4 and 5 are written, and 6 with the next step, in which all three are accepted.
    """
    scheduler = scheduler_over(8, prefix_caching=True, draft_tokens=3)
    bm = scheduler.bm
    scheduler.add("A", tokens=[1, 2, 3])
    run(scheduler, [4])
    assert (bm.known("A"), bm.published("A")) == (3, 0)
    step = plan(scheduler)
    assert bm.match([1, 2, 3, 4, 0]) == 0, "nothing is published before it is settled"
    report(scheduler, step, [5, 6], rejected=[2])
    assert bm.tokens("A").tolist() == [1, 2, 3, 4, 5]
    assert (bm.published("A"), bm.match([1, 2, 3, 4, 0])) == (1, 4)
    run(scheduler, [7, 8, 9, 10], rejected=[0])
    assert bm.tokens("A").tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (bm.published("A"), bm.match([1, 2, 3, 4, 5, 6, 7, 8, 0])) == (2, 8)


def test_a_block_that_only_rejected_drafts_filled_is_not_published() -> None:
    """Positions 3 to 7 are given; without the last draft the second block is not full."""
    scheduler = scheduler_over(8, prefix_caching=True, draft_tokens=4)
    scheduler.add("A", tokens=[1, 2, 3])
    run(scheduler, [4])
    run(scheduler, [5, 6, 7, 8], rejected=[1])
    assert (scheduler.bm.lens["A"], scheduler.bm.published("A")) == (7, 1)
    assert scheduler.bm.match([1, 2, 3, 4, 5, 6, 7, 8, 0]) == 4


def test_tokens_that_nobody_tells_are_not_published_nor_any_after_them() -> None:
    """Token 4 was told before it was written."""
    scheduler = scheduler_over(8, prefix_caching=True, draft_tokens=3)
    scheduler.add("A", tokens=[1, 2, 3])
    run(scheduler, [4])
    run(scheduler, rejected=[2])
    assert (scheduler.bm.lens["A"], scheduler.bm.known("A")) == (5, 4)
    run(scheduler, [7, 8, 9, 10], rejected=[0])
    assert (scheduler.bm.lens["A"], scheduler.bm.known("A")) == (9, 4)
    assert (scheduler.bm.published("A"), scheduler.bm.match([1, 2, 3, 4, 5])) == (1, 4)


def three_results(scheduler: Scheduler) -> Step:
    """Two decode with two drafts each, and "C" completes its prompt."""
    scheduler.add("A", tokens=[1])
    scheduler.add("B", tokens=[7])
    run(scheduler, [2, 8])
    scheduler.add("C", tokens=[50, 51])
    step = plan(scheduler)
    assert (step, step.sampled, counts_of(step)) == (["A", "B"], ["A", "B", "C"], [3, 3])
    return step


def test_tokens_are_parallel_to_what_each_has_got() -> None:
    scheduler = scheduler_over(8, prefix_caching=True, draft_tokens=2)
    step = three_results(scheduler)
    report(scheduler, step, [3, 4, 9, 10, 11, 52], rejected=[1, 0])
    run(scheduler, [5, 12, 53], rejected=[2, 2, 2])
    written = {"A": [1, 2, 3, 4], "B": [7, 8, 9, 10, 11], "C": [50, 51, 52]}
    for seq, tokens in written.items():
        assert scheduler.bm.tokens(seq).tolist() == tokens


def test_the_tokens_of_one_that_is_gone_are_passed_over() -> None:
    scheduler = scheduler_over(8, prefix_caching=True, draft_tokens=2)
    step = three_results(scheduler)
    scheduler.abort("A")
    report(scheduler, step, [3, 4, 9, 10, 11, 52], rejected=[1, 0])
    run(scheduler, [12, 53], rejected=[2, 2])
    for seq, tokens in {"B": [7, 8, 9, 10, 11], "C": [50, 51, 52]}.items():
        assert scheduler.bm.tokens(seq).tolist() == tokens
    counters = scheduler.counters
    assert (counters.ignored_results, counters.sampled_tokens) == (1, 2 + 3 + 1 + 2)
    assert (counters.draft_tokens, counters.rejected_draft_tokens) == (2 + 4, 4)


# --- Reports that do not fit ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "error", "said"),
    [
        ({"rejected": [0]}, ValueError, r"rejected must have 2 entries, .* got shape \(1,\)"),
        ({"rejected": [[0, 0]]}, ValueError, r"got shape \(1, 2\)"),
        ({"rejected": [0, 3]}, ValueError, "entry 1 must be between 0 and 2, got 3"),
        ({"rejected": [-1, 0]}, ValueError, "entry 0 must be between 0 and 2, got -1"),
        ({"rejected": [0.5, 0]}, TypeError, "rejected"),
        ({"rejected": [1, 1], "tokens": [0] * 6}, ValueError, "tokens must have 5 entries"),
        ({"tokens": [0] * 3}, ValueError, "tokens must have 7 entries"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    results: dict[str, Any], error: type[Exception], said: str
) -> None:
    scheduler = scheduler_over(8, prefix_caching=True, draft_tokens=2)
    step = three_results(scheduler)
    before = scheduler.counters.as_dict()
    with pytest.raises(error, match=said):
        scheduler.update(step, **results)
    scheduler.bm.check()
    assert scheduler.counters.as_dict() == before
    assert [scheduler.bm.lens[seq] for seq in "ABC"] == [4, 4, 2]
    assert report(scheduler, step, [0] * 5, rejected=np.array([1, 1])) == []
    assert [scheduler.bm.lens[seq] for seq in "ABC"] == [3, 3, 2]


def test_drafts_need_steps_that_wait_for_their_results() -> None:
    with pytest.raises(ValueError, match="draft_tokens is 2 with in_flight 1"):
        scheduler_over(8, draft_tokens=2, in_flight=1)
    with pytest.raises(ValueError, match=r"token_budget is 11, too little for 4 .* of 3 tokens"):
        scheduler_over(8, draft_tokens=2, max_running=4, token_budget=11)
    with pytest.raises(ValueError, match="draft_tokens needs a token_budget, got 2"):
        scheduler_over(8, draft_tokens=2, token_budget=None)
