"""The source of the kernel that copies blocks, and its arguments.

``copy_blocks(planes, pairs, n_tokens, num_planes, num_pairs, tile_bytes, tiles)``:

planes
    The address of a ``plane_table``, where the device can read it.
pairs, n_tokens
    The addresses of the arrays of a ``CopyPlan``, likewise; 0 for no ``n_tokens``.
num_planes, num_pairs, tile_bytes, tiles
    uint32. A tile is what a thread block copies at a time, and a piece of a block has at most
    ``tiles``. ``num_planes * num_pairs * tiles`` must be below 2^31.

Any number of thread blocks of any size may be launched, in one dimension: each goes on to the
next piece of work until there is none.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from kvcore.planes import Planes, matched

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MOST_ITEMS", "PLANE", "THREADS", "TILE_BYTES", "kernel_source", "plane_table", "tiles"]

PLANE = np.dtype(
    [
        ("source", np.uint64),
        ("destination", np.uint64),
        ("source_stride", np.int64),
        ("destination_stride", np.int64),
        ("source_pitch", np.int64),
        ("destination_pitch", np.int64),
        ("rows", np.int32),
        ("row_bytes", np.int32),
        ("token_bytes", np.int32),
        ("unused", np.int32),
    ]
)
"""A plane as the kernel reads it."""

THREADS = 256
TILE_BYTES = THREADS * 4 * 16
"""Four loads of 16 bytes for each thread, which are in flight together. A multiple of 16."""

MOST_ITEMS = 2**31 - 1


def kernel_source() -> str:
    """CUDA C++ of ``copy_blocks``, for any compiler of it."""
    return files("kvcore").joinpath("copy_blocks.cu").read_text(encoding="utf-8")


def plane_table(source: Planes, destination: Planes) -> NDArray[np.void]:
    """Write the planes of two pools as the kernel reads them: a ``PLANE`` each.

    Raises ``ValueError`` if the two do not have the same rows.
    """
    rows = [
        (
            *(one.address, other.address, one.block_stride, other.block_stride),
            *(one.pitch, other.pitch, one.rows, one.row_bytes, one.token_bytes, 0),
        )
        for one, other in matched(source, destination)
    ]
    return np.array(rows, PLANE)


def tiles(table: NDArray[np.void], tile_bytes: int = TILE_BYTES) -> int:
    """Most tiles that a piece of a block has."""
    return -(-int((table["rows"] * table["row_bytes"]).max()) // tile_bytes)
