"""Sequences in host memory: each call does all it says at both ends, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from state import plain, snapshot

from kvcore.block_manager import BlockManager
from kvcore.host_tier import HostTier


class Refusing:
    """A manager, of whose calls that may be refused the ``refused``-th is.

    A pin needs memory only if it is the first of its pool.
    """

    MAY_BE_REFUSED = frozenset(
        ["allocate", "commit", "exclusive_blocks", "free_seq", "prompt_of", "restore"]
    )

    def __init__(self, target: BlockManager) -> None:
        self.target = target
        self.refused: int | None = None
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name in self.MAY_BE_REFUSED or (name == "pin" and not self.has_pins()):
            self.calls += 1
            if self.calls - 1 == self.refused:
                return self.refuse
        return getattr(self.target, name)

    def has_pins(self) -> bool:
        pool = self.target.pool
        return any(pool.pins(block) for block in range(pool.num_blocks))

    def refuse(self, *_: Any, **__: Any) -> None:
        raise MemoryError

    def __contains__(self, seq: object) -> bool:
        return seq in self.target


class World:
    """Sequences on the device ("here"), on their way out, in host memory, on their way in.

    All begin with the same two blocks, which stay on the device, and have one to themselves.
    """

    def __init__(self, in_flight: bool) -> None:
        self.bm, self.host = (
            Refusing(BlockManager(20, 4, prefix_caching=True)),
            Refusing(BlockManager(20, 4)),
        )
        self.tier = HostTier(self.bm, self.host)  # type: ignore[arg-type]
        for seq in ("here", "out", "away", "in"):
            self.bm.allocate(seq, tokens=[*range(8), 9])
            self.bm.commit(seq)
        for seq in ("out", "away", "in"):
            self.tier.begin_out(seq, 7)
        for seq in ("away", "in"):
            self.tier.end_out(seq, 7)
        self.tier.begin_in("in")
        if in_flight:
            self.bm.fence()

    def state(self) -> object:
        for manager in (self.bm, self.host):
            manager.target.check()
        known = {seq: self.bm.known(seq) for seq in self.bm.target}
        away = {seq: plain(self.tier.recall(seq)[2]) for seq in self.seqs() if seq in self.tier}
        return snapshot(self.bm.target), snapshot(self.host.target), known, away

    @staticmethod
    def seqs() -> tuple[str, ...]:
        return ("here", "out", "away", "in")


CALLS: dict[str, Callable[[HostTier], object]] = {
    "begin_out": lambda tier: tier.begin_out("here", 7),
    "end_out": lambda tier: tier.end_out("out", 8),
    "cancel_out": lambda tier: tier.cancel_out("out"),
    "begin_in": lambda tier: tier.begin_in("away"),
    "end_in": lambda tier: tier.end_in("in"),
    "cancel_in": lambda tier: tier.cancel_in("in"),
    "drop": lambda tier: tier.drop("away"),
}


@pytest.mark.parametrize("in_flight", [False, True], ids=["settled", "in flight"])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_call_that_is_refused_half_way_changes_neither_end(
    call: Callable[[HostTier], object], in_flight: bool
) -> None:
    served = World(in_flight)
    for manager in (served.bm, served.host):
        manager.calls = 0
    call(served.tier)
    refusals = 0
    for end in ("bm", "host"):
        for number in range(getattr(served, end).calls):
            world = World(in_flight)
            before, manager = world.state(), getattr(world, end)
            manager.calls, manager.refused = 0, number
            with pytest.raises(MemoryError):
                call(world.tier)
            manager.refused = None
            assert world.state() == before
            call(world.tier)
            assert world.state() == served.state()
            refusals += 1
    assert refusals >= 1


def tier_of_two() -> tuple[BlockManager, BlockManager, HostTier]:
    """ "a" and "here" begin with blocks 0 and 1; "a" has block 2 for itself."""
    bm, host = BlockManager(20, 4, prefix_caching=True), BlockManager(20, 4)
    for seq in ("a", "here"):
        bm.allocate(seq, tokens=[*range(8), 9])
        bm.commit(seq)
    return bm, host, HostTier(bm, host)


def test_a_sequence_leaves_with_what_it_has_alone_and_finds_the_rest_again() -> None:
    bm, host, tier = tier_of_two()
    assert tier.blocks_to_move(["a", "here"]) == 2
    assert tier.begin_out("a", 7).tolist() == [[2, 0]]
    assert bm.tables["a"] == [0, 1, 2], "the copy may fail"
    tier.end_out("a", 8)
    assert "a" not in bm
    assert "a" in tier
    assert [bm.pool.pins(block) for block in range(3)] == [1, 1, 0]
    assert tier.recall("a")[0::2] == (9, 8)
    assert tier.blocks_kept(["a"]) == 2
    assert tier.blocks_to_return("a") == 1
    pairs, pending = tier.begin_in("a")
    fresh = bm.tables["a"][2]
    assert bm.tables["a"][:2] == [0, 1]
    assert (pairs.tolist(), pending) == ([[0, fresh]], 8)
    assert [bm.pool.pins(block) for block in range(3)] == [0, 0, 0]
    assert bm.published("a") == 0, "its data is not there yet"
    tier.end_in("a")
    assert bm.published("a") == 2
    assert bm.tokens("a").tolist() == [*range(8), 9]
    assert "a" not in tier
    assert len(host) == 0
    bm.check()
    host.check()


def test_what_a_window_gives_back_on_the_way_out_does_not_come_back() -> None:
    bm, host, tier = tier_of_two()
    tier.begin_out("a", 7)
    assert bm.release_outside_window(bm.rows(["a"]), np.array([9], np.int32), 6) == 1
    tier.end_out("a", 7)
    assert [bm.pool.pins(block) for block in range(3)] == [0, 1, 0]
    assert tier.blocks_kept(["a"]) == 1
    tier.begin_in("a")
    assert bm.tables["a"][:2] == [-1, 1]
    tier.cancel_in("a")
    assert [bm.pool.pins(block) for block in range(3)] == [0, 1, 0]
    tier.drop("a")
    assert [bm.pool.pins(block) for block in range(3)] == [0, 0, 0]
    assert len(host) == 0
    bm.check()
