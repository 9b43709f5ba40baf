"""Replay a trace through the real block manager and scheduler, step by step.

Nothing is modelled but time: every prompt is allocated, every generated token is
appended, parallel samples are forked, and what does not fit is preempted, by the code
that an engine would call. A ``StepTime`` says how long each step took, and so which
requests have arrived before the next one.

Prompts of a trace with ``hash_ids`` are given as tokens that stand in for theirs, are
published when they have been computed, and share what they have in common. What was
generated is not known and never shared.

The loop is cheap on purpose, so that the time inside the manager can be told from the
time around it: a step in which nobody comes or goes touches no sequence. Those that
end are found in a calendar, since a running sequence gets one token in every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median
from time import perf_counter, thread_time, thread_time_ns
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvcore.block_manager import BlockManager
from kvcore.counters import Counter
from kvcore.errors import InvariantError, RequestRefused
from kvcore.eviction import LRU
from kvcore.hash_id_tokens import tokens_of_hash_ids
from kvcore.pool import EvictionPolicy
from kvcore.scheduler import Reason, Scheduler, Step, Verdict
from kvcore.step_time import LinearStepTime, StepTime
from kvcore.trace import Trace

__all__ = ["PrefixHits", "ReplayResult", "Series", "replay"]

# A sample of the pool costs O(num_blocks): the series halves its resolution when full.
MOST_POINTS = 2_000
STEPS_BETWEEN_PROGRESS = 512
# Requests whose tokens are made in one go: few calls of numpy, and little that lies around.
DRAWN_AT_ONCE = 32
# Requests in the scheduler's queue that have brought their tokens. More than enter in a
# step; the tokens of all that wait could be more than fits into memory.
MOST_QUEUED = 512

BLOCKS_TAKEN, COW_COPIES = int(Counter.BLOCKS_TAKEN), int(Counter.COW_COPIES)
CACHED_TOKENS = int(Counter.CACHED_TOKENS)
RESUMED_CACHED_TOKENS = int(Counter.RESUMED_CACHED_TOKENS)

Progress = Callable[[int, int], None]
"""``(requests done, requests in all)``"""


@dataclass(frozen=True, eq=False)
class Series:
    """The pool over simulated time: at most 2,000 points, one array a quantity.

    A point holds from its ``seconds`` until the next one.
    """

    seconds: NDArray[np.float64]
    used: NDArray[np.int64]
    """Blocks that somebody holds."""
    shared: NDArray[np.int64]
    """Blocks held more than once."""
    tokens: NDArray[np.int64]
    """Tokens over all sequences."""
    logical_blocks: NDArray[np.int64]
    """Table cells over all sequences."""
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    preemptions: NDArray[np.int64]
    """Preemptions so far."""


@dataclass(frozen=True)
class PrefixHits:
    """How much of the prompts was found cached.

    A request counts when it is admitted for the first time. What a preempted sequence
    finds of its own when it comes back is kept apart, and so are prompts that were
    refused. All tokens meant here are known ones: those that the trace has an id for.
    """

    eviction: str
    """Name of the policy."""
    prompts: int
    """Requests admitted whose tokens are known."""
    prompt_tokens: int
    """Known tokens of those prompts."""
    cached_tokens: int
    """Of them, tokens in leading blocks that were found."""
    prompt_blocks: int
    """Blocks that the known tokens of those prompts fill."""
    cached_blocks: int
    """Of them, leading blocks that were found."""
    resumed_tokens: int
    """Known tokens of preempted sequences when they came back."""
    resumed_cached_tokens: int
    """Of them, tokens in leading blocks that were found."""
    evictions: int
    """Cached blocks whose room was needed."""

    @property
    def token_rate(self) -> float:
        """Share of the known prompt tokens that was found."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def block_rate(self) -> float:
        """Share of the full prompt blocks that was found."""
        return self.cached_blocks / self.prompt_blocks if self.prompt_blocks else 0.0


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What a replay did to the pool, and what it would have meant for the requests.

    Everything is the same in every run but the four measured times. Those are of this
    process and machine, all others are of the simulated engine.
    """

    num_blocks: int
    block_size: int
    watermark_blocks: int
    max_running: int | None

    requests: int
    finished: int
    """Requests all of whose samples generated all their tokens."""
    rejected: dict[Reason, int]
    """The other requests, by the reason for which they were refused or ended."""
    steps: int
    prefill_tokens: int
    """Prompt tokens computed, recomputed ones included, those found cached not."""
    generated_tokens: int
    counters: NDArray[np.int64]
    """``BlockManager.counters`` at the end."""
    preemptions: int
    recomputed_tokens: int
    """Tokens computed again because their sequence had been preempted."""
    prefix_hits: PrefixHits | None
    """None where prompts did not share."""

    peak_used: int
    """Most blocks in use in a step."""
    mean_used: float
    """Blocks in use, averaged over simulated time."""
    token_steps: int
    """Tokens in the cache, added up over the steps."""
    logical_block_steps: int
    """Table cells, added up over the steps."""
    used_block_steps: int
    """Blocks in use, added up over the steps."""

    simulated_seconds: float
    """From the first arrival to the end of the last step."""
    waiting_seconds: NDArray[np.float64]
    """For each request that was admitted: from arrival to admission."""
    first_token_seconds: NDArray[np.float64]
    """For each request that was admitted: from arrival to its first token."""
    per_token_seconds: NDArray[np.float64]
    """For each sequence that generated two or more: the mean time between its tokens."""
    series: Series

    wall_seconds: float
    """Measured: how long the replay took."""
    cpu_seconds: float
    """Measured: CPU time of the thread that replayed."""
    manager_seconds: float
    """Measured: the part of ``cpu_seconds`` inside calls of the scheduler and manager.

    Read with ``time.thread_time_ns``, which other work on the machine does not
    disturb; the calibrated cost of reading it is taken off.
    """
    drawing_seconds: float
    """Measured: the part of ``cpu_seconds`` that made tokens from ``hash_ids``.

    An engine has its tokens: compare replays that share with others without it.
    """

    @property
    def internal_fragmentation(self) -> float:
        """Share of the slots in all tables that held no token, over all steps."""
        slots = self.logical_block_steps * self.block_size
        return 1.0 - self.token_steps / slots if slots else 0.0

    @property
    def sharing_ratio(self) -> float:
        """Logical over physical blocks, over all steps: 1 without sharing."""
        return self.logical_block_steps / self.used_block_steps if self.used_block_steps else 1.0

    @property
    def manager_share(self) -> float:
        """Part of the replay's CPU time that was spent inside scheduler and manager."""
        return self.manager_seconds / self.cpu_seconds

    @property
    def manager_share_of_simulated(self) -> float:
        """Manager time for each second that the simulated engine would have served."""
        return self.manager_seconds / self.simulated_seconds if self.simulated_seconds else 0.0

    @property
    def manager_seconds_per_token(self) -> float:
        """Manager time for each generated token."""
        return self.manager_seconds / self.generated_tokens if self.generated_tokens else 0.0


