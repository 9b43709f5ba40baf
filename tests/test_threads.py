"""Every public call is one step to other threads, with the GIL and without it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import BlockManager, BlockPool, Counter, OutOfBlocks

THREADS = 8

Name = Hashable


@dataclass(frozen=True)
class Compared:
    """An id that collides with others and is compared by Python code, which lets others run."""

    thread: int
    number: int

    def __hash__(self) -> int:
        return self.number % 4


def in_c(thread: int, number: int) -> Name:
    """An id that is compared without running Python code."""
    return thread, number


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


def test_K9_01_every_reading_while_others_write_is_of_one_moment() -> None:
    """8 threads read while one allocates, appends, forks, frees, evicts and grows the slab."""
    num_blocks, block_size = 300, 4
    bm = BlockManager(num_blocks, block_size, rows=1, columns=1)
    readers_done: list[bool] = []

    def write() -> None:
        rng = random.Random(0)
        for seq in count():
            if len(readers_done) == THREADS:
                break
            bm.allocate(seq, rng.randrange(1, 60))
            bm.fork(seq, "child")
            bm.append_slot("child")
            bm.append_slots(seq, rng.randrange(30))
            kept = bm.tables[seq][0]
            bm.pool.keep(kept)
            bm.free_seq(seq)
            bm.free_seq("child")
            if rng.random() < 0.5:
                bm.pool.forget(kept)

    def read() -> None:
        last = np.zeros(len(Counter), np.int64)
        try:
            for _ in range(3_000):
                g = bm.gauges()
                assert g.free + g.evictable + g.used == num_blocks
                assert min(g) >= 0
                assert g.shared <= g.used <= num_blocks
                assert g.sequences <= 2
                # Whoever holds a block holds it through one of the two tables.
                assert g.used <= g.logical_blocks <= 2 * g.used
                unused_slots = g.logical_blocks * block_size - g.tokens
                assert 0 <= unused_slots <= g.sequences * (block_size - 1)
                for reading in (bm.pool.num_free, bm.pool.num_evictable, bm.pool.num_used):
                    assert 0 <= reading <= num_blocks
                bm.check()
                now = bm.counters.copy()
                assert (now >= last).all()
                last = now
        finally:
            readers_done.append(True)

    together(write, *[read] * THREADS)
    bm.check()
    assert bm.gauges().used == 0


@pytest.mark.parametrize("name", [in_c, Compared])
def test_K9_01_a_shared_pool_never_gives_a_block_to_two_holders(
    name: Callable[[int, int], Name],
) -> None:
    """8 threads, two managers on one pool, every changing call, and blocks run out."""
    pool = BlockPool(60)
    managers = [BlockManager(60, 4, pool=pool, rows=1, columns=1) for _ in range(2)]
    owner: dict[int, int] = {}
    out_of_blocks = []

    def hammer(thread: int) -> None:
        bm = managers[thread % 2]
        rng = random.Random(thread)
        names = count()
        mine: list[Name] = []
        pins: list[int] = []

        def claim(blocks: set[int]) -> None:
            for block in blocks:
                assert owner.setdefault(block, thread) == thread, f"block {block} has two owners"

        def blocks_of(seqs: list[Name]) -> set[int]:
            return {block for seq in seqs for block in bm.tables[seq]}

        @contextmanager
        def changing(*seqs: Name) -> Iterator[None]:
            """Blocks are given up before a call that may release them, not after it, when
            another thread may have them already; what is held after it is claimed again.
            """
            for block in blocks_of(list(seqs)) - blocks_of([s for s in mine if s not in seqs]):
                del owner[block]
            try:
                yield
            finally:
                claim(blocks_of([seq for seq in seqs if seq in bm]))

        def allocate() -> None:
            seq = name(thread, next(names))
            bm.allocate(seq, rng.randrange(12))
            mine.append(seq)
            claim(blocks_of([seq]))

        def append() -> None:
            seq = rng.choice(mine)
            with changing(seq):
                bm.append_slot(seq)

        def append_many() -> None:
            seq = rng.choice(mine)
            with changing(seq):
                bm.append_slots(seq, rng.randrange(9))

        def append_to_all() -> None:
            with changing(*mine):
                bm.append_batch(bm.rows(mine), np.empty(len(mine), np.int64))

        def fork() -> None:
            seq = name(thread, next(names))
            bm.fork(rng.choice(mine), seq)
            mine.append(seq)

        def reorder() -> None:
            with changing(*mine):
                bm.reorder(mine, [rng.choice(mine) for _ in mine])

        def truncate() -> None:
            seq = rng.choice(mine)
            with changing(seq):
                bm.truncate(seq, rng.randrange(bm.lens[seq] + 1))

        def free() -> None:
            seq = rng.choice(mine)
            with changing(seq):
                bm.free_seq(seq)
            mine.remove(seq)

        def take() -> None:
            pins.append(pool.take())
            claim({pins[-1]})

        def release() -> None:
            if pins:
                block = pins.pop()
                del owner[block]
                pool.release(block)

        def run_ahead() -> None:
            step = bm.fence()
            try:
                append()
            finally:
                bm.settle(step)

        def look() -> None:
            g = bm.gauges()
            assert g.free + g.evictable + g.used == 60
            bm.drain_changes()
            assert bm.can_append(rng.choice(mine)) in (True, False)

        calls = [
            allocate, append, append, append_many, append_to_all, fork, reorder, truncate,
            free, free, take, release, run_ahead, look,
        ]  # fmt: skip
        for _ in range(4_000):
            try:
                rng.choice(calls if mine else [allocate])()
            except OutOfBlocks:
                out_of_blocks.append(thread)
        while pins:
            release()
        while mine:
            free()

    together(*[partial(hammer, thread) for thread in range(THREADS)])
    for bm in managers:
        bm.settle(bm.fence())
        bm.check()
        assert len(bm) == 0
    pool.check()
    assert owner == {}
    assert pool.num_free == 60
    assert sorted(pool.free_blocks().tolist()) == list(range(60))
    assert set(out_of_blocks) == set(range(THREADS))


def test_the_slab_grows_under_many_threads_without_losing_a_cell() -> None:
    for _ in range(50):
        bm = BlockManager(100_000, 1, rows=1, columns=1)

        def start(thread: int, bm: BlockManager = bm) -> None:
            for length in range(50):
                bm.allocate((thread, length), 10 * length)
                bm.append_slot((thread, length))

        together(*[partial(start, thread) for thread in range(THREADS)])
        bm.check()
        assert all(bm.lens[thread, length] == 10 * length + 1 for thread, length in bm)
        blocks = [block for table in bm.tables.values() for block in table]
        assert len(set(blocks)) == len(blocks) == bm.pool.num_used


def test_appends_of_many_threads_to_one_sequence_never_share_a_slot() -> None:
    appends = 5_000
    bm = BlockManager(appends * THREADS // 3 + 2, 3, rows=1, columns=1)
    bm.allocate("seq", 2)

    def append() -> list[int]:
        slots = []
        for _ in range(appends):
            block, offset, source = bm.append_slot("seq")
            assert source is None
            slots.append(block * 3 + offset)
        return slots

    slots = [slot for part in together(*[append] * THREADS) for slot in part]
    assert len(set(slots)) == len(slots) == appends * THREADS
    assert sorted(slots) == sorted(bm.slots("seq", 2).tolist())
    bm.check()


def test_a_sequence_that_many_threads_start_and_end_is_started_and_ended_in_turn() -> None:
    bm = BlockManager(100, 4)

    def start_and_end() -> int:
        """Times started minus times ended."""
        balance = 0
        for _ in range(10_000):
            with suppress(ValueError):
                bm.allocate("seq", 30)
                balance += 1
            with suppress(KeyError):
                bm.free_seq("seq")
                balance -= 1
        return balance

    live = sum(together(*[start_and_end] * THREADS))
    assert live == ("seq" in bm)
    assert bm.counters[Counter.SEQUENCES_ALLOCATED] == bm.counters[Counter.SEQUENCES_FREED] + live
    assert bm.pool.num_used == 8 * live
    bm.check()


def test_k_sharers_that_append_at_once_make_k_minus_1_copies() -> None:
    sharers_of_each = 1_000
    sharers = range(sharers_of_each * THREADS)
    bm = BlockManager(len(sharers) + 1, 4)
    bm.allocate(0, 6)
    for seq in sharers[1:]:
        bm.fork(0, seq)

    def append(seqs: range) -> list[int]:
        return [bm.append_slot(seq)[0] for seq in seqs]

    works = [partial(append, sharers[thread::THREADS]) for thread in range(THREADS)]
    blocks = [block for part in together(*works) for block in part]
    assert len(set(blocks)) == len(sharers)
    assert bm.counters[Counter.COW_COPIES] == len(sharers) - 1
    bm.check()


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this build of Python has a GIL"
)
def test_import_leaves_the_gil_off() -> None:
    code = "import sys, kvcore; print(sys._is_gil_enabled())"
    process = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        env={key: value for key, value in os.environ.items() if key != "PYTHON_GIL"}
        | {"PYTHONPATH": str(Path(kvcore.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.stdout.strip(), process.stderr) == ("False", "")
