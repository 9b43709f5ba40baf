"""What an engine step plans and what its report does: small cases, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import (
    plan,
    report,
    run,
    run_steps,
    scheduler_of_size,
    scheduler_over,
    table,
)

from kvcore import BlockManager, Priority, Reason, Request, RequestRefused, Scheduler
from kvcore.chunking import share_budget

# --- Prompts in chunks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "remaining", "shares"),
    [
        (8, [20], [8]),
        (8, [20, 2], [6, 2]),  # 4 for the oldest, 2 for the short one, 2 are left
        (8, [20, 3, 9], [3, 3, 2]),
        (9, [20, 20, 20], [9, 0, 0]),
        (2, [5, 1, 1, 1], [1, 1, 0, 0]),
        (100, [5, 7], [5, 7]),
        (0, [5, 1], [0, 0]),
        (3, [], []),
    ],
)
def test_the_oldest_gets_an_equal_share_and_the_rest_goes_to_the_shortest(
    budget: int, remaining: list[int], shares: list[int]
) -> None:
    assert share_budget(budget, remaining) == shares


@pytest.mark.parametrize(
    ("budget", "prompt", "chunks"),
    [
        (64, 23, [23]),
        (8, 8, [8]),
        (10, 23, [8, 8, 7]),
        (6, 11, [4, 4, 3]),
        (3, 6, [3, 3]),  # none of them reaches the end of the first block
        (3, 11, [3, 1, 3, 1, 3]),
    ],
)
def test_a_chunk_ends_with_a_block_unless_it_would_be_empty(
    budget: int, prompt: int, chunks: list[int]
) -> None:
    scheduler = scheduler_over(8, token_budget=budget)
    scheduler.add("A", prompt)
    start = 0
    for count in chunks:
        step = run(scheduler)
        assert step.prefills == [("A", start, count)]
        start += count
        assert step.completed == (["A"] if start == prompt else [])
        assert step == []
    assert run(scheduler) == ["A"]


def test_a_prompt_has_all_its_blocks_from_its_first_chunk_on() -> None:
    scheduler = scheduler_over(8, token_budget=4)
    scheduler.add("A", 23)
    assert run(scheduler).prefills == [("A", 0, 4)]
    assert (scheduler.bm.lens["A"], scheduler.bm.num_available) == (23, 2)


def test_the_whole_prompt_must_fit_though_the_step_computes_only_a_part() -> None:
    scheduler = scheduler_over(5, token_budget=4)
    scheduler.add("A", 4)
    scheduler.add("B", 17)
    assert run(scheduler).prefills == [("A", 0, 4)]
    assert scheduler.why("B")[:3] == (Reason.BLOCKS, 5, 4)
    scheduler.finish("A")
    assert run(scheduler).prefills == [("B", 0, 4)]


def test_decodes_come_first_and_prompts_get_what_is_left() -> None:
    """Of 8 tokens two decode, so 6 are left: a block of the prompt in every step."""
    scheduler = scheduler_over(20, token_budget=8)
    scheduler.add("A", 1)
    scheduler.add("B", 1)
    run(scheduler)
    scheduler.add("C", 20)
    for start in (0, 4, 8, 12, 16):
        step = run(scheduler)
        assert (step, step.prefills) == (["A", "B"], [("C", start, 4)])
        assert step.completed == (["C"] if start == 16 else [])
    assert run(scheduler) == ["A", "B", "C"]


def test_with_the_smallest_budget_a_prompt_still_gets_on_in_every_step() -> None:
    scheduler = scheduler_over(20, token_budget=3, max_running=3)
    scheduler.add("A", 1)
    scheduler.add("B", 1)
    run(scheduler)
    scheduler.add("C", 4)
    for start in range(4):
        step = run(scheduler)
        assert (step, step.prefills) == (["A", "B"], [("C", start, 1)])


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one_nor_wait_for_it() -> None:
    """Alone the long one gets 8 tokens, and then half of them."""
    scheduler = scheduler_over(20, token_budget=8)
    scheduler.add("long", 40)
    assert run(scheduler).prefills == [("long", 0, 8)]
    for number in range(8):
        scheduler.add(number, 4, max_tokens=1)
        step = run(scheduler)
        assert step.prefills == [("long", 8 + 4 * number, 4), (number, 0, 4)]
        assert step.completed == (["long", number] if number == 7 else [number])


def test_so_many_prompts_may_be_under_way_and_no_more() -> None:
    """The second has its blocks and waits for tokens; the third enters when the first is done."""
    scheduler = scheduler_over(20, token_budget=8, max_partial_prefills=2)
    for seq in "ABC":
        scheduler.add(seq, 20)
    assert run(scheduler).prefills == [("A", 0, 8)]
    assert (scheduler.running, scheduler.counters.admission_blocked_budget) == (["A", "B"], 1)
    assert run(scheduler).prefills == [("A", 8, 8)]
    step = run(scheduler)
    assert (step.prefills, step.completed) == ([("A", 16, 4), ("B", 0, 4)], ["A"])
    assert (scheduler.running, scheduler.counters.admission_blocked_budget) == (["A", "B"], 3)
    step = run(scheduler)
    assert (step, step.prefills) == (["A"], [("B", 4, 4)])
    assert (scheduler.running, scheduler.counters.admission_blocked_budget) == (["A", "B", "C"], 3)


@pytest.mark.parametrize("last", [2, 9])
def test_while_tokens_are_left_prompts_enter_however_many_are_under_way(last: int) -> None:
    scheduler = scheduler_over(20, token_budget=8, max_partial_prefills=1)
    for seq, n_tokens in (("A", 3), ("B", 3), ("C", last), ("D", 1)):
        scheduler.add(seq, n_tokens)
    assert run(scheduler).prefills == [("A", 0, 3), ("B", 0, 3), ("C", 0, 2)]
    assert (scheduler.running, list(scheduler.waiting)) == (["A", "B", "C"], [("D", 1)])


def test_a_chunk_is_published_when_its_step_is_reported_and_not_before() -> None:
    scheduler = scheduler_over(8, prefix_caching=True, token_budget=4, in_flight=1)
    scheduler.add("A", tokens=range(9))
    first, second = plan(scheduler), plan(scheduler)
    assert (first.prefills, second.prefills) == ([("A", 0, 4)], [("A", 4, 4)])
    assert scheduler.bm.match(range(9)) == 0
    report(scheduler, first)
    assert scheduler.bm.match(range(9)) == 4
    report(scheduler, second)
    assert scheduler.bm.match(range(9)) == 8


# --- Tokens that are sampled ---------------------------------------------------------------


def test_who_completes_its_prompt_samples_and_decodes_from_the_next_step_on() -> None:
    scheduler = scheduler_over(4)
    scheduler.add("A", 4)
    step = run(scheduler)
    assert (step, step.completed, step.sampled) == ([], ["A"], ["A"])
    step = run(scheduler)
    assert (step, step.completed, step.sampled) == (["A"], [], ["A"])
    assert (step.slots.tolist(), step.lengths.tolist()) == ([4], [5]), "the first of block 1"
    step = run(scheduler)
    assert (step.slots.tolist(), step.lengths.tolist()) == ([5], [6])


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_max_tokens_are_sampled_and_all_but_the_last_are_written(max_tokens: int) -> None:
    scheduler = scheduler_over(4)
    scheduler.add("A", 5, max_tokens=max_tokens)
    step = plan(scheduler)
    assert step.sampled == ([] if max_tokens == 0 else ["A"])
    for length in range(6, 5 + max_tokens):
        assert report(scheduler, step) == []
        step = plan(scheduler)
        assert (step, step.lengths.tolist()) == (["A"], [length])
    assert report(scheduler, step) == ["A"]
    assert (scheduler.bm.num_available, scheduler.running) == (4, [])
    counters = scheduler.counters
    assert (counters.prefill_tokens, counters.sampled_tokens) == (5, max_tokens)
    assert (counters.finished, counters.ignored_results) == (1, 0)


def test_who_says_that_it_has_finished_leaves_with_that_step() -> None:
    scheduler = scheduler_over(8)
    for seq in "ABC":
        scheduler.add(seq, 1)
    run(scheduler)
    step = plan(scheduler)
    assert report(scheduler, step, finished=["C", "A", "nobody"]) == ["A", "C"]
    assert run(scheduler) == ["B"]
    assert scheduler.counters.finished == 2


def test_who_finishes_at_its_limit_ends_once() -> None:
    scheduler = scheduler_over(8)
    scheduler.add("A", 1, max_tokens=1)
    assert report(scheduler, plan(scheduler), finished=["A", "A"]) == ["A"]
    assert scheduler.counters.finished == 1


def test_who_finishes_in_its_prompt_gives_all_its_blocks_back() -> None:
    scheduler = scheduler_over(8, token_budget=4)
    scheduler.add("A", 9)
    assert report(scheduler, plan(scheduler), finished=["A"]) == ["A"]
    assert scheduler.bm.num_available == 8
    assert (scheduler.counters.prefill_tokens, scheduler.counters.sampled_tokens) == (4, 0)


# --- Results that come late ----------------------------------------------------------------


@pytest.mark.parametrize("verb", ["abort", "finish"])
def test_the_results_of_one_that_is_gone_are_ignored(verb: str) -> None:
    scheduler = scheduler_over(8)
    for seq in "AB":
        scheduler.add(seq, 1)
    first = plan(scheduler)  # both complete their prompts
    assert getattr(scheduler, verb)("A")
    assert report(scheduler, first, finished=["A"]) == []
    second = plan(scheduler)
    assert (second, getattr(scheduler, verb)("B")) == (["B"], True)
    assert report(scheduler, second, finished=["B"]) == []
    assert not getattr(scheduler, verb)("A")
    counters = scheduler.counters
    assert (counters.sampled_tokens, counters.ignored_results) == (1, 2)
    assert (counters.aborted, counters.finished) == ((2, 0) if verb == "abort" else (0, 2))
    assert scheduler.bm.num_available == 8


def test_the_results_of_one_that_is_preempted_meanwhile_are_ignored() -> None:
    """Both need a second block, and there is none. "A" waits for that of "B".

    It comes when the empty second step has passed. What "B" sampled is sampled again.
    """
    scheduler = scheduler_over(2, in_flight=1)
    for seq in "AB":
        scheduler.add(seq, 4)
    first, second = plan(scheduler), plan(scheduler)
    assert (second, second.stalled, second.preempted) == ([], ["A"], ["B"])
    assert scheduler.why("A") == (Reason.STALLED, 1, 0, 0, 0)
    assert report(scheduler, first, finished=["B"]) == []
    assert second.is_updated
    counters = scheduler.counters
    assert (counters.sampled_tokens, counters.ignored_results) == (1, 1)
    assert list(scheduler.waiting) == [("B", 4)], "without the token that was ignored"

    third = run(scheduler)
    assert (third, third.slots.tolist(), table(scheduler, "A")) == (["A"], [4], [0, 1])
    scheduler.finish("A")
    assert run(scheduler).prefills == [("B", 0, 4)]
    assert (counters.prefill_tokens, counters.recomputed_tokens) == (12, 4)
    assert (counters.sampled_tokens, counters.ignored_results) == (3, 1)


def test_the_results_of_before_a_preemption_are_ignored_though_it_runs_again() -> None:
    """Blocks that were held outside let it return before the first results are there."""
    scheduler = scheduler_over(5, in_flight=2)
    outside = scheduler.bm.pool.take_many(3)
    for seq in "AB":
        scheduler.add(seq, 4)
    first, second = plan(scheduler), plan(scheduler)
    assert (second, second.preempted) == ([], ["B"])
    scheduler.bm.pool.release_many(outside)
    third = plan(scheduler)
    assert (third, third.prefills) == (["A"], [("B", 0, 4)])
    assert report(scheduler, first, finished=["B"]) == []
    assert scheduler.running == ["A", "B"]
    assert report(scheduler, third, finished=["B"]) == ["B"]
    counters = scheduler.counters
    assert (counters.sampled_tokens, counters.ignored_results) == (1 + 2, 1)


def test_the_results_of_an_id_that_is_used_again_are_those_of_the_one_before() -> None:
    scheduler = scheduler_over(4, in_flight=1)
    scheduler.add("A", 3, max_tokens=1)
    first = plan(scheduler)
    scheduler.abort("A")
    scheduler.add("A", 5, max_tokens=2)
    second = plan(scheduler)
    assert second.prefills == [("A", 0, 5)]
    assert report(scheduler, first, finished=["A"]) == []
    assert (scheduler.running, scheduler.bm.lens["A"]) == (["A"], 5)
    third = plan(scheduler)
    assert (third, report(scheduler, second), report(scheduler, third)) == (["A"], [], ["A"])
    assert (scheduler.counters.sampled_tokens, scheduler.counters.ignored_results) == (2, 1)


# --- Reports -------------------------------------------------------------------------------


def test_a_step_is_reported_once() -> None:
    scheduler = scheduler_over(4)
    scheduler.add("A", 4)
    step = run(scheduler)
    before = scheduler.counters.as_dict()
    assert report(scheduler, step, finished=["A"]) == []
    assert (scheduler.counters.as_dict(), scheduler.running) == (before, ["A"])


def test_steps_are_reported_in_their_order() -> None:
    scheduler = scheduler_over(4, in_flight=1)
    scheduler.add("A", 4, max_tokens=2)
    first, second = plan(scheduler), plan(scheduler)
    with pytest.raises(ValueError, match="step 2 is reported out of order"):
        scheduler.update(second)
    assert scheduler.counters.sampled_tokens == 0
    assert [report(scheduler, step) for step in (first, second)] == [[], ["A"]]


def test_the_step_of_another_scheduler_is_refused() -> None:
    one, other = scheduler_over(4), scheduler_over(4)
    for scheduler in (one, other):
        scheduler.add("A", 4)
    step = plan(one)
    plan(other)
    with pytest.raises(ValueError, match="step 1 is reported out of order, or is of another"):
        other.update(step)
    assert report(one, step, finished=["A"]) == ["A"]
    assert other.running == ["A"]


@pytest.mark.parametrize("step", [None, ["A"], 1])
def test_what_is_no_step_cannot_be_reported(step: Any) -> None:
    with pytest.raises(TypeError, match="step must be a Step, got"):
        scheduler_over(4).update(step)


def test_a_textbook_step_has_nothing_to_report() -> None:
    scheduler = Scheduler(BlockManager(4, 4))
    with pytest.raises(ValueError, match="step: without a token_budget"):
        scheduler.update(scheduler.step())


@pytest.mark.parametrize(
    ("results", "error", "said"),
    [
        ({"tokens": [1]}, ValueError, r"tokens must have 2 entries for step 2, got shape \(1,\)"),
        ({"tokens": [1, 2, 3]}, ValueError, "tokens must have 2 entries"),
        ({"tokens": [[1, 2]]}, TypeError, r"token 0 must be an integer, got \[1, 2\]"),
        ({"tokens": [1, -2]}, ValueError, "token 1 must be between 0 and .*, got -2"),
        ({"tokens": [2**31, 1]}, ValueError, "token 0 must be between 0 and .*, got 2147483648"),
        ({"tokens": [1.5, 2]}, TypeError, "tokens"),
        ({"rejected": [1]}, ValueError, "the step has no drafts"),
        ({"parents": {"A": "B"}}, ValueError, "'B' is no running beam beside 'A'"),
        ({"parents": {"nobody": "A"}}, ValueError, "'A' is no running beam beside 'nobody'"),
    ],
)
def test_what_does_not_fit_the_step_is_refused_and_changes_nothing(
    results: dict[str, Any], error: type[Exception], said: str
) -> None:
    """One decodes and the other completes its prompt: two tokens."""
    scheduler = scheduler_over(4, prefix_caching=True)
    scheduler.add("A", tokens=[1, 2, 3])
    run(scheduler, [4])
    scheduler.add("B", tokens=[5])
    step = plan(scheduler)
    before = scheduler.counters.as_dict()
    with pytest.raises(error, match=said):
        scheduler.update(step, **({"finished": ["A"]} | results))
    assert (scheduler.counters.as_dict(), step.is_updated) == (before, False)
    assert (scheduler.running, scheduler.bm.known("A")) == (["A", "B"], 3)
    assert report(scheduler, step, [6, 7]) == []
    assert scheduler.bm.tokens("A").tolist() == [1, 2, 3, 4]
    assert scheduler.bm.match([1, 2, 3, 4, 6]) == 4


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({"finished": 5}, "finished must be a collection of ids, got 5"),
        ({"finished": [["A"]]}, r"finished must be a collection of ids, got \[\['A'\]\]"),
        ({"swap_failed": 5}, "swap_failed must be a collection of ids, got 5"),
        ({"parents": 5}, "parents must map each beam to the one it goes on from, got 5"),
        ({"parents": "A"}, "parents must map each beam to the one it goes on from, got 'A'"),
    ],
)
def test_what_is_no_collection_is_refused_before_anything_is_settled(
    results: dict[str, Any], said: str
) -> None:
    scheduler = scheduler_over(8)
    scheduler.add("A", 4)
    step = plan(scheduler)
    with pytest.raises(TypeError, match=said):
        scheduler.update(step, **results)
    assert not step.is_updated
    assert report(scheduler, step, finished=["A"]) == ["A"]


def test_a_step_in_which_nothing_runs_needs_no_report() -> None:
    scheduler = scheduler_over(4)
    for number in (1, 2):
        step = plan(scheduler)
        assert (step.number, step.is_empty, step.is_updated) == (number, True, True)
    assert report(scheduler, step) == []


# --- Steps in flight -----------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_so_many_results_may_be_outstanding_when_the_next_step_is_planned(in_flight: int) -> None:
    scheduler = scheduler_over(4, in_flight=in_flight)
    scheduler.add("A", 4)
    steps = [plan(scheduler) for _ in range(in_flight + 1)]
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"step 1 has not been updated, and at most {in_flight}"
        ):
            scheduler.step()
    assert scheduler.bm.lens["A"] == 4 + in_flight
    report(scheduler, steps[0])
    assert plan(scheduler).number == in_flight + 2
    assert scheduler.bm.lens["A"] == 5 + in_flight


def test_steps_are_planned_ahead_of_their_results() -> None:
    scheduler = scheduler_over(4, in_flight=2)
    scheduler.add("A", 4)
    steps = [plan(scheduler) for _ in range(3)]
    assert [list(step) for step in steps] == [[], ["A"], ["A"]]
    assert [step.slots.tolist() for step in steps] == [[], [4], [5]]
    assert scheduler.counters.sampled_tokens == 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_an_aborted_one_held_comes_back_with_the_last_step_that_may_touch_it(
    in_flight: int,
) -> None:
    scheduler = scheduler_over(3, in_flight=in_flight)
    scheduler.add("A", 1)
    scheduler.add("B", 1)
    steps = [plan(scheduler) for _ in range(in_flight + 1)]
    scheduler.abort("B")
    scheduler.bm.check()
    for step in steps:
        assert scheduler.bm.num_available == 1
        report(scheduler, step)
    assert scheduler.bm.num_available == 2


@pytest.mark.parametrize("in_flight", [1, 2])
def test_who_lacks_a_block_that_a_step_in_flight_holds_sits_out_until_it_is_reported(
    in_flight: int,
) -> None:
    """The second step writes into the block of "B": it comes when that step is reported."""
    scheduler = scheduler_over(2, in_flight=in_flight)
    scheduler.add("A", 3)
    scheduler.add("B", 1)
    steps = [plan(scheduler), plan(scheduler)]
    assert list(steps[1]) == ["A", "B"]
    scheduler.abort("B")
    for _ in range(in_flight - 1):
        steps.append(plan(scheduler))
        assert (steps[-1], steps[-1].stalled, steps[-1].preempted) == ([], ["A"], [])
    report(scheduler, steps[0])
    step = plan(scheduler)
    assert (step, step.stalled) == ([], ["A"])
    report(scheduler, steps[1])
    assert scheduler.bm.num_available == 1
    assert run(scheduler).slots.tolist() == [4]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_who_has_asked_for_its_last_token_waits_for_the_results(in_flight: int) -> None:
    """Two tokens: the first with the prompt, the second with a decode, and no third."""
    scheduler = scheduler_over(4, in_flight=in_flight)
    scheduler.add("A", 4, max_tokens=2)
    first, second = plan(scheduler), plan(scheduler)
    assert second == ["A"]
    third = plan(scheduler) if in_flight == 2 else None
    assert report(scheduler, first) == []
    third = third or plan(scheduler)
    assert (third, third.is_empty, third.stalled) == ([], True, [])
    assert (scheduler.running, scheduler.bm.lens["A"]) == (["A"], 5)
    assert report(scheduler, second) == ["A"]
    assert (third.is_updated, scheduler.bm.num_available) == (True, 4)
    assert scheduler.counters.sampled_tokens == 2


@pytest.mark.parametrize(
    ("num_blocks", "prompt", "stalled", "preempted"),
    [
        pytest.param(3, 4, ["A"], ["B"], id="its block is one too few"),
        pytest.param(4, 5, ["A", "B"], [], id="its two blocks suffice"),
    ],
)
def test_who_is_about_to_end_is_not_preempted_but_waited_for(
    num_blocks: int, prompt: int, stalled: list[str], preempted: list[str]
) -> None:
    """The older two need a block each; all tokens of the newest are planned already."""
    scheduler = scheduler_over(num_blocks, in_flight=1)
    scheduler.add("A", 4)
    scheduler.add("B", 4)
    scheduler.add("ends", prompt, max_tokens=1)
    first, second = plan(scheduler), plan(scheduler)
    assert (second, second.stalled, second.preempted) == ([], stalled, preempted)
    assert report(scheduler, first) == ["ends"]
    assert run(scheduler) == stalled


def test_nobody_enters_in_a_step_in_which_blocks_run_short() -> None:
    """The newest gives 2 blocks for the one that is lacking, and "next" is more important."""
    scheduler = scheduler_over(3, order=Priority())
    scheduler.add("old", 4)
    scheduler.add("A", 8)
    run(scheduler)
    scheduler.add("next", 1, priority=1)
    step = run(scheduler)
    assert (step, step.preempted, step.prefills) == (["old"], ["A"], [])
    assert scheduler.bm.num_available == 1
    assert run(scheduler).prefills == [("next", 0, 1)]


# --- Figures -------------------------------------------------------------------------------


def test_the_figures_of_a_step() -> None:
    """Ten tokens a step. In the second C gets 4 of 12 and D its 1; in the third C 4 more."""
    scheduler = scheduler_over(20, token_budget=10, max_running=4)
    scheduler.add("A", 3)
    scheduler.add("B", 6)
    run(scheduler)
    for seq, n_tokens in (("C", 12), ("D", 1), ("E", 1)):
        scheduler.add(seq, n_tokens)
    none = {"draft_tokens": 0, "preempted": 0, "swapped_out": 0, "swapped_in": 0, "stalled": 0}
    none |= {"swapped": 0, "evictable": 0}
    assert run(scheduler).stats._asdict() == none | {
        "num_prefill": 2,
        "prefill_tokens": 5,
        "prefill_kv_tokens": 0,
        "var_prefill_length": 2.25,  # of 4 and 1
        "num_decode": 2,
        "decode_kv_tokens": 11,  # 4 and 7
        "var_decode_kv_tokens": 2.25,
        "running": 4,
        "waiting": 1,
        "free": 13,
        "used": 7,  # 1, 2, 3 and 1
    }
    assert run(scheduler).stats._asdict() == none | {
        "num_prefill": 1,
        "prefill_tokens": 4,
        "prefill_kv_tokens": 4,
        "var_prefill_length": 0.0,
        "num_decode": 3,
        "decode_kv_tokens": 15,  # 5, 8 and 2
        "var_decode_kv_tokens": 6.0,
        "running": 4,
        "waiting": 1,
        "free": 12,
        "used": 8,  # 2, 2, 3 and 1
    }


def test_the_figures_tell_what_is_cached_from_what_is_free() -> None:
    scheduler = scheduler_over(4, prefix_caching=True)
    scheduler.add("A", tokens=range(5), max_tokens=1)
    assert run(scheduler, [9]).stats[-3:] == (2, 0, 2)
    assert run(scheduler).stats[-3:] == (3, 1, 0), "its full block is still cached"
    scheduler.add("B", tokens=range(6))
    stats = run(scheduler, [9]).stats
    assert (stats.prefill_tokens, stats.prefill_kv_tokens) == (2, 4)
    assert stats[-3:] == (2, 0, 2)


def test_the_figures_are_those_of_the_plan_whatever_happens_later() -> None:
    scheduler = scheduler_over(2, in_flight=1)
    for seq in "AB":
        scheduler.add(seq, 4)
    first, second = plan(scheduler), plan(scheduler)
    assert (second.stats.preempted, second.stats.stalled) == (1, 1)
    assert (second.stats.running, second.stats.waiting) == (1, 1)
    before = first.stats
    report(scheduler, first, finished=["A"])
    assert first.stats == before
    assert (before.running, before.free, before.used) == (2, 0, 2)


def test_every_event_is_counted_once() -> None:
    """Three blocks. "X" grows from 4 to 9 tokens; "Y" from 4 to 6, and yields in step 2.

    It has sampled one token, so it returns with 5, of which 4 had been computed. It needs
    2 blocks for those and the next, and finds 1 in steps 3 to 5, none in step 6.
    """
    scheduler = scheduler_over(3)
    scheduler.add("X", 4, max_tokens=6)
    scheduler.add("Y", 4, max_tokens=3)
    run(scheduler)
    step = run(scheduler)
    assert (step, step.preempted) == (["X"], ["Y"])
    run_steps(scheduler, 4)
    assert scheduler.running == []
    assert run(scheduler).prefills == [("Y", 0, 5)]
    assert run(scheduler) == ["Y"]
    assert scheduler.running == []
    counted = {name: number for name, number in scheduler.counters.as_dict().items() if number}
    assert counted == {
        "requests_added": 2,
        "finished": 2,
        "preemptions_recompute": 1,
        "prefill_tokens": 4 + 4 + 5,
        "recomputed_tokens": 4,
        "sampled_tokens": 6 + 3,
        "admission_blocked_blocks": 4,
    }


def test_of_a_prompt_that_was_interrupted_only_what_was_computed_is_computed_again() -> None:
    """The first step shares 8 tokens between them; then "old" needs the blocks of "A"."""
    scheduler = scheduler_over(4, token_budget=8)
    scheduler.add("old", 4)
    scheduler.add("A", 12)
    assert run(scheduler).prefills == [("old", 0, 4), ("A", 0, 4)]
    step = run(scheduler)
    assert (step, step.preempted) == (["old"], ["A"])
    scheduler.finish("old")
    assert run(scheduler).prefills == [("A", 0, 8)]
    assert run(scheduler).prefills == [("A", 8, 4)]
    counters = scheduler.counters
    assert (counters.prefill_tokens, counters.recomputed_tokens) == (20, 4)
    assert (counters.sampled_tokens, counters.ignored_results) == (3, 0)


def test_what_the_first_of_a_group_has_not_computed_is_computed_by_the_next() -> None:
    """ "H" shares 6 tokens with "G", which leaves when it has computed 2 of them again."""
    scheduler = scheduler_of_size(2, 12, token_budget=3, max_running=3)
    scheduler.add("old", 1)
    scheduler.add("G", 6, siblings=["H"])
    while scheduler.running != ["old"] or not scheduler.waiting:
        step = run(scheduler)
    assert step.preempted == ["G", "H"]
    scheduler.abort("old")
    assert run(scheduler).prefills == [("G", 0, 2)]
    scheduler.abort("G")
    assert run(scheduler).prefills == [("H", 2, 2)]


def test_a_third_waits_for_what_it_shares_with_the_second_alone() -> None:
    scheduler = scheduler_of_size(2, 14, token_budget=4, max_running=4)
    scheduler.add("old", 1)
    scheduler.add("G", 6, siblings=["H", "I"])
    while scheduler.running != ["old"] or not scheduler.waiting:
        step = run(scheduler)
    assert step.preempted == ["G", "H", "I"]
    scheduler.abort("old")
    assert run(scheduler).prefills == [("G", 0, 4)]
    scheduler.abort("G")
    step = run(scheduler)
    assert step.prefills[0][:2] == ("H", 4)
    assert all(start >= 6 for seq, start, _ in step.prefills if seq == "I")


def test_who_has_ended_is_told_in_the_order_of_the_step() -> None:
    scheduler = scheduler_over(12, token_budget=30)
    scheduler.add("A", 1, max_tokens=2)
    run(scheduler)
    scheduler.add("B", 1, max_tokens=1)
    step = plan(scheduler)
    assert step.sampled == ["A", "B"]
    assert report(scheduler, step) == ["A", "B"]


def test_drafts_are_given_up_where_a_window_has_left_room_for_the_next_token_alone() -> None:
    """At 7 tokens in 3 blocks of 2 the eighth fits into the last, and drafts fit nowhere."""
    scheduler = scheduler_of_size(2, 3, token_budget=2, max_running=1, draft_tokens=1, window=5)
    scheduler.add("A", 1)
    run(scheduler)
    for _ in range(12):
        step = plan(scheduler)
        assert not step.rejected
        report(scheduler, step, rejected=[len(step.slots) - 1])


@pytest.mark.parametrize(("size", "window"), [(1, 1), (2, 2)])
def test_what_steps_in_flight_give_back_to_a_window_is_waited_for(size: int, window: int) -> None:
    scheduler = scheduler_of_size(
        size, 2, token_budget=4, max_running=1, in_flight=2, window=window
    )
    scheduler.add("A", 1)
    stalled = False
    planned = [plan(scheduler)]
    for _ in range(12):
        step = plan(scheduler)
        assert not step.rejected
        stalled = stalled or step.stalled == ["A"]
        planned.append(step)
        if len(planned) > 2:
            report(scheduler, planned.pop(0))
    assert stalled
    assert scheduler.bm.lens["A"] > 2 * size


def test_who_is_aborted_is_counted_wherever_it_was() -> None:
    """One waits, one is in its prompt, one decodes."""
    scheduler = scheduler_over(8, token_budget=4, max_running=2)
    scheduler.add("decodes", 4)
    run(scheduler)
    scheduler.add("in its prompt", 9)
    scheduler.add("waits", 1)
    run(scheduler)
    for seq in ("decodes", "in its prompt", "waits"):
        assert scheduler.abort(seq)
        scheduler.bm.check()
        assert not scheduler.abort(seq)
    assert (scheduler.running, list(scheduler.waiting)) == ([], [])
    assert scheduler.bm.num_available == 8
    assert (scheduler.counters.aborted, scheduler.counters.finished) == (3, 0)


def test_a_beam_that_goes_on_from_one_at_its_limit_ends_with_it() -> None:
    """Beams differ in length after drafts were rejected; then they change places."""
    scheduler = scheduler_over(8, token_budget=8, draft_tokens=3)
    scheduler.add("A", 1, max_tokens=8, siblings=["B"])
    run(scheduler)
    run(scheduler, rejected=[0, 3])
    step = plan(scheduler)
    assert step.lengths.tolist() == [8, 6]
    assert report(scheduler, step, parents={"A": "B", "B": "A"}) == ["B"]
    assert (scheduler.running, scheduler.bm.lens["A"]) == (["A"], 6)


@pytest.mark.parametrize("parents", [{"H": "G"}, {"G": "H"}])
def test_beams_in_their_prompt_are_not_moved(parents: dict[str, str]) -> None:
    scheduler = scheduler_of_size(2, 12, token_budget=6, max_running=3)
    scheduler.add("old", 1)
    scheduler.add("G", 6, siblings=["H"])
    while scheduler.running != ["old"] or not scheduler.waiting:
        run(scheduler)
    scheduler.abort("old")
    step = plan(scheduler)
    assert step.prefills == [("G", 0, 6)]
    with pytest.raises(ValueError, match="no running beam"):
        scheduler.update(step, parents=parents)


def test_siblings_begin_without_what_lies_outside_the_window() -> None:
    scheduler = scheduler_of_size(3, 3, token_budget=6, window=1)
    scheduler.add("A", 6, siblings=["B"])
    run(scheduler)
    assert [table(scheduler, seq) for seq in "AB"] == [[-1, -1], [-1, -1]]
    assert not run(scheduler).rejected


def test_who_has_outgrown_the_pool_behind_a_window_yields_after_those_that_can_come_back() -> None:
    """ "A" is the newest, with 9 tokens of which it holds the last; the pool has 8 slots."""
    scheduler = scheduler_of_size(2, 4, token_budget=8, max_running=2, window=2)
    scheduler.add("old", 1)
    run(scheduler)
    scheduler.add("A", 6)
    run_steps(scheduler, 4)
    assert (scheduler.bm.lens["old"], scheduler.bm.lens["A"]) == (5, 9)
    outside = scheduler.bm.pool.take_many(scheduler.bm.num_available)
    rejected, preempted = {}, []
    for _ in range(3):
        step = run(scheduler)
        rejected |= step.rejected
        preempted += step.preempted
    assert (rejected, preempted) == ({}, ["old"])
    scheduler.bm.pool.release_many(outside)
    scheduler.finish("A")
    run(scheduler)
    assert scheduler.running == ["old"]


def test_a_request_that_fitted_elsewhere_is_judged_anew() -> None:
    request = Request("A", 17)
    scheduler_over(8).add(request)
    with pytest.raises(RequestRefused, match="can never fit"):
        scheduler_over(4).add(request)
