"""Cluster K8, the rows on forks, copies and fences.

A copy plan is data with rules: unique destinations, no block on both sides, sources
held until done. Shared blocks count once, and in-flight work is a holder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from functools import partial
from itertools import permutations

import numpy as np
import pytest
from scenario_support import (
    Append,
    admitted,
    append_as_batch,
    append_in_bulk,
    append_singly,
    blocks_with_a_middle,
    checked_manager,
    checked_scheduler,
    every_append,
    every_block_size,
    out_of_blocks,
    scaled,
)
from state import BlockMemory

from kvcore import BlockManager, Scheduler, Step


class Engine:
    """Simulated K/V memory under a scheduler: copies first, then prefills, then decodes."""

    def __init__(self, bm: BlockManager, scheduler: Scheduler) -> None:
        self.bm = bm
        self.scheduler = scheduler
        self.memory = BlockMemory()

    def step(self) -> Step:
        step = self.scheduler.step()
        memory, size = self.memory, self.bm.block_size
        memory.copy_all(step.copies.tolist(), size)
        for seq, n_tokens in admitted(step):
            memory.begin(seq, [])
            memory.write(seq, self.bm.slots(seq, 0, n_tokens).tolist(), size)
        for seq, slot in zip(step, step.slots.tolist(), strict=True):
            memory.write(seq, [slot], size)
        memory.compare(self.bm, [(seq, seq) for seq in self.scheduler.running])
        return step

    def fork(self, parent: Hashable, child: Hashable) -> None:
        self.scheduler.fork(parent, child)
        self.memory.begin(child, self.memory.tokens[parent])


@blocks_with_a_middle
def test_K8_01_a_block_freed_by_preemption_is_not_both_source_and_destination(
    block_size: int,
) -> None:
    """A copies its tail out of X and the preemption of B gives X up. C, older than B, must
    not be given X in the same step: the copies of a step may run in any order."""
    bm = checked_manager(5, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    engine = Engine(bm, scheduler)
    for seq in "AC":
        scheduler.add(seq, block_size + 1)
    engine.step()
    engine.fork("C", "D")
    engine.fork("A", "B")
    assert scheduler.running == ["A", "C", "D", "B"]
    assert len(bm.free) == 1

    step = engine.step()

    assert step[0] == "A"
    assert len(step.copies) >= 1
    assert "B" in step.preempted
    sources, destinations = set(step.copies[:, 0].tolist()), step.copies[:, 1].tolist()
    assert sources.isdisjoint(destinations)
    assert len(set(destinations)) == len(destinations)


@blocks_with_a_middle
@pytest.mark.parametrize("seed", range(8))
def test_K8_01_the_copies_of_any_step_may_run_in_any_order(block_size: int, seed: int) -> None:
    """Random forks in a pool so small that most steps preempt somebody."""
    chance = random.Random(seed)
    bm = checked_manager(14, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=chance.choice([0, 1]))
    engine = Engine(bm, scheduler)
    copies = preemptions = born = 0
    for _ in range(400):
        if len(scheduler.waiting) < 2:
            scheduler.add(born, chance.randint(1, 3 * block_size))
            born += 1
        for parent in list(scheduler.running):
            if chance.random() < 0.2 and len(scheduler.running) < 8:
                engine.fork(parent, born)
                born += 1
            elif chance.random() < 0.05 or bm.lens[parent] > 6 * block_size:
                scheduler.finish(parent)
        step = engine.step()
        copies += len(step.copies)
        preemptions += len(step.preempted)
    assert copies > 50
    assert preemptions > 50


@blocks_with_a_middle
def test_K8_01_one_batch_over_a_whole_family_names_each_block_on_one_side_only(
    block_size: int,
) -> None:
    bm = checked_manager(64, block_size)
    for root in range(4):
        bm.allocate((root, 0), block_size + 1 + root % (block_size - 1))
        for child in range(1, 5):
            bm.fork((root, child - 1), (root, child))
    seqs = list(bm)
    random.Random(0).shuffle(seqs)
    rows = bm.rows(seqs)
    out = np.empty(len(rows), np.int64)
    served, copies = bm.append_batch(rows, out)
    assert served == 20
    assert copies is not None
    assert len(copies) == 4 * 4
    assert set(copies[:, 0].tolist()).isdisjoint(copies[:, 1].tolist())
    assert len(set(copies[:, 1].tolist())) == len(copies)


@every_append
@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("writer", ["A", "B"])
def test_K8_05_a_fork_needs_no_room_and_an_append_without_room_changes_nothing(
    append: Append, block_size: int, writer: str
) -> None:
    bm = checked_manager(2, block_size)
    bm.allocate("A", scaled(6, block_size))
    assert len(bm.free) == 0
    bm.fork("A", "B")
    tables = bm.table("A").tolist()
    assert bm.table("B") == tables
    out_of_blocks(bm, lambda: append(bm, writer, 1), needed=1, available=0)
    assert not bm.can_append(writer)
    assert bm.table("A") == bm.table("B") == tables

    (other,) = {"A", "B"} - {writer}
    bm.free_seq(other)
    assert bm.can_append(writer)
    slots, copies = append(bm, writer, 1)
    assert copies == []
    assert slots == [tables[1] * block_size + scaled(6, block_size) % block_size]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_K8_05_a_fork_of_full_blocks_without_room_behaves_the_same(block_size: int) -> None:
    bm = checked_manager(2, block_size)
    bm.allocate("A", 2 * block_size)
    bm.fork("A", "B")
    for seq in "AB":
        out_of_blocks(bm, partial(bm.append_slot, seq), needed=1, available=0)
    bm.free_seq("B")
    out_of_blocks(bm, lambda: bm.append_slot("A"), needed=1, available=0)


@every_append
@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("order", list(permutations("ABC")))
def test_K8_06_of_three_holders_two_copy_and_the_last_writes_in_place(
    append: Append, block_size: int, order: tuple[str, ...]
) -> None:
    bm = checked_manager(8, block_size)
    length = scaled(6, block_size)
    bm.allocate("A", length)
    full, partial = bm.table("A")
    bm.fork("A", "B")
    bm.fork("A", "C")
    copies = [append(bm, seq, 1)[1] for seq in order]
    assert [len(made) for made in copies] == [1, 1, 0]
    assert [src for made in copies for src, _ in made] == [partial, partial]
    tails = {seq: bm.table(seq)[1] for seq in order}
    assert tails[order[2]] == partial
    assert len(set(tails.values())) == 3
    assert all(bm.table(seq)[0] == full for seq in order)
    assert bm.ref[full] == 3
    assert bm.pool.num_used == 4


@blocks_with_a_middle
@pytest.mark.parametrize("order", list(permutations("ABC")))
def test_K8_06_one_batch_over_the_three_does_the_same(
    block_size: int, order: tuple[str, ...]
) -> None:
    bm = checked_manager(8, block_size)
    bm.allocate("A", scaled(6, block_size))
    partial = bm.table("A")[1]
    bm.fork("A", "B")
    bm.fork("B", "C")
    out = np.empty(3, np.int64)
    served, copies = bm.append_batch(bm.rows(order), out)
    assert served == 3
    assert copies is not None
    assert copies.tolist() == [[partial, bm.table(seq)[1]] for seq in order[:2]]
    assert bm.table(order[2])[1] == partial
    assert out.tolist() == [bm.slots(seq)[-1] for seq in order]
    assert bm.pool.num_used == 4


@blocks_with_a_middle
def test_K8_06_in_a_step_that_preempts_the_last_holder_still_writes_in_place(
    block_size: int,
) -> None:
    """A and B share a tail. A copies into the last free block, C's need preempts D, and B,
    who now holds the tail alone, needs nothing."""
    bm = checked_manager(5, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    engine = Engine(bm, scheduler)
    scheduler.add("A", block_size + 1)
    scheduler.add("C", block_size - 1)
    engine.step()
    engine.fork("A", "B")
    scheduler.add("D", 1)
    (_, tail), in_place = bm.table("A"), bm.table("B")[1]
    step = engine.step()
    assert step.preempted == ["D"]
    assert step == ["A", "C", "B"]
    assert step.copies.tolist() == [[tail, bm.table("A")[1]]]
    assert bm.table("B")[1] == in_place


@every_block_size
@pytest.mark.parametrize("order", list(permutations(["result N", "settle N", "settle N+1"])))
def test_K8_08_a_block_that_a_later_step_still_writes_is_not_handed_out(
    block_size: int, order: tuple[str, ...]
) -> None:
    bm = checked_manager(2, block_size)
    bm.allocate("A", 2 * block_size)
    first, second = bm.fence(), bm.fence()
    assert (first, second) == (1, 2)
    events: dict[str, Callable[[], object]] = {
        "result N": lambda: bm.free_seq("A"),
        "settle N": lambda: bm.settle(first),
        "settle N+1": lambda: bm.settle(second),
    }
    done: set[str] = set()
    for event in order:
        assert len(bm.free) == 0
        out_of_blocks(bm, lambda: bm.allocate("B", block_size), needed=1, available=0)
        events[event]()
        done.add(event)
        if done >= {"result N", "settle N+1"}:
            break
    bm.allocate("B", 2 * block_size)
    assert sorted(bm.table("B")) == [0, 1]
    assert bm.gauges().fenced == 0


@every_block_size
def test_K8_08_settling_the_earlier_step_frees_only_what_it_alone_could_touch(
    block_size: int,
) -> None:
    bm = checked_manager(4, block_size)
    bm.allocate("A", block_size)
    bm.allocate("B", 2 * block_size)
    first = bm.fence()
    bm.free_seq("A")
    second = bm.fence()
    bm.free_seq("B")
    assert bm.gauges().fenced == 3
    assert len(bm.free) == 1
    assert bm.settle(first) == 1
    assert len(bm.free) == 2
    assert bm.settle(second) == 2
    assert len(bm.free) == 4


@every_block_size
@pytest.mark.parametrize("dropped_by", ["free_seq", "truncate", "reorder", "finish"])
def test_K8_08_every_way_to_drop_a_block_goes_through_the_fence(
    block_size: int, dropped_by: str
) -> None:
    bm = checked_manager(4, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    bm.allocate("other", 0)
    if dropped_by == "finish":
        scheduler.add("A", 2 * block_size)
        scheduler.step()
    else:
        bm.allocate("A", 3 * block_size)
    step = bm.fence()
    drops: dict[str, Callable[[], object]] = {
        "free_seq": lambda: bm.free_seq("A"),
        "truncate": lambda: bm.truncate("A", 0),
        "reorder": lambda: bm.reorder(["A"], ["other"]),
        "finish": lambda: scheduler.finish("A"),
    }
    drops[dropped_by]()
    assert len(bm.free) == 1
    assert bm.settle(step) == 3
    assert len(bm.free) == 4


@blocks_with_a_middle
@pytest.mark.parametrize("append", [append_singly, append_in_bulk, append_as_batch])
def test_K8_08_the_source_of_a_copy_outlives_its_other_holder_until_the_step_settles(
    append: Append, block_size: int
) -> None:
    bm = checked_manager(3, block_size)
    bm.allocate("A", 1)
    bm.fork("A", "B")
    step = bm.fence()
    _, ((source, destination),) = append(bm, "A", 1)
    bm.free_seq("B")
    assert source not in bm.free
    bm.allocate("C", block_size)
    assert source not in bm.table("C")
    assert source != destination
    bm.settle(step)
    assert list(bm.free) == [source]


@every_block_size
def test_K8_08_a_scheduler_waits_for_the_fence_instead_of_preempting(block_size: int) -> None:
    bm = checked_manager(3, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    scheduler.add("A", block_size)
    scheduler.step()
    step = bm.fence()
    scheduler.finish("A")
    scheduler.add("B", 2 * block_size)
    for _ in range(10):
        blocked = scheduler.step()
        assert blocked == []
        assert blocked.rejected == {}
        assert list(scheduler.waiting) == [("B", 2 * block_size)]
    bm.settle(step)
    assert scheduler.step() == ["B"]


@every_append
@pytest.mark.parametrize("free", [[0, 2, 4, 6], [1, 3, 5, 7], [7, 0, 3, 4]])
def test_K8_10_blocks_need_not_lie_side_by_side(append: Append, free: list[int]) -> None:
    bm = checked_manager(8, 1)
    for block in range(8):
        bm.allocate(block, 1)
    for block in free:
        bm.free_seq(block)
    assert list(bm.free) == free
    bm.allocate("A", 3)
    assert append(bm, "A", 1) == ([free[3]], [])
    assert bm.table("A") == free


@every_block_size
def test_K8_10_one_allocation_uses_every_hole(block_size: int) -> None:
    bm = checked_manager(8, block_size)
    for block in range(8):
        bm.allocate(block, block_size)
    for block in (6, 0, 4, 2):
        bm.free_seq(block)
    bm.allocate("A", 4 * block_size)
    assert bm.table("A") == [6, 0, 4, 2]
    expected = [block * block_size + i for block in (6, 0, 4, 2) for i in range(block_size)]
    assert bm.slots("A").tolist() == expected
