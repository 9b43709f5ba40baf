"""The replay with engine steps: counted by hand, what must always hold, and the real files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_traces import AZURE_CODE, AZURE_CONV, CONVERSATION, real_trace
from replay_support import trace

from kvcore import Counter, Reason
from kvcore.admission import PredictedPeak, ToCompletion
from kvcore.engine_replay import EngineOptions
from kvcore.order import FairShare, Priority, ShortestJob
from kvcore.policy_choices import ADMISSIONS, ORDERS, VICTIMS, admission_of, victim_of
from kvcore.replay import replay
from kvcore.replay_result import EngineFigures, ReplayResult
from kvcore.resume_cost import ResumeCost
from kvcore.trace import Trace
from kvcore.victim import LowestPriority
from kvcore.workload import synthetic_trace, with_classes


def run(
    load: Trace,
    num_blocks: int,
    budget: int = 8,
    *,
    step_time: Callable[[int, int, int], float] = lambda *_: 1.0,
    watermark_blocks: int = 0,
    **engine: Any,
) -> ReplayResult:
    return replay(
        load,
        num_blocks=num_blocks,
        block_size=4,
        watermark_blocks=watermark_blocks,
        engine=EngineOptions(budget, **engine),
        step_time=step_time,
    )


def figures(result: ReplayResult) -> EngineFigures:
    assert result.engine is not None
    return result.engine


def work_adds_up(load: Trace, result: ReplayResult) -> bool:
    """Every token but the last of each sequence is computed once, and again when it was lost."""
    samples = 1 if load.samples is None else load.samples
    outputs = np.maximum(load.output_tokens - 1, 0) * samples
    cached = int(result.counters[Counter.CACHED_TOKENS])
    computed = result.prefill_tokens + int(result.counters[Counter.TOKENS_APPENDED])
    needed = load.prompt_tokens.sum() + outputs.sum() + result.recomputed_tokens
    return bool(computed == needed - cached)


# ------------------------------------------------------------------ counted by hand


def test_a_prompt_in_chunks_and_a_step_for_each_further_token() -> None:
    """20 tokens in chunks of 8, 8 and 4; the third step samples the first of 3 tokens."""
    calls: list[tuple[int, int, int]] = []

    def step_time(*call: int) -> float:
        calls.append((call[0], call[1], call[2]))
        return 1.0

    result = run(trace((0, 20, 3)), 10, step_time=step_time)
    assert calls == [(8, 0, 0), (8, 0, 8), (4, 1, 16), (0, 1, 21), (0, 1, 22)]
    assert (result.finished, result.steps, result.generated_tokens) == (1, 5, 3)
    assert result.prefill_tokens == 20
    assert result.first_token_seconds.tolist() == [3.0]
    assert result.per_token_seconds.tolist() == [1.0]
    assert result.waiting_seconds.tolist() == [0.0]
    assert result.goodput == 3 / 5
    assert result.peak_used == 6
    assert result.token_steps == 20 + 20 + 20 + 21 + 22


def test_decodes_come_first_and_the_rest_of_the_budget_goes_to_a_prompt() -> None:
    calls: list[tuple[int, int, int]] = []

    def step_time(*call: int) -> float:
        calls.append((call[0], call[1], call[2]))
        return 1.0

    run(trace((0, 4, 4), (0.5, 8, 1)), 10, 5, step_time=step_time)
    # 4 of 5 are left beside the decode.
    assert calls == [(4, 1, 0), (4, 1, 5), (4, 2, 4 + 6), (0, 1, 7)]


def test_a_request_that_generates_nothing_ends_with_its_prompt() -> None:
    result = run(trace((0, 6, 0), (0, 6, 1)), 10, 16)
    assert (result.finished, result.steps, result.generated_tokens) == (2, 1, 1)
    assert result.first_token_seconds.tolist() == [1.0]


def test_samples_get_their_first_token_together() -> None:
    result = run(trace((0, 6, 3), n=3), 30)
    assert (result.finished, result.steps, result.generated_tokens) == (1, 3, 9)
    assert result.counters[Counter.SEQUENCES_FORKED] == 2
    assert result.counters[Counter.COW_COPIES] == 2
    assert result.per_token_seconds.tolist() == [1.0, 1.0, 1.0]
    assert result.finished_tokens == 9


def test_the_newest_yields_and_is_computed_again() -> None:
    """Both have 8 tokens in 2 of 4 blocks after step 2, so the ninth needs a fifth block."""
    result = run(trace((0, 7, 5), (0, 7, 5)), 4, 16)
    counters = figures(result).counters
    assert (result.finished, result.preemptions) == (2, 1)
    assert (counters.preemptions_recompute, counters.preemptions_swap) == (1, 0)
    assert result.recomputed_tokens == 8
    assert work_adds_up(trace((0, 7, 5), (0, 7, 5)), result)
    assert counters.admission_blocked_blocks > 0


def test_with_host_memory_nothing_is_computed_again_and_copies_take_time() -> None:
    load = trace((0, 7, 5), (0, 7, 5))
    cost = ResumeCost(bytes_per_block=1_000, bytes_per_second=100.0, seconds_per_copy=3.0)
    result = run(load, 4, 16, host_blocks=4, cost=cost)
    counters = figures(result).counters
    assert (counters.preemptions_recompute, counters.preemptions_swap) == (0, 1)
    assert result.recomputed_tokens == 0
    assert counters.swap_out_blocks == counters.swap_in_blocks == 2
    # Two blocks of ten seconds and three to start, each way.
    assert result.simulated_seconds == result.steps + 2 * 23.0
    assert figures(result).swap == "always"


def test_to_completion_nobody_yields_and_the_second_waits() -> None:
    load = trace((0, 7, 5), (0, 7, 5))
    result = run(load, 4, 16, admission=ToCompletion)
    assert result.preemptions == result.recomputed_tokens == 0
    assert result.waiting_seconds.tolist() == [0.0, 5.0]


def test_a_step_may_be_planned_before_the_last_is_done() -> None:
    """Nothing is lost by it but a step of waiting for those who arrive meanwhile."""
    load = trace((0, 4, 6), (0.5, 4, 2))
    first, ahead = (run(load, 20, in_flight=depth) for depth in (0, 1))
    assert first.finished == ahead.finished == 2
    assert first.generated_tokens == ahead.generated_tokens == 8
    assert first.simulated_seconds == ahead.simulated_seconds == 6.0
    assert first.first_token_seconds.tolist() == [1.0, 1.5]
    assert ahead.first_token_seconds.tolist() == [1.0, 2.5]


@pytest.mark.parametrize(("acceptance", "steps"), [(1.0, 4), (0.0, 13)])
def test_accepted_drafts_save_steps(acceptance: float, steps: int) -> None:
    """13 tokens: one with the prompt, then four a step or one."""
    result = run(trace((0, 4, 13)), 20, draft_tokens=3, acceptance=acceptance)
    assert (result.finished, result.steps, result.generated_tokens) == (1, steps, 13)
    counters = figures(result).counters
    assert (counters.rejected_draft_tokens == 0) == (acceptance == 1.0)


def test_a_window_needs_fewer_blocks() -> None:
    load = trace((0, 4, 60))
    whole, sliding = run(load, 20), run(load, 20, window=8)
    assert whole.finished == sliding.finished == 1
    assert whole.peak_used == 16
    assert sliding.peak_used <= 5


def test_priorities_and_tenants_reach_the_scheduler() -> None:
    """One at a time: the more important of those that wait, or whoever has had less."""
    load = trace((0, 8, 4), (0.1, 8, 10), (0.1, 8, 4))
    load = replace(load, priorities=np.array([0, 0, 5]), tenants=np.array([1, 1, 2]))
    for order in (Priority, FairShare):
        result = replay(
            load, num_blocks=50, max_running=1, engine=EngineOptions(8, order=order),
            step_time=lambda *_: 1.0,
        )  # fmt: skip
        # In order of admission: the third and then the second, which runs for longer.
        assert result.waiting_seconds.tolist() == pytest.approx([0.0, 3.9, 7.9])
        assert figures(result).order == order.__name__
    sizes = trace((0, 8, 4), (0.1, 8, 40), (0.1, 8, 4))
    result = replay(
        sizes, num_blocks=50, max_running=1, engine=EngineOptions(8, order=ShortestJob),
        step_time=lambda *_: 1.0,
    )  # fmt: skip
    assert result.waiting_seconds.max() == pytest.approx(7.9)


def test_what_can_never_fit_or_outgrows_the_pool_is_rejected() -> None:
    result = run(trace((0, 17, 1), (0, 10, 100), (0, 5, 2)), 4, watermark_blocks=1)
    assert result.rejected == {Reason.NEVER_FITS: 1, Reason.OUTGREW_POOL: 1}
    assert (result.finished, result.finished_tokens) == (1, 2)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="swap needs host_blocks"):
        EngineOptions(8, swap=ResumeCost())
    with pytest.raises(ValueError, match=r"acceptance must be from 0 to 1, not 1\.5"):
        EngineOptions(8, acceptance=1.5)
    with pytest.raises(ValueError, match="token_budget is 8, too little for 9"):
        replay(trace((0, 4, 2)), num_blocks=9, max_running=9, engine=EngineOptions(8))


# ------------------------------------------------------------------ what must always hold


requests = st.lists(
    st.tuples(
        st.floats(0, 20).map(lambda second: round(second, 1)),
        st.integers(1, 30),
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=12,
).map(sorted)


@settings(max_examples=60)
@given(requests, st.data())
def test_every_request_ends_once_under_every_policy(
    rows: list[tuple[float, int, int]], data: Any
) -> None:
    load = with_classes(trace(*rows))
    # No draft, no step in flight: both are results that may be thrown away.
    result = run(
        load,
        data.draw(st.integers(12, 40)),
        data.draw(st.integers(1, 40)),
        order=ORDERS[data.draw(st.sampled_from(sorted(ORDERS)))],
        victim=victim_of(data.draw(st.sampled_from(VICTIMS)), ResumeCost(), swaps=False),
        admission=admission_of(data.draw(st.sampled_from(ADMISSIONS)), 1),
        max_partial_prefills=data.draw(st.integers(1, 4)),
    )
    assert result.finished == len(load)
    assert result.generated_tokens == result.finished_tokens == load.output_tokens.sum()
    assert work_adds_up(load, result)
    if figures(result).admission == "ToCompletion" and figures(result).order == "FCFS":
        assert figures(result).victim == "LowestPriority" or result.preemptions == 0
    assert len(result.first_token_seconds) == np.count_nonzero(load.output_tokens)


POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "to completion": {"admission": ToCompletion},
    "predicted peak": {"admission": PredictedPeak},
    "priority": {"order": Priority, "victim": LowestPriority},
    "cheapest": {"victim": victim_of("cheapest", ResumeCost(), swaps=False)},
    "fair": {"order": FairShare},
    "shortest": {"order": ShortestJob},
    "swap": {"host_blocks": 2_000},
    "cheapest to swap": {
        "host_blocks": 2_000,
        "swap": ResumeCost(),
        "victim": victim_of("cheapest", ResumeCost(), swaps=True),
    },
    "in flight": {"in_flight": 2},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_load_is_served_by_every_policy_and_the_same_every_time(policy: str) -> None:
    load = with_classes(synthetic_trace(250, rate=12.0))
    first, second = (
        replay(
            load,
            num_blocks=1_500,
            watermark_blocks=15,
            engine=EngineOptions(1_024, **POLICIES[policy]),
        )
        for _ in range(2)
    )
    assert first.finished == len(load)
    assert first.generated_tokens == load.output_tokens.sum()
    if policy != "in flight":
        assert work_adds_up(load, first)
    assert (first.preemptions == 0) == (policy == "to completion")
    measured = {"wall_seconds", "cpu_seconds", "manager_seconds", "drawing_seconds", "series"}
    for name, value in vars(first).items():
        if name == "engine":
            assert figures(first).counters.as_dict() == figures(second).counters.as_dict()
        elif name not in measured:
            np.testing.assert_array_equal(value, getattr(second, name))


# ------------------------------------------------------------------ the real files


@pytest.mark.parametrize(
    ("name", "limit", "num_blocks", "policy"),
    [
        (AZURE_CONV, 500, 1_500, "default"),
        (AZURE_CONV, 500, 1_500, "to completion"),
        (AZURE_CONV, 500, 1_500, "predicted peak"),
        (AZURE_CODE, 500, 1_500, "cheapest"),
        (AZURE_CODE, 500, 1_500, "swap"),
        (CONVERSATION, 60, 20_000, "default"),
        (CONVERSATION, 60, 20_000, "to completion"),
    ],
)
def test_the_real_files_are_served_to_completion(
    name: str, limit: int, num_blocks: int, policy: str
) -> None:
    """``replay`` itself checks every invariant, and for leaks, after the last request."""
    load = real_trace(name).head(limit)
    result = replay(
        load,
        num_blocks=num_blocks,
        watermark_blocks=15,
        engine=EngineOptions(2_048, **POLICIES[policy]),
    )
    assert result.finished == len(load)
    assert result.generated_tokens == load.output_tokens.sum()
    assert work_adds_up(load, result)
    if policy == "to completion":
        assert result.preemptions == 0


def test_the_prompts_of_a_trace_with_ids_share() -> None:
    load = trace((0, 9, 1), (5, 9, 1))
    load = replace(load, hash_ids=(np.array([1, 2, 3]), np.array([1, 2, 4])), hash_block_size=4)
    result = run(load, 10, 16)
    assert result.prefix_hits is not None
    assert result.prefix_hits.cached_tokens == 8
    assert result.prefill_tokens == 18 - 8
    assert result.finished == 2
