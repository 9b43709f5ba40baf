"""The sequences of a scheduler, and how they come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcore.request import UNKNOWN_TOKEN, Request, Resumed
from kvcore.running_rows import UNLIMITED, RowNotes, RunningRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.block_manager import BlockManager
    from kvcore.order import Order
    from kvcore.resources import Resource
    from kvcore.scheduler_options import SchedulerOptions
    from kvcore.step import Step

__all__ = ["Roster"]

NEVER = 2**63


class Roster:
    """Everything that a scheduler knows of the sequences that it let run.

    Attributes
    ----------
    running : list
        In order of admission.
    rows, notes
        Their rows, and numbers by row.
    by_seq : dict
        The request of every sequence with a table, in host memory, or on its way there.
    entered : dict
        The step in which each of them entered.
    departures : int
        How often a sequence lost its table: what tells a step that none of its own did.
    prefilling : dict
        Tokens computed or found cached, of prompts under way.
    leaning : dict
        Of sequences of a group that is computed again: who computes what they share.
    idle : set
        Running sequences that do not decode: in their prompt, at their limit, or on
        their way back from host memory.
    draining : set
        At their limit: they end when the results in flight are there.
    outstanding : deque of Step
        Steps whose results have not been reported, oldest first.
    going_out : list of Request
        On their way to host memory.
    swapped : deque of Request
        In host memory, in the order in which they return.
    steps_to_limit : int
        No running sequence reaches its limit in fewer decodes than this.
    step : int
        Number of the step that is planned, or was last.
    """

    def __init__(
        self,
        bm: BlockManager,
        options: SchedulerOptions,
        order: Order,
        resources: Sequence[Resource],
    ) -> None:
        self.bm = bm
        self.options = options
        self.order = order
        self.resources = resources
        self.running: list[Hashable] = []
        self.rows = RunningRows(bm)
        self.notes = RowNotes()
        self.by_seq: dict[Hashable, Request] = {}
        self.entered: dict[Hashable, int] = {}
        self.departures = 0
        self.prefilling: dict[Hashable, int] = {}
        self.leaning: dict[Hashable, Hashable] = {}
        self.idle: set[Hashable] = set()
        self.draining: set[Hashable] = set()
        self.outstanding: deque[Step] = deque()
        self.going_out: list[Request] = []
        self.swapped: deque[Request] = deque()
        self.steps_to_limit = UNLIMITED
        self.step = 0

    def follow(self) -> None:
        """Take note of what somebody else has done to the list. ``KeyError`` for a dead id."""
        if self.rows.follow(self.running):
            self.reconcile()

    def is_live(self, seq: Hashable) -> bool:
        """Whether a sequence has the id: with a table, or in host memory."""
        return seq in self.bm or any(seq in request.members for request in self.swapped)

    def has_live(self, seqs: Collection[Hashable]) -> bool:
        """Whether one of these ids is live."""
        for seq in seqs:
            if seq in self.bm:
                return True
        return bool(self.swapped) and any(map(self.is_live, seqs))

    def insert(self, seq: Hashable) -> int:
        """Put a sequence among the running ones, in order of admission; returns where."""
        admitted = self.by_seq[seq].admitted
        position = len(self.running)
        while position and self.by_seq[self.running[position - 1]].admitted > admitted:
            position -= 1
        self.running.insert(position, seq)
        return position

    def enter(self, seq: Hashable, request: Request) -> None:
        """Let a sequence run that has just got its row."""
        self.by_seq[seq] = request
        self.entered[seq] = max(self.step, 1)
        request.members.append(seq)
        self.running.append(seq)
        self.note(seq, request, UNKNOWN_TOKEN)
        self.rows.entered(len(self.running) - 1, seq)

    def note(self, seq: Hashable, request: Request, pending: int) -> None:
        """Note the numbers of a sequence that has just got its row."""
        limit = request.final_tokens
        self.notes.enter(
            self.bm.row(seq),
            UNLIMITED if limit is None else limit,
            request.prompt_tokens,
            pending,
        )

    def leave(self, seq: Hashable) -> None:
        """Take the blocks of a running sequence back: the one way out."""
        position = self.running.index(seq)
        request = self.by_seq.get(seq)
        generated = 0
        if request is not None and seq not in self.prefilling:
            generated = self.bm.length(seq) - request.n_tokens
        if isinstance(request, Resumed):
            self._hand_over(seq, request)
        self.bm.free_seq(seq)
        del self.running[position]
        self.rows.left(position, seq)
        self.forget(seq)
        if request is None:
            return
        request.members.remove(seq)
        if generated > 0:
            self.order.charge(request, generated)
        if not request.members:
            for resource in self.resources:
                resource.give(request)

    def _hand_over(self, seq: Hashable, request: Resumed) -> None:
        """Let the next of those that lean on a sequence compute what it has not computed."""
        computed = self.prefilling.get(seq, UNLIMITED)
        heir: Hashable = None
        start_of_heir = 0
        for other in request.members:
            if self.leaning.get(other) != seq:
                continue
            del self.leaning[other]
            if heir is not None:
                self.leaning[other] = heir
            start = self.prefilling.get(other, 0)
            if computed < start <= request.shared_tokens(request.member(other), self.bm.block_size):
                if heir is None:
                    heir, start_of_heir = other, start
                    self.prefilling[other] = computed
                else:
                    self.prefilling[other] = min(start, start_of_heir)

    def forget(self, seq: Hashable) -> None:
        """Drop all that is noted of a sequence."""
        self.by_seq.pop(seq, None)
        self.entered.pop(seq, None)
        self.prefilling.pop(seq, None)
        self.leaning.pop(seq, None)
        self.idle.discard(seq)
        self.draining.discard(seq)
        self.departures += 1

    def is_current(self, seq: Hashable, step: Step) -> bool:
        """Whether a result of ``step`` is still about this life of the sequence."""
        return self.entered.get(seq, NEVER) <= step.number

    def width(self) -> int:
        """Count the running sequences, with siblings to come and those that may yet stay."""
        width = len(self.running)
        for seq in self.prefilling:
            width += len(self.by_seq[seq].siblings)
        for request in self.going_out:
            width += len(request.members)
        return width

    def has_holes(self, seq: Hashable) -> bool:
        """Whether a window has given blocks of the sequence back."""
        return self.options.window is not None and bool((np.asarray(self.bm.tables[seq]) < 0).any())

    def rows_of(self, seqs: list[Hashable]) -> NDArray[np.int32]:
        """Rows of these running sequences, or of all."""
        if seqs is not self.running:
            return self.bm.rows(seqs)
        self.follow()
        return self.rows.of(seqs)

    def reconcile(self) -> None:
        """Somebody else has edited the list of running sequences."""
        known = self.by_seq
        self.by_seq = {seq: known.get(seq) or self._request_of(seq) for seq in self.running}
        for request in [*self.going_out, *self.swapped]:
            self.by_seq.update(dict.fromkeys(request.members, request))
        rows = self.bm.rows(self.running).tolist()
        for seq, row in zip(self.running, rows, strict=True):
            if seq not in self.entered:
                self.entered[seq] = self.step + 1
                self.notes.enter(row, UNLIMITED, self.bm.length(seq), UNKNOWN_TOKEN)
        for seq in [seq for seq in self.entered if seq not in self.by_seq]:
            self.forget(seq)
        self.departures += 1

    def _request_of(self, seq: Hashable) -> Request:
        """Make a request for a sequence that somebody else has put into the list."""
        request = Request(seq, self.bm.length(seq))
        request.members.append(seq)
        return request

    def start(self, seq: Hashable, computed: int) -> None:
        """Begin with a prompt of which ``computed`` tokens are there."""
        self.prefilling[seq] = computed
        self.idle.add(seq)
