"""What a policy sees of the running requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcore.block_manager import BlockManager
    from kvcore.request import Request
    from kvcore.running_rows import RowNotes

__all__ = ["RunningView"]


class RunningView:
    """The running requests during the planning of one step.

    Arrays are made when a policy first asks for them, and parallel to ``seqs``. Keep
    nothing of a view: it is right for this step only.

    Attributes
    ----------
    bm : BlockManager
    step : int
        Number of the step that is planned.
    seqs : list of hashable
        Running sequences, in order of admission.
    window, sinks : int or None, int
        The scheduler's sliding window and the tokens kept before it.
    ahead : int
        Tokens by which a decoding sequence may be ahead of what is settled.
    forming : sequence of Request
        Running requests whose siblings are still to come.
    """

    def __init__(
        self,
        bm: BlockManager,
        by_seq: Mapping[Hashable, Request],
        seqs: list[Hashable],
        rows: NDArray[np.int32] | Callable[[list[Hashable]], NDArray[np.int32]],
        notes: RowNotes,
        *,
        step: int,
        window: int | None = None,
        sinks: int = 0,
        ahead: int = 1,
        forming: Sequence[Request] = (),
    ) -> None:
        self.bm = bm
        self.seqs = seqs
        self._rows = rows
        self.step = step
        self.window = window
        self.sinks = sinks
        self.ahead = ahead
        self.forming = forming
        self._by_seq = by_seq
        self._notes = notes

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """int32: their rows in the block tables."""
        return self._rows(self.seqs) if callable(self._rows) else self._rows

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
        return self._by_seq[seq]

    @cached_property
    def requests(self) -> list[Request]:
        """The running requests, each once, in order of admission."""
        return list({id(self._by_seq[seq]): self._by_seq[seq] for seq in self.seqs}.values())

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """int32: tokens that each sequence has slots for."""
        return self.bm.lengths[self.rows]

    @cached_property
    def limits(self) -> NDArray[np.int32]:
        """int32: tokens that each will have slots for at its end; ``UNLIMITED`` if not known."""
        return self._notes.limits[self.rows]

    @cached_property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """int32: tokens of the prompt that each started from."""
        return self._notes.prompts[self.rows]

    def tokens(self, request: Request) -> int:
        """Tokens to compute again if the request were preempted, cached ones included."""
        return sum(self.bm.length(seq) for seq in request.members)

    def exclusive_blocks(self, request: Request) -> int:
        """Blocks that would be nobody's without the request, now or when steps in flight end."""
        rows = self.bm.rows(request.members)
        plan = self.bm.plan_append(rows[:0], without=rows)
        without = self.bm.plan_append(rows[:0])
        return (plan.available + plan.coming) - (without.available + without.coming)
