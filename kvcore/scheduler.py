"""Continuous batching over a block manager: who enters, who decodes, who yields.

The rules, in the order in which a step applies them:

* Admission is first come, first served. The head of the queue enters while that
  leaves ``watermark_blocks`` free, so that the decode which follows does not at
  once preempt what was just admitted. The first that does not fit stops the rest.
* Every running sequence gets the slot of its next token, oldest first. Appends may
  use the watermark.
* When the blocks run out, the newest running sequence is preempted: its blocks are
  taken back and it returns to the front of the queue with its prompt and all that
  it generated, to be recomputed. The sequence that met the shortage is the victim
  only if it is itself the newest.
* A preempted sequence that meets an idle machine may use the watermark too. It grew
  into those blocks, so it must be able to come back.

Why it cannot hang: the oldest running sequence is never a victim while another one
runs, so it finishes; when it is alone and the whole pool cannot hold its next token,
it is ended with a reason; and a request that could never enter is refused.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable
from enum import Enum
from operator import index
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

import numpy as np

from kvcore.block_manager import BlockManager
from kvcore.errors import RequestRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Reason", "Resumed", "Scheduler", "Step", "Verdict"]

MAX_TOKENS = 2**31 - 1
"""A sequence cannot grow past this; lengths are int32."""

_NO_COPIES = np.empty((0, 2), np.int32)
_NO_COPIES.flags.writeable = False


class Reason(Enum):
    """Why a request waits, was refused, or was ended."""

    BEHIND = "behind others in the queue"
    MAX_RUNNING = "as many sequences run as are allowed"
    BLOCKS = "too few blocks are available"
    WATERMARK = "it fits, but would leave fewer blocks than the watermark"
    LIVE_ID = "a live sequence has its id"
    FITS = "it enters at the next step"
    NEVER_FITS = "its prompt can never fit under the watermark"
    OUTGREW_POOL = "its next token does not fit into the whole pool"
    BAD_LENGTH = "its number of tokens is no integer from 1 to 2**31 - 2"


class Verdict(NamedTuple):
    """A reason with its numbers."""

    reason: Reason
    needed: int
    """Blocks that it needs to run."""
    available: int
    """Blocks that it may use: now while it waits, ever once it is refused or ended."""
    ahead: int = 0
    """Requests before it in the queue."""


class Resumed(NamedTuple):
    """Queue entry of a preempted sequence; equal to the plain ``(seq, n_tokens)``."""

    seq: Hashable
    n_tokens: int
    """Prompt plus everything generated so far."""


class Step(list[Hashable]):
    """What one step decided: the list of decoded sequences, oldest first, and more.

    An engine runs ``copies`` first, then the prefills, then the decodes.

    Attributes
    ----------
    rows, slots : ndarray
        int32 and int64, parallel to the list: each sequence's row in
        ``BlockManager.block_tables`` and the slot of its new token. The caller owns
        ``slots``; ``rows`` is read-only and may be shared between steps.
    copies : ndarray
        int32 ``(k, 2)``: block copies ``(src, dst)`` to run before anything else, in
        any order. No block is both a source and a destination.
    prefills : list of (seq, n_tokens)
        Sequences admitted in this step whose first ``n_tokens`` must be computed.
    preempted : list
        Sequences whose blocks were taken back; they wait again.
    rejected : dict of seq to Verdict
        Requests that were dropped for good in this step, and why.
    """

    __slots__ = ("copies", "preempted", "prefills", "rejected", "rows", "slots")

    rows: NDArray[np.int32]
    slots: NDArray[np.int64]
    copies: NDArray[np.int32]
    prefills: list[tuple[Hashable, int]]
    preempted: list[Hashable]
    rejected: dict[Hashable, Verdict]


class Scheduler:
    """First come, first served by watermark; oldest decodes first; newest yields.

    Parameters
    ----------
    bm : BlockManager
        Holds the blocks. Sequences that did not come through this scheduler may
        live in it too; they are never preempted.
    watermark_blocks : int
        Blocks that admission must leave available.
    max_running : int, optional
        Most sequences that may run at once; by default only the blocks limit them.

    Attributes
    ----------
    waiting : deque of (seq, n_tokens)
        The queue. Appending a pair works like ``add``, except that a pair that
        cannot run is reported in ``Step.rejected`` instead of raising.
    running : list
        Running sequences in order of admission.

    Notes
    -----
    A step costs one batch append over the running sequences and, while the set of
    them does not change, a few microseconds of Python on top.

    When nothing runs, a request still waits for blocks that are held outside the
    scheduler (pins, fences, other sequences of the pool): only their holders can end
    that. ``why`` says so.
    """

    def __init__(
        self,
        bm: BlockManager,
        watermark_blocks: SupportsIndex = 1,
        *,
        max_running: SupportsIndex | None = None,
    ) -> None:
        if not isinstance(bm, BlockManager):
            raise TypeError(f"bm must be a BlockManager, got {bm!r}")
        self.bm = bm
        self.watermark_blocks = _at_least(watermark_blocks, 0, "watermark_blocks")
        if self.watermark_blocks >= bm.num_blocks:
            raise ValueError(
                f"watermark_blocks is {self.watermark_blocks}, which no request can leave "
                f"free in a pool of {bm.num_blocks} blocks"
            )
        self.max_running = None if max_running is None else _at_least(max_running, 1, "max_running")
        self.waiting: deque[tuple[Hashable, int]] = deque()
        self.running: list[Hashable] = []
        self._rows = _RunningRows(bm)

    def add(self, seq: Hashable, n_tokens: SupportsIndex) -> None:
        """Queue a request whose prompt has ``n_tokens`` tokens. O(1).

        Raises
        ------
        RequestRefused
            The prompt needs more than ``num_blocks - watermark_blocks`` blocks.
        ValueError, TypeError
            ``n_tokens`` is below 1 or no integer, or ``seq`` is live.
        """
        request = (seq, _at_least(n_tokens, 1, "n_tokens"))
        if seq in self.bm:
            raise ValueError(f"seq {seq!r} is a live sequence already")
        verdict = self._never(request)
        if verdict is not None:
            raise RequestRefused(
                f"n_tokens is {request[1]}: {verdict.reason.value}; {seq!r} needs "
                f"{verdict.needed} blocks and can have {verdict.available}"
            )
        self.waiting.append(request)

    def fork(
        self, parent: Hashable, child: Hashable, n_tokens: SupportsIndex | None = None
    ) -> None:
        """Run ``child`` beside ``parent``, sharing its first ``n_tokens`` (default all).

        The child is the newest running sequence. Raises what ``BlockManager.fork``
        raises.
        """
        self.bm.fork(parent, child, n_tokens)
        self._enter(child)

    def finish(self, seq: Hashable) -> bool:
        """End a request, running or waiting, and release its blocks. O(running + waiting).

        Returns False when no such request is here, as for a result that comes late.
        """
        try:
            position = self.running.index(seq)
        except ValueError:
            pass
        else:
            self._leave(position)
            return True
        for i, request in enumerate(self.waiting):
            if request[0] == seq:
                del self.waiting[i]
                return True
        return False

    def abort(self, seq: Hashable) -> bool:
        """End a request whose result nobody wants any more: the same exit as ``finish``."""
        return self.finish(seq)

    def why(self, seq: Hashable) -> Verdict:
        """Why a waiting request waits. O(waiting). ``KeyError`` if it does not wait."""
        for ahead, request in enumerate(self.waiting):
            if request[0] == seq:
                verdict = self._never(request) or self._not_now(request)
                if ahead:
                    return Verdict(Reason.BEHIND, verdict.needed, verdict.available, ahead)
                return verdict
        raise KeyError(f"no waiting request {seq!r}")

    def step(self) -> Step:
        """Admit, then give every running sequence the slot of its next token."""
        step = Step()
        step.prefills = []
        step.preempted = []
        step.rejected = {}
        if self.waiting:
            self._admit(step)
        self._decode(step)
        return step

    # ------------------------------------------------------------ admission

    def _admit(self, step: Step) -> None:
        self._rows.follow(self.running)  # a dead id raises before anybody is admitted
        while self.waiting:
            request = self.waiting[0]
            seq, n_tokens = request
            verdict = self._never(request)
            if verdict is not None:
                self.waiting.popleft()
                step.rejected[seq] = verdict
                continue
            verdict = self._not_now(request)
            if verdict.reason is Reason.LIVE_ID and seq not in self.running:
                # Its owner did not come through here: nothing says when it will end.
                self.waiting.popleft()
                step.rejected[seq] = verdict
            elif verdict.reason is not Reason.FITS:
                return
            else:
                self.bm.allocate(seq, n_tokens)
                self.waiting.popleft()
                self._enter(seq)
                step.prefills.append((seq, n_tokens))

    def _needed(self, request: tuple[Hashable, int]) -> int:
        """Blocks that a request must find.

        A preempted one returns only when its next token has room too: otherwise it
        would yield again to the very shortage that it made way for.
        """
        n_tokens = request[1] + isinstance(request, Resumed)
        return -(-n_tokens // self.bm.block_size)

    def _never(self, request: tuple[Hashable, int]) -> Verdict | None:
        """Why the request can never run, if it cannot."""
        num_blocks = self.bm.num_blocks
        resumed = isinstance(request, Resumed)
        try:
            # A preempted fork of nothing may have no token yet.
            n_tokens = _at_least(request[1], 0 if resumed else 1, "n_tokens")
        except (TypeError, ValueError):
            return Verdict(Reason.BAD_LENGTH, 0, num_blocks)
        if n_tokens >= MAX_TOKENS:
            return Verdict(Reason.BAD_LENGTH, 0, num_blocks)
        needed = self._needed(request)
        if resumed:
            if needed > num_blocks:
                return Verdict(Reason.OUTGREW_POOL, needed, num_blocks)
        elif needed > num_blocks - self.watermark_blocks:
            return Verdict(Reason.NEVER_FITS, needed, num_blocks - self.watermark_blocks)
        return None

    def _not_now(self, request: tuple[Hashable, int]) -> Verdict:
        """Whether the request could enter at once, were it the head of the queue."""
        needed = self._needed(request)
        available = self.bm.num_available
        watermark = self.watermark_blocks
        if isinstance(request, Resumed) and not self.running:
            watermark = 0
        if request[0] in self.bm:
            reason = Reason.LIVE_ID
        elif self.max_running is not None and len(self.running) >= self.max_running:
            reason = Reason.MAX_RUNNING
        elif needed > available:
            reason = Reason.BLOCKS
        elif needed > available - watermark:
            reason = Reason.WATERMARK
        else:
            reason = Reason.FITS
        return Verdict(reason, needed, available)

    # ------------------------------------------------------------ decoding

    def _decode(self, step: Step) -> None:
        """Append to every running sequence, preempting the newest while blocks lack."""
        rows = self._rows.of(self.running)
        slots = np.empty(len(rows), np.int64)
        served, copies = self.bm.append_batch(rows, slots)
        if served < len(rows):
            served, copies = self._decode_short(step, rows, slots, served, copies)
            rows, slots = rows[:served], slots[:served]
        step.extend(self.running)
        step.rows = rows
        step.slots = slots
        step.copies = _NO_COPIES if copies is None else copies

    def _decode_short(
        self,
        step: Step,
        rows: NDArray[np.int32],
        slots: NDArray[np.int64],
        served: int,
        copies: NDArray[np.int32] | None,
    ) -> tuple[int, NDArray[np.int32] | None]:
        """Go on with a decode that found no block for its ``served``-th sequence.

        Victims come off the end of ``running``, where none has been served yet, so
        ``rows`` stays valid for the ones before them. A source of a copy whose last
        holder is preempted is pinned until the step is whole: else it could become the
        destination of a later copy of the same step.
        """
        batches: list[NDArray[np.int32]] = []
        sources: set[int] = set()
        pinned: list[int] = []
        try:
            while True:
                if copies is not None:
                    batches.append(copies)
                    sources.update(copies[:, 0].tolist())
                if served == len(self.running):
                    break
                # Last block first, as in every release.
                for block in reversed(self.bm.tables[self.running[-1]].tolist()):
                    if block in sources and self.bm.ref[block] == 1:
                        self.bm.pin(block)
                        pinned.append(block)
                self._preempt_newest(step)
                more, copies = self.bm.append_batch(
                    rows[served : len(self.running)], slots[served:]
                )
                served += more
        finally:
            for source in pinned:
                self.bm.unpin(source)
        return served, np.concatenate(batches) if batches else None

    def _preempt_newest(self, step: Step) -> None:
        """Take the newest sequence's blocks back and queue it first, to be recomputed."""
        victim = self.running[-1]
        request = Resumed(victim, self.bm.length(victim))
        self._leave(len(self.running) - 1)
        if step.prefills and step.prefills[-1][0] == victim:
            step.prefills.pop()
        verdict = self._never(request)
        if verdict is not None:
            step.rejected[victim] = verdict
        else:
            step.preempted.append(victim)
            self.waiting.appendleft(request)

    # ------------------------------------------------------------ coming and going

    def _enter(self, seq: Hashable) -> None:
        """Let a sequence run that has just got its row."""
        self.running.append(seq)
        self._rows.entered(seq)

    def _leave(self, position: int) -> None:
        """Take the blocks of a running sequence back: the one way out."""
        seq = self.running[position]
        self.bm.free_seq(seq)
        del self.running[position]
        self._rows.left(position, seq)


class _RunningRows:
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

        ``KeyError`` if one of the sequences is not live.
        """
        self.follow(running)
        if self._array is None:
            self._array = np.frombuffer(self._rows.tobytes(), np.int32)
        return self._array

    def follow(self, running: list[Hashable]) -> None:
        """Look the rows of ``running`` up again if they may have changed. ``KeyError``."""
        if self._version != self._bm.rows_version or self._seqs != running:
            self._look_up(running)

    def entered(self, seq: Hashable) -> None:
        """Note that ``seq`` got its row and is now the last."""
        if self._version + 1 == self._bm.rows_version:
            self._seqs.append(seq)
            self._rows.append(self._bm.row(seq))
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


def _at_least(value: SupportsIndex, minimum: int, name: str) -> int:
    try:
        number = index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, got {value!r} of type {type(value).__name__}"
        ) from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number
