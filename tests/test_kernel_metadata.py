"""What kernels read, against slow and obvious versions of it over random managers."""

from __future__ import annotations

import threading
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pytest
from kernel_support import UNTOUCHED, Output, World, change_at_random, int32, random_world

from kvcore import BlockManager
from kvcore.kernel_metadata import (
    block_table,
    csr,
    query_start_loc,
    sequence_lengths,
    slot_mapping,
    table_width,
)

BOTH = [np.int32, np.int64]


@pytest.fixture(params=[(size, holes) for size in (1, 4, 16) for holes in (False, True)], ids=str)
def worlds(request: pytest.FixtureRequest) -> list[World]:
    """Enough of them that windows leave holes before, between and after the blocks kept."""
    size, holes = request.param
    return [random_world(size, holes, seed) for seed in range(25)]


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def test_the_worlds_have_what_the_tests_are_about() -> None:
    seen = set()
    for size in (1, 4, 16):
        for world in (random_world(size, True, seed) for seed in range(25)):
            for entry, length in enumerate(world.lengths):
                cells = [world.cell(entry, token) for token in range(length)]
                seen.add("empty" if not cells else "holes" if -1 in cells else "whole")
                if cells and cells[0] >= 0 and -1 in cells:
                    seen.add("sinks")
                if cells and cells[-1] < 0:
                    seen.add("a hole at the end")
                if length < world.bm.lens[world.seqs[entry]]:
                    seen.add("cut")
            if (world.bm.ref > 1).any():
                seen.add("shared")
    assert seen == {"empty", "holes", "whole", "sinks", "a hole at the end", "cut", "shared"}


# ---------------------------------------------------------------- against the obvious


