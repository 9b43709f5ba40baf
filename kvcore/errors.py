"""What can go wrong, as types.

Running out of blocks is an operating condition: expected, recoverable, and it
leaves every structure as it was. Misuse is a programming error and raises the
standard ``ValueError``, ``TypeError`` or ``KeyError`` naming the argument and its
value. A broken invariant is a bug, in kvcore or in code that wrote through its
arrays.
"""

__all__ = ["InvariantError", "KVCoreError", "OutOfBlocks", "RequestRefused"]


class KVCoreError(Exception):
    """Base of every error that only kvcore raises."""


class OutOfBlocks(KVCoreError):
    """Fewer blocks are available than the call needs. Nothing was changed.

    Attributes
    ----------
    needed : int
        Blocks that the call would have taken.
    available : int
        Blocks it could have taken: free ones plus evictable ones.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return f"{self.needed} blocks needed, {self.available} available"


class RequestRefused(KVCoreError, ValueError):
    """A request that this scheduler could never run, refused when it was added."""


class InvariantError(KVCoreError, AssertionError):
    """``check()`` found the state corrupted.

    Attributes
    ----------
    invariant : str
        The invariant that does not hold, by its name in the contract (``"I1"`` …).
    block : int or None
        The block on which it was seen, where there is one.
    """

    def __init__(self, invariant: str, block: int | None, message: str) -> None:
        super().__init__(invariant, block, message)
        self.invariant = invariant
        self.block = block
        self.message = message

    def __str__(self) -> str:
        where = "" if self.block is None else f" at block {self.block}"
        return f"{self.invariant} broken{where}: {self.message}"
