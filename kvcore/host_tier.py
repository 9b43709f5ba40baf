"""Sequences in host memory: what leaves the device, what stays, and what comes back.

A swap has two phases. It is planned: the blocks at its other end are taken. And it is
reported done: only then the blocks at this end are given back. Until then both ends
hold, so that a copy that failed has changed nothing, and no block is written into while
it is read.

Only blocks that a sequence has for itself are moved. One that others hold too would free
nothing here; it stays where it is, pinned, and is not copied.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from kvcore.request import UNKNOWN_TOKEN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.block_manager import BlockManager
    from kvcore.prefix_index import Prompt

__all__ = ["HostTier"]


class _Away:
    """A sequence that is, or is about to be, in host memory.

    Attributes
    ----------
    kept, kept_blocks : ndarray
        int32: the columns of its table that are not copied, and their blocks, which stay
        on the device; -1 where a window has given one back.
    """

    def __init__(
        self,
        n_tokens: int,
        kept: NDArray[np.int32],
        kept_blocks: NDArray[np.int32],
        prompt: Prompt | None,
        pending: int,
    ) -> None:
        self.n_tokens = n_tokens
        self.kept = kept
        self.kept_blocks = kept_blocks
        self.prompt = prompt
        self.pending = pending


class HostTier:
    """The sequences of a scheduler that are in host memory.

    Parameters
    ----------
    bm : BlockManager
        Of the blocks on the device.
    host : BlockManager
        Of the blocks in host memory, of the same block size. A sequence has its id there
        too, while it has blocks there.
    """

    def __init__(self, bm: BlockManager, host: BlockManager) -> None:
        self.bm = bm
        self.host = host
        self._away: dict[Hashable, _Away] = {}

    def __contains__(self, seq: Hashable) -> bool:
        return seq in self._away

    def blocks_to_move(self, seqs: list[Hashable]) -> int:
        """Blocks that the sequences have for themselves. O(blocks)."""
        return sum(len(self.bm.exclusive_blocks(seq)) for seq in seqs)

    def begin_out(self, seq: Hashable, pending: int) -> NDArray[np.int32]:
        """Take host blocks for a sequence. Returns int32 pairs ``(device, host)``.

        Needs: ``blocks_to_move`` are available there.
        """
        table = np.asarray(self.bm.tables[seq])
        moved = self.bm.exclusive_blocks(seq)
        kept = np.setdiff1d(np.arange(len(table), dtype=np.int32), moved, assume_unique=True)
        self.host.allocate(seq, len(moved) * self.host.block_size)
        kept_blocks = table[kept].copy()
        has_holes = bool((kept_blocks < 0).any())
        prompt = self.bm.prompt_of(seq) if self.bm.prefix_caching and not has_holes else None
        self._away[seq] = _Away(self.bm.length(seq), kept, kept_blocks, prompt, pending)
        return np.stack([table[moved], self.host.tables[seq]], axis=1)

    def end_out(self, seq: Hashable, pending: int) -> None:
        """Give back what was copied to the host: the copies are there."""
        away = self._away[seq]
        away.pending = pending
        # Since then a window may have given some of them back.
        away.kept_blocks = np.asarray(self.bm.tables[seq])[away.kept]
        self._pin(away)
        self.bm.free_seq(seq)

    def cancel_out(self, seq: Hashable) -> None:
        """Leave the sequence where it was: the copies to the host failed."""
        del self._away[seq]
        self.host.free_seq(seq)

    def blocks_to_return(self, seq: Hashable) -> int:
        """Blocks that its return takes, one for its next token included."""
        away = self._away[seq]
        return -(-(away.n_tokens + 1) // self.bm.block_size) - len(away.kept)

    def blocks_kept(self, seqs: list[Hashable]) -> int:
        """Blocks that the sequences keep on the device, each counted once."""
        kept = {block for seq in seqs for block in self._away[seq].kept_blocks.tolist()}
        return len(kept - {-1})

    def begin_in(self, seq: Hashable) -> tuple[NDArray[np.int32], int]:
        """Make the table again. Returns int32 pairs ``(host, device)`` and its last token.

        Needs: ``blocks_to_return`` are available.
        """
        away = self._away[seq]
        fresh = self.bm.restore(seq, away.n_tokens, away.kept, away.kept_blocks, tokens=away.prompt)
        self._unpin(away)
        # Only after tokens that are all known another one can be published.
        pending = away.pending if self.bm.known(seq) == away.n_tokens else UNKNOWN_TOKEN
        return np.stack([self.host.tables[seq], fresh], axis=1), pending

    def end_in(self, seq: Hashable) -> None:
        """Give its host blocks back: the copies from there are done."""
        away = self._away.pop(seq)
        self.host.free_seq(seq)
        if away.prompt is not None:
            self.bm.commit(seq)  # settled again, so it may be found again

    def cancel_in(self, seq: Hashable) -> None:
        """Leave the sequence in host memory as before: the copies from there failed."""
        self._pin(self._away[seq])
        self.bm.free_seq(seq)

    def drop(self, seq: Hashable) -> None:
        """Forget a sequence in host memory, wherever its copies are. Its table is not touched."""
        away = self._away.pop(seq)
        if seq not in self.bm:
            self._unpin(away)
        self.host.free_seq(seq)

    def recall(self, seq: Hashable) -> tuple[int, Prompt | None, int]:
        """Tokens, known ids and last token of a sequence, for computing it again."""
        away = self._away[seq]
        return away.n_tokens, away.prompt, away.pending

    def _pin(self, away: _Away) -> None:
        for block in away.kept_blocks.tolist():
            if block >= 0:
                self.bm.pin(block)

    def _unpin(self, away: _Away) -> None:
        for block in away.kept_blocks.tolist():
            if block >= 0:
                self.bm.unpin(block)
