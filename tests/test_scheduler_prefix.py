"""Prefix sharing as the scheduler sees it: who enters with what, who waits for a prefix.

Blocks hold four tokens. An ``Engine`` stands for the caller: it runs what a step says and
commits what it computed, or leaves that out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from scenario_support import admitted, found_cached

from kvcore import (
    BlockManager,
    BlockPool,
    Counter,
    Media,
    Namespace,
    PrefixIndex,
    Reason,
    Request,
    RequestRefused,
    Resumed,
    Retention,
    RetentionPriority,
    Scheduler,
    Step,
)

SIZE = 4
END_OF_PROMPT = 1_000_000


def caching(num_blocks: int, **options: Any) -> BlockManager:
    return BlockManager(num_blocks, SIZE, prefix_caching=True, **options)


def colliding(num_blocks: int) -> BlockManager:
    """All hashes are equal, so that only the contents can tell blocks apart."""
    pool = BlockPool(num_blocks)
    PrefixIndex(pool, SIZE, hash_bits=0)
    return caching(num_blocks, pool=pool)


every_hash = pytest.mark.parametrize("manager", [caching, colliding])


def ids(n_tokens: int, first: int = 1) -> list[int]:
    return list(range(first, first + n_tokens))


class Engine:
    """Runs steps; by default everything that a step computes is committed after it."""

    def __init__(self, scheduler: Scheduler, *, commits: bool = True) -> None:
        self.scheduler = scheduler
        self.bm = scheduler.bm
        self.commits = commits
        self.tokens: dict[Hashable, list[int]] = {}
        self.steps: list[Step] = []

    def add(self, seq: Hashable, tokens: Sequence[int], **options: Any) -> None:
        self.scheduler.add(seq, tokens=tokens, **options)
        self.tokens[seq] = list(tokens)

    def step(self) -> Step:
        step = self.scheduler.step()
        self.steps.append(step)
        assert len(found_cached(step)) == len(admitted(step))
        for (_, n_tokens), cached in zip(admitted(step), found_cached(step), strict=True):
            assert 0 <= cached < max(n_tokens, 1)
        for seq in step:
            self.tokens[seq].append(END_OF_PROMPT + len(self.tokens[seq]))
            if self.commits:
                self.commit(seq)
        self.bm.check()
        return step

    def commit(self, seq: Hashable) -> int:
        known = self.bm.known(seq)
        return self.bm.commit(seq, self.tokens[seq][known:])

    def drain(self, n_generated: int, limit: int = 1_000) -> list[Step]:
        """Step until each request has generated so many tokens and is gone."""
        targets = {seq: len(tokens) + n_generated for seq, tokens in self.tokens.items()}
        for _ in range(limit):
            if not (self.scheduler.waiting or self.scheduler.running):
                return self.steps
            step = self.step()
            assert step, "nobody advanced"
            assert step.rejected == {}
            for seq in step:
                if len(self.tokens[seq]) >= targets[seq]:
                    assert self.scheduler.finish(seq)
        raise AssertionError(f"still at work after {limit} steps")


def engine(
    num_blocks: int, watermark_blocks: int = 0, *, commits: bool = True, **options: Any
) -> Engine:
    return Engine(Scheduler(caching(num_blocks), watermark_blocks, **options), commits=commits)


def served(run: Engine, tokens: Sequence[int], **options: Any) -> None:
    """Have a request's full blocks cached and idle."""
    run.add("earlier", tokens, **options)
    run.step()
    assert run.scheduler.finish("earlier")
    run.steps.clear()


def traffic(bm: BlockManager) -> dict[str, int]:
    """What the four counters of hits say."""
    return {
        "prompt": int(bm.counters[Counter.PROMPT_TOKENS]),
        "cached": int(bm.counters[Counter.CACHED_TOKENS]),
        "resumed": int(bm.counters[Counter.RESUMED_TOKENS]),
        "resumed cached": int(bm.counters[Counter.RESUMED_CACHED_TOKENS]),
    }


def hits(steps: Iterable[Step]) -> dict[Hashable, list[int]]:
    """The cached tokens of each admission of each sequence."""
    found: dict[Hashable, list[int]] = {}
    for step in steps:
        for (seq, _), cached in zip(admitted(step), found_cached(step), strict=True):
            found.setdefault(seq, []).append(cached)
    return found


