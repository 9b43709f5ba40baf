"""The memory of a pool of blocks, as planes: whatever the layout, one description.

A plane is one address and a few strides in bytes. It holds one piece of every block: the keys
of one layer, say. A piece is one or more rows at a fixed pitch, and in a row the tokens lie
side by side, so the first tokens of a block are the first bytes of each row. Copying block 3
to block 7 is copying the rows of its pieces, and needs to know nothing else about the layout.

=======================  ============================  ===============  ======
array                    layout                        planes           rows
=======================  ============================  ===============  ======
``[L, 2, NB, BS, H, D]`` ``NHD``                       ``2 L``          1
``[L, 2, NB, H, BS, D]`` ``HND``                       ``2 L``          ``H``
``[NB, 2, BS, H, D]``    ``FLASHINFER_NHD``, a layer   1                2
``[NB, 2, H, BS, D]``    ``FLASHINFER_HND``, a layer   1                ``2 H``
``[L, NB, BS, D]``       ``MLA``                       ``L``            1
``[NB, L, 2, BS, H, D]`` ``BLOCK_MAJOR_NHD``           1                ``2 L``
``[NB, L, 2, H, BS, D]`` ``BLOCK_MAJOR_HND``           1                ``2 L H``
=======================  ============================  ===============  ======
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvcore.array_memory import ArrayMemory, memory_of

__all__ = [
    "BLOCK_MAJOR_HND",
    "BLOCK_MAJOR_NHD",
    "FLASHINFER_HND",
    "FLASHINFER_NHD",
    "HND",
    "MLA",
    "NHD",
    "Layout",
    "Plane",
    "Planes",
    "matched",
    "planes_of",
]

# What the kernel counts in 32 bits.
MOST_BYTES = 2**31 - 1


class Layout(NamedTuple):
    """Which axes of an array count blocks and tokens; negative ones count from the end.

    Any other axis before them, between them or after them is found by its stride.
    """

    blocks: int
    tokens: int | None
    """None where a block has one value for all its tokens, as some scales are."""


NHD = Layout(-4, -3)
"""``[..., blocks, tokens, heads, head size]``; before it layers, keys and values, if any."""
HND = Layout(-4, -2)
"""``[..., blocks, heads, tokens, head size]``."""
FLASHINFER_NHD = Layout(-5, -3)
"""``[..., blocks, 2, tokens, heads, head size]``."""
FLASHINFER_HND = Layout(-5, -2)
"""``[..., blocks, 2, heads, tokens, head size]``."""
MLA = Layout(-3, -2)
"""``[..., blocks, tokens, latent size]``."""
BLOCK_MAJOR_NHD = Layout(0, -3)
"""``[blocks, ..., tokens, heads, head size]``: a block is one piece over all layers."""
BLOCK_MAJOR_HND = Layout(0, -2)
"""``[blocks, ..., heads, tokens, head size]``, and with MLA ``[blocks, ..., tokens, size]``."""


class Plane(NamedTuple):
    """One piece of every block: ``rows`` rows of ``row_bytes`` bytes."""

    address: int
    """Of the first byte of block 0."""
    block_stride: int
    """Bytes from one block to the next."""
    rows: int
    row_bytes: int
    pitch: int
    """Bytes from one row of a block to the next."""
    token_bytes: int
    """Bytes of one token in a row; 0 if rows are not divided among tokens."""


class Planes(NamedTuple):
    """The planes of one pool of blocks. ``a + b`` has those of both, of the same blocks."""

    planes: tuple[Plane, ...]
    num_blocks: int
    block_size: int | None
    """Tokens a block, None if no plane is divided among tokens."""
    device: int | None
    """Number of the CUDA device, None in host memory."""
    arrays: tuple[Any, ...]
    """The arrays that own the memory, held so that it stays."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all planes."""
        return sum(plane.rows * plane.row_bytes for plane in self.planes)

    def shares_memory(self, other: Planes) -> bool:
        """Whether a plane of one begins where one of the other does."""
        if self is other or self.device != other.device:
            return self is other
        return not {plane.address for plane in self.planes}.isdisjoint(
            plane.address for plane in other.planes
        )

    def __add__(self, other: object) -> Planes:
        """Join the planes of different tensors of the same blocks.

        Layers with rows of another size, or scales beside the values.

        Raises
        ------
        ValueError
            The two differ in ``num_blocks``, ``block_size`` or ``device``.
        """
        if not isinstance(other, Planes):
            return NotImplemented
        sizes = {size for size in (self.block_size, other.block_size) if size is not None}
        for name, mine, theirs, agree in (
            ("num_blocks", self.num_blocks, other.num_blocks, self.num_blocks == other.num_blocks),
            ("block_size", self.block_size, other.block_size, len(sizes) < 2),
            ("device", self.device, other.device, self.device == other.device),
        ):
            if not agree:
                raise ValueError(f"{name} must be the same in all planes, got {mine} and {theirs}")
        return Planes(
            self.planes + other.planes,
            self.num_blocks,
            max(sizes, default=None),
            self.device,
            self.arrays + other.arrays,
        )


