"""A batch of block copies as fragments of contiguous bytes, for engines that copy those."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FragmentCutter", "Fragments"]


class Fragments(NamedTuple):
    """Parallel uint64 arrays, contiguous: addresses to copy from and to, numbers of bytes."""

    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]
    sizes: NDArray[np.uint64]

    @property
    def mean_bytes(self) -> float:
        """Bytes of a fragment on average. Needs: there is one."""
        return float(self.sizes.mean())


class _Stretches(NamedTuple):
    """Contiguous bytes that every block has, parallel arrays: all of a plane, or a row."""

    addresses: NDArray[np.int64]
    """``(2, n, 1)``: of block 0, in the source and in the destination."""
    strides: NDArray[np.int64]
    """``(2, n, 1)``: from block to block."""
    sizes: NDArray[np.int64]
    """``(n, 1)``."""

    def which(self, chosen: NDArray[np.bool_]) -> _Stretches:
        return _Stretches(*(array[..., chosen, :] for array in self))


class FragmentCutter:
    """Finds the longest fragments of whole blocks between two pools.

    Pairs whose sources and destinations both follow each other are one fragment, where the
    blocks of a plane follow each other in memory on both sides.

    Parameters
    ----------
    table : ndarray
        From ``plane_table``.
    """

    def __init__(self, table: NDArray[np.void]) -> None:
        rows, row_bytes = table["rows"].astype(np.int64), table["row_bytes"].astype(np.int64)
        strides, pitches, addresses = (
            np.stack([table[f"source{of}"], table[f"destination{of}"]]).astype(np.int64)
            for of in ("_stride", "_pitch", "")
        )
        is_whole = (pitches == row_bytes).all(axis=0)
        row_bytes[is_whole] *= rows[is_whole]
        rows[is_whole] = 1

        plane = np.repeat(np.arange(len(table)), rows)
        row = np.arange(len(plane)) - np.repeat(np.cumsum(rows) - rows, rows)
        every = _Stretches(
            (addresses[:, plane] + row * pitches[:, plane])[..., None],
            strides[:, plane, None],
            row_bytes[plane, None],
        )
        # Blocks without gaps between them have none inside.
        is_adjacent = (every.strides == every.sizes).all(axis=0)[:, 0]
        self._adjacent, self._apart = every.which(is_adjacent), every.which(~is_adjacent)

    def cut(self, pairs: NDArray[np.int32]) -> Fragments:
        """Cut a batch into fragments. O(planes x pairs).

        ``pairs`` is that of a ``CopyPlan``; those with a negative id are left out.
        """
        blocks = pairs[(pairs >= 0).all(axis=1)]
        blocks = blocks[np.argsort(blocks[:, 0], kind="stable")].T.astype(np.int64, order="C")
        follows = np.zeros(blocks.shape[1], bool)
        follows[1:] = (np.diff(blocks) == 1).all(axis=0)
        heads = np.flatnonzero(~follows)
        ends, sizes = [], []
        for stretches, firsts, lengths in (
            (self._adjacent, blocks[:, heads], np.diff(heads, append=len(follows))),
            (self._apart, blocks, np.ones(len(follows), np.int64)),
        ):
            at = stretches.addresses + firsts[:, None] * stretches.strides
            ends.append(at.reshape(2, -1))
            sizes.append((stretches.sizes * lengths).ravel())
        sources, destinations = np.concatenate(ends, axis=1).astype(np.uint64, order="C")
        return Fragments(sources, destinations, np.concatenate(sizes).astype(np.uint64))
