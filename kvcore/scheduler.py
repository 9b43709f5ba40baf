"""Continuous batching over a block manager: who enters, who decodes, who yields.

The rules, in the order in which a step applies them:

* Admission is first come, first served. The head of the queue enters while that
  leaves ``watermark_blocks`` free, so that the decode which follows does not at
  once preempt what was just admitted. The first that does not fit stops the rest.
  Cached blocks that it can share need not be found.
* A head whose next block is computed by somebody who enters in this very step waits,
  once, for the next step, where it can share that block instead of computing it too.
* Every running sequence gets the slot of its next token, oldest first. Appends may
  use the watermark.
* When the blocks run out, the newest running sequence is preempted: its blocks are
  taken back and it returns to the front of the queue with its prompt and all that
  it generated, to be recomputed but for the blocks that are still cached when it
  comes back. The sequence that met the shortage is the victim only if it is itself
  the newest.
* A preempted sequence that meets an idle machine may use the watermark too. It grew
  into those blocks, so it must be able to come back.

Why it cannot hang: the oldest running sequence is never a victim while another one
runs, so it finishes; when it is alone and the whole pool cannot hold its next token,
it is ended with a reason; and a request that could never enter is refused. Only a
step that has admitted somebody lets the next one wait for a prefix.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from enum import Enum
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex

import numpy as np

from kvcore.block_manager import BlockManager
from kvcore.errors import RequestRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.eviction import Retention
    from kvcore.identity import Media, Namespace
    from kvcore.prefix_index import Prompt

    _Entered = dict[int, list[Prompt]]
    """Prompts that enter in a step, by the hash of their first block not cached."""

__all__ = ["Reason", "Request", "Resumed", "Scheduler", "Step", "Verdict"]

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
    PREFIX = "it let a step pass while blocks that it can share were computed, and enters now"
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


class _Pair(NamedTuple):
    seq: Hashable
    n_tokens: int


class Request(_Pair):
    """Queue entry that says more than its length; equal to the plain ``(seq, n_tokens)``.

    Attributes
    ----------
    prompt : Prompt or None
        The tokens that are known, hashed once however often the request is tried.
    retention : sequence of Retention
        As for ``BlockManager.allocate``.
    waited : bool
        Whether it has let a step pass for a prefix; it does so once.
    """

    prompt: Prompt | None = None
    retention: Sequence[Retention] = ()
    waited: bool = False

    def __new__(
        cls,
        seq: Hashable,
        n_tokens: int,
        prompt: Prompt | None = None,
        retention: Sequence[Retention] = (),
    ) -> Self:
        """Make the pair, with what the manager needs besides."""
        request = super().__new__(cls, seq, n_tokens)
        request.prompt = prompt
        if retention:
            request.retention = retention
        return request


class Resumed(Request):
    """Queue entry of a preempted sequence: its prompt and everything generated so far.

    Its ``prompt`` ends with the last token that was committed.
    """


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
        Sequences admitted in this step, whose first ``n_tokens`` must be computed but
        for the cached ones.
    cached : list of int
        Parallel to ``prefills``: how many leading tokens were found cached.
    preempted : list
        Sequences whose blocks were taken back; they wait again.
    rejected : dict of seq to Verdict
        Requests that were dropped for good in this step, and why.
    """

    __slots__ = ("cached", "copies", "preempted", "prefills", "rejected", "rows", "slots")

    rows: NDArray[np.int32]
    slots: NDArray[np.int64]
    copies: NDArray[np.int32]
    prefills: list[tuple[Hashable, int]]
    cached: list[int]
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
    wait_for_prefix : bool
        Whether a request may let one step pass, once, when that saves it at least one
        block which a sequence admitted in that step computes.

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
        wait_for_prefix: bool = True,
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
        self.wait_for_prefix = wait_for_prefix
        self.waiting: deque[tuple[Hashable, int]] = deque()
        self.running: list[Hashable] = []
        self._rows = _RunningRows(bm)

    def add(
        self,
        seq: Hashable,
        n_tokens: SupportsIndex | None = None,
        *,
        tokens: Any = None,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
        retention: Sequence[Retention] = (),
    ) -> None:
        """Queue a request whose prompt has ``n_tokens`` tokens, or these ``tokens``.

        Everything but the length is for prefix sharing and ignored without it; see
        ``BlockManager.allocate``. The tokens are copied and hashed here, once. O(tokens).

        Raises
        ------
        RequestRefused
            The prompt needs more than ``num_blocks - watermark_blocks`` blocks, cached
            ones included: they need not be there any more when it enters.
        ValueError, TypeError
            ``n_tokens`` is below 1, below the number of ``tokens`` or no integer,
            ``seq`` is live, or what ``BlockManager.allocate`` raises for the rest.
        """
        known, prompt = 0, None
        more = tokens is not None or namespace is not None or media or retention
        if more and self.bm.prefix_caching:
            given = () if tokens is None else tokens
            prompt = self.bm.prompt(given, namespace=namespace, media=media)
        if tokens is not None:
            known = _number_of(tokens) if prompt is None else len(prompt)
            n_tokens = known if n_tokens is None else n_tokens
        request = (seq, _at_least(n_tokens, known or 1, "n_tokens"))
        if seq in self.bm:
            raise ValueError(f"seq {seq!r} is a live sequence already")
        verdict = self._never(request)
        if verdict is not None:
            raise RequestRefused(
                f"n_tokens is {request[1]}: {verdict.reason.value}; {seq!r} needs "
                f"{verdict.needed} blocks and can have {verdict.available}"
            )
        if prompt is not None:
            if retention:  # else a step would meet what is wrong with it
                self.bm.plan_allocate(request[1], tokens=prompt, retention=retention)
            request = Request(*request, prompt, tuple(retention))
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
                if verdict.reason is Reason.FITS and getattr(request, "waited", False):
                    return verdict._replace(reason=Reason.PREFIX)
                return verdict
        raise KeyError(f"no waiting request {seq!r}")

    def step(self) -> Step:
        """Admit, then give every running sequence the slot of its next token."""
        step = Step()
        step.prefills = []
        step.cached = []
        step.preempted = []
        step.rejected = {}
        if self.waiting:
            self._admit(step)
        self._decode(step)
        return step

    # ------------------------------------------------------------ admission

    def _admit(self, step: Step) -> None:
        self._rows.follow(self.running)  # a dead id raises before anybody is admitted
        entered: _Entered = {}
        while self.waiting:
            request = self.waiting[0]
            seq, n_tokens = request
            verdict = self._never(request)
            if verdict is not None:
                self.waiting.popleft()
                step.rejected[seq] = verdict
                continue
            verdict = self._not_now(request, exact=bool(entered))
            if verdict.reason is Reason.LIVE_ID and seq not in self.running:
                # Its owner did not come through here: nothing says when it will end.
                self.waiting.popleft()
                step.rejected[seq] = self._not_now(request)
            elif verdict.reason is not Reason.FITS or (
                entered and self._waits_for_prefix(request, verdict, entered)
            ):
                return
            else:
                cached = 0
                if isinstance(request, Request):
                    cached = self.bm.allocate(
                        seq,
                        n_tokens,
                        tokens=request.prompt,
                        retention=request.retention,
                        resumed=isinstance(request, Resumed),
                    )
                    if self.wait_for_prefix and len(self.waiting) > 1:
                        self._computes(request, cached // self.bm.block_size, entered)
                else:
                    self.bm.allocate(seq, n_tokens)
                self.waiting.popleft()
                self._enter(seq)
                step.prefills.append((seq, n_tokens))
                step.cached.append(cached)

    def _waits_for_prefix(
        self, request: tuple[Hashable, int], verdict: Verdict, entered: _Entered
    ) -> bool:
        """Whether the head of the queue, which fits, lets this step pass for a prefix.

        Two prompts that agree beyond what is cached miss at the same block. So it is
        compared with those that miss at a block like its own, not with everybody.
        """
        if not isinstance(request, Request) or request.waited:
            return False
        prompt = request.prompt
        column = self._needed(request) - verdict.needed  # of the first block not cached
        # The last token of a prompt is always computed, and its block with it.
        usable = (request.n_tokens - 1) // self.bm.block_size
        if prompt is None or column >= min(usable, prompt.num_full_blocks):
            return False
        others = entered.get(prompt.chain_hash(column), ())
        request.waited = any(prompt.common_blocks(other) > column for other in others)
        return request.waited

    def _computes(self, request: Request, column: int, entered: _Entered) -> None:
        """Note, for those behind it, that it computes its blocks from ``column`` on."""
        prompt = request.prompt
        if prompt is not None and column < prompt.num_full_blocks:
            entered.setdefault(prompt.chain_hash(column), []).append(prompt)

    def _needed(self, request: tuple[Hashable, int]) -> int:
        """Blocks that a request holds once it has entered.

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

    def _not_now(self, request: tuple[Hashable, int], exact: bool = True) -> Verdict:
        """Whether the request could enter at once, were it the head of the queue.

        What is cached can only help: unless ``exact`` numbers are asked for, nothing is
        looked up for a request that would fit without it.
        """
        needed = self._needed(request)
        available = self.bm.num_available
        watermark = self.watermark_blocks
        if isinstance(request, Request):
            if isinstance(request, Resumed) and not self.running:
                watermark = 0
            if request.prompt is not None and (exact or needed > available - watermark):
                plan = self.bm.plan_allocate(request.n_tokens, tokens=request.prompt)
                needed -= plan.cached_tokens // self.bm.block_size
                available = plan.available
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
        if self.bm.prefix_caching:
            request.prompt = self.bm.prompt_of(victim)
            request.retention = self.bm.retention(victim)
        self._leave(len(self.running) - 1)
        if step.prefills and step.prefills[-1][0] == victim:
            step.prefills.pop()
            step.cached.pop()
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


def _at_least(value: Any, minimum: int, name: str) -> int:
    try:
        number = index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, got {value!r} of type {type(value).__name__}"
        ) from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def _number_of(tokens: Any) -> int:
    try:
        return len(tokens)
    except TypeError:
        raise TypeError(f"tokens must be a sequence of token ids, got {tokens!r}") from None