# ------------------------------------------------------------------ the queue


def test_a_request_is_the_plain_pair_with_its_hashed_prompt() -> None:
    bm = caching(8)
    scheduler = Scheduler(bm)
    scheduler.add("a", tokens=ids(5))
    scheduler.add("b", 9, tokens=ids(5))
    scheduler.add("c", 3)
    assert list(scheduler.waiting) == [("a", 5), ("b", 9), ("c", 3)]
    a, b, c = scheduler.waiting
    assert isinstance(a, Request)
    assert isinstance(b, Request)
    assert c.prompt is None
    assert a.prompt is not None
    assert a.prompt.tokens.tolist() == ids(5)
    assert b.prompt is not None
    assert len(b.prompt) == 5
    assert a.prompt.common_blocks(b.prompt) == 1


def test_a_prompt_made_by_the_caller_is_kept_as_it_is() -> None:
    bm = caching(8)
    scheduler = Scheduler(bm)
    prompt = bm.prompt(ids(9), namespace="tenant")
    scheduler.add("a", tokens=prompt)
    scheduler.add("b", tokens=prompt)
    for request in scheduler.waiting:
        assert isinstance(request, Request)
        assert request.prompt is prompt
    with pytest.raises(ValueError, match="namespace"):
        scheduler.add("c", tokens=prompt, namespace="another")
    assert len(scheduler.waiting) == 2


def test_the_tokens_are_those_of_the_call() -> None:
    """An array that its owner fills anew while the request waits changes nothing."""
    run = engine(8)
    served(run, ids(9))
    tokens = np.arange(1, 10, dtype=np.int32)
    run.scheduler.add("a", tokens=tokens)
    tokens[:] = 7
    assert found_cached(run.scheduler.step()) == [8]
    assert run.bm.tokens("a").tolist() == ids(9)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"tokens": []}),
        (ValueError, {"tokens": ids(4), "n_tokens": 3}),
        (ValueError, {"tokens": ids(4), "n_tokens": -1}),
        (ValueError, {"tokens": [1, -2, 3]}),
        (TypeError, {"tokens": 7}),
        (TypeError, {"tokens": [1, 2.5]}),
        (TypeError, {"tokens": ids(4), "n_tokens": 4.0}),
        (TypeError, {}),
        (ValueError, {"tokens": ids(4), "media": [Media(2, 5, b"picture")]}),
        (TypeError, {"tokens": ids(4), "namespace": 7}),
        (ValueError, {"n_tokens": 4, "media": [Media(0, 2, b"picture")]}),
        (ValueError, {"tokens": ids(4), "retention": [Retention(0, None, 101)]}),
        (ValueError, {"n_tokens": 4, "retention": [Retention(2, 1, 50)]}),
        (TypeError, {"n_tokens": 4, "retention": 7}),
        (RequestRefused, {"tokens": ids(29)}),
    ],
)
def test_a_wrong_request_is_refused_and_the_queue_stays(
    error: type[Exception], arguments: dict[str, Any]
) -> None:
    bm = caching(8, eviction=RetentionPriority())
    scheduler = Scheduler(bm)
    with pytest.raises(error):
        scheduler.add("a", **arguments)
    assert list(scheduler.waiting) == []


def test_without_prefix_caching_tokens_are_only_counted() -> None:
    bm = BlockManager(8, SIZE)
    scheduler = Scheduler(bm)
    scheduler.add("a", tokens=ids(9), namespace=Namespace(salt="x"))
    scheduler.add("b", 10, tokens=np.arange(9))
    assert [request.prompt for request in scheduler.waiting] == [None, None]
    assert list(scheduler.waiting) == [("a", 9), ("b", 10)]
    step = scheduler.step()
    assert step == ["a", "b"]
    assert admitted(step) == [("a", 9), ("b", 10)]
    assert found_cached(step) == [0, 0]
    assert traffic(bm) == {"prompt": 0, "cached": 0, "resumed": 0, "resumed cached": 0}


