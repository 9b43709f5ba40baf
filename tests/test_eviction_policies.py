"""The order in which each eviction policy gives blocks up, against lists in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any, cast

import pytest
from prefix_support import identities, lookup, words
from scenario_support import Checked, blocks_with_a_middle, every_block_size

from kvcore import BlockManager, BlockPool, EvictionPolicy, OutOfBlocks
from kvcore.eviction import LRU, Retention, RetentionPriority, SegmentedLRU

SHARES = (0.0, 0.1, 0.25, 0.5, 0.9)


class Lists:
    """Evictable blocks by level; within one the longest idle comes first."""

    def __init__(self) -> None:
        self.idle: list[list[int]] = [[]]

    def order(self) -> list[int]:
        return [block for level in self.idle for block in level]

    def enter(self, block: int, column: int, seq: Hashable) -> None:
        """Its last holder, a sequence that had it in this column, has left."""
        self.idle[0].append(block)

    def leave(self, block: int) -> None:
        for level in self.idle:
            if block in level:
                level.remove(block)

    def hit(self, block: int) -> None:
        """A prefix match found it."""

    def lose(self, block: int) -> None:
        """It holds another content from now on."""


class Segments(Lists):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.idle = [[], []]
        self.share = share
        self.was_hit: set[int] = set()

    def enter(self, block: int, column: int, seq: Hashable) -> None:
        probation, protected = self.idle
        (protected if block in self.was_hit else probation).append(block)
        while len(protected) > self.share * (len(probation) + len(protected)):
            oldest = protected.pop(0)
            self.was_hit.remove(oldest)
            probation.append(oldest)

    def hit(self, block: int) -> None:
        self.was_hit.add(block)

    def lose(self, block: int) -> None:
        self.was_hit.discard(block)


class Priorities(Lists):
    def __init__(self, default: int, block_size: int) -> None:
        super().__init__()
        self.default, self.block_size = default, block_size
        self.idle = [[] for _ in range(101)]
        self.kept: dict[int, tuple[int, float | None]] = {}
        self.ends: list[tuple[float, int, int]] = []  # end, order of entry, block
        self.entered = 0
        self.now = 0.0

    def allocated(self, table: list[int], first: int, ranges: list[Retention]) -> None:
        """Each block takes the range of its first token, from column ``first`` on."""
        for column in range(first, len(table)):
            for start, stop, priority, duration in ranges:
                token = column * self.block_size
                if start <= token and (stop is None or token < stop):
                    self.kept[table[column]] = priority, duration

    def enter(self, block: int, column: int, seq: Hashable) -> None:
        priority, duration = self.kept.get(block, (self.default, None))
        self.idle[priority].append(block)
        self.entered += 1
        if duration is not None and priority != self.default:
            self.ends.append((self.now + duration, self.entered, block))

    def leave(self, block: int) -> None:
        super().leave(block)
        self.ends = [timer for timer in self.ends if timer[2] != block]

    def lose(self, block: int) -> None:
        self.kept.pop(block, None)

    def advance(self, now: float) -> int:
        self.now = now
        over = sorted(timer for timer in self.ends if timer[0] <= now)
        for *_, block in over:
            self.leave(block)
            self.lose(block)
            self.idle[self.default].append(block)
        return len(over)


class Run:
    """A manager and the lists that its evictable blocks should be in."""

    def __init__(
        self, num_blocks: int, block_size: int, policy: EvictionPolicy, lists: Lists
    ) -> None:
        pool = BlockPool(num_blocks, eviction=policy)
        bm = BlockManager(num_blocks, block_size, pool=pool, prefix_caching=True)
        self.bm = cast(BlockManager, Checked(bm, bm.check))
        self.lists = lists

    def request(
        self, seq: Hashable, tokens: list[int], retention: list[Retention] | None = None
    ) -> bool:
        idle = set(self.lists.order())
        options: dict[str, Any] = {} if retention is None else {"retention": retention}
        try:
            cached = self.bm.allocate(seq, tokens=tokens, **options)
        except OutOfBlocks:
            return False
        table = self.bm.tables[seq].tolist()
        hits = cached // self.bm.block_size
        for block in table[:hits]:
            if block in idle:
                self.lists.leave(block)
            self.lists.hit(block)
        for block in table[hits:]:
            if block in idle:
                assert block == self.lists.order()[0], "the next victim is who goes"
                self.lists.leave(block)
            self.lists.lose(block)
        if isinstance(self.lists, Priorities):
            self.lists.allocated(table, 0, retention or [])
        self.compare()
        return True

    def free(self, seq: Hashable) -> None:
        table = self.bm.tables[seq].tolist()
        cached = identities(self.bm)
        self.bm.free_seq(seq)
        for column, block in reversed(list(enumerate(table))):
            if self.bm.ref[block] == 0 and block in cached:
                self.lists.enter(block, column, seq)
        self.compare()

    def evict(self, count: int) -> None:
        victims = self.lists.order()[:count]
        assert self.bm.evict(count) == len(victims)
        for block in victims:
            self.lists.leave(block)
            self.lists.lose(block)
        self.compare()

    def compare(self) -> None:
        assert self.bm.pool.evictable_blocks().tolist() == self.lists.order()


def new_run(kind: str, num_blocks: int, block_size: int) -> Run:
    if kind == "LRU":
        return Run(num_blocks, block_size, LRU(), Lists())
    if kind == "RetentionPriority":
        return Run(num_blocks, block_size, RetentionPriority(40), Priorities(40, block_size))
    share = float(kind)
    return Run(num_blocks, block_size, SegmentedLRU(share), Segments(share))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["LRU", "RetentionPriority", *map(str, SHARES)])
@pytest.mark.parametrize("block_size", [1, 4])
def test_every_step_of_a_random_life_leaves_the_blocks_in_the_order_of_the_policy(
    block_size: int, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    run = new_run(kind, 24, block_size)
    live: list[Hashable] = []
    now = 0.0
    hits = 0
    for number in range(400):
        kind_of_step = rng.choice(["request", "request", "free", "free", "evict", "advance"])
        if kind_of_step == "request":
            names = [rng.randrange(2) for _ in range(rng.randint(1, 6))]
            tokens = [*words(block_size, *names), 99]
            retention = None
            if kind == "RetentionPriority" and rng.random() < 0.7:
                cut = rng.randrange(1, len(tokens))
                retention = [
                    Retention(0, cut, rng.randrange(101), rng.choice([None, rng.random() * 9])),
                    Retention(cut, None, rng.choice([0, 40, 100]), rng.choice([None, 2.0])),
                ]
            if run.request(number, tokens, retention):
                hits += run.bm.published(number)
                run.bm.commit(number)
                run.compare()
                live.append(number)
        elif kind_of_step == "free" and live:
            run.free(live.pop(rng.randrange(len(live))))
        elif kind_of_step == "evict" and rng.random() < 0.3:
            run.evict(rng.randrange(5))
        elif kind_of_step == "advance" and isinstance(run.lists, Priorities):
            now += rng.random() * 3
            policy = cast(RetentionPriority, run.bm.pool.eviction)
            assert policy.advance(now) == run.lists.advance(now)
            assert policy.now == now
            run.bm.check()
            run.compare()
    assert hits > 100


# ---------------------------------------------------------------- what each is for


def idle_prefix(bm: BlockManager, names: list[int], **options: Any) -> None:
    bm.allocate("once", tokens=words(bm.block_size, *names), **options)
    bm.commit("once")
    bm.free_seq("once")


def pool_with(policy: EvictionPolicy | None, num_blocks: int, block_size: int) -> BlockManager:
    bm = BlockManager(num_blocks, block_size, prefix_caching=True, eviction=policy)
    return cast(BlockManager, Checked(bm, bm.check))


@every_block_size
def test_a_scan_drives_out_what_was_hit_under_lru_and_not_under_segments(block_size: int) -> None:
    found = {}
    policies: dict[str, Callable[[], EvictionPolicy | None]] = {
        "none": lambda: None, "LRU": LRU, "segments": lambda: SegmentedLRU(0.5),
    }  # fmt: skip
    for name, policy in policies.items():
        bm = pool_with(policy(), 8, block_size)
        for scan in range(50, 58):
            idle_prefix(bm, [scan])
        idle_prefix(bm, [1, 2])
        idle_prefix(bm, [1, 2, 3])  # the hit
        for scan in range(100, 120):
            idle_prefix(bm, [scan])
        found[name] = lookup(bm, words(block_size, 1, 2))
    assert found == {"none": 0, "LRU": 0, "segments": 2}


@every_block_size
def test_a_protected_block_that_is_not_hit_again_goes_in_the_end(block_size: int) -> None:
    """Its place is taken by what is hit now."""
    bm = pool_with(SegmentedLRU(0.5), 6, block_size)
    for scan in range(50, 56):
        idle_prefix(bm, [scan])
    for name in (1, 2, 3):
        idle_prefix(bm, [name])
        assert bm.allocate("hit", tokens=[*words(block_size, name), 5]) == block_size
        bm.free_seq("hit")
    for scan in range(100, 106):
        idle_prefix(bm, [scan])
    assert [lookup(bm, words(block_size, name)) for name in (1, 2, 3)] == [0, 1, 1]


@pytest.mark.parametrize("share", SHARES)
@every_block_size
def test_forks_pins_and_own_appends_are_no_hits(block_size: int, share: float) -> None:
    bm = pool_with(SegmentedLRU(share), 6, block_size)
    bm.allocate("A", tokens=words(block_size, 1))
    bm.commit("A")
    bm.fork("A", "B")
    bm.append_slots("A", block_size)
    bm.commit("A", words(block_size, 2))
    bm.pin(bm.tables["A"][0])
    bm.unpin(bm.tables["A"][0])
    bm.free_seq("A")
    bm.free_seq("B")
    idle_prefix(bm, [9])
    assert bm.pool.evictable_blocks().tolist() == [1, 0, 2]


@every_block_size
def test_the_lowest_priority_goes_first_whatever_its_age(block_size: int) -> None:
    bm = pool_with(RetentionPriority(), 8, block_size)
    for name, priority in ((1, 90), (2, 10), (3, 36), (4, None), (5, 0), (6, 100)):
        ranges = [] if priority is None else [Retention(0, None, priority)]
        idle_prefix(bm, [name], retention=ranges)
    for gone in ([5], [5, 2], [5, 2, 4], [5, 2, 4, 3], [5, 2, 4, 3, 1], [5, 2, 4, 3, 1, 6]):
        assert bm.evict(1) == 1
        for name in range(1, 7):
            assert lookup(bm, words(block_size, name)) == (name not in gone)


@blocks_with_a_middle
def test_a_block_takes_the_range_of_its_first_token_and_decoded_blocks_too(
    block_size: int,
) -> None:
    bm = pool_with(RetentionPriority(), 8, block_size)
    ranges = [Retention(0, block_size + 1, 10), Retention(3 * block_size, None, 90)]
    bm.allocate("A", tokens=words(block_size, 1, 2, 3), retention=ranges)
    bm.append_slots("A", 2 * block_size)
    bm.commit("A", words(block_size, 4, 5))
    assert bm.retention("A") == tuple(ranges)
    bm.free_seq("A")
    # Columns 3 and 4 are decoded and of priority 90, column 2 is in no range.
    assert bm.pool.evictable_blocks().tolist() == [1, 0, 2, 4, 3]
    bm.evict(1)
    assert lookup(bm, words(block_size, 1, 2, 3)) == 1


@every_block_size
def test_the_duration_runs_while_a_block_is_idle_and_a_hit_stops_it(block_size: int) -> None:
    policy = RetentionPriority()
    bm = pool_with(policy, 8, block_size)
    idle_prefix(bm, [1], retention=[Retention(0, None, 90, 10.0)])
    idle_prefix(bm, [2])
    assert policy.advance(9.0) == 0
    assert bm.allocate("hit", tokens=[*words(block_size, 1), 5]) == block_size
    assert policy.advance(50.0) == 0, "it is in use"
    bm.free_seq("hit")
    assert policy.advance(59.0) == 0
    assert bm.pool.evictable_blocks().tolist() == [1, 0]
    assert policy.advance(60.0) == 1
    assert bm.pool.evictable_blocks().tolist() == [1, 0], "behind all others of the default"
    idle_prefix(bm, [3])
    assert bm.pool.evictable_blocks().tolist()[:2] == [1, 0]
    # The priority is used up: what hits the block does not bring it back.
    bm.allocate("hit", tokens=[*words(block_size, 1), 5])
    bm.free_seq("hit")
    assert bm.pool.evictable_blocks().tolist()[-1] == 0


@pytest.mark.parametrize("blocks", [2, 3, 5, 8, 16, 31])
def test_blocks_whose_durations_end_together_keep_their_order(blocks: int) -> None:
    """A chain that was freed at once falls to the default with its tail first."""
    policy = RetentionPriority()
    bm = pool_with(policy, 40, 4)
    idle_prefix(bm, list(range(blocks)), retention=[Retention(0, None, 90, 10.0)])
    order = bm.pool.evictable_blocks().tolist()
    assert policy.advance(10.0) == blocks
    assert bm.pool.evictable_blocks().tolist() == order
    for left in range(blocks - 1, -1, -1):
        bm.evict(1)
        assert lookup(bm, words(4, *range(blocks))) == left


@every_block_size
def test_a_reused_block_takes_nothing_of_its_past_along(block_size: int) -> None:
    """Neither a priority nor a hit of the content that it held before."""
    bm = pool_with(RetentionPriority(), 3, block_size)
    idle_prefix(bm, [1], retention=[Retention(0, None, 100)])
    bm.evict(1)
    for name in (2, 3, 4):
        idle_prefix(bm, [name])
    assert bm.pool.evictable_blocks().tolist() == [1, 2, 0]
    bm = pool_with(SegmentedLRU(0.9), 3, block_size)
    idle_prefix(bm, [1])
    bm.allocate("hit", tokens=[*words(block_size, 1), 5])
    bm.free_seq("hit")
    bm.forget(words(block_size, 1))
    for name in (2, 3, 4):
        idle_prefix(bm, [name])
    bm.evict(2)
    assert bm.pool.evictable_blocks().tolist() == [0], "which was hit when it held another content"
    for name in (5, 6):
        idle_prefix(bm, [name])
    bm.evict(1)
    assert [lookup(bm, words(block_size, name)) for name in (4, 5, 6)] == [0, 1, 1]


@pytest.mark.parametrize("kind", ["LRU", "RetentionPriority", "0.25"])
@every_block_size
def test_what_a_policy_holds_back_can_still_be_had(block_size: int, kind: str) -> None:
    """No policy makes a request fail that fits: every idle block is available."""
    run = new_run(kind, 6, block_size)
    ranges = [Retention(0, None, 100)] if kind == "RetentionPriority" else None
    for name in range(3):
        run.request(name, words(block_size, name, name + 50), ranges)
        run.bm.commit(name)
    for name in range(3):
        run.free(name)
    assert len(run.bm.free) == 0
    assert run.bm.num_available == 6
    assert run.request("all", words(block_size, *range(100, 106)))
    assert sorted(run.bm.tables["all"]) == list(range(6))
