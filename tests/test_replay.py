"""The replay: hand-counted small loads, what must always hold, and the real files."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_traces import (
    AGENTIC,
    ARXIV,
    AZURE_CODE,
    AZURE_CONV,
    CONVERSATION,
    SHAREGPT,
    SYNTHETIC,
    real_trace,
)
from replay_support import trace

import kvcore.replay
import kvcore.replay_run
from kvcore import Counter, InvariantError, Reason, Scheduler, SegmentedLRU, Step
from kvcore.replay import PrefixHits, ReplayResult, replay
from kvcore.replay_run import ReplayRun
from kvcore.trace import Trace
from kvcore.waiting import WaitingQueue
from kvcore.workload import at_rate, synthetic_trace


def sharing(
    *requests: tuple[float, Sequence[int], int, int], n: int = 1, hash_block_size: int = 4
) -> Trace:
    """Requests of (arrival, ids, prompt, output)."""
    load = trace(*[(arrival, prompt, output) for arrival, _, prompt, output in requests], n=n)
    ids = tuple(np.array(ids, np.int64) for _, ids, _, _ in requests)
    return replace(load, hash_ids=ids, hash_block_size=hash_block_size)


def hits(result: ReplayResult) -> PrefixHits:
    assert result.prefix_hits is not None
    return result.prefix_hits


def one_second(prefill_tokens: int, sequences: int, context_tokens: int) -> float:
    return 1.0


def run(load: Trace, num_blocks: int, **options: Any) -> ReplayResult:
    settings: dict[str, Any] = {"block_size": 4, "watermark_blocks": 0, "step_time": one_second}
    return replay(load, num_blocks=num_blocks, **{**settings, **options})


def copies(result: ReplayResult) -> int:
    return int(result.counters[Counter.COW_COPIES])


# ------------------------------------------------------------------ counted by hand


def test_one_request_costs_a_step_for_each_token() -> None:
    result = run(trace((0, 3, 2)), 10)
    assert (result.finished, result.steps, result.generated_tokens) == (1, 2, 2)
    assert result.prefill_tokens == 3
    assert result.counters[Counter.TOKENS_APPENDED] == 2
    assert result.simulated_seconds == 2.0
    assert result.waiting_seconds.tolist() == [0.0]
    assert result.first_token_seconds.tolist() == [1.0]
    assert result.per_token_seconds.tolist() == [1.0]
    # 4 tokens in 1 block, then 5 in 2.
    assert (result.peak_used, result.mean_used) == (2, 1.5)
    assert (result.token_steps, result.logical_block_steps) == (9, 3)
    assert result.internal_fragmentation == 1 - 9 / 12
    assert result.sharing_ratio == 1.0


def test_idle_time_is_skipped_but_counts() -> None:
    result = run(trace((0, 4, 1), (100, 4, 1)), 10)
    assert result.steps == 2
    assert result.simulated_seconds == 101.0
    assert result.mean_used == 2 * 2 / 101
    assert result.first_token_seconds.tolist() == [1.0, 1.0]


def test_a_request_that_arrives_within_a_step_waits_for_the_next() -> None:
    result = run(trace((0, 4, 3), (0.25, 4, 1)), 10)
    assert result.waiting_seconds.tolist() == [0.0, 0.75]
    assert result.first_token_seconds.tolist() == [1.0, 1.75]


def test_the_newest_is_preempted_and_computes_its_tokens_again() -> None:
    """Both enter with 7 tokens in 2 of 4 blocks; the second yields when the first gets its
    ninth token, and returns with its 8 once the first is done after 5 steps."""
    result = run(trace((0, 7, 5), (0, 7, 5)), 4)
    assert result.finished == 2
    assert result.preemptions == 1
    assert result.recomputed_tokens == 8
    assert result.prefill_tokens == 7 + 7 + 8
    assert result.generated_tokens == 10
    assert result.steps == 5 + 4
    assert result.first_token_seconds.tolist() == [1.0, 1.0]
    assert result.waiting_seconds.tolist() == [0.0, 0.0]
    # Tokens after steps 1 and 5; after 1 and 9.
    assert sorted(result.per_token_seconds.tolist()) == [1.0, 2.0]


@pytest.mark.parametrize(("prompt", "expected"), [(5, 2), (6, 2), (7, 2), (8, 0)])
def test_samples_fork_after_the_prefill_and_all_but_one_copy_the_tail(
    prompt: int, expected: int
) -> None:
    result = run(trace((0, prompt, 3), n=3), 30)
    assert result.finished == 1
    assert result.prefill_tokens == prompt
    assert result.counters[Counter.SEQUENCES_FORKED] == 2
    assert result.generated_tokens == result.counters[Counter.TOKENS_APPENDED] == 9
    assert copies(result) == expected
    # The first sample decodes in steps 1 to 3, the others in 2 to 4.
    assert result.steps == 4
    assert result.first_token_seconds.tolist() == [1.0]
    assert result.per_token_seconds.tolist() == [1.0, 1.0, 1.0]
    assert result.sharing_ratio > 1.0
    assert result.series.shared.max() >= prompt // 4


def test_samples_of_one_token_fork_before_the_first_has_ended() -> None:
    result = run(trace((0, 6, 1), n=4), 30)
    assert (result.finished, result.steps, result.generated_tokens) == (1, 2, 4)
    assert copies(result) == 2


def test_each_request_may_have_its_own_number_of_samples() -> None:
    result = run(trace((0, 6, 2), (0, 6, 2), (0, 6, 2), n=(1, 3, 2)), 30)
    assert result.finished == 3
    assert result.counters[Counter.SEQUENCES_FORKED] == 3
    assert result.generated_tokens == 12


def test_a_preempted_sample_comes_back_on_its_own() -> None:
    result = run(trace((0, 6, 6), n=3), 6)
    assert result.preemptions > 0
    assert result.finished == 1
    assert result.generated_tokens == 18
    assert result.recomputed_tokens == result.prefill_tokens - 6 > 0


def test_a_sample_preempted_before_its_first_token_gets_it_after_it_came_back() -> None:
    """Of 2 blocks the prompt takes one and the first sample the other; the second enters
    when that has ended, in step 3."""
    result = run(trace((0, 4, 2), n=2), 2)
    assert (result.preemptions, result.recomputed_tokens, result.steps) == (1, 4, 4)
    assert result.per_token_seconds.tolist() == [1.0, 1.0]


def test_a_request_that_generates_nothing_gets_its_step_and_counts_no_token() -> None:
    result = run(trace((0, 5, 0), (0, 5, 2)), 30)
    assert (result.finished, result.steps) == (2, 2)
    assert result.generated_tokens == 2
    assert result.counters[Counter.TOKENS_APPENDED] == 3
    assert result.first_token_seconds.tolist() == [1.0]


def test_what_can_never_fit_is_rejected_and_the_rest_is_served() -> None:
    result = run(trace((0, 17, 1), (0, 12, 2), (0, 5, 2)), 4, watermark_blocks=1)
    assert result.rejected == {Reason.NEVER_FITS: 1}
    assert result.finished == 2
    assert result.generated_tokens == 4


def test_what_outgrows_the_pool_is_ended_and_the_rest_is_served() -> None:
    result = run(trace((0, 10, 100), (0, 5, 2)), 4)
    assert result.rejected == {Reason.OUTGREW_POOL: 1}
    assert result.finished == 1
    # It had filled the 16 slots of the pool.
    assert result.generated_tokens == 6 + 2


def test_a_request_with_one_sample_that_outgrows_the_pool_is_rejected_once() -> None:
    result = run(trace((0, 6, 20), (0, 6, 20), n=2), 5)
    assert result.rejected == {Reason.OUTGREW_POOL: 2}
    assert result.finished == 0


def test_a_prompt_that_fills_the_pool_outgrows_it_in_its_first_step() -> None:
    result = run(trace((0, 16, 1), (3, 4, 1)), 4)
    assert result.rejected == {Reason.OUTGREW_POOL: 1}
    assert result.finished == 1


def test_no_more_sequences_run_than_are_allowed() -> None:
    load = trace(*[(0, 4, 5)] * 6)
    assert run(load, 100).series.running.max() == 6
    assert run(load, 100, max_running=2).series.running.max() == 2


def test_the_watermark_keeps_admission_from_the_last_blocks() -> None:
    load = trace(*[(0, 4, 2)] * 4)
    assert run(load, 8).waiting_seconds.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert run(load, 8, watermark_blocks=6).waiting_seconds.tolist() == [0.0, 0.0, 2.0, 2.0]


# ------------------------------------------------------------------ shared prefixes


def test_a_prompt_that_was_there_is_computed_but_for_its_last_block() -> None:
    """Of 9 tokens in 3 blocks two are full. Both end with their only token."""
    calls: list[tuple[int, int, int]] = []

    def step_time(*call: int) -> float:
        calls.append((call[0], call[1], call[2]))
        return 1.0

    load = sharing((0, (1, 2, 3), 9, 1), (5, (1, 2, 3), 9, 1))
    result = run(load, 10, step_time=step_time)
    assert calls == [(9, 1, 10), (1, 1, 10)]
    assert result.prefill_tokens == 9 + 1
    assert result.finished == 2
    assert hits(result) == PrefixHits("LRU", 2, 18, 8, 4, 2, 0, 0, 0)
    assert hits(result).token_rate == 8 / 18
    assert hits(result).block_rate == 2 / 4
    # One at a time: shared with the cache, not with each other.
    assert result.sharing_ratio == 1.0
    assert not result.series.shared.any()


def test_two_that_run_at_once_hold_their_prefix_once() -> None:
    result = run(sharing((0, (1, 2, 3), 9, 5), (2, (1, 2, 4), 9, 5)), 10)
    assert hits(result).cached_blocks == 2
    assert result.series.shared.max() == 2
    # The first holds 3 blocks, and 4 from its fourth step on; the second as many, two
    # steps later, of which two are the first's as long as that lives.
    assert result.used_block_steps == 3 + 3 + (3 + 1) + (4 + 1) + (4 + 1) + 4 + 4
    assert result.logical_block_steps == 2 * (3 + 3 + 3 + 4 + 4)


def test_one_that_arrives_with_its_twin_waits_a_step_for_the_prefix() -> None:
    result = run(sharing((0, (1, 2, 3), 9, 1), (0, (1, 2, 3), 9, 1)), 10)
    assert result.waiting_seconds.tolist() == [0.0, 1.0]
    assert hits(result).cached_tokens == 8


def test_prompts_do_not_share_when_they_are_told_not_to() -> None:
    load = sharing((0, (1, 2, 3), 9, 1), (5, (1, 2, 3), 9, 1))
    result = run(load, 10, prefix_caching=False)
    assert result.prefix_hits is None
    assert result.prefill_tokens == 18


def test_prompts_without_ids_do_not_share() -> None:
    assert run(trace((0, 9, 1), (5, 9, 1)), 10).prefix_hits is None
    result = run(sharing((0, (), 9, 1), (5, (), 9, 1), (9, (1, 2, 3), 9, 1)), 10)
    assert hits(result) == PrefixHits("LRU", 1, 9, 0, 2, 0, 0, 0, 0)


def test_tokens_that_have_no_id_are_known_to_nobody() -> None:
    """8 of 15 tokens have ids: the third block is another's, whatever its length."""
    result = run(sharing((0, (1, 2), 15, 1), (5, (1, 2), 15, 1)), 10)
    assert hits(result) == PrefixHits("LRU", 2, 16, 8, 4, 2, 0, 0, 0)


