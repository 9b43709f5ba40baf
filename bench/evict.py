"""What does prefix sharing ask of the pool: evict the oldest, revive one from the middle?

Evicting is taking a block when nothing is free; reviving is retaining an evictable one.
Both are measured in a loop of C over the shipped ``.pxd``, which is what the core itself
pays, and as calls from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvcore
from bench.extensions import load
from bench.harness import Contender, Row, Target
from bench.reference import ReferencePool
from bench.workload import shuffled
from kvcore import BlockPool

__all__ = ["core_loops", "rows"]

WINDOW = 2_048
"""Blocks that one run evicts or revives."""

SMALL = 5 * WINDOW  # about 10^4
LARGE = 489 * WINDOW  # about 10^6

TARGET = Target.ns(must=30)


def core_loops() -> Any:
    """The compiled loops of C, built against the ``.pxd`` files of the kvcore in use."""
    return load("core_loops", Path(kvcore.__file__).parent)


class Evictable:
    """A pool of evictable blocks, least recently released first in the order given.

    A run evicts or revives the oldest ``WINDOW`` of them; afterwards they return as the
    youngest, and the next run meets those that were left alone for longest: in a large
    pool cold memory, as in life.
    """

    def __init__(self, pool: Any, order: NDArray[np.int32]) -> None:
        self.pool = pool
        self.windows = order.reshape(-1, WINDOW)
        self.turn = -1
        self.blocks = np.empty(WINDOW, np.int32)
        """The blocks of this run; a loop of C that takes blocks writes what it got."""
        self.ids: list[int] = []
        """The same as a list. Both are changed in place: the timed code holds them."""
        for _ in order:
            pool.take()
        for block in order.tolist():
            pool.keep(block)
            pool.release(block)
        self.show_next()

    @property
    def window(self) -> NDArray[np.int32]:
        """The oldest blocks when this run began."""
        window: NDArray[np.int32] = self.windows[self.turn % len(self.windows)]
        return window

    def show_next(self) -> None:
        """Move on to the next window."""
        self.turn += 1
        self.blocks[:] = self.window
        self.ids[:] = self.window.tolist()

    def put_back(self, release: Callable[[Any], object]) -> None:
        """Make evictable again what the last run holds."""
        if self.pool.ref[self.window[0]] == 0:
            return  # nothing has run yet
        if not np.array_equal(self.blocks, self.window):
            raise AssertionError("evicted in another order than least recently released first")
        for block in self.ids:
            self.pool.keep(block)
        release(self)
        self.show_next()


def in_core(evicting: bool, size: int, scattered: bool) -> Mapping[str, Contender]:
    """Evict or revive in a loop of C."""
    loops = core_loops()
    order = shuffled(size) if scattered else np.arange(size, dtype=np.int32)
    pool = BlockPool(size)
    blocks = Evictable(pool, order)
    return {
        "kvcore": Contender(
            "loop(pool, blocks)",
            "_ in once",
            {
                "loop": loops.take if evicting else loops.revive,
                "pool": pool,
                "blocks": blocks.blocks,
                "once": (None,),
            },
            operations=WINDOW,
            prepare=partial(blocks.put_back, lambda these: loops.release(pool, these.blocks)),
        )
    }


def from_python(evicting: bool, size: int) -> Mapping[str, Contender]:
    """Evict or revive by one call a block."""
    order = shuffled(size)
    contenders = {}
    for name, pool in (
        ("kvcore", BlockPool(size)),
        ("no-op", load("floor").Floor()),
        ("reference", ReferencePool(size)),
    ):
        blocks = None if name == "no-op" else Evictable(pool, order)
        contenders[name] = Contender(
            "pool.take()" if evicting else "pool.retain(block)",
            "block in blocks",
            {"pool": pool, "blocks": blocks.ids if blocks else order[:WINDOW].tolist()},
            operations=WINDOW,
            prepare=partial(blocks.put_back, release_each) if blocks else None,
        )
    return contenders


def release_each(blocks: Evictable) -> None:
    """Release by one call a block, least recently used first."""
    for block in blocks.ids:
        blocks.pool.release(block)


def rows() -> Iterator[Row]:
    """All rows of this file."""
    for evicting, verb in ((True, "evict"), (False, "revive")):
        for size, scattered, pool in (
            (SMALL, True, "10^4 evictable"),
            (LARGE, False, "10^6 evictable, in id order"),
            (LARGE, True, "10^6 evictable"),
        ):
            # Cold memory is no fault of the pool: a target for hot memory only.
            target = None if size == LARGE and scattered else TARGET
            yield Row(f"{verb} in C, {pool}", partial(in_core, evicting, size, scattered), target)
        for size, pool in ((SMALL, "10^4"), (LARGE, "10^6")):
            yield Row(f"{verb} from Python, {pool} evictable", partial(from_python, evicting, size))
