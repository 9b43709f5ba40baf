"""Sequences to work on, the same for kvcore and for the reference."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore import BlockManager

__all__ = ["BLOCK_SIZE", "Crowd", "phases", "set_free_order", "shuffled"]

BLOCK_SIZE = 16


def phases(count: int, tokens: int, seed: int = 0) -> list[int]:
    """``count`` lengths of about ``tokens``, at every position of a block alike.

    Lengths that all cross a block boundary in the same step would be predicted by the
    processor, and no real batch has them.
    """
    draw = random.Random(seed)
    return [tokens + draw.randrange(BLOCK_SIZE) for _ in range(count)]


def shuffled(count: int, seed: int = 0) -> NDArray[np.int32]:
    """The block ids ``0 … count - 1`` in random order."""
    return np.random.default_rng(seed).permutation(count).astype(np.int32)


def set_free_order(manager: Any, order: NDArray[np.int32]) -> None:
    """Let the pool hand out its blocks in that order. All of them must be free."""
    if isinstance(manager, BlockManager):
        manager.pool.take_many(manager.num_blocks)
        manager.pool.release_many(order)
    else:
        manager.pool.free.clear()
        manager.pool.free.extend(order.tolist())


class Crowd:
    """Sequences of one manager that can be put back to the lengths they started with."""

    def __init__(self, manager: Any, seqs: Sequence[Hashable], lengths: Sequence[int]) -> None:
        self.manager = manager
        self.starts = list(zip(seqs, lengths, strict=True))
        for seq, length in self.starts:
            manager.allocate(seq, length)

    def restore(self) -> None:
        """Truncate every sequence to its first length."""
        truncate = self.manager.truncate
        for seq, length in self.starts:
            truncate(seq, length)

    def expect_grown(self, tokens: int) -> None:
        """Fail unless every sequence has exactly ``tokens`` more than it started with."""
        for seq, length in self.starts:
            found = self.manager.lens[seq]
            if found != length + tokens:
                raise AssertionError(f"{seq!r} has {found} tokens instead of {length + tokens}")
        if isinstance(self.manager, BlockManager):
            self.manager.check()
