"""Prefix sharing and its model, a trie of tokens, driven side by side.

After every operation: the same result or the same exception, all state equal (identities
by block, what is known and published of every sequence, the order of free and evictable
blocks, counters), ``check()`` clean, and every sequence reads back, through its table, what
it would have computed without sharing anything. The change log, drained now and then,
rebuilds the index elsewhere (I12). The hash of the index may have 63 bits or none.
"""

from __future__ import annotations

import random
from collections import Counter as Tally
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from prefix_world import LONG_ENOUGH, PrefixWorld, Setting
from state import slab_snapshot, snapshot

from kvcore.counters import Counter
from kvcore.errors import OutOfBlocks

number = st.integers(0, 2**20)


class PrefixMachine(RuleBasedStateMachine):
    """One manager; what is random in an operation comes from its number."""

    fenced = False
    merging: tuple[tuple[bool | None, ...], ...] = ((False,), (True,))

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.world = PrefixWorld(
            Setting(
                num_blocks=data.draw(st.integers(3, 12)),
                block_size=data.draw(st.integers(1, 4)),
                vocabulary=data.draw(st.integers(2, 3)),
                hash_bits=data.draw(st.sampled_from([63, 1, 0])),
                merge_duplicates=data.draw(st.sampled_from(self.merging)),
                fenced=self.fenced,
                pin_quota=data.draw(st.sampled_from([None, None, 2])),
                log_capacity=data.draw(st.sampled_from([0, 1, 2, LONG_ENOUGH])),
            )
        )

    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        verbs = PrefixWorld.verbs + PrefixWorld.fence_verbs * self.fenced
        operation = st.tuples(st.sampled_from(verbs), number, st.integers(0, 1))
        for verb, choices, which in data.draw(st.lists(operation, min_size=5, max_size=15)):
            self.world.do(verb, choices, which)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


class FencedPrefixMachine(PrefixMachine):
    """With steps in flight: what they may still read is neither free nor evictable."""

    fenced = True


class SharedIndexMachine(FencedPrefixMachine):
    """Two managers find each other's prefixes, whether or not they merge duplicates.

    Or one of them knows no prefixes and only takes blocks away.
    """

    merging = ((False, False), (True, False), (True, True), (False, None))


TestPrefix = PrefixMachine.TestCase
TestFencedPrefix = FencedPrefixMachine.TestCase
TestSharedIndex = SharedIndexMachine.TestCase


def random_setting(chance: random.Random) -> Setting:
    return Setting(
        num_blocks=chance.choice([3, 5, 7, 9, 11, 12]),
        block_size=chance.randint(1, 4),
        vocabulary=chance.randint(2, 3),
        hash_bits=chance.choice([63, 63, 1, 0]),
        merge_duplicates=chance.choice([(False,), (True,), (True, False), (True, None)]),
        fenced=chance.random() < 0.3,
        pin_quota=chance.choice([None, 1, 2]),
        log_capacity=chance.choice([0, 1, 3, LONG_ENOUGH]),
    )


def live(world: PrefixWorld, seed: int, operations: int, never: Collection[str] = ()) -> None:
    """A life of that many operations; an error says where in which life it was."""
    chance = random.Random(seed)
    verbs = world.verbs + world.fence_verbs * world.setting.fenced
    verbs = tuple(verb for verb in verbs if verb not in never)
    for place in range(operations):
        verb = chance.choice(verbs)
        try:
            world.do(verb, chance.randrange(2**30), chance.randrange(2))
        except Exception as error:
            error.add_note(f"operation {place}, {verb}, of life {seed} in {world.setting}")
            raise


def test_long_lives(summary: list[str]) -> None:
    """More operations on one pool than a search would do, and what they came to."""
    operations, happened = 0, Tally[str]()
    for seed in range(70):
        world = PrefixWorld(random_setting(random.Random(seed)))
        live(world, seed, 300)
        operations += 300
        for counter in (Counter.DUPLICATES_MERGED, Counter.EVICTIONS, Counter.COW_COPIES):
            happened[counter.name.lower()] += int(
                sum(core.counters[counter] for core in world.cores)
            )
        world.end()
        happened.update(world.counts)
    assert operations >= 20_000
    for what in (
        "blocks hit",
        "partial hits",
        "pictures cut",
        "resumed",
        "published by a batch",
        "published that were pending",
        "given back by a window",
        "restored around blocks that stayed",
        "published that were restored",
        "contradicted",
        "refused",
        "duplicates_merged",
        "evictions",
        "cow_copies",
        "forgotten",
        "resets",
        "prefixes pinned",
        "over the quota",
        "changes told one by one",
        "times the log overflowed",
    ):
        assert happened[what] > 10, f"hardly ever: {what}"
    counts = ", ".join(f"{count:,} {what}" for what, count in sorted(happened.items()))
    summary.append(f"prefix sharing: {operations:,} operations equal to the model's: {counts}")


