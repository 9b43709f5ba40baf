"""Pools of every layout in one arena of bytes, and the obvious copy, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.planes import (
    BLOCK_MAJOR_HND,
    BLOCK_MAJOR_NHD,
    FLASHINFER_HND,
    FLASHINFER_NHD,
    HND,
    MLA,
    NHD,
    Layout,
    Planes,
    planes_of,
)

LAYERS, HEADS = 3, 2


class Tensor(NamedTuple):
    """An array to be laid into an arena: axes in the order of its indices."""

    shape: tuple[int, ...]
    layout: Layout
    nesting: tuple[int, ...] | None = None
    """Axes from the outermost in memory to the innermost; None for the order of indices."""


def tensors(kind: str, num_blocks: int, block_size: int, size: int) -> list[Tensor]:
    """The arrays of one pool of that kind; ``size`` is the head size."""
    one = (num_blocks, block_size, HEADS, size)
    by_head = (num_blocks, HEADS, block_size, size)
    return {
        "NHD stacked": [Tensor((LAYERS, 2, *one), NHD)],
        "NHD, a layer": [Tensor(one, NHD)],
        "NHD, an array a layer": [Tensor((2, *one), NHD) for _ in range(LAYERS)],
        "HND stacked": [Tensor((LAYERS, 2, *by_head), HND)],
        "HND, an array a layer": [Tensor((2, *by_head), HND) for _ in range(LAYERS)],
        "NHD seen, HND in memory": [Tensor((2, *one), NHD, nesting=(0, 1, 3, 2, 4))],
        "FlashInfer NHD": [
            Tensor((num_blocks, 2, *one[1:]), FLASHINFER_NHD) for _ in range(LAYERS)
        ],
        "FlashInfer HND": [Tensor((LAYERS, num_blocks, 2, *by_head[1:]), FLASHINFER_HND)],
        "MLA": [Tensor((LAYERS, num_blocks, block_size, 9 * size), MLA)],
        "block-major NHD": [Tensor((num_blocks, LAYERS, 2, *one[1:]), BLOCK_MAJOR_NHD)],
        "block-major HND": [Tensor((num_blocks, LAYERS, 2, *by_head[1:]), BLOCK_MAJOR_HND)],
        "hybrid with scales": [
            Tensor((LAYERS, 2, *one), NHD),
            Tensor((num_blocks, block_size, 5, size), NHD),
            Tensor((LAYERS, num_blocks, block_size, HEADS), Layout(-3, -2)),
            Tensor((LAYERS, num_blocks, HEADS), Layout(-2, None)),
        ],
    }[kind]


KINDS = (
    "NHD stacked",
    "NHD, a layer",
    "NHD, an array a layer",
    "HND stacked",
    "HND, an array a layer",
    "NHD seen, HND in memory",
    "FlashInfer NHD",
    "FlashInfer HND",
    "MLA",
    "block-major NHD",
    "block-major HND",
    "hybrid with scales",
)


class Pool:
    """Arrays in an arena of random bytes that begins at a multiple of 64.

    Parameters
    ----------
    shift : int
        Bytes between the start of the arena and the first array.
    pad : int
        Bytes left free after each block and after each row of heads, where the layout can
        have them, and between the arrays.
    """

    def __init__(
        self,
        kind: str,
        *,
        num_blocks: int = 7,
        block_size: int = 4,
        size: int = 8,
        itemsize: int = 2,
        shift: int = 0,
        pad: int = 0,
        seed: int = 0,
    ) -> None:
        self.specs = tensors(kind, num_blocks, block_size, size)
        strides = [padded_strides(spec, itemsize, pad) for spec in self.specs]
        spans = [
            sum((n - 1) * step for n, step in zip(spec.shape, steps, strict=True)) + itemsize
            for spec, steps in zip(self.specs, strides, strict=True)
        ]
        length = shift + sum(spans) + pad * (len(spans) + 1)
        owner = np.empty(length + 64, np.uint8)
        start = -owner.ctypes.data % 64
        self.arena = owner[start : start + length]
        self.arena[:] = np.random.default_rng(seed).integers(0, 256, length, np.uint8)
        self.arrays: list[NDArray[Any]] = []
        offset = shift
        for spec, steps, span in zip(self.specs, strides, spans, strict=True):
            dtype = np.dtype(f"u{itemsize}") if itemsize < 16 else np.dtype("c16")
            self.arrays.append(np.ndarray(spec.shape, dtype, self.arena, offset, steps))
            offset += span + pad
        self.num_blocks, self.block_size = num_blocks, block_size

    def planes(self) -> Planes:
        described = [
            planes_of(array, spec.layout)
            for array, spec in zip(self.arrays, self.specs, strict=True)
        ]
        joined = described[0]
        for one in described[1:]:
            joined += one
        return joined


def padded_strides(spec: Tensor, itemsize: int, pad: int) -> tuple[int, ...]:
    """Strides in bytes, padded outside the tokens' axis, and so never between tokens."""
    nesting = spec.nesting or tuple(range(len(spec.shape)))
    tokens = spec.layout.tokens
    inside = None if tokens is None else nesting.index(tokens % len(spec.shape))
    strides = [0] * len(spec.shape)
    step = itemsize
    for place, axis in reversed(list(enumerate(nesting))):
        strides[axis] = step
        step *= spec.shape[axis]
        if inside is not None and place <= inside:
            step += pad
    return tuple(strides)


