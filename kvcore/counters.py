"""What the manager counts: the meaning of each entry of ``BlockManager.counters``."""

from enum import IntEnum

__all__ = ["Counter"]


class Counter(IntEnum):
    """Index into the int64 array ``BlockManager.counters``; every entry only grows.

    A call that raises leaves all of them as they were, except ``OUT_OF_BLOCKS``,
    which counts exactly those calls.
    """

    SEQUENCES_ALLOCATED = 0
    """Sequences created by ``allocate``."""
    SEQUENCES_FORKED = 1
    """Sequences created by ``fork``."""
    SEQUENCES_FREED = 2
    """Sequences ended by ``free_seq``."""
    BLOCKS_TAKEN = 3
    """Blocks taken from the pool; cached ones that a prefix hit shares are not."""
    BLOCKS_RELEASED = 4
    """Blocks whose last reference this manager dropped."""
    EVICTIONS = 5
    """Evictable blocks that a take of this manager used up."""
    TOKENS_APPENDED = 6
    """Slots handed out by the append calls (prompts of ``allocate`` not included)."""
    COW_COPIES = 7
    """Shared partial blocks that an append replaced: data copies the caller owed."""
    OUT_OF_BLOCKS = 8
    """Calls that could not be served in full for lack of blocks."""
    PROMPT_TOKENS = 9
    """Tokens given to ``allocate`` with prefix caching, but for resumed sequences."""
    CACHED_TOKENS = 10
    """Of them, those found in the cache."""
    RESUMED_TOKENS = 11
    """Tokens given to ``allocate`` for sequences that had been preempted."""
    RESUMED_CACHED_TOKENS = 12
    """Of them, those found in the cache."""
    BLOCKS_PUBLISHED = 13
    """Full blocks published by ``commit``; copies of cached content count too."""
    DUPLICATES_MERGED = 14
    """Of them, those swapped for the block that held their content already."""