def test_a_plain_pair_neither_hits_nor_waits() -> None:
    run = engine(16)
    served(run, ids(9))
    run.add("a", ids(13))
    run.scheduler.waiting.append(("b", 9))
    run.tokens["b"] = ids(9)
    step = run.step()
    assert admitted(step) == [("a", 13), ("b", 9)]
    assert found_cached(step) == [8, 0]


def test_a_request_without_tokens_keeps_its_namespace() -> None:
    """What it computes is found in its namespace, also after a preemption."""
    bm = caching(4)
    scheduler = Scheduler(bm, 0)
    scheduler.add("older", 1)
    scheduler.add("a", 4, namespace="tenant")
    step = scheduler.step()
    assert found_cached(step) == [0, 0]
    bm.commit("a", ids(5))
    bm.append_slots("a", 3)
    bm.commit("a", ids(3, 6))
    outsider = bm.pool.take_many(1)
    assert scheduler.step().preempted == ["a"]
    bm.pool.release_many(outsider)
    step = scheduler.step()
    assert admitted(step) == [("a", 8)]
    assert found_cached(step) == [4]
    assert bm.match(ids(9), namespace="tenant") == 4
    assert bm.match(ids(9)) == 0


# ------------------------------------------------------------------ admission


def test_hits_are_counted_when_a_request_enters() -> None:
    run = engine(16)
    served(run, ids(11))
    before = traffic(run.bm)
    run.add("a", [*ids(10), 77, 78, 79])
    run.add("b", ids(4))
    assert traffic(run.bm) == before
    step = run.step()
    assert admitted(step) == [("a", 13), ("b", 4)]
    assert found_cached(step) == [8, 0]
    assert traffic(run.bm) == before | {"prompt": before["prompt"] + 17, "cached": 8}


def test_K4_10_an_idle_hit_is_capacity_once() -> None:
    """Three blocks, one of them cached and idle: the prompt may have three, not four."""
    run = engine(3)
    served(run, ids(4))
    run.scheduler.add("fits", tokens=ids(11))
    assert run.scheduler.why("fits")[:4] == (Reason.FITS, 2, 2, 0)
    step = run.scheduler.step()
    assert admitted(step) == [("fits", 11)]
    assert found_cached(step) == [4]
    assert run.bm.num_available == 0
    with pytest.raises(RequestRefused):
        run.scheduler.add("too long", tokens=ids(13))


@pytest.mark.parametrize("watermark", [0, 1, 2])
def test_an_idle_hit_is_not_counted_under_the_watermark_either(watermark: int) -> None:
    """Six blocks, two idle hits, and a prompt of four: it leaves two, whatever it shares."""
    run = engine(6, watermark)
    served(run, ids(8))
    outsiders = run.bm.pool.take_many(1)
    run.scheduler.add("a", tokens=ids(15))
    assert run.bm.num_available == 5
    verdict = run.scheduler.why("a")
    assert verdict[:4] == (Reason.FITS if watermark < 2 else Reason.WATERMARK, 2, 3, 0)
    step = run.scheduler.step()
    assert bool(step) == (watermark < 2)
    run.bm.pool.release_many(outsiders)
    assert step or found_cached(run.scheduler.step()) == [8]


def test_shared_blocks_let_in_what_would_not_fit_alone() -> None:
    run = engine(6)
    run.add("a", ids(14))
    run.step()
    assert run.bm.num_available == 2
    run.add("b", [*ids(12), 50, 51])
    run.scheduler.waiting.append(("same without tokens", 14))
    step = run.step()
    assert admitted(step) == [("b", 14)]
    assert found_cached(step) == [12]
    verdict = run.scheduler.why("same without tokens")
    assert (verdict.reason, verdict.needed) == (Reason.BLOCKS, 4)


def test_the_numbers_of_a_taken_id_count_what_is_cached() -> None:
    """The request would fit uncached, so that admission alone would not look it up."""
    run = engine(8)
    served(run, ids(14))
    run.scheduler.add("a", tokens=ids(14))
    run.bm.allocate("a", 1)
    assert run.scheduler.why("a")[:4] == (Reason.LIVE_ID, 1, 4, 0)
    assert run.step().rejected["a"][:4] == (Reason.LIVE_ID, 1, 4, 0)


