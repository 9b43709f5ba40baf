"""A cached prefix that is held whatever happens, until somebody lets go of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from kvcore.block_manager import BlockManager

__all__ = ["PrefixPin"]


class PrefixPin:
    """Holder of the blocks of a cached prefix; made by ``BlockManager.pin_prefix``.

    The blocks stay used, and so cannot be evicted, until ``release``, the end of a
    ``with`` block, or the death of this object.
    """

    __slots__ = ("_manager", "blocks", "n_tokens")

    blocks: tuple[int, ...]
    """Ids of the blocks held, in token order; empty once released."""
    n_tokens: int
    """Leading tokens that they hold."""

    def __init__(self, manager: BlockManager, blocks: tuple[int, ...]) -> None:
        self._manager = manager
        self.blocks = blocks
        self.n_tokens = len(blocks) * manager.block_size

    def release(self) -> None:
        """Let go. Once is enough; more does nothing."""
        blocks, self.blocks, self.n_tokens = self.blocks, (), 0
        if blocks:
            self._manager._release_prefix(blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "n_tokens"):
            self.release()

    def __repr__(self) -> str:
        return f"PrefixPin({self.n_tokens} tokens, blocks={self.blocks})"
