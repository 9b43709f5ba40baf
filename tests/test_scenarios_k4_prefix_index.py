"""Cluster K4: the prefix index, stale, early, duplicate, order.

The index describes content, not ids: publish when settled, withdraw when overwritten,
remember every twin, claim hits before fresh blocks are taken, and touch nothing until the
whole request is known to fit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from prefix_support import (
    Compute,
    compute_prompt,
    compute_together,
    counted,
    engine_step,
    every_compute,
    every_hash,
    identities,
    index_of,
    lookup,
    no_room,
    prefix_state,
    sharing_manager,
    sharing_scheduler,
    with_and_without_sharing,
    words,
)
from scenario_support import (
    Append,
    admitted,
    blocks_with_a_middle,
    checked_manager,
    every_append,
    every_block_size,
    found_cached,
    manager_state,
    out_of_blocks,
    refused,
    scheduler_state,
)

from kvcore import BlockManager, Counter, OutOfBlocks, Reason

Take = Callable[[BlockManager, int], object]


def take_for_a_sequence(bm: BlockManager, count: int) -> None:
    bm.allocate("taker", count * bm.block_size)


def take_for_tokens(bm: BlockManager, count: int) -> None:
    bm.allocate("taker", tokens=words(bm.block_size, *range(1000, 1000 + count)))


def take_by_appends(bm: BlockManager, count: int) -> None:
    bm.allocate("taker", 0)
    for _ in range(count * bm.block_size):
        bm.append_slot("taker")


def take_by_one_append(bm: BlockManager, count: int) -> None:
    bm.allocate("taker", 0)
    bm.append_slots("taker", count * bm.block_size)


def take_by_a_batch(bm: BlockManager, count: int) -> None:
    bm.allocate("taker", 0)
    rows = np.full(count * bm.block_size, bm.row("taker"), np.int32)
    assert bm.append_batch(rows, np.zeros(len(rows), np.int64))[0] == len(rows)


def take_from_the_pool(bm: BlockManager, count: int) -> None:
    bm.pool.take_many(count)


TAKES: dict[str, Take] = {
    "allocate": take_for_a_sequence,
    "allocate tokens": take_for_tokens,
    "append_slot": take_by_appends,
    "append_slots": take_by_one_append,
    "append_batch": take_by_a_batch,
    "take_many": take_from_the_pool,
}
every_take = pytest.mark.parametrize("take", TAKES.values(), ids=list(TAKES))


# ---------------------------------------------------------------- stale


@every_take
@every_compute
@every_block_size
@every_hash
def test_K4_01_a_block_that_was_reused_is_not_found_under_its_old_content(
    hash_bits: int, block_size: int, compute: Compute, take: Take
) -> None:
    bm = sharing_manager(2, block_size, hash_bits=hash_bits)
    compute(bm, "A", words(block_size, 1))
    bm.free_seq("A")
    assert lookup(bm, words(block_size, 1)) == 1
    take(bm, 2)
    assert lookup(bm, words(block_size, 1)) == 0
    assert bm.match([*words(block_size, 1), 5]) == 0
    assert identities(bm) == {}


@every_compute
@every_block_size
@every_hash
def test_K4_01_what_the_new_owner_computes_is_found_and_nothing_else(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(2, block_size, hash_bits=hash_bits)
    compute(bm, "A", words(block_size, 1))
    bm.free_seq("A")
    compute(bm, "B", words(block_size, 8, 9))
    assert lookup(bm, words(block_size, 8, 9)) == 2
    # The block that was A's stands behind another one now, or holds other tokens.
    for others in ((1,), (9,), (1, 9), (8, 1), (9, 8)):
        assert lookup(bm, words(block_size, *others)) == (1 if others[0] == 8 else 0)


WITHDRAWALS: dict[str, Callable[[BlockManager, int], object]] = {
    "evict": lambda bm, block: bm.evict(1),
    "evict of the pool": lambda bm, block: bm.pool.evict(1),
    "forget of the block": lambda bm, block: bm.pool.forget(block),
    "forget of the tokens": lambda bm, block: bm.forget(words(bm.block_size, 1)),
    "reset": lambda bm, block: bm.reset(),
    "set_epoch": lambda bm, block: bm.set_epoch(7),
}


@pytest.mark.parametrize("withdraw", WITHDRAWALS.values(), ids=list(WITHDRAWALS))
@every_compute
@every_block_size
@every_hash
def test_K4_02_a_withdrawn_block_has_no_identity_and_can_take_a_new_one(
    hash_bits: int,
    block_size: int,
    compute: Compute,
    withdraw: Callable[[BlockManager, int], object],
) -> None:
    bm = sharing_manager(1, block_size, hash_bits=hash_bits)
    compute(bm, "A", words(block_size, 1))
    bm.free_seq("A")
    (old,) = identities(bm).values()
    withdraw(bm, 0)
    assert index_of(bm).identity(0) is None
    assert identities(bm) == {}
    assert list(bm.free) == [0]
    for content in (2, 1):
        compute(bm, content, words(block_size, content))
        new = identities(bm)[0]
        assert new.tokens == words(block_size, content)
        assert new.uid > old.uid
        bm.free_seq(content)
        bm.evict(1)
        old = new


@pytest.mark.parametrize("order", list(permutations("ABC")))
@every_block_size
@every_hash
def test_K4_03_each_twin_loses_its_own_identity_and_the_others_stay_findable(
    hash_bits: int, block_size: int, order: tuple[str, ...]
) -> None:
    bm = sharing_manager(5, block_size, hash_bits=hash_bits)
    blocks = dict(zip("ABC", compute_together(bm, "ABC", words(block_size, 1)), strict=True))
    assert len(set(blocks.values())) == 3
    assert len({identity.uid for identity in identities(bm).values()}) == 1
    for seq in order:
        bm.free_seq(seq)
    for evicted in range(3):
        assert lookup(bm, words(block_size, 1)) == 1
        assert bm.evict(1) == 1
        gone, left = order[: evicted + 1], order[evicted + 1 :]
        assert [index_of(bm).identity(blocks[seq]) for seq in gone] == [None] * len(gone)
        assert set(identities(bm)) == {blocks[seq] for seq in left}
    assert lookup(bm, words(block_size, 1)) == 0


@pytest.mark.parametrize("evicted", ["A", "B"])
@every_block_size
@every_hash
def test_K4_04_the_second_copy_of_one_step_is_hit_when_the_first_is_gone(
    hash_bits: int, block_size: int, evicted: str
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    blocks = dict(zip("AB", compute_together(bm, "AB", words(block_size, 1)), strict=True))
    assert index_of(bm).duplicates == 1
    survivor = "B" if evicted == "A" else "A"
    bm.free_seq(evicted)
    bm.evict(1)
    assert set(identities(bm)) == {blocks[survivor]}
    assert bm.allocate("hit", tokens=words(block_size, 1, 2)) == block_size
    assert bm.tables["hit"][0] == blocks[survivor]
    assert bm.ref[blocks[survivor]] == 2


@every_block_size
@every_hash
def test_K4_04_children_of_either_twin_are_found_behind_both(
    hash_bits: int, block_size: int
) -> None:
    """One content is one predecessor, whichever copy a sequence was computed behind."""
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    for seq, last in (("A", 2), ("B", 3)):
        assert bm.allocate(seq, tokens=words(block_size, 1, last)) == 0
    for seq in "AB":
        bm.commit(seq)
    for evicted in "AB":
        assert lookup(bm, words(block_size, 1, 2)) == 2
        assert lookup(bm, words(block_size, 1, 3)) == 2
        if evicted == "A":
            bm.pool.forget(bm.tables["A"][0])


@every_block_size
@every_hash
def test_K4_04_merging_swaps_the_second_copy_for_the_first_and_frees_it(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits, merge_duplicates=True)
    for seq in "AB":
        bm.allocate(seq, tokens=words(block_size, 1, 2))
    first, second = list(bm.tables["A"]), list(bm.tables["B"])
    bm.commit("A")
    bm.drain_changes()
    assert bm.commit("B") == 2
    assert list(bm.tables["B"]) == first
    row = bm.row("B")
    assert bm.drain_changes().tolist() == [[row, column, first[column]] for column in (0, 1)]
    assert sorted(bm.free) == sorted(second)
    assert counted(bm, Counter.DUPLICATES_MERGED) == (2,)
    assert set(identities(bm)) == set(first)


# ---------------------------------------------------------------- rewritten


@every_append
@blocks_with_a_middle
@every_hash
def test_K4_06_a_rewritten_block_is_found_under_its_new_content_only(
    hash_bits: int, block_size: int, append: Append
) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    old = words(block_size, 1)
    new = [*old[:-1], 999]
    compute_prompt(bm, "A", old)
    (block,) = bm.tables["A"]
    bm.truncate("A", block_size - 1)
    assert (bm.known("A"), bm.published("A")) == (block_size - 1, 0)
    assert lookup(bm, old) == 1, "dropping a token overwrites nothing"
    _, copies = append(bm, "A", 1)
    assert copies == []
    assert list(bm.tables["A"]) == [block]
    assert (lookup(bm, old), lookup(bm, new)) == (0, 0)
    assert bm.commit("A", [999]) == 1
    assert (lookup(bm, old), lookup(bm, new)) == (0, 1)
    assert bm.tokens("A").tolist() == new


@every_append
@blocks_with_a_middle
@every_hash
def test_K4_06_the_same_token_written_again_is_a_new_publication(
    hash_bits: int, block_size: int, append: Append
) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1, 2)
    compute_prompt(bm, "A", tokens)
    first, second = (identities(bm)[block].uid for block in bm.tables["A"])
    bm.truncate("A", block_size - 1)
    append(bm, "A", block_size + 1)
    assert bm.commit("A", tokens[block_size - 1 :]) == 2
    assert lookup(bm, tokens) == 2
    again = [identities(bm)[block] for block in bm.tables["A"]]
    assert again[0].uid > max(first, second)
    assert again[1].parent == again[0].uid


@every_append
@blocks_with_a_middle
@every_hash
def test_K4_06_a_sharer_writes_into_a_copy_and_both_contents_are_found(
    hash_bits: int, block_size: int, append: Append
) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    old = words(block_size, 1)
    new = [*old[:-1], 999]
    compute_prompt(bm, "A", old)
    (block,) = bm.tables["A"]
    bm.fork("A", "B", n_tokens=block_size - 1)
    _, copies = append(bm, "B", 1)
    assert copies == [(block, bm.tables["B"][0])]
    bm.commit("B", [999])
    assert (lookup(bm, old), lookup(bm, new)) == (1, 1)
    assert index_of(bm).identity(block).tokens == old


@every_append
@blocks_with_a_middle
@every_hash
def test_K4_06_the_last_holder_of_a_fork_inside_a_block_withdraws_it(
    hash_bits: int, block_size: int, append: Append
) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1))
    bm.fork("A", "B", n_tokens=block_size - 1)
    bm.free_seq("A")
    assert lookup(bm, words(block_size, 1)) == 1
    append(bm, "B", 1)
    assert lookup(bm, words(block_size, 1)) == 0
    bm.commit("B", [999])
    assert lookup(bm, words(block_size, 1)) == 0


@every_append
@blocks_with_a_middle
@every_hash
def test_K4_06_a_refused_append_withdraws_nothing(
    hash_bits: int, block_size: int, append: Append
) -> None:
    """The pinned block would have to be copied, and there is no block for the copy."""
    bm = sharing_manager(1, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1))
    bm.truncate("A", block_size - 1)
    bm.pin(0)
    no_room(bm, lambda: append(bm, "A", 1), 1, 0)
    assert lookup(bm, words(block_size, 1)) == 1


@every_append
@every_block_size
@every_hash
def test_K4_06_what_a_cut_at_a_boundary_drops_stays_valid(
    hash_bits: int, block_size: int, append: Append
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1, 2))
    bm.truncate("A", block_size)
    append(bm, "A", block_size)
    bm.commit("A", words(block_size, 3))
    assert lookup(bm, words(block_size, 1, 2)) == 2
    assert lookup(bm, words(block_size, 1, 3)) == 2


# ---------------------------------------------------------------- early


@every_block_size
@every_hash
def test_K4_08_what_is_only_scheduled_is_no_hit_until_it_is_settled(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(12, block_size, hash_bits=hash_bits)
    first, second = words(block_size, 1, 2, 3, 4), words(block_size, 1, 2, 3, 5)
    bm.allocate("first", tokens=first)
    assert bm.match(second) == 0
    assert bm.allocate("second", tokens=second) == 0
    assert set(bm.tables["first"]).isdisjoint(bm.tables["second"])
    for settled in range(4 * block_size + 1):
        bm.commit("first", n_settled=settled)
        assert lookup(bm, first) == settled // block_size
        assert bm.match(second) == min(3, settled // block_size) * block_size


@pytest.mark.parametrize("waits", [False, True])
@every_block_size
@every_hash
def test_K4_08_a_request_of_the_same_step_computes_it_or_waits_one_step_and_hits(
    hash_bits: int, block_size: int, waits: bool
) -> None:
    bm = sharing_manager(24, block_size, hash_bits=hash_bits)
    scheduler = sharing_scheduler(bm, wait_for_prefix=waits)
    first, second = words(block_size, 1, 2, 3, 4), words(block_size, 1, 2, 3, 5)
    scheduler.add("first", tokens=first)
    scheduler.add("second", tokens=second)
    step = engine_step(bm, scheduler, {"first": 901, "second": 902})
    if waits:
        assert step == ["first"]
        step = engine_step(bm, scheduler, {"first": 901, "second": 902})
        assert step == ["first", "second"]
        assert admitted(step) == [("second", len(second))]
        assert found_cached(step) == [3 * block_size]
        assert bm.tables["second"][:3] == bm.tables["first"][:3]
    else:
        assert step == ["first", "second"]
        assert found_cached(step) == [0, 0]
        assert set(bm.tables["first"]).isdisjoint(bm.tables["second"])


@every_block_size
@every_hash
def test_K4_09_what_never_ran_is_no_cache(hash_bits: int, block_size: int) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    bm.allocate("A", tokens=words(block_size, 1, 2))
    bm.free_seq("A")
    assert lookup(bm, words(block_size, 1, 2)) == 0
    assert identities(bm) == {}
    assert list(bm.free) == [2, 3, 1, 0]


@every_block_size
@every_hash
def test_K4_09_only_the_part_that_ran_is_cache(hash_bits: int, block_size: int) -> None:
    for settled in range(2 * block_size + 1):
        bm = sharing_manager(4, block_size, hash_bits=hash_bits)
        bm.allocate("A", tokens=words(block_size, 1, 2))
        assert bm.commit("A", n_settled=settled) == settled // block_size
        bm.free_seq("A")
        assert lookup(bm, words(block_size, 1, 2)) == settled // block_size


@pytest.mark.parametrize("door", ["finish", "abort"])
@every_block_size
def test_K4_09_a_request_ended_before_its_prefill_ran_leaves_no_cache(
    block_size: int, door: str
) -> None:
    bm = sharing_manager(8, block_size)
    scheduler = sharing_scheduler(bm)
    scheduler.add("A", tokens=words(block_size, 1, 2))
    assert scheduler.step() == ["A"]
    assert getattr(scheduler, door)("A")
    assert lookup(bm, words(block_size, 1, 2)) == 0
    assert len(bm.free) == 8


# ---------------------------------------------------------------- claims and capacity


@every_compute
@every_block_size
@every_hash
def test_K4_10_an_idle_hit_counts_once_and_keeps_its_identity(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    compute(bm, "A", words(block_size, 1))
    (hit,) = bm.tables["A"]
    bm.free_seq("A")
    before = identities(bm)
    fits, does_not = words(block_size, 1, 2, 3), words(block_size, 1, 2, 3, 4)
    assert bm.plan_allocate(tokens=fits) == (block_size, 2, 2)
    assert bm.plan_allocate(tokens=does_not) == (block_size, 3, 2)
    assert bm.can_allocate(tokens=fits)
    assert not bm.can_allocate(tokens=does_not)
    assert not bm.can_allocate(tokens=fits, watermark=1)
    assert bm.can_allocate(tokens=fits[:-block_size], watermark=1)
    no_room(bm, lambda: bm.allocate("B", tokens=does_not), 3, 2)
    assert bm.allocate("B", tokens=fits) == block_size
    assert bm.tables["B"][0] == hit
    assert bm.ref[hit] == 1
    assert identities(bm) == before, "the hit keeps its identity, nothing new has one yet"
    assert lookup(bm, fits) == 1
    bm.commit("B")
    assert lookup(bm, fits) == 3


@pytest.mark.parametrize("running", [False, True])
@every_block_size
@every_hash
def test_K4_11_ten_failed_admissions_touch_no_hit(
    hash_bits: int, block_size: int, running: bool
) -> None:
    bm = sharing_manager(5, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "other", words(block_size, 9))
    compute_prompt(bm, "A", words(block_size, 1, 2))
    bm.free_seq("other")
    if not running:
        bm.free_seq("A")
    too_long = words(block_size, 1, 2, 3, 4, 5, 6)
    prompt = bm.prompt(too_long)
    for tokens in (too_long, tuple(too_long), np.array(too_long, np.int64), prompt):
        no_room(bm, lambda tokens=tokens: bm.allocate("B", tokens=tokens), 4, 3)
    assert "B" not in bm
    assert lookup(bm, too_long) == 2


@every_block_size
@every_hash
def test_K4_11_a_waiting_head_touches_no_hit_however_often_it_is_tried(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(5, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1))
    bm.free_seq("A")
    compute_prompt(bm, "newer", words(block_size, 9))
    bm.free_seq("newer")
    bm.allocate("outside", 2 * block_size)
    scheduler = sharing_scheduler(bm)
    scheduler.add("B", tokens=words(block_size, 1, 2, 3, 4))
    before = prefix_state(bm)
    for _ in range(10):
        assert scheduler.step() == []
        assert scheduler.why("B").reason is Reason.BLOCKS
        assert prefix_state(bm) == before


@pytest.mark.parametrize("order", list(permutations(["hit", "X", "Y"])))
@every_block_size
@every_hash
def test_K4_12_a_request_never_evicts_its_own_hit(
    hash_bits: int, block_size: int, order: tuple[str, ...]
) -> None:
    """Wherever the hit stands in the order of eviction."""
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    contents = {"hit": 1, "X": 8, "Y": 9}
    for seq, name in contents.items():
        compute_prompt(bm, seq, words(block_size, name))
    (hit,) = bm.tables["hit"]
    for seq in order:
        bm.free_seq(seq)
    assert len(bm.free) == 0
    assert bm.allocate("B", tokens=words(block_size, 1, 2, 3)) == block_size
    table = list(bm.tables["B"])
    assert table[0] == hit
    assert sorted(table) == [0, 1, 2]
    assert counted(bm, Counter.EVICTIONS) == (2,)


@every_block_size
@every_hash
def test_K4_12_a_hit_at_the_head_of_the_eviction_order_of_two_blocks(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(2, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "hit", words(block_size, 1))
    compute_prompt(bm, "X", words(block_size, 9))
    bm.free_seq("hit")
    bm.free_seq("X")
    assert bm.allocate("B", tokens=words(block_size, 1, 2)) == block_size
    assert sorted(bm.tables["B"]) == [0, 1]
    assert (lookup(bm, words(block_size, 1)), lookup(bm, words(block_size, 9))) == (1, 0)


@pytest.mark.parametrize("kept", ["tokens", "Prompt"])
@every_block_size
@every_hash
def test_K4_14_a_try_that_failed_leaves_no_hits_behind(
    hash_bits: int, block_size: int, kept: str
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "cached", words(block_size, 1, 2))
    bm.free_seq("cached")
    bm.allocate("holds the rest", 2 * block_size)
    tokens = words(block_size, 1, 2, 3)
    request = bm.prompt(tokens) if kept == "Prompt" else tokens
    assert bm.plan_allocate(tokens=request) == (2 * block_size, 1, 0)
    no_room(bm, lambda: bm.allocate("A", tokens=request), 1, 0)
    bm.evict(2)
    bm.free_seq("holds the rest")
    assert bm.plan_allocate(tokens=request) == (0, 3, 4)
    assert bm.allocate("A", tokens=request) == 0
    assert len(set(bm.tables["A"])) == 3
    assert bm.published("A") == 0


@every_block_size
@every_hash
def test_K4_14_a_waiting_request_forgets_the_hits_of_an_earlier_step(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(5, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "cached", words(block_size, 1, 2))
    bm.free_seq("cached")
    bm.allocate("holds the rest", 3 * block_size)
    scheduler = sharing_scheduler(bm)
    scheduler.add("A", tokens=words(block_size, 1, 2, 3))
    assert scheduler.step() == []
    assert scheduler.why("A").needed == 1
    bm.evict(2)
    assert scheduler.step() == []
    assert scheduler.why("A").needed == 3
    bm.free_seq("holds the rest")
    step = engine_step(bm, scheduler, {"A": 900})
    assert admitted(step) == [("A", 3 * block_size)]
    assert found_cached(step) == [0]


@every_hash
def test_K4_15_one_token_is_always_left_to_compute(hash_bits: int) -> None:
    bm = sharing_manager(16, 4, hash_bits=hash_bits)
    tokens = list(range(17))
    compute_prompt(bm, "cached", tokens)
    usable = {length: bm.match(tokens[:length]) // 4 for length in (8, 9, 12, 13, 14, 17)}
    assert usable == {8: 1, 9: 2, 12: 2, 13: 3, 14: 3, 17: 4}


@pytest.mark.parametrize("running", [False, True])
@every_block_size
@every_hash
def test_K4_15_at_every_length_match_plan_and_allocate_leave_the_last_token(
    hash_bits: int, block_size: int, running: bool
) -> None:
    bm = sharing_manager(16, block_size, hash_bits=hash_bits)
    tokens = [*words(block_size, 1, 2, 3, 4), 7]
    compute_prompt(bm, "cached", tokens)
    if not running:
        bm.free_seq("cached")
    for length in range(1, len(tokens) + 1):
        expected = (length - 1) // block_size * block_size
        forms = (tokens[:length], np.array(tokens[:length], np.int64), bm.prompt(tokens[:length]))
        for form in forms:
            assert bm.match(form) == expected
            assert bm.plan_allocate(tokens=form).cached_tokens == expected
            assert bm.allocate("A", tokens=form) == expected
            assert len(bm.tables["A"]) == -(-length // block_size)
            assert bm.published("A") == expected // block_size
            bm.free_seq("A")
    assert bm.match([]) == 0
    # With room for more tokens the last known one may be cached too.
    assert bm.allocate("A", len(tokens), tokens=tokens[:-1]) == 4 * block_size


# ---------------------------------------------------------------- partial blocks and holes


def children(bm: BlockManager, parent: int) -> list[int]:
    return sorted(identity.uid for identity in identities(bm).values() if identity.parent == parent)


@every_append
@blocks_with_a_middle
@every_hash
def test_K4_16_a_partial_block_has_no_key_and_a_parent_no_stale_child(
    hash_bits: int, block_size: int, append: Append
) -> None:
    """The key of a block that is filling up never exists here: only full blocks are
    published. What remains of the row is that a parent has exactly the child that
    filled, and none once that one is dropped."""
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", [*words(block_size, 1), 701, 702])
    (parent,) = identities(bm).values()
    assert children(bm, parent.uid) == []
    for filled in range(3, block_size + 1):
        append(bm, "A", 1)
        published = bm.commit("A", [700 + filled])
        assert published == (filled == block_size)
        assert len(children(bm, parent.uid)) == published
    (child,) = children(bm, parent.uid)
    assert identities(bm)[bm.tables["A"][1]].uid == child
    bm.free_seq("A")
    assert bm.evict(1) == 1
    assert children(bm, parent.uid) == []
    assert bm.evict(1) == 1
    assert identities(bm) == {}


@pytest.mark.parametrize("hole", [0, 1, 2, 3])
@every_block_size
@every_hash
def test_K4_17_a_hole_ends_the_match(hash_bits: int, block_size: int, hole: int) -> None:
    """The blocks behind the hole are held by somebody, so that it alone can be evicted."""
    bm = sharing_manager(6, block_size, hash_bits=hash_bits)
    chain = words(block_size, 1, 2, 3, 4)
    compute_prompt(bm, "A", chain)
    table = list(bm.tables["A"])
    for column, block in enumerate(table):
        if column != hole:
            bm.pin(block)
    bm.free_seq("A")
    assert bm.evict(9) == 1
    assert index_of(bm).identity(table[hole]) is None
    assert lookup(bm, chain) == hole
    assert len(identities(bm)) == 3


@every_block_size
@every_hash
def test_K4_17_blocks_behind_a_hole_stay_out_of_reach_when_it_is_filled_again(
    hash_bits: int, block_size: int
) -> None:
    """The new copy is a new publication; what hung on the old one ages out."""
    bm = sharing_manager(6, block_size, hash_bits=hash_bits)
    chain = words(block_size, 1, 2, 3)
    compute_prompt(bm, "A", chain)
    bm.pool.forget(bm.tables["A"][0])
    bm.free_seq("A")
    assert lookup(bm, chain) == 0
    compute_prompt(bm, "B", words(block_size, 1))
    assert lookup(bm, chain) == 1
    compute_prompt(bm, "C", chain)
    assert lookup(bm, chain) == 3


# ---------------------------------------------------------------- order


@every_take
@every_compute
@every_block_size
def test_K4_18_the_tail_of_a_chain_goes_before_its_head(
    block_size: int, compute: Compute, take: Take
) -> None:
    for taken in (1, 2, 3):
        bm = sharing_manager(3, block_size)
        chain = words(block_size, 1, 2, 3)
        compute(bm, "A", chain)
        bm.free_seq("A")
        take(bm, taken)
        assert lookup(bm, chain) == 3 - taken
        assert len(identities(bm)) == 3 - taken


@every_block_size
def test_K4_18_a_chain_truncated_bit_by_bit_is_evicted_from_its_tail(block_size: int) -> None:
    bm = sharing_manager(4, block_size)
    chain = words(block_size, 1, 2, 3, 4)
    compute_prompt(bm, "A", chain)
    bm.truncate("A", 2 * block_size)
    bm.truncate("A", 0)
    for left in (3, 2, 1, 0):
        bm.evict(1)
        assert lookup(bm, chain) == left


HITS: dict[str, Callable[[BlockManager, list[int]], object]] = {
    "a sequence": lambda bm, tokens: (
        bm.allocate("R", tokens=[*tokens, 5]),
        bm.free_seq("R"),
    ),
    "a pinned prefix": lambda bm, tokens: bm.pin_prefix(tokens).release(),
    "a pin": lambda bm, tokens: (bm.pin(0), bm.unpin(0)),
}


@pytest.mark.parametrize("hit", HITS.values(), ids=list(HITS))
@every_block_size
@every_hash
def test_K4_20_a_hit_makes_a_block_the_most_recently_used(
    hash_bits: int, block_size: int, hit: Callable[[BlockManager, list[int]], object]
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    for seq, name in (("X", 1), ("Y", 2), ("Z", 3)):
        compute_prompt(bm, seq, words(block_size, name))
    for seq in "XYZ":
        bm.free_seq(seq)
    assert bm.pool.evictable_blocks().tolist() == [0, 1, 2]
    hit(bm, words(block_size, 1))
    assert bm.pool.evictable_blocks().tolist() == [1, 2, 0]
    bm.evict(1)
    assert [lookup(bm, words(block_size, name)) for name in (1, 2, 3)] == [1, 0, 1]


@every_block_size
@every_hash
def test_K4_20_the_block_that_a_hit_needs_beside_it_is_the_other_one(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(2, block_size, hash_bits=hash_bits)
    for seq, name in (("X", 1), ("Y", 2)):
        compute_prompt(bm, seq, words(block_size, name))
    bm.free_seq("X")
    bm.free_seq("Y")
    assert bm.allocate("R", tokens=[*words(block_size, 1), 5]) == block_size
    assert [lookup(bm, words(block_size, name)) for name in (1, 2)] == [1, 0]


@every_block_size
def test_K4_20_asking_is_not_using(block_size: int) -> None:
    bm = sharing_manager(2, block_size)
    for seq, name in (("X", 1), ("Y", 2)):
        compute_prompt(bm, seq, words(block_size, name))
    bm.free_seq("X")
    bm.free_seq("Y")
    before = prefix_state(bm)
    question = [*words(block_size, 1), 5]
    for _ in range(10):
        assert bm.match(question) == block_size
        bm.plan_allocate(tokens=question)
        bm.can_allocate(tokens=question)
        bm.match(bm.prompt(question))
        assert prefix_state(bm) == before
    bm.evict(1)
    assert [lookup(bm, words(block_size, name)) for name in (1, 2)] == [0, 1]


def either_manager(sharing: bool, num_blocks: int, block_size: int) -> BlockManager:
    make = sharing_manager if sharing else checked_manager
    return make(num_blocks, block_size)


@with_and_without_sharing
@pytest.mark.parametrize("order", list(permutations(range(3))))
@every_block_size
def test_K4_21_a_failed_batch_leaves_the_order_of_the_free_list(
    block_size: int, order: tuple[int, ...], sharing: bool
) -> None:
    bm = either_manager(sharing, 3, block_size)
    bm.pool.take_many(3)
    for block in order:
        bm.pool.release(block)
    bm.allocate("A", 0)
    tokens = words(block_size, 1, 2, 3, 4)
    calls: list[Callable[[], object]] = [
        lambda: bm.pool.take_many(4),
        lambda: bm.allocate("B", 4 * block_size),
        lambda: bm.allocate("B", tokens=tokens),
        lambda: bm.append_slots("A", 4 * block_size),
    ]
    for call in calls:
        refused(OutOfBlocks, call, unchanged=lambda: manager_state(bm))
        assert list(bm.free) == list(order)


@every_append
@with_and_without_sharing
@pytest.mark.parametrize("order", list(permutations("ABC")))
@every_block_size
def test_K4_22_blocks_come_out_again_in_one_order_with_sharing_on_and_off(
    block_size: int, order: tuple[str, ...], sharing: bool, append: Append
) -> None:
    """Oldest first, each sequence from its tail: with sharing on they are cached and are
    evicted in that order, with sharing off they are free and are taken in that order."""
    bm = either_manager(sharing, 6, block_size)
    for number, seq in enumerate("ABC"):
        bm.allocate(seq, tokens=words(block_size, 10 * number, 10 * number + 1))
    for seq in "ABC":
        bm.commit(seq)
    documented = [block for seq in order for block in reversed(list(bm.tables[seq]))]
    for seq in order:
        bm.free_seq(seq)
    assert bm.pool.num_evictable == (6 if sharing else 0)
    bm.allocate("D", 0)
    append(bm, "D", 6 * block_size)
    assert list(bm.tables["D"]) == documented


@pytest.mark.parametrize("seed", range(20))
@every_block_size
def test_K4_22_without_cached_blocks_the_switch_changes_no_table(
    block_size: int, seed: int
) -> None:
    rng = random.Random(seed)
    managers = [either_manager(sharing, 12, block_size) for sharing in (False, True)]
    live: list[int] = []
    for number in range(150):
        kind = rng.choice(["allocate", "append", "fork", "truncate", "free"])
        seq = rng.choice(live) if live else None
        amount = rng.randrange(3 * block_size)
        outcomes = []
        for bm in managers:
            try:
                if kind == "allocate" or seq is None:
                    bm.allocate(number, amount)
                elif kind == "append":
                    bm.append_slots(seq, amount)
                elif kind == "fork":
                    bm.fork(seq, number, n_tokens=min(amount, bm.length(seq)))
                elif kind == "truncate":
                    bm.truncate(seq, min(amount, bm.length(seq)))
                else:
                    bm.free_seq(seq)
                outcomes.append("done")
            except OutOfBlocks as error:
                outcomes.append(f"{error.needed} {error.available}")
        first, second = map(manager_state, managers)
        assert outcomes[0] == outcomes[1]
        assert first == second
        live = list(managers[0])


@pytest.mark.parametrize("full_blocks", [0, 1, 2])
@every_compute
@blocks_with_a_middle
@every_hash
def test_K4_26_a_tail_shorter_than_a_block_gets_no_key(
    hash_bits: int, block_size: int, compute: Compute, full_blocks: int
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    whole = words(block_size, *range(full_blocks))
    tokens = [*whole, *words(block_size, 9)[:-1]]
    compute(bm, "A", tokens)
    assert len(identities(bm)) == full_blocks
    assert bm.published("A") == full_blocks
    for asked in (tokens, [*tokens, 5], [*tokens, 5, 6, 7, 8], whole):
        assert lookup(bm, asked) == full_blocks
    bm.free_seq("A")
    assert bm.pool.num_evictable == full_blocks
    assert bm.evict(9) == full_blocks
    assert identities(bm) == {}
    assert len(bm.free) == 4


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (2, 2), (3, 2), (2**30, 2)])
@every_block_size
@every_hash
def test_K4_27_evict_goes_on_past_blocks_that_are_shared(
    hash_bits: int, block_size: int, count: int, expected: int
) -> None:
    """The three least recently used blocks are in use again by the time of the call."""
    bm = sharing_manager(7, block_size, hash_bits=hash_bits)
    shared, idle = words(block_size, 1, 2, 3), words(block_size, 8, 9)
    compute_prompt(bm, "first", shared)
    compute_prompt(bm, "second", idle)
    bm.free_seq("first")
    bm.free_seq("second")
    assert bm.allocate("running", tokens=[*shared, 5]) == 3 * block_size
    table = list(bm.tables["running"])
    assert bm.evict(count) == expected
    assert bm.tables["running"] == table
    assert lookup(bm, shared) == 3
    assert lookup(bm, idle) == 2 - expected
    assert bm.evict(9) == 2 - expected
    assert bm.evict(9) == 0


@pytest.mark.parametrize("how", ["pin", "prefix", "two pins"])
@every_block_size
@every_hash
def test_K4_28_reset_withdraws_a_pinned_block_and_names_it(
    hash_bits: int, block_size: int, how: str
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    chain = words(block_size, 1, 2, 3)
    compute_prompt(bm, "A", chain)
    held = int(bm.tables["A"][0])
    if how == "prefix":
        prefix = bm.pin_prefix(chain[:block_size])
        assert list(prefix.blocks) == [held]
        releases: list[Callable[[], object]] = [prefix.release]
    else:
        releases = [lambda: bm.unpin(held)] * (2 if how == "two pins" else 1)
        for _ in releases:
            bm.pin(held)
    bm.free_seq("A")
    assert bm.reset() == [held]
    assert lookup(bm, chain) == 0
    assert identities(bm) == {}
    assert len(bm.free) == 3
    assert bm.ref[held] == len(releases)
    assert bm.reset() == [], "it has no identity any more"
    for release in releases:
        release()
    assert len(bm.free) == 4, "nothing is orphaned"
    assert bm.pool.num_evictable == 0


@every_block_size
def test_K4_28_reset_twice_or_on_an_empty_index_names_nothing(block_size: int) -> None:
    bm = sharing_manager(2, block_size)
    for _ in range(10):
        assert bm.reset() == []
    compute_prompt(bm, "A", words(block_size, 1))
    bm.free_seq("A")
    assert bm.reset() == []
    assert list(bm.free) == [1, 0]
    out_of_blocks(bm, lambda: bm.allocate("B", 3 * block_size), needed=3, available=2)
    assert scheduler_state(sharing_scheduler(bm)) == {"waiting": [], "running": []}
