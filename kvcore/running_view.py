"""What a policy sees of the running requests."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcore.request import Request
    from kvcore.roster import Roster

__all__ = ["RunningView"]


class RunningView:
    """The running requests during the planning of one step.

    Everything is looked up when a policy first asks for it, and arrays are parallel to
    ``seqs``. Keep nothing of a view: it is right for this step only.

    Attributes
    ----------
    bm : BlockManager
    seqs : list of hashable
        Running sequences, in order of admission.
    """

    def __init__(self, roster: Roster, seqs: list[Hashable] | None = None) -> None:
        self.bm = roster.bm
        self.seqs = roster.running if seqs is None else seqs
        self._roster = roster

    @property
    def step(self) -> int:
        """Number of the step that is planned."""
        return self._roster.step

    @property
    def window(self) -> int | None:
        """The scheduler's sliding window."""
        return self._roster.options.window

    @property
    def sinks(self) -> int:
        """The tokens kept before it."""
        return self._roster.options.sink_tokens

    @property
    def ahead(self) -> int:
        """Tokens by which a decoding sequence may be ahead of what is settled."""
        return self._roster.options.ahead

    @cached_property
    def forming(self) -> list[Request]:
        """Running requests whose siblings are still to come."""
        by_seq = self._roster.by_seq
        return [by_seq[seq] for seq in self._roster.prefilling if by_seq[seq].siblings]

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """int32: their rows in the block tables."""
        return self._roster.rows_of(self.seqs)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.bm.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.bm.num_blocks

    def request(self, seq: Hashable) -> Request:
        """Return the request of a running sequence. ``KeyError``."""
        return self._roster.by_seq[seq]

    @cached_property
    def requests(self) -> list[Request]:
        """The running requests, each once, in order of admission."""
        by_seq = self._roster.by_seq
        return list({id(by_seq[seq]): by_seq[seq] for seq in self.seqs}.values())

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """int32: tokens that each sequence has slots for."""
        return self.bm.lengths_of(self.rows)

    @cached_property
    def limits(self) -> NDArray[np.int32]:
        """int32: tokens that each will have slots for at its end; ``UNLIMITED`` if not known."""
        return self._roster.notes.limits.take(self.rows)

    @cached_property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """int32: tokens of the prompt that each started from."""
        return self._roster.notes.prompts.take(self.rows)

    def tokens(self, request: Request) -> int:
        """Tokens to compute again if the request were preempted, cached ones included."""
        return sum(self.bm.length(seq) for seq in request.members)

    def exclusive_blocks(self, request: Request) -> int:
        """Blocks that would be nobody's without the request, now or when steps in flight end."""
        rows = self.bm.rows(request.members)
        plan = self.bm.plan_append(rows[:0], without=rows)
        without = self.bm.plan_append(rows[:0])
        return (plan.available + plan.coming) - (without.available + without.coming)
