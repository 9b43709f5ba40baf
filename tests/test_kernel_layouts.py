"""The layouts of single kernels, against slow and obvious versions over random managers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from kernel_support import Output, World, int32, random_world

from kvcore import BlockManager
from kvcore.kernel_layouts import flex_tables, ragged, slices, trtllm_offsets, window_info
from kvcore.kernel_metadata import csr, slot_mapping


@pytest.fixture(params=[(size, holes) for size in (1, 4, 16) for holes in (False, True)], ids=str)
def worlds(request: pytest.FixtureRequest) -> list[World]:
    size, holes = request.param
    return [random_world(size, holes, seed) for seed in range(25)]


def tables(world: World) -> list[list[int]]:
    """The blocks of each sequence of the batch, -1 where a window has given one back."""
    size = world.bm.block_size
    return [
        [world.cell(entry, token) for token in range(0, length, size)]
        for entry, length in enumerate(world.lengths)
    ]


def test_slices(worlds: list[World]) -> None:
    for world in worlds:
        size = world.bm.block_size
        spans = [world.span(entry) for entry in range(len(world.seqs))]
        runs: list[list[int]] = []
        placed = 0
        for entry, (start, count) in enumerate(spans):
            for token in range(start, start + count):
                if token == start or token % size == 0:
                    runs.append([world.cell(entry, token) * size + token % size, placed, 0])
                runs[-1][2] += 1
                placed += 1
        more = world.draw.choice([0, 3])
        out = Output(3, len(runs) + more)
        starts, counts = np.array(spans, np.int32).T.copy()
        assert slices(world.bm, world.rows, starts, counts, out.array) == len(runs)
        assert out.read() == np.array([*runs, *[[0] * 3] * more]).reshape(-1, 3).T.tolist()
        slots = np.empty(placed, np.int64)
        slot_mapping(world.bm, world.rows, starts, counts, slots)
        unrolled = [slot + step for slot, _, length in runs for step in range(length)]
        assert slots.tolist() == unrolled


@pytest.mark.parametrize("secondary", [False, True])
def test_trtllm_offsets(worlds: list[World], secondary: bool) -> None:
    for world in worlds:
        blocks = tables(world)
        layers, more = world.draw.choice([1, 32]), world.draw.choice([0, 3])
        width = max(map(len, blocks)) + world.draw.choice([0, 2])
        expected = np.full((len(blocks) + more, 2, width), 2**32 - 1, np.uint64)
        for entry, row in enumerate(blocks):
            for column, block in enumerate(row):
                for field in range(2):
                    if block >= 0:
                        offset = block * 2 * layers + field
                        expected[entry, field, column] = offset + 2**31 * secondary
        out = Output(*expected.shape)
        written = trtllm_offsets(
            world.bm, world.rows, out.array, layers=layers, lengths=int32(*world.lengths),
            secondary=secondary,
        )  # fmt: skip
        assert written == 2 * sum(map(len, blocks))
        out.read()
        assert out.array.view(np.uint32).tolist() == expected.tolist()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("chunk", [None, 2, 3])
def test_ragged(worlds: list[World], flat: bool, chunk: int | None) -> None:
    for world in worlds:
        entries = [entry for entry, length in enumerate(world.lengths) if length]
        most = [world.draw.choice([1, 2, 3, world.lengths[entry]]) for entry in entries]
        counts = [
            min(count, world.lengths[entry]) for entry, count in zip(entries, most, strict=True)
        ]
        order = sorted(range(len(entries)), key=lambda at: (counts[at] != 1, counts[at] != chunk))
        entries, counts = [entries[at] for at in order], [counts[at] for at in order]
        rows = world.rows[entries]
        lengths = [world.lengths[entry] for entry in entries]
        blocks = [[max(block, 0) for block in tables(world)[entry]] for entry in entries]
        height = len(entries) + world.draw.choice([0, 3])
        width = max(map(len, blocks), default=0) + world.draw.choice([0, 2])
        padded = [row + [0] * (width - len(row)) for row in blocks]
        padded += [[0] * width] * (height - len(padded))
        pages = Output(height * width) if flat else Output(height, width)
        kv_lens, cu_q_lens = Output(height), Output(height + 1)
        num_seqs, distribution = Output(1), Output(3)
        written = ragged(
            world.bm, rows, int32(*counts), kv_lens.array, pages.array, cu_q_lens.array,
            num_seqs=num_seqs.array, distribution=distribution.array, chunk_prefill_size=chunk,
            lengths=int32(*lengths),
        )  # fmt: skip
        assert written == sum(map(len, blocks))
        assert pages.read() == ([page for row in padded for page in row] if flat else padded)
        assert kv_lens.read() == lengths + [0] * (height - len(lengths))
        sums = [0, *accumulate(counts)]
        assert cu_q_lens.read() == sums + sums[-1:] * (height - len(counts))
        assert num_seqs.read() == [len(counts)]
        decodes, chunks = counts.count(1), counts.count(chunk) if chunk else 0
        assert distribution.read() == [decodes, decodes + chunks, len(counts)]


@pytest.mark.parametrize(
    ("counts", "wrong"),
    [
        ([1, 1, 4, 4, 2, 3], None),
        ([1, 2, 1, 4, 4, 3], 2),
        ([1, 1, 4, 2, 4, 3], 4),
        ([4, 1, 1, 2, 2, 3], 1),
        ([3, 2, 3, 5, 4, 4], 4),
        ([2, 3, 2, 5, 3, 2], None),
    ],
)
def test_the_order_of_a_distribution_is_checked(counts: list[int], wrong: int | None) -> None:
    bm = BlockManager(20, 4)
    for seq in range(6):
        bm.allocate(seq, 9)
    rows = bm.rows(range(6))
    kv_lens, pages, cu_q_lens, ends = Output(6), Output(6, 3), Output(7), Output(3)
    outputs = (kv_lens.array, pages.array, cu_q_lens.array)
    if wrong is not None:
        before = [one.read() for one in (kv_lens, pages, cu_q_lens, ends)]
        named = f"entry {wrong} has {counts[wrong]} tokens .* before entry {wrong - 1}, .* "
        with pytest.raises(ValueError, match=named + str(counts[wrong - 1])):
            ragged(
                bm, rows, int32(*counts), *outputs, distribution=ends.array, chunk_prefill_size=4
            )
        assert [one.read() for one in (kv_lens, pages, cu_q_lens, ends)] == before
    # Version 2 takes any order.
    assert ragged(bm, rows, int32(*counts), *outputs, chunk_prefill_size=4) == 18


def test_flex_tables(worlds: list[World]) -> None:
    for world in worlds:
        blocks = tables(world)
        height = len(blocks) + world.draw.choice([0, 2])
        width = max(map(len, blocks)) + world.draw.choice([0, 2])
        num_pages = world.bm.num_blocks + world.draw.choice([0, 3])
        there = Output(height, width, dtype=np.int64)
        back = Output(height, num_pages, dtype=np.int64)
        written = flex_tables(
            world.bm, world.rows, there.array, back.array, lengths=int32(*world.lengths)
        )
        assert written == sum(map(len, blocks))
        padded = [row + [-1] * (width - len(row)) for row in blocks]
        assert there.read() == padded + [[-1] * width] * (height - len(padded))
        for entry, column_of in enumerate(back.read()):
            row = blocks[entry] if entry < len(blocks) else []
            assert column_of == [
                row.index(block) if block in row else -1 for block in range(num_pages)
            ]


def seen_by_newest(length: int, window: int, sinks: int) -> set[int]:
    return {*range(min(sinks, length)), *range(max(0, length - window), length)}


def test_window_info_finds_what_the_newest_token_sees(worlds: list[World]) -> None:
    """Through the pages: TVM's reading of length_info over csr gives just those slots."""
    refused = 0
    for world in worlds:
        bm, size = world.bm, world.bm.block_size
        window = world.draw.randint(1, 3 * size)
        sinks = world.draw.choice([0, 1, size, 2 * size])
        lengths = int32(*world.lengths)
        count = len(world.seqs)
        out = Output(3, count + 2)
        visible = [seen_by_newest(length, window, sinks) for length in world.lengths]
        if any(not seen <= set(world.held(entry)) for entry, seen in enumerate(visible)):
            before = out.read()
            with pytest.raises(ValueError, match=r"window, sinks: .* which it sees"):
                window_info(bm, world.rows, out.array, window, sinks, lengths=lengths)
            assert out.read() == before
            refused += 1
            continue
        assert window_info(bm, world.rows, out.array, window, sinks, lengths=lengths) == count
        info = np.array(out.read()).T
        assert not info[count:].any()
        indptr, indices, last = (np.empty(size, np.int32) for size in (count + 1, 4000, count))
        csr(bm, world.rows, indptr, indices, last_page_len=last, lengths=lengths)
        for entry, seen in enumerate(visible):
            last_page_len, offset, sink = info[entry].tolist()
            assert last_page_len == last[entry]
            if len(seen) == world.lengths[entry]:
                assert (offset, sink) == (0, 0)
            pages = indices[indptr[entry] : indptr[entry + 1]]
            held = max(len(pages) - 1, 0) * size + last_page_len
            places = [*range(sink), *range(offset, held)]
            slots = [pages[place // size] * size + place % size for place in places]
            assert slots == [
                world.cell(entry, token) * size + token % size for token in sorted(seen)
            ]
    assert refused < len(worlds)


def test_what_is_in_holes_is_refused() -> None:
    bm = BlockManager(20, 2)
    bm.allocate("a", 12)
    bm.release_outside_window(bm.rows(["a"]), int32(12), 5, 2)
    assert bm.tables["a"] == [0, -1, -1, -1, 4, 5]
    out: Any = Output(3, 1).array
    for window, sinks in ((5, 3), (4, 3), (12, 0), (5, 12)):
        with pytest.raises(ValueError, match="window, sinks"):
            window_info(bm, bm.rows(["a"]), out, window, sinks)
    window_info(bm, bm.rows(["a"]), out, 4, 2)
    assert out.ravel().tolist() == [2, 2, 2]
    window_info(bm, bm.rows(["a"]), out, 3, 1)
    assert out.ravel().tolist() == [2, 3, 1]


def test_the_most_layers_that_fit_are_taken() -> None:
    bm = BlockManager(100, 4)
    bm.pool.take_many(99)
    bm.allocate("a", 1)
    out = np.empty((1, 2, 1), np.int32)
    layers = (2**31 - 1) // 200
    trtllm_offsets(bm, bm.rows(["a"]), out, layers=layers)
    assert out.ravel().tolist() == [198 * layers, 198 * layers + 1]


def test_slices_are_refused_in_a_pool_whose_slots_do_not_fit() -> None:
    for block_size, fits in ((2**28, True), (2**28 + 1, False)):
        bm = BlockManager(8, block_size, rows=1)
        bm.pool.take_many(7)
        bm.allocate("a", block_size)
        out = Output(3, 1)
        if fits:
            slices(bm, int32(0), int32(block_size - 1), int32(1), out.array)
            assert out.read() == [[2**31 - 1], [0], [1]]
            continue
        before = out.read()
        with pytest.raises(ValueError, match="out must be int64: the pool has"):
            slices(bm, int32(0), int32(block_size - 1), int32(1), out.array)
        assert out.read() == before