def planes_of(arrays: Any, layout: Layout) -> Planes:
    """Describe a pool that is one array, or one array a layer.

    Parameters
    ----------
    arrays : array or sequence of arrays
        Of numpy, or of any library with DLPack or ``__cuda_array_interface__``; any type of
        elements. They are held, not copied.
    layout : Layout
        Which axes count blocks and tokens. The order of planes is that of the other axes.

    Raises
    ------
    TypeError
        One of ``arrays`` is not an array.
    ValueError
        An array is empty, read-only or has a stride of 0 or less; the tokens of a row do
        not lie side by side; the layout names an axis that is not there, or one axis twice;
        arrays differ in blocks, tokens or device; a block of a plane has 2 GiB or more.
    """
    many = list(arrays) if isinstance(arrays, list | tuple) else [arrays]
    if not many:
        raise ValueError("arrays must not be empty")
    described = [_describe(array, layout) for array in many]
    joined = described[0]
    for one in described[1:]:
        joined += one
    return joined


def _describe(array: Any, layout: Layout) -> Planes:
    memory = memory_of(array)
    ndim = len(memory.shape)
    named = [axis for axis in layout if axis is not None]
    if not all(-ndim <= axis < ndim for axis in named):
        raise ValueError(f"layout {layout} names an axis that shape {memory.shape} does not have")
    blocks = layout.blocks % ndim
    tokens = None if layout.tokens is None else layout.tokens % ndim
    if blocks == tokens:
        raise ValueError(f"layout {layout} names one axis of shape {memory.shape} twice")
    if prod(memory.shape) == 0:
        raise ValueError(f"array must not be empty, got shape {memory.shape}")
    # The stride of an axis of one element means nothing.
    if any(stride <= 0 < size - 1 for size, stride in zip(*memory[1:3], strict=True)):
        raise ValueError(f"strides must be positive, got {memory.strides}")
    return Planes(
        tuple(_planes(memory, blocks, tokens)),
        memory.shape[blocks],
        None if tokens is None else memory.shape[tokens],
        memory.device,
        (array,),
    )


def _planes(memory: ArrayMemory, blocks: int, tokens: int | None) -> list[Plane]:
    shape, strides = memory.shape, memory.strides
    inward = [axis for axis in range(len(shape)) if axis != blocks and shape[axis] > 1]
    inward.sort(key=lambda axis: -strides[axis])
    # The stride of a single token says nothing about what is inside it; the axes after it are.
    single = tokens if tokens is not None and shape[tokens] == 1 else None

    row_bytes, token_bytes = memory.itemsize, 0
    while inward and strides[inward[-1]] == row_bytes and token_bytes == 0:
        axis = inward[-1]
        if single is not None and axis < single:
            break
        if axis == tokens:
            token_bytes = row_bytes
        row_bytes *= shape[axis]
        inward.pop()
    if single is not None:
        token_bytes = row_bytes
    elif tokens is not None and token_bytes == 0:
        raise ValueError(
            f"tokens of a block must lie side by side, got shape {shape} and strides {strides} "
            f"with tokens on axis {tokens}"
        )

    rows, pitch = 1, row_bytes
    while inward and strides[inward[-1]] < strides[blocks]:
        if rows > 1 and strides[inward[-1]] != rows * pitch:
            break
        axis = inward.pop()
        if rows == 1:
            pitch = strides[axis]
        rows *= shape[axis]
    if rows * row_bytes > MOST_BYTES:
        raise ValueError(f"a block must have less than 2 GiB in a plane, got {rows * row_bytes}")

    outer = sorted(inward)
    offsets = np.zeros([shape[axis] for axis in outer], np.int64)
    for place, axis in enumerate(outer):
        steps = np.arange(shape[axis], dtype=np.int64) * strides[axis]
        offsets += steps.reshape([-1 if i == place else 1 for i in range(len(outer))])
    return [
        Plane(memory.address + offset, strides[blocks], rows, row_bytes, pitch, token_bytes)
        for offset in offsets.ravel().tolist()
    ]


def _row_by_row(planes: Sequence[Plane]) -> list[Plane]:
    """Planes of one row each."""
    return [
        plane._replace(address=plane.address + row * plane.pitch, rows=1, pitch=plane.row_bytes)
        for plane in planes
        for row in range(plane.rows)
    ]


def matched(source: Planes, destination: Planes) -> list[tuple[Plane, Plane]]:
    """Pair the planes between which copies go, in their order.

    The two may group rows differently, as a pool with an array a layer and a block-major one
    do; they are then paired row by row.

    Raises
    ------
    ValueError
        They are not the same rows of the same tokens. Copies move bytes as they are: between
        ``NHD`` and ``HND`` for example there is none.
    """

    def shapes(planes: Sequence[Plane]) -> list[tuple[int, int, int]]:
        return [(plane.rows, plane.row_bytes, plane.token_bytes) for plane in planes]

    ours: Sequence[Plane] = source.planes
    theirs: Sequence[Plane] = destination.planes
    if shapes(ours) != shapes(theirs):
        ours, theirs = _row_by_row(ours), _row_by_row(theirs)
    if len(ours) != len(theirs):
        raise ValueError(
            "source and destination must have the same rows, "
            f"got {len(ours)} and {len(theirs)} a block"
        )
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if shapes([one]) != shapes([other]):
            raise ValueError(
                "source and destination must have the same rows, "
                f"got {one.row_bytes} bytes ({one.token_bytes} a token) and "
                f"{other.row_bytes} bytes ({other.token_bytes} a token) at place {place}"
            )
    return list(zip(ours, theirs, strict=True))
