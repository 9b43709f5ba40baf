"""The table rows of the running sequences."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.block_manager import BlockManager

__all__ = ["UNLIMITED", "RowNotes", "RunningRows"]

UNLIMITED = 2**31 - 1
"""Limit of a sequence whose number of tokens nobody has limited."""


class RunningRows:
    """The rows of the running sequences, kept up as the scheduler lets them come and go.

    Looking 256 ids up costs more than the rest of a step. It is done only when somebody
    else has edited the list or moved rows, which the list itself and the manager's
    ``rows_version`` tell.
    """

    def __init__(self, bm: BlockManager) -> None:
        self._bm = bm
        self._array: NDArray[np.int32] | None
        self._look_up([])

    def of(self, running: list[Hashable]) -> NDArray[np.int32]:
        """Return the rows parallel to ``running``, in a read-only array of their own.

        Needs: ``follow`` in this call of the scheduler. Since then only the scheduler has
        edited the list, which moves a row whenever it does not say ``entered`` or ``left``.
        """
        if self._version != self._bm.rows_version:
            self._look_up(running)
        if self._array is None:
            self._array = np.frombuffer(self._rows.tobytes(), np.int32)
        return self._array

    def follow(self, running: list[Hashable]) -> bool:
        """Look the rows of ``running`` up again if they may have changed. ``KeyError``.

        Returns whether somebody else has edited the list.
        """
        edited = self._seqs != running
        if edited or self._version != self._bm.rows_version:
            self._look_up(running)
        return edited

    def entered(self, position: int, seq: Hashable) -> None:
        """Note that ``seq`` was put at ``position``, right after it got its row."""
        if self._version + 1 == self._bm.rows_version:
            self._seqs.insert(position, seq)
            self._rows.insert(position, self._bm.row(seq))
            self._changed()

    def left(self, position: int, seq: Hashable) -> None:
        """Note that ``seq``, which was at ``position``, gave its row back."""
        expected = self._seqs[position : position + 1] == [seq]
        if expected and self._version + 1 == self._bm.rows_version:
            del self._seqs[position], self._rows[position]
            self._changed()

    def _look_up(self, running: list[Hashable]) -> None:
        self._rows: array[int] = array("i", self._bm.rows(running).tobytes())
        self._seqs = running.copy()
        self._changed()

    def _changed(self) -> None:
        self._version = self._bm.rows_version
        self._array = None


class RowNotes:
    """A few numbers for each running sequence, by its row, so that a step can gather them.

    Attributes
    ----------
    limits : ndarray
        int32: tokens that it has slots for at its end.
    prompts : ndarray
        int32: tokens of its prompt.
    pending : ndarray
        int32: its last token, sampled and not yet written; -1 if that or a token before
        it is not known, so that nothing of what follows can be published.
    """

    def __init__(self) -> None:
        self.limits = np.empty(0, np.int32)
        self.prompts = np.empty(0, np.int32)
        self.pending = np.empty(0, np.int32)

    def enter(self, row: int, limit: int, prompt: int, pending: int) -> None:
        """Note them for the sequence that got this row. Amortised O(1)."""
        missing = row + 1 - len(self.limits)
        if missing > 0:
            more = np.zeros(max(missing, len(self.limits)), np.int32)
            self.limits = np.concatenate([self.limits, more])
            self.prompts = np.concatenate([self.prompts, more])
            self.pending = np.concatenate([self.pending, more])
        self.limits[row] = limit
        self.prompts[row] = prompt
        self.pending[row] = pending
