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
    kept, kept_blocks : list of int
        The columns of its table that are not copied, and their blocks, which stay on the
        device; -1 where a window has given one back.
    has_table : bool
        Whether it has a table on the device, so that nothing is pinned for it: before its
        copies are done, and when it is on its way back.
    """

    has_table: bool = True

    def __init__(
        self,
        n_tokens: int,
        kept: list[int],
        kept_blocks: list[int],
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
        kept = np.setdiff1d(np.arange(len(table)), moved, assume_unique=True)
        kept_blocks = table[kept].tolist()
        prompt = None
        if self.bm.prefix_caching and -1 not in kept_blocks:
            prompt = self.bm.prompt_of(seq)
        away = _Away(self.bm.length(seq), kept.tolist(), kept_blocks, prompt, pending)
        pairs = np.empty((len(moved), 2), np.int32)
        pairs[:, 0] = table[moved]
        self.host.allocate(seq, len(moved) * self.host.block_size)
        self._away[seq] = away
        pairs[:, 1] = self.host.tables[seq]
        return pairs

    def end_out(self, seq: Hashable, pending: int) -> None:
        """Give back what was copied to the host: the copies are there."""
        away = self._away[seq]
        # Since then a window may have given some of them back.
        table = np.asarray(self.bm.tables[seq])
        kept_blocks = table[away.kept].tolist()
        prompt = away.prompt
        if prompt is not None:  # and a step that was in flight may have told more
            prompt = None if (table < 0).any() else self.bm.prompt_of(seq)
        self._end_table(seq, kept_blocks)
        away.pending, away.kept_blocks, away.prompt = pending, kept_blocks, prompt

    def cancel_out(self, seq: Hashable) -> None:
        """Leave the sequence where it was: the copies to the host failed."""
        self.host.free_seq(seq)
        del self._away[seq]

    def blocks_to_return(self, seq: Hashable) -> int:
        """Blocks that its return takes, one for its next token included."""
        away = self._away[seq]
        return -(-(away.n_tokens + 1) // self.bm.block_size) - len(away.kept)

    def blocks_kept(self, seqs: list[Hashable]) -> int:
        """Blocks that the sequences keep on the device, each counted once."""
        kept = {block for seq in seqs for block in self._away[seq].kept_blocks}
        return len(kept - {-1})

    def begin_in(self, seq: Hashable) -> tuple[NDArray[np.int32], int]:
        """Make the table again. Returns int32 pairs ``(host, device)`` and its last token.

        Needs: ``blocks_to_return`` are available.
        """
        away = self._away[seq]
        host_blocks = np.asarray(self.host.tables[seq])
        pairs = np.empty((len(host_blocks), 2), np.int32)
        pairs[:, 0] = host_blocks
        pairs[:, 1] = self.bm.restore(
            seq, away.n_tokens, away.kept, away.kept_blocks, tokens=away.prompt
        )
        away.has_table = True
        self._unpin(away.kept_blocks)
        # Only after tokens that are all known another one can be published.
        pending = away.pending if self.bm.known(seq) == away.n_tokens else UNKNOWN_TOKEN
        return pairs, pending

    def end_in(self, seq: Hashable) -> None:
        """Give its host blocks back: the copies from there are done."""
        if self._away[seq].prompt is not None:
            self.bm.commit(seq)  # settled again, so it may be found again
        self.host.free_seq(seq)
        del self._away[seq]

    def cancel_in(self, seq: Hashable) -> None:
        """Leave the sequence in host memory as before: the copies from there failed."""
        self._end_table(seq, self._away[seq].kept_blocks)

    def drop(self, seq: Hashable) -> None:
        """Forget a sequence in host memory, wherever its copies are. Its table is not touched."""
        away = self._away[seq]
        self.host.free_seq(seq)
        if not away.has_table:
            self._unpin(away.kept_blocks)
        del self._away[seq]

    def recall(self, seq: Hashable) -> tuple[int, Prompt | None, int]:
        """Tokens, known ids and last token of a sequence, for computing it again."""
        away = self._away[seq]
        return away.n_tokens, away.prompt, away.pending

    def _end_table(self, seq: Hashable, kept_blocks: list[int]) -> None:
        """Free the sequence on the device, but for the blocks that stay."""
        for block in kept_blocks:
            if block >= 0:
                self.bm.pin(block)
        try:
            self.bm.free_seq(seq)
        except BaseException:
            self._unpin(kept_blocks)
            raise
        self._away[seq].has_table = False

    def _unpin(self, kept_blocks: list[int]) -> None:
        for block in kept_blocks:
            if block >= 0:
                self.bm.unpin(block)
