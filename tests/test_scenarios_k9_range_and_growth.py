"""Cluster K9: concurrency, numeric range, memory growth.

64-bit slots, atomic snapshots, no record that outlives its owner. Growth under a whole
engine's load is ``test_flat_memory.py``.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scenario_support import (
    append_as_batch,
    append_in_bulk,
    append_singly,
    checked_manager,
    checked_pool,
    checked_scheduler,
    every_block_size,
    manager_state,
    out_of_blocks,
    refused,
)
from soak import MIB, resident_bytes
from state import pool_snapshot

from kvcore import BlockManager, Counter, OutOfBlocks

INT32_MAX = 2**31 - 1

needs_resident_size = pytest.mark.skipif(
    resident_bytes() is None, reason="the resident size says nothing here"
)


def test_K9_01_every_reading_taken_while_another_thread_works_is_possible() -> None:
    bm = BlockManager(32, 4, rows=1, columns=1)
    stop = threading.Event()
    wrong: list[str] = []

    def poll() -> None:
        try:
            while not stop.is_set():
                gauges = bm.gauges()
                assert gauges.free + gauges.evictable + gauges.used == 32, gauges
                assert min(gauges) >= 0, gauges
                assert 0.0 <= gauges.usage <= 1.0, gauges
                for count in (bm.pool.num_free, bm.pool.num_evictable, bm.pool.num_used):
                    assert 0 <= count <= 32, count
                assert len(bm.pool.free_blocks()) <= 32
                assert 0 <= bm.ref.min() <= bm.ref.max() <= 3
        except BaseException as error:
            wrong.append(repr(error))

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    pollers = [threading.Thread(target=poll) for _ in range(8)]
    for poller in pollers:
        poller.start()
    try:
        for round_ in range(300):
            bm.allocate(round_, 4 * (round_ % 16) + 3)
            for block in bm.table(round_):
                bm.pool.keep(block)
            bm.fork(round_, "child")
            bm.append_slots("child", 4 * (round_ % 8))
            bm.pin(bm.table("child")[0])
            step = bm.fence()
            bm.free_seq(round_)
            bm.unpin(bm.table("child")[0])
            bm.truncate("child", 1)
            bm.settle(step)
            bm.free_seq("child")
            bm.check()
    finally:
        stop.set()
        for poller in pollers:
            poller.join()
        sys.setswitchinterval(switch_interval)
    assert wrong == []


@every_block_size
@pytest.mark.parametrize("evictable", [0, 2])
def test_K9_02_an_allocation_that_does_not_fit_takes_nothing(
    block_size: int, evictable: int
) -> None:
    bm = checked_manager(8, block_size)
    bm.allocate("cached", evictable * block_size)
    for block in bm.table("cached"):
        bm.pool.keep(block)
    bm.free_seq("cached")
    bm.allocate("held", 5 * block_size)
    out_of_blocks(bm, lambda: bm.allocate("A", 5 * block_size), needed=5, available=3)
    out_of_blocks(bm, lambda: bm.append_slots("held", 5 * block_size), needed=5, available=3)
    bm.allocate("A", 3 * block_size)
    assert len(bm.free) == 0


def test_K9_02_the_same_on_the_pool() -> None:
    pool = checked_pool(8)
    pool.take_many(5)
    refused(OutOfBlocks, lambda: pool.take_many(5), unchanged=lambda: pool_snapshot(pool))
    assert pool.take_many(3).tolist() == [5, 6, 7]


@pytest.mark.parametrize("append", [append_singly, append_in_bulk, append_as_batch])
@pytest.mark.parametrize(
    ("num_blocks", "block_size"),
    [(3, 2**30), (4, 2**30 - 1), (2, 2**30 + 1), (3, INT32_MAX), (140_000, 16_000)],
)
def test_K9_04_slots_beyond_int32_are_exact(
    append: Callable[..., object], num_blocks: int, block_size: int
) -> None:
    bm = checked_manager(num_blocks, block_size)
    bm.pool.take_many(num_blocks - 1)
    last = num_blocks - 1
    bm.allocate("A", 1)
    append(bm, "A", 3)
    bm.append_slots("A", 3)
    expected = [last * block_size + offset for offset in range(7)]
    assert expected[0] > INT32_MAX - block_size
    slots = bm.slots("A")
    assert slots.dtype == np.int64
    assert slots.tolist() == expected
    block, offset, _ = bm.append_slot("A")
    assert block * block_size + offset == expected[-1] + 1
    bm.truncate("A", 1)
    assert append(bm, "A", 1) == ([expected[1]], [])


def available_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


@pytest.mark.skipif(available_memory() < 6 * 2**30, reason="needs 6 GiB of free memory")
def test_K9_04_the_pool_of_the_report_has_its_last_slot_at_2_239_999_999() -> None:
    bm = BlockManager(140_000_000, 16)
    bm.pool.take_many(139_999_999)
    bm.allocate("A", 16)
    assert bm.slots("A").tolist() == list(range(2_239_999_984, 2_240_000_000))
    assert bm.table("A") == [139_999_999]
    assert len(bm.free) == 0


@pytest.mark.parametrize("block_size", [2**30, 2**30 - 1, INT32_MAX])
def test_K9_04_a_sequence_ends_at_the_largest_length_with_an_error(block_size: int) -> None:
    """Lengths are int32: one token more is refused by every call, and nothing changes."""
    bm = checked_manager(4, block_size)
    bm.allocate("A", INT32_MAX - 3)
    slots, _ = bm.append_slots("A", 2)
    assert slots.tolist() == bm.slots("A", INT32_MAX - 3).tolist()
    block, offset, _ = bm.append_slot("A")
    assert [block * block_size + offset] == bm.slots("A", INT32_MAX - 1).tolist()
    assert bm.lens["A"] == INT32_MAX
    assert len(bm.table("A")) == -(-INT32_MAX // block_size)
    rows, out = bm.rows(["A"]), np.zeros(1, np.int64)
    for call in (
        lambda: bm.append_slot("A"),
        lambda: bm.append_slots("A", 1),
        lambda: bm.append_slots("A", INT32_MAX),
        lambda: bm.append_batch(rows, out),
    ):
        refused(ValueError, call, INT32_MAX, unchanged=lambda: manager_state(bm))
    assert not bm.can_append("A")
    bm.append_slots("A", 0)
    bm.fork("A", "B")
    assert bm.gauges().tokens == 2 * INT32_MAX
    bm.truncate("B", INT32_MAX - 1)
    assert bm.lens["B"] == INT32_MAX - 1
    assert bm.append_slot("B")[1] == (INT32_MAX - 1) % block_size


@pytest.mark.parametrize("n_tokens", [2**31, 2**32, 2**32 + 1, 2**63, 2**64, 2**64 + 1, 10**30])
def test_K9_04_lengths_that_int32_cannot_hold_are_refused_not_wrapped(n_tokens: int) -> None:
    bm = checked_manager(3, 2**30)
    bm.allocate("A", 5)
    for call in (
        partial(bm.allocate, "B", n_tokens),
        partial(bm.append_slots, "A", n_tokens),
        partial(bm.can_append, "A", n_tokens),
        partial(bm.can_allocate, n_tokens),
        partial(bm.truncate, "A", n_tokens),
        partial(bm.fork, "A", "B", n_tokens=n_tokens),
    ):
        refused(ValueError, call, "n_tokens", n_tokens, unchanged=lambda: manager_state(bm))


BLOCK_SIZES = sorted(
    {*range(1, 35), *(2**k + d for k in range(6, 31) for d in (-1, 0, 1))}
    | {97, 4096, 7919, 65_521, 999_983, 46_341, 1_000_000_007, 2**31 - 2, INT32_MAX}
)


def test_the_number_of_blocks_is_exact_for_every_block_size_and_length() -> None:
    """A pool of one block refuses with the number of blocks that it was asked for."""
    chance = random.Random(0)
    for block_size in BLOCK_SIZES:
        bm = BlockManager(1, block_size, rows=1, columns=1)
        lengths = {0, 1, block_size, INT32_MAX, INT32_MAX - 1, INT32_MAX // block_size * block_size}
        lengths |= {chance.randint(0, INT32_MAX) for _ in range(200)}
        for _ in range(200):
            multiple = chance.randint(0, INT32_MAX // block_size) * block_size
            lengths |= {multiple - 1, multiple, multiple + 1}
        for n_tokens in lengths - {-1, 2**31}:
            needed = -(-n_tokens // block_size)
            assert bm.can_allocate(n_tokens) == (needed <= 1)
            if needed <= 1:
                bm.allocate("A", n_tokens)
                assert len(bm.table("A")) == needed
                bm.free_seq("A")
            else:
                with pytest.raises(OutOfBlocks) as caught:
                    bm.allocate("A", n_tokens)
                assert caught.value.needed == needed, (n_tokens, block_size)


def test_slots_are_exact_for_every_block_size_in_long_sequences() -> None:
    chance = random.Random(1)
    num_blocks = 1000
    for block_size in BLOCK_SIZES:
        longest = min(num_blocks * block_size, INT32_MAX)
        bm = BlockManager(num_blocks, block_size)
        order = list(range(num_blocks))
        chance.shuffle(order)
        bm.pool.take_many(num_blocks)
        bm.pool.release_many(order)
        bm.allocate("A", longest)
        table = order[: -(-longest // block_size)]
        assert bm.table("A") == table
        for _ in range(50):
            boundary = chance.randint(0, longest // block_size) * block_size
            start = max(0, boundary - chance.randint(0, 3))
            stop = min(longest, boundary + 3)
            expected = [
                table[position // block_size] * block_size + position % block_size
                for position in range(start, stop)
            ]
            assert bm.slots("A", start, stop).tolist() == expected
        for position in sorted((chance.randrange(longest) for _ in range(50)), reverse=True):
            bm.truncate("A", position)
            block, offset, cow_src = bm.append_slot("A")
            assert offset == position % block_size
            assert cow_src is None
            assert bm.slots("A", position).tolist() == [block * block_size + offset]
            assert len(bm.table("A")) == position // block_size + 1


@pytest.mark.parametrize("block_size", [1, 3, 7, 16, 48, 100, 4096])
def test_any_block_size_works_through_a_whole_life(block_size: int) -> None:
    bm = checked_manager(12, block_size)
    bm.allocate("A", 5 * block_size - 1)
    bm.fork("A", "B")
    slots, copies = append_in_bulk(bm, "B", block_size + 1)
    assert len(copies) == (block_size > 1)
    assert len(set(slots)) == block_size + 1
    assert bm.slots("B")[-block_size - 1 :].tolist() == slots
    assert set(slots).isdisjoint(bm.slots("A").tolist())
    bm.truncate("B", block_size)
    bm.free_seq("A")
    assert bm.pool.num_used == 1
    bm.free_seq("B")
    assert sorted(bm.free) == list(range(12))


@every_block_size
def test_a_pool_of_one_block_serves_refuses_and_recovers(block_size: int) -> None:
    bm = checked_manager(1, block_size)
    for _ in range(3):
        bm.allocate("A", block_size)
        out_of_blocks(bm, lambda: bm.append_slot("A"), needed=1, available=0)
        out_of_blocks(bm, lambda: bm.allocate("B", 1), needed=1, available=0)
        bm.fork("A", "B")
        bm.free_seq("A")
        bm.pool.keep(0)
        bm.free_seq("B")
        assert bm.pool.evictable_blocks().tolist() == [0]
        bm.allocate("C", 1)
        bm.free_seq("C")
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    scheduler.add("A", 1)
    step = scheduler.step()
    assert (step == ["A"]) == (block_size > 1)
    assert ("A" in step.rejected) == (block_size == 1)


def test_a_pool_of_ten_million_blocks_is_used_to_the_last() -> None:
    num_blocks = 10_000_000
    bm = BlockManager(num_blocks, 16, rows=2)
    bm.allocate("A", 16 * (num_blocks // 2))
    bm.allocate("B", 16 * (num_blocks // 2) - 1)
    assert len(bm.free) == 0
    assert not bm.can_append("A")
    block, offset, _ = bm.append_slot("B")
    assert (block, offset) == (num_blocks - 1, 15)
    assert bm.slots("B", 16 * (num_blocks // 2) - 1).tolist() == [16 * num_blocks - 1]
    with pytest.raises(OutOfBlocks):
        bm.append_slot("B")
    bm.check()
    bm.free_seq("A")
    bm.free_seq("B")
    order = bm.pool.free_blocks()
    half = num_blocks // 2
    assert order[:3].tolist() == [half - 1, half - 2, half - 3]
    assert order[-1] == half
    assert np.array_equal(np.sort(order), np.arange(num_blocks))
    bm.check()


@needs_resident_size
def test_K9_05_a_change_list_that_nobody_reads_does_not_grow() -> None:
    """A million short sequences, with appends, copies and rollbacks that all change cells."""
    bm = BlockManager(64, 4)

    def live_and_die(count: int) -> None:
        for seq in range(count):
            bm.allocate(seq, 6)
            if seq % 8 == 0:
                bm.fork(seq, "child")
                bm.append_slots("child", 3)
                bm.truncate("child", 1)
                bm.free_seq("child")
            bm.free_seq(seq)

    live_and_die(50_000)
    before = resident_bytes()
    live_and_die(1_000_000)
    after = resident_bytes()
    assert before is not None
    assert after is not None
    # Two bytes a sequence; the report had 90.
    assert after - before < 2 * MIB
    bm.allocate("A", 6)
    assert bm.drain_changes().tolist() == [
        [bm.row("A"), column, block] for column, block in enumerate(bm.table("A"))
    ]


@needs_resident_size
def test_K9_06_a_million_distinct_prompts_through_a_thousand_cached_blocks() -> None:
    bm = BlockManager(1000, 16)

    def serve(first: int, count: int) -> None:
        for prompt in range(first, first + count):
            seq = f"prompt {prompt}"
            bm.allocate(seq, 1 + prompt % 100)
            bm.pool.keep(bm.block_tables[bm.row(seq), 0])
            bm.free_seq(seq)

    serve(0, 50_000)
    before = resident_bytes()
    serve(50_000, 1_000_000)
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before < 2 * MIB
    assert len(bm.pool.evictable_blocks()) <= bm.num_blocks
    assert bm.pool.num_used == 0
    assert bm.counters[Counter.EVICTIONS] > 900_000
    bm.check()


def test_K9_07_no_array_that_was_handed_in_is_kept_alive() -> None:
    """Token keys are not here yet; for what is, the manager keeps numbers, never arrays."""
    bm = checked_manager(16, 4)
    bm.allocate("A", 5)
    bm.allocate("B", 5)
    pins = bm.pool.take_many(3)
    rows, out = bm.rows(["A", "B"]), np.zeros(1000, np.int64)
    bm.append_batch(rows, out)
    bm.pool.release_many(pins)
    watched = [weakref.ref(array) for array in (pins, rows, out)]
    del pins, rows, out
    gc.collect()
    assert [watch() for watch in watched] == [None] * 3


def test_K9_07_no_array_that_was_handed_out_keeps_a_larger_one_alive() -> None:
    bm = checked_manager(64, 4)
    bm.allocate("A", 6)
    bm.fork("A", "B")
    _, copies = bm.append_batch(bm.rows(["A", "B"]), np.zeros(1000, np.int64))
    slots, _ = bm.append_slots("A", 3)
    arrays = {
        "slots of append_slots": slots,
        "copies": copies,
        "slots": bm.slots("A", 3, 4),
        "rows": bm.rows(["A"]),
        "drain_changes": bm.drain_changes(),
        "free_blocks": bm.pool.free_blocks(),
        "evictable_blocks": bm.pool.evictable_blocks(),
        "take_many": bm.pool.take_many(2),
    }
    for name, array in arrays.items():
        assert array is not None
        base = array if array.base is None else np.asarray(array.base)
        assert base.nbytes <= array.nbytes + 64, name
