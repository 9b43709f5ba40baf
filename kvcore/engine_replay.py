"""Replay with engine steps: a step is a forward pass within a budget of tokens.

The scheduler decides who enters, who runs and who ends; this loop plays the engine that
runs its steps and reports them. Steps run one after the other. With ``in_flight`` steps
outstanding, the next one is planned before the last results are known, as an engine
does that plans while its accelerator works.

What a step takes is told by ``StepTime``: its prompt tokens, to which drafts count, since
they are computed like them; the sequences that sample a token; and the tokens in the
cache that decodes and prompt chunks read. Copies from and to host memory are taken to
run before the pass, not beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time_ns
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvcore.admission import Admission, Watermark
from kvcore.block_manager import BlockManager
from kvcore.errors import InvariantError
from kvcore.order import FCFS, Order
from kvcore.replay_result import EngineFigures
from kvcore.replay_run import Progress, ReplayRun
from kvcore.resume_cost import ResumeCost, SwapRule
from kvcore.scheduler import Scheduler, Step, Verdict
from kvcore.step_time import StepTime
from kvcore.trace import Trace
from kvcore.victim import Newest, Victim

__all__ = ["EngineOptions", "EngineRun"]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine schedules. ``Scheduler`` explains what is not explained here.

    Policies are given as what makes them, mostly their class, because they keep state:
    every replay has its own.

    Raises
    ------
    ValueError
        Swapping without host blocks, or an acceptance that is no probability.
    """

    token_budget: int
    max_partial_prefills: int = 4
    order: Callable[[], Order] = FCFS
    victim: Callable[[], Victim] = Newest
    admission: Callable[[], Admission] | None = None
    """Default: the watermark."""
    host_blocks: int = 0
    """Blocks in host memory; none, and whoever is preempted is recomputed."""
    swap: SwapRule | None = None
    """Default: whoever finds room goes to host memory."""
    cost: ResumeCost = field(default_factory=ResumeCost)
    """Says how long a swapped block takes."""
    draft_tokens: int = 0
    acceptance: float = 0.7
    """Probability that a draft is accepted if all before it were."""
    window: int | None = None
    sink_tokens: int = 0
    in_flight: int = 0
    seed: int = 0
    """Of the drafts that are accepted."""

    def __post_init__(self) -> None:
        if self.swap is not None and not self.host_blocks:
            raise ValueError("swap needs host_blocks")
        if not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(f"acceptance must be from 0 to 1, not {self.acceptance}")

    def scheduler(
        self, manager: BlockManager, watermark_blocks: int, max_running: int | None
    ) -> Scheduler:
        """Make the scheduler. Raises what ``Scheduler`` raises."""
        host = None
        if self.host_blocks:
            host = BlockManager(self.host_blocks, manager.block_size)
        admission = None if self.admission is None else self.admission()
        return Scheduler(
            manager,
            watermark_blocks,
            max_running=max_running,
            token_budget=self.token_budget,
            max_partial_prefills=self.max_partial_prefills,
            order=self.order(),
            victim=self.victim(),
            admission=admission or Watermark(watermark_blocks),
            draft_tokens=self.draft_tokens,
            window=self.window,
            sink_tokens=self.sink_tokens,
            in_flight=self.in_flight,
            host=host,
            swap=self.swap,
        )


