"""What each admission policy keeps back, against stepping through the future one by one."""

from __future__ import annotations

import random
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from policy_support import running, view_of, waiting

from kvcore import BlockManager, RequestRefused, Scheduler
from kvcore.admission import PredictedPeak, ToCompletion, Watermark
from kvcore.peak import peak_blocks


def stepped(lengths: list[int], left: list[int], size: int) -> int:
    """The most blocks held, one step after the other."""
    most = 0
    for t in range(max(left) + 1):
        alive = [length for length, more in zip(lengths, left, strict=True) if t <= more]
        most = max(most, sum(-(-(length + t) // size) for length in alive))
    return most


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_is_that_of_stepping_through_the_future(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        n, size = rng.randint(1, 14), rng.choice([1, 2, 3, 4, 7, 16, 40])
        lengths = [rng.randint(0, 5 * size) for _ in range(n)]
        few = rng.choice([1, 3, 60])  # now and then many leave together
        left = [rng.choice([0, rng.randint(0, few)]) for _ in range(n)]
        found = peak_blocks(np.array(lengths), np.array(left), size)
        assert found == stepped(lengths, left, size), (lengths, left, size)


def test_the_peak_of_many_sequences_and_of_long_ones() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 900, 300)
    left = rng.integers(0, 700, 300)
    assert peak_blocks(lengths, left, 16) == stepped(lengths.tolist(), left.tolist(), 16)
    long = np.array([2**31 - 1000, 5])
    assert peak_blocks(long, np.array([999, 3]), 16) == 2**27


def test_the_watermark_is_the_same_for_everybody() -> None:
    bm = BlockManager(10, 4)
    view = view_of(bm, [running(bm, "a", 4, 4)])
    assert Watermark().reserve(waiting("b"), view) == 1
    assert Watermark(7).reserve(waiting("b"), view) == 7
    with pytest.raises(ValueError, match=r"blocks .* got -1"):
        Watermark(-1)


def test_to_completion_keeps_what_everybody_may_grow_by_rounded_up_for_each() -> None:
    bm = BlockManager(100, 4)
    a = running(bm, "a", 5, 7, max_tokens=10)  # ends with 14 tokens: 2 -> 4 blocks
    b = running(bm, "b", 8, 8, max_tokens=2)  # 9 tokens: 2 -> 3
    done = running(bm, "done", 8, 8, max_tokens=1)
    view = view_of(bm, [a, b, done])
    newcomer = waiting("c", 6, max_tokens=8)  # 13 tokens: 2 -> 4
    assert ToCompletion().reserve(newcomer, view) == 2 + 1 + 0 + 2
    # A group: 1 block shared, 3 more for each of 3; it enters with 2 + 2.
    group = waiting("c", 6, max_tokens=8, siblings=("x", "y"))
    assert ToCompletion().reserve(group, view_of(bm, [])) == 1 + 3 * 3 - 4


def test_to_completion_counts_tails_that_have_to_be_copied() -> None:
    bm = BlockManager(100, 4)
    group = running(bm, "a", 6, 6, max_tokens=2)  # 7 tokens: no block more
    for child in "bc":
        bm.fork("a", child)
        group.members.append(child)
    newcomer = waiting("x", 4, max_tokens=1)
    assert ToCompletion().reserve(newcomer, view_of(bm, [group])) == 2
    assert ToCompletion().reserve(newcomer, view_of(bm, [group], in_flight=1)) == 3


def test_to_completion_needs_to_know_how_long_everybody_is() -> None:
    bm = BlockManager(10, 4)
    with pytest.raises(ValueError, match="max_tokens of 'x' is None"):
        ToCompletion().reserve(waiting("x"), view_of(bm, []))
    unlimited = view_of(bm, [running(bm, "a", 4, 4)])
    assert ToCompletion().reserve(waiting("x", max_tokens=1), unlimited) == 10


def drive(scheduler: Scheduler, rng: random.Random, n_requests: int) -> None:
    """Random requests of up to 3 sequences, some ended early, until all is quiet."""
    outstanding: list[Any] = []
    for name in range(5_000):
        if name < n_requests:
            siblings = tuple(f"{name}.{i}" for i in range(rng.choice([0, 0, 1, 2])))
            n_tokens, most = rng.randint(1, 12), rng.randint(1, 9)
            bm = scheduler.bm
            if (1 + len(siblings)) * -(-(n_tokens + most) // bm.block_size) > bm.num_blocks:
                siblings = ()
            with suppress(RequestRefused):
                scheduler.add(name, n_tokens, max_tokens=most, siblings=siblings)
        step = scheduler.step()
        scheduler.bm.check()
        if not step.is_updated:
            outstanding.append(step)
        while len(outstanding) > scheduler.options.in_flight:
            step = outstanding.pop(0)
            ended: list[Hashable] = [seq for seq in step.sampled if rng.random() < 0.05]
            scheduler.update(step, finished=ended)
        if name >= n_requests and not (scheduler.running or scheduler.waiting or outstanding):
            return
        if name >= n_requests and not scheduler.running and outstanding:
            scheduler.update(outstanding.pop(0))
    raise AssertionError("it never came to rest")


@pytest.mark.parametrize("in_flight", [0, 2])
@pytest.mark.parametrize("window", [None, 5])
def test_to_completion_never_preempts(window: int | None, in_flight: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        scheduler = Scheduler(
            BlockManager(rng.randint(4, 24), rng.randint(1, 4)),
            token_budget=rng.randint(6, 30),
            window=window,
            in_flight=in_flight,
            admission=ToCompletion(),
        )
        drive(scheduler, rng, 12)
        assert scheduler.counters.preemptions_recompute == 0, seed
        assert scheduler.counters.finished > 0


def test_the_same_requests_are_preempted_where_only_a_watermark_is_kept() -> None:
    """Else the test above would say nothing."""
    preemptions = 0
    for seed in range(40):
        rng = random.Random(seed)
        bm = BlockManager(rng.randint(4, 24), rng.randint(1, 4))
        scheduler = Scheduler(bm, token_budget=rng.randint(6, 30))
        drive(scheduler, rng, 12)
        preemptions += scheduler.counters.preemptions_recompute
    assert preemptions > 20


def test_predicted_peak_by_hand() -> None:
    bm = BlockManager(100, 4)
    a = running(bm, "a", 4, 10, max_tokens=100)  # 6 of 10 generated: 4 to come
    view = view_of(bm, [a])
    newcomer = waiting("b", 4, max_tokens=100)  # 10 to come
    # Step 4: a has 14 tokens in 4 blocks, b 8 in 2. Step 10: b alone, 14 in 4. Now: 3 + 1.
    assert PredictedPeak(10).reserve(newcomer, view) == 4 + 2 - (3 + 1)
    brief = waiting("b", 4, max_tokens=3)  # it leaves with 6 tokens, when a has 12 in 3
    assert PredictedPeak(10).reserve(brief, view) == 3 + 2 - 4


def test_who_has_generated_more_than_expected_gets_a_tenth_more() -> None:
    bm = BlockManager(100, 1)
    a = running(bm, "a", 5, 45, max_tokens=1000)  # 40 generated, so 5 to come
    assert PredictedPeak(10).reserve(waiting("b", 1, max_tokens=1), view_of(bm, [a])) == 4


def test_a_prompt_that_all_share_is_counted_once() -> None:
    bm = BlockManager(200, 4)
    first = running(bm, "a", 400, 400, max_tokens=9)
    requests = [first]
    for name in "bcd":
        bm.fork("a", name)
        request = waiting(name, 400, max_tokens=9)
        request.members.append(name)
        requests.append(request)
    newcomer = waiting("x", 4, max_tokens=1)
    reserve = PredictedPeak(8).reserve(newcomer, view_of(bm, requests))
    assert reserve <= 2 * 4 + 1


def test_with_nothing_running_predicted_peak_keeps_nobody_out() -> None:
    bm = BlockManager(10, 4)
    assert PredictedPeak().reserve(waiting("a", 40), view_of(bm, [])) == 0


def test_the_mean_follows_what_ends_faster_at_first() -> None:
    policy = PredictedPeak(2048)
    policy.ended(waiting("a"), 100)
    assert policy.expected_tokens == 1074
    for _ in range(200):
        policy.ended(waiting("a"), 100)
    assert policy.expected_tokens == pytest.approx(100, abs=15)
    before = policy.expected_tokens
    policy.ended(waiting("a"), 1000)
    assert 0 < policy.expected_tokens - before < 50
    for _ in range(500):
        policy.ended(waiting("a"), 1)
    assert policy.expected_tokens == pytest.approx(64, abs=15)


def test_predicted_peak_is_preempted_less_than_the_watermark_and_never_hangs() -> None:
    counts = {}
    for name in ("watermark", "predicted"):
        counts[name] = 0
        for seed in range(40):
            rng = random.Random(seed)
            bm = BlockManager(rng.randint(4, 24), rng.randint(1, 4))
            admission = PredictedPeak(8) if name == "predicted" else None
            scheduler = Scheduler(bm, token_budget=rng.randint(6, 30), admission=admission)
            drive(scheduler, rng, 12)
            counts[name] += scheduler.counters.preemptions_recompute
    assert counts["predicted"] < counts["watermark"]


@pytest.mark.parametrize(
    ("lengths", "left", "size", "error", "said"),
    [
        (np.array([1.0]), np.array([1]), 4, TypeError, "lengths must be a contiguous int64 array"),
        (np.array([1]), np.array([[1]]), 4, TypeError, "left must be a contiguous int64 array"),
        (np.array([1, 2])[::-1], np.array([1, 2]), 4, TypeError, "lengths must be a contiguous"),
        (np.array([1, 2]), np.array([1]), 4, ValueError, "left has 1 entries for 2 lengths"),
        (np.array([1, -1]), np.array([1, 1]), 4, ValueError, "lengths: entry 1 .* got -1"),
        (np.array([1]), np.array([2**31]), 4, ValueError, "left: entry 0 .* got 2147483648"),
        (np.array([1]), np.array([1]), 0, ValueError, "block_size must be between 1 and"),
    ],
)
def test_what_has_no_peak_is_refused(
    lengths: Any, left: Any, size: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        peak_blocks(lengths, left, size)


def test_nobody_holds_nothing() -> None:
    assert peak_blocks(np.empty(0, np.int64), np.empty(0, np.int64), 16) == 0
