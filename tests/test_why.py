"""Why a request waits, stalls, was dropped or ended: every reason, with its numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_support import SIZE, plan, run, run_steps, scheduler_over

from kvcore import (
    BlockManager,
    Priority,
    Reason,
    Request,
    RequestRefused,
    Scheduler,
    Slots,
    ToCompletion,
    Verdict,
)

World = Callable[[], Scheduler]


def fits() -> Scheduler:
    scheduler = scheduler_over(4, 1)
    scheduler.add("asked", 8)
    return scheduler


def behind_two() -> Scheduler:
    scheduler = scheduler_over(4, 1)
    for seq, n_tokens in (("A", 5), ("B", 9), ("asked", 1)):
        scheduler.add(seq, n_tokens)
    return scheduler


def behind_by_priority() -> Scheduler:
    """The last of the queue comes first, then the others in their order."""
    scheduler = scheduler_over(4, 1, order=Priority())
    for seq, priority in (("A", 0), ("asked", 0), ("B", 0), ("H", 1)):
        scheduler.add(seq, 1, priority=priority)
    return scheduler


def all_places_taken() -> Scheduler:
    scheduler = scheduler_over(8, 1, max_running=2)
    for seq, n_tokens in (("A", 1), ("B", 1), ("asked", 5)):
        scheduler.add(seq, n_tokens)
    run(scheduler)
    return scheduler


def a_sibling_has_a_place() -> Scheduler:
    """The first chunk of 4 of 5 tokens: the sibling has a place, and no block yet."""
    scheduler = scheduler_over(8, 1, max_running=2, token_budget=4)
    scheduler.add("G", 5, siblings=["G2"])
    scheduler.add("asked", 1)
    plan(scheduler)
    assert scheduler.running == ["G"]
    return scheduler


def away() -> Scheduler:
    """Four blocks: 1 for "old", 3 for "A", until "old" needs one for its fifth token.

    "A" leaves with 11 tokens in step 4, and "old" gets its block in step 5.
    """
    scheduler = scheduler_over(4, host=BlockManager(8, SIZE))
    scheduler.add("old", 2)
    scheduler.add("A", 9)
    run_steps(scheduler, 5)
    assert scheduler.swapped == ["A"]
    scheduler.add("asked", 2)
    return scheduler


def two_away() -> Scheduler:
    """Five blocks: 1 for "old", 2 each for "A" and "B".

    In step 3 "old" and "A" need one more each: "B" leaves with 6 tokens, and they wait for
    its blocks. In step 8, with 8 and 12 tokens, they need one more again: "A" leaves.
    """
    scheduler = scheduler_over(5, host=BlockManager(8, SIZE))
    for seq, n_tokens in (("old", 3), ("A", 7), ("B", 5)):
        scheduler.add(seq, n_tokens)
    run_steps(scheduler, 8)
    assert scheduler.swapped == ["B", "A"]
    return scheduler


def on_its_way_out() -> Scheduler:
    """Its copies are not reported done, so "old" has no block yet."""
    scheduler = scheduler_over(4, host=BlockManager(8, SIZE))
    scheduler.add("old", 2)
    scheduler.add("asked", 9)
    run_steps(scheduler, 3)
    assert plan(scheduler).swapped_out == ["asked"]
    return scheduler


def on_its_way_back() -> Scheduler:
    scheduler = away()
    scheduler.abort("asked")
    scheduler.abort("old")
    assert plan(scheduler).swapped_in == ["A"]
    return scheduler


def no_tokens_left() -> Scheduler:
    """The next step is for 8 of the 12 tokens that are left of the one prompt under way."""
    scheduler = scheduler_over(20, token_budget=8, max_partial_prefills=1, max_running=4)
    scheduler.add("A", 20)
    scheduler.add("asked", 1)
    run(scheduler)
    return scheduler


def preempted_with_another() -> Scheduler:
    """Of 4 blocks "old" takes the second when it has 4 tokens; the group had 3 of 5 + 2."""
    scheduler = scheduler_over(4)
    scheduler.add("old", 3)
    scheduler.add("G", 5, siblings=["asked"])
    run(scheduler)
    assert run(scheduler).preempted == []
    assert run(scheduler).preempted == ["G", "asked"]
    return scheduler


def slots_taken() -> Scheduler:
    """Two of two slots each are taken of five."""
    scheduler = scheduler_over(10, 1, resources=[Slots("state slots", 5, needed=2)])
    for seq in ("A", "B", "asked"):
        scheduler.add(seq, 1)
    run(scheduler)
    return scheduler


def too_few_blocks() -> Scheduler:
    scheduler = scheduler_over(6, 1)
    scheduler.add("A", 13)
    scheduler.add("asked", 9)
    run(scheduler)
    return scheduler


def at_the_watermark() -> Scheduler:
    scheduler = scheduler_over(6, 1)
    scheduler.add("A", 13)
    scheduler.add("asked", 5)
    run(scheduler)
    return scheduler


def others_come_to_need_them() -> Scheduler:
    """Whoever runs grows from 4 to 9 tokens, by 2 blocks; the newcomer from 9 to 16, by 1."""
    scheduler = scheduler_over(6, admission=ToCompletion())
    scheduler.add("A", 4, max_tokens=6)
    scheduler.add("asked", 9, max_tokens=8)
    run(scheduler)
    return scheduler


def its_id_runs() -> Scheduler:
    scheduler = scheduler_over(6, 1)
    scheduler.add("asked", 5)
    run(scheduler)
    scheduler.waiting.append(("asked", 2))
    return scheduler


def its_prefix_is_computed() -> Scheduler:
    """Before the step is reported nothing can be shared: all 3 blocks are needed."""
    scheduler = scheduler_over(8, 1, prefix_caching=True)
    for seq in ("A", "asked"):
        scheduler.add(seq, tokens=range(9))
    plan(scheduler)
    return scheduler


def its_prefix_is_there() -> Scheduler:
    """The first 2 of its 3 blocks are shared."""
    scheduler = scheduler_over(8, 1, prefix_caching=True)
    for seq in ("A", "asked"):
        scheduler.add(seq, tokens=range(9))
    run(scheduler)
    return scheduler


def its_next_block_is_held_outside() -> Scheduler:
    scheduler = scheduler_over(3)
    scheduler.add("asked", 4)
    run(scheduler)
    scheduler.bm.pool.take_many(2)
    assert run(scheduler).stalled == ["asked"]
    return scheduler


def longer_than_the_pool() -> Scheduler:
    scheduler = scheduler_over(6, 2)
    scheduler.waiting.append(("asked", 17))
    return scheduler


def wider_than_allowed() -> Scheduler:
    scheduler = scheduler_over(6, 1, max_running=2)
    scheduler.waiting.append(Request("asked", 5, siblings=("S", "T")))
    return scheduler


def more_of_a_resource_than_there_is() -> Scheduler:
    slots = Slots("pages", 5, needed=lambda request: request.n_tokens)
    scheduler = scheduler_over(6, 1, resources=[slots])
    scheduler.waiting.append(("asked", 6))
    return scheduler


def without_what_the_policy_needs() -> Scheduler:
    scheduler = scheduler_over(6, admission=ToCompletion())
    scheduler.waiting.append(("asked", 5))
    return scheduler


def no_tokens() -> Scheduler:
    scheduler = scheduler_over(6, 1)
    scheduler.waiting.append(("asked", 0))
    return scheduler


def too_many_tokens() -> Scheduler:
    scheduler = scheduler_over(6, 1)
    scheduler.waiting.append(("asked", 2**31 - 1))
    return scheduler


def its_id_is_held_outside() -> Scheduler:
    scheduler = scheduler_over(6, 1)
    scheduler.bm.allocate("asked", 5)
    scheduler.waiting.append(("asked", 2))
    return scheduler


def a_sibling_s_id_is_held_outside() -> Scheduler:
    """Somebody takes the id between the chunks of the prompt."""
    scheduler = scheduler_over(6, 1, token_budget=4)
    scheduler.add("G", 5, siblings=["asked"])
    run(scheduler)
    scheduler.bm.allocate("asked", 1)
    return scheduler


def outgrown() -> Scheduler:
    """All 8 slots of the pool are its own; the next token needs a third block."""
    scheduler = scheduler_over(2)
    scheduler.add("asked", 7)
    run_steps(scheduler, 2)
    return scheduler


def outgrown_by_a_group() -> Scheduler:
    """Both have 8 tokens, with the first 4 in common: 3 blocks. Each needs one more."""
    scheduler = scheduler_over(3)
    scheduler.add("G", 5, siblings=["asked"])
    run_steps(scheduler, 4)
    assert scheduler.bm.lens["asked"] == 8
    return scheduler


WAITS = [
    (fits, "asked", Verdict(Reason.FITS, needed=2, available=4, reserve=1)),
    (behind_two, "asked", Verdict(Reason.BEHIND, needed=1, available=4, ahead=2, reserve=1)),
    (behind_by_priority, "asked", Verdict(Reason.BEHIND, 1, available=4, ahead=2, reserve=1)),
    (all_places_taken, "asked", Verdict(Reason.MAX_RUNNING, needed=2, available=6, reserve=1)),
    (a_sibling_has_a_place, "asked", Verdict(Reason.MAX_RUNNING, needed=1, available=6, reserve=1)),
    (away, "asked", Verdict(Reason.SWAPPED_BEFORE, needed=1, available=2)),
    (away, "A", Verdict(Reason.SWAPPED, needed=3, available=2)),
    (two_away, "A", Verdict(Reason.SWAPPED, needed=4, available=3, ahead=1)),
    (on_its_way_out, "asked", Verdict(Reason.SWAPPING, needed=0, available=0)),
    (on_its_way_back, "A", Verdict(Reason.SWAPPING, needed=0, available=1)),
    (no_tokens_left, "asked", Verdict(Reason.PARTIAL_PREFILLS, needed=1, available=15)),
    (preempted_with_another, "asked", Verdict(Reason.BLOCKS, needed=3, available=2)),
    (slots_taken, "asked", Verdict(Reason.RESOURCE, needed=2, available=1)),
    (too_few_blocks, "asked", Verdict(Reason.BLOCKS, needed=3, available=2, reserve=1)),
    (at_the_watermark, "asked", Verdict(Reason.WATERMARK, needed=2, available=2, reserve=1)),
    (others_come_to_need_them, "asked", Verdict(Reason.RESERVE, needed=3, available=5, reserve=3)),
    (its_id_runs, "asked", Verdict(Reason.LIVE_ID, needed=1, available=4, reserve=1)),
    (its_prefix_is_computed, "asked", Verdict(Reason.PREFIX, needed=3, available=5, reserve=1)),
    (its_prefix_is_there, "asked", Verdict(Reason.PREFIX, needed=1, available=5, reserve=1)),
    (its_next_block_is_held_outside, "asked", Verdict(Reason.STALLED, needed=1, available=0)),
]

DROPPED = [
    (longer_than_the_pool, Verdict(Reason.NEVER_FITS, needed=5, available=4, reserve=2)),
    (wider_than_allowed, Verdict(Reason.MAX_RUNNING, needed=3, available=2)),
    (more_of_a_resource_than_there_is, Verdict(Reason.RESOURCE, needed=6, available=5)),
    (without_what_the_policy_needs, Verdict(Reason.BAD_REQUEST, needed=2, available=6)),
    (no_tokens, Verdict(Reason.BAD_LENGTH, needed=0, available=6)),
    (too_many_tokens, Verdict(Reason.BAD_LENGTH, needed=0, available=6)),
    (its_id_is_held_outside, Verdict(Reason.LIVE_ID, needed=1, available=4, reserve=1)),
]

ENDED = [
    (a_sibling_s_id_is_held_outside, Verdict(Reason.LIVE_ID, needed=0, available=0)),
    (outgrown, Verdict(Reason.OUTGREW_POOL, needed=3, available=2)),
    (outgrown_by_a_group, Verdict(Reason.OUTGREW_POOL, needed=5, available=3)),
]


@pytest.mark.parametrize(("world", "seq", "verdict"), WAITS)
def test_who_waits_says_why(world: World, seq: str, verdict: Verdict) -> None:
    scheduler = world()
    assert scheduler.why(seq) == verdict
    scheduler.bm.check()


@pytest.mark.parametrize(("world", "verdict"), DROPPED)
def test_who_can_never_enter_says_so_and_is_dropped_by_the_step(
    world: World, verdict: Verdict
) -> None:
    scheduler = world()
    scheduler.add("next", 1, max_tokens=1)
    assert scheduler.why("asked") == verdict
    step = run(scheduler)
    assert step.rejected == {"asked": verdict}
    assert step.prefills == [("next", 0, 1)], "nobody else is kept out"
    assert scheduler.counters.rejected == 1


@pytest.mark.parametrize(("world", "verdict"), ENDED)
def test_who_cannot_go_on_is_ended_with_the_reason(world: World, verdict: Verdict) -> None:
    scheduler = world()
    step = run(scheduler)
    assert step.rejected == {"asked": verdict}
    assert "asked" not in scheduler.running
    assert run(scheduler).rejected == {}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("asked", 17), (Reason.NEVER_FITS, "5 blocks", "have 4")),
        (Request("asked", 5, siblings=("S", "T")), (Reason.MAX_RUNNING, "3 places", "have 2")),
        (Request("asked", 8), (Reason.RESOURCE, "8 of it", "have 7")),
    ],
)
def test_add_refuses_what_a_step_would_drop(
    request_: Request, said: tuple[Reason, str, str]
) -> None:
    slots = Slots("pages", 7, needed=lambda request: request.n_tokens)
    scheduler = scheduler_over(6, 2, max_running=2, resources=[slots])
    with pytest.raises(RequestRefused) as refused:
        scheduler.add(request_)
    for part in (said[0].value, said[1], said[2]):
        assert part in str(refused.value)
    assert not scheduler.waiting


def test_who_runs_or_is_unknown_has_no_reason() -> None:
    scheduler = scheduler_over(6, 1)
    scheduler.add("A", 5)
    run(scheduler)
    for seq in ("A", "nobody"):
        with pytest.raises(KeyError, match=seq):
            scheduler.why(seq)


def test_asking_changes_nothing_and_the_next_step_does_what_was_said() -> None:
    """The second is next once the first has entered; then it lacks a block."""
    scheduler = scheduler_over(6, 1)
    for seq, n_tokens in (("B", 13), ("C", 9)):
        scheduler.add(seq, n_tokens)
    said = [scheduler.why("B"), scheduler.why("C")]
    assert [scheduler.why("B"), scheduler.why("C")] == said
    assert [verdict.reason for verdict in said] == [Reason.FITS, Reason.BEHIND]
    assert run(scheduler).prefills == [("B", 0, 13)]
    assert scheduler.why("C") == Verdict(Reason.BLOCKS, needed=3, available=2, reserve=1)


def test_every_reason_is_in_a_table() -> None:
    verdicts = [verdict for _, _, verdict in WAITS]
    verdicts += [verdict for _, verdict in DROPPED + ENDED]
    assert {verdict.reason for verdict in verdicts} == set(Reason)
