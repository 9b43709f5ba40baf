"""Shared prefixes under threads: nobody is ever given a block that holds something else."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvcore import BlockManager, BlockPool, Counter, OutOfBlocks, PrefixIndex
from kvcore.prefix_log import Change, Cleared, Removed, Stored

THREADS = 8
BLOCK_SIZE = 4

Path = tuple[str, tuple[int, ...]]
"""A namespace and the tokens from the first on: what the last block of them holds."""


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Where there is a GIL, let it change hands at nearly every chance."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Results of all works, started at one moment in a thread each; their first error."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        start.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as threads:
        return [future.result() for future in [threads.submit(run, work) for work in works]]


class Engine:
    """One thread's requests. It writes each block before it commits it, as an engine does.

    ``content`` is the memory of all threads: what was last written into each block.
    """

    SYSTEM_PROMPTS = tuple(
        tuple(random.Random(number).choices(range(50), k=BLOCK_SIZE * 4)) for number in range(3)
    )

    def __init__(self, bm: BlockManager, content: dict[int, Path], thread: int) -> None:
        self.bm = bm
        self.content = content
        self.thread = thread
        self.chance = random.Random(thread)
        self.names = count()
        self.mine: dict[Any, tuple[str, list[int]]] = {}
        """Namespace and known tokens of each live sequence."""
        self.pins: list[Any] = []
        self.hits = 0
        self.out_of_blocks = 0

    def path(self, seq: Any, column: int) -> Path:
        namespace, tokens = self.mine[seq]
        return namespace, tuple(tokens[: (column + 1) * BLOCK_SIZE])

    def look_at(self, seq: Any, columns: range) -> None:
        table = self.bm.table(seq)
        for column in columns:
            assert self.content[table[column]] == self.path(seq, column)

    def prompt(self) -> tuple[str, list[int]]:
        chance = self.chance
        head = chance.choice(self.SYSTEM_PROMPTS)[: chance.randrange(1, BLOCK_SIZE * 4 + 1)]
        tail = [chance.randrange(2) for _ in range(chance.randrange(8))]
        return chance.choice(["red", "blue"]), [*head, *tail]

    def allocate(self) -> None:
        namespace, tokens = self.prompt()
        seq = self.thread, next(self.names)
        kind = self.chance.randrange(3)
        if kind == 0:
            prompt = self.bm.prompt(tokens, namespace=namespace)
            cached = self.bm.allocate(seq, tokens=prompt)
        else:
            given = np.array(tokens, np.int32) if kind == 1 else tokens
            cached = self.bm.allocate(seq, tokens=given, namespace=namespace)
        assert cached % BLOCK_SIZE == 0
        assert cached < len(tokens)
        self.hits += cached > 0
        self.mine[seq] = namespace, tokens
        self.look_at(seq, range(cached // BLOCK_SIZE))

    def commit(self) -> None:
        """Write what is not published yet, then say so."""
        seq = self.chance.choice(list(self.mine))
        self.write_and_commit(seq, [])

    def append(self) -> None:
        seq = self.chance.choice(list(self.mine))
        self.bm.append_slot(seq)
        self.write_and_commit(seq, [self.chance.randrange(2)])

    def write_and_commit(self, seq: Any, more: list[int]) -> None:
        self.mine[seq][1].extend(more)
        table = self.bm.table(seq)
        full = range(len(self.mine[seq][1]) // BLOCK_SIZE)
        for column in full[self.bm.published(seq) :]:
            self.content[table[column]] = self.path(seq, column)
        self.bm.commit(seq, more)
        self.look_at(seq, full)

    def fork(self) -> None:
        parent = self.chance.choice(list(self.mine))
        seq = self.thread, next(self.names)
        self.bm.fork(parent, seq)
        namespace, tokens = self.mine[parent]
        self.mine[seq] = namespace, list(tokens)

    def truncate(self) -> None:
        seq = self.chance.choice(list(self.mine))
        length = max(0, self.bm.length(seq) - self.chance.randrange(2 * BLOCK_SIZE))
        self.bm.truncate(seq, length)
        del self.mine[seq][1][length:]

    def free(self) -> None:
        seq = self.chance.choice(list(self.mine))
        self.look_at(seq, range(self.bm.published(seq)))
        self.bm.free_seq(seq)
        del self.mine[seq]

    def match(self) -> None:
        namespace, tokens = self.prompt()
        assert 0 <= self.bm.match(tokens, namespace=namespace) < max(1, len(tokens))
        plan = self.bm.plan_allocate(tokens=tokens, namespace=namespace)
        assert 0 <= plan.cached_tokens < max(1, len(tokens))
        assert self.bm.can_allocate(tokens=tokens, namespace=namespace) in (True, False)

    def pin(self) -> None:
        namespace, tokens = self.prompt()
        self.pins.append(self.bm.pin_prefix(tokens, namespace=namespace))
        held = self.pins[-1].blocks
        for column, block in enumerate(held):
            here = tuple(tokens[: (column + 1) * BLOCK_SIZE])
            assert self.content[block] == (namespace, here)
        if len(self.pins) > 3:
            self.pins.pop(0).release()

    def forget(self) -> None:
        namespace, tokens = self.prompt()
        assert self.bm.forget(tokens, namespace=namespace) >= 0

    def evict(self) -> None:
        assert 0 <= self.bm.evict(3) <= 3

    def reset(self) -> None:
        for block in self.bm.reset():
            assert 0 <= block < self.bm.pool.num_blocks

    def run(self, calls: int) -> None:
        often = [self.allocate, self.commit, self.append, self.append, self.free]
        seldom = [self.fork, self.truncate, self.match, self.pin, self.forget, self.evict]
        for number in range(calls):
            call = self.chance.choice(often * 3 + seldom if self.mine else [self.allocate])
            if number % 500 == 499:
                call = self.reset
            try:
                call()
            except OutOfBlocks:
                self.out_of_blocks += 1
        for pin in self.pins:
            pin.release()
        while self.mine:
            self.free()


def mirror(changes: list[Change], known: dict[int, Stored]) -> None:
    """Follow the log; strictly, as a reader of it may."""
    for change in changes:
        if isinstance(change, Stored):
            assert change.uid not in known
            known[change.uid] = change
        elif isinstance(change, Removed):
            del known[change.uid]
        else:
            known.clear()


@pytest.mark.parametrize(("merge_duplicates", "hash_bits"), [(False, 1), (True, 63)])
def test_K9_01_a_hit_is_always_the_content_that_was_asked_for(
    merge_duplicates: bool, hash_bits: int
) -> None:
    """8 threads, two managers on one pool, every call of prefix sharing, and blocks run out.

    Meanwhile one more thread reads the counts and follows the log of the index, and each of
    its readings is of one moment.
    """
    pool = BlockPool(60)
    index = PrefixIndex(pool, BLOCK_SIZE, hash_bits=hash_bits)
    managers = [
        BlockManager(
            60,
            BLOCK_SIZE,
            pool=pool,
            rows=1,
            columns=1,
            prefix_caching=True,
            merge_duplicates=merge_duplicates,
        )
        for _ in range(2)
    ]
    index.start_log()
    content: dict[int, Path] = {}
    engines = [Engine(managers[thread % 2], content, thread) for thread in range(THREADS)]
    known: dict[int, Stored] = {}
    drains: list[int] = []
    at_work = list(engines)

    def work(engine: Engine) -> None:
        try:
            engine.run(3_000)
        finally:
            at_work.remove(engine)

    def look() -> None:
        while at_work:
            g = managers[0].gauges()
            assert g.free + g.evictable + g.used == 60
            assert g.evictable <= g.cached <= g.evictable + g.used
            pool.check()
            changes = index.drain()
            mirror(changes, known)
            drains.append(len(changes))
            assert len(known) <= 60

    together(look, *[partial(work, engine) for engine in engines])

    for bm in managers:
        bm.check()
        assert len(bm) == 0
    assert pool.num_used == 0
    mirror(index.drain(), known)
    uids = index.uids()
    assert set(known) == set(uids[uids > 0].tolist())
    for block in np.flatnonzero(uids):
        identity = index.identity(int(block))
        assert identity is not None
        assert known[identity.uid] == identity
    assert sum(map(bool, drains)) > 10
    assert sum(engine.hits for engine in engines) > 200
    assert sum(engine.out_of_blocks for engine in engines) > 0
    if merge_duplicates:
        assert sum(int(bm.counters[Counter.DUPLICATES_MERGED]) for bm in managers) > 0


def test_one_prompt_may_be_used_by_many_threads() -> None:
    bm = BlockManager(100, BLOCK_SIZE, prefix_caching=True, rows=1, columns=1)
    tokens = list(range(33))
    bm.allocate("first", tokens=tokens)
    bm.commit("first")
    prompt = bm.prompt(tokens)

    def use(thread: int) -> None:
        for number in range(1_000):
            assert bm.match(prompt) == 32
            assert bm.allocate((thread, number), tokens=prompt) == 32
            assert prompt.common_blocks(bm.prompt_of((thread, number))) == 8
            bm.free_seq((thread, number))

    together(*[partial(use, thread) for thread in range(THREADS)])
    bm.check()
    assert bm.pool.num_used == 9


def test_one_block_published_by_many_threads_at_once_is_one_content() -> None:
    """Twins: each thread computed the same block; all copies have one number."""
    for _ in range(50):
        bm = BlockManager(100, BLOCK_SIZE, prefix_caching=True)
        index = bm.pool.index
        assert index is not None
        for thread in range(THREADS):
            bm.allocate(thread, tokens=range(BLOCK_SIZE + 1))
        published = together(*[partial(bm.commit, thread) for thread in range(THREADS)])
        assert published == [1] * THREADS
        uids = index.uids()
        assert len(index) == THREADS
        assert len(set(uids[uids > 0].tolist())) == 1
        assert index.duplicates == THREADS - 1
        bm.check()


def test_threads_that_admit_at_once_never_claim_one_idle_block_twice_over() -> None:
    """Hits that are idle are claimed and new blocks taken in one step."""
    num_blocks = 4 * THREADS
    for round_number in range(50):
        bm = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=True)
        tokens = list(range(3 * BLOCK_SIZE))
        bm.allocate("first", tokens=tokens)
        bm.commit("first")
        bm.free_seq("first")
        assert bm.pool.num_evictable == 3

        def admit(thread: int, bm: BlockManager = bm, tokens: list[int] = tokens) -> int:
            return bm.allocate(thread, tokens=[*tokens, thread])

        cached = together(*[partial(admit, thread) for thread in range(THREADS)])
        assert cached == [3 * BLOCK_SIZE] * THREADS, round_number
        assert bm.pool.num_used == 3 + THREADS
        bm.check()


def test_a_log_that_overflows_while_it_is_read_begins_again() -> None:
    """Each drain is whole by itself: what overflowed is told from the beginning."""
    bm = BlockManager(50, BLOCK_SIZE, prefix_caching=True)
    index = bm.pool.index
    assert index is not None
    index.start_log(5)
    known: dict[int, Stored] = {}
    clears = []
    done: list[bool] = []

    def publish() -> None:
        try:
            for number in range(3_000):
                bm.allocate("seq", tokens=[number] * (2 * BLOCK_SIZE))
                bm.commit("seq")
                bm.free_seq("seq")
        finally:
            done.append(True)

    def read() -> None:
        while not done:
            changes = index.drain()
            assert not any(isinstance(change, Cleared) for change in changes[1:])
            clears.append(bool(changes) and isinstance(changes[0], Cleared))
            mirror(changes, known)

    together(publish, read)
    mirror(index.drain(), known)
    uids = index.uids()
    assert set(known) == set(uids[uids > 0].tolist())
    assert sum(clears) > 0
