"""Garbage collections in the middle of calls, whose finalizers call the same manager.

Before CPython 3.12 any new container may start one. A call must then find nothing half done
by another, and itself go on from what it finds.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator

import pytest

from kvcore import BlockManager, OutOfBlocks, Removed, Stored

SEEDS = range(6)
ROUNDS = 1_500
WHAT = ["allocate", "allocate", "free", "evict", "reset", "pin"]


class Meddler:
    """Garbage from the start, which does something to the manager when it is collected."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.itself = self

    def __del__(self) -> None:
        self.act()


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.freeze()  # what is here already would make each collection slow
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    gc.enable()


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bm = BlockManager(24, 2, prefix_caching=True, rows=1, columns=1)
        assert self.bm.prefix_index is not None
        self.index = self.bm.prefix_index
        self.mirror: set[int] = set()
        self.next_id = 0
        self.depth = 0
        self.meddled = 0
        self.stopped = False

    def arm(self) -> None:
        """Let one of the next containers, in the call that follows, start a collection."""
        if self.depth == 0:
            gc.disable()
            gc.collect()  # freed lists and tuples are kept to be used again without one
            Meddler(self.meddle)
            gc.set_threshold(self.random.randrange(1, 9), 1_000, 1_000)
            gc.enable()

    def meddle(self) -> None:
        if self.stopped or self.depth:
            return
        self.depth += 1
        try:
            self.meddled += 1
            for _ in range(3):
                self.act(self.random.choice(WHAT))
        except KeyError:  # it was freed meanwhile
            pass
        finally:
            self.depth -= 1

    def act(self, what: str) -> None:
        bm, choose = self.bm, self.random
        tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 9))]
        # Mostly new: their keys come and go.
        namespace = choose.choice(["shared", f"salt {choose.randrange(10**6)}"])
        seqs = list(bm)
        if what == "allocate":
            self.next_id += 1
            seq, partial = self.next_id, choose.random() < 0.1
            self.arm()
            try:
                bm.allocate(seq, tokens=tokens, namespace=namespace, partial_hit=partial)
            except OutOfBlocks:
                return
            bm.commit(seq)
        elif what == "free" and seqs:
            bm.free_seq(choose.choice(seqs))
        elif what == "evict":
            bm.evict(choose.randrange(4))
        elif what == "reset" and choose.randrange(8) == 0:
            bm.reset()
        elif what == "pin":
            self.arm()
            pin = bm.pin_prefix(tokens, namespace=namespace)
            assert all(bm.ref[block] for block in pin.blocks)
            pin.release()

    def follow(self) -> None:
        """A drain in which collections happen, and one that tells what they left."""
        self.arm()
        changes = self.index.drain()
        self.depth += 1
        for change in [*changes, *self.index.drain()]:
            if isinstance(change, Stored):
                self.mirror.add(change.uid)
            elif isinstance(change, Removed):
                self.mirror.remove(change.uid)
            else:
                self.mirror.clear()
        assert self.mirror == set(self.index.uids().tolist()) - {0}
        self.depth -= 1


def test_a_collection_in_the_middle_of_a_call_finds_nothing_half_done() -> None:
    for seed in SEEDS:
        world = World(seed)
        world.index.start_log(world.random.choice([2, 0]))
        for _ in range(ROUNDS):
            what = world.random.choice([*WHAT, "drain"])
            if what == "drain":
                world.follow()
            else:
                try:
                    world.act(what)
                except KeyError:
                    assert what == "free"
        world.stopped = True
        gc.collect()
        world.bm.check()
        world.follow()
        assert world.meddled > ROUNDS // 10