def test_whether_it_can_ever_fit_does_not_depend_on_the_cache() -> None:
    """The cached part may be gone by the time the request is at the head."""
    run = engine(6, 1)
    served(run, ids(16))
    with pytest.raises(RequestRefused, match="needs 6 blocks and can have 5"):
        run.scheduler.add("a", tokens=ids(21))
    run.scheduler.waiting.append(Request("a", 21, run.bm.prompt(ids(21))))
    assert run.step().rejected["a"][:4] == (Reason.NEVER_FITS, 6, 5, 0)
    run.add("b", ids(20))
    assert found_cached(run.step()) == [16]


def test_K4_14_what_was_found_in_one_step_is_not_remembered_in_the_next() -> None:
    run = engine(6, 1)
    served(run, ids(8))
    held = run.bm.pool.take_many(3)
    run.add("a", ids(13))
    assert run.scheduler.why("a")[:4] == (Reason.BLOCKS, 2, 1, 0)
    assert run.step() == []
    assert run.bm.evict(2) == 2
    assert run.scheduler.why("a")[:4] == (Reason.BLOCKS, 4, 3, 0)
    assert run.step() == []
    run.bm.pool.release_many(held)
    step = run.step()
    assert admitted(step) == [("a", 13)]
    assert found_cached(step) == [0]


# ------------------------------------------------------------------ waiting for a prefix


@pytest.mark.parametrize("commits", [True, False])
def test_identical_prompts_wait_one_step_each_at_most(commits: bool) -> None:
    """The first computes, the others let that one step pass; what they find then depends
    on the commits, whether they enter does not."""
    run = engine(64, commits=commits)
    names = [f"request {number}" for number in range(8)]
    for name in names:
        run.add(name, ids(14))
    assert run.step() == names[:1]
    assert list(run.scheduler.waiting) == [(name, 14) for name in names[1:]]
    if commits:
        step = run.step()
        assert step == names
        assert found_cached(step) == [12] * 7
        return
    # Nobody publishes: whoever is next is put off once by the one before, and then enters.
    for count in range(2, 9):
        assert run.step() == names[:count]
    assert hits(run.steps) == {name: [0] for name in names}


def test_K4_08_what_is_only_scheduled_is_no_hit() -> None:
    """Either it waits one step and hits, or it enters now and hits nothing."""
    first, second = [*ids(12), 50], [*ids(12), 60]
    for wait, expected in ((True, [12]), (False, [0])):
        run = engine(16, wait_for_prefix=wait)
        run.add("r1", first)
        run.add("r2", second)
        assert admitted(run.step())[1:] == ([] if wait else [("r2", 13)])
        run.step()
        assert hits(run.steps)["r2"] == expected


def test_without_the_option_identical_prompts_enter_together() -> None:
    run = engine(64, wait_for_prefix=False)
    for name in "abc":
        run.add(name, ids(14))
    step = run.step()
    assert step == ["a", "b", "c"]
    assert found_cached(step) == [0, 0, 0]


@every_hash
@pytest.mark.parametrize(
    ("other", "waits"),
    [
        ({"tokens": ids(5)}, True),
        ({"tokens": ids(8)}, True),
        ({"tokens": [*ids(4), 99]}, True),
        ({"tokens": ids(4), "n_tokens": 5}, True),
        # Its only block is its last one, which it computes in any case.
        ({"tokens": ids(4)}, False),
        ({"tokens": ids(3)}, False),
        ({"tokens": ids(3), "n_tokens": 9}, False),
        ({"tokens": [1, 2, 3, 99, 5, 6, 7, 8, 9]}, False),
        ({"tokens": ids(9), "namespace": "another"}, False),
        ({"tokens": ids(9), "media": [Media(0, 2, b"picture")]}, False),
        ({"tokens": ids(9), "media": [Media(5, 6, b"picture")]}, True),
        ({"n_tokens": 9}, False),
    ],
)
def test_it_waits_only_if_that_saves_a_block(
    manager: Callable[[int], BlockManager], other: dict[str, Any], waits: bool
) -> None:
    scheduler = Scheduler(manager(16))
    scheduler.add("a", tokens=ids(9))
    scheduler.add("b", **other)
    assert scheduler.step() == (["a"] if waits else ["a", "b"])
    assert scheduler.step() == ["a", "b"]


