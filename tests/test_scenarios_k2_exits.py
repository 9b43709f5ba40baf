"""Cluster K2: leaks on abort, finish, failure and the reuse of an id.

Finish, abort, failure and a late result are one exit through different doors: complete,
the second time harmless, and indifferent to their order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations

import numpy as np
import pytest
from scenario_support import (
    Append,
    admitted,
    checked_manager,
    checked_pool,
    checked_scheduler,
    every_append,
    every_block_size,
    manager_state,
    out_of_blocks,
    refused,
    scaled,
    scheduler_state,
)
from state import pool_snapshot

from kvcore import Counter, OutOfBlocks, Resumed


@every_block_size
@pytest.mark.parametrize("completions", [1, 2, 10])
def test_K2_01_blocks_of_an_aborted_load_wait_for_the_load_and_late_reports_are_ignored(
    block_size: int, completions: int
) -> None:
    """The fence is the transfer; settling it is its completion or its deadline."""
    bm = checked_manager(4, block_size)
    load = bm.fence()
    bm.allocate("A", 2 * block_size)
    bm.free_seq("A")
    assert bm.pool.num_used == 2
    assert len(bm.free) == 2
    assert bm.settle(load) == 2
    assert len(bm.free) == 4
    for _ in range(completions):
        before = manager_state(bm)
        assert bm.settle(load) == 0
        assert manager_state(bm) == before


@every_block_size
@pytest.mark.parametrize("order", list(permutations(["abort", "block 0 done", "block 1 done"])))
def test_K2_01_a_block_that_a_load_pins_is_freed_by_whoever_comes_last(
    block_size: int, order: tuple[str, ...]
) -> None:
    bm = checked_manager(4, block_size)
    bm.allocate("A", 2 * block_size)
    first, second = bm.table("A")
    bm.pin(first)
    bm.pin(second)
    events: dict[str, Callable[[], object]] = {
        "abort": lambda: bm.free_seq("A"),
        "block 0 done": lambda: bm.unpin(first),
        "block 1 done": lambda: bm.unpin(second),
    }
    for done, event in enumerate(order):
        events[event]()
        assert (len(bm.free) == 4) == (done == 2)
    for block in (first, second):
        refused(ValueError, partial(bm.unpin, block), block, unchanged=lambda: manager_state(bm))


@every_block_size
def test_K2_02_a_late_or_double_completion_of_a_gone_id_is_reported_not_raised(
    block_size: int,
) -> None:
    bm = checked_manager(16, block_size)
    scheduler = checked_scheduler(bm)
    scheduler.add("A", block_size)
    scheduler.add("B", block_size)
    scheduler.step()
    assert scheduler.finish("A") is True
    before = manager_state(bm), scheduler_state(scheduler)
    for late in (scheduler.finish, scheduler.abort, scheduler.finish):
        assert late("A") is False
        assert late("never seen") is False
        assert (manager_state(bm), scheduler_state(scheduler)) == before
    refused(KeyError, lambda: bm.free_seq("A"), "A", unchanged=lambda: manager_state(bm))
    assert scheduler.step() == ["B"]


@every_block_size
@pytest.mark.parametrize("doors", list(permutations(["abort", "finish", "late finish"])))
@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_K2_03_the_first_door_ends_the_request_and_the_others_find_nothing(
    block_size: int, doors: tuple[str, ...], state: str
) -> None:
    bm = checked_manager(4, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    if state == "preempted":
        scheduler.add("older", block_size)
    scheduler.add("A", block_size)
    if state != "waiting":
        scheduler.step()
    while state == "preempted" and "A" in bm:
        scheduler.step()
    calls = {"abort": scheduler.abort, "finish": scheduler.finish, "late finish": scheduler.finish}
    assert [calls[door]("A") for door in doors] == [True, False, False]
    assert "A" not in bm
    assert all(seq != "A" for seq, _ in scheduler.waiting)
    assert "A" not in scheduler.running
    scheduler.finish("older")
    assert sorted(bm.free) == [0, 1, 2, 3]


@every_append
@every_block_size
def test_K2_04_tokens_already_in_place_stay_while_the_rest_finds_no_room(
    append: Append, block_size: int
) -> None:
    bm = checked_manager(4, block_size)
    bm.allocate("A", 2 * block_size)
    loaded = bm.table("A").tolist()
    bm.allocate("other", 2 * block_size)
    out_of_blocks(bm, lambda: append(bm, "A", 1), needed=1, available=0)
    assert not bm.can_append("A")
    assert bm.lens["A"] == 2 * block_size
    bm.free_seq("other")
    append(bm, "A", 1)
    assert bm.table("A")[:2] == loaded
    assert bm.lens["A"] == 2 * block_size + 1


@every_block_size
def test_K2_05_requests_in_sequence_reuse_the_cached_blocks_of_finished_ones(
    block_size: int,
) -> None:
    bm = checked_manager(4, block_size)
    for request in range(10):
        bm.allocate(request, 2 * block_size)
        for block in bm.table(request):
            bm.pool.keep(block)
        bm.free_seq(request)
    assert bm.counters[Counter.EVICTIONS] >= 16
    assert bm.counters[Counter.OUT_OF_BLOCKS] == 0
    assert len(bm) == 0


@every_block_size
def test_K2_06_a_call_that_fails_on_blocks_takes_no_row(block_size: int) -> None:
    """The row of the table slab is the second resource of every sequence."""
    bm = checked_manager(4, block_size, rows=2)
    bm.allocate("A", 2 * block_size)
    rows = bm.block_tables.shape[0]
    out_of_blocks(bm, lambda: bm.allocate("B", 3 * block_size), needed=3, available=2)
    for attempt in range(1000):
        with pytest.raises(OutOfBlocks):
            bm.allocate(("B", attempt), 3 * block_size)
    assert len(bm) == 1
    assert bm.block_tables.shape[0] == rows
    bm.allocate("B", 2 * block_size)
    assert bm.table_generation == 0
    assert {bm.row("A"), bm.row("B")} == {0, 1}


@every_block_size
@pytest.mark.parametrize("leave", ["finish", "abort"])
def test_K2_07_a_request_that_ends_on_its_first_step_gives_back_blocks_and_row(
    block_size: int, leave: str
) -> None:
    bm = checked_manager(8, block_size, rows=1)
    scheduler = checked_scheduler(bm)
    for request in range(100):
        scheduler.add(request, 5)
        step = scheduler.step()
        assert step == [request]
        assert admitted(step) == [(request, 5)]
        assert bm.row(request) == 0
        assert getattr(scheduler, leave)(request)
        assert len(bm) == 0
        assert len(bm.free) == 8
    assert bm.block_tables.shape[0] == 1
    assert scheduler.step() == []


@every_block_size
@pytest.mark.parametrize("order", list(permutations(["abort", "chunk 1 done", "chunk 2 done"])))
def test_K2_08_an_abort_with_a_chunk_in_flight_frees_every_block_once(
    block_size: int, order: tuple[str, ...]
) -> None:
    """Publishing is not here yet: that nothing became evictable stands in for it."""
    bm = checked_manager(4, block_size)
    first_chunk = bm.fence()
    bm.allocate("A", scaled(4, block_size))
    second_chunk = bm.fence()
    bm.append_slots("A", scaled(12, block_size) - scaled(4, block_size))
    events: dict[str, Callable[[], object]] = {
        "abort": lambda: bm.free_seq("A"),
        "chunk 1 done": lambda: bm.settle(first_chunk),
        "chunk 2 done": lambda: bm.settle(second_chunk),
    }
    for event in order:
        events[event]()
        settled = {"chunk 2 done"} & set(order[: order.index(event) + 1])
        gone = "abort" in order[: order.index(event) + 1]
        assert len(bm.free) == (4 if settled and gone else 1)
    assert sorted(bm.free) == [0, 1, 2, 3]
    assert bm.pool.num_evictable == 0


@every_block_size
def test_K2_09_two_dropped_ranges_that_meet_in_one_block_drop_it_once(block_size: int) -> None:
    lengths = [scaled(tokens, block_size) for tokens in (14, 10, 8)]
    bm = checked_manager(4, block_size)
    bm.allocate("A", lengths[0])
    third, fourth = bm.table("A")[2], bm.table("A")[3]
    bm.truncate("A", lengths[1])
    assert list(bm.free) == [fourth]
    bm.truncate("A", lengths[2])
    assert list(bm.free) == [fourth, third]

    at_once = checked_manager(4, block_size)
    at_once.allocate("A", lengths[0])
    at_once.truncate("A", lengths[2])
    assert list(at_once.free) == [fourth, third]
    assert at_once.table("A") == bm.table("A")


@pytest.mark.parametrize("listed", [[2, 2, 3], [2, 3, 2], [3, 2, 2]])
@pytest.mark.parametrize("as_array", [False, True])
def test_K2_09_a_block_named_by_both_ranges_of_one_release_is_refused(
    listed: list[int], as_array: bool
) -> None:
    pool = checked_pool(4)
    pool.take_many(4)
    blocks = np.array(listed, np.int32) if as_array else listed
    refused(ValueError, lambda: pool.release_many(blocks), 2, unchanged=lambda: pool_snapshot(pool))
    pool.release_many([2, 3])
    assert pool.num_free == 2


@every_block_size
@pytest.mark.parametrize("cached_are", ["evictable", "held"])
def test_K2_10_a_warm_start_that_fails_returns_the_hits_it_touched(
    block_size: int, cached_are: str
) -> None:
    """A match revives cached blocks by pins; when the suffix finds no room they go back."""
    bm = checked_manager(4, block_size)
    bm.allocate("earlier", 2 * block_size)
    cached = bm.table("earlier").tolist()
    for block in cached:
        bm.pool.keep(block)
    if cached_are == "evictable":
        bm.free_seq("earlier")
    bm.allocate("B", block_size)
    before = {name: value for name, value in manager_state(bm).items() if name not in ("counters",)}

    for _ in range(10):
        # As free_seq does: the tail is given back first, so the head is evicted last.
        for block in cached:
            bm.pin(block)
        with pytest.raises(OutOfBlocks):
            bm.allocate("A", 2 * block_size)
        for block in reversed(cached):
            bm.unpin(block)
        after = manager_state(bm)
        assert {name: after[name] for name in before} == before
    assert bm.counters[Counter.EVICTIONS] == 0


@every_append
@every_block_size
def test_K2_10_a_fork_whose_suffix_finds_no_room_leaves_no_reference(
    append: Append, block_size: int
) -> None:
    bm = checked_manager(3, block_size)
    bm.allocate("parent", 3 * block_size)
    refs = bm.ref.tolist()
    bm.fork("parent", "A", n_tokens=2 * block_size)
    out_of_blocks(bm, lambda: append(bm, "A", 1), needed=1, available=0)
    bm.free_seq("A")
    assert bm.ref.tolist() == refs


@every_block_size
@pytest.mark.parametrize("matched", [0, 1, 2, 3])
def test_K2_11_a_partial_match_holds_no_more_than_it_matched(block_size: int, matched: int) -> None:
    bm = checked_manager(4, block_size)
    bm.allocate("chain", 3 * block_size)
    bm.fork("chain", "A", n_tokens=matched * block_size)
    assert bm.ref.tolist() == [2] * matched + [1] * (3 - matched) + [0]
    bm.free_seq("A")
    assert bm.ref.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("gone", ["A0", "A1"])
def test_K2_12_preempting_a_group_skips_the_sibling_that_is_gone(
    block_size: int, gone: str
) -> None:
    bm = checked_manager(4, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    scheduler.add("older", block_size)
    scheduler.add("A0", block_size - 1)
    scheduler.step()
    scheduler.fork("A0", "A1")
    assert scheduler.finish(gone)
    (left,) = {"A0", "A1"} - {gone}

    step = scheduler.step()
    while not step.preempted:
        step = scheduler.step()
    assert step.preempted == [left]
    assert step == ["older"]
    assert gone not in bm
    assert list(scheduler.waiting) == [(left, scheduler.waiting[0][1])]


@every_block_size
@pytest.mark.parametrize("holder", ["scheduler", "manager"])
def test_K2_13_a_live_id_is_not_overwritten(block_size: int, holder: str) -> None:
    bm = checked_manager(8, block_size)
    scheduler = checked_scheduler(bm)
    if holder == "scheduler":
        scheduler.add("A", 2 * block_size)
        scheduler.step()
    else:
        bm.allocate("A", 2 * block_size)
    calls: list[Callable[[], object]] = [
        lambda: bm.allocate("A", block_size),
        lambda: bm.allocate("A", 0),
        lambda: bm.fork("A", "A"),
        lambda: scheduler.add("A", block_size),
    ]
    for call in calls:
        refused(
            ValueError,
            call,
            "A",
            unchanged=lambda: (manager_state(bm), scheduler_state(scheduler)),
        )


@every_block_size
def test_K2_15_a_failed_return_leaves_the_preempted_sequence_waiting_and_whole(
    block_size: int,
) -> None:
    bm = checked_manager(4, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    scheduler.add("older", block_size)
    scheduler.add("A", block_size)
    while not scheduler.step().preempted:
        pass
    (entry,) = scheduler.waiting
    assert isinstance(entry, Resumed)
    assert scheduler.finish("older")
    pinned = bm.pool.take_many(3).tolist()

    for _ in range(10):
        step = scheduler.step()
        assert step == []
        assert step.rejected == {}
        assert list(scheduler.waiting) == [entry]
        assert scheduler.running == []
        assert "A" not in bm
    for block in pinned:
        bm.unpin(block)
    step = scheduler.step()
    assert step == ["A"]
    assert admitted(step) == [("A", entry.n_tokens)]
    assert bm.lens["A"] == entry.n_tokens + 1