@pytest.mark.parametrize("dtype", BOTH)
def test_block_table(worlds: list[World], dtype: Any) -> None:
    for world in worlds:
        size = world.bm.block_size
        expand, scale = world.draw.choice(divisors(size)), world.draw.choice([1, 1, 24])
        pad, more = world.draw.choice([0, 0, -1, 7]), world.draw.choice([0, 3])
        expected = []
        for entry, length in enumerate(world.lengths):
            tokens = range(0, -(-length // size) * size, size // expand)
            expected.append(
                [
                    world.page(entry, token, expand) * scale
                    if world.cell(entry, token) >= 0
                    else pad
                    for token in tokens
                ]
            )
        width = max(map(len, expected)) + world.draw.choice([0, 1, 5])
        out = Output(len(expected) + more, width, dtype=dtype)
        written = block_table(
            world.bm, world.rows, out.array, lengths=int32(*world.lengths), pad=pad, scale=scale,
            expand=expand,
        )  # fmt: skip
        assert written == sum(map(len, expected))
        padded = [ids + [pad] * (width - len(ids)) for ids in expected]
        assert out.read() == padded + [[pad] * width] * more


def test_csr(worlds: list[World]) -> None:
    for world in worlds:
        expand, more = world.draw.choice(divisors(world.bm.block_size)), world.draw.choice([0, 3])
        pages, last, held = [], [], []
        for entry in range(len(world.seqs)):
            of_tokens = [world.page(entry, token, expand) for token in world.held(entry)]
            pages.append(list(dict.fromkeys(of_tokens)))
            last.append(of_tokens.count(of_tokens[-1]) if of_tokens else 0)
            held.append(len(of_tokens))
        total = sum(map(len, pages))
        count = len(pages) + more
        indptr, last_page_len, kv_len = Output(count + 1), Output(count), Output(count)
        indices = Output(total + 4)
        written = csr(
            world.bm, world.rows, indptr.array, indices.array, last_page_len=last_page_len.array,
            kv_len=kv_len.array, lengths=int32(*world.lengths), expand=expand,
        )  # fmt: skip
        assert written == total
        assert indptr.read() == [0, *accumulate(map(len, pages))] + [total] * more
        assert indices.read() == [*chain(*pages), *[UNTOUCHED] * 4]
        assert last_page_len.read() == last + [0] * more
        assert kv_len.read() == held + [0] * more


@pytest.mark.parametrize("dtype", BOTH)
def test_slot_mapping(worlds: list[World], dtype: Any) -> None:
    for world in worlds:
        size = world.bm.block_size
        spans = [world.span(entry) for entry in range(len(world.seqs))]
        expected = [
            world.cell(entry, token) * size + token % size
            for entry, (start, count) in enumerate(spans)
            for token in range(start, start + count)
        ]
        out = Output(len(expected) + world.draw.choice([0, 3]), dtype=dtype)
        starts, counts = np.array(spans, np.int32).T.copy()
        assert slot_mapping(world.bm, world.rows, starts, counts, out.array) == len(expected)
        assert out.read() == expected + [-1] * (out.array.size - len(expected))


def test_query_start_loc(worlds: list[World]) -> None:
    for world in worlds:
        counts = [world.draw.randrange(5) for _ in range(world.draw.randrange(6))]
        out = Output(len(counts) + 1 + world.draw.choice([0, 3]))
        assert query_start_loc(np.array(counts, np.int32), out.array) == sum(counts)
        sums = [0, *accumulate(counts)]
        assert out.read() == sums + [sum(counts)] * (out.array.size - len(sums))


def test_sequence_lengths(worlds: list[World]) -> None:
    for world in worlds:
        full = [world.bm.lens[seq] for seq in world.seqs]
        before = [world.draw.randint(0, length) for length in full]
        counts = int32(*(length - start for length, start in zip(full, before, strict=True)))
        for expected, of_step in ((full, None), (before, counts)):
            out = Output(len(full) + world.draw.choice([0, 3]))
            assert sequence_lengths(world.bm, world.rows, out.array, counts=of_step) == len(full)
            assert out.read() == expected + [0] * (out.array.size - len(full))


def test_without_lengths_all_that_the_rows_have_is_meant(worlds: list[World]) -> None:
    for world in worlds:
        full = world.bm.lengths_of(world.rows)
        tables = [Output(len(full), 100) for _ in range(2)]
        rows = [(Output(len(full) + 1), Output(2000)) for _ in range(2)]
        for lengths, table, (indptr, indices) in zip((None, full), tables, rows, strict=True):
            block_table(world.bm, world.rows, table.array, lengths=lengths)
            csr(world.bm, world.rows, indptr.array, indices.array, lengths=lengths)
        assert tables[0].read() == tables[1].read()
        assert rows[0][0].read() == rows[1][0].read()
        assert rows[0][1].read() == rows[1][1].read()


def test_every_width_holds_the_longest_table_and_one_column_less_does_not() -> None:
    for size in (1, 4, 16):
        bm = BlockManager(64, size)
        rows = int32(0)
        bm.allocate("a", 0)
        for n_tokens in range(40):
            for expand in divisors(size):
                width = table_width(bm, n_tokens, expand=expand)
                assert width == table_width(bm, 0, lookahead=n_tokens, expand=expand)
                block_table(bm, rows, Output(1, width).array, expand=expand)
                if n_tokens:
                    with pytest.raises(ValueError, match="columns"):
                        block_table(bm, rows, Output(1, width - 1).array, expand=expand)
                aligned = table_width(bm, n_tokens, expand=expand, multiple_of=8)
                assert aligned % 8 == 0 <= aligned - width < 8
            bm.append_slot("a")
    assert table_width(BlockManager(4, 32), 100_000, lookahead=1) == 3126


# ---------------------------------------------------------------- the largest numbers


def test_slots_that_do_not_fit_into_int32_are_refused_only_in_a_large_pool() -> None:
    out = np.full(2, UNTOUCHED, np.int32)
    for block_size, fits in ((2**28, True), (2**28 + 1, False)):
        bm = BlockManager(8, block_size, rows=1)
        bm.pool.take_many(7)
        bm.allocate("a", block_size)
        starts = int32(block_size - 2)
        if fits:
            assert slot_mapping(bm, int32(0), starts, int32(2), out) == 2
            assert out.tolist() == [2**31 - 2, 2**31 - 1]
            continue
        out[:] = UNTOUCHED
        with pytest.raises(ValueError, match=f"out must be int64: the pool has {2**31 + 8} slots"):
            slot_mapping(bm, int32(0), starts, int32(2), out)
        assert (out == UNTOUCHED).all()


def test_the_largest_scale_that_fits_is_taken() -> None:
    bm = BlockManager(100, 4)
    bm.pool.take_many(99)
    bm.allocate("a", 1)
    for dtype, scale in ((np.int32, (2**31 - 1) // 99), (np.int64, 2**31 - 1)):
        out = Output(1, 1, dtype=dtype)
        block_table(bm, int32(0), out.array, scale=scale)
        assert out.read() == [[99 * scale]]


# ---------------------------------------------------------------- what the caller owns


def test_what_was_written_does_not_change_when_the_manager_does() -> None:
    for seed in range(10):
        world = random_world(4, True, seed)
        count = len(world.seqs)
        table, indptr, indices, slots = (
            Output(count, 200),
            Output(count + 1),
            Output(4000),
            Output(4000, dtype=np.int64),
        )
        spans = [world.span(entry) for entry in range(count)]
        starts, counts = np.array(spans, np.int32).T.copy()
        block_table(world.bm, world.rows, table.array)
        csr(world.bm, world.rows, indptr.array, indices.array)
        slot_mapping(world.bm, world.rows, starts, counts, slots.array)
        outputs = (table, indptr, indices, slots)
        before = [out.read() for out in outputs]
        change_at_random(world.bm, world.draw, 100, holes=True)
        assert [out.read() for out in outputs] == before


def test_the_manager_is_the_same_after_a_call() -> None:
    world = random_world(4, True, 3)
    bm = world.bm
    changes, gauges, counters = bm.drain_changes(), bm.gauges(), bm.counters.tolist()
    assert len(changes)
    block_table(bm, world.rows, Output(len(world.seqs), 200).array)
    csr(bm, world.rows, Output(len(world.seqs) + 1).array, Output(4000).array)
    assert bm.drain_changes().tolist() == []
    assert (bm.gauges(), bm.counters.tolist()) == (gauges, counters)
    bm.check()


def test_a_call_is_one_step_to_other_threads() -> None:
    """Two sequences hold all blocks in turn: a page is never seen in both."""
    bm = BlockManager(3000, 4, rows=2, columns=1)
    bm.allocate("a", 0)
    bm.allocate("b", 0)
    rows = bm.rows(["a", "b"])
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            for seq in ("a", "b"):
                bm.append_slots(seq, 12_000)
                bm.truncate(seq, 0)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(300):
            indptr, indices = np.empty(3, np.int32), np.empty(3000, np.int32)
            table = np.empty((2, 3000), np.int32)
            assert csr(bm, rows, indptr, indices) in (0, 3000)
            assert block_table(bm, rows, table, pad=-1) in (0, 3000)
            for ids in (indices[: indptr[2]], table[table >= 0]):
                assert len(np.unique(ids)) == len(ids)
    finally:
        stop.set()
        thread.join()


def aligned(count: int) -> np.ndarray:
    """int32 that begins at a whole 64 bytes, which JAX takes without a copy."""
    memory = np.empty(count * 4 + 64, np.int8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * 4].view(np.int32)


def test_torch_reads_what_was_written_without_a_copy() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    world = random_world(4, False, 1)
    count = len(world.seqs)
    tensor = torch.full((count, 64), UNTOUCHED, dtype=torch.int32)
    out = tensor.numpy()
    assert out.ctypes.data == tensor.data_ptr()
    block_table(world.bm, world.rows, out)
    expected = Output(count, 64)
    block_table(world.bm, world.rows, expected.array)
    assert tensor.tolist() == expected.read()
    for array in (expected.array, aligned(64)):
        for shared in (torch.from_numpy(array), torch.from_dlpack(array)):
            assert shared.data_ptr() == array.ctypes.data
            assert shared.dtype == torch.int32
    assert bool((torch.from_dlpack(world.bm.lengths) == torch.tensor(world.bm.lengths)).all())


def test_jax_reads_what_was_written_without_a_copy() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    world = random_world(4, False, 1)
    count = len(world.seqs)
    out = aligned(count * 64).reshape(count, 64)
    block_table(world.bm, world.rows, out)
    shared = jax.numpy.from_dlpack(out)
    assert shared.unsafe_buffer_pointer() == out.ctypes.data
    assert shared.tolist() == out.tolist()


def test_what_the_manager_shows_is_aligned_for_them() -> None:
    bm = random_world(4, False, 1).bm
    for array in (bm.block_tables, bm.lengths, bm.ref):
        assert array.ctypes.data % 64 == 0