class EngineRun(ReplayRun):
    """A request with several samples is added once, with siblings."""

    def __init__(
        self,
        trace: Trace,
        manager: BlockManager,
        scheduler: Scheduler,
        step_time: StepTime,
        options: EngineOptions,
    ) -> None:
        super().__init__(trace, manager, scheduler, step_time)
        self.options = options
        self.random = np.random.default_rng(options.seed)
        zeros = np.zeros(len(trace), np.int64)
        self.priorities = (zeros if trace.priorities is None else trace.priorities).tolist()
        self.tenants = (zeros if trace.tenants is None else trace.tenants).tolist()
        if not isinstance(scheduler.order, FCFS):
            # It may choose anybody, so everybody must be there.
            self.most_queued = len(trace)
        self.admitted: set[int] = set()
        # Sequence -> number of the step in which it last lost its blocks.
        self.lost: dict[int, int] = {}
        # Steps under way, and when each is done.
        self.pending: deque[tuple[Step, float]] = deque()
        self.stalled = 0

    def serve(self, progress: Progress | None) -> None:
        """All requests, from the first arrival until the last has left."""
        scheduler, pending = self.scheduler, self.pending
        idle_steps = 0
        while True:
            if self.next_add <= self.now:
                self.add_arrivals()
            if not (scheduler.running or scheduler.waiting or scheduler.swapped or pending):
                if self.await_next_arrival():
                    continue
                break

            start = thread_time_ns()
            step = scheduler.step()
            self.stop_clock(start)
            self.account(step)
            if not step.is_empty:
                idle_steps = 0
                self.run(step)
                if len(pending) > self.options.in_flight:
                    self.report()
                self.tell(progress)
            elif pending:
                self.report()
            elif not step.rejected:
                # What one step sorts out another one must use.
                idle_steps += 1
                if idle_steps > 1 and (scheduler.running or scheduler.waiting or scheduler.swapped):
                    raise InvariantError("I8", None, f"step {step.number} does nothing for ever")
        counters = scheduler.counters
        self.prefill_tokens = counters.prefill_tokens
        self.generated_tokens = counters.sampled_tokens
        self.recomputed_tokens = counters.recomputed_tokens
        self.add_point()
        if progress is not None:
            progress(len(self.samples), len(self.samples))

    def add(self, request: int, tokens: NDArray[np.int32] | None) -> None:
        """Tell the scheduler of a request."""
        sequence = self.first_sequence[request]
        self.scheduler.add(
            sequence,
            self.prompt[sequence],
            tokens=tokens,
            max_tokens=self.output[sequence],
            priority=self.priorities[request],
            tenant=self.tenants[request],
            siblings=tuple(range(sequence + 1, sequence + self.samples[request])),
        )

    def account(self, step: Step) -> None:
        """Enter who came, who lost its blocks and who was sent away."""
        for sequence, _, _ in cast("list[tuple[int, int, int]]", step.prefills):
            if sequence not in self.admitted:
                self.admitted.add(sequence)
                request = self.request[sequence]
                if sequence == self.first_sequence[request]:
                    self.waiting_seconds.append(self.now - self.arrivals[request])
        for sequence in cast("list[int]", step.preempted):
            self.lost[sequence] = step.number
        for sequence, verdict in cast("dict[int, Verdict]", step.rejected).items():
            self.rejected[self.request[sequence]] = verdict.reason
        self.preemptions += len(step.preempted) + len(step.swapped_out)
        self.stalled += len(step.stalled)

    def run(self, step: Step) -> None:
        """Let the accelerator run a step, once it is done with those before it."""
        self.steps += 1
        drafts = 0 if step.counts is None else int(step.counts.sum()) - len(step)
        context = int(step.lengths.sum())
        computed = drafts
        for _, start, count in step.prefills:
            context += start
            computed += count
        seconds = self.seconds_of(
            computed, len(step) + len(step.completed) + len(step.forks), context
        )
        swapped = len(step.swap_out) + len(step.swap_in)
        if swapped:
            seconds += self.options.cost.swap(swapped) / 2

        used = self.manager.pool.num_used
        self.peak_used = max(self.peak_used, used)
        self.used_block_seconds += used * seconds
        self.used_block_steps += used
        tokens, cells = self.held()
        self.token_steps += tokens
        self.logical_block_steps += cells
        if self.next_point <= self.now:
            self.add_point()
        begins = max(self.now, self.pending[-1][1]) if self.pending else self.now
        self.pending.append((step, begins + seconds))

    def held(self) -> tuple[int, int]:
        """Tokens and table cells of all sequences."""
        if self.options.window is not None:
            gauges = self.manager.gauges()
            return gauges.tokens, gauges.logical_blocks
        lengths = self.manager.lengths.astype(np.int64)
        np.maximum(lengths, 0, out=lengths)
        tokens = int(lengths.sum())
        lengths += self.manager.block_size - 1
        lengths //= self.manager.block_size
        return tokens, int(lengths.sum())

    def report(self) -> None:
        """Report the results of the oldest step under way, which is done now."""
        step, self.now = self.pending.popleft()
        rejected = None if step.counts is None else self.rejected_drafts(step.counts)
        sampled: list[tuple[int, int]] = []
        for sequence in cast("list[int]", step.completed):
            sampled.append((sequence, sequence))
        for parent, child in cast("list[tuple[int, int]]", step.forks):
            sampled.append((parent, child))
        for parent, sequence in sampled:
            # A result of a sequence that was preempted meanwhile is lost.
            if max(self.lost.get(parent, 0), self.lost.get(sequence, 0)) <= step.number:
                self.got_first_token(sequence)
        start = thread_time_ns()
        ended = self.scheduler.update(step, rejected=rejected)
        self.stop_clock(start)
        for sequence in cast("list[int]", ended):
            self.ended(sequence)

    def got_first_token(self, sequence: int) -> None:
        """Note when a sequence got its first token, if it is the first time."""
        if self.first_token_at[sequence] is not None:
            return
        self.first_token_at[sequence] = self.now
        request = self.request[sequence]
        if sequence == self.first_sequence[request]:
            self.first_token_seconds.append(self.now - self.arrivals[request])

    def rejected_drafts(self, counts: NDArray[np.int32]) -> NDArray[np.int64]:
        """Draw how many of each sequence's drafts are rejected: all after the first."""
        drafts = counts - 1
        draws = self.random.random((len(counts), self.options.draft_tokens))
        accepted = np.cumprod(draws < self.options.acceptance, axis=1).sum(axis=1)
        return np.asarray(drafts - np.minimum(accepted, drafts), np.int64)

    def figures(self) -> EngineFigures:
        """Return what a report says of the scheduler."""
        options, scheduler = self.options, self.scheduler
        swap = None
        if options.host_blocks:
            swap = "always" if options.swap is None else type(options.swap).__name__
        return EngineFigures(
            token_budget=options.token_budget,
            max_partial_prefills=options.max_partial_prefills,
            order=type(scheduler.order).__name__,
            victim=type(scheduler.victim).__name__,
            admission=type(scheduler.admission).__name__,
            host_blocks=options.host_blocks,
            swap=swap,
            draft_tokens=options.draft_tokens,
            acceptance=options.acceptance,
            window=options.window,
            sink_tokens=options.sink_tokens,
            in_flight=options.in_flight,
            counters=scheduler.counters,
            stalled=self.stalled,
        )
