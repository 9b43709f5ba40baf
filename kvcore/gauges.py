"""How full the pool is, as one consistent snapshot derived from the arrays."""

from typing import NamedTuple

__all__ = ["Gauges"]


class Gauges(NamedTuple):
    """Result of ``BlockManager.gauges()``.

    ``free + evictable + used == num_blocks`` always. A pool shared by several
    managers is described as a whole by the block fields; ``sequences``, ``tokens``
    and ``logical_blocks`` are this manager's.
    """

    num_blocks: int
    block_size: int
    free: int
    """Blocks that nobody holds and whose content nobody wants."""
    evictable: int
    """Blocks that nobody holds but whose content may be wanted again."""
    used: int
    """Blocks that somebody holds."""
    shared: int
    """Blocks held more than once."""
    pinned: int
    """Blocks with at least one pin."""
    fenced: int
    """References that wait for a step to settle."""
    sequences: int
    tokens: int
    """Tokens over all sequences; a shared token counts once for each holder."""
    logical_blocks: int
    """Table cells over all sequences; a shared block counts once for each table."""
    cached: int = 0
    """Blocks, used or evictable, that the prefix index finds."""

    @property
    def usage(self) -> float:
        """Share of the pool that is used, in [0, 1]."""
        return self.used / self.num_blocks

    @property
    def internal_fragmentation(self) -> float:
        """Share of the slots in all tables that hold no token, in [0, 1)."""
        slots = self.logical_blocks * self.block_size
        return 1.0 - self.tokens / slots if slots else 0.0

    @property
    def sharing_ratio(self) -> float:
        """Logical over physical blocks: 1 without sharing, more with it."""
        return self.logical_blocks / self.used if self.used else 1.0