def test_an_id_may_stand_for_more_or_fewer_tokens_than_a_block() -> None:
    long = sharing((0, (1, 2), 15, 1), (5, (1, 3), 15, 1), hash_block_size=8)
    assert hits(run(long, 10)).cached_tokens == 8
    short = sharing((0, (1, 2, 3, 4), 8, 1), (5, (1, 2, 3, 5), 8, 1), hash_block_size=2)
    assert hits(run(short, 10)).cached_tokens == 4


def test_what_was_generated_is_not_published() -> None:
    """The first ends with 12 tokens in three full blocks. One of them was its prompt's."""
    result = run(sharing((0, (1,), 4, 8), (20, (1, 2, 3), 12, 1)), 10)
    assert hits(result).cached_tokens == 4


def test_the_samples_of_a_prompt_are_one_prompt() -> None:
    load = sharing((0, (1, 2, 3), 9, 3), (9, (1, 2, 3), 9, 3), n=3)
    result = run(load, 30)
    assert result.finished == 2
    assert hits(result) == PrefixHits("LRU", 2, 18, 8, 4, 2, 0, 0, 0)


def test_what_a_preempted_sequence_finds_of_its_own_is_no_hit() -> None:
    """As without ids; but the block of its prompt is still there when it comes back."""
    result = run(sharing((0, (1, 2), 7, 5), (0, (3, 4), 7, 5)), 4)
    assert result.preemptions == 1
    # The third and fourth block go to the first, so one of the other's is left.
    assert hits(result).cached_tokens == 0
    assert hits(result).prompt_tokens == 14
    assert hits(result).resumed_tokens == 7
    assert hits(result).resumed_cached_tokens == 4
    assert result.recomputed_tokens == 8 - 4
    assert result.prefill_tokens == 7 + 7 + 8 - 4


