"""Cluster K3: table length against tokens, off-by-one, rollback, capacity.

One formula decides capacity everywhere, and a table is never longer or shorter than
its tokens need.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from itertools import product

import numpy as np
import pytest
from scenario_support import (
    Append,
    admitted,
    append_in_bulk,
    append_singly,
    blocks_with_a_middle,
    checked_manager,
    checked_scheduler,
    every_append,
    every_block_size,
    manager_state,
    out_of_blocks,
    refused,
)

from kvcore import BlockManager, BlockPool, OutOfBlocks, Resumed, Scheduler


@every_append
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_K3_01_a_table_is_exactly_as_long_as_its_tokens_need(
    append: Append, block_size: int
) -> None:
    """Nothing is reserved ahead, so no maximum length can be passed by a reservation."""
    longest = min(4 * block_size, 16)
    bm = checked_manager(longest, block_size)
    for start, stop in product(range(longest + 1), repeat=2):
        bm.allocate("A", start)
        assert len(bm.table("A")) == -(-start // block_size)
        if stop >= start:
            append(bm, "A", stop - start)
        else:
            bm.truncate("A", stop)
        assert len(bm.table("A")) == -(-stop // block_size)
        assert bm.lens["A"] == stop
        bm.free_seq("A")


@every_block_size
@pytest.mark.parametrize("append", [append_singly, append_in_bulk])
def test_K3_02_room_is_checked_for_all_tokens_of_a_step_not_for_one_block(
    append: Append, block_size: int
) -> None:
    bm = checked_manager(4, block_size)
    held, drafts = 2 * block_size, 2 * block_size
    bm.allocate("A", held)
    assert bm.can_append("A", drafts)
    assert not bm.can_append("A", drafts + 1)
    bm.allocate("other", block_size)
    assert bm.can_append("A", block_size)
    assert not bm.can_append("A", drafts)
    out_of_blocks(bm, lambda: bm.append_slots("A", drafts), needed=2, available=1)
    bm.free_seq("other")
    append(bm, "A", drafts)
    assert len(bm.table("A")) == 4


def test_K3_02_with_the_numbers_of_the_report() -> None:
    bm = checked_manager(4, 2)
    bm.allocate("A", 3)
    assert bm.can_append("A", 4)
    bm.allocate("other", 1)
    assert not bm.can_append("A", 4)
    out_of_blocks(bm, lambda: bm.append_slots("A", 4), needed=2, available=1)
    assert bm.can_append("A", 3)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_K3_02_the_plan_and_the_deed_agree_for_every_length_and_room(block_size: int) -> None:
    for length, tokens, others, shared in product(range(5), range(7), range(5), (False, True)):
        bm = checked_manager(5, block_size)
        bm.allocate("A", length)
        if shared:
            bm.fork("A", "B")
        if not bm.can_allocate(others * block_size):
            continue
        bm.allocate("other", others * block_size)
        promised = bm.can_append("A", tokens)
        try:
            slots, _ = bm.append_slots("A", tokens)
        except OutOfBlocks:
            assert not promised
            assert bm.lens["A"] == length
        else:
            assert promised
            assert len(slots) == tokens


@every_append
@every_block_size
def test_K3_03_the_length_counts_a_token_once_its_slot_is_given(
    append: Append, block_size: int
) -> None:
    bm = checked_manager(4, block_size)
    bm.allocate("full", block_size)
    append(bm, "full", 1)
    assert len(bm.table("full")) == 2
    assert bm.lens["full"] == block_size + 1

    bm.allocate("one short", block_size - 1)
    append(bm, "one short", 1)
    assert len(bm.table("one short")) == 1
    assert bm.lens["one short"] == block_size


@pytest.mark.parametrize(
    ("max_len", "block_size", "width"), [(100_000, 32, 3126), (16, 4, 5), (15, 4, 4), (7, 1, 8)]
)
@pytest.mark.parametrize("append", [append_singly, append_in_bulk])
def test_K3_04_the_slab_is_wide_enough_for_a_token_past_the_longest_prompt(
    append: Append, max_len: int, block_size: int, width: int
) -> None:
    bm = checked_manager(width, block_size, columns=-(-max_len // block_size))
    bm.allocate("A", max_len)
    append(bm, "A", 1)
    assert len(bm.table("A")) == width
    assert bm.block_tables.shape[1] >= width
    row = bm.block_tables[bm.row("A"), :width]
    assert row.tolist() == bm.table("A").tolist() == list(range(width))


def test_K3_05_every_export_has_one_width_until_the_generation_changes() -> None:
    bm = checked_manager(3168, 64, columns=3168)
    bm.allocate("A", 202_752)
    shape, generation = bm.block_tables.shape, bm.table_generation
    assert len(bm.table("A")) == 3168
    bm.truncate("A", 157_696)
    assert len(bm.table("A")) == np.asarray(bm.table("A")).size == 2464
    assert (bm.block_tables.shape, bm.table_generation) == (shape, generation)


@every_block_size
def test_K3_06_a_slot_past_the_end_is_refused_and_never_the_neighbours(block_size: int) -> None:
    bm = checked_manager(8, block_size, rows=2, columns=2)
    bm.allocate("A", 2 * block_size)
    bm.allocate("neighbour", 2 * block_size)
    last = 2 * block_size - 1
    assert bm.slots("A", last, last + 1).tolist() == [
        bm.table("A")[1] * block_size + block_size - 1
    ]
    ranges = [
        (last + 1, last + 2),
        (last + 2, last + 3),
        (0, last + 2),
        (-1, 1),
        (1, 0),
        (2**31, 2**31 + 1),
        (0, 2**62),
    ]
    for start, stop in ranges:
        refused(
            ValueError,
            partial(bm.slots, "A", start, stop),
            unchanged=lambda: manager_state(bm),
        )
    for index in (2, 3, -3, 2**40):
        with pytest.raises(IndexError):
            bm.table("A")[index]


def test_K3_06_a_slot_of_reserved_room_beyond_the_length_is_refused() -> None:
    """The block is the sequence's own, but no token was ever put at that position."""
    bm = checked_manager(4, 4)
    bm.allocate("A", 5)
    assert bm.slots("A", 4, 5).tolist() == [4]
    refused(ValueError, lambda: bm.slots("A", 5, 6), 6, unchanged=lambda: manager_state(bm))


