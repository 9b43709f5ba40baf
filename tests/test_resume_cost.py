"""Seconds to bring a request back, and the choice between the two ways."""

from __future__ import annotations

import pytest
from policy_support import waiting

from kvcore.resume_cost import ResumeCost, SwapCandidate
from kvcore.step_time import LinearStepTime


def test_the_figures_by_hand() -> None:
    cost = ResumeCost(
        seconds_per_token=1e-4, bytes_per_block=1000, bytes_per_second=1e6, seconds_per_copy=0.5
    )
    assert cost.recompute(300) == pytest.approx(0.03)
    assert cost.swap(20) == pytest.approx(2 * (0.5 + 20 * 1000 / 1e6))


def test_a_prompt_token_costs_what_it_costs_in_a_replay() -> None:
    assert ResumeCost().seconds_per_token == LinearStepTime().per_prefill_token


def test_small_fragments_make_a_slow_link() -> None:
    small, large = ResumeCost(fragment_bytes=24 << 10), ResumeCost(fragment_bytes=28 << 10)
    assert small.swap(100) > 5 * large.swap(100)
    given = ResumeCost(fragment_bytes=24 << 10, bytes_per_second=40e9)
    assert given.swap(100) == large.swap(100)


def test_a_request_is_swapped_if_that_is_faster() -> None:
    cost = ResumeCost(seconds_per_token=1e-3, bytes_per_block=1, bytes_per_second=1e3)
    # 16 tokens a block: 16 ms to compute; 2 ms to copy
    assert cost(SwapCandidate(waiting("a"), 160, 10))
    # one token in a block of its own: 1 ms to compute, 2 ms to copy
    assert not cost(SwapCandidate(waiting("a"), 1, 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds_per_token", 0),
        ("bytes_per_block", 0),
        ("fragment_bytes", -1),
        ("bytes_per_second", 0),
        ("seconds_per_copy", -1),
    ],
)
def test_arguments_that_make_no_sense_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} .* got {value}"):
        ResumeCost(**{name: value})  # type: ignore[arg-type]
