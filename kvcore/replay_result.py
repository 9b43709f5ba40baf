"""What a replay did, in figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.scheduler import Reason
from kvcore.step import SchedulerCounters

__all__ = ["EngineFigures", "PrefixHits", "ReplayResult", "Series"]


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


@dataclass(frozen=True)
class EngineFigures:
    """How the engine steps of a replay were scheduled, and what that came to."""

    token_budget: int
    max_partial_prefills: int
    order: str
    """Names of the policies."""
    victim: str
    admission: str
    host_blocks: int
    swap: str | None
    """None without host blocks."""
    draft_tokens: int
    acceptance: float
    window: int | None
    sink_tokens: int
    in_flight: int
    counters: SchedulerCounters
    stalled: int
    """How often a running sequence sat a step out, for want of a block."""


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
    finished_tokens: int
    """Output tokens of the requests that finished."""
    counters: NDArray[np.int64]
    """``BlockManager.counters`` at the end."""
    preemptions: int
    recomputed_tokens: int
    """Tokens computed again because their sequence had been preempted."""
    prefix_hits: PrefixHits | None
    """None where prompts did not share."""
    engine: EngineFigures | None
    """None for textbook steps."""

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
    def goodput(self) -> float:
        """Output tokens of finished requests for each simulated second."""
        return self.finished_tokens / self.simulated_seconds if self.simulated_seconds else 0.0

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
