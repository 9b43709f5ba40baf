"""Where an allocation can fail, it is made to fail, and nothing may have changed (I7).

For many states and every operation that takes blocks: leave 0, 1, 2, … blocks
available until the operation succeeds. Each refusal is repeated ten times and compares
all observable state, the order of the free list and the next ``drain_changes``
included. Memory that the system refuses is a failure of the same kind.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from reference_model import ReferenceBlockManager
from state import outcome, plain, slab_snapshot, snapshot

from kvcore.block_manager import BlockManager
from kvcore.counters import Counter
from kvcore.errors import OutOfBlocks
from kvcore.pool import BlockPool

Call = Callable[[Any], Any]


def live_a_little(manager: Any, chooser: random.Random, number: int, fenced: bool) -> None:
    """One operation in the life of a busy manager; the same for equal managers."""
    live = list(manager.lens)
    acts = ["allocate", "fork", "free_seq", "truncate", "keep", *["append_slot"] * 4]
    act, share = chooser.choice(acts), chooser.random()
    n_tokens = chooser.randrange(3 * manager.block_size + 1)
    if act == "allocate" or not live:
        outcome(manager.allocate, number, n_tokens)
        return
    seq = chooser.choice(live)
    if act == "fork":
        manager.fork(seq, number, int(share * manager.lens[seq]))
    elif act == "truncate":
        manager.truncate(seq, int(share * manager.lens[seq]))
    elif act == "keep":
        for block in list(manager.tables[seq]):
            manager.pool.keep(block)
    else:
        outcome(getattr(manager, act), seq)
    if fenced and number % 10 == 0:
        manager.fence()
        outcome(manager.settle, manager.fence() - 3)


def build(seed: int, fenced: bool) -> tuple[BlockManager, ReferenceBlockManager]:
    """Core and model in one state."""
    chooser = random.Random(seed)
    num_blocks, block_size = chooser.randrange(4, 24), chooser.randrange(1, 5)
    operations = chooser.randrange(20, 120)
    core = BlockManager(num_blocks, block_size, rows=64)
    model = ReferenceBlockManager(num_blocks, block_size)
    for manager in (core, model):
        chooser.seed(seed)
        for number in range(operations):
            live_a_little(manager, chooser, number, fenced)
    return core, model


def calls_that_take_blocks(model: ReferenceBlockManager) -> list[Call]:
    size, blocks = model.block_size, model.num_blocks
    calls: list[Call] = [
        lambda manager, n=n: manager.allocate("new", n)
        for n in (1, size, size + 1, 3 * size, size * blocks)
    ]
    for seq in model.lens:
        calls.append(lambda manager, seq=seq: manager.append_slot(seq))
        calls += [
            lambda manager, seq=seq, n=n: manager.append_slots(seq, n)
            for n in (1, size, 2 * size + 1)
        ]
    calls += [lambda manager: manager.pool.take(), lambda manager: manager.pool.take_many(2)]
    return calls


def rationed(
    seed: int, fenced: bool, leave: int
) -> tuple[BlockManager, ReferenceBlockManager] | None:
    """The state of ``build`` with exactly ``leave`` blocks available; None if fewer are."""
    core, model = build(seed, fenced)
    taken = model.pool.available - leave
    if taken < 0:
        return None
    core.pool.take_many(taken)
    model.pool.take_many(taken)
    return core, model


@pytest.mark.parametrize("fenced", [False, True], ids=["plain", "fenced"])
def test_a_refused_call_changes_nothing(fenced: bool, summary: list[str]) -> None:
    """Refused at every shortage, ten times each; served as soon as it can be."""
    refusals = served = 0
    for seed in range(25):
        _, model = build(seed, fenced)
        for number in range(len(calls_that_take_blocks(model))):
            for leave in range(model.num_blocks + 1):
                state = rationed(seed, fenced, leave)
                if state is None:
                    break
                core, model = state
                call = calls_that_take_blocks(model)[number]
                expected = outcome(call, model)
                if expected[0] == "returned":
                    assert outcome(call, core) == expected
                    assert snapshot(core) == snapshot(model)
                    core.check()
                    served += 1
                    break
                refused_ten_times(core, call, expected)
                refusals += 1
    summary.append(
        f"failure injection{' with steps in flight' if fenced else ''}: "
        f"{refusals:,} shortages, each refused 10 times; {served:,} calls then served"
    )
    assert refusals > 900
    assert served > 300


def refused_ten_times(core: BlockManager, call: Call, expected: Any) -> None:
    before, slab_before = snapshot(core), slab_snapshot(core)
    refused_before = core.counters[Counter.OUT_OF_BLOCKS]
    _, _, needed, available = expected
    for _ in range(10):
        with pytest.raises(OutOfBlocks) as error:
            call(core)
        assert (error.value.needed, error.value.available) == (needed, available)
    # Exactly the manager's own refusals are counted; nothing else may differ.
    refusals = core.counters[Counter.OUT_OF_BLOCKS] - refused_before
    assert refusals in (0, 10)
    before["counters"][Counter.OUT_OF_BLOCKS] += refusals
    assert snapshot(core) == before
    assert slab_snapshot(core) == slab_before
    core.check()


def test_only_calls_of_the_manager_count_as_out_of_blocks() -> None:
    bm = BlockManager(2, 4)
    bm.allocate("all", 8)
    for refusals, call in enumerate(
        [
            lambda: bm.allocate("more", 1),
            lambda: bm.append_slot("all"),
            lambda: bm.append_slots("all", 3),
        ],
        start=1,
    ):
        with pytest.raises(OutOfBlocks):
            call()
        assert bm.counters[Counter.OUT_OF_BLOCKS] == refusals
    with pytest.raises(OutOfBlocks):
        bm.pool.take()
    assert not bm.can_append("all")
    assert not bm.can_allocate(1)
    assert bm.append_batch(bm.rows(["all"]), np.zeros(1, np.int64)) == (0, None)
    assert bm.counters[Counter.OUT_OF_BLOCKS] == 4


@pytest.mark.parametrize("fenced", [False, True], ids=["plain", "fenced"])
def test_a_batch_that_runs_out_serves_whole_sequences(fenced: bool) -> None:
    """Served up to the first row that finds no block; that row and all after untouched."""
    short = 0
    for seed in range(60):
        for leave in range(6):
            state = rationed(seed, fenced, leave)
            if state is None:
                break
            core, model = state
            live = list(model.lens) * 2
            slots = np.full(len(live), -1, np.int64)
            expected_slots = [-1] * len(live)
            expected = model.append_batch(model.rows(live), expected_slots)
            served, copies = core.append_batch(core.rows(live), slots)
            assert (served, plain(copies)) == expected
            assert slots.tolist() == expected_slots
            assert snapshot(core) == snapshot(model)
            core.check()
            short += 0 < served < len(live)
    assert short > 20


def misuses(live: Any, n_tokens: int, step: int) -> list[tuple[type[Exception], Call]]:
    """Each with the exception it must raise; ``live`` has ``n_tokens``."""
    far = n_tokens + 1
    return [
        (ValueError, lambda bm: bm.allocate(live, 1)),
        (ValueError, lambda bm: bm.allocate("new", -1)),
        (TypeError, lambda bm: bm.allocate("new", 1.0)),
        (TypeError, lambda bm: bm.allocate([], 1)),
        (KeyError, lambda bm: bm.append_slot("new")),
        (KeyError, lambda bm: bm.append_slots("new", 1)),
        (ValueError, lambda bm: bm.append_slots(live, -1)),
        (ValueError, lambda bm: bm.append_slots(live, 2**31 - n_tokens)),
        (ValueError, lambda bm: bm.truncate(live, far)),
        (ValueError, lambda bm: bm.truncate(live, -1)),
        (KeyError, lambda bm: bm.truncate("new", 0)),
        (ValueError, lambda bm: bm.fork(live, live)),
        (ValueError, lambda bm: bm.fork(live, "new", far)),
        (KeyError, lambda bm: bm.fork("new", "newer")),
        (KeyError, lambda bm: bm.reorder([live], ["new"])),
        (KeyError, lambda bm: bm.reorder(["new"], [live])),
        (ValueError, lambda bm: bm.reorder([live, live], [live, live])),
        (ValueError, lambda bm: bm.reorder([live], [])),
        (KeyError, lambda bm: bm.free_seq("new")),
        (ValueError, lambda bm: bm.settle(step + 1)),
        (ValueError, lambda bm: bm.settle(0)),
        (ValueError, lambda bm: bm.pin(bm.num_blocks)),
        (ValueError, lambda bm: bm.pool.take_many(-1)),
        (ValueError, lambda bm: bm.pool.release_many([0] * 99)),
    ]


def test_misuse_changes_nothing() -> None:
    """Every other exception: same state, same slab, before and after."""
    tried = 0
    for seed in range(25):
        core, _ = build(seed, fenced=bool(seed % 2))
        if not len(core):
            continue
        live = next(iter(core))
        step = core.fence()
        before, slab_before = snapshot(core), slab_snapshot(core)
        for error, misuse in misuses(live, core.lens[live], step):
            for _ in range(10):
                with pytest.raises(error):
                    misuse(core)
            assert snapshot(core) == before
            assert slab_snapshot(core) == slab_before
            tried += 1
        core.check()
    assert tried > 300


def test_a_refused_call_leaves_the_changes_to_drain_as_they_were() -> None:
    """Drained after refusals or without them: the same cells."""
    refusals = 0
    for seed in range(25):
        without, model = rationed(seed, False, 0) or pytest.fail("no such state")
        after, _ = rationed(seed, False, 0) or pytest.fail("no such state")
        for number, call in enumerate(calls_that_take_blocks(model)):
            _, asked = rationed(seed, False, 0) or pytest.fail("no such state")
            if outcome(calls_that_take_blocks(asked)[number], asked)[0] == "raised":
                with pytest.raises(OutOfBlocks):
                    call(after)
                refusals += 1
        assert after.drain_changes().tolist() == without.drain_changes().tolist()
    assert refusals > 100


# ------------------------------------------------------------------ memory refused


@contextmanager
def no_more_memory() -> Iterator[None]:
    """The system refuses new address space; what the process has may be used on."""
    resource = pytest.importorskip("resource")
    if not sys.platform.startswith("linux"):
        pytest.skip("the limit on address space is only enforced on Linux")
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer ends the process when the system refuses memory")
    gc.collect()
    old = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


# Cells of 4 bytes. The largest array that glibc may serve from memory that it kept back
# is 32 MiB, so these always ask the system.
BIG = 2**24


def arrays_of(bm: BlockManager) -> list[np.ndarray]:
    """The state of a manager that is too large for lists."""
    return [
        np.array([bm.lens[seq] for seq in bm]),
        *(np.array(bm.tables[seq]) for seq in bm),
        bm.ref.copy(),
        bm.pool.free_blocks(),
        bm.counters.copy(),
        bm.lengths.copy(),
        np.array([bm.table_generation, bm.rows_version, *bm.gauges()]),
    ]


def refused_memory_then_served(bm: BlockManager, call: Callable[[], Any]) -> None:
    before = arrays_of(bm)
    for _ in range(3):
        with no_more_memory(), pytest.raises(MemoryError):
            call()
        after = arrays_of(bm)
        assert len(after) == len(before)
        assert all(map(np.array_equal, after, before))
    bm.check()
    call()
    bm.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda bm: bm.append_slots("a", BIG),
        lambda bm: bm.allocate("b", BIG),
    ],
    ids=["append_slots", "allocate"],
)
def test_columns_that_the_system_refuses_change_nothing(call: Call) -> None:
    bm = BlockManager(BIG + 10, 1, rows=2, columns=1)
    bm.allocate("a", 5)
    refused_memory_then_served(bm, lambda: call(bm))


@pytest.mark.parametrize(
    "call",
    [
        lambda bm: bm.append_slot("a"),
        lambda bm: bm.append_slots("a", 1),
        lambda bm: bm.append_batch(bm.rows(["a"]), np.zeros(1, np.int64)),
        lambda bm: bm.append_batch(bm.rows(["a"]), np.zeros(1, np.int64), np.array([1], np.int32)),
    ],
    ids=["append_slot", "append_slots", "append_batch", "append_batch with counts"],
)
def test_a_table_with_holes_that_has_no_column_left_says_so(call: Call) -> None:
    """It spans more columns than the pool has blocks, and one more is refused."""
    rows = 2**10
    bm = BlockManager(8, 1, rows=rows, columns=BIG // rows)
    columns = bm.block_tables.shape[1]
    holes = np.full(columns - 1, -1, np.int32)
    bm.restore("a", columns, np.arange(columns - 1, dtype=np.int32), holes)
    refused_memory_then_served(bm, lambda: call(bm))
    assert bm.lens["a"] == columns + 1


@pytest.mark.parametrize(
    "call",
    [lambda bm: bm.allocate("new", 1), lambda bm: bm.fork(0, "new")],
    ids=["allocate", "fork"],
)
def test_rows_that_the_system_refuses_change_nothing(call: Call) -> None:
    rows = 2**10
    bm = BlockManager(8, 4, rows=rows, columns=BIG // rows)
    bm.allocate(0, 5)
    for seq in range(1, rows):
        bm.allocate(seq, 0)
    assert len(bm) == bm.block_tables.shape[0], "the next sequence needs a larger slab"
    refused_memory_then_served(bm, lambda: call(bm))


@pytest.mark.parametrize(
    "call",
    [
        lambda bm: bm.free_seq("a"),
        lambda bm: bm.truncate("a", 1),
        lambda bm: bm.reorder(["a"], ["b"]),
    ],
    ids=["free_seq", "truncate", "reorder"],
)
def test_a_fence_that_the_system_refuses_to_grow_changes_nothing(call: Call) -> None:
    bm = BlockManager(BIG + 10, 1, rows=2, columns=BIG)
    bm.allocate("a", BIG)
    bm.allocate("b", 7)
    step = bm.fence()
    refused_memory_then_served(bm, lambda: call(bm))
    assert bm.settle(step) >= BIG - 7
    bm.check()


def test_a_window_needs_memory_only_for_what_it_gives_back() -> None:
    """Not for every block of a long sequence, of which it gives back a few a step."""
    bm = BlockManager(BIG + 10, 1, rows=2, columns=BIG)
    bm.allocate("a", BIG)
    bm.fence()
    rows, lengths = bm.rows(["a"]), np.array([BIG], np.int32)
    with no_more_memory():
        assert bm.release_outside_window(rows, lengths, BIG - 9) == 10
    assert bm.gauges().fenced == 10


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"rows": 2**31 - 1, "columns": 2**31 - 1}, MemoryError),
        ({"rows": 2**31}, ValueError),
        ({"columns": 2**40}, ValueError),
        ({"rows": 0}, ValueError),
        ({"columns": -1}, ValueError),
        ({"rows": 1.5}, TypeError),
        ({"pool": 5}, TypeError),
        ({"pool": BlockPool(9)}, ValueError),
    ],
    ids=str,
)
def test_a_manager_that_cannot_be_made(arguments: dict[str, Any], error: type[Exception]) -> None:
    """Raises, and a pool that was to be shared is left alone."""
    pool = BlockPool(8)
    with pytest.raises(error):
        BlockManager(8, 4, **{"pool": pool, **arguments})
    pool.check()
    assert pool.free_blocks().tolist() == list(range(8))