def test_what_is_cached_is_not_waited_for() -> None:
    """Both share eight cached tokens and go on apart."""
    run = engine(16)
    served(run, ids(8))
    run.add("a", [*ids(8), *ids(9, 100)])
    run.add("b", [*ids(8), *ids(9, 200)])
    step = run.step()
    assert step == ["a", "b"]
    assert found_cached(step) == [8, 8]


def test_it_waits_for_the_block_after_the_cached_ones() -> None:
    run = engine(16)
    served(run, ids(8))
    run.add("a", [*ids(8), *ids(9, 100)])
    run.add("b", [*ids(8), *ids(5, 100), *ids(4, 200)])
    assert run.step() == ["a"]
    step = run.step()
    assert admitted(step) == [("b", 17)]
    assert found_cached(step) == [12]


def test_it_does_not_wait_for_one_that_computes_only_what_both_must_compute() -> None:
    """The whole prompt is cached, so that both compute the last block alone."""
    run = engine(16)
    served(run, ids(8))
    run.add("a", ids(8))
    run.add("b", ids(8))
    assert found_cached(run.step()) == [4, 4]


@every_hash
def test_it_waits_for_any_of_those_who_entered(manager: Callable[[int], BlockManager]) -> None:
    """They begin with the same tokens in different namespaces."""
    run = Engine(Scheduler(manager(32), 0))
    for name, namespace in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "y")):
        run.add(name, ids(9), namespace=namespace)
    assert run.step() == ["a", "b", "c"]
    assert found_cached(run.step()) == [8]


def test_while_the_head_waits_the_others_decode_and_those_behind_wait_too() -> None:
    run = engine(32)
    run.add("runs", ids(3, 500))
    run.step()
    run.add("a", ids(9))
    run.add("b", ids(9))
    run.add("c", ids(3, 700))
    step = run.step()
    assert step == ["runs", "a"]
    assert step.preempted == []
    assert step.rejected == {}
    assert run.scheduler.why("b")[:4] == (Reason.PREFIX, 1, run.bm.num_available, 0)
    assert run.scheduler.why("c")[:4] == (Reason.BEHIND, 1, run.bm.num_available, 1)
    step = run.step()
    assert step == ["runs", "a", "b", "c"]
    assert found_cached(step) == [8, 0]


def test_it_waits_once_however_long_it_stays_in_the_queue() -> None:
    """Put off once and then short of blocks, it does not let another step pass."""
    run = engine(8, 0, commits=False)
    run.add("a", ids(9))
    run.add("b", ids(9))
    assert run.step() == ["a"]
    held = run.bm.pool.take_many(3)
    assert run.step() == ["a"]
    assert run.scheduler.why("b").reason is Reason.BLOCKS
    run.bm.pool.release_many(held)
    assert run.scheduler.why("b").reason is Reason.PREFIX
    run.scheduler.finish("a")
    # One before it in the queue that computes the same: had it not waited, it would now.
    run.scheduler.waiting.appendleft(Request("before", 9, run.bm.prompt(ids(9))))
    run.tokens["before"] = ids(9)
    assert run.step() == ["before", "b"]


def test_why_says_what_the_head_waited_for() -> None:
    run = engine(16)
    run.add("a", ids(9))
    run.add("b", ids(9))
    assert run.scheduler.why("a")[:4] == (Reason.FITS, 3, 16, 0)
    assert run.scheduler.why("b")[:4] == (Reason.BEHIND, 3, 16, 1)
    run.step()
    assert run.scheduler.why("b").reason is Reason.PREFIX
    assert "share" in Reason.PREFIX.value
    run.step()
    with pytest.raises(KeyError):
        run.scheduler.why("b")


@pytest.mark.parametrize("verb", ["finish", "abort"])
def test_one_that_was_put_off_can_be_ended(verb: str) -> None:
    run = engine(16)
    for name in "abc":
        run.add(name, ids(9))
    run.step()
    assert getattr(run.scheduler, verb)("b")
    assert not getattr(run.scheduler, verb)("b")
    step = run.step()
    assert admitted(step) == [("c", 9)]
    assert found_cached(step) == [8]
    assert traffic(run.bm)["prompt"] == 18


