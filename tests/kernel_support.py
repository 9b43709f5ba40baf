"""Random managers for the tests of kernel metadata, and output arrays that notice overruns."""

from __future__ import annotations

import random
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore import BlockManager, OutOfBlocks

UNTOUCHED = -77
GUARD = 16


def int32(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def change_at_random(bm: BlockManager, draw: random.Random, times: int, holes: bool) -> None:
    """Sequences begin, fork, grow, shrink and end; with ``holes`` windows move over them."""
    size = bm.block_size
    for _ in range(times):
        live = list(bm)
        name = draw.randrange(1_000_000)
        what = draw.randrange(8 if holes else 6)
        with suppress(OutOfBlocks, ValueError):  # a block that a window has given back
            if what == 0 or not live:
                bm.allocate(name, draw.choice([0, 1, size, draw.randrange(6 * size + 2)]))
                continue
            seq = draw.choice(live)
            length = bm.lens[seq]
            if what == 1:
                bm.fork(seq, name, draw.randint(0, length))
            elif what == 2:
                bm.append_slots(seq, draw.randint(1, 2 * size))
            elif what == 3:
                bm.append_slot(seq)
            elif what == 4:
                bm.truncate(seq, draw.randint(length // 2, length))
            elif what == 5:
                if len(live) > 12:
                    bm.free_seq(seq)
            else:
                bm.release_outside_window(
                    bm.rows([seq]),
                    int32(draw.randint(0, length)),
                    draw.randint(1, 3 * size),
                    draw.choice([0, 1, size, 2 * size]),
                )


@dataclass
class World:
    """A manager, a batch of its sequences in any order, some of them twice, and lengths."""

    bm: BlockManager
    draw: random.Random
    seqs: list[Hashable]
    lengths: list[int]

    @property
    def rows(self) -> NDArray[np.int32]:
        return self.bm.rows(self.seqs)

    def cell(self, entry: int, token: int) -> int:
        """The block of a token, -1 if a window has given it back."""
        return self.bm.tables[self.seqs[entry]][token // self.bm.block_size]

    def page(self, entry: int, token: int, expand: int) -> int:
        """The kernel's page of a token whose block is there."""
        of_block = token % self.bm.block_size * expand // self.bm.block_size
        return self.cell(entry, token) * expand + of_block

    def held(self, entry: int) -> list[int]:
        """The tokens of a sequence whose blocks are there."""
        return [token for token in range(self.lengths[entry]) if self.cell(entry, token) >= 0]

    def span(self, entry: int) -> tuple[int, int]:
        """Some tokens in a row whose blocks are there: first and count."""
        held = self.held(entry)
        if not held or self.draw.random() < 0.2:
            return self.draw.randint(0, self.lengths[entry]), 0
        start = self.draw.choice(held)
        stop = start + 1
        while stop in held and self.draw.random() < 0.9:
            stop += 1
        return start, stop - start


def random_world(block_size: int, holes: bool, seed: int) -> World:
    draw = random.Random(seed)
    bm = BlockManager(500, block_size, rows=2, columns=1)
    order = list(range(500))
    draw.shuffle(order)
    bm.pool.take_many(500)
    bm.pool.release_many(order)
    change_at_random(bm, draw, 150, holes)
    seqs = draw.choices(list(bm), k=draw.randint(1, 12))
    world = World(bm, draw, seqs, [bm.lens[seq] for seq in seqs])
    for entry, length in enumerate(world.lengths):
        shorter = draw.randint(0, length)
        if shorter % block_size and world.cell(entry, shorter - 1) < 0:
            shorter -= shorter % block_size
        world.lengths[entry] = draw.choice([shorter, length])
    return world


class Output:
    """An array for a call to write, with memory around it that no call may touch."""

    def __init__(self, *shape: int, dtype: Any = np.int32) -> None:
        size = int(np.prod(shape))
        self.memory = np.full(size + 2 * GUARD, UNTOUCHED, dtype)
        self.array = self.memory[GUARD : GUARD + size].reshape(shape)

    def read(self) -> list[Any]:
        """What was written; fails if anything was written around it."""
        assert (self.memory[:GUARD] == UNTOUCHED).all()
        assert (self.memory[len(self.memory) - GUARD :] == UNTOUCHED).all()
        return self.array.tolist()