@every_append
@every_block_size
@pytest.mark.parametrize("ways_to_fill", ["allocate", "append_slots", "truncate", "fork"])
def test_K3_07_a_table_filled_in_bulk_has_no_slot_left(
    append: Append, block_size: int, ways_to_fill: str
) -> None:
    bm = checked_manager(6, block_size)
    if ways_to_fill == "append_slots":
        bm.allocate("A", 0)
        bm.append_slots("A", 2 * block_size)
    elif ways_to_fill == "truncate":
        bm.allocate("A", 2 * block_size + 1)
        bm.truncate("A", 2 * block_size)
    elif ways_to_fill == "fork":
        bm.allocate("parent", 2 * block_size + 1)
        bm.fork("parent", "A", n_tokens=2 * block_size)
    else:
        bm.allocate("A", 2 * block_size)
    before = bm.table("A").tolist()
    (slot,), copies = append(bm, "A", 1)
    assert copies == []
    assert bm.table("A")[:2] == before
    assert slot == bm.table("A")[2] * block_size


def scheduler_that_preempts_a(
    prompt: int, generated: int, block_size: int
) -> tuple[BlockManager, Scheduler]:
    """The next step preempts A, which has its prompt and ``generated`` tokens.

    The older sequence stands on a block boundary and the pool is full to the block.
    """
    older = -generated % block_size or block_size
    num_blocks = -(-(prompt + generated) // block_size) + (older + generated) // block_size
    bm = checked_manager(num_blocks, block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    scheduler.add("older", older)
    scheduler.add("A", prompt)
    for _ in range(generated):
        assert scheduler.step() == ["older", "A"]
    assert len(bm.free) == 0
    return bm, scheduler


@every_block_size
@pytest.mark.parametrize(("prompt", "generated"), [(6, 5), (3, 5), (1, 1), (4, 4), (16, 17)])
def test_K3_08_a_preempted_request_returns_whole_however_long_it_grew(
    block_size: int, prompt: int, generated: int
) -> None:
    bm, scheduler = scheduler_that_preempts_a(prompt, generated, block_size)
    step = scheduler.step()
    assert step == ["older"]
    assert step.preempted == ["A"]
    assert step.rejected == {}
    assert list(scheduler.waiting) == [Resumed("A", prompt + generated)]

    scheduler.finish("older")
    step = scheduler.step()
    assert step == ["A"]
    assert step.rejected == {}
    assert bm.lens["A"] == prompt + generated + 1


@every_block_size
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_K3_08_a_prompt_computed_in_chunks_holds_what_the_whole_one_holds(
    block_size: int, chunk: int
) -> None:
    whole = checked_manager(16, block_size)
    whole.allocate("A", 11)
    chunked = checked_manager(16, block_size)
    chunked.allocate("A", min(chunk, 11))
    while chunked.lens["A"] < 11:
        chunked.append_slots("A", min(chunk, 11 - chunked.lens["A"]))
    assert chunked.table("A") == whole.table("A")
    assert chunked.slots("A").tolist() == whole.slots("A").tolist()


@every_block_size
@pytest.mark.parametrize(("prompt", "generated"), [(3, 5), (6, 5), (1, 1), (4, 4)])
def test_K3_09_a_return_recomputes_the_generated_tokens_with_the_prompt(
    block_size: int, prompt: int, generated: int
) -> None:
    bm, scheduler = scheduler_that_preempts_a(prompt, generated, block_size)
    scheduler.step()
    (entry,) = scheduler.waiting
    assert isinstance(entry, Resumed)
    assert entry.n_tokens == prompt + generated
    scheduler.finish("older")
    step = scheduler.step()
    assert admitted(step) == [("A", prompt + generated)]
    positions = bm.slots("A", prompt, prompt + generated)
    assert len(positions) == generated
    assert step.slots.tolist() == bm.slots("A", prompt + generated).tolist()


@every_block_size
def test_K3_10_tokens_the_engine_recorded_and_tokens_held_stay_equal_over_preemptions(
    block_size: int,
) -> None:
    """Three requests of 20 tokens in a pool for two of them."""
    target = 20
    bm = checked_manager(-(-2 * target // block_size), block_size)
    scheduler = checked_scheduler(bm, watermark_blocks=0)
    prompts: dict[Hashable, int] = {"A": 3, "B": 2, "C": 1}
    generated: dict[Hashable, list[int]] = {seq: [] for seq in prompts}
    preemptions = 0
    for seq, prompt in prompts.items():
        scheduler.add(seq, prompt)
    while scheduler.waiting or scheduler.running:
        step = scheduler.step()
        preemptions += len(step.preempted)
        for seq, slot in zip(step, step.slots.tolist(), strict=True):
            generated[seq].append(slot)
            assert bm.lens[seq] == prompts[seq] + len(generated[seq])
            assert bm.slots(seq)[-1] == slot
        for seq in step:
            if bm.lens[seq] == target:
                scheduler.finish(seq)
    assert preemptions > 0
    for seq, prompt in prompts.items():
        assert prompt + len(generated[seq]) == target


@every_append
@blocks_with_a_middle
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_K3_11_rejected_drafts_leave_the_confirmed_full_blocks_alone(
    append: Append, block_size: int, accepted: int
) -> None:
    """Publishing is not here yet; what it rests on is: 6 confirmed and 3 drafted tokens
    of 4-token blocks hold one full confirmed block, and after 2 accepted drafts two."""
    confirmed, drafts = block_size + 2, block_size - 1
    accepted = min(accepted, drafts)
    bm = checked_manager(4, block_size)
    bm.allocate("A", confirmed)
    first = bm.table("A")[0]
    bm.pool.keep(first)
    append(bm, "A", drafts)
    assert len(bm.table("A")) == 3
    bm.truncate("A", confirmed + accepted)
    kept = bm.lens["A"]
    assert kept == confirmed + accepted
    assert len(bm.table("A")) == -(-kept // block_size)
    assert bm.table("A")[0] == first
    assert bm.pool.is_kept(first)
    assert [bm.pool.is_kept(block) for block in bm.table("A")[1:]] == [False] * (
        len(bm.table("A")) - 1
    )


@every_append
@every_block_size
def test_K3_12_a_block_of_rejected_drafts_is_not_reused_before_its_step_settles(
    append: Append, block_size: int
) -> None:
    """Window pruning is not here yet; this is its rule for the tail: what an in-flight
    step may touch is freed by settled lengths, and the head is never at risk."""
    bm = checked_manager(4, block_size)
    bm.allocate("A", 2 * block_size)
    head = bm.table("A").tolist()
    in_flight = bm.fence()
    append(bm, "A", 1)
    drafted = bm.table("A")[2]
    bm.truncate("A", 2 * block_size)
    assert bm.table("A") == head
    assert drafted not in bm.free
    assert bm.gauges().fenced == 1

    append(bm, "A", 1)
    assert bm.table("A")[:2] == head
    assert bm.table("A")[2] != drafted
    assert bm.settle(in_flight) == 1
    assert list(bm.free) == [drafted]


@pytest.mark.parametrize(
    ("manager_blocks", "pool_blocks"), [(65536, 45056), (45056, 65536), (1, 2)]
)
def test_K3_14_a_manager_larger_or_smaller_than_its_pool_is_refused_naming_both(
    manager_blocks: int, pool_blocks: int
) -> None:
    pool = BlockPool(pool_blocks)
    for _ in range(10):
        with pytest.raises(ValueError, match="num_blocks") as caught:
            BlockManager(manager_blocks, 16, pool=pool)
        assert str(manager_blocks) in str(caught.value)
        assert str(pool_blocks) in str(caught.value)
    assert pool.num_free == pool_blocks
    pool.check()
    manager = BlockManager(pool_blocks, 16, pool=pool)
    manager.allocate("A", 16)
    assert pool.num_used == 1