def test_the_one_whose_prefix_it_waits_for_may_end_first() -> None:
    """Uncommitted or committed, nothing holds the one that waited any longer."""
    for commits, cached in ((False, 0), (True, 8)):
        run = engine(16, commits=commits)
        run.add("a", ids(9))
        run.add("b", ids(9))
        run.step()
        assert run.scheduler.finish("a")
        assert found_cached(run.step()) == [cached]


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("num_blocks", [5, 6, 9, 40])
def test_I8_everything_ends_whether_anybody_commits_or_not(
    num_blocks: int, wait: bool, commits: bool
) -> None:
    """In a pool that holds one of them, two, or all: identical, nested and other prompts."""
    run = engine(num_blocks, 1, commits=commits, wait_for_prefix=wait)
    for number in range(12):
        run.add(number, [*ids(4 + number % 3 * 4), *ids(number % 4, 100 * number)])
    run.drain(5)
    assert run.bm.pool.num_used == 0
    assert sum(len(found) for found in hits(run.steps).values()) >= 12
    run.bm.check()


def test_a_step_in_which_the_head_waits_has_admitted_somebody() -> None:
    """Also the step that takes the blocks of the one it admitted back at once."""
    run = engine(4, commits=False)
    run.add("runs", ids(7, 500))
    run.step()
    run.add("a", ids(8))
    run.add("b", ids(8))
    step = run.step()
    assert step == ["runs"]
    assert step.preempted == ["a"]
    assert (admitted(step), found_cached(step)) == ([], [])
    assert list(run.scheduler.waiting) == [("a", 8), ("b", 8)]
    assert run.scheduler.finish("runs")
    step = run.step()
    assert admitted(step) == [("a", 8)], "one of them fits"


# ------------------------------------------------------------------ preemption


def yields(scheduler: Scheduler, seq: Hashable) -> None:
    """Let it yield by itself: in a step there would have to be an older one, and a shortage."""
    step = Step()
    scheduler._preemption._preempt(step, scheduler._roster.by_seq[seq], 0)
    assert step.preempted == [seq]


def preempted(run: Engine, tokens: Sequence[int], **options: Any) -> None:
    """Let "a" run with these tokens, and be preempted after some steps."""
    run.add("a", tokens, **options)
    while len(run.tokens["a"]) % SIZE:
        run.step()
    yields(run.scheduler, "a")


def test_K6_05_a_resume_finds_its_own_blocks_and_is_counted_apart() -> None:
    run = engine(8)
    preempted(run, ids(9))
    before = traffic(run.bm)
    assert before == {"prompt": 9, "cached": 0, "resumed": 0, "resumed cached": 0}
    (request,) = run.scheduler.waiting
    assert isinstance(request, Resumed)
    assert request == ("a", 12)
    assert request.prompt is not None
    assert request.prompt.tokens.tolist() == run.tokens["a"]
    step = run.step()
    assert admitted(step) == [("a", 12)]
    assert found_cached(step) == [8], "the third block holds the last token, which is computed"
    assert traffic(run.bm) == before | {"resumed": 12, "resumed cached": 8}


def test_K6_08_what_was_cached_is_looked_up_again_after_a_preemption() -> None:
    run = engine(8)
    preempted(run, ids(9))
    run.bm.evict(8)
    step = run.step()
    assert admitted(step) == [("a", 12)]
    assert found_cached(step) == [0]
    assert traffic(run.bm)["resumed cached"] == 0


def test_a_resume_computes_its_uncommitted_tail() -> None:
    """Its length counts tokens that nobody committed: they get slots but no hit."""
    run = engine(8)
    run.add("a", ids(9))
    run.step()
    run.commits = False
    run.step()
    run.step()
    assert run.bm.length("a") == 12
    assert run.bm.known("a") == 10
    yields(run.scheduler, "a")
    (request,) = run.scheduler.waiting
    assert isinstance(request, Resumed)
    assert request == ("a", 12)
    assert request.prompt is not None
    assert len(request.prompt) == 10
    step = run.step()
    assert admitted(step) == [("a", 12)]
    assert found_cached(step) == [8]
    assert run.bm.known("a") == 10
    assert run.commit("a") == 1, "the third block, now that its tokens are known"
    assert run.bm.tokens("a").tolist() == run.tokens["a"]