@pytest.mark.parametrize("hash_bits", [1, 0])
def test_a_hash_that_tells_nothing_changes_no_answer(hash_bits: int) -> None:
    """K5-09: all contents are candidates for all prompts, and none is taken for another."""
    rejected = kept_apart = 0
    for seed in range(30):
        setting = random_setting(random.Random(1000 + seed))
        world = PrefixWorld(replace(setting, hash_bits=hash_bits))
        live(world, 1000 + seed, 100)
        index = world.core.pool.index
        rejected += index.verify_rejects
        kept_apart += index.collisions
        world.end()
    assert rejected > 50
    assert kept_apart > 50


def test_a_good_hash_never_needs_the_comparison() -> None:
    """What makes the comparison cheap; the answers do not depend on it.

    Unless a content is gone and comes back under a new number: those that followed the
    old one are met again, and are not its children.
    """
    forgetting = {"forget", "forget_block", "reset", "evict", "truncate", "cut_media"}
    hits = 0
    for seed in range(6):
        setting = random_setting(random.Random(2000 + seed))
        world = PrefixWorld(replace(setting, num_blocks=400, hash_bits=63))
        live(world, 2000 + seed, 100, never=forgetting)
        assert world.core.counters[Counter.EVICTIONS] == 0
        assert world.core.pool.index.verify_rejects == 0
        assert world.core.pool.index.collisions == 0
        hits += world.counts["blocks hit"]
    assert hits > 10


def test_a_refused_allocation_changes_nothing() -> None:
    """K4-11: ten times over, its hits idle or not, at every shortage."""
    refusals = with_hits = 0
    for seed in range(120):
        world = PrefixWorld(random_setting(random.Random(3000 + seed)))
        live(world, 3000 + seed, 40)
        chance = random.Random(seed)
        for _ in range(4):
            text = world.old_text(chance)
            n_tokens = len(text.tokens) + chance.randint(0, 3 * world.size)
            plan = world.core.plan_allocate(n_tokens, tokens=text.tokens, **text.who)
            spare = plan.available - plan.needed
            if spare >= 0:
                if spare + 1 > world.core.pool.num_free:
                    continue
                # What is left is the hits and too little for the rest.
                for manager in (world.core, world.model):
                    manager.pool.take_many(spare + 1)
            refused_ten_times(world, n_tokens, text)
            refusals += 1
            with_hits += plan.cached_tokens > 0
        world.end()
    assert refusals > 200
    assert with_hits > 40


def refused_ten_times(world: PrefixWorld, n_tokens: int, text: Any) -> None:
    core = world.core
    world.drain_log(random.Random(0))
    before, slab_before = snapshot(core), slab_snapshot(core)
    plan = core.plan_allocate(n_tokens, tokens=text.tokens, **text.who)
    for time in range(10):
        with pytest.raises(OutOfBlocks) as error:
            core.allocate("new", n_tokens, tokens=text.tokens, **text.who, partial_hit=time % 2 > 0)
        assert (error.value.needed, error.value.available) == (plan.needed, plan.available)
        assert not core.can_allocate(n_tokens, tokens=text.tokens, **text.who)
    before["counters"][Counter.OUT_OF_BLOCKS] += 10
    world.model.counters[Counter.OUT_OF_BLOCKS] += 10
    assert snapshot(core) == before
    assert slab_snapshot(core) == slab_before
    assert world.log_capacity is None or core.pool.index.drain() == []
    world.equal()


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("block_size", [2, 3, 4])
def test_a_refused_append_leaves_the_identity_of_what_it_would_have_written(
    block_size: int, shared: bool
) -> None:
    """A sequence cut back into a cached block, and no block for what comes after it."""
    world = PrefixWorld(Setting(num_blocks=4, block_size=block_size))
    tokens = [1] * (2 * block_size)
    calls: list[Callable[[Any], Any]] = [
        lambda manager: manager.allocate("cut", tokens=tokens),
        lambda manager: manager.commit("cut"),
        lambda manager: manager.truncate("cut", len(tokens) - 1),
        *[lambda manager: manager.fork("cut", "fork")] * shared,
        lambda manager: manager.pool.take_many(2),
    ]
    for call in calls:
        world.both(call)
    # The memory is not this test's affair.
    for seq in world.model:
        world.memory.begin(world.name(seq), [None] * (len(tokens) - 1))  # type: ignore[list-item]
    cached = world.core.pool.index.uids().tolist()
    assert len(world.core.pool.index) == 2
    for _ in range(10):
        refused = world.both(lambda manager: manager.append_slots("cut", 2))
        assert refused == ("raised", OutOfBlocks, 1 + shared, 0)
        assert world.core.pool.index.uids().tolist() == cached
        world.equal()
    world.both(lambda manager: manager.pool.release_many([2, 3]))
    served = world.both(lambda manager: manager.append_slots("cut", 2))
    assert served[0] == "returned"
    assert len(world.core.pool.index) == 1 + shared