def copy_obviously(
    source: Pool, destination: Pool, pairs: Sequence[Sequence[int]], counts: Sequence[int] | None
) -> None:
    """Token after token, by the indices of the arrays alone."""
    for one, other, spec in zip(source.arrays, destination.arrays, source.specs, strict=True):
        by_block = np.moveaxis(one, spec.layout.blocks, 0)
        into_block = np.moveaxis(other, spec.layout.blocks, 0)
        if spec.layout.tokens is not None:
            axes = (spec.layout.blocks, spec.layout.tokens)
            by_block, into_block = (np.moveaxis(array, axes, (0, 1)) for array in (one, other))
        for place, (src, dst) in enumerate(pairs):
            count = source.block_size if counts is None else counts[place]
            if src < 0 or dst < 0 or count == 0:
                continue
            if spec.layout.tokens is None:
                into_block[dst] = by_block[src]
                continue
            for token in range(count):
                into_block[dst, token] = by_block[src, token]


Copy = Callable[[Planes, Planes, NDArray[np.int32], NDArray[np.int32] | None], None]

PAIRS = np.array([[0, 6], [5, 2], [-1, 3], [0, 4], [1, -1]], np.int32)
"""Of 7 blocks: one source twice, two pairs of padding; blocks 1 and 3 stay untouched."""

# Offset of the first array, bytes of padding, and bytes of an element: so that addresses and
# strides are multiples of 16, of 4, or of nothing.
PLACES = [(0, 0, 2), (16, 32, 4), (4, 4, 4), (0, 12, 2), (1, 0, 1), (3, 5, 1), (2, 2, 2)]


def check_every_layout(copy: Copy, kind: str, block_size: int) -> None:
    """Compare ``copy`` with the obvious one, byte for byte over whole arenas."""
    for (shift, pad, itemsize), counts in product(PLACES, (None, [0, 1, 2, 3, 4])):
        pool, expected = (
            Pool(kind, block_size=block_size, shift=shift, pad=pad, itemsize=itemsize)
            for _ in range(2)
        )
        counts = None if counts is None else [min(count, block_size) for count in counts]
        n_tokens = None if counts is None else np.array(counts, np.int32)
        planes = pool.planes()
        copy(planes, planes, PAIRS, n_tokens)
        copy_obviously(expected, expected, PAIRS.tolist(), counts)
        np.testing.assert_array_equal(pool.arena, expected.arena)
        # Nobody copied nothing: the obvious copy changed the blocks it should.
        untouched = Pool(kind, block_size=block_size, shift=shift, pad=pad, itemsize=itemsize)
        assert (expected.arena != untouched.arena).any()


def check_between_two_pools(copy: Copy, kind: str, *, block_size: int = 4) -> None:
    """There and back between pools of other sizes, paddings and alignments."""
    for near_pad, far_pad in ((8, 6), (0, 16), (16, 0)):
        near, near2 = (Pool(kind, block_size=block_size, pad=near_pad, seed=1) for _ in range(2))
        far, far2 = (
            Pool(kind, block_size=block_size, num_blocks=11, shift=2, pad=far_pad, seed=2)
            for _ in range(2)
        )
        # One number on both sides is not a hazard here: they are different blocks.
        out, back = np.array([[3, 10], [2, 3]], np.int32), np.array([[10, 3], [0, 6]], np.int32)
        copy(near.planes(), far.planes(), out, None)
        copy_obviously(near2, far2, out.tolist(), None)
        copy(far.planes(), near.planes(), back, np.array([1, block_size], np.int32))
        copy_obviously(far2, near2, back.tolist(), [1, block_size])
        np.testing.assert_array_equal(near.arena, near2.arena)
        np.testing.assert_array_equal(far.arena, far2.arena)
