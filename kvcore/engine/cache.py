"""Keys and values in blocks: written by slots, read by block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcore.planes import NHD, planes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.engine.llama import LlamaShape

__all__ = ["PagedCache"]


class PagedCache:
    """Room for the keys and values of ``num_blocks`` blocks.

    What has not been written, or belongs to nobody any more, is NaN: whoever reads it by
    mistake computes NaN from there on, and cannot go unnoticed.

    Parameters
    ----------
    shape : LlamaShape
    num_blocks, block_size : int

    Attributes
    ----------
    blocks : ndarray
        float32 ``(layers, 2, num_blocks, block_size, kv_heads, head_size)``: keys, then
        values.
    planes : Planes
        The same memory, for copiers.
    """

    def __init__(self, shape: LlamaShape, num_blocks: int, block_size: int) -> None:
        self.blocks = np.full(
            (shape.layers, 2, num_blocks, block_size, shape.kv_heads, shape.head_size),
            np.nan,
            np.float32,
        )
        self._by_slot = self.blocks.reshape(shape.layers, 2, -1, shape.kv_heads, shape.head_size)
        self.planes = planes_of(self.blocks, NHD)
        self._is_written = np.zeros(num_blocks, np.bool_)

    def write(
        self,
        layer: int,
        slots: NDArray[np.int64],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """Store ``(n, kv_heads, head_size)`` keys and values at n slots.

        Whoever writes the first slot of a block is its new owner, so the rest of it is
        erased: those who had it before may have left it in the planning of this very step.
        """
        size = self.blocks.shape[3]
        blocks, offsets = np.divmod(slots, size)
        self.blocks[layer][:, blocks[offsets == 0]] = np.nan
        self._by_slot[layer, 0, slots] = keys
        self._by_slot[layer, 1, slots] = values
        self._is_written[blocks] = True

    def slots(self, table: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the slots in which a block table has the tokens at these positions."""
        size = self.blocks.shape[3]
        return table[positions // size].astype(np.int64) * size + positions % size

    def read(
        self, layer: int, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Gather the keys and values of n slots: two ``(n, kv_heads, head_size)``."""
        keys, values = self._by_slot[layer][:, slots]
        return keys, values

    def begin_copies(self, blocks: NDArray[np.int32]) -> None:
        """Erase blocks to which others are about to be copied, perhaps only in part."""
        self.erase(blocks)
        self._is_written[blocks] = True

    def erase(self, blocks: NDArray[np.int32]) -> None:
        """Forget what is in blocks that nobody wants any more."""
        written = blocks[self._is_written[blocks]]
        self.blocks[:, :, written] = np.nan
        self._is_written[written] = False

    def erase_slots(self, slots: NDArray[np.int64]) -> None:
        """Forget single tokens, as those of rejected drafts."""
        self._by_slot[:, :, slots] = np.nan