def test_a_resume_on_a_block_boundary_needs_room_for_its_next_token() -> None:
    """Three full blocks, all of them cached, two of them hits: it computes the third anew
    and its next token begins a fourth."""
    run = engine(8)
    preempted(run, ids(9))
    assert (run.bm.pool.num_free, run.bm.pool.num_evictable) == (5, 3)
    held = run.bm.pool.take_many(5)
    assert run.scheduler.why("a")[:4] == (Reason.BLOCKS, 2, 1, 0)
    assert run.step() == []
    run.bm.pool.release_many(held[:1])
    assert run.scheduler.why("a")[:4] == (Reason.FITS, 2, 2, 0)
    step = run.step()
    assert step == ["a"]
    assert found_cached(step) == [8]
    assert step.preempted == []


def test_a_preempted_child_of_a_fork_finds_the_blocks_of_the_family() -> None:
    run = engine(8)
    run.add("a", ids(11))
    run.step()
    run.scheduler.fork("a", "b")
    run.tokens["b"] = [*run.tokens["a"]]
    step = run.step()
    held = run.bm.pool.take_many(run.bm.pool.num_free)
    while not step.preempted:
        step = run.step()
    assert step.preempted == ["b"]
    run.bm.pool.release_many(held)
    step = run.step()
    assert admitted(step) == [("b", 16)]
    assert found_cached(step) == [12]
    assert run.bm.tables["b"].tolist()[:3] == run.bm.tables["a"].tolist()[:3]


def test_two_that_come_back_together_compute_what_they_share_once() -> None:
    """Nobody had committed it, so nothing is cached when both return."""
    run = engine(12, commits=False)
    run.add("older", ids(1, 900))
    run.step()
    run.add("a", ids(7))
    run.add("b", ids(7))
    assert run.step() == ["older", "a"]
    assert run.step() == ["older", "a", "b"]
    held: list[int] = []
    while run.scheduler.running != ["older"]:
        held += run.bm.pool.take_many(run.bm.pool.num_free).tolist()
        run.scheduler.step()
    run.bm.pool.release_many(held)
    run.scheduler.finish("older")
    assert [isinstance(request, Resumed) for request in run.scheduler.waiting] == [True, True]
    run.commits = True
    assert run.step() == ["a"]
    step = run.step()
    assert step == ["a", "b"]
    assert found_cached(step) == [4]


def test_what_entered_and_yielded_in_one_step_leaves_no_trace() -> None:
    run = engine(5)
    served(run, ids(4))
    run.add("runs", ids(7, 500))
    run.step()
    run.add("a", ids(12))
    assert run.scheduler.why("a")[:4] == (Reason.FITS, 2, 2, 0)
    before = traffic(run.bm)
    step = run.step()
    assert step == ["runs"]
    assert (admitted(step), found_cached(step), step.preempted) == ([], [], ["a"])
    assert len(step.slots) == 1
    # It has entered once as a user's request; coming back is no second one.
    assert traffic(run.bm) == before | {"prompt": before["prompt"] + 12, "cached": 4}
    run.scheduler.finish("runs")
    run.step()
    after = traffic(run.bm)
    assert after["prompt"] == before["prompt"] + 12
    assert after["resumed"] == 12


def test_retries_are_not_counted() -> None:
    run = engine(5)
    served(run, ids(8))
    held = run.bm.pool.take_many(3)
    before = traffic(run.bm)
    shortages = int(run.bm.counters[Counter.OUT_OF_BLOCKS])
    run.add("a", ids(15))
    for _ in range(10):
        run.scheduler.why("a")
        assert run.step() == []
    assert traffic(run.bm) == before
    assert run.bm.counters[Counter.OUT_OF_BLOCKS] == shortages
    run.bm.pool.release_many(held)
    run.step()
    assert traffic(run.bm) == before | {"prompt": before["prompt"] + 15, "cached": 8}


