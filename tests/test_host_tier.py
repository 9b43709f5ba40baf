"""Sequences in host memory: each call does all it says at both ends, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
