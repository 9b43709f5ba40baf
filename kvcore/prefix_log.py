"""The changes of a prefix index, as its log tells them.

Read in order from an empty beginning they rebuild the index: after each drain a reader
knows exactly the contents that a new request could hit.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Change", "Cleared", "Removed", "Stored"]


class Stored(NamedTuple):
    """A content became available: its first copy was published."""

    uid: int
    """Its number: positive, given once, shared by all copies, never used again."""
    parent: int
    """The number of the block before it, 0 at the root. It may be one that was removed:
    nobody can reach this content then, and it waits for its own removal."""
    tokens: list[int]
    """The ids of the block, as many as a block holds."""
    key: bytes
    """What else takes part in its identity; ``kvcore.identity.decode_key`` reads it."""


class Removed(NamedTuple):
    """A content is gone: its last copy was evicted, overwritten or forgotten."""

    uid: int
    """The number it was stored under."""


class Cleared(NamedTuple):
    """Everything told so far is void. What is still there follows, parents first."""

    epoch: int = 0
    """The epoch that all which follows belongs to."""


Change = Stored | Removed | Cleared
"""What a drain returns a list of."""