def test_a_request_sent_away_in_its_first_step_is_looked_up_once() -> None:
    """It finds one block and takes the last one of the pool, which the first then needs."""
    result = run(sharing((0, (1, 2), 6, 6), (2, (1, 3), 6, 2)), 3)
    assert (result.preemptions, result.finished) == (1, 2)
    assert result.waiting_seconds.tolist() == [0.0, 4.0]
    assert hits(result) == PrefixHits("LRU", 2, 12, 4, 2, 1, 6, 4, 0)
    assert (result.prefill_tokens, result.recomputed_tokens) == (6 + 2, 0)
    assert result.logical_block_steps == (2 + 2 + 3 + 3 + 3 + 3) + (2 + 2)


def test_a_prompt_that_outgrows_the_pool_in_its_first_step_was_looked_up() -> None:
    result = run(sharing((0, (1, 2, 3, 4), 16, 1), (3, (1, 2, 3), 12, 1)), 4)
    assert result.rejected == {Reason.OUTGREW_POOL: 1}
    assert hits(result) == PrefixHits("LRU", 2, 28, 0, 7, 0, 0, 0, 0)


def test_a_pool_that_is_too_small_evicts() -> None:
    load = sharing((0, (1, 2), 8, 1), (5, (3, 4), 8, 1), (10, (1, 2), 8, 1))
    assert hits(run(load, 10)).evictions == 0
    assert hits(run(load, 10)).cached_tokens == 4
    small = run(load, 3)
    # The second prompt takes both blocks of the first, but for the one that was free.
    assert hits(small).evictions == 4
    assert hits(small).cached_tokens == 0


