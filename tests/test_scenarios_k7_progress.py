"""Cluster K7, the basic rows: hang, livelock, thrash, limits.

Every step admits, advances, or fails somebody by name; one short sequence is never the
whole batch's problem.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Hashable
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from prefix_support import (
    compute_prompt,
    counted,
    engine_step,
    lookup,
    prefix_state,
    sharing_manager,
    sharing_scheduler,
    with_and_without_sharing,
    words,
)
from scenario_support import (
    admitted,
    blocks_with_a_middle,
    checked_manager,
    checked_scheduler,
    every_block_size,
    found_cached,
    manager_state,
    out_of_blocks,
    refused,
    scheduler_state,
)

from kvcore import BlockManager, Counter, Reason, RequestRefused, Scheduler, Step


def run_to_completion(
    bm: BlockManager, scheduler: Scheduler, targets: dict[Hashable, int], steps: int
) -> Tally[Hashable]:
    """Finish each request at its target length; the preemptions of each."""
    preemptions: Tally[Hashable] = Tally()
    for _ in range(steps):
        step = scheduler.step()
        preemptions.update(step.preempted)
        assert step.rejected == {}
        for seq in step:
            if bm.lens[seq] == targets[seq]:
                assert scheduler.finish(seq)
    return preemptions


@pytest.mark.parametrize("watermark", [0, 1])
@every_block_size
def test_K7_01_preempted_work_is_admitted_again_and_everything_finishes(
    block_size: int, watermark: int
) -> None:
    """Three requests of 12 blocks each in the end, two of which fit."""
    bm = checked_manager(24 + watermark, block_size)
    scheduler = checked_scheduler(bm, watermark)
    targets: dict[Hashable, int] = dict.fromkeys("ABC", 12 * block_size)
    for seq in targets:
        scheduler.add(seq, 2 * block_size)
    steps = 3 * 12 * block_size + 200
    preemptions = run_to_completion(bm, scheduler, targets, steps)
    assert scheduler_state(scheduler) == {"waiting": [], "running": []}
    assert len(bm.free) == bm.num_blocks
    assert max(preemptions.values()) <= 3
    assert preemptions["A"] == 0


@pytest.mark.parametrize("added_by", ["add", "waiting.append"])
@pytest.mark.parametrize("watermark", [0, 1])
def test_K7_02_a_request_larger_than_the_pool_fails_alone(added_by: str, watermark: int) -> None:
    bm = checked_manager(49, 16)
    scheduler = checked_scheduler(bm, watermark)
    if added_by == "add":
        caught = refused(
            RequestRefused,
            lambda: scheduler.add("large", 1002),
            unchanged=lambda: (manager_state(bm), scheduler_state(scheduler)),
        )
        assert "63" in str(caught.value)
        assert str(49 - watermark) in str(caught.value)
    else:
        scheduler.waiting.append(("large", 1002))
    scheduler.add("next", 10)
    step = scheduler.step()
    assert step == ["next"]
    assert list(scheduler.waiting) == []
    if added_by == "waiting.append":
        verdict = step.rejected["large"]
        assert (verdict.reason, verdict.needed) == (Reason.NEVER_FITS, 63)
        assert verdict.available == 49 - watermark


@pytest.mark.parametrize("position", range(4))
def test_K7_02_wherever_the_oversized_request_stands_in_the_queue_the_others_run(
    position: int,
) -> None:
    bm = checked_manager(49, 16)
    scheduler = checked_scheduler(bm)
    queue = [("a", 10), ("b", 10), ("c", 10)]
    queue.insert(position, ("large", 1002))
    scheduler.waiting.extend(queue)
    step = scheduler.step()
    assert step == ["a", "b", "c"]
    assert list(step.rejected) == ["large"]


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "reserved"), [(13, 8192, 1), (13, 1, 1), (13, 4, 0), (13, 16, 5)]
)
def test_K7_03_the_reserve_counts_in_the_longest_prompt(
    num_blocks: int, block_size: int, reserved: int
) -> None:
    bm = checked_manager(num_blocks, block_size)
    scheduler = checked_scheduler(bm, reserved)
    longest = (num_blocks - reserved) * block_size
    refused(
        RequestRefused,
        lambda: scheduler.add("A", longest + 1),
        unchanged=lambda: scheduler_state(scheduler),
    )
    scheduler.add("A", longest)
    step = scheduler.step()
    if reserved:
        assert step == ["A"]
        assert bm.lens["A"] == longest + 1
    else:
        # The prompt alone fills the pool, so that its first token has no room anywhere.
        assert step.rejected["A"].reason is Reason.OUTGREW_POOL
        assert len(bm.free) == num_blocks


@pytest.mark.parametrize("watermark", [0, 1])
@every_block_size
def test_K7_04_the_last_running_sequence_outgrows_the_pool_and_ends_with_a_reason(
    block_size: int, watermark: int
) -> None:
    bm = checked_manager(2, block_size)
    scheduler = checked_scheduler(bm, watermark)
    prompt = (2 - watermark) * block_size
    scheduler.add("A", prompt)
    scheduler.add("behind", block_size if watermark else 1)
    decoded = 0
    step = scheduler.step()
    while not step.rejected:
        assert step == ["A"]
        decoded += 1
        step = scheduler.step()
    verdict = step.rejected["A"]
    assert (verdict.reason, verdict.needed, verdict.available) == (Reason.OUTGREW_POOL, 3, 2)
    assert decoded == watermark * block_size
    assert "A" not in bm
    assert "A" not in scheduler.running
    assert step.preempted == []
    assert step == []
    assert admitted(step) == []
    assert "behind" not in bm

    assert scheduler.step() == ["behind"]
    scheduler.finish("behind")
    assert len(bm.free) == 2
    scheduler.add("A", 1)
    assert scheduler.step() == ["A"]


@every_block_size
@pytest.mark.parametrize("added_by", ["add", "waiting.append"])
def test_K7_07_running_sequences_count_against_the_most_that_may_run(
    block_size: int, added_by: str
) -> None:
    bm = checked_manager(100, block_size)
    scheduler = checked_scheduler(bm, max_running=2)
    for seq in "ABC":
        if added_by == "add":
            scheduler.add(seq, 4)
        else:
            scheduler.waiting.append((seq, 4))
    for _ in range(10):
        assert scheduler.step() == ["A", "B"]
        assert scheduler.why("C").reason is Reason.MAX_RUNNING
    scheduler.finish("A")
    assert scheduler.step() == ["B", "C"]


@every_block_size
def test_K7_08_one_call_visits_each_request_at_most_once(block_size: int) -> None:
    """The victim goes to the front of the queue and is not looked at again in this step."""
    bm = checked_manager(4, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    scheduler.add("A", block_size)
    scheduler.step()
    scheduler.add("B", 3 * block_size)
    scheduler.add("C", 3 * block_size)
    for _ in range(4 * block_size):
        step = scheduler.step()
        seen = [*step, *step.preempted, *step.rejected]
        assert len(seen) == len(set(seen))
        if step.rejected:
            break
    assert list(step.rejected) == ["A"]


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("victims", [1, 2, 5])
def test_K7_08_victims_of_one_step_keep_their_order_at_the_front(
    block_size: int, victims: int
) -> None:
    bm = checked_manager(1 + victims, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    names = [f"victim {i}" for i in range(victims)]
    scheduler.add("oldest", block_size - 1)
    for name in names:
        scheduler.add(name, block_size - 1)
    scheduler.step()
    assert scheduler.running == ["oldest", *names]
    scheduler.add("never started", 1)
    finished = False
    while not finished:
        scheduler.step()
        queue = [seq for seq, _ in scheduler.waiting]
        preempted = [name for name in names if name in queue]
        assert queue == [*preempted, "never started"]
        assert scheduler.running == ["oldest", *[name for name in names if name not in queue]]
        finished = len(preempted) == victims


def four_decoders(bm: BlockManager, scheduler: Scheduler) -> None:
    """Nine of ten blocks in use, and room in each table for a while."""
    for number, blocks in enumerate((2, 2, 2, 3)):
        tokens = words(bm.block_size, *range(10 * number, 10 * number + blocks))
        scheduler.add(number, tokens=tokens[: (blocks - 1) * bm.block_size + 1])
    assert scheduler.step() == [0, 1, 2, 3]
    assert len(bm.free) == 1


@with_and_without_sharing
@pytest.mark.parametrize("watermark", [0, 1])
@pytest.mark.parametrize("block_size", [8, 16])
def test_K7_09_admission_waits_for_room_for_the_whole_prompt(
    block_size: int, watermark: int, sharing: bool
) -> None:
    """That its first chunk would fit lets nobody in, so nobody is preempted for the rest."""
    make = sharing_manager if sharing else checked_manager
    bm = make(10, block_size)
    scheduler = sharing_scheduler(bm, watermark)
    four_decoders(bm, scheduler)
    scheduler.add("long", tokens=words(block_size, *range(50, 55))[:-1])
    running: list[Hashable] = [0, 1, 2, 3]
    while len(bm.free) < 5 + watermark:
        step = scheduler.step()
        assert step == running
        assert (step.preempted, admitted(step)) == ([], [])
        verdict = scheduler.why("long")
        enough = len(bm.free) >= 5
        assert verdict.reason is (Reason.WATERMARK if enough else Reason.BLOCKS)
        assert (verdict.needed, verdict.available) == (5, len(bm.free))
        scheduler.finish(running.pop(0))
    step = scheduler.step()
    assert step == [*running, "long"]
    assert step.preempted == []
    assert admitted(step) == [("long", 5 * block_size - 1)]


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("watermark", [0, 1])
@pytest.mark.parametrize("block_size", [8, 16])
def test_K7_09_cached_blocks_of_a_prompt_need_no_room_but_all_the_others_do(
    block_size: int, watermark: int, idle: bool
) -> None:
    """An idle hit is not counted as room too: it would be spent twice."""
    bm = sharing_manager(12, block_size)
    compute_prompt(bm, "prefix", words(block_size, 50, 51))
    if idle:
        bm.free_seq("prefix")
    scheduler = sharing_scheduler(bm, watermark)
    for number, blocks in enumerate((2, 2, 2, 3)):
        scheduler.add(number, (blocks - 1) * block_size + 1)
    assert scheduler.step() == [0, 1, 2, 3]
    assert len(bm.free) == 1
    scheduler.add("long", tokens=words(block_size, *range(50, 55))[:-1])
    running: list[Hashable] = [0, 1, 2, 3]
    while len(bm.free) < 3 + watermark:
        step = scheduler.step()
        assert (step, step.preempted, admitted(step)) == (running, [], [])
        verdict = scheduler.why("long")
        assert (verdict.needed, verdict.available) == (3, len(bm.free))
        scheduler.finish(running.pop(0))
    step = scheduler.step()
    assert step == [*running, "long"]
    assert (step.preempted, found_cached(step)) == ([], [2 * block_size])


@with_and_without_sharing
@pytest.mark.parametrize("victims", [1, 2, 3])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_K7_10_who_is_admitted_and_preempted_in_one_step_leaves_no_trace_in_it(
    block_size: int, victims: int, sharing: bool
) -> None:
    """The older ones stand on a boundary and need the blocks that admission gave away."""
    make = sharing_manager if sharing else checked_manager
    bm = make(2 * victims, block_size)
    scheduler = sharing_scheduler(bm, watermark_blocks=0)
    olds = [f"old {i}" for i in range(victims)]
    for number, old in enumerate(olds):
        scheduler.add(old, tokens=words(block_size, 10 + number)[:-1])
    assert scheduler.step() == olds
    names = [f"new {i}" for i in range(victims)]
    prompts = {name: words(block_size, 50 + number) for number, name in enumerate(names)}
    for name, tokens in prompts.items():
        scheduler.add(name, tokens=tokens)
    step = scheduler.step()
    assert step == olds
    assert admitted(step) == []
    assert found_cached(step) == []
    assert step.preempted == names[::-1]
    assert step.rejected == {}
    assert len(step.rows) == len(step.slots) == victims
    assert step.slots.tolist() == [int(bm.tables[old][1]) * block_size for old in olds]
    assert len(step.copies) == 0
    assert scheduler.running == olds
    assert list(scheduler.waiting) == [(name, block_size) for name in names]
    for name in names:
        assert name not in bm
    assert bm.pool.num_used == 2 * victims
    # What never ran is no cache, and each enters once more when there is room.
    if sharing:
        assert lookup(bm, prompts[names[0]]) == 0
    for old in olds:
        scheduler.finish(old)
    step = scheduler.step()
    assert admitted(step) == [(name, block_size) for name in names]
    assert step == names


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_K7_10_the_hits_of_a_victim_of_its_own_step_are_given_back(
    block_size: int, idle: bool
) -> None:
    bm = sharing_manager(4, block_size)
    compute_prompt(bm, "prefix", words(block_size, 1))
    cached = bm.tables["prefix"][0]
    scheduler = sharing_scheduler(bm, watermark_blocks=0)
    scheduler.add("old", tokens=words(block_size, 8)[:-1])
    engine_step(bm, scheduler, {"old": 700})
    if idle:
        bm.free_seq("prefix")
    scheduler.add("A", tokens=words(block_size, 1, 2, 3))
    step = engine_step(bm, scheduler, {"old": 701})
    assert (step, step.preempted) == (["old"], ["A"])
    assert (admitted(step), found_cached(step), step.rejected) == ([], [], {})
    assert bm.ref[cached] == (0 if idle else 1)
    assert lookup(bm, words(block_size, 1, 2, 3)) == 1, "the hit is there again, the rest never was"
    before = prefix_state(bm)
    assert scheduler.why("A").reason is Reason.BLOCKS
    assert prefix_state(bm) == before

    scheduler.finish("old")
    bm.evict(9)
    if not idle:
        bm.free_seq("prefix")
    step = engine_step(bm, scheduler, {"A": 702})
    assert admitted(step) == [("A", 3 * block_size)]
    assert found_cached(step) == [0 if idle else block_size]
    # The request counted once, when it came; nothing of its resume is a user's hit.
    (asked,) = counted(bm, Counter.PROMPT_TOKENS)
    assert asked == block_size + (block_size - 1) + 3 * block_size


@every_block_size
def test_K7_19_an_append_may_take_the_reserve_and_an_admission_may_not(block_size: int) -> None:
    bm = checked_manager(4, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=1)
    bm.allocate("held", 2 * block_size)
    bm.allocate("runs", block_size)
    assert len(bm.free) == 1
    scheduler.add("new", 1)
    step = scheduler.step()
    assert step == []
    verdict = scheduler.why("new")
    assert (verdict.reason, verdict.needed, verdict.available) == (Reason.WATERMARK, 1, 1)
    assert not bm.can_allocate(1, watermark=1)
    assert bm.can_allocate(1)

    assert bm.can_append("runs", block_size)
    bm.append_slots("runs", block_size)
    assert len(bm.free) == 0
    out_of_blocks(bm, lambda: bm.append_slot("runs"), needed=1, available=0)


@every_block_size
def test_K7_19_a_running_sequence_grows_into_the_reserve_while_the_queue_waits(
    block_size: int,
) -> None:
    bm = checked_manager(4, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=1)
    scheduler.add("runs", 2 * block_size)
    scheduler.step()
    scheduler.add("new", 1)
    while len(bm.free):
        assert scheduler.step() == ["runs"]
        assert "new" not in bm


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_K7_25_one_missing_block_costs_one_sequence_and_two_decode(block_size: int) -> None:
    """All three stand on a boundary, two blocks are free."""
    bm = checked_manager(5, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    for seq in "ABC":
        scheduler.add(seq, block_size - 1)
    assert scheduler.step() == ["A", "B", "C"]
    step = scheduler.step()
    assert step == ["A", "B"]
    assert step.preempted == ["C"]
    assert step.rejected == {}
    assert list(scheduler.waiting) == [("C", block_size)]


@blocks_with_a_middle
@pytest.mark.parametrize("short", [0, 1, 2])
def test_K7_25_whoever_is_short_the_newest_yields(block_size: int, short: int) -> None:
    """Only the sequence at position ``short`` needs a block, and none is free."""
    bm = checked_manager(3, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    prompts = [block_size - 2] * 3
    prompts[short] = block_size - 1
    for seq, prompt in zip("ABC", prompts, strict=True):
        scheduler.add(seq, prompt)
    assert scheduler.step() == ["A", "B", "C"]
    step = scheduler.step()
    assert step == ["A", "B"]
    assert step.preempted == ["C"]


def test_K7_26_an_empty_prompt_is_refused_and_the_next_request_works() -> None:
    bm = checked_manager(4, 4)
    scheduler = checked_scheduler(bm)
    for n_tokens in (0, -1, -(2**40)):
        refused(
            ValueError,
            partial(scheduler.add, "empty", n_tokens),
            "n_tokens",
            n_tokens,
            unchanged=lambda: (manager_state(bm), scheduler_state(scheduler)),
        )
    scheduler.add("next", 1)
    assert scheduler.step() == ["next"]


@pytest.mark.parametrize("n_tokens", [0, -1])
def test_K7_26_an_empty_prompt_put_into_the_queue_is_rejected_by_the_step(n_tokens: int) -> None:
    bm = checked_manager(4, 4)
    scheduler = checked_scheduler(bm)
    scheduler.waiting.extend([("empty", n_tokens), ("next", 1)])
    step = scheduler.step()
    assert step == ["next"]
    assert step.rejected["empty"].reason is Reason.BAD_LENGTH
    assert list(scheduler.waiting) == []


@pytest.mark.parametrize("n_tokens", [2.0, "2", None, [2], 2**31, 2**64])
def test_K7_26_no_length_put_into_the_queue_can_stop_it(n_tokens: Any) -> None:
    bm = checked_manager(4, 2**30)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    scheduler.waiting.extend([("bad", n_tokens), ("next", 1)])
    step = scheduler.step()
    assert step == ["next"]
    assert step.rejected["bad"].reason is Reason.BAD_LENGTH


def test_K7_26_a_pair_in_the_queue_means_what_add_means() -> None:
    bm = checked_manager(8, 4)
    scheduler = checked_scheduler(bm)
    scheduler.add("added", np.int64(5))
    length: Any = np.int64(5)
    scheduler.waiting.append(("appended", length))
    step = scheduler.step()
    assert step == ["added", "appended"]
    assert admitted(step) == [("added", 5), ("appended", 5)]
    assert bm.lens["added"] == bm.lens["appended"] == 6


@pytest.mark.parametrize("order", list(permutations(["fits", "too long", "empty"])))
def test_K7_a_step_gives_every_bad_request_its_own_reason_and_runs_the_good_one(
    order: tuple[str, ...],
) -> None:
    bm = checked_manager(8, 4)
    scheduler = checked_scheduler(bm)
    lengths = {"fits": 4, "too long": 1000, "empty": 0}
    scheduler.waiting.extend((seq, lengths[seq]) for seq in order)
    step: Step = scheduler.step()
    assert step == ["fits"]
    assert {seq: verdict.reason for seq, verdict in step.rejected.items()} == {
        "too long": Reason.NEVER_FITS,
        "empty": Reason.BAD_LENGTH,
    }


@every_block_size
def test_K7_a_request_whose_id_runs_waits_for_the_id_and_says_so(block_size: int) -> None:
    bm = checked_manager(8, block_size)
    scheduler = checked_scheduler(bm)
    scheduler.waiting.extend([("A", 1), ("A", 2)])
    assert scheduler.step() == ["A"]
    for _ in range(3):
        assert scheduler.why("A").reason is Reason.LIVE_ID
        assert scheduler.step() == ["A"]
    assert scheduler.finish("A")
    step = scheduler.step()
    assert step == ["A"]
    assert admitted(step) == [("A", 2)]
    assert bm.lens["A"] == 3


@every_block_size
def test_K7_a_request_whose_id_an_outsider_has_is_rejected_and_the_next_runs(
    block_size: int,
) -> None:
    """Nothing says when the outsider ends, and a queue must not wait for that."""
    bm = checked_manager(8, block_size)
    scheduler = checked_scheduler(bm)
    bm.allocate("A", 1)
    table = bm.table("A").tolist()
    scheduler.waiting.extend([("A", 1), ("next", 1)])
    step = scheduler.step()
    assert step == ["next"]
    assert step.rejected["A"].reason is Reason.LIVE_ID
    assert bm.table("A") == table
    assert bm.lens["A"] == 1
