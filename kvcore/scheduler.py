"""Continuous batching over a block manager: who enters, who runs, who yields.

The rules:

* Admission is in the order of a policy, by default first come, first served. The next
  request enters while that leaves as many blocks available as the admission policy keeps
  back, by default a watermark, so that the decode which follows does not at once preempt
  what was just admitted. It takes the blocks of its whole prompt, though its tokens may
  be computed in several steps. The first that does not fit stops the rest. Cached blocks
  that it can share need not be found.
* A request whose next block is computed by somebody who enters in this very step waits,
  once, for the next step, where it can share that block instead of computing it too.
* Every running sequence gets the slot of its next token, oldest first. Appends may use
  what admission keeps back.
* When the blocks do not suffice for that, drafts are given up; then running requests are
  preempted in the order of a policy, by default the newest first. A group of samples or
  beams yields as one. Who yields is decided before anything is appended, and nobody
  yields if that would not help. What becomes available only when a step in flight or a
  swap ends is waited for instead of looked for elsewhere.
* A preempted request loses its blocks and returns to the front of the queue with its
  prompt and all that it generated, to be recomputed but for the blocks that are still
  cached when it comes back. Or its blocks go to host memory; then it comes back before
  anybody is admitted.
* A preempted request that meets an idle machine may use all blocks. It grew into
  them, so it must be able to come back.

Why it cannot hang: a shortage never takes the last request that runs, so one of them gets
its token in every step unless all blocks that it lacks are held outside; a token once
generated is never generated again, so those steps are bounded by the tokens asked for; a
request that the whole pool cannot hold is ended with a reason; and one that could never
enter is refused. Only a step that has admitted somebody lets the next one wait for a
prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from kvcore.admission import Watermark
from kvcore.block_manager import BlockManager
from kvcore.chunking import share_budget
from kvcore.errors import RequestRefused
from kvcore.host_tier import HostTier
from kvcore.order import FCFS
from kvcore.request import Member, Reason, Request, Resumed, Verdict
from kvcore.resume_cost import SwapCandidate
from kvcore.running_rows import UNKNOWN_TOKEN, UNLIMITED, RowNotes, RunningRows
from kvcore.running_view import RunningView
from kvcore.step import NO_ROWS, SchedulerCounters, Step
from kvcore.victim import Newest
from kvcore.waiting import WaitingQueue

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.admission import Admission
    from kvcore.eviction import Retention
    from kvcore.identity import Media, Namespace
    from kvcore.order import Order
    from kvcore.prefix_index import Prompt
    from kvcore.resources import Resource
    from kvcore.resume_cost import SwapRule
    from kvcore.victim import Victim

    _Entered = dict[int, list[Prompt]]
    """Prompts that enter in a step, by the hash of their first block not cached."""

__all__ = ["Reason", "Request", "Resumed", "Scheduler", "Step", "Verdict"]

MAX_TOKENS = 2**31 - 1
"""A sequence cannot grow past this; lengths are int32."""

NEVER = 2**63

BLOCKED = {
    Reason.WATERMARK: "watermark",
    Reason.RESERVE: "watermark",
    Reason.BLOCKS: "blocks",
    Reason.MAX_RUNNING: "max_running",
    Reason.BUDGET: "budget",
    Reason.PARTIAL_PREFILLS: "budget",
    Reason.RESOURCE: "resource",
}

UNITS = {Reason.MAX_RUNNING: "places", Reason.RESOURCE: "of it"}


class Scheduler:
    """Decides in every step who enters, who runs and who yields.

    There are two kinds of step. **Textbook steps**, the default: whoever is admitted has
    its whole prompt computed and decodes in the same step, and the caller says with
    ``finish`` when a sequence ends. **Engine steps**, with a ``token_budget``: a step is
    one forward pass of at most that many tokens, decodes first, prompts in chunks with
    what is left, and ``update`` reports its results; a sequence decodes from the step
    after the one that completes its prompt. What is marked below with (E) needs them.

    Parameters
    ----------
    bm : BlockManager
        Holds the blocks. Sequences that did not come through this scheduler may
        live in it too; they are never preempted.
    watermark_blocks : int
        Blocks that admission must leave available, unless ``admission`` says otherwise.
    max_running : int, optional
        Most sequences that may run at once, the siblings to come of a group included.
        By default the blocks limit them and, with a budget, the tokens of a step.
    wait_for_prefix : bool
        Whether a request may let one step pass, once, when that saves it at least one
        block which a sequence admitted in that step computes.
    token_budget : int, optional
        Most tokens that a step computes. At least ``max_running * (1 + draft_tokens)``:
        then every running sequence gets on in every step, whether it decodes or is still
        in its prompt.
    max_partial_prefills : int
        (E) Most prompts that may be under way without being completed in the step.
    order, victim, admission
        Policies: who is next, who yields, and what is kept back. Defaults: ``FCFS()``,
        ``Newest()``, ``Watermark(watermark_blocks)``. See ``docs/policies.md``.
    resources : sequence of Resource
        What a request needs besides blocks, from its admission until it ends or is
        preempted to be recomputed. It gets all or nothing.
    draft_tokens : int
        (E) Slots for speculative tokens in every decode.
    window : int, optional
        (E) Tokens that attention looks back, the current one included. Blocks wholly
        outside are given back once what follows them is settled.
    sink_tokens : int
        (E) Leading tokens that attention sees besides the window.
    in_flight : int
        (E) Most steps whose results may be outstanding when the next is planned.
    host : BlockManager, optional
        (E) Blocks in host memory, for preempted sequences.
    swap : callable, optional
        (E) Whether a ``SwapCandidate`` goes there; by default each that finds room.

    Attributes
    ----------
    waiting : deque of (seq, n_tokens)
        The queue. Appending a pair works like ``add``, except that a pair that
        cannot run is reported in ``Step.rejected`` instead of raising.
    running : list
        Running sequences in order of admission.
    counters : SchedulerCounters

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
        token_budget: SupportsIndex | None = None,
        max_partial_prefills: SupportsIndex = 4,
        order: Order | None = None,
        victim: Victim | None = None,
        admission: Admission | None = None,
        resources: Sequence[Resource] = (),
        draft_tokens: SupportsIndex = 0,
        window: SupportsIndex | None = None,
        sink_tokens: SupportsIndex = 0,
        in_flight: SupportsIndex = 0,
        host: BlockManager | None = None,
        swap: SwapRule | None = None,
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
        self.token_budget = (
            None if token_budget is None else _at_least(token_budget, 1, "token_budget")
        )
        self.max_partial_prefills = _at_least(max_partial_prefills, 1, "max_partial_prefills")
        self.draft_tokens = _at_least(draft_tokens, 0, "draft_tokens")
        self.window = None if window is None else _at_least(window, 1, "window")
        self.sink_tokens = _at_least(sink_tokens, 0, "sink_tokens")
        self.in_flight = _at_least(in_flight, 0, "in_flight")
        self._host = None if host is None else self._host_tier(host)
        self._swap = swap
        self._check_options()
        self.order = FCFS() if order is None else order
        self.victim = Newest() if victim is None else victim
        self.admission = Watermark(self.watermark_blocks) if admission is None else admission
        self.resources = list(resources)
        self.counters = SchedulerCounters()

        self.waiting = WaitingQueue()
        self.running: list[Hashable] = []
        self._rows = RunningRows(bm)
        self._notes = RowNotes()
        self._number = 0
        # Of every sequence with a table that came through here, in host memory or on
        # its way there included: its request, and the step in which it entered.
        self._by_seq: dict[Hashable, Request] = {}
        self._entered: dict[Hashable, int] = {}
        # How often a sequence lost its table: what tells a step that none of its own did.
        self._departures = 0
        # Tokens computed or found cached, of prompts under way.
        self._prefilling: dict[Hashable, int] = {}
        # Running sequences that do not decode: in their prompt, at their limit, or on
        # their way back from host memory.
        self._idle: set[Hashable] = set()
        # At their limit: they end when the results in flight are there.
        self._draining: set[Hashable] = set()
        self._stalled: list[Hashable] = []
        # No running sequence reaches its limit in fewer decodes than this.
        self._steps_to_limit = UNLIMITED
        self._outstanding: deque[Step] = deque()
        self._going_out: list[Request] = []
        self._swapped: deque[Request] = deque()
        self._nobody = self._view_of([], NO_ROWS)

    def _host_tier(self, host: BlockManager) -> HostTier:
        if not isinstance(host, BlockManager):
            raise TypeError(f"host must be a BlockManager, got {host!r}")
        if host.block_size != self.bm.block_size:
            raise ValueError(
                f"host has blocks of {host.block_size} tokens, bm of {self.bm.block_size}"
            )
        return HostTier(self.bm, host)

    def _check_options(self) -> None:
        """Options that do not go together."""
        if self.token_budget is None:
            given = {
                "draft_tokens": self.draft_tokens,
                "window": self.window,
                "in_flight": self.in_flight,
                "host": self._host,
                "swap": self._swap,
            }
            for name, value in given.items():
                if value:
                    raise ValueError(f"{name} needs a token_budget, got {value!r} without")
            return
        each = 1 + self.draft_tokens
        if self.max_running is None:
            self.max_running = self.token_budget // each
        if not each <= self.max_running * each <= self.token_budget:
            raise ValueError(
                f"token_budget is {self.token_budget}, too little for {max(self.max_running, 1)} "
                f"running sequences of {each} tokens a step"
            )
        if self.draft_tokens and self.in_flight:
            raise ValueError(
                f"draft_tokens is {self.draft_tokens} with in_flight {self.in_flight}: the "
                "next step cannot be planned before it is known which drafts were accepted"
            )
        if self._swap is not None and self._host is None:
            raise ValueError(f"swap is {self._swap!r}, but there is no host")

    @property
    def swapped(self) -> list[Hashable]:
        """Sequences in host memory, in the order in which they come back."""
        return [seq for request in self._swapped for seq in request.members]

    # ------------------------------------------------------------ requests

    def add(
        self,
        seq: Hashable | Request,
        n_tokens: SupportsIndex | None = None,
        *,
        tokens: Any = None,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
        retention: Sequence[Retention] = (),
        max_tokens: SupportsIndex | None = None,
        priority: int = 0,
        tenant: Hashable = None,
        siblings: Sequence[Hashable] = (),
    ) -> None:
        """Queue a request whose prompt has ``n_tokens`` tokens, or these ``tokens``.

        Everything from ``tokens`` to ``retention`` is for prefix sharing and ignored
        without it; see ``BlockManager.allocate``. The tokens are copied and hashed here,
        once. For the rest see ``Request``, which may also be given instead. O(tokens).

        Raises
        ------
        RequestRefused
            It could never enter: its prompt needs more blocks than the pool can have
            beside what admission keeps back, cached ones included, for they need not be
            there any more when it enters; or it is wider than ``max_running``, or needs
            more of a resource than there is.
        ValueError, TypeError
            ``n_tokens`` is below 1, below the number of ``tokens`` or no integer,
            an id is live, siblings or ``max_tokens`` without a token budget, or what
            ``BlockManager.allocate`` raises for the rest.
        """
        if isinstance(seq, Request):
            request = seq
            _at_least(request.n_tokens, 1, "n_tokens")
        else:
            known, prompt = 0, None
            more = tokens is not None or namespace is not None or media or retention
            if more and self.bm.prefix_caching:
                given = () if tokens is None else tokens
                prompt = self.bm.prompt(given, namespace=namespace, media=media)
            if tokens is not None:
                known = _number_of(tokens) if prompt is None else len(prompt)
                n_tokens = known if n_tokens is None else n_tokens
            request = Request(seq, _at_least(n_tokens, known or 1, "n_tokens"), prompt)
            if prompt is not None and retention:
                # Else a step would meet what is wrong with it.
                self.bm.plan_allocate(request.n_tokens, tokens=prompt, retention=retention)
                request.retention = tuple(retention)
            if max_tokens is not None:
                request.max_tokens = _at_least(max_tokens, 0, "max_tokens")
            request.priority = priority
            request.tenant = tenant
            request.siblings = tuple(siblings)
        self._check_request(request)
        self.admission.reserve(request, self._nobody)
        verdict = self._never(request)
        if verdict is not None:
            raise RequestRefused(
                f"n_tokens is {request.n_tokens}: {verdict.reason.value}; {request.seq!r} needs "
                f"{verdict.needed} {UNITS.get(verdict.reason, 'blocks')} and can have "
                f"{verdict.available}"
            )
        self.waiting.append(request)
        self.counters.requests_added += 1

    def _check_request(self, request: Request) -> None:
        if self.token_budget is None:
            if request.siblings:
                raise ValueError(f"siblings need a token_budget, got {request.siblings!r} without")
            if request.max_tokens is not None:
                raise ValueError(
                    f"max_tokens needs a token_budget, got {request.max_tokens} without"
                )
        elif request.final_tokens is not None and request.final_tokens >= MAX_TOKENS:
            raise ValueError(
                f"max_tokens is {request.max_tokens}: a sequence cannot grow past "
                f"{MAX_TOKENS} tokens"
            )
        if request.seq in self.bm or request.seq in self._by_seq:
            raise ValueError(f"seq {request.seq!r} is a live sequence already")
        for place, sibling in enumerate(request.siblings):
            if sibling == request.seq or sibling in request.siblings[:place]:
                raise ValueError(f"siblings: {sibling!r} comes twice")
            if sibling in self.bm or sibling in self._by_seq:
                raise ValueError(f"siblings: {sibling!r} is a live sequence already")

    def fork(
        self, parent: Hashable, child: Hashable, n_tokens: SupportsIndex | None = None
    ) -> None:
        """Run ``child`` beside ``parent``, sharing its first ``n_tokens`` (default all).

        The child is the newest running sequence, and yields by itself. Textbook steps
        only: with engine steps give a request ``siblings``. Raises what
        ``BlockManager.fork`` raises.
        """
        if self.token_budget is not None:
            raise ValueError(f"child {child!r}: with a token_budget give the request siblings")
        self.bm.fork(parent, child, n_tokens)
        request = Request(child, self.bm.length(child))
        request.arrival = self.waiting.arrivals
        self.waiting.arrivals += 1
        self._enter(child, request)

    def finish(self, seq: Hashable) -> bool:
        """End a sequence, wherever it is, and release its blocks. O(running + waiting).

        At any moment: while it waits, runs, is in host memory, or a step is in flight
        that computes it. Until a group has come apart, its first sequence takes the
        others along. Returns False when no such sequence is here, as for a result that
        comes late.
        """
        if seq in self._by_seq and seq in self.bm:
            self.admission.ended(self._by_seq[seq], self._generated(seq))
        ended = self._end(seq)
        self.counters.finished += ended
        return ended

    def abort(self, seq: Hashable) -> bool:
        """End a request whose result nobody wants any more: the same exit as ``finish``."""
        ended = self._end(seq)
        self.counters.aborted += ended
        return ended

    def why(self, seq: Hashable) -> Verdict:
        """Why a request waits, or a running one stalls. O(waiting). Else ``KeyError``."""
        for place, request in enumerate(self._swapped):
            if seq in request.members:
                assert self._host is not None
                needed = sum(self._host.blocks_to_return(member) for member in request.members)
                return Verdict(Reason.SWAPPED, needed, self.bm.num_available, place)
        for place, item in enumerate(self.waiting):
            if item[0] == seq:
                request = _request(item)
                verdict = self._never(request) or self._not_now(request)
                first = self.order.first(self.waiting, self._number + 1)
                if place != first:
                    ahead = max(place, 1) if first == 0 else self._ahead(place)
                    return verdict._replace(reason=Reason.BEHIND, ahead=ahead)
                if verdict.reason is Reason.FITS and request.waited:
                    return verdict._replace(reason=Reason.PREFIX)
                return verdict
        if seq in self._stalled and seq in self.running:
            needed = self.bm.plan_append(self.bm.rows([seq])).needed
            return Verdict(Reason.STALLED, needed, self.bm.num_available)
        raise KeyError(f"no waiting request {seq!r}")

    def _ahead(self, place: int) -> int:
        """Requests that the order takes before the one at ``place``. O(waiting^2)."""
        rest = list(self.waiting)
        asked = rest[place]
        ahead = 0
        while True:
            first = self.order.first(rest, self._number + 1)
            if rest[first] is asked:
                return ahead
            del rest[first]
            ahead += 1

    # ------------------------------------------------------------ a step

    def step(self) -> Step:
        """Plan the next step.

        Raises
        ------
        KeyError
            A sequence in ``running`` is no longer live. Nothing has changed.
        ValueError
            More results are outstanding than may be. Nothing has changed.
        """
        if len(self._outstanding) > self.in_flight:
            raise ValueError(
                f"step {self._outstanding[0].number} has not been updated, and at most "
                f"{self.in_flight} steps may be in flight when the next is planned"
            )
        if self._rows.follow(self.running):
            self._reconcile()
        step = Step()
        step.bm = self.bm
        step.number = self._number = self.waiting.step = self._number + 1
        if self.token_budget is None:
            if self.waiting:
                self._push_out(step)
                self._admit(step, UNLIMITED)
                self._prefill(step, UNLIMITED)
            self._decode(step)
        else:
            if self.in_flight:
                step.fence = self.bm.fence()
                if self._host is not None:
                    step.host_fence = self._host.host.fence()
            self._engine_step(step, self.token_budget)
        return step

    def _engine_step(self, step: Step, budget: int) -> None:
        if self.waiting:
            self._push_out(step)
        self._decode(step)
        budget -= len(step.slots)
        if self._swapped:
            self._swap_in(step)
        if self.waiting:
            self._admit(step, budget)
        if self._prefilling:
            self._prefill(step, budget)
        self._note_limits(step)
        pool = self.bm.pool
        step.levels = (
            len(self.running),
            len(self.waiting),
            len(self._swapped),
            pool.num_free,
            pool.num_evictable,
        )
        step.departures = self._departures
        self._outstanding.append(step)
        self._pass_over_empty_steps()

    def _pass_over_empty_steps(self) -> None:
        """A step in which nothing runs has no results to wait for."""
        while self._outstanding and self._outstanding[0].is_empty:
            self._settle(self._outstanding.popleft())

    def _settle(self, step: Step) -> None:
        step.is_updated = True
        if step.fence:
            self.bm.settle(step.fence)
        if step.host_fence:
            assert self._host is not None
            self._host.host.settle(step.host_fence)

    def _reconcile(self) -> None:
        """Somebody else has edited the list of running sequences."""
        known = self._by_seq
        self._by_seq = {
            seq: known.get(seq) or _alone(Request(seq, self.bm.length(seq)), seq)
            for seq in self.running
        }
        for request in [*self._going_out, *self._swapped]:
            self._by_seq.update(dict.fromkeys(request.members, request))
        rows = self.bm.rows(self.running).tolist()
        for seq, row in zip(self.running, rows, strict=True):
            if seq not in self._entered:
                self._entered[seq] = self._number + 1
                self._notes.enter(row, UNLIMITED, self.bm.length(seq), UNKNOWN_TOKEN)
        for seq in [seq for seq in self._entered if seq not in self._by_seq]:
            self._forget(seq)
        self._departures += 1

    # ------------------------------------------------------------ admission

    def _admit(self, step: Step, budget: int) -> None:
        """Let requests enter while they fit, and while ``budget`` has tokens for them."""
        if self._swapped or step.preempted or step.swapped_out:
            return
        budget -= sum(self._remaining(seq) for seq in self._prefilling)
        entered: _Entered = {}
        while self.waiting:
            place = self.order.first(self.waiting, step.number)
            request = _request(self.waiting[place])
            verdict = self._never(request)
            if verdict is not None:
                self._reject(step, place, verdict)
                continue
            verdict = self._not_now(request, exact=bool(entered), budget=budget)
            if verdict.reason is Reason.LIVE_ID and not self._is_ours(request):
                # Its owner did not come through here: nothing says when it will end.
                self._reject(step, place, self._not_now(request))
                continue
            if verdict.reason is not Reason.FITS:
                name = BLOCKED.get(verdict.reason)
                if name is not None:
                    name = f"admission_blocked_{name}"
                    setattr(self.counters, name, getattr(self.counters, name) + 1)
                return
            if entered and self._waits_for_prefix(request, verdict, entered):
                return
            for resource in self.resources:
                resource.take(request)
            cached = self._allocate(request)
            del self.waiting[place]
            request.admitted = step.number
            if self.wait_for_prefix and self.waiting:
                self._computes(request, cached // self.bm.block_size, entered)
            self.order.charge(request, request.n_tokens - cached)
            budget -= request.n_tokens - cached

    def _reject(self, step: Step, place: int, verdict: Verdict) -> None:
        request = _request(self.waiting[place])
        del self.waiting[place]
        others = [other.seq for other in getattr(request, "others", ())]
        for seq in (request.seq, *others):
            step.rejected[seq] = verdict
        self.counters.rejected += 1

    def _is_ours(self, request: Request) -> bool:
        return all(seq in self._by_seq or seq not in self.bm for seq in _ids(request))

    def _allocate(self, request: Request) -> int:
        """Give a request that fits its tables, and let it run; returns the tokens cached."""
        seq = request.seq
        is_resumed = isinstance(request, Resumed)
        if request.prompt is None and not is_resumed:
            self.bm.allocate(seq, request.n_tokens)
            cached = 0
        else:
            cached = self.bm.allocate(
                seq,
                request.n_tokens,
                tokens=request.prompt,
                retention=request.retention,
                resumed=is_resumed,
            )
        self._enter(seq, request)
        self._start(seq, cached)
        if isinstance(request, Resumed):
            shared = self._shared_tokens(request)
            for other in request.others:
                self.bm.fork(seq, other.seq, shared)
                if other.n_tokens > shared:
                    self.bm.append_slots(other.seq, other.n_tokens - shared)
                self._enter(other.seq, request)
                self._start(other.seq, shared)
        return cached

    def _shared_tokens(self, request: Resumed) -> int:
        """Tokens that the sequences of a group share when it is recomputed: full blocks only."""
        return request.prompt_tokens // self.bm.block_size * self.bm.block_size

    def _waits_for_prefix(self, request: Request, verdict: Verdict, entered: _Entered) -> bool:
        """Whether the next request, which fits, lets this step pass for a prefix.

        Two prompts that agree beyond what is cached miss at the same block. So it is
        compared with those that miss at a block like its own, not with everybody.
        """
        if request.waited:
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

    def _needed(self, request: Request) -> int:
        """Blocks that a request holds once it has entered, those it can share included.

        A preempted one returns only when its next token has room too: otherwise it
        would yield again to the very shortage that it made way for. A group needs
        a block more for every sibling, which writes its first token into its own.
        """
        size = self.bm.block_size
        if not isinstance(request, Resumed):
            return -(-request.n_tokens // size) + len(request.siblings)
        needed = -(-(request.n_tokens + 1) // size) + len(request.siblings)
        if request.others:
            shared = self._shared_tokens(request) // size
            needed += sum(-(-(other.n_tokens + 1) // size) - shared for other in request.others)
        return needed

    def _never(self, request: Request) -> Verdict | None:
        """Why the request can never run, if it cannot."""
        num_blocks = self.bm.num_blocks
        resumed = isinstance(request, Resumed)
        try:
            # A preempted fork of nothing may have no token yet.
            n_tokens = _at_least(request.n_tokens, 0 if resumed else 1, "n_tokens")
        except (TypeError, ValueError):
            return Verdict(Reason.BAD_LENGTH, 0, num_blocks)
        if n_tokens >= MAX_TOKENS:
            return Verdict(Reason.BAD_LENGTH, 0, num_blocks)
        needed = self._needed(request)
        if resumed:
            if needed > num_blocks:
                return Verdict(Reason.OUTGREW_POOL, needed, num_blocks)
            return None
        try:
            reserve = self.admission.reserve(request, self._nobody)
        except ValueError:
            # A pair put into the queue may lack what the policy needs; add() says what.
            return Verdict(Reason.BAD_REQUEST, needed, num_blocks)
        if needed > num_blocks - reserve:
            return Verdict(Reason.NEVER_FITS, needed, num_blocks - reserve, reserve=reserve)
        if self.max_running is not None and request.width > self.max_running:
            return Verdict(Reason.MAX_RUNNING, request.width, self.max_running)
        for resource in self.resources:
            if resource.needed(request) > resource.total:
                return Verdict(Reason.RESOURCE, resource.needed(request), resource.total)
        return None

    def _not_now(self, request: Request, exact: bool = True, budget: int = UNLIMITED) -> Verdict:
        """Whether the request could enter at once, were it the next.

        What is cached can only help: unless ``exact`` numbers are asked for, nothing is
        looked up for a request that would fit without it.
        """
        needed = self._needed(request)
        available = self.bm.num_available
        if isinstance(request, Resumed) and not self.running:
            reserve = 0
        else:
            reserve = self.admission.reserve(request, self._view())
        if request.prompt is not None and (exact or needed > available - reserve):
            plan = self.bm.plan_allocate(request.n_tokens, tokens=request.prompt)
            needed -= plan.cached_tokens // self.bm.block_size
            available = plan.available
        reason = Reason.FITS
        lacking = None
        if any(seq in self.bm or seq in self._by_seq for seq in _ids(request)):
            reason = Reason.LIVE_ID
        elif self.max_running is not None and self._width() + request.width > self.max_running:
            reason = Reason.MAX_RUNNING
        elif self._swapped:
            reason = Reason.SWAPPED_BEFORE
        elif budget <= 0 and self._partial_prefills(budget) >= self.max_partial_prefills:
            reason = Reason.PARTIAL_PREFILLS
        elif self.resources and (lacking := self._lacking(request)) is not None:
            return Verdict(Reason.RESOURCE, lacking.needed(request), lacking.available)
        elif needed > available:
            reason = Reason.BLOCKS
        elif needed > available - reserve:
            keeps_watermark = isinstance(self.admission, Watermark)
            reason = Reason.WATERMARK if keeps_watermark else Reason.RESERVE
        return Verdict(reason, needed, available, reserve=reserve)

    def _width(self) -> int:
        """Running sequences, siblings to come and members on their way out included."""
        unborn = sum(len(self._by_seq[seq].siblings) for seq in self._prefilling)
        return len(self.running) + unborn

    def _partial_prefills(self, budget: int) -> int:
        """Prompts under way that this step does not complete, with ``budget`` short of them."""
        return len(self._prefilling)

    def _lacking(self, request: Request) -> Resource | None:
        for resource in self.resources:
            if resource.needed(request) > resource.available:
                return resource
        return None

    # ------------------------------------------------------------ prompts

    def _start(self, seq: Hashable, computed: int) -> None:
        """Begin with a prompt of which ``computed`` tokens are there."""
        self._prefilling[seq] = computed
        self._idle.add(seq)

    def _remaining(self, seq: Hashable) -> int:
        return self.bm.length(seq) - self._prefilling[seq]

    def _prefill(self, step: Step, budget: int) -> None:
        """Share what is left of the budget out among the prompts under way."""
        size = self.bm.block_size
        ready = [seq for seq in self._prefilling if self._can_compute(seq)]
        shares = share_budget(budget, [self._remaining(seq) for seq in ready])
        for seq, count in zip(ready, shares, strict=True):
            start, length = self._prefilling[seq], self.bm.length(seq)
            stop = start + count
            if stop < length and stop // size * size > start:
                stop = stop // size * size  # so that it ends with a block to publish
            if stop == start < length:
                continue
            if stop > start:
                step.prefills.append((seq, start, stop - start))
                self._count_prefill(seq, start, stop)
            self._prefilling[seq] = stop
            if stop == length:
                self._complete(step, seq)

    def _can_compute(self, seq: Hashable) -> bool:
        """Whether all that the sequence reads is computed before this step.

        A group that is recomputed shares the blocks which its first sequence computes.
        """
        first = self._by_seq[seq].members[0]
        if first == seq or first not in self._prefilling:
            return True
        return self._prefilling[first] >= self._prefilling[seq]

    def _count_prefill(self, seq: Hashable, start: int, stop: int) -> None:
        self.counters.prefill_tokens += stop - start
        request = self._by_seq[seq]
        if isinstance(request, Resumed):
            lost = request.lost
            for other in request.others:
                if other.seq == seq:
                    lost = other.lost
            self.counters.recomputed_tokens += max(min(stop, lost) - start, 0)

    def _complete(self, step: Step, seq: Hashable) -> None:
        """The prompt is computed in this step: from the next one on the sequence decodes."""
        del self._prefilling[seq]
        self._idle.discard(seq)
        request = self._by_seq[seq]
        if self.token_budget is None:
            return
        started = [seq]
        for child in request.siblings if request.members[0] == seq else ():
            if child in self.bm or child in self._by_seq:
                step.rejected[child] = Verdict(Reason.LIVE_ID, 0, 0)
                continue
            self.bm.fork(seq, child)
            self._enter(child, request)
            step.forks.append((seq, child))
            started.append(child)
        if len(started) > 1 or request.siblings:
            request.siblings = ()
        left = UNLIMITED
        if request.final_tokens is not None:
            left = request.final_tokens - self.bm.length(seq)
        if request.max_tokens != 0:
            step.completed.append(seq)
        if left <= 0:
            self._ends(step, started)
        self._steps_to_limit = min(self._steps_to_limit, max(left, 1))

    # ------------------------------------------------------------ decoding

    def _decode(self, step: Step) -> None:
        """Give every running sequence the slot of its next token, and of its drafts."""
        seqs, rows = self.running, self._rows.of(self.running)
        if self._idle:
            places = [place for place, seq in enumerate(seqs) if seq not in self._idle]
            seqs, rows = [seqs[place] for place in places], rows[np.array(places, np.intp)]
        counts = self._counts(rows) if self.draft_tokens else None
        most = 1 + -(-self.draft_tokens // self.bm.block_size)
        if self.bm.num_available < most * len(rows):
            seqs, rows, counts = self._make_room(step, seqs, rows, counts)
        slots = np.empty(len(rows) if counts is None else int(counts.sum()), np.int64)
        if counts is None:
            served, copies = self.bm.append_batch(rows, slots)
        else:
            served, copies = self.bm.append_batch(rows, slots, counts)
        if served < len(rows):
            seqs, rows, counts, slots, copies = self._decode_around(
                step, seqs, rows, counts, slots, served, copies
            )
        self._stalled = step.stalled if "stalled" in step.__dict__ else []
        step.extend(seqs)
        step.rows = rows
        step.slots = slots
        step.lengths = self.bm.lengths_of(rows)
        step.counts = counts
        if copies is not None:
            step.copies = copies

    def _counts(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens for each row: the next one and its drafts, but never past the limit."""
        left = self._notes.limits[rows] - self.bm.lengths[rows]
        counts: NDArray[np.int32] = np.clip(left, 1, 1 + self.draft_tokens).astype(np.int32)
        return counts

    def _decode_around(
        self,
        step: Step,
        seqs: list[Hashable],
        rows: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
        slots: NDArray[np.int64],
        served: int,
        copies: NDArray[np.int32] | None,
    ) -> tuple[
        list[Hashable],
        NDArray[np.int32],
        NDArray[np.int32] | None,
        NDArray[np.int64],
        NDArray[np.int32] | None,
    ]:
        """Go on after a sequence that finds no block: it sits this step out, and so may others.

        Blocks are on their way, or held outside; those that need none, decode.
        """
        batches = [] if copies is None else [copies]
        kept = list(range(served))
        filled = served if counts is None else int(counts[:served].sum())
        while served < len(rows):
            step.stalled.append(seqs[served])
            served += 1
            if counts is None:
                more, copies = self.bm.append_batch(
                    rows[served:], slots[filled : filled + len(rows) - served]
                )
                filled += more
            else:
                size = int(counts[served:].sum())
                more, copies = self.bm.append_batch(
                    rows[served:], slots[filled : filled + size], counts[served:]
                )
                filled += int(counts[served : served + more].sum())
            if copies is not None:
                batches.append(copies)
            kept.extend(range(served, served + more))
            served += more
        chosen = np.array(kept, np.intp)
        return (
            [seqs[place] for place in kept],
            rows[chosen],
            None if counts is None else counts[chosen],
            slots[:filled],
            np.concatenate(batches) if batches else None,
        )

    def _make_room(
        self,
        step: Step,
        seqs: list[Hashable],
        rows: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
    ) -> tuple[list[Hashable], NDArray[np.int32], NDArray[np.int32] | None]:
        """Decide, before anything is appended, who yields. Returns who is left to decode."""
        plan = self._plan(rows, counts)
        if plan[0] <= plan[1]:
            return seqs, rows, counts
        seqs = seqs.copy()  # it may be the list of running sequences, which changes below
        for seq in [seq for seq in seqs if self._outgrew(seq)]:
            blocks = self.bm.length(seq) // self.bm.block_size + 1
            step.rejected[seq] = Verdict(Reason.OUTGREW_POOL, blocks, self.bm.num_blocks)
            self.counters.rejected += 1
            self._unschedule(step, [seq])
            self._leave(seq)
        if counts is not None:
            counts = np.ones_like(counts)
        gone: set[Hashable] = set(step.rejected)
        rows, counts = self._without(seqs, rows, counts, gone)
        seqs = [seq for seq in seqs if seq not in gone]

        leaving = self._leaving_rows()
        victims: list[Request] = []
        units = len({id(self._by_seq[seq]) for seq in self.running if seq not in self._draining})
        needed, available, coming = self._plan(rows, counts, leaving)
        if needed > available + coming:
            for request in islice(self.victim.order(self._view()), len(self.running)):
                if units - len(victims) <= 1:
                    break
                if not self._may_yield(request) or request in victims:
                    continue
                victims.append(request)
                out = {seq for victim in victims for seq in victim.members}
                lost = self.bm.rows([seq for victim in victims for seq in victim.members])
                left, left_counts = self._without(seqs, rows, counts, out)
                needed, available, coming = self._plan(
                    left, left_counts, np.concatenate([leaving, lost])
                )
                if needed <= available + coming:
                    break
            if needed > available + coming:
                victims = []  # it would not help
        self._preempt_all(step, victims)
        out = {seq for victim in victims for seq in victim.members} | set(step.preempted)
        out |= set(step.swapped_out) | set(step.rejected)
        rows, counts = self._without(seqs, rows, counts, out)
        return [seq for seq in seqs if seq not in out], rows, counts

    def _plan(
        self,
        rows: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
        without: NDArray[np.int32] = NO_ROWS,
    ) -> tuple[int, int, int]:
        """Blocks needed, there at once, and coming, once those ``without`` have gone.

        What those on their way out hold is coming whether or not a step is in flight.
        """
        plan = self.bm.plan_append(rows, counts, without)
        return plan.needed, plan.available, plan.coming

    def _without(
        self,
        seqs: list[Hashable],
        rows: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
        out: Collection[Hashable],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
        if not out:
            return rows, counts
        left = np.array([place for place, seq in enumerate(seqs) if seq not in out], np.intp)
        return rows[left], None if counts is None else counts[left]

    def _outgrew(self, seq: Hashable) -> bool:
        """Whether the whole pool cannot hold the next token of a sequence."""
        if self.bm.length(seq) < self.bm.num_blocks * self.bm.block_size:
            return False
        table = np.asarray(self.bm.tables[seq])
        return int((table >= 0).sum()) >= self.bm.num_blocks

    def _may_yield(self, request: Request) -> bool:
        """Whether a request that a policy names runs, and is not about to end anyway."""
        members = getattr(request, "members", ())
        if not members or any(self._by_seq.get(seq) is not request for seq in members):
            return False
        if request in self._going_out or request in self._swapped:
            return False
        return not all(seq in self._draining for seq in members)

    def _leaving_rows(self) -> NDArray[np.int32]:
        """Rows of the sequences whose blocks are given back without anybody yielding."""
        if not self._draining and not self._going_out:
            return NO_ROWS
        leaving = list(self._draining)
        leaving += [seq for request in self._going_out for seq in request.members]
        return self.bm.rows(leaving)

    # ------------------------------------------------------------ preemption

    def _push_out(self, step: Step) -> None:
        """Let the next request take the place of running ones, if a policy says so.

        This comes before anything is appended, so that nobody who yields has a part in
        the step. Room for the tokens of those who stay is part of what must suffice.
        """
        place = self.order.first(self.waiting, step.number)
        request = _request(self.waiting[place])
        candidates = list(
            islice(self.victim.for_admission(request, self._view()), len(self.running))
        )
        if not candidates or self._swapped or self._never(request) is not None:
            return
        verdict = self._not_now(request)
        if verdict.reason not in (
            Reason.BLOCKS,
            Reason.WATERMARK,
            Reason.RESERVE,
            Reason.MAX_RUNNING,
        ):
            return
        leaving = self._leaving_rows()
        victims: list[Request] = []
        for victim in [None, *candidates]:
            if victim is not None:
                if not self._may_yield(victim) or victim in victims:
                    continue
                victims.append(victim)
            out = {seq for one in victims for seq in one.members}
            stay = [seq for seq in self.running if seq not in out]
            rows = self.bm.rows([seq for seq in stay if seq not in self._idle])
            lost = self.bm.rows([seq for one in victims for seq in one.members])
            needed, available, coming = self._plan(rows, None, np.concatenate([leaving, lost]))
            reserve = self.admission.reserve(request, self._view(stay))
            has_place = (
                self.max_running is None
                or self._width()
                - sum(one.width + len(one.members) - 1 for one in victims)
                + request.width
                <= self.max_running
            )
            idle_hits = self.bm.num_available - verdict.available
            if has_place and (verdict.needed + needed + reserve <= available + coming - idle_hits):
                self._preempt_all(step, victims, for_request=request)
                return

    def _preempt_all(
        self, step: Step, victims: list[Request], for_request: Request | None = None
    ) -> None:
        """Preempt several, so that they wait in the order in which they had been admitted."""
        positions = {seq: place for place, seq in enumerate(self.running)} if victims else {}
        for request in sorted(
            victims, key=lambda one: min(positions[seq] for seq in one.members), reverse=True
        ):
            self._preempt(step, request)

    def _preempt(self, step: Step, request: Request) -> None:
        """Take the blocks of a request back: to be computed again, or to host memory."""
        request.preemptions += 1
        if self._host is not None and self._swap_out(step, request):
            return
        members = list(request.members)
        resumed = self._resumed(request)
        self._unschedule(step, members)
        for seq in members:
            self._leave(seq)
        verdict = self._never(resumed)
        if verdict is not None:
            step.rejected.update(dict.fromkeys(members, verdict))
            self.counters.rejected += 1
        else:
            step.preempted.extend(members)
            self.waiting.appendleft(resumed)
            self.counters.preemptions_recompute += len(members)

    def _unschedule(self, step: Step, seqs: list[Hashable]) -> None:
        """With textbook steps, somebody may yield who was admitted in this very step."""
        if "prefills" in step.__dict__:
            step.prefills = [chunk for chunk in step.prefills if chunk[0] not in seqs]

    def _resumed(self, request: Request) -> Resumed:
        """The queue entry of a request that is about to lose its blocks."""
        members = [self._member(seq) for seq in request.members]
        first = members[0]
        resumed = Resumed(first.seq, first.n_tokens, first.prompt)
        attributes = request.__dict__ | {
            "prompt": first.prompt,
            "members": [],
            "others": tuple(members[1:]),
            "pending": first.pending,
            "lost": first.lost,
        }
        if self.bm.prefix_caching:
            attributes["retention"] = self.bm.retention(first.seq)
        resumed.__dict__.update(attributes)
        return resumed

    def _member(self, seq: Hashable) -> Member:
        """What of a sequence is known without its blocks."""
        length = self.bm.length(seq)
        row = self.bm.row(seq)
        prompt = None
        if self.bm.prefix_caching and not self._has_holes(seq):
            prompt = self.bm.prompt_of(seq)
        if self.token_budget is None:
            return Member(seq, length, prompt, UNKNOWN_TOKEN, length)
        if seq in self._prefilling:
            request = self._by_seq[seq]
            pending = request.pending if isinstance(request, Resumed) else UNKNOWN_TOKEN
            return Member(seq, length, prompt, pending, self._prefilling[seq])
        outstanding = sum(
            seq in step.sampled and self._entered[seq] <= step.number for step in self._outstanding
        )
        known = length + 1 - outstanding
        return Member(seq, known, prompt, int(self._notes.pending[row]), min(length, known))

    def _has_holes(self, seq: Hashable) -> bool:
        return self.window is not None and bool((np.asarray(self.bm.tables[seq]) < 0).any())

    # ------------------------------------------------------------ host memory

    def _swap_out(self, step: Step, request: Request) -> bool:
        """Send a request to host memory, if there is room and its rule says so."""
        assert self._host is not None
        members = request.members
        if any(seq in self._prefilling for seq in members):
            return False  # it would come back in the middle of its prompt
        blocks = self._host.blocks_to_move(members)
        if blocks == 0 or blocks > self._host.host.num_available:
            return False
        # What a group shares is computed once.
        n_tokens = sum(self.bm.length(seq) for seq in members)
        n_tokens = min(n_tokens, blocks * self.bm.block_size)
        if self._swap is not None and not self._swap(SwapCandidate(request, n_tokens, blocks)):
            return False
        pairs = []
        for seq in members:
            pending = int(self._notes.pending[self.bm.row(seq)])
            pairs.append(self._host.begin_out(seq, pending))
            position = self.running.index(seq)
            del self.running[position]
        self._rows.follow(self.running)
        step.swapped_out.extend(members)
        step.swap_out = np.concatenate([step.swap_out, *pairs])
        step.going_out = [*step.going_out, request]
        self._going_out.append(request)
        self.counters.preemptions_swap += len(members)
        self.counters.swap_out_blocks += blocks
        return True

    def _swap_in(self, step: Step) -> None:
        """Let those in host memory come back, first those that left first."""
        assert self._host is not None
        if step.swapped_out or step.preempted:
            return
        while self._swapped:
            request = self._swapped[0]
            needed = sum(self._host.blocks_to_return(seq) for seq in request.members)
            reserve = 0
            if self.running:
                reserve = self.admission.reserve(request, self._view())
            assert self.max_running is not None
            if self._width() + len(request.members) > self.max_running:
                return
            if needed > self.bm.num_available - reserve:
                if self.running or self._going_out or self._outstanding:
                    return
                if not self._give_up_swap(step, request):
                    return
                continue
            self._swapped.popleft()
            pairs = []
            for seq in request.members:
                pair, pending = self._host.begin_in(seq)
                pairs.append(pair)
                position = self._run(seq)
                self._note(seq, request, pending)
                self._idle.add(seq)
                self._rows.entered(position, seq)
            step.swapped_in.extend(request.members)
            step.swap_in = np.concatenate([step.swap_in, *pairs])
            step.coming_in = [*step.coming_in, request]
            self.counters.swap_in_blocks += sum(len(pair) for pair in pairs)

    def _give_up_swap(self, step: Step, first: Request) -> bool:
        """Nothing runs and the first in host memory finds no room: is that others' doing?

        What others there keep on the device may be what it lacks. The newest of them is
        computed again instead. Alone, it is if the whole pool could not hold it.
        """
        assert self._host is not None
        last = self._swapped[-1]
        if last is first:
            tokens = max(self._host.recall(seq)[0] for seq in first.members)
            if tokens < self.bm.num_blocks * self.bm.block_size:
                return False
        self._swapped.pop()
        members = []
        for seq in last.members:
            n_tokens, prompt, pending = self._host.recall(seq)
            members.append(Member(seq, n_tokens + 1, prompt, pending, n_tokens))
            self._host.drop(seq)
            self._forget(seq)
        resumed = Resumed(members[0].seq, members[0].n_tokens, members[0].prompt)
        resumed.__dict__.update(
            last.__dict__
            | {
                "prompt": members[0].prompt,
                "members": [],
                "others": tuple(members[1:]),
                "pending": members[0].pending,
                "lost": members[0].lost,
            }
        )
        for resource in self.resources:
            resource.give(last)
        self.waiting.appendleft(resumed)
        step.preempted.extend(member.seq for member in members)
        self.counters.preemptions_recompute += len(members)
        return True

    def _end_swaps(self, step: Step, failed: Collection[Hashable]) -> None:
        """The copies of a step are done, or have failed."""
        host = self._host
        if host is None:
            return
        for request in step.going_out:
            if request not in self._going_out:
                continue  # all of it has ended
            self._going_out.remove(request)
            if any(seq in failed for seq in request.members):
                for seq in request.members:
                    host.cancel_out(seq)
                    self._run(seq)
                self._rows.follow(self.running)
                continue
            for seq in request.members:
                host.end_out(seq, int(self._notes.pending[self.bm.row(seq)]))
            self._swapped.append(request)
        for request in step.coming_in:
            members = [seq for seq in request.members if seq in host]
            if not members:
                continue
            if any(seq in failed for seq in members):
                for seq in members:
                    position = self.running.index(seq)
                    del self.running[position]
                    self._idle.discard(seq)
                    host.cancel_in(seq)
                    self._rows.left(position, seq)
                self._swapped.appendleft(request)
                continue
            for seq in members:
                host.end_in(seq)
                self._idle.discard(seq)
            self._steps_to_limit = 1

    # ------------------------------------------------------------ results

    def update(
        self,
        step: Step,
        tokens: Any = None,
        *,
        finished: Iterable[Hashable] = (),
        rejected: Any = None,
        parents: Mapping[Hashable, Hashable] | None = None,
        swap_failed: Collection[Hashable] = (),
    ) -> list[Hashable]:
        """Report the results of a step. Steps are reported in their order, each once.

        Results of sequences that are gone, or have been preempted since, are ignored; so
        is a step that has been reported already.

        Parameters
        ----------
        step : Step
        tokens : array_like of int, optional
            The sampled tokens, parallel to ``step.sampled``; with drafts, for each
            decoded sequence its accepted drafts and one more. Without them, what is
            generated is not published.
        finished : iterable
            Sequences that have ended, for another reason than ``max_tokens``.
        rejected : array_like of int, optional
            Parallel to the step: how many of each sequence's drafts were rejected.
            Default none.
        parents : mapping, optional
            Of a beam search, for each beam the one it goes on from.
        swap_failed : collection
            Sequences of ``step.swapped_out`` or ``swapped_in`` whose copies failed.

        Returns
        -------
        list
            Sequences that have ended by this, in the order of the step. Their blocks
            are released.

        Raises
        ------
        ValueError, TypeError
            What is reported does not fit the step. Nothing has changed.
        """
        if self.token_budget is None:
            raise ValueError("step: without a token_budget there is nothing to update")
        if not isinstance(step, Step):
            raise TypeError(f"step must be a Step, got {step!r}")
        if step.is_updated:
            return []
        if not self._outstanding or self._outstanding[0] is not step:
            raise ValueError(
                f"step {step.number} is reported out of order, or is of another scheduler"
            )
        accepted = self._accepted(step, rejected)
        ids = self._token_ids(step, tokens, accepted)
        moves = self._moves(parents)

        self._outstanding.popleft()
        self._settle(step)
        if step.going_out or step.coming_in:
            self._end_swaps(step, swap_failed)
        if self.bm.prefix_caching:
            self._settle_prompts(step)
        self._settle_tokens(step, ids, accepted)
        if moves is not None:
            self.bm.reorder(*moves)
        if self.window is not None:
            self._slide(step)
        ended = [seq for seq in step.ending if self._is_current(seq, step)]
        if self.draft_tokens:
            ended = [seq for seq in ended if self._is_at_limit(seq)]
        for seq in finished:
            if seq not in ended and self._is_current(seq, step):
                ended.append(seq)
        for seq in ended:
            self.admission.ended(self._by_seq[seq], self._generated(seq))
            self._end(seq)
        self.counters.finished += len(ended)
        self._pass_over_empty_steps()
        return ended

    def _is_current(self, seq: Hashable, step: Step) -> bool:
        """Whether a result of ``step`` is still about this life of the sequence."""
        return self._entered.get(seq, NEVER) <= step.number

    def _is_at_limit(self, seq: Hashable) -> bool:
        final = self._by_seq[seq].final_tokens
        return final is not None and self.bm.length(seq) >= final

    def _generated(self, seq: Hashable) -> int:
        if seq not in self.bm or seq in self._prefilling:
            return 0
        # With engine steps the last token has been sampled, and is never written.
        unwritten = self.token_budget is not None
        return self.bm.length(seq) + unwritten - self._by_seq[seq].prompt_tokens

    def _accepted(self, step: Step, rejected: Any) -> NDArray[np.int64] | None:
        """Tokens that each decoded sequence has got; None if one each."""
        if step.counts is None:
            if rejected is not None and np.any(np.asarray(rejected)):
                raise ValueError(f"rejected is {rejected!r}, but the step has no drafts")
            return None
        counts = step.counts.astype(np.int64)
        if rejected is None:
            return counts
        numbers = _whole_numbers(rejected, "rejected")
        if numbers.shape != counts.shape:
            raise ValueError(
                f"rejected must have {len(counts)} entries, one a decoded sequence, "
                f"got shape {numbers.shape}"
            )
        wrong = np.flatnonzero((numbers < 0) | (numbers >= counts))
        if len(wrong):
            raise ValueError(
                f"rejected: entry {wrong[0]} must be between 0 and {counts[wrong[0]] - 1}, "
                f"got {numbers[wrong[0]]}"
            )
        accepted: NDArray[np.int64] = counts - numbers
        return accepted

    def _token_ids(
        self, step: Step, tokens: Any, accepted: NDArray[np.int64] | None
    ) -> NDArray[np.int32] | None:
        """The sampled tokens, checked."""
        if tokens is None:
            return None
        completed = len(step.sampled) - len(step) if "completed" in step.__dict__ else 0
        expected = completed + (len(step) if accepted is None else int(accepted.sum()))
        ids = _whole_numbers(tokens, "tokens")
        if ids.shape != (expected,):
            raise ValueError(
                f"tokens must have {expected} entries for step {step.number}, got shape {ids.shape}"
            )
        if not self.bm.prefix_caching:
            return None  # nothing is published
        narrow = ids.dtype == np.int32
        if expected and (ids.min() < 0 or (not narrow and ids.max() >= 2**31)):
            place = int(np.flatnonzero((ids < 0) | (ids >= 2**31))[0])
            raise ValueError(f"tokens: token {place} must be from 0 to 2**31 - 1, got {ids[place]}")
        return np.ascontiguousarray(ids, np.int32)

    def _moves(
        self, parents: Mapping[Hashable, Hashable] | None
    ) -> tuple[list[Hashable], list[Hashable]] | None:
        if not parents:
            return None
        if self.in_flight:
            raise ValueError("parents: beams cannot be moved while the next step is in flight")
        for seq, parent in parents.items():
            request = self._by_seq.get(seq)
            if request is None or self._by_seq.get(parent) is not request:
                raise ValueError(f"parents: {parent!r} is no running beam beside {seq!r}")
        return list(parents), list(parents.values())

    def _settle_prompts(self, step: Step) -> None:
        """Publish the blocks that the prefills of a step have filled."""
        for seq, start, count in step.prefills:
            if not self._is_current(seq, step):
                continue
            request = self._by_seq[seq]
            stop = start + count
            text, pending = request.prompt, UNKNOWN_TOKEN
            if isinstance(request, Resumed):
                pending = request.pending
                for other in request.others:
                    if other.seq == seq:
                        text, pending = other.prompt, other.pending
            known = self.bm.known(seq)
            if text is not None and known < len(text):
                # A beam that was recomputed: its own tokens follow those of the prompt.
                self.bm.commit(seq, text.tokens[known:], n_settled=min(stop, len(text)))
            elif known:
                self.bm.commit(seq, n_settled=min(stop, known))
            if pending >= 0 and self.bm.known(seq) == stop - 1 and seq not in self._prefilling:
                self.bm.commit(seq, [pending])

    def _settle_tokens(
        self, step: Step, ids: NDArray[np.int32] | None, accepted: NDArray[np.int64] | None
    ) -> None:
        """Cut off rejected drafts, publish what was written, and note what was sampled."""
        places: NDArray[np.intp] | None = None
        if step.departures != self._departures:
            current = [self._is_current(seq, step) for seq in step]
            if not all(current):
                places = np.flatnonzero(current)
        count = len(step) if places is None else len(places)
        self.counters.ignored_results += len(step) - count
        if step.counts is not None:
            assert accepted is not None
            self._settle_drafts(step, ids, accepted, places)
        else:
            self.counters.sampled_tokens += count
            if self.bm.prefix_caching and count:
                rows = step.rows if places is None else step.rows[places]
                sampled = None
                if ids is not None:
                    sampled = ids[: len(step)] if places is None else ids[places]
                self.bm.commit_pending(rows, self._notes.pending, sampled)
        if "completed" in step.__dict__:
            last = len(step) if accepted is None else int(accepted.sum())
            self._settle_completed(step, None if ids is None else ids[last:])

    def _settle_drafts(
        self,
        step: Step,
        ids: NDArray[np.int32] | None,
        accepted: NDArray[np.int64],
        places: NDArray[np.intp] | None,
    ) -> None:
        assert step.counts is not None
        chosen = np.arange(len(step)) if places is None else places
        if not len(chosen):
            return
        rows, kept = step.rows[chosen], accepted[chosen]
        rejected = step.counts[chosen] - kept
        self.counters.sampled_tokens += int(kept.sum())
        self.counters.draft_tokens += int(step.counts[chosen].sum()) - len(chosen)
        self.counters.rejected_draft_tokens += int(rejected.sum())
        short = np.flatnonzero(rejected)
        if len(short):
            lengths = step.lengths[chosen][short] - rejected[short]
            self.bm.truncate_batch(rows[short], lengths.astype(np.int32))
            step.lengths[chosen[short]] = lengths
        if not self.bm.prefix_caching:
            return
        ends = np.cumsum(accepted)
        for place, row in zip(chosen.tolist(), rows.tolist(), strict=True):
            pending = int(self._notes.pending[row])
            if pending < 0:
                continue
            self._notes.pending[row] = UNKNOWN_TOKEN
            if ids is None:
                self.bm.commit(step[place], [pending])
                continue
            output = ids[ends[place] - accepted[place] : ends[place]].tolist()
            self.bm.commit(step[place], [pending, *output[:-1]])
            self._notes.pending[row] = output[-1]

    def _settle_completed(self, step: Step, ids: NDArray[np.int32] | None) -> None:
        """Note the first token of every sequence whose prompt was completed."""
        for place, seq in enumerate(step.sampled[len(step) :]):
            if not self._is_current(seq, step):
                self.counters.ignored_results += 1
                continue
            self.counters.sampled_tokens += 1
            if self.bm.prefix_caching and ids is not None and seq in self.bm:
                written = self.bm.length(seq) - self._planned_since(seq)
                if self.bm.known(seq) == written:
                    self._notes.pending[self.bm.row(seq)] = ids[place]

    def _planned_since(self, seq: Hashable) -> int:
        """Slots that steps in flight have given to a sequence. They have no drafts."""
        return sum(seq in step for step in self._outstanding)

    def _slide(self, step: Step) -> None:
        """Give back the blocks that no later token can see. Only what is settled counts."""
        assert self.window is not None
        rows, lengths = [], []
        for place, seq in enumerate(step):
            if self._is_current(seq, step) and seq in self.bm:
                rows.append(step.rows[place])
                lengths.append(step.lengths[place])
        for seq, start, count in step.prefills:
            if self._is_current(seq, step) and seq in self.bm:
                rows.append(self.bm.row(seq))
                lengths.append(start + count)
        if rows:
            self.bm.release_outside_window(
                np.array(rows, np.int32),
                np.array(lengths, np.int32),
                self.window,
                self.sink_tokens,
            )

    # ------------------------------------------------------------ coming and going

    def _note_limits(self, step: Step) -> None:
        """Note who reaches its limit in this step. Looks only when somebody may have."""
        self._steps_to_limit -= 1 + self.draft_tokens
        if self._steps_to_limit > 0 or not step:
            return
        left = self._notes.limits[step.rows] - step.lengths
        self._ends(step, [step[place] for place in np.flatnonzero(left <= 0)])
        others = [
            final - self.bm.length(seq)
            for seq in self.running
            if seq not in self._prefilling
            and (final := self._by_seq[seq].final_tokens) is not None
            and final > self.bm.length(seq)
        ]
        self._steps_to_limit = min(others, default=UNLIMITED)

    def _ends(self, step: Step, seqs: list[Hashable]) -> None:
        """These sample their last token in ``step``."""
        step.ending = [*step.ending, *seqs]
        if self.in_flight:
            self._draining.update(seqs)
            self._idle.update(seqs)

    def _view(self, seqs: list[Hashable] | None = None) -> RunningView:
        if seqs is None:
            return self._view_of(self.running, self._rows.of(self.running))
        return self._view_of(seqs, self.bm.rows(seqs))

    def _view_of(self, seqs: list[Hashable], rows: NDArray[np.int32]) -> RunningView:
        return RunningView(
            self.bm,
            self._by_seq,
            seqs,
            rows,
            self._notes,
            step=self._number,
            window=self.window,
            sinks=self.sink_tokens,
            ahead=(self.in_flight + 1) * (1 + self.draft_tokens),
            forming=[self._by_seq[seq] for seq in self._prefilling if self._by_seq[seq].siblings],
        )

    def _run(self, seq: Hashable) -> int:
        """Put a sequence among the running ones, in order of admission; returns where."""
        admitted = self._by_seq[seq].admitted
        position = len(self.running)
        while position and self._by_seq[self.running[position - 1]].admitted > admitted:
            position -= 1
        self.running.insert(position, seq)
        return position

    def _enter(self, seq: Hashable, request: Request) -> None:
        """Let a sequence run that has just got its row."""
        self._by_seq[seq] = request
        self._entered[seq] = max(self._number, 1)
        request.members.append(seq)
        self.running.append(seq)
        self._note(seq, request, UNKNOWN_TOKEN)
        self._rows.entered(len(self.running) - 1, seq)

    def _note(self, seq: Hashable, request: Request, pending: int) -> None:
        limit = request.final_tokens
        self._notes.enter(
            self.bm.row(seq),
            UNLIMITED if limit is None else limit,
            request.prompt_tokens,
            pending,
        )

    def _end(self, seq: Hashable) -> bool:
        """End a sequence, wherever it is."""
        if seq in self._by_seq or seq in self.running:
            if self._host is not None and seq in self._host:
                self._end_away(seq)
            else:
                self._leave(seq)
            return True
        for place, item in enumerate(self.waiting):
            request = _request(item)
            if request.seq == seq:
                del self.waiting[place]
                if isinstance(request, Resumed) and request.others:
                    self.waiting.insert(place, _without_first(request))
                return True
            if seq in request.siblings:
                request.siblings = tuple(one for one in request.siblings if one != seq)
                return True
            if isinstance(request, Resumed) and any(one.seq == seq for one in request.others):
                request.others = tuple(one for one in request.others if one.seq != seq)
                return True
        for unborn in self._prefilling:
            request = self._by_seq[unborn]
            if seq in request.siblings:
                request.siblings = tuple(one for one in request.siblings if one != seq)
                return True
        return False

    def _end_away(self, seq: Hashable) -> None:
        """End a sequence that has blocks in host memory."""
        assert self._host is not None
        request = self._by_seq[seq]
        self._host.drop(seq)
        if seq in self.running:
            self._leave(seq)
            return
        if seq in self.bm:
            self.bm.free_seq(seq)
        self._forget(seq)
        request.members.remove(seq)
        if not request.members:
            for requests in (self._going_out, self._swapped):
                if request in requests:
                    requests.remove(request)
            for resource in self.resources:
                resource.give(request)

    def _leave(self, seq: Hashable) -> None:
        """Take the blocks of a running sequence back: the one way out."""
        position = self.running.index(seq)
        request = self._by_seq.get(seq)
        generated = 0
        if request is not None and seq not in self._prefilling:
            generated = self.bm.length(seq) - request.n_tokens
        self.bm.free_seq(seq)
        del self.running[position]
        self._rows.left(position, seq)
        self._forget(seq)
        if request is None:
            return
        request.members.remove(seq)
        if generated > 0:
            self.order.charge(request, generated)
        if not request.members:
            for resource in self.resources:
                resource.give(request)

    def _forget(self, seq: Hashable) -> None:
        """Drop all that is noted of a sequence."""
        self._by_seq.pop(seq, None)
        self._entered.pop(seq, None)
        self._prefilling.pop(seq, None)
        self._idle.discard(seq)
        self._draining.discard(seq)
        self._departures += 1


def _request(item: tuple[Hashable, int]) -> Request:
    assert isinstance(item, Request)
    return item


def _ids(request: Request) -> list[Hashable]:
    """Every id that a request is going to need."""
    ids = [request.seq, *request.siblings]
    if isinstance(request, Resumed):
        ids += [other.seq for other in request.others]
    return ids


def _alone(request: Request, seq: Hashable) -> Request:
    request.members.append(seq)
    return request


def _without_first(request: Resumed) -> Resumed:
    """A preempted group whose first sequence has ended."""
    first, *others = request.others
    rest = Resumed(first.seq, first.n_tokens, first.prompt)
    rest.__dict__.update(
        request.__dict__
        | {
            "prompt": first.prompt,
            "others": tuple(others),
            "pending": first.pending,
            "lost": first.lost,
        }
    )
    return rest


def _whole_numbers(values: Any, name: str) -> NDArray[np.integer[Any]]:
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(array.shape if array.ndim == 1 else 0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array


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