def test_the_policy_is_the_one_that_is_given() -> None:
    """Two prompts hit often, then scanned past by others, are still there under one only."""
    again = [(i, (1, 2, 9) if i else (3, 4, 5), 9, 1) for i in range(0, 8, 2)]
    scan = [(10 + i, (100 + i, 200 + i, 300 + i), 9, 1) for i in range(0, 8, 2)]
    load = sharing(*again, *scan, (30, (1, 2, 9), 9, 1))
    assert hits(run(load, 9)).cached_tokens == 16
    segmented = run(load, 9, eviction=SegmentedLRU(0.5))
    assert hits(segmented).cached_tokens == 24
    assert hits(segmented).eviction == "SegmentedLRU"


def test_few_bring_their_tokens_at_once_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = sharing(*[(0, (i % 3, i % 3 + 10, i % 3 + 100), 9 + 4 * (i == 5), 3) for i in range(20)])
    load = replace(load, hash_ids=tuple(ids[: -(-p // 4)] for ids, p in zip(
        load.hash_ids or (), load.prompt_tokens, strict=True)))  # fmt: skip
    longest: list[int] = []

    class Watched(Scheduler):
        def step(self) -> Step:
            longest.append(len(self.waiting))
            return super().step()

    monkeypatch.setattr(kvcore.replay, "Scheduler", Watched)
    many = run(load, 12)
    assert max(longest) == 20
    longest.clear()
    monkeypatch.setattr(ReplayRun, "most_queued", 6)
    few = run(load, 12)
    assert max(longest) == 6
    assert few.series.waiting.max() == many.series.waiting.max() > 6
    assert few.prefix_hits == many.prefix_hits
    np.testing.assert_array_equal(few.counters, many.counters)
    np.testing.assert_array_equal(few.waiting_seconds, many.waiting_seconds)


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_tokens_may_be_drawn_for_any_number_of_requests_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that end inside a block, before the last one, and after what their ids reach."""
    ids = [(1, 2, 3), (), (1, 2, 4), (1,), (2, 1), (1, 2, 3), (1, 2, 3)]
    lengths = [12, 5, 10, 3, 20, 9, 13]
    load = sharing(*[(i, *request, 2) for i, request in enumerate(zip(ids, lengths, strict=True))])
    monkeypatch.setattr(kvcore.replay_run, "DRAWN_AT_ONCE", at_once)
    result = run(load, 40)
    found = hits(result)
    # The third and the last two find two blocks, and the last one all three of its ids.
    assert found.cached_tokens == 8 + 8 + 12
    assert found.prompt_tokens == 12 + 10 + 3 + 8 + 9 + 12
    assert 0.0 < result.drawing_seconds < result.cpu_seconds
    assert run(load, 40, prefix_caching=False).drawing_seconds == 0.0


def test_refused_requests_do_not_stop_those_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayRun, "most_queued", 1)
    load = sharing(*[(0, range(10), 40, 1)] * 3, (0, (1,), 4, 1))
    result = run(load, 5)
    assert result.rejected == {Reason.NEVER_FITS: 3}
    assert result.finished == 1
    assert hits(result).prompts == 1


# ------------------------------------------------------------------ the clock


def test_the_step_time_sees_prefill_sequences_and_context_of_every_step() -> None:
    calls: list[tuple[int, int, int]] = []

    def step_time(*call: int) -> float:
        calls.append((call[0], call[1], call[2]))
        return 1.0

    run(trace((0, 7, 5), (0, 7, 5)), 4, step_time=step_time)
    assert calls == [
        (14, 2, 16), (0, 1, 9), (0, 1, 10), (0, 1, 11), (0, 1, 12),
        (8, 1, 9), (0, 1, 10), (0, 1, 11), (0, 1, 12),
    ]  # fmt: skip


def test_the_context_counts_what_each_sample_reads() -> None:
    calls: list[tuple[int, int, int]] = []

    def step_time(*call: int) -> float:
        calls.append((call[0], call[1], call[2]))
        return 0.5

    run(trace((0, 6, 2), n=3), 30, step_time=step_time)
    assert calls == [(6, 1, 7), (0, 3, 8 + 7 + 7), (0, 2, 8 + 8)]


def test_time_may_stand_still() -> None:
    result = run(trace((0, 4, 3), (5, 4, 3)), 10, step_time=lambda *_: 0.0)
    assert result.finished == 2
    assert result.simulated_seconds == 5.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_step_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"step_time returned {seconds}"):
        run(trace((0, 4, 3)), 10, step_time=lambda *_: seconds)


def test_lengths_alone_cannot_be_replayed() -> None:
    lengths = replace(trace((0, 4, 3)), arrivals=None)
    with pytest.raises(ValueError, match="'test' has lengths only"):
        run(lengths, 10)


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


@given(requests, st.integers(1, 3), st.integers(1, 40), st.integers(1, 9), st.data())
def test_every_request_ends_once_and_every_token_is_one_append(
    rows: list[tuple[float, int, int]], n: int, num_blocks: int, block_size: int, data: Any
) -> None:
    watermark = data.draw(st.integers(0, num_blocks - 1))
    load = trace(*rows, n=n)
    result = run(load, num_blocks, block_size=block_size, watermark_blocks=watermark)
    assert result.finished + sum(result.rejected.values()) == len(load)
    assert result.peak_used <= num_blocks
    assert result.mean_used <= result.peak_used
    counters = result.counters
    assert (
        counters[Counter.SEQUENCES_ALLOCATED] + counters[Counter.SEQUENCES_FORKED]
        == counters[Counter.SEQUENCES_FREED]
    )
    if result.rejected:
        return
    prompts = np.repeat(load.prompt_tokens, n)
    outputs = np.repeat(load.output_tokens, n)
    appends = np.maximum(outputs, 1)
    assert result.generated_tokens == outputs.sum()
    assert counters[Counter.TOKENS_APPENDED] == appends.sum()
    assert result.prefill_tokens == load.prompt_tokens.sum() + result.recomputed_tokens
    held = [p + t for p, o in zip(prompts, appends, strict=True) for t in range(1, int(o) + 1)]
    assert result.token_steps == sum(held)
    assert result.logical_block_steps == sum(-(-tokens // block_size) for tokens in held)
    assert result.used_block_steps <= result.logical_block_steps
    assert len(result.first_token_seconds) == np.count_nonzero(load.output_tokens)
    assert len(result.per_token_seconds) == np.count_nonzero(outputs > 1)


paths = st.lists(st.integers(0, 2), max_size=6)


@given(requests, st.lists(paths, min_size=12, max_size=12), st.integers(1, 3), st.data())
def test_sharing_changes_what_is_computed_and_not_what_is_generated(
    rows: list[tuple[float, int, int]], ids: list[list[int]], n: int, data: Any
) -> None:
    block_size, hash_block_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    num_blocks = data.draw(st.integers(2, 40))
    watermark = data.draw(st.integers(0, num_blocks - 1))
    load = replace(
        trace(*rows, n=n),
        hash_ids=tuple(
            np.array(path[: -(-prompt // hash_block_size)], np.int64)
            for path, (_, prompt, _) in zip(ids, rows, strict=False)
        ),
        hash_block_size=hash_block_size,
    )
    result = run(load, num_blocks, block_size=block_size, watermark_blocks=watermark)
    found = hits(result)
    known = [
        min(prompt, len(path) * hash_block_size)
        for path, (_, prompt, _) in zip(load.hash_ids or (), rows, strict=True)
    ]
    assert result.finished + sum(result.rejected.values()) == len(load)
    assert found.prompts <= sum(tokens > 0 for tokens in known)
    assert found.prompt_tokens <= sum(known)
    assert found.cached_tokens <= found.prompt_tokens
    assert found.cached_blocks <= found.prompt_blocks
    assert found.cached_blocks * block_size == found.cached_tokens
    assert found.resumed_cached_tokens <= found.resumed_tokens
    assert result.used_block_steps <= result.logical_block_steps
    if not result.preemptions:
        assert found.resumed_tokens == 0
    if result.rejected:
        return
    prompts, outputs = load.prompt_tokens, load.output_tokens
    appends = np.maximum(outputs, 1)
    assert result.generated_tokens == n * outputs.sum()
    assert found.prompts == sum(tokens > 0 for tokens in known)
    assert found.prompt_tokens == sum(known)
    assert found.prompt_blocks == sum(tokens // block_size for tokens in known)
    most = prompts.sum() + result.recomputed_tokens
    assert most - found.cached_tokens - found.resumed_cached_tokens <= result.prefill_tokens
    assert result.prefill_tokens <= most
    if not result.preemptions:
        assert result.prefill_tokens == most - found.cached_tokens
    held = [p + t for p, o in zip(prompts, appends, strict=True) for t in range(1, int(o) + 1)]
    assert result.token_steps == n * sum(held)
    assert result.logical_block_steps == n * sum(-(-tokens // block_size) for tokens in held)


def test_the_series_is_the_state_of_the_manager_over_time() -> None:
    result = replay(synthetic_trace(400), num_blocks=1_100, watermark_blocks=1)
    series = result.series
    assert result.preemptions > 0
    assert (np.diff(series.seconds) >= 0).all()
    assert series.seconds[0] == 0.0
    assert series.seconds[-1] == result.simulated_seconds
    assert series.preemptions[-1] == result.preemptions
    assert (np.diff(series.preemptions) >= 0).all()
    assert series.used[-1] == series.running[-1] == series.waiting[-1] == 0
    assert 0 < series.used.max() <= result.peak_used == 1_100
    # Without samples every block is in one table.
    np.testing.assert_array_equal(series.used, series.logical_blocks)
    assert not series.shared.any()
    assert (series.tokens <= series.logical_blocks * 16).all()
    held = np.append(np.diff(series.seconds), 0.0)
    assert (series.used * held).sum() / held.sum() == pytest.approx(result.mean_used, rel=0.05)


def test_the_series_shows_an_idle_pool_as_empty() -> None:
    series = run(trace((0, 4, 1), (100, 4, 1)), 10).series
    assert list(zip(series.seconds, series.used, strict=True)) == [
        (0, 2),
        (1, 0),
        (100, 2),
        (101, 0),
    ]


def test_the_series_thins_out_instead_of_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = trace(*[(0, 4, 200)] * 3)
    assert len(run(load, 1_000).series.seconds) > 150
    monkeypatch.setattr(kvcore.replay_run, "MOST_POINTS", 50)
    thin = run(load, 1_000).series
    assert 25 <= len(thin.seconds) <= 51
    assert thin.seconds[0] == 0.0
    assert thin.seconds[-1] == 200.0


def test_a_replay_is_the_same_every_time() -> None:
    first, second = (
        replay(synthetic_trace(300, seed=4), num_blocks=1_200, watermark_blocks=1) for _ in range(2)
    )
    measured = {"wall_seconds", "cpu_seconds", "manager_seconds", "drawing_seconds", "series"}
    for name, value in vars(first).items():
        if name not in measured:
            np.testing.assert_array_equal(value, getattr(second, name))
    for name, value in vars(first.series).items():
        np.testing.assert_array_equal(value, getattr(second.series, name))


def test_progress_is_told_up_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    replay(
        synthetic_trace(50),
        num_blocks=2_000,
        progress=lambda done, total: told.append((done, total)),
    )
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == (50, 50)


def test_a_leak_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaky(Scheduler):
        def finish(self, seq: Any) -> bool:
            self.running.remove(seq)
            return True

    monkeypatch.setattr(kvcore.replay, "Scheduler", Leaky)
    with pytest.raises(InvariantError, match="1 sequences, 2 blocks left"):
        run(trace((0, 6, 2)), 10)


def test_a_corrupted_manager_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Corrupting(Scheduler):
        def finish(self, seq: Any) -> bool:
            ended = super().finish(seq)
            ref = np.asarray(self.bm.ref)
            address, _ = ref.__array_interface__["data"]
            ctypes.c_int32.from_address(address).value = 7
            return ended

    monkeypatch.setattr(kvcore.replay, "Scheduler", Corrupting)
    with pytest.raises(InvariantError):
        run(trace((0, 6, 2)), 10)


def test_a_scheduler_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Scheduler):
        def step(self) -> Step:
            waiting, self.waiting = self.waiting, WaitingQueue()
            step = super().step()
            self.waiting = waiting
            return step

    monkeypatch.setattr(kvcore.replay, "Scheduler", Stuck)
    with pytest.raises(InvariantError, match="I8 broken: step 1 did nothing"):
        run(trace((0, 6, 2)), 10)


# ------------------------------------------------------------------ the real files


@pytest.mark.parametrize(
    ("name", "limit", "num_blocks", "n"),
    [
        (CONVERSATION, 800, 9_000, 1),
        (CONVERSATION, 300, 9_000, 2),
        (SYNTHETIC, 1_000, 12_100, 1),
        (AZURE_CODE, None, 1_000, 1),
        (AZURE_CODE, 2_000, 2_000, 4),
        (AZURE_CONV, 4_000, 1_000, 1),
        (AZURE_CONV, 1_000, 2_000, 6),
        (SHAREGPT, 1_000, 1_000, 1),
        (SHAREGPT, 300, 2_000, 2),
        (ARXIV, 1_000, 1_000, 1),
        (AGENTIC, 150, 9_000, 1),
    ],
)
def test_the_real_files_replay_to_completion_and_leave_nothing(
    name: str, limit: int | None, num_blocks: int, n: int
) -> None:
    """``replay`` itself checks every invariant, and for leaks, after the last request."""
    load = real_trace(name).head(limit or 10**9)
    if load.arrivals is None:
        load = at_rate(load, 8.0)
    load = replace(load, samples=np.full(len(load), n))
    result = replay(load, num_blocks=num_blocks, watermark_blocks=1)
    assert result.finished == len(load)
    assert result.generated_tokens == n * load.output_tokens.sum()
    computed = load.prompt_tokens.sum() + result.recomputed_tokens
    if result.prefix_hits is None:
        assert result.prefill_tokens == computed
    else:
        found = result.prefix_hits.cached_tokens + result.prefix_hits.resumed_cached_tokens
        assert computed - found <= result.prefill_tokens <= computed
        assert result.prefix_hits.prompts == len(load)
    assert (result.preemptions > 0) == (result.recomputed_tokens > 0)
    assert result.counters[Counter.SEQUENCES_FORKED] == (n - 1) * len(load)
    assert result.peak_used <= num_blocks
