"""What every replay does: requests arrive, tokens are drawn, and the pool is watched.

The loops that serve the requests are elsewhere, one for each kind of step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from time import thread_time_ns

import numpy as np
from numpy.typing import NDArray

from kvcore.block_manager import BlockManager
from kvcore.counters import Counter
from kvcore.errors import RequestRefused
from kvcore.hash_id_tokens import tokens_of_hash_ids
from kvcore.replay_result import PrefixHits, Series
from kvcore.scheduler import Reason, Scheduler
from kvcore.step_time import StepTime
from kvcore.trace import Trace

__all__ = ["Progress", "ReplayRun"]

# A sample of the pool costs O(num_blocks): the series halves its resolution when full.
MOST_POINTS = 2_000
STEPS_BETWEEN_PROGRESS = 512
# Requests whose tokens are made in one go: few calls of numpy, and little that lies around.
DRAWN_AT_ONCE = 32

Progress = Callable[[int, int], None]
"""``(requests done, requests in all)``"""


class ReplayRun:
    """A replay under way. Sequences are numbered: request after request, its samples."""

    # Requests in the scheduler's queue that have brought their tokens. More than enter in
    # a step; the tokens of all that wait could be more than fits into memory.
    most_queued = 512

    def __init__(
        self, trace: Trace, manager: BlockManager, scheduler: Scheduler, step_time: StepTime
    ) -> None:
        assert trace.arrivals is not None
        self.manager = manager
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
        self.first_token_at: list[float | None] = [None] * len(self.request)

        self.now = 0.0
        self.arrived = 0
        # Of the arrived requests, how many the scheduler has been told of.
        self.queued = 0
        # When the scheduler is to be told of more.
        self.next_add = self.arrivals[0]
        self.manager_ns = 0
        self.drawing_ns = 0
        self.timed_calls = 0
        self.finished = 0
        self.finished_tokens = 0
        self.rejected: dict[int, Reason] = {}
        self.steps = 0
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
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
        raise NotImplementedError

    def add(self, request: int, tokens: NDArray[np.int32] | None) -> None:
        """Tell the scheduler of a request. Raises what ``Scheduler.add`` raises."""
        raise NotImplementedError

    # ------------------------------------------------------------ arrivals

    def add_arrivals(self) -> None:
        """Tell the scheduler of those that have arrived by now."""
        if self.hash_ids is not None:
            return self.add_arrivals_with_tokens()
        start = thread_time_ns()
        while self.arrivals[self.arrived] <= self.now:
            self.try_to_add(self.arrived, None)
            self.arrived += 1
        self.queued = self.arrived
        self.next_add = self.arrivals[self.arrived]
        self.stop_clock(start)

    def add_arrivals_with_tokens(self) -> None:
        """Tell it of them while few that wait have brought their tokens."""
        while self.arrivals[self.arrived] <= self.now:
            self.arrived += 1
        while self.queued < self.arrived and len(self.scheduler.waiting) < self.most_queued:
            tokens = next(self.tokens_of_next)
            start = thread_time_ns()
            self.try_to_add(self.queued, tokens)
            self.stop_clock(start)
            self.queued += 1
        self.next_add = self.arrivals[self.arrived] if self.queued == self.arrived else self.now

    def try_to_add(self, request: int, tokens: NDArray[np.int32] | None) -> None:
        """Tell the scheduler of a request, or note that it was refused."""
        try:
            self.add(request, tokens)
        except RequestRefused:
            self.rejected[request] = Reason.NEVER_FITS

    def await_next_arrival(self) -> bool:
        """Skip the time in which nobody is here. False when nobody will come any more."""
        if self.arrived == len(self.samples):
            return False
        if self.next_point <= self.arrivals[self.arrived]:
            self.add_point()
        self.now = self.arrivals[self.arrived]
        return True

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

    def known_tokens(self, request: int) -> int:
        """Tokens of a prompt that the trace has ids for."""
        assert self.hash_ids is not None
        n_tokens = self.prompt[self.first_sequence[request]]
        return min(n_tokens, len(self.hash_ids[request]) * self.hash_block_size)

    # ------------------------------------------------------------ accounts

    def seconds_of(self, prefill_tokens: int, sequences: int, context_tokens: int) -> float:
        """How long a step takes. ``ValueError`` if that is no length of time."""
        seconds = self.step_time(prefill_tokens, sequences, context_tokens)
        if not 0.0 <= seconds < inf:
            raise ValueError(f"step_time returned {seconds!r} as the seconds of a step")
        return seconds

    def ended(self, sequence: int) -> None:
        """Note that a sequence has all its tokens."""
        output, first_token_at = self.output[sequence], self.first_token_at[sequence]
        if output > 1 and first_token_at is not None:
            self.per_token_seconds.append((self.now - first_token_at) / (output - 1))
        request = self.request[sequence]
        self.samples_left[request] -= 1
        if self.samples_left[request] == 0:
            self.finished += 1
            self.finished_tokens += output * self.samples[request]

    def stop_clock(self, start: int) -> None:
        """Add what the manager took since ``start``."""
        self.manager_ns += thread_time_ns() - start
        self.timed_calls += 1

    def tell(self, progress: Progress | None) -> None:
        """Say now and then how far this is."""
        if progress is not None and self.steps % STEPS_BETWEEN_PROGRESS == 0:
            progress(self.finished + len(self.rejected), len(self.samples))

    def add_point(self) -> None:
        """Note how full the pool is now."""
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
        """Return the points as arrays."""
        seconds, *rest = np.array(self.points).T
        return Series(seconds, *(column.astype(np.int64) for column in rest))

    def prefix_hits(self, eviction: str) -> PrefixHits:
        """Return how much of the prompts was found cached."""
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
