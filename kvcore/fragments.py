"""A batch of block copies as stretches of contiguous bytes, for engines that copy those."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Fragments", "fragments"]


class Fragments(NamedTuple):
    """Parallel arrays, uint64: addresses to copy from and to, and numbers of bytes."""

    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]
    sizes: NDArray[np.uint64]

    @property
    def mean_bytes(self) -> float:
        """Bytes of a fragment on average. Needs: there is one."""
        return float(self.sizes.mean())


def fragments(table: NDArray[np.void], pairs: NDArray[np.int32]) -> Fragments:
    """Find the longest contiguous stretches of whole blocks. O(planes x pairs).

    Pairs whose sources and destinations both follow each other become one, where blocks of a
    plane do so in memory on both sides.

    Parameters
    ----------
    table : ndarray
        From ``plane_table``.
    pairs : ndarray
        int32 ``(n, 2)`` of a ``CopyPlan``; those with a negative id are left out.
    """
    blocks = pairs[(pairs >= 0).all(axis=1)].astype(np.int64)
    blocks = blocks[np.argsort(blocks[:, 0], kind="stable")]
    follows = np.zeros(len(blocks), bool)
    follows[1:] = (np.diff(blocks, axis=0) == 1).all(axis=1)
    heads = np.flatnonzero(~follows)
    lengths = np.diff(heads, append=len(blocks))

    piece = table["rows"].astype(np.int64) * table["row_bytes"]
    is_one_stretch = (table["source_pitch"] == table["row_bytes"]) & (
        table["destination_pitch"] == table["row_bytes"]
    )
    # Blocks without gaps between them have none inside.
    is_adjacent = (table["source_stride"] == piece) & (table["destination_stride"] == piece)

    found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []

    def add(
        planes: NDArray[np.void],
        firsts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        row: NDArray[np.int64] | int = 0,
    ) -> None:
        sides = []
        for side, column in (("source", 0), ("destination", 1)):
            address = planes[side].astype(np.int64) + row * planes[f"{side}_pitch"]
            sides.append(address[:, None] + firsts[:, column] * planes[f"{side}_stride"][:, None])
        found.append((sides[0], sides[1], np.broadcast_to(sizes, sides[0].shape)))

    add(table[is_adjacent], blocks[heads], piece[is_adjacent, None] * lengths)
    whole = is_one_stretch & ~is_adjacent
    add(table[whole], blocks, piece[whole, None])
    in_rows = table[~is_one_stretch]
    by_row = np.repeat(in_rows, in_rows["rows"])
    ends = np.cumsum(in_rows["rows"], dtype=np.int64)
    row = np.arange(len(by_row)) - np.repeat(ends - in_rows["rows"], in_rows["rows"])
    add(by_row, blocks, by_row["row_bytes"].astype(np.int64)[:, None], row)
    return Fragments(
        *(
            np.concatenate([part.ravel() for part in parts]).astype(np.uint64)
            for parts in zip(*found, strict=True)
        )
    )