@pytest.mark.parametrize("prompt", [{"tokens": ids(9)}, {"n_tokens": 9}])
def test_retention_goes_with_a_request_and_comes_back_with_it(prompt: dict[str, Any]) -> None:
    bm = caching(16, eviction=RetentionPriority())
    scheduler = Scheduler(bm, 0)
    ranges = (Retention(0, 4, 90), Retention(4, None, 10, 2.5))
    given = list(ranges)
    scheduler.add("a", **prompt, retention=given)
    given.clear()
    scheduler.waiting.appendleft(("older", 1))
    scheduler.add("b", **prompt)
    scheduler.step()
    step = scheduler.step()
    assert bm.retention("a") == ranges
    assert bm.retention("b") == ()
    held = bm.pool.take_many(bm.pool.num_free)
    while not step.preempted:
        step = scheduler.step()
    bm.pool.release_many(held)
    while scheduler.running != ["older"]:
        held = bm.pool.take_many(bm.pool.num_free)
        scheduler.step()
        bm.pool.release_many(held)
    scheduler.step()
    scheduler.step()
    assert scheduler.running == ["older", "a", "b"]
    assert bm.retention("a") == ranges
    assert bm.retention("b") == ()


# ------------------------------------------------------------------ reset and epochs


@pytest.mark.parametrize("how", ["reset", "set_epoch", "forget"])
def test_a_waiting_request_finds_nothing_that_was_dropped_meanwhile(how: str) -> None:
    run = engine(16, 1)
    served(run, ids(12))
    run.add("a", ids(13))
    assert run.scheduler.why("a").needed == 1
    if how == "reset":
        run.bm.reset()
    elif how == "set_epoch":
        run.bm.set_epoch(run.bm.epoch + 1)
    else:
        assert run.bm.forget(ids(12)) == 3
    assert run.scheduler.why("a").needed == 4
    assert found_cached(run.step()) == [0]
    assert run.scheduler.finish("a")
    run.add("b", ids(13))
    assert found_cached(run.step()) == [12], (
        "what it computed since is published under the new epoch"
    )


def test_a_reset_between_the_steps_of_one_that_waits_for_a_prefix() -> None:
    """The one it waits for never publishes; it computes everything itself."""
    run = engine(16)
    run.add("a", ids(9))
    run.add("b", ids(9))
    run.add("c", ids(9))
    run.step()
    run.bm.reset()
    assert run.step() == ["a", "b"]
    step = run.step()
    assert step == ["a", "b", "c"]
    assert hits(run.steps) == {"a": [0], "b": [0], "c": [8]}


def test_a_victim_of_before_a_reset_comes_back_under_the_new_epoch() -> None:
    run = engine(16)
    preempted(run, ids(9))
    run.bm.reset()
    step = run.step()
    assert found_cached(step) == [0]
    assert run.bm.match([*run.tokens["a"], 1]) == 12


# ------------------------------------------------------------------ a load


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_blocks", [12, 30])
def test_a_load_of_conversations_ends_and_its_counters_add_up(seed: int, num_blocks: int) -> None:
    """Turns that begin with the turn before, in a pool that is short and one that is not."""
    random = np.random.default_rng(seed)
    run = engine(num_blocks, 1, wait_for_prefix=bool(seed % 2))
    histories: list[list[int]] = [[] for _ in range(4)]
    n_prompt = 0
    for turn in range(24):
        history = histories[int(random.integers(4))]
        history += random.integers(1, 4, int(random.integers(1, 9))).tolist()
        del history[30:]
        run.add(turn, history, namespace="even" if turn % 2 else None)
        n_prompt += len(history)
        if turn % 3 == 0:
            run.step()
    steps = run.drain(6)
    found = hits(steps)
    counted = traffic(run.bm)
    rolled_back = [seq for step in steps for seq in step.preempted]
    assert set(found) == set(range(24))
    assert counted["prompt"] == n_prompt
    in_steps = sum(map(sum, found.values()))
    if not rolled_back:
        assert counted["cached"] == in_steps
        assert counted["resumed"] == 0
    assert counted["cached"] + counted["resumed cached"] >= in_steps
    assert counted["cached"] > 0
    assert run.bm.pool.num_used == 0
    run.bm.check()
