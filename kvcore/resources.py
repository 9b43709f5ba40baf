"""What a request needs besides blocks of keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcore.block_manager import BlockManager
    from kvcore.request import Request

__all__ = ["BlocksOf", "Resource", "SharedSlots", "Slots"]


class Resource(Protocol):
    """Something that is limited, and held from admission until the end or a recompute.

    A step takes from all resources and the blocks for a request, or from none: ``take``
    is called only when ``needed`` was at most ``available``, with nothing in between. A
    request that needs more than ``total`` is refused. ``give`` is called for everybody
    that leaves, so it must pass over those that hold nothing. While its sequences are in
    host memory, a request keeps what it has.
    """

    name: str

    @property
    def total(self) -> int:
        """How much there is in all."""
        ...

    @property
    def available(self) -> int:
        """How much is left."""
        ...

    def needed(self, request: Request) -> int:
        """How much of what is left the request would take now."""
        ...

    def take(self, request: Request) -> None:
        """Give it to the request."""
        ...

    def give(self, request: Request) -> None:
        """Take it back."""
        ...


class Slots:
    """A number of things that are alike, such as state slots or places in a batch.

    Parameters
    ----------
    name : str
    total : int
    needed : int or callable
        How many each sequence of a request needs; or a function that says how many a
        request needs.
    """

    def __init__(self, name: str, total: int, needed: int | Callable[[Request], int] = 1) -> None:
        self.name = name
        self.total = _at_least(total, 1, "total")
        self._needed = needed
        self._held: dict[int, int] = {}  # by arrival, which is nobody else's ever
        self._in_use = 0

    @property
    def available(self) -> int:
        """Slots that nobody has."""
        return self.total - self._in_use

    def needed(self, request: Request) -> int:
        """Slots for the request. ``ValueError`` if the callable says a negative number."""
        needed = self._needed
        count = needed(request) if callable(needed) else needed * request.width
        return _at_least(count, 0, f"needed of {self.name}")

    def take(self, request: Request) -> None:
        """Give the request its slots. O(1)."""
        count = self._held[request.arrival] = self.needed(request)
        self._in_use += count

    def give(self, request: Request) -> None:
        """Take them back. O(1)."""
        self._in_use -= self._held.pop(request.arrival, 0)


class SharedSlots:
    """Slots for things that requests use together, such as adapters.

    Parameters
    ----------
    name : str
    total : int
    key : callable
        What a request uses; None if it needs no slot. Requests of one key share one.
    """

    def __init__(self, name: str, total: int, key: Callable[[Request], Hashable]) -> None:
        self.name = name
        self.total = _at_least(total, 1, "total")
        self._key = key
        self._held: dict[int, Hashable] = {}
        self._users: Counter[Hashable] = Counter()

    @property
    def available(self) -> int:
        """Slots that nobody uses."""
        return self.total - len(self._users)

    def needed(self, request: Request) -> int:
        """Return 1 for a key that nobody uses yet, else 0."""
        key = self._key(request)
        return int(key is not None and key not in self._users)

    def take(self, request: Request) -> None:
        """Use the slot of the request's key. O(1)."""
        key = self._key(request)
        if key is not None:
            self._held[request.arrival] = key
            self._users[key] += 1

    def give(self, request: Request) -> None:
        """Stop using it; the last one frees it. O(1)."""
        key = self._held.pop(request.arrival, None)
        if key is not None:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]


class BlocksOf:
    """Blocks of a second pool, for instance of cross-attention.

    Parameters
    ----------
    name : str
    bm : BlockManager
        In it, a request that runs has a sequence with its id, ``request.seq``.
    n_tokens : callable
        Tokens that the request needs there, for all its time; 0 for none.
    """

    def __init__(self, name: str, bm: BlockManager, n_tokens: Callable[[Request], int]) -> None:
        self.name = name
        self._bm = bm
        self._n_tokens = n_tokens
        self._held: dict[int, Hashable] = {}

    @property
    def total(self) -> int:
        """Blocks of the pool."""
        return self._bm.num_blocks

    @property
    def available(self) -> int:
        """Blocks that can be had now."""
        return self._bm.num_available

    def needed(self, request: Request) -> int:
        """Blocks for the tokens of the request. ``ValueError`` if they are negative."""
        n_tokens = _at_least(self._n_tokens(request), 0, f"n_tokens of {self.name}")
        return -(-n_tokens // self._bm.block_size)

    def take(self, request: Request) -> None:
        """Allocate them. O(blocks). ``ValueError`` if a sequence there has the id."""
        n_tokens = self._n_tokens(request)
        if n_tokens:
            self._bm.allocate(request.seq, n_tokens)
            self._held[request.arrival] = request.seq

    def give(self, request: Request) -> None:
        """Free them. O(blocks)."""
        if request.arrival in self._held:
            self._bm.free_seq(self._held.pop(request.arrival))


def _at_least(value: int, minimum: int, name: str) -> int:
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value
