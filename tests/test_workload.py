"""The built-in workload has the published figures, and arrivals can be made for any trace."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.trace import Trace
from kvcore.workload import AZURE_RATE, at_rate, poisson_arrivals, synthetic_trace

HOUR = 19_366


@pytest.mark.parametrize("seed", range(3))
def test_lengths_follow_the_published_quantiles_and_means(seed: int) -> None:
    trace = synthetic_trace(100_000, seed=seed)
    for tokens, published in (
        (trace.prompt_tokens, (207, 1_020, 2_735, 4_142)),
        (trace.output_tokens, (54, 129, 424, 601)),
    ):
        for level, quantile in zip((0.1, 0.5, 0.9, 0.99), published, strict=True):
            # Many share the value of the quantile itself, so it lies between the two.
            error = 0.1 * min(level, 1 - level)
            assert (tokens < quantile).mean() <= level + error
            assert (tokens <= quantile).mean() >= level - error
    assert trace.prompt_tokens.mean() == pytest.approx(1_155, rel=0.01)
    assert trace.output_tokens.mean() == pytest.approx(211, rel=0.01)
    assert 1 <= trace.prompt_tokens.min() <= trace.prompt_tokens.max() <= 14_050
    assert 1 <= trace.output_tokens.min() <= trace.output_tokens.max() <= 1_000


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_follow_the_published_rate_gaps_and_minutes(seed: int) -> None:
    arrivals = synthetic_trace(HOUR, seed=seed).arrivals
    assert arrivals is not None
    assert (HOUR - 1) / arrivals[-1] == pytest.approx(AZURE_RATE, rel=0.03)
    gaps = np.diff(arrivals)
    assert gaps.std() / gaps.mean() == pytest.approx(1.09, abs=0.03)
    minutes = np.bincount((arrivals // 60).astype(int))[:-1]
    assert minutes.min() == pytest.approx(191, rel=0.15)
    assert np.median(minutes) == pytest.approx(328, rel=0.05)
    assert minutes.max() == pytest.approx(507, rel=0.15)


def test_a_seed_draws_one_workload_and_another_seed_another() -> None:
    first, same, other = (synthetic_trace(100, seed=seed) for seed in (1, 1, 2))
    for name in ("arrivals", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(first, name), getattr(same, name))
        assert (getattr(first, name) != getattr(other, name)).any()


def test_the_rate_scales_time_alone() -> None:
    slow, fast = synthetic_trace(100, rate=2.0), synthetic_trace(100, rate=8.0)
    assert slow.arrivals is not None
    assert fast.arrivals is not None
    np.testing.assert_allclose(slow.arrivals, fast.arrivals * 4.0)
    np.testing.assert_array_equal(slow.prompt_tokens, fast.prompt_tokens)


@pytest.mark.parametrize("count", [1, 2])
def test_the_smallest_workloads_are_traces(count: int) -> None:
    trace = synthetic_trace(count)
    assert len(trace) == count
    assert trace.arrivals is not None
    assert trace.arrivals[0] == 0.0
    assert poisson_arrivals(count, 1.0)[0] == 0.0


def test_poisson_arrivals_have_exponential_gaps_of_the_rate() -> None:
    gaps = np.diff(poisson_arrivals(100_000, 4.0, seed=3))
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(0.25, rel=0.02)
    assert np.median(gaps) == pytest.approx(0.25 * np.log(2), rel=0.02)


def lengths(arrivals: list[float] | None) -> Trace:
    ones = np.ones(4, np.int64)
    return Trace("lengths", ones, ones, None if arrivals is None else np.array(arrivals))


def test_a_trace_without_arrivals_gets_those_of_the_rate_and_seed() -> None:
    np.testing.assert_array_equal(
        at_rate(lengths(None), 4.0, seed=5).arrivals, poisson_arrivals(4, 4.0, seed=5)
    )


def test_arrivals_of_a_trace_are_stretched_to_the_rate() -> None:
    trace = at_rate(lengths([0.0, 1.0, 1.0, 3.0]), 0.5)
    assert trace.arrivals is not None
    assert trace.arrivals.tolist() == [0.0, 2.0, 2.0, 6.0]


def test_arrivals_all_at_once_have_no_rate_to_change() -> None:
    with pytest.raises(ValueError, match="all its requests arrive at once"):
        at_rate(lengths([1.0, 1.0, 1.0, 1.0]), 0.5)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    for call in (
        lambda: synthetic_trace(5, rate=rate),
        lambda: poisson_arrivals(5, rate),
        lambda: at_rate(lengths([0.0, 0.0, 0.0, 1.0]), rate),
    ):
        with pytest.raises(ValueError, match="rate must be a positive number"):
            call()


def test_no_requests_make_no_workload() -> None:
    with pytest.raises(ValueError, match="num_requests must be at least 1, not 0"):
        synthetic_trace(0)
