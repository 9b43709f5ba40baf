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

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from kvcore.admission import Watermark
from kvcore.arguments import at_least, number_of, sequence_ids
from kvcore.block_manager import BlockManager
from kvcore.chunking import share_budget
from kvcore.errors import RequestRefused
from kvcore.gate import MAX_TOKENS, Gate
from kvcore.host_tier import HostTier
from kvcore.order import FCFS
from kvcore.preemption import Preemption
from kvcore.request import Reason, Request, Resumed, Verdict
from kvcore.results import Results
from kvcore.roster import Roster
from kvcore.running_rows import UNLIMITED
from kvcore.running_view import RunningView
from kvcore.scheduler_options import SchedulerOptions
from kvcore.step import SchedulerCounters, Step
from kvcore.swapping import Swapping
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
    """Prompts that enter in a step, by the hash of their first block not cached.

    The hash of the first block of each is there too, perhaps with none.
    """

__all__ = ["Reason", "Request", "Resumed", "Scheduler", "Step", "Verdict"]

BLOCKED = {
    Reason.WATERMARK: "watermark",
    Reason.RESERVE: "watermark",
    Reason.BLOCKS: "blocks",
    Reason.MAX_RUNNING: "max_running",
    Reason.PARTIAL_PREFILLS: "budget",
    Reason.RESOURCE: "resource",
}

