"""Memory with prefix sharing on is flat over time (I11), whatever the prompts are.

Nothing of a content outlives its last block: neither its tokens, nor its salt, nor a place in
the index, the log or the counts of who may have it next.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from soak import MIB, Growth, resident_bytes

import kvcore
from kvcore import BlockManager, BlockPool, Counter, OutOfBlocks, Scheduler
from kvcore.identity import Media, Namespace

NUM_BLOCKS = 1_000
BLOCK_SIZE = 16

pytestmark = pytest.mark.skipif(
    resident_bytes() is None, reason="the resident size says nothing here"
)


def growth_of(work: Callable[[int], None], rounds: int, samples: int = 10) -> Growth:
    """Do the work that many times and look at the memory ``samples`` times."""
    growth = Growth([], [])
    for sample in range(samples):
        for number in range(rounds * sample // samples, rounds * (sample + 1) // samples):
            work(number)
        gc.collect()
        growth.resident.append(resident_bytes() or 0)
        growth.objects.append(len(gc.get_objects()))
    return growth


def assert_flat(growth: Growth) -> None:
    resident, objects = growth.after_warm_up()
    assert objects == 0
    assert resident <= MIB


class Prompts:
    """Prompts that all differ: a new salt each, and random tokens."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def tokens(self, number: int) -> np.ndarray[Any, Any]:
        size = 40 + number % 60
        return self.rng.integers(0, 2**31, size, dtype=np.int64).astype(np.int32)


def test_100_000_distinct_prompts_leave_nothing_behind() -> None:
    """A salt a request, 1,000 blocks, and a log that nobody reads."""
    bm = BlockManager(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=True)
    index = bm.pool.index
    assert index is not None
    index.start_log()
    prompts = Prompts()

    def serve(number: int) -> None:
        tokens = prompts.tokens(number)
        assert bm.allocate(number, tokens=tokens, namespace=f"request {number}") == 0
        bm.commit(number)
        bm.free_seq(number)

    assert_flat(growth_of(serve, 100_000))
    bm.check()
    assert len(index) <= NUM_BLOCKS
    assert int(bm.counters[Counter.BLOCKS_PUBLISHED]) > 350_000
    assert int(bm.counters[Counter.EVICTIONS]) > 350_000
    assert len(index.drain()) == len(index) + 1


def test_every_other_way_of_a_content_to_end_is_flat_too() -> None:
    """Adapters, media, prompts kept for a while, pins, merges, forks, rewrites, resets."""
    bm = BlockManager(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=True, merge_duplicates=True)
    index = bm.pool.index
    assert index is not None
    prompts = Prompts()
    kept: list[Any] = []

    def serve(number: int) -> None:
        tokens = prompts.tokens(number)
        keys = {
            "namespace": Namespace(lora=f"adapter {number}", extra=(("tenant", number),)),
            "media": [Media(3, 30, number.to_bytes(32, "big"))],
        }
        prompt = bm.prompt(tokens, **keys)
        kept.append(prompt)
        twin = -1 - number
        bm.allocate(number, tokens=prompt)
        bm.allocate(twin, tokens=tokens, **keys)
        bm.commit(number)
        bm.commit(twin)
        kept.append(bm.pin_prefix(prompt))
        bm.fork(number, "child")
        bm.append_slot("child")
        bm.commit("child", [number])
        bm.truncate(twin, BLOCK_SIZE + 3)
        bm.append_slot(twin)
        for seq in (number, "child", twin):
            bm.free_seq(seq)
        if number % 3 == 0:
            bm.forget(prompt)
        bm.evict(number % 5)
        if number % 50 == 0:
            bm.reset()
        if number % 70 == 0:
            bm.set_epoch(number)
        if number % 20 == 19:
            for thing in kept:
                if hasattr(thing, "release"):
                    thing.release()
            kept.clear()

    assert_flat(growth_of(serve, 20_000))
    kept.clear()
    bm.check()
    assert bm.pool.num_used == 0
    assert int(bm.counters[Counter.DUPLICATES_MERGED]) > 10_000


def test_requests_of_a_scheduler_are_flat() -> None:
    """With preemptions: a request that was taken back keeps its tokens until it ends."""
    bm = BlockManager(100, BLOCK_SIZE, prefix_caching=True)
    scheduler = Scheduler(bm)
    prompts = Prompts()
    preempted = []

    def serve(number: int) -> None:
        scheduler.add(number, tokens=prompts.tokens(number), namespace=str(number))
        step = scheduler.step()
        preempted.append(len(step.preempted))
        for seq in step:
            n_unknown = bm.length(seq) - bm.known(seq)
            bm.commit(seq, [7] * n_unknown)
            if bm.length(seq) > 130:
                scheduler.finish(seq)
        if len(scheduler.waiting) > 30:
            scheduler.finish(scheduler.waiting[-1][0])
        if number % 100 == 99:
            # So that a sample sees what is left behind, and not what is on its way.
            for seq in [*scheduler.running, *(seq for seq, _ in scheduler.waiting)]:
                scheduler.finish(seq)
            preempted[:] = [sum(preempted)]

    assert_flat(growth_of(serve, 20_000))
    bm.check()
    assert sum(preempted) > 100


def test_pools_and_indexes_are_freed_with_their_managers() -> None:
    def use(number: int) -> None:
        pool = BlockPool(200)
        bm = BlockManager(200, BLOCK_SIZE, pool=pool, prefix_caching=True)
        assert pool.index is not None
        pool.index.start_log()
        prompt = bm.prompt(range(50), namespace=str(number))
        bm.allocate("a", tokens=prompt)
        bm.commit("a")
        bm.pin_prefix(prompt)
        with pytest.raises(OutOfBlocks):
            bm.allocate("b", 10_000)

    assert_flat(growth_of(use, 2_000))


@pytest.mark.parametrize("policy", ["None", "LRU()", "SegmentedLRU()", "RetentionPriority()"])
def test_all_of_it_may_die_in_one_cycle(policy: str) -> None:
    """A manager gives its blocks back when it dies; whoever is told of that must still be there.

    The collector ends the parts of a cycle in any order. The arrays are so large here that
    their memory is unmapped when they go, and a late access is a crash.
    """
    code = f"""
import gc
from kvcore import *

class Owner: pass

for order in range(4):
    policy = {policy}
    owner = Owner()
    owner.itself = owner
    pool = BlockPool(300_000, eviction=policy)
    manager = BlockManager(300_000, 4, pool=pool, prefix_caching=True)
    parts = [policy, pool, manager, pool.index]
    owner.parts = parts[order:] + parts[:order]
    retention = [Retention(0, None, 60, 10)] if isinstance(policy, RetentionPriority) else []
    manager.allocate("a", tokens=range(50_000), retention=retention, namespace="salt")
    manager.commit("a")
    owner.pin = manager.pin_prefix(range(5_000), namespace="salt")
    del owner, policy, pool, manager, parts
    gc.collect()
assert not any(isinstance(found, BlockPool) for found in gc.get_objects())
"""
    process = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": str(Path(kvcore.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")
