"""Serve one trace from pools of several sizes under several policies.

Sizes are given as shares of what the trace needs: the most blocks that it ever holds at
once in a pool without limits, found by a replay of its own. Every point is one replay,
alone in its process or not, so the results do not depend on how many run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.engine_replay import EngineOptions
from kvcore.order import Priority
from kvcore.policy_choices import admission_of, victim_of
from kvcore.replay import replay
from kvcore.step_time import StepTime
from kvcore.trace import Trace

__all__ = ["Policy", "SweepResult", "SweepRow", "SweepSettings", "policies_of", "sweep"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Policy:
    """What a line of the sweep stands for, by the names of the command line."""

    admission: str
    victim: str
    swap: str = "never"
    """``never``: who yields is recomputed."""

    def __str__(self) -> str:
        """Name it in a table or a legend."""
        if self.admission == "to-completion":
            return self.admission
        swap = "" if self.swap == "never" else f", swap {self.swap}"
        return f"{self.admission}, {self.victim}{swap}"


@dataclass(frozen=True)
class SweepSettings:
    """What is the same for every point. A watermark is a share of the pool."""

    engine: EngineOptions
    block_size: int = 16
    watermark: float = 0.01
    max_running: int | None = None
    prefix_caching: bool = True
    step_time: StepTime | None = None
    host_share: float = 1.0
    """Blocks in host memory, where somebody swaps, for each block that the trace needs."""


@dataclass(frozen=True)
class SweepRow:
    """One replay. Seconds are simulated; quantiles are over requests."""

    ratio: float
    num_blocks: int
    admission: str
    victim: str
    swap: str
    goodput: float
    finished: int
    rejected: int
    preemptions_recompute: int
    preemptions_swap: int
    recomputed_tokens: int
    swapped_blocks: int
    """Out and in."""
    stalled: int
    mean_usage: float
    simulated_seconds: float
    waiting_p50: float
    waiting_p90: float
    waiting_p99: float
    waiting_max: float
    first_token_p50: float
    first_token_p99: float
    per_token_p50: float
    per_token_p99: float

    @property
    def policy(self) -> Policy:
        """The line it belongs to."""
        return Policy(self.admission, self.victim, self.swap)


@dataclass(frozen=True)
class SweepResult:
    """All points, policy after policy, each from the smallest pool to the largest."""

    needed_blocks: int
    rows: tuple[SweepRow, ...]


def policies_of(
    admissions: Sequence[str], victims: Sequence[str], swaps: Sequence[str]
) -> list[Policy]:
    """Every combination. Who reserves to completion never needs a victim: it comes once."""
    policies = [
        Policy(admission, victim, swap)
        for admission in admissions
        if admission != "to-completion"
        for swap in swaps
        for victim in victims
    ]
    if "to-completion" in admissions:
        policies.append(Policy("to-completion", victims[0]))
    return policies


def sweep(
    trace: Trace,
    ratios: Iterable[float],
    policies: Sequence[Policy],
    settings: SweepSettings,
    *,
    jobs: int = 1,
    ray: bool = False,
    progress: Progress | None = None,
) -> SweepResult:
    """Replay every policy at every size.

    Parameters
    ----------
    trace : Trace
        With arrivals; and with priorities if somebody looks at them.
    ratios : iterable of float
        Sizes of the pool, as shares of what the trace needs.
    policies : sequence of Policy
    settings : SweepSettings
        Its ``engine`` is that of every point but for policies and host blocks.
    jobs : int
        Processes. With more than one, everything in ``settings`` must be picklable.
    ray : bool
        Let a Ray cluster do it, and ignore ``jobs``.
    progress : callable, optional
        Called with the points done and the points in all.

    Raises
    ------
    ValueError
        What ``replay`` raises, or a share that is not above 0.
    ImportError
        Ray is not installed; the message says how to get it.
    """
    sizes = sorted(set(ratios))
    if not sizes or not sizes[0] > 0.0:
        raise ValueError(f"ratios must be numbers above 0, not {sizes}")
    start = _ray if ray else _serial if jobs == 1 else _processes
    needed = needed_blocks(trace, settings)
    points = [(policy, ratio, needed) for policy in policies for ratio in sizes]
    rows = []
    for row in start(trace, settings, points, jobs):
        rows.append(row)
        if progress is not None:
            progress(len(rows), len(points))
    return SweepResult(needed, tuple(rows))


def needed_blocks(trace: Trace, settings: SweepSettings) -> int:
    """Most blocks that the trace holds at once where there are more than enough."""
    samples = np.ones(len(trace), np.int64) if trace.samples is None else trace.samples
    blocks = -(-(trace.prompt_tokens + trace.output_tokens) // settings.block_size) * samples
    # More than that cannot be held: everybody at once, or as many of the longest as may run.
    enough = int(np.sort(blocks)[::-1][: settings.engine.token_budget].sum())
    result = replay(
        trace,
        num_blocks=enough + 2,
        block_size=settings.block_size,
        max_running=settings.max_running,
        prefix_caching=settings.prefix_caching,
        engine=replace(settings.engine, host_blocks=0),
        step_time=settings.step_time,
    )
    return result.peak_used


_Point = tuple[Policy, float, int]


def run_point(trace: Trace, settings: SweepSettings, point: _Point) -> SweepRow:
    """Replay one policy at one size."""
    policy, ratio, needed = point
    num_blocks = max(round(needed * ratio), 2)
    watermark = max(round(num_blocks * settings.watermark), 1)
    cost = settings.engine.cost
    swaps = policy.swap != "never"
    engine = replace(
        settings.engine,
        admission=admission_of(policy.admission, watermark),
        victim=victim_of(policy.victim, cost, swaps=swaps),
        host_blocks=max(round(needed * settings.host_share), 1) if swaps else 0,
        swap=cost if policy.swap == "cheapest" else None,
    )
    if policy.victim == "priority":
        # Else who was pushed out would be the first to come back.
        engine = replace(engine, order=Priority)
    result = replay(
        trace,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        watermark_blocks=watermark,
        max_running=settings.max_running,
        prefix_caching=settings.prefix_caching,
        engine=engine,
        step_time=settings.step_time,
    )
    assert result.engine is not None
    counters = result.engine.counters
    waiting = _quantiles(result.waiting_seconds, 0.5, 0.9, 0.99, 1.0)
    first_token = _quantiles(result.first_token_seconds, 0.5, 0.99)
    per_token = _quantiles(result.per_token_seconds, 0.5, 0.99)
    return SweepRow(
        ratio,
        num_blocks,
        policy.admission,
        policy.victim,
        policy.swap,
        round(result.goodput, 6),
        result.finished,
        sum(result.rejected.values()),
        counters.preemptions_recompute,
        counters.preemptions_swap,
        counters.recomputed_tokens,
        counters.swap_out_blocks + counters.swap_in_blocks,
        result.engine.stalled,
        round(result.mean_used / num_blocks, 6),
        round(result.simulated_seconds, 6),
        *waiting,
        *first_token,
        *per_token,
    )


def _quantiles(values: NDArray[np.float64], *levels: float) -> list[float]:
    if not values.size:
        return [float("nan")] * len(levels)
    return [round(float(value), 6) for value in np.quantile(values, levels)]


# ------------------------------------------------------------------ where they run

_Rows = Iterator[SweepRow]


def _serial(trace: Trace, settings: SweepSettings, points: list[_Point], jobs: int) -> _Rows:
    for point in points:
        yield run_point(trace, settings, point)


# Of a worker: what all points have in common travels there once.
_common: tuple[Trace, SweepSettings] | None = None


def _begin(trace: Trace, settings: SweepSettings) -> None:
    global _common
    _common = trace, settings


def _run_here(point: _Point) -> SweepRow:
    assert _common is not None
    return run_point(*_common, point)


def _processes(trace: Trace, settings: SweepSettings, points: list[_Point], jobs: int) -> _Rows:
    # Spawned, not forked: the same everywhere, and safe beside threads.
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), initializer=_begin, initargs=(trace, settings)
    ) as executor:
        yield from executor.map(_run_here, points)


def _ray(trace: Trace, settings: SweepSettings, points: list[_Point], jobs: int) -> _Rows:
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ImportError(
            "a sweep on a cluster needs Ray: pip install kvcore[ray]", name=error.name
        ) from error
    remote = ray.remote(run_point)
    common = ray.put(trace), ray.put(settings)
    for task in [remote.remote(*common, point) for point in points]:
        yield ray.get(task)