INT64 = np.dtype(np.int64)  # looking it up by its type takes as long as making an array

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
        (E) Blocks in host memory, for preempted sequences; of the same size.
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
        self.watermark_blocks = at_least(watermark_blocks, 0, "watermark_blocks")
        if self.watermark_blocks >= bm.num_blocks:
            raise ValueError(
                f"watermark_blocks is {self.watermark_blocks}, which no request can leave "
                f"free in a pool of {bm.num_blocks} blocks"
            )
        options = SchedulerOptions.checked(
            max_running=max_running,
            wait_for_prefix=wait_for_prefix,
            token_budget=token_budget,
            max_partial_prefills=max_partial_prefills,
            draft_tokens=draft_tokens,
            window=window,
            sink_tokens=sink_tokens,
            in_flight=in_flight,
        )
        if host is not None:
            self._check_host(host, options)
        if swap is not None and host is None:
            raise ValueError(f"swap is {swap!r}, but there is no host")
        tier = None if host is None else HostTier(bm, host)
        self.options = options
        self.max_running = options.max_running
        self.order = FCFS() if order is None else order
        self.victim = Newest() if victim is None else victim
        self.admission = Watermark(self.watermark_blocks) if admission is None else admission
        self.resources = tuple(resources)
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        self._stalled: list[Hashable] = []
        self._roster = Roster(bm, options, self.order, self.resources)
        self._gate = Gate(bm, self._roster, options, self.admission, self.resources)
        self._swapping = Swapping(
            bm,
            tier,
            self._roster,
            self.waiting,
            options,
            swap,
            self.admission,
            self.resources,
            self.counters,
        )
        self._preemption = Preemption(
            bm,
            self._roster,
            self.waiting,
            options,
            self._gate,
            self._swapping,
            self.order,
            self.victim,
            self.admission,
            self.counters,
        )
        self._results = Results(bm, self._roster, options, self.counters)

    def _check_host(self, host: BlockManager, options: SchedulerOptions) -> None:
        if not isinstance(host, BlockManager):
            raise TypeError(f"host must be a BlockManager, got {host!r}")
        if options.token_budget is None:
            raise ValueError(f"host needs a token_budget, got {host!r} without")
        if host.pool is self.bm.pool:
            raise ValueError(f"host is {host!r}, over the very pool that sequences are to leave")
        if host.block_size != self.bm.block_size:
            raise ValueError(
                f"host has blocks of {host.block_size} tokens, but those to be moved have "
                f"{self.bm.block_size}"
            )

    @property
    def running(self) -> list[Hashable]:
        """Running sequences, in order of admission."""
        return self._roster.running

    @property
    def swapped(self) -> list[Hashable]:
        """Sequences in host memory, in the order in which they come back."""
        return [seq for request in self._roster.swapped for seq in request.members]

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
            at_least(request.n_tokens, 1, "n_tokens")
            request.can_run = False  # whatever another scheduler has found
        else:
            known, prompt = 0, None
            more = tokens is not None or namespace is not None or media or retention
            if more and self.bm.prefix_caching:
                given = () if tokens is None else tokens
                prompt = self.bm.prompt(given, namespace=namespace, media=media)
            if tokens is not None:
                known = number_of(tokens) if prompt is None else len(prompt)
                n_tokens = known if n_tokens is None else n_tokens
            request = Request(seq, at_least(n_tokens, known or 1, "n_tokens"), prompt)
            if prompt is not None and retention:
                # Else a step would meet what is wrong with it.
                self.bm.plan_allocate(request.n_tokens, tokens=prompt, retention=retention)
                request.retention = tuple(retention)
            if max_tokens is not None:
                request.max_tokens = at_least(max_tokens, 0, "max_tokens")
            request.priority = priority
            request.tenant = tenant
            request.siblings = tuple(siblings)
        self._check_request(request)
        verdict = self._gate.never(request)
        if verdict is not None:
            if verdict.reason is Reason.BAD_REQUEST:
                self.admission.reserve(
                    request, RunningView(self._roster, [])
                )  # raises, saying what
            raise RequestRefused(
                f"n_tokens is {request.n_tokens}: {verdict.reason.value}; {request.seq!r} needs "
                f"{verdict.needed} {UNITS.get(verdict.reason, 'blocks')} and can have "
                f"{verdict.available}"
            )
        self.waiting.append(request)
        self.counters.requests_added += 1

    def _check_request(self, request: Request) -> None:
        if self.options.token_budget is None:
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
        if self._roster.is_live(request.seq):
            raise ValueError(f"seq {request.seq!r} is a live sequence already")
        for place, sibling in enumerate(request.siblings):
            if sibling == request.seq or sibling in request.siblings[:place]:
                raise ValueError(f"siblings: {sibling!r} comes twice")
            if self._roster.is_live(sibling):
                raise ValueError(f"siblings: {sibling!r} is a live sequence already")

    def fork(
        self, parent: Hashable, child: Hashable, n_tokens: SupportsIndex | None = None
    ) -> None:
        """Run ``child`` beside ``parent``, sharing its first ``n_tokens`` (default all).

        The child is the newest running sequence, and yields by itself. Textbook steps
        only: with engine steps give a request ``siblings``. Raises what
        ``BlockManager.fork`` raises.
        """
        if self.options.token_budget is not None:
            raise ValueError(f"child {child!r}: with a token_budget give the request siblings")
        self.bm.fork(parent, child, n_tokens)
        request = Request(child, self.bm.length(child))
        request.arrival = self.waiting.arrivals
        self.waiting.arrivals += 1
        self._roster.enter(child, request)

    def finish(self, seq: Hashable) -> bool:
        """End a sequence, wherever it is, and release its blocks. O(running + waiting).

        At any moment: while it waits, runs, is in host memory, or a step is in flight
        that computes it. Until a group has come apart, its first sequence takes the
        others along. Returns False when no such sequence is here, as for a result that
        comes late.
        """
        self._roster.follow()
        if seq in self.running:
            self.admission.ended(self._roster.by_seq[seq], self._results.generated(seq))
        ended = self._end(seq)
        self.counters.finished += ended
        return ended

    def abort(self, seq: Hashable) -> bool:
        """End a request whose result nobody wants any more: the same exit as ``finish``."""
        self._roster.follow()
        ended = self._end(seq)
        self.counters.aborted += ended
        return ended

    def why(self, seq: Hashable) -> Verdict:
        """Why a request waits, or a running one stalls. Else ``KeyError``.

        What it says of the queue is what the next step would do now. O(waiting).
        """
        self._roster.follow()
        for place, request in enumerate(self._roster.swapped):
            if seq in request.members:
                assert self._swapping.host is not None
                needed = sum(
                    self._swapping.host.blocks_to_return(member) for member in request.members
                )
                return Verdict(Reason.SWAPPED, needed, self.bm.num_available, place)
        if self._swapping.host is not None and seq in self._swapping.host:
            return Verdict(Reason.SWAPPING, 0, self.bm.num_available)
        for place, request in enumerate(self.waiting):
            if seq in request.ids:
                verdict = self._gate.never(request) or self._gate.not_now(
                    request, budget=self._budget_for_new()
                )
                first = self.order.first(self.waiting, self._roster.step + 1)
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

    def _budget_for_new(self) -> int:
        """Tokens that the next step has for requests that enter in it."""
        if self.options.token_budget is None:
            return UNLIMITED
        decodes = len(self.running) - len(self._roster.idle)
        under_way = sum(self._remaining(seq) for seq in self._roster.prefilling)
        return self.options.token_budget - decodes * (1 + self.options.draft_tokens) - under_way

    def _ahead(self, place: int) -> int:
        """Count the requests that the order takes before the one at ``place``. O(waiting^2)."""
        rest = list(self.waiting)
        asked = rest[place]
        ahead = 0
        while True:
            first = self.order.first(rest, self._roster.step + 1)
            if rest[first] is asked:
                return ahead
            del rest[first]
            ahead += 1

    def step(self) -> Step:
        """Plan the next step.

        Raises
        ------
        KeyError
            A sequence in ``running`` is no longer live. Nothing has changed.
        ValueError
            More results are outstanding than may be. Nothing has changed. A step in which
            nothing runs needs no report, unless one before it is outstanding: then it counts,
            and is reported in its order.
        """
        roster, options = self._roster, self.options
        if len(roster.outstanding) > options.in_flight:
            raise ValueError(
                f"step {roster.outstanding[0].number} has not been updated, and at most "
                f"{options.in_flight} steps may be in flight when the next is planned"
            )
        roster.follow()
        step = Step()
        step.bm = self.bm
        step.number = roster.step = self.waiting.step = roster.step + 1
        if options.token_budget is None:
            if self.waiting:
                self._preemption.push_out(step)
                self._admit(step, UNLIMITED)
                self._prefill(step, UNLIMITED)
            self._decode(step)
        else:
            if options.in_flight:
                step.fence = self.bm.fence()
                if self._swapping.host is not None:
                    step.host_fence = self._swapping.host.host.fence()
            self._engine_step(step, options.token_budget)
        return step

    def _engine_step(self, step: Step, budget: int) -> None:
        roster, pool = self._roster, self.bm.pool
        if self.waiting:
            self._preemption.push_out(step)
        self._decode(step)
        budget -= len(step.slots)
        if roster.swapped:
            self._swapping.bring_in(step)
        if self.waiting:
            self._admit(step, budget)
        if roster.prefilling:
            self._prefill(step, budget)
        roster.steps_to_limit -= 1 + self.options.draft_tokens
        if roster.steps_to_limit <= 0 and step:
            self._note_limits(step)
        step.levels = (
            len(roster.running),
            len(self.waiting),
            len(roster.swapped),
            pool.num_free,
            pool.num_evictable,
        )
        step.departures = roster.departures
        roster.outstanding.append(step)
        if not step:
            self._pass_over_empty_steps()

    def _pass_over_empty_steps(self) -> None:
        """Wait for no results of a step in which nothing runs."""
        while self._roster.outstanding and self._roster.outstanding[0].is_empty:
            self._settle(self._roster.outstanding.popleft())

    def _settle(self, step: Step) -> None:
        step.is_updated = True
        if step.fence:
            self.bm.settle(step.fence)
        if step.host_fence:
            assert self._swapping.host is not None
            self._swapping.host.host.settle(step.host_fence)

    def _admit(self, step: Step, budget: int) -> None:
        """Let requests enter while they fit, and while ``budget`` has tokens for them."""
        if step.is_short or self._roster.swapped or self._roster.going_out:
            return
        budget -= sum(self._remaining(seq) for seq in self._roster.prefilling)
        entered: _Entered = {}
        while self.waiting:
            place = self._next(step)
            request = self.waiting[place]
            if request.queued == step.number and (self.running or step.preempted):
                return  # it has only just made way for somebody
            verdict = self._gate.never(request)
            if verdict is not None:
                self._reject(step, place, verdict)
                continue
            may_wait = self._begins_like(request, entered)
            verdict = self._gate.not_now(request, exact=may_wait, budget=budget)
            if verdict.reason is Reason.LIVE_ID and not self._is_ours(request):
                # Its owner did not come through here: nothing says when it will end.
                self._reject(step, place, self._gate.not_now(request))
                continue
            if verdict.reason is not Reason.FITS:
                name = BLOCKED.get(verdict.reason)
                if name is not None:
                    name = f"admission_blocked_{name}"
                    setattr(self.counters, name, getattr(self.counters, name) + 1)
                return
            if may_wait and self._waits_for_prefix(request, verdict, entered):
                return
            for resource in self.resources:
                resource.take(request)
            cached = self._allocate(request)
            del self.waiting[place]
            request.admitted = step.number
            if self.options.wait_for_prefix and self.waiting:
                self._computes(request, cached // self.bm.block_size, entered)
            self.order.charge(request, request.n_tokens - cached)
            budget -= request.n_tokens - cached

    def _next(self, step: Step) -> int:
        """Return the place of the request to try: first whom others have made way for."""
        if step.makes_way_for is not None:
            for place, request in enumerate(self.waiting):
                if request is step.makes_way_for:
                    return place
        return self.order.first(self.waiting, step.number)

    def _reject(self, step: Step, place: int, verdict: Verdict) -> None:
        request = self.waiting[place]
        del self.waiting[place]
        others = [other.seq for other in getattr(request, "others", ())]
        for seq in (request.seq, *others):
            step.rejected[seq] = verdict
        self.counters.rejected += 1

    def _is_ours(self, request: Request) -> bool:
        return all(seq in self._roster.by_seq or seq not in self.bm for seq in request.ids)

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
        self._roster.enter(seq, request)
        self._roster.start(seq, cached)
        if isinstance(request, Resumed):
            for other in request.others:
                shared = request.shared_tokens(other, self.bm.block_size)
                self.bm.fork(seq, other.seq, shared)
                self.bm.append_slots(other.seq, other.n_tokens - shared)
                self._roster.enter(other.seq, request)
                self._roster.start(other.seq, shared)
                self._roster.leaning[other.seq] = seq
        return cached

    def _begins_like(self, request: Request, entered: _Entered) -> bool:
        """Whether the next request may share a block with somebody who enters in this step."""
        prompt = request.prompt
        return prompt is not None and prompt.num_full_blocks > 0 and prompt.chain_hash(0) in entered

    def _waits_for_prefix(self, request: Request, verdict: Verdict, entered: _Entered) -> bool:
        """Whether such a request, which fits, lets this step pass for a prefix.

        Two prompts that agree beyond what is cached miss at the same block. So it is
        compared with those that miss at a block like its own, not with everybody.
        """
        if request.waited:
            return False
        prompt = request.prompt
        # Of the first block that is not cached.
        column = request.blocks_to_enter(self.bm.block_size) - verdict.needed
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
            entered.setdefault(prompt.chain_hash(0), [])
            entered.setdefault(prompt.chain_hash(column), []).append(prompt)

    def _remaining(self, seq: Hashable) -> int:
        return self.bm.length(seq) - self._roster.prefilling[seq]

    def _prefill(self, step: Step, budget: int) -> None:
        """Share what is left of the budget out among the prompts under way."""
        size = self.bm.block_size
        prefilling, length = self._roster.prefilling, self.bm.length
        ready = list(prefilling)
        if self._roster.leaning:
            ready = [seq for seq in ready if self._can_compute(seq)]
        remaining = [length(seq) - prefilling[seq] for seq in ready]
        shares = share_budget(budget, remaining)
        self._hold_groups_together(ready, remaining, shares)
        for seq, left, count in zip(ready, remaining, shares, strict=True):
            start = prefilling[seq]
            stop = start + count
            if count < left and stop // size * size > start:
                stop = stop // size * size  # so that it ends with a block to publish
            if stop == start and left:
                continue
            if stop > start:
                step.prefills.append((seq, start, stop - start))
                self._count_prefill(seq, start, stop)
            prefilling[seq] = stop
            if stop == start + left:
                self._complete(step, seq)

    def _hold_groups_together(
        self, ready: list[Hashable], remaining: list[int], shares: list[int]
    ) -> None:
        """Leave the last token of whoever would go ahead of others of its group.

        Those that are computed again complete their prompts in one step: beams of different
        lengths cannot be compared. The tokens left, one each, fit into one step.
        """
        completed = None
        for place, seq in enumerate(ready):
            members = self._roster.by_seq[seq].members
            if len(members) == 1 or shares[place] < remaining[place]:
                continue
            if completed is None:
                completed = {
                    one
                    for one, left, count in zip(ready, remaining, shares, strict=True)
                    if left == count
                }
            if any(one in self._roster.prefilling and one not in completed for one in members):
                shares[place] -= 1

    def _can_compute(self, seq: Hashable) -> bool:
        """Whether all that the sequence reads is computed before this step.

        A group that is recomputed shares the blocks which its first sequence computes.
        """
        prefilling = self._roster.prefilling
        computed = prefilling[seq]
        return prefilling.get(self._roster.leaning.get(seq), computed) >= computed

    def _count_prefill(self, seq: Hashable, start: int, stop: int) -> None:
        self.counters.prefill_tokens += stop - start
        request = self._roster.by_seq[seq]
        if isinstance(request, Resumed):
            lost = request.member(seq).lost
            self.counters.recomputed_tokens += max(min(stop, lost) - start, 0)

    def _complete(self, step: Step, seq: Hashable) -> None:
        """Note that this step computes the last of a prompt: then the sequence decodes."""
        roster = self._roster
        del roster.prefilling[seq]
        roster.idle.discard(seq)
        request = roster.by_seq[seq]
        if self.options.token_budget is None:
            return
        started = [seq]
        for child in request.siblings:
            if roster.is_live(child):
                step.rejected[child] = Verdict(Reason.LIVE_ID, 0, 0)
                continue
            self.bm.fork(seq, child)
            roster.enter(child, request)
            step.forks.append((seq, child))
            started.append(child)
        request.siblings = ()
        if request.max_tokens != 0:
            step.completed.append(seq)
        final = request.final_tokens
        if final is None:
            return
        left = final - self.bm.length(seq)
        if left <= 0:
            self._ends(step, started)
        roster.steps_to_limit = min(roster.steps_to_limit, max(left, 1))

    def _decode(self, step: Step) -> None:
        """Give every running sequence the slot of its next token, and of its drafts."""
        bm, roster = self.bm, self._roster
        seqs, idle = roster.running, roster.idle
        rows = roster.rows.of(seqs)
        if idle and idle.issuperset(seqs[-len(idle) :]):  # as a rule those that came last
            seqs, rows = seqs[: -len(idle)], rows[: -len(idle)]
        elif idle:
            places = [place for place, seq in enumerate(seqs) if seq not in idle]
            seqs, rows = [seqs[place] for place in places], rows[np.array(places, np.intp)]
        counts = self._counts(rows) if self.options.draft_tokens else None
        blocks_of_each = 1
        if counts is not None:
            blocks_of_each -= -self.options.draft_tokens // bm.block_size
        if bm.num_available < blocks_of_each * len(seqs):
            seqs, rows, counts = self._preemption.make_room(step, seqs, rows, counts)
        if counts is None:
            slots = np.empty(len(seqs), INT64)
            served, copies = bm.append_batch(rows, slots)
        else:
            slots = np.empty(int(counts.sum()), INT64)
            served, copies = bm.append_batch(rows, slots, counts)
        if served < len(seqs):
            seqs, rows, counts, slots, copies = self._decode_around(
                step, seqs, rows, counts, slots, served, copies
            )
        self._stalled = step.stalled if "stalled" in step.__dict__ else []
        step.extend(seqs)
        step.rows = rows
        step.slots = slots
        step.lengths = bm.lengths_of(rows)
        if counts is not None:
            step.counts = counts
        if copies is not None:
            step.copies = copies

    def _counts(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens for each row: the next one and its drafts, but never past the limit."""
        counts: NDArray[np.int32] = self._roster.notes.limits[rows]
        counts -= self.bm.lengths_of(rows)
        np.minimum(counts, 1 + self.options.draft_tokens, out=counts)
        np.maximum(counts, 1, out=counts)
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
            Of a beam search, for each beam the one it goes on from. Both decode, or have
            just completed their prompt; a beam that is gone is left out.
        swap_failed : collection
            Sequences of ``step.swapped_out`` or ``swapped_in`` whose copies failed.

        Returns
        -------
        list
            Sequences that have ended by this, in the order of ``step.sampled``; then
            those of ``finished`` that are not in it. Their blocks are released.

        Raises
        ------
        ValueError, TypeError
            What is reported does not fit the step. Nothing has changed.
        """
        if self.options.token_budget is None:
            raise ValueError("step: without a token_budget there is nothing to update")
        if not isinstance(step, Step):
            raise TypeError(f"step must be a Step, got {step!r}")
        if step.is_updated:
            return []
        roster, results = self._roster, self._results
        if not roster.outstanding or roster.outstanding[0] is not step:
            raise ValueError(
                f"step {step.number} is reported out of order, or is of another scheduler"
            )
        accepted = None
        if step.counts is not None or rejected is not None:
            accepted = results.accepted(step, rejected)
        ids = None if tokens is None else results.token_ids(step, tokens, accepted)
        moves = None if parents is None else results.moves(step, parents)
        ended_early = sequence_ids(finished, "finished")
        failed = sequence_ids(swap_failed, "swap_failed")

        roster.outstanding.popleft()
        self._settle(step)
        if step.going_out or step.coming_in:
            self._swapping.report(step, failed)
        if self.bm.prefix_caching and "prefills" in step.__dict__:
            results.settle_prompts(step)
        results.settle_tokens(step, ids, accepted)
        if moves is not None:
            results.move(step, *moves)
        if self.options.window is not None:
            results.slide(step)
        ended = self._ended(step, ended_early) if step.ending or ended_early else []
        for seq in ended:
            self.admission.ended(roster.by_seq[seq], results.generated(seq))
            self._end(seq)
        self.counters.finished += len(ended)
        if roster.outstanding:
            self._pass_over_empty_steps()
        return ended

    def _ended(self, step: Step, finished: Iterable[Hashable]) -> list[Hashable]:
        """Sequences that end with the results of a step, in its order."""
        ended = [seq for seq in step.ending if self._roster.is_current(seq, step)]
        if not self.options.in_flight:  # drafts may have been rejected, beams may have moved
            ended = [seq for seq in ended if self._results.is_at_limit(seq)]
        for seq in finished:
            if seq not in ended and self._roster.is_current(seq, step):
                ended.append(seq)
        if len(ended) > 1:
            places = {seq: place for place, seq in enumerate(step.sampled)}
            ended.sort(key=lambda seq: places.get(seq, len(places)))
        return ended

    def _note_limits(self, step: Step) -> None:
        """Note who reaches its limit in this step. Needs: somebody may."""
        left = self._roster.notes.limits[step.rows] - step.lengths
        self._ends(step, [step[place] for place in np.flatnonzero(left <= 0)])
        rows = self._roster.rows.of(self._roster.running)
        left = self._roster.notes.limits[rows] - self.bm.lengths_of(rows)
        soonest = int(left.min(initial=UNLIMITED, where=left > 0))
        # Of those that end, some may have drafts rejected: then look again.
        may_go_on = step.ending and self.options.draft_tokens
        self._roster.steps_to_limit = 1 if may_go_on else soonest

    def _ends(self, step: Step, seqs: list[Hashable]) -> None:
        """Note that these sample their last token in ``step``."""
        step.ending = [*step.ending, *seqs]
        if self.options.in_flight:
            self._roster.draining.update(seqs)
            self._roster.idle.update(seqs)

    def _end(self, seq: Hashable) -> bool:
        """End a sequence, wherever it is."""
        if self._swapping.host is not None and seq in self._swapping.host:
            self._end_away(seq)
            return True
        if seq in self.running:
            self._roster.leave(seq)
            return True
        for place, request in enumerate(self.waiting):
            if request.seq == seq:
                del self.waiting[place]
                if isinstance(request, Resumed) and request.others:
                    self.waiting.insert(place, request.without_first())
                return True
            if seq in request.siblings:
                request.siblings = tuple(one for one in request.siblings if one != seq)
                return True
            if isinstance(request, Resumed) and any(one.seq == seq for one in request.others):
                request.others = tuple(one for one in request.others if one.seq != seq)
                return True
        for unborn in self._roster.prefilling:
            request = self._roster.by_seq[unborn]
            if seq in request.siblings:
                request.siblings = tuple(one for one in request.siblings if one != seq)
                return True
        return False

    def _end_away(self, seq: Hashable) -> None:
        """End a sequence that has blocks in host memory."""
        assert self._swapping.host is not None
        request = self._roster.by_seq[seq]
        self._swapping.host.drop(seq)
        if seq in self.running:
            self._roster.leave(seq)
            return
        if request in self._roster.going_out:
            self.bm.free_seq(seq)
        self._roster.forget(seq)
        request.members.remove(seq)
        if not request.members:
            for requests in (self._roster.going_out, self._roster.swapped):
                if request in requests:
                    requests.remove(request)
            for resource in self.resources:
                resource.give(request)
