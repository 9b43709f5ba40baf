"""The built-in workload, and arrivals for traces that have none.

The workload follows the published figures of the Azure 2023 conversation trace
(Splitwise, ISCA 2024): its rate, the spread of its gaps and of its minutes, and the
quantiles and means of its prompt and answer lengths. Prompt and answer of a request
are drawn independently. The load swells and ebbs once over the workload, as over a
day.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.trace import Trace

__all__ = ["AZURE_RATE", "at_rate", "poisson_arrivals", "synthetic_trace", "with_classes"]

AZURE_RATE = 5.53
"""Requests per second."""

SWELL = 0.4
"""How far the rate strays from its mean, as a share of it.

Poisson arrivals of a rate that swings by this much have gaps with a coefficient of
variation of 1.09 and minutes with 184 to 509 requests around 330; the Azure trace has
1.09, and 191 to 507 around 328.
"""


class _Lengths(NamedTuple):
    """A distribution of token counts by its quantiles.

    Between two quantiles the logarithm rises as a power of the share of the way: the
    one power that makes the mean right as well. Only in the last stretch it rises
    evenly, for a steep start there would blur the quantile below it.
    """

    quantiles: tuple[tuple[float, int], ...]
    power: float

    def sample(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        levels, tokens = np.array(self.quantiles).T
        level = random.random(count)
        below = np.searchsorted(levels, level, side="right") - 1
        share = (level - levels[below]) / (levels[below + 1] - levels[below])
        ratio = tokens[below + 1] / tokens[below]
        power = np.where(below == len(levels) - 2, 1.0, self.power)
        drawn: NDArray[np.float64] = np.rint(tokens[below] * ratio ** (share**power))
        return drawn.astype(np.int64)


AZURE_PROMPTS = _Lengths(
    ((0.0, 2), (0.1, 207), (0.5, 1020), (0.9, 2735), (0.99, 4142), (1.0, 14050)), power=1.72
)
AZURE_OUTPUTS = _Lengths(
    ((0.0, 7), (0.1, 54), (0.5, 129), (0.9, 424), (0.99, 601), (1.0, 1000)), power=0.58
)


def synthetic_trace(num_requests: int, *, rate: float = AZURE_RATE, seed: int = 0) -> Trace:
    """Draw a workload like the Azure 2023 conversation trace, the same for the same seed.

    Parameters
    ----------
    num_requests : int
    rate : float
        Mean requests per second.
    seed : int
        Seed of NumPy's default generator.
    """
    _check_arguments(num_requests, rate)
    random = np.random.default_rng(seed)
    # Unit-rate arrivals, carried to where the swelling load has seen as many.
    ordinary = np.cumsum(random.exponential(size=num_requests))
    turns = np.linspace(0.0, 1.5, 30_001)
    expected = num_requests * (turns - SWELL * np.sin(2.0 * np.pi * turns) / (2.0 * np.pi))
    arrivals = np.interp(ordinary, expected, turns) * (num_requests / rate)
    return Trace(
        f"synthetic workload, seed {seed}",
        AZURE_PROMPTS.sample(num_requests, random),
        AZURE_OUTPUTS.sample(num_requests, random),
        arrivals - arrivals[0],
    )


def poisson_arrivals(num_requests: int, rate: float, *, seed: int = 0) -> NDArray[np.float64]:
    """Seconds at which ``num_requests`` independent requests arrive, the first at 0.

    Parameters
    ----------
    num_requests : int
    rate : float
        Mean requests per second.
    seed : int
        Seed of NumPy's default generator.
    """
    _check_arguments(num_requests, rate)
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, num_requests)
    gaps[0] = 0.0
    return np.cumsum(gaps)


def at_rate(trace: Trace, rate: float, *, seed: int = 0) -> Trace:
    """``trace`` with a mean of ``rate`` requests per second.

    Its own arrivals are stretched or squeezed. A trace without any gets those of
    ``poisson_arrivals``.

    Raises
    ------
    ValueError
        All requests arrive at the same time: no stretching changes their rate.
    """
    if trace.arrivals is None:
        return replace(trace, arrivals=poisson_arrivals(len(trace), rate, seed=seed))
    _check_arguments(len(trace), rate)
    span = trace.arrivals[-1] - trace.arrivals[0]
    if span == 0.0:
        raise ValueError(f"trace {trace.source!r} has no rate: all its requests arrive at once")
    return replace(trace, arrivals=trace.arrivals * ((len(trace) - 1) / rate / span))


def with_classes(trace: Trace, *, seed: int = 0) -> Trace:
    """``trace`` with priorities and tenants drawn for it, where it has none.

    Priorities are 0, 1 or 2, each for a third of the requests. There are eight tenants,
    and the k-th of them sends in proportion to 1 / k. Independent of all else.
    """
    random = np.random.default_rng(seed)
    priorities = random.integers(0, 3, len(trace))
    shares = 1.0 / np.arange(1, 9)
    tenants = random.choice(8, len(trace), p=shares / shares.sum())
    return replace(
        trace,
        priorities=priorities if trace.priorities is None else trace.priorities,
        tenants=tenants if trace.tenants is None else trace.tenants,
    )


def _check_arguments(num_requests: int, rate: float) -> None:
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, not {num_requests}")
    if not 0.0 < rate < float("inf"):
        raise ValueError(f"rate must be a positive number, not {rate}")