def replay(
    trace: Trace,
    *,
    num_blocks: int,
    block_size: int = 16,
    watermark_blocks: int = 1,
    max_running: int | None = None,
    prefix_caching: bool = True,
    eviction: EvictionPolicy | None = None,
    step_time: StepTime | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Serve ``trace`` from a pool of ``num_blocks`` and report what happened.

    A request with several samples computes its prompt once and forks right after; the
    first sample generates its first token in that step, the others in the next. A
    request that generates nothing still gets the slot that the scheduler gives to
    everyone who is admitted, and ends in that step.

    Parameters
    ----------
    trace : Trace
        With arrivals.
    num_blocks, block_size : int
        The pool.
    watermark_blocks, max_running : int
        As in ``Scheduler``.
    prefix_caching : bool
        Whether the prompts of a trace with ``hash_ids`` share. Others never do.
    eviction : EvictionPolicy, optional
        Which cached block goes first. Default ``LRU()``.
    step_time : callable, optional
        Default ``LinearStepTime()``.
    progress : callable, optional
        Called now and then with the requests done and the requests in all.

    Raises
    ------
    ValueError
        The trace has no arrivals, or ``step_time`` returned no length of time.
    InvariantError
        The manager is not clean after the last request. A bug, never expected.
    """
    if trace.arrivals is None:
        raise ValueError(f"trace {trace.source!r} has lengths only, it needs arrivals")
    sharing = prefix_caching and trace.hash_ids is not None
    policy = eviction or LRU()
    manager = BlockManager(num_blocks, block_size, prefix_caching=sharing, eviction=policy)
    scheduler = Scheduler(manager, watermark_blocks, max_running=max_running)
    run = _Run(trace, manager, scheduler, step_time or LinearStepTime())
    readings = [thread_time_ns() for _ in range(1_001)]
    clock_cost = median(later - earlier for earlier, later in pairwise(readings))
    wall_start, cpu_start = perf_counter(), thread_time()
    run.serve(progress)
    wall_seconds, cpu_seconds = perf_counter() - wall_start, thread_time() - cpu_start
    manager_ns = run.manager_ns - clock_cost * (run.steps + run.timed_calls)
    manager.check()
    if len(manager) or manager.pool.num_used:
        raise InvariantError(
            "I9", None, f"{len(manager)} sequences, {manager.pool.num_used} blocks left at the end"
        )
    reasons = list(run.rejected.values())
    return ReplayResult(
        num_blocks=manager.num_blocks,
        block_size=manager.block_size,
        watermark_blocks=watermark_blocks,
        max_running=max_running,
        requests=len(trace),
        finished=run.finished,
        rejected={reason: reasons.count(reason) for reason in Reason if reason in reasons},
        steps=run.steps,
        prefill_tokens=run.prefill_tokens,
        generated_tokens=run.generated_tokens,
        counters=manager.counters.copy(),
        preemptions=run.preemptions,
        recomputed_tokens=run.recomputed_tokens,
        prefix_hits=run.prefix_hits(type(policy).__name__) if sharing else None,
        peak_used=run.peak_used,
        mean_used=run.used_block_seconds / run.now if run.now else 0.0,
        token_steps=run.token_steps,
        logical_block_steps=run.logical_block_steps,
        used_block_steps=run.used_block_steps,
        simulated_seconds=run.now,
        waiting_seconds=np.array(run.waiting_seconds),
        first_token_seconds=np.array(run.first_token_seconds),
        per_token_seconds=np.array(run.per_token_seconds),
        series=run.series(),
        wall_seconds=wall_seconds,
        cpu_seconds=cpu_seconds,
        manager_seconds=max(manager_ns, 0.0) / 1e9,
        drawing_seconds=run.drawing_ns / 1e9,
    )


class _Run:
    """A replay under way. Sequences are numbered: request after request, its samples."""

    def __init__(
        self, trace: Trace, manager: BlockManager, scheduler: Scheduler, step_time: StepTime
    ) -> None:
        assert trace.arrivals is not None
        self.manager = manager
        # An item of a memoryview is an int at once.
        self.counters = memoryview(manager.counters)  # type: ignore[arg-type]
        self.scheduler = scheduler
        self.step_time = step_time
        ones = np.ones(len(trace), np.int64)
        samples = ones if trace.samples is None else trace.samples
        self.arrivals: list[float] = [*trace.arrivals.tolist(), inf]
        self.first_sequence: list[int] = (np.cumsum(samples) - samples).tolist()
        self.samples: list[int] = samples.tolist()
        self.samples_left = self.samples.copy()
        self.hash_ids = trace.hash_ids if manager.prefix_caching else None
        self.hash_block_size = trace.hash_block_size
        self.tokens_of_next = self.draw_tokens()
        # One entry a sequence from here on.
        self.request: list[int] = np.repeat(np.arange(len(trace)), samples).tolist()
        self.prompt: list[int] = np.repeat(trace.prompt_tokens, samples).tolist()
        self.output: list[int] = np.repeat(trace.output_tokens, samples).tolist()
        # Appends to come after the admission that is next or was last.
        self.appends_left = [max(tokens, 1) for tokens in self.output]
        self.first_token_at: list[float | None] = [None] * len(self.request)

        # Step number -> the running sequences that get their last token in it.
        self.calendar: defaultdict[int, list[int]] = defaultdict(list)
        self.last_step: dict[int, int] = {}
        # Children that have not been in a step yet.
        self.forked: list[int] = []
        self.preempted: set[int] = set()

        self.now = 0.0
        self.arrived = 0
        # Of the arrived requests, how many the scheduler has been told of.
        self.queued = 0
        # When the scheduler is to be told of more.
        self.next_add = self.arrivals[0]
        self.manager_ns = 0
        self.drawing_ns = 0
        # Besides one in every step.
        self.timed_calls = 0
        self.finished = 0
        self.rejected: dict[int, Reason] = {}
        self.cached_tokens = 0
        self.steps = 0
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.tokens = 0
        # Table cells that the counters of blocks do not tell of.
        self.cells_beside_counters = 0
        self.peak_used = 0
        self.used_block_seconds = 0.0
        self.token_steps = 0
        self.logical_block_steps = 0
        self.used_block_steps = 0
        self.waiting_seconds: list[float] = []
        self.first_token_seconds: list[float] = []
        self.per_token_seconds: list[float] = []
        self.points: list[tuple[float, ...]] = []
        self.seconds_between_points = max(self.arrivals[-2] / (MOST_POINTS / 2), 1e-3)
        self.next_point = 0.0

    def serve(self, progress: Progress | None) -> None:
        """All requests, from the first arrival until the last has left."""
        scheduler, pool, step_time = self.scheduler, self.manager.pool, self.step_time
        counters, taken, copied = self.counters, BLOCKS_TAKEN, COW_COPIES
        while True:
            if self.next_add <= self.now:
                self.add_arrivals()
            if not (scheduler.running or scheduler.waiting):
                if self.arrived == len(self.samples):
                    break
                if self.next_point <= self.arrivals[self.arrived]:
                    self.add_point()
                self.now = self.arrivals[self.arrived]
                continue

            start = thread_time_ns()
            step = scheduler.step()
            self.manager_ns += thread_time_ns() - start
            self.steps += 1
            decoded = len(step)
            prefilled = self.prefill_tokens
            admitted: list[tuple[int, int]] = []
            if step.prefills or step.preempted or step.rejected:
                admitted = self.account(step)
            if not (decoded or step.rejected):
                raise InvariantError("I8", None, f"step {self.steps} did nothing, yet some wait")
            self.tokens += decoded
            self.generated_tokens += decoded
            seconds = step_time(self.prefill_tokens - prefilled, decoded, self.tokens)
            if not 0.0 <= seconds < inf:
                raise ValueError(f"step_time returned {seconds!r} as the seconds of a step")

            used = pool.num_used
            if used > self.peak_used:
                self.peak_used = used
            self.used_block_seconds += used * seconds
            self.used_block_steps += used
            self.token_steps += self.tokens
            self.logical_block_steps += (
                counters[taken] - counters[copied] + self.cells_beside_counters
            )
            if self.next_point <= self.now:
                self.add_point()
            self.now += seconds

            if admitted or self.forked:
                self.start(admitted)
            ending = self.calendar.pop(self.steps, None)
            if ending is not None:
                self.finish(ending)
            if progress is not None and self.steps % STEPS_BETWEEN_PROGRESS == 0:
                progress(self.finished + len(self.rejected), len(self.samples))
        self.add_point()
        if progress is not None:
            progress(len(self.samples), len(self.samples))

    def add_arrivals(self) -> None:
        if self.hash_ids is not None:
            return self.add_arrivals_with_tokens()
        start = thread_time_ns()
        while self.arrivals[self.arrived] <= self.now:
            self.add(self.arrived, None)
            self.arrived += 1
        self.queued = self.arrived
        self.next_add = self.arrivals[self.arrived]
        self.stop_clock(start)

    def add_arrivals_with_tokens(self) -> None:
        while self.arrivals[self.arrived] <= self.now:
            self.arrived += 1
        while self.queued < self.arrived and len(self.scheduler.waiting) < MOST_QUEUED:
            tokens = next(self.tokens_of_next)
            start = thread_time_ns()
            self.add(self.queued, tokens)
            self.stop_clock(start)
            self.queued += 1
        self.next_add = self.arrivals[self.arrived] if self.queued == self.arrived else self.now

    def add(self, request: int, tokens: NDArray[np.int32] | None) -> None:
        sequence = self.first_sequence[request]
        try:
            self.scheduler.add(sequence, self.prompt[sequence], tokens=tokens)
        except RequestRefused:
            self.rejected[request] = Reason.NEVER_FITS

    def draw_tokens(self) -> Iterator[NDArray[np.int32]]:
        """Make the tokens that request after request brings, none where it has no ids."""
        assert self.hash_ids is not None
        for first in range(0, len(self.hash_ids), DRAWN_AT_ONCE):
            start = thread_time_ns()
            batch = self.hash_ids[first : first + DRAWN_AT_ONCE]
            tokens = tokens_of_hash_ids(np.concatenate(batch), self.hash_block_size)
            self.drawing_ns += thread_time_ns() - start
            begin = 0
            for request, ids in enumerate(batch, first):
                yield tokens[begin : begin + self.known_tokens(request)]
                begin += len(ids) * self.hash_block_size

    def account(self, step: Step) -> list[tuple[int, int]]:
        """Enter who came and who was sent away; returns those who came."""
        admitted = cast("list[tuple[int, int]]", step.prefills)
        preempted = cast("list[int]", step.preempted)
        rejected = cast("dict[int, Verdict]", step.rejected)
        if self.hash_ids is not None:
            # Cells that cost no block. The step does not tell of somebody who was admitted
            # and sent away in it, the counters do.
            cached = self.counters[CACHED_TOKENS] + self.counters[RESUMED_CACHED_TOKENS]
            self.cells_beside_counters += (cached - self.cached_tokens) // self.manager.block_size
            self.cached_tokens = cached
        for (sequence, n_tokens), cached in zip(admitted, step.cached, strict=True):
            self.end_after(sequence, self.steps - 1)
            self.tokens += n_tokens
            self.prefill_tokens += n_tokens - cached
            if sequence in self.preempted:
                self.recomputed_tokens += n_tokens - cached
            elif sequence == self.first_sequence[self.request[sequence]]:
                waited = self.now - self.arrivals[self.request[sequence]]
                self.waiting_seconds.append(waited)
        for sequence in preempted:
            self.preemptions += 1
            self.leave(sequence)
        for sequence, verdict in rejected.items():
            self.rejected[self.request[sequence]] = verdict.reason
            self.leave(sequence)
        return admitted

    def known_tokens(self, request: int) -> int:
        assert self.hash_ids is not None
        n_tokens = self.prompt[self.first_sequence[request]]
        return min(n_tokens, len(self.hash_ids[request]) * self.hash_block_size)

    def end_after(self, sequence: int, step: int) -> None:
        """Enter into the calendar when a sequence ends that first decodes after ``step``."""
        last_step = step + self.appends_left[sequence]
        self.last_step[sequence] = last_step
        self.calendar[last_step].append(sequence)

    def leave(self, sequence: int) -> None:
        """Undo ``end_after``: the sequence lost its blocks before it decoded in this step."""
        last_step = self.last_step.pop(sequence, None)
        if last_step is not None:
            self.calendar[last_step].remove(sequence)
            self.appends_left[sequence] = last_step - self.steps + 1
            self.preempted.add(sequence)
            self.tokens -= self.length(sequence)
        self.cells_beside_counters -= self.blocks(self.length(sequence))

    def start(self, admitted: Iterable[tuple[int, int]]) -> None:
        """Note first tokens; publish the prompts that are now there, and fork their samples."""
        for sequence in self.forked:
            if sequence in self.last_step:
                self.first_token_at[sequence] = self.now
        self.forked.clear()
        if self.hash_ids is not None:
            start = thread_time_ns()
            for sequence, _ in admitted:
                self.manager.commit(sequence)
            self.stop_clock(start)
        for sequence, _ in admitted:
            if self.first_token_at[sequence] is not None:
                continue
            self.first_token_at[sequence] = self.now
            request = self.request[sequence]
            if sequence == self.first_sequence[request]:
                if self.output[sequence]:
                    self.first_token_seconds.append(self.now - self.arrivals[request])
                self.fork(sequence, self.samples[request])

    def fork(self, parent: int, samples: int) -> None:
        start = thread_time_ns()
        for child in range(parent + 1, parent + samples):
            self.scheduler.fork(parent, child, self.prompt[parent])
        self.stop_clock(start)
        for child in range(parent + 1, parent + samples):
            self.end_after(child, self.steps)
            self.forked.append(child)
            self.tokens += self.prompt[parent]
            self.cells_beside_counters += self.blocks(self.prompt[parent])

    def finish(self, ending: list[int]) -> None:
        start = thread_time_ns()
        for sequence in ending:
            self.scheduler.finish(sequence)
        self.stop_clock(start)
        for sequence in ending:
            del self.last_step[sequence]
            self.appends_left[sequence] = 0
            self.tokens -= self.length(sequence)
            self.cells_beside_counters -= self.blocks(self.length(sequence))
            output, first_token_at = self.output[sequence], self.first_token_at[sequence]
            if output == 0:
                self.generated_tokens -= 1
            if output > 1 and first_token_at is not None:
                self.per_token_seconds.append((self.now - first_token_at) / (output - 1))
            request = self.request[sequence]
            self.samples_left[request] -= 1
            if self.samples_left[request] == 0:
                self.finished += 1

    def stop_clock(self, start: int) -> None:
        self.manager_ns += thread_time_ns() - start
        self.timed_calls += 1

    def length(self, sequence: int) -> int:
        return self.prompt[sequence] + max(self.output[sequence], 1) - self.appends_left[sequence]

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.manager.block_size)

    def add_point(self) -> None:
        gauges = self.manager.gauges()
        if len(self.points) == MOST_POINTS:
            del self.points[1::2]
            self.seconds_between_points *= 2.0
        self.next_point = self.now + self.seconds_between_points
        self.points.append(
            (
                self.now,
                gauges.used,
                gauges.shared,
                gauges.tokens,
                gauges.logical_blocks,
                len(self.scheduler.running),
                len(self.scheduler.waiting) + self.arrived - self.queued,
                self.preemptions,
            )
        )

    def series(self) -> Series:
        seconds, *rest = np.array(self.points).T
        return Series(seconds, *(column.astype(np.int64) for column in rest))

    def prefix_hits(self, eviction: str) -> PrefixHits:
        counters = self.manager.counters
        cached_tokens = int(counters[Counter.CACHED_TOKENS])
        # Those that ended for want of room had been admitted.
        known = [
            self.known_tokens(request)
            for request in range(len(self.samples))
            if self.rejected.get(request) in (None, Reason.OUTGREW_POOL)
        ]
        return PrefixHits(
            eviction=eviction,
            prompts=len(known) - known.count(0),
            prompt_tokens=int(counters[Counter.PROMPT_TOKENS]),
            cached_tokens=cached_tokens,
            prompt_blocks=sum(tokens // self.manager.block_size for tokens in known),
            cached_blocks=cached_tokens // self.manager.block_size,
            resumed_tokens=int(counters[Counter.RESUMED_TOKENS]),
            resumed_cached_tokens=int(counters[Counter.RESUMED_CACHED_TOKENS]),
            evictions=int(counters[Counter.EVICTIONS]),
        )
