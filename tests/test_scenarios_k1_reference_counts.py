"""Cluster K1: reference counts, double free, free-list damage.

One counter of record a block, one way out, and a batch is validated as a whole before
its first decrement. Each test is named after the fault it repeats.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import permutations
from typing import cast

import numpy as np
import pytest
from scenario_support import (
    Append,
    append_singly,
    checked_manager,
    checked_pool,
    checked_scheduler,
    every_append,
    every_block_size,
    manager_state,
    out_of_blocks,
    refused,
    scaled,
)
from state import pool_snapshot

from kvcore import BlockManager, BlockPool, Counter, OutOfBlocks

Release = Callable[[BlockPool, list[int]], None]


def release_one_by_one(pool: BlockPool, blocks: list[int]) -> None:
    for block in blocks:
        pool.release(block)


def release_as_list(pool: BlockPool, blocks: list[int]) -> None:
    pool.release_many(blocks)


def release_as_array(pool: BlockPool, blocks: list[int]) -> None:
    pool.release_many(np.array(blocks, np.int32))


every_release = pytest.mark.parametrize(
    "release",
    [
        pytest.param(release_one_by_one, id="release"),
        pytest.param(release_as_list, id="release_many-list"),
        pytest.param(release_as_array, id="release_many-array"),
    ],
)


@every_release
@pytest.mark.parametrize("first", list(permutations([0, 1, 0])))
@pytest.mark.parametrize("second", list(permutations([0, 1, 0])))
def test_K1_01_a_block_held_twice_by_one_table_and_shared_is_freed_once(
    release: Release, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    pool = checked_pool(4)
    pool.take_many(2)
    pool.retain(0)
    for block in first:
        pool.retain(block)
    assert pool.ref.tolist() == [4, 2, 0, 0]

    release(pool, list(first))
    assert pool.ref.tolist() == [2, 1, 0, 0]
    release(pool, list(second))

    assert pool.ref.tolist() == [0, 0, 0, 0]
    assert sorted(pool.free_blocks()) == [0, 1, 2, 3]
    assert pool.num_free == 4


@every_release
@pytest.mark.parametrize("kept", [False, True])
def test_K1_02_a_block_listed_twice_in_one_release_is_queued_once(
    release: Release, kept: bool
) -> None:
    pool = checked_pool(16)
    pool.take_many(4)
    pool.retain(3)
    if kept:
        pool.keep(3)
    idle = pool.num_free + pool.num_evictable

    release(pool, [3, 3])

    assert pool.ref[3] == 0
    assert (pool.free_blocks().tolist() + pool.evictable_blocks().tolist()).count(3) == 1
    assert pool.num_free + pool.num_evictable == idle + 1


@pytest.mark.parametrize("listed", [[3, 3, 3], [3, 2, 3, 1, 3], [0, 3, 3, 3, 2]])
@pytest.mark.parametrize("as_array", [False, True])
def test_K1_02_a_third_listing_is_refused_by_name_and_nothing_is_released(
    listed: list[int], as_array: bool
) -> None:
    pool = checked_pool(16)
    pool.take_many(4)
    pool.retain(3)
    blocks = np.array(listed, np.int32) if as_array else listed
    refused(
        ValueError,
        lambda: pool.release_many(blocks),
        "block",
        3,
        unchanged=lambda: pool_snapshot(pool),
    )


@every_block_size
@every_release
def test_K1_03_a_queued_block_cannot_be_released_again(release: Release, block_size: int) -> None:
    bm = checked_manager(2, block_size)
    bm.allocate("A", block_size)
    (block,) = bm.table("A")
    bm.pin(block)
    bm.free_seq("A")
    release(bm.pool, [block])
    refused(
        ValueError, lambda: release(bm.pool, [block]), block, unchanged=lambda: manager_state(bm)
    )
    bm.allocate("X", block_size)
    bm.allocate("Y", block_size)
    assert set(bm.table("X")).isdisjoint(bm.table("Y"))


@every_release
def test_K1_03_the_reference_of_a_table_cannot_be_released_through_the_pool(
    release: Release,
) -> None:
    bm = checked_manager(2, 4)
    bm.allocate("A", 4)
    refused(ValueError, lambda: release(bm.pool, [0]), 0, unchanged=lambda: manager_state(bm))
    refused(ValueError, lambda: bm.unpin(0), 0, unchanged=lambda: manager_state(bm))


def test_K1_03_a_block_list_with_one_bad_entry_releases_none_of_the_good_ones() -> None:
    """After a double release vLLM 0.33 lost all nine blocks of the next take."""
    pool = checked_pool(10)
    blocks = pool.take_many(9).tolist()
    pool.release(blocks[4])
    refused(
        ValueError,
        lambda: pool.release_many(blocks),
        blocks[4],
        unchanged=lambda: pool_snapshot(pool),
    )
    assert sorted(pool.take_many(2).tolist()) == [blocks[4], 9]


@every_block_size
@pytest.mark.parametrize("twin_is", ["evictable", "held"])
def test_K1_04_a_pin_holds_the_block_that_is_read_not_its_twin(
    block_size: int, twin_is: str
) -> None:
    bm = checked_manager(4, block_size)
    bm.allocate("first", block_size)
    (twin,) = bm.table("first")
    bm.pool.keep(twin)
    if twin_is == "evictable":
        bm.free_seq("first")
    twin_refs = int(bm.ref[twin])
    bm.allocate("A", block_size)
    (own,) = bm.table("A")

    bm.pin(own)
    assert (bm.ref[own], bm.ref[twin]) == (2, twin_refs)
    bm.free_seq("A")
    assert bm.ref[own] == 1
    assert own not in bm.free
    bm.unpin(own)

    assert list(bm.free).count(own) == 1
    assert bm.ref[twin] == twin_refs
    assert bm.pool.is_kept(twin)


@every_block_size
def test_K1_05_eviction_spares_a_cached_block_that_a_live_sequence_reads(block_size: int) -> None:
    bm = checked_manager(3, block_size)
    bm.allocate("writer", block_size)
    (cached,) = bm.table("writer")
    bm.pool.keep(cached)
    bm.fork("writer", "B")
    bm.free_seq("writer")

    out_of_blocks(bm, lambda: bm.allocate("C", 3 * block_size), needed=3, available=2)
    assert bm.ref[cached] == 1
    assert bm.table("B") == [cached]

    bm.free_seq("B")
    assert bm.pool.evictable_blocks().tolist() == [cached]
    bm.allocate("C", 3 * block_size)
    assert sorted(bm.table("C")) == [0, 1, 2]
    assert bm.counters[Counter.EVICTIONS] == 1
    assert not bm.pool.is_kept(cached)


@every_append
@every_block_size
def test_K1_07_a_new_block_counts_one_however_it_was_taken(append: Append, block_size: int) -> None:
    bm = checked_manager(2, block_size)
    for _ in range(1000):
        bm.allocate("A", block_size)
        assert bm.ref[bm.table("A")[0]] == 1
        append(bm, "A", 1)
        assert bm.ref[bm.table("A")[1]] == 1
        bm.free_seq("A")
        assert len(bm.free) == 2


@every_append
@pytest.mark.parametrize("block_size", [4, 16])
def test_K1_07_the_block_of_a_copy_on_write_counts_one(append: Append, block_size: int) -> None:
    bm = checked_manager(2, block_size)
    for _ in range(1000):
        bm.allocate("A", block_size - 1)
        bm.fork("A", "B")
        _, copies = append(bm, "B", 1)
        ((src, dst),) = copies
        assert (bm.ref[src], bm.ref[dst]) == (1, 1)
        bm.free_seq("A")
        bm.free_seq("B")
        assert len(bm.free) == 2


@every_append
@pytest.mark.parametrize("late", ["truncate", "free_seq", "append_slot"])
def test_K1_08_a_slot_reserved_ahead_goes_with_its_sequence_and_only_once(
    append: Append, late: str
) -> None:
    bm = checked_manager(8, 1)
    bm.allocate("A", 5)
    append(bm, "A", 1)
    assert len(bm.free) == 2
    bm.free_seq("A")
    assert len(bm.free) == 8
    late_calls: dict[str, Callable[[], object]] = {
        "truncate": lambda: bm.truncate("A", 5),
        "free_seq": lambda: bm.free_seq("A"),
        "append_slot": lambda: bm.append_slot("A"),
    }
    refused(KeyError, late_calls[late], "A", unchanged=lambda: manager_state(bm))


@every_append
def test_K1_08_giving_the_reserved_slot_back_first_frees_the_same_blocks(append: Append) -> None:
    bm = checked_manager(8, 1)
    bm.allocate("A", 5)
    append(bm, "A", 1)
    bm.truncate("A", 5)
    assert len(bm.free) == 3
    bm.truncate("A", 5)
    assert len(bm.free) == 3
    bm.free_seq("A")
    assert sorted(bm.free) == list(range(8))


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("arrival", list(permutations(["A", "B"])))
@pytest.mark.parametrize("leave", ["finish", "abort"])
def test_K1_09_a_sequence_that_just_finished_is_no_victim(
    block_size: int, arrival: tuple[str, ...], leave: str
) -> None:
    bm = checked_manager(3, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    prompts = {"A": block_size - 1, "B": 2 * block_size - 1}
    for seq in arrival:
        scheduler.add(seq, prompts[seq])
    assert scheduler.step() == list(arrival)
    assert len(bm.free) == 0
    (reused,) = bm.table("A")

    assert getattr(scheduler, leave)("A")
    step = scheduler.step()

    assert step == ["B"]
    assert step.preempted == []
    assert bm.table("B")[2] == reused
    assert bm.ref.tolist() == [1, 1, 1]


@every_block_size
@pytest.mark.parametrize("held_by", ["one table", "two tables"])
def test_K1_10_a_block_leaves_once_when_its_last_token_does(block_size: int, held_by: str) -> None:
    """Every way to drop the tokens of two blocks piece by piece, down to nothing."""
    total = min(2 * block_size, 8)
    for drops in range(1, total + 1):
        for kept_lengths in ([total - drops, 0], [*range(total - 1, -1, -drops), 0]):
            bm = checked_manager(4, block_size)
            bm.allocate("A", total)
            if held_by == "two tables":
                bm.fork("A", "B")
            for length in kept_lengths:
                bm.truncate("A", length)
                assert len(bm.table("A")) == -(-length // block_size)
                if held_by == "one table":
                    assert len(bm.free) == 4 - len(bm.table("A"))
            assert bm.table("A") == []
            bm.free_seq("A")
            if held_by == "two tables":
                bm.free_seq("B")
            assert sorted(bm.free) == [0, 1, 2, 3]


@every_block_size
@pytest.mark.parametrize("pins", [1, 2, 3])
def test_K1_12_each_pin_is_given_back_once_and_one_more_is_refused(
    block_size: int, pins: int
) -> None:
    bm = checked_manager(4, block_size)
    bm.allocate("A", block_size)
    (block,) = bm.table("A")
    for _ in range(pins):
        bm.pin(block)
    for _ in range(pins):
        bm.unpin(block)
    refused(ValueError, lambda: bm.unpin(block), block, unchanged=lambda: manager_state(bm))
    assert bm.ref[block] == 1
    bm.free_seq("A")
    refused(ValueError, lambda: bm.unpin(block), block, unchanged=lambda: manager_state(bm))
    assert len(bm.free) == 4


@every_block_size
def test_K1_13_used_falls_to_zero_with_caching_on_and_cached_blocks_are_evicted(
    block_size: int,
) -> None:
    bm = checked_manager(4, block_size)
    for request in range(100):
        bm.allocate(request, 2 * block_size)
        for block in bm.table(request):
            bm.pool.keep(block)
        assert 0.0 <= bm.gauges().usage <= 1.0
        bm.free_seq(request)
        assert bm.pool.num_used == 0
        assert bm.gauges().usage == 0.0
        assert bm.pool.num_free + bm.pool.num_evictable == 4
    assert bm.pool.num_evictable == 4
    assert bm.counters[Counter.EVICTIONS] == 2 * 100 - 4


@pytest.mark.parametrize("evictable", [0, 1, 2])
def test_K1_14_a_take_of_too_many_leaves_the_free_ones_takeable(evictable: int) -> None:
    pool = checked_pool(5)
    held = pool.take_many(5).tolist()
    for block in held[:evictable]:
        pool.keep(block)
    pool.release_many(held[:2])

    caught = refused(OutOfBlocks, lambda: pool.take_many(3), unchanged=lambda: pool_snapshot(pool))
    assert isinstance(caught.value, OutOfBlocks)
    assert (caught.value.needed, caught.value.available) == (3, 2)

    assert {pool.take(), pool.take()} == set(held[:2])
    refused(OutOfBlocks, pool.take, unchanged=lambda: pool_snapshot(pool))


@pytest.mark.parametrize("count", [-1, -2, -(2**31), -(2**63), -(2**70)])
def test_K1_15_a_negative_number_of_blocks_is_refused(count: int) -> None:
    """vLLM 0.33 takes -1 blocks and counts one more free, then hands out block -1."""
    pool = checked_pool(9)
    refused(ValueError, lambda: pool.take_many(count), count, unchanged=lambda: pool_snapshot(pool))
    assert pool.take_many(9).tolist() == list(range(9))
    refused(OutOfBlocks, pool.take, unchanged=lambda: pool_snapshot(pool))


@pytest.mark.parametrize("n_tokens", [-1, -4, -(2**31), -(2**63)])
def test_K1_15_a_negative_number_of_tokens_never_reaches_the_pool(n_tokens: int) -> None:
    bm = checked_manager(9, 4)
    bm.allocate("A", 18)
    calls: list[Callable[[], object]] = [
        lambda: bm.allocate("B", n_tokens),
        lambda: bm.can_allocate(n_tokens),
        lambda: bm.append_slots("A", n_tokens),
        lambda: bm.can_append("A", n_tokens),
        lambda: bm.truncate("A", n_tokens),
        lambda: bm.fork("A", "B", n_tokens=n_tokens),
    ]
    for call in calls:
        refused(ValueError, call, "n_tokens", n_tokens, unchanged=lambda: manager_state(bm))


@every_append
@every_block_size
def test_K1_15_blocks_left_over_after_a_rollback_are_gone_so_no_need_is_negative(
    append: Append, block_size: int
) -> None:
    """18 tokens hold 5 blocks, 14 hold 4; growing to 14 again from less takes no more."""
    bm = checked_manager(8, block_size)
    bm.allocate("A", scaled(18, block_size))
    held = bm.table("A").tolist()
    assert len(held) == 5
    bm.truncate("A", scaled(14, block_size))
    assert bm.table("A") == held[:4]
    bm.truncate("A", scaled(14, block_size))
    assert bm.table("A") == held[:4]
    growth = scaled(18, block_size) - scaled(14, block_size)
    assert bm.can_append("A", growth)
    append(bm, "A", growth)
    assert len(bm.table("A")) == 5
    assert len(bm.free) == 3


@every_append
@every_block_size
def test_K1_16_a_reserved_block_never_enters_the_free_list_or_a_table(
    append: Append, block_size: int
) -> None:
    """Tables with window gaps are not here yet; a reserved block is one with a pin."""
    bm = checked_manager(4, block_size)
    placeholder = bm.pool.take()
    for round_ in range(50):
        bm.allocate(round_, 2 * block_size)
        append(bm, round_, 1)
        assert placeholder not in bm.table(round_)
        out_of_blocks(bm, lambda: bm.allocate("other", 1), needed=1, available=0)
        bm.free_seq(round_)
        assert bm.ref[placeholder] == 1
        assert placeholder not in bm.free


@every_release
def test_K1_16_gaps_that_share_one_reserved_block_give_back_what_they_took(
    release: Release,
) -> None:
    pool = checked_pool(8)
    placeholder = pool.take()
    for _ in range(50):
        seventh = pool.take()
        pool.retain(placeholder)
        pool.retain(placeholder)
        release(pool, [placeholder, placeholder, seventh])
        assert pool.ref[placeholder] == 1
        assert pool.num_used == 1


class SequenceId:
    """A hashable id that can be watched by a weak reference."""


def manager_with_live_families(seqs: list[SequenceId]) -> BlockManager:
    bm = checked_manager(64, 4)
    for parent, child in zip(seqs[::2], seqs[1::2], strict=True):
        bm.allocate(parent, 6)
        bm.fork(parent, child)
        append_singly(bm, child, 3)
    return bm


def test_K1_17_recycled_blocks_form_no_chain_and_the_manager_dies_at_once() -> None:
    bm = checked_manager(4, 4)
    gc.collect()
    objects_before = len(gc.get_objects())
    for request in range(20_000):
        bm.allocate(request, 4)
        bm.free_seq(request)
    gc.collect()
    assert len(gc.get_objects()) <= objects_before + 10
    del bm


@pytest.mark.parametrize("way_out", ["free_seq", "never freed"])
def test_K1_17_the_manager_keeps_no_id_longer_than_its_sequence(way_out: str) -> None:
    ids = [SequenceId() for _ in range(8)]
    watched = [weakref.ref(seq) for seq in ids]
    bm = manager_with_live_families(ids)
    while ids and way_out == "free_seq":
        bm.free_seq(ids.pop())
    if way_out == "never freed":
        del bm
    ids.clear()
    gc.collect()
    assert [watch() for watch in watched] == [None] * 8


@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_K1_17_a_manager_that_dies_gives_its_blocks_back_to_the_pool_it_shared(
    steps_in_flight: int, in_a_cycle: bool
) -> None:
    """Also when the garbage collector finds it, as after an exception that held it."""
    pool = BlockPool(64)
    survivor = BlockManager(64, 4, pool=pool)
    survivor.allocate("A", 8)
    for _ in range(5):
        holder: list[object] = [BlockManager(64, 4, pool=pool)]
        bm = cast(BlockManager, holder[0])
        bm.allocate("A", 40)
        bm.fork("A", "B")
        for _ in range(steps_in_flight):
            bm.fence()
        bm.free_seq("A")
        assert pool.num_used == 12
        if in_a_cycle:
            holder.append(holder)
        del holder, bm
        gc.collect()
        assert pool.num_used == 2
        pool.check()


def test_K1_17_a_manager_and_its_own_pool_can_die_in_one_cycle() -> None:
    for _ in range(5):
        bm = BlockManager(1000, 4)
        bm.allocate("A", 4000)
        cycle: list[object] = [bm.pool, bm]
        cycle.append(cycle)
        del bm, cycle
        gc.collect()
