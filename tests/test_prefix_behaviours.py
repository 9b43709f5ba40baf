"""Behaviours that prefix caches of other engines are tested for, as kvcore has them.

Radix trees and block pools differ inside, but what a request may hit, what a free or an
eviction leaves behind, and who owns which block can be asked of all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from itertools import permutations
from typing import Any

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
    words,
)
from scenario_support import (
    Append,
    blocks_with_a_middle,
    every_append,
    every_block_size,
    found_cached,
    refused,
)

from kvcore import BlockManager, BlockPool, Counter, OutOfBlocks
from kvcore.identity import Media, Namespace
from kvcore.prefix_index import PrefixIndex

# ---------------------------------------------------------------- reuse


@every_compute
@every_block_size
@every_hash
def test_reuse_gives_the_same_blocks_in_the_same_order(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    tokens = [*words(block_size, 1, 2, 3), 5]
    compute(bm, "A", tokens)
    table = list(bm.tables["A"])
    bm.free_seq("A")
    for again in range(10):
        assert bm.allocate(again, tokens=tokens) == 3 * block_size
        assert bm.tables[again][:3] == table[:3]
        bm.free_seq(again)


@every_hash
def test_an_unaligned_prompt_of_seven_in_blocks_of_two(hash_bits: int) -> None:
    bm = sharing_manager(6, 2, hash_bits=hash_bits)
    tokens = list(range(7))
    assert bm.allocate("A", tokens=tokens) == 0
    assert len(bm.tables["A"]) == 4
    assert len(bm.slots("A")) == 7
    assert bm.commit("A") == 3
    assert [bm.match(tokens[:length]) for length in range(1, 8)] == [0, 0, 2, 2, 4, 4, 6]
    bm.free_seq("A")
    assert (bm.pool.num_evictable, bm.pool.num_free) == (3, 3)
    assert bm.allocate("B", tokens=[0, 1, 2, 9, 9, 9, 9]) == 2


@every_block_size
@every_hash
def test_a_prompt_of_whole_blocks_never_matches_its_last_one(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(16, block_size, hash_bits=hash_bits)
    for blocks in range(1, 5):
        tokens = words(block_size, *range(blocks))
        compute_prompt(bm, "A", tokens)
        assert bm.match(tokens) == (blocks - 1) * block_size
        assert bm.allocate("B", tokens=tokens) == (blocks - 1) * block_size
        assert bm.tables["B"][blocks - 1] != bm.tables["A"][blocks - 1]
        bm.free_seq("A")
        bm.free_seq("B")


def test_eight_cached_tokens_in_pages_of_four_give_four() -> None:
    bm = sharing_manager(8, 4)
    tokens = list(range(8))
    compute_prompt(bm, "A", tokens)
    assert bm.match(tokens) == 4
    assert bm.match([*tokens, 8]) == 8


@pytest.mark.parametrize("length", [1, 3, 4, 5, 6, 8, 12])
@every_hash
def test_what_two_branches_share_is_found_at_every_length(hash_bits: int, length: int) -> None:
    bm = sharing_manager(16, 2, hash_bits=hash_bits)
    trunk = [1, 2, 3, 4, 5, 6]
    branches = [[*trunk, 7, 8, 9, 10, 11, 12], [*trunk, 17, 18, 19, 20, 21, 22]]
    for number, branch in enumerate(branches):
        compute_prompt(bm, number, branch)
    for branch in branches:
        assert lookup(bm, branch[:length]) == length // 2
    assert lookup(bm, [*trunk, 7, 18, 9]) == 3
    assert bm.tables[0][:3] == bm.tables[1][:3]


@every_block_size
@every_hash
def test_a_match_after_the_owner_was_freed_and_its_id_lives_again(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1, 2))
    table = list(bm.tables["A"])
    bm.free_seq("A")
    compute_prompt(bm, "A", words(block_size, 8))
    assert bm.allocate("B", tokens=[*words(block_size, 1, 2), 5]) == 2 * block_size
    assert bm.tables["B"][:2] == table


@every_compute
@every_block_size
@every_hash
def test_each_turn_of_a_conversation_hits_all_that_came_before(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(120, block_size, hash_bits=hash_bits)
    compute(bm, "system", words(block_size, 1, 2))
    history = words(block_size, 1, 2)
    for turn in range(8):
        prompt = [*history, *range(10_000 + 10 * turn, 10_000 + 10 * turn + 5)]
        assert bm.allocate("chat", tokens=prompt) == len(history) // block_size * block_size
        bm.commit("chat")
        answer = list(range(20_000 + 10 * turn, 20_000 + 10 * turn + 7))
        bm.append_slots("chat", len(answer))
        bm.commit("chat", answer)
        history = prompt + answer
        bm.free_seq("chat")
    bm.free_seq("system")
    assert bm.pool.num_used == 0
    assert bm.pool.num_evictable == len(history) // block_size


# ---------------------------------------------------------------- duplicates


@every_compute
@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@every_block_size
@every_hash
def test_two_identical_prefills_freed_in_either_order_leave_one_content(
    hash_bits: int, block_size: int, blocks: int, order: str, compute: Compute
) -> None:
    """The copies are two until one is evicted; what a request can reach is one."""
    bm = sharing_manager(3 * blocks + 1, block_size, hash_bits=hash_bits)
    tokens = words(block_size, *range(blocks))
    if compute is compute_prompt:
        compute_together(bm, "AB", tokens)
    else:
        compute(bm, "A", tokens)
        bm.allocate("B", 0)
        bm.append_slots("B", len(tokens))
        bm.commit("B", tokens)
    for seq in order:
        bm.free_seq(seq)
    assert lookup(bm, tokens) == blocks
    assert len({identity.uid for identity in identities(bm).values()}) == blocks
    assert bm.allocate("hit", tokens=[*tokens, 5]) == blocks * block_size
    table = list(bm.tables["hit"])[:blocks]
    assert len(set(table)) == blocks
    bm.free_seq("hit")
    bm.evict(bm.pool.num_evictable - blocks)
    assert len(identities(bm)) == blocks
    bm.evict(blocks)
    assert lookup(bm, tokens) == 0
    assert len(bm.free) == bm.num_blocks


@pytest.mark.parametrize("order", ["AB", "BA"])
@every_block_size
@every_hash
def test_merging_frees_exactly_the_duplicated_middle_of_two_prefills(
    hash_bits: int, block_size: int, order: str
) -> None:
    """The first block was shared at allocation, the second is computed twice, the rest
    differs. Nothing is freed but one copy of the second."""
    bm = sharing_manager(10, block_size, hash_bits=hash_bits, merge_duplicates=True)
    compute_prompt(bm, "system", words(block_size, 1))
    for seq, last in (("A", 3), ("B", 4)):
        assert bm.allocate(seq, tokens=words(block_size, 1, 2, last)) == block_size
    tables = {seq: list(bm.tables[seq]) for seq in "AB"}
    first, second = order
    bm.commit(first)
    free = list(bm.free)
    assert bm.commit(second) == 2
    assert list(bm.free) == [*free, tables[second][1]]
    assert list(bm.tables[first]) == tables[first]
    assert list(bm.tables[second]) == [tables[first][0], tables[first][1], tables[second][2]]
    for seq in order:
        bm.free_seq(seq)
    bm.free_seq("system")
    assert bm.pool.num_evictable == 4
    assert lookup(bm, words(block_size, 1, 2, 3)) == lookup(bm, words(block_size, 1, 2, 4)) == 3


@every_append
@every_block_size
def test_merging_works_while_decoding(block_size: int, append: Append) -> None:
    bm = sharing_manager(6, block_size, merge_duplicates=True)
    for seq in "AB":
        bm.allocate(seq, 0)
        append(bm, seq, 2 * block_size)
    for token in words(block_size, 1, 2):
        for seq in "AB":
            bm.commit(seq, [token])
    assert list(bm.tables["A"]) == list(bm.tables["B"])
    assert bm.pool.num_used == 2
    assert counted(bm, Counter.DUPLICATES_MERGED) == (2,)


@every_block_size
@every_hash
def test_equal_prompts_of_one_batch_are_private_and_the_next_one_hits(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(40, block_size, hash_bits=hash_bits)
    scheduler = sharing_scheduler(bm, wait_for_prefix=False)
    prompt = words(block_size, 1, 2, 3)
    for number in range(4):
        scheduler.add(number, tokens=prompt)
    step = engine_step(bm, scheduler, dict.fromkeys(range(4), 900))
    assert found_cached(step) == [0] * 4
    assert len({block for number in range(4) for block in bm.tables[number][:3]}) == 12
    scheduler.add("late", tokens=prompt)
    step = engine_step(bm, scheduler, dict.fromkeys([*range(4), "late"], 901))
    assert found_cached(step) == [2 * block_size]


# ---------------------------------------------------------------- eviction


@every_compute
@every_block_size
@every_hash
def test_the_prefix_that_was_freed_first_is_collected_first(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    for order in permutations((1, 2, 3)):
        bm = sharing_manager(6, block_size, hash_bits=hash_bits)
        for name in (1, 2, 3):
            compute(bm, name, words(block_size, name, name + 50))
        for name in order:
            bm.free_seq(name)
        for evicted in range(6):
            found = [lookup(bm, words(block_size, name, name + 50)) for name in order]
            whole, part = divmod(evicted, 2)
            assert found == ([0] * whole + [2 - part, 2, 2])[:3]
            bm.evict(1)


@pytest.mark.parametrize(("asked", "left"), [(0, 4), (1, 3), (3, 1), (4, 0), (5, 0)])
@every_block_size
@every_hash
def test_evicting_less_exactly_and_more_than_what_is_cached(
    hash_bits: int, block_size: int, asked: int, left: int
) -> None:
    bm = sharing_manager(6, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1, 2, 3, 4)
    compute_prompt(bm, "A", tokens)
    bm.free_seq("A")
    assert bm.evict(asked) == 4 - left
    assert lookup(bm, tokens) == left
    assert len(bm.free) == 6 - left


@every_block_size
@every_hash
def test_eviction_never_takes_a_block_in_use(hash_bits: int, block_size: int) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1, 2, 3))
    bm.fork("A", "B", n_tokens=2 * block_size)
    bm.free_seq("A")
    assert bm.evict(100) == 1
    assert lookup(bm, words(block_size, 1, 2, 3)) == 2
    no_room(bm, lambda: bm.allocate("C", 7 * block_size), 7, 6)
    bm.allocate("C", 6 * block_size)
    assert lookup(bm, words(block_size, 1, 2, 3)) == 2
    assert set(bm.tables["C"]).isdisjoint(bm.tables["B"])


@every_block_size
@every_hash
def test_freeing_one_branch_keeps_the_trunk(hash_bits: int, block_size: int) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1, 2, 3))
    assert bm.allocate("B", tokens=words(block_size, 1, 2, 4)) == 2 * block_size
    bm.commit("B")
    bm.free_seq("A")
    bm.evict(100)
    assert lookup(bm, words(block_size, 1, 2, 3)) == 2
    assert lookup(bm, words(block_size, 1, 2, 4)) == 3


@every_compute
@every_block_size
@every_hash
def test_allocating_the_whole_pool_after_a_free_evicts_everything(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    compute(bm, "A", words(block_size, 1, 2, 3, 4))
    bm.free_seq("A")
    bm.allocate("B", tokens=words(block_size, 5, 6, 7, 8))
    assert identities(bm) == {}
    assert counted(bm, Counter.EVICTIONS) == (4,)
    bm.free_seq("B")
    assert len(bm.free) == 4


@every_block_size
@every_hash
def test_what_was_just_published_is_not_what_its_own_allocation_evicts(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    for turn in range(20):
        tokens = words(block_size, *range(turn, turn + 3))
        bm.allocate("A", tokens=tokens)
        assert len(set(bm.tables["A"])) == 3
        assert bm.commit("A") == 3
        assert lookup(bm, tokens) == 3
        bm.free_seq("A")


@blocks_with_a_middle
def test_used_and_evictable_blocks_that_have_an_identity_are_gauged(block_size: int) -> None:
    bm = sharing_manager(6, block_size)
    assert bm.gauges().cached == 0
    compute_prompt(bm, "A", [*words(block_size, 1, 2), 5])
    compute_prompt(bm, "B", words(block_size, 3))
    bm.free_seq("B")
    gauges = bm.gauges()
    assert (gauges.cached, gauges.evictable) == (3, 1)
    bm.evict(1)
    assert bm.gauges().cached == 2


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("prefix", ["running", "idle"])
@every_block_size
@every_hash
def test_a_match_whose_tail_exceeds_the_pool_is_rolled_back(
    hash_bits: int, block_size: int, prefix: str
) -> None:
    bm = sharing_manager(6, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1, 2))
    if prefix == "idle":
        bm.free_seq("A")
    bm.allocate("other", 2 * block_size)
    no_room(bm, lambda: bm.allocate("B", tokens=words(block_size, *range(1, 6))), 3, 2)
    assert bm.allocate("B", tokens=words(block_size, *range(1, 5))) == 2 * block_size


@every_block_size
@every_hash
def test_a_stale_commit_after_the_id_was_given_again_is_refused(
    hash_bits: int, block_size: int
) -> None:
    """The late result of the first A knows more tokens than the second A has room for."""
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    bm.allocate("A", 2 * block_size)
    late = words(block_size, 1, 2)
    bm.free_seq("A")
    refused(KeyError, lambda: bm.commit("A", late), "A", unchanged=lambda: prefix_state(bm))
    bm.allocate("A", 2 * block_size - 1)
    refused(ValueError, lambda: bm.commit("A", late), unchanged=lambda: prefix_state(bm))
    bm.free_seq("A")
    bm.allocate("A", tokens=words(block_size, 8, 9))
    refused(ValueError, lambda: bm.commit("A", late), unchanged=lambda: prefix_state(bm))
    refused(
        ValueError,
        lambda: bm.commit("A", n_settled=2 * block_size + 1),
        unchanged=lambda: prefix_state(bm),
    )
    bm.commit("A")
    assert lookup(bm, late) == 0
    assert lookup(bm, words(block_size, 8, 9)) == 2


@every_block_size
@every_hash
def test_a_batch_commit_to_a_row_that_ended_or_has_no_room_commits_for_nobody(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    for seq in "ABC":
        bm.allocate(seq, 1)
    rows = bm.rows(["A", "B", "C"])
    tokens = np.array([1, 2, 3], np.int32)
    bm.free_seq("B")
    refused(
        ValueError,
        lambda: bm.commit_batch(rows, tokens),
        rows[1],
        unchanged=lambda: prefix_state(bm),
    )
    bm.allocate("B", 1)
    rows = bm.rows(["A", "B", "C"])
    bm.commit("C", [9])
    refused(ValueError, lambda: bm.commit_batch(rows, tokens), unchanged=lambda: prefix_state(bm))
    twice = np.array([rows[0], rows[1], rows[0]], np.int32)
    refused(ValueError, lambda: bm.commit_batch(twice, tokens), unchanged=lambda: prefix_state(bm))
    assert bm.commit_batch(rows[:2], tokens[:2]) == (2 if block_size == 1 else 0)
    assert [bm.tokens(seq).tolist() for seq in "ABC"] == [[1], [2], [9]]


@every_block_size
@every_hash
def test_a_token_that_differs_from_what_sharers_know_is_refused(
    hash_bits: int, block_size: int
) -> None:
    """What a sharer computed there is content that the others read too."""
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    bm.allocate("A", block_size)
    bm.fork("A", "B")
    tokens = words(block_size, 1)
    assert bm.commit("A", tokens) == 1
    assert bm.known("B") == 0
    refused(
        ValueError,
        lambda: bm.commit("B", [*tokens[:-1], 999]),
        999,
        unchanged=lambda: prefix_state(bm),
    )
    bm.commit("B", tokens)
    assert bm.tokens("B").tolist() == tokens
    assert lookup(bm, tokens) == 1


# ---------------------------------------------------------------- statistics


@every_block_size
@every_hash
def test_cached_tokens_are_counted_once(hash_bits: int, block_size: int) -> None:
    """Not by questions, not by refused calls, not by a resume, and only what was used."""
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    prompt = words(block_size, 1, 2, 3)
    compute_prompt(bm, "A", prompt)
    base = counted(bm, Counter.PROMPT_TOKENS, Counter.CACHED_TOKENS)
    assert base == (3 * block_size, 0)
    for _ in range(3):
        bm.match(prompt)
        bm.plan_allocate(tokens=prompt)
        bm.can_allocate(tokens=prompt)
        bm.prompt(prompt)
        with pytest.raises(OutOfBlocks):
            bm.allocate("B", tokens=[*prompt, *words(block_size, *range(4, 11))])
        with pytest.raises(ValueError, match="A"):
            bm.allocate("A", tokens=prompt)
    assert counted(bm, Counter.PROMPT_TOKENS, Counter.CACHED_TOKENS) == base
    bm.allocate("B", tokens=prompt)
    assert counted(bm, Counter.PROMPT_TOKENS, Counter.CACHED_TOKENS) == (
        6 * block_size,
        2 * block_size,
    )
    kept = bm.prompt_of("B")
    bm.free_seq("B")
    assert bm.allocate("B", tokens=kept, resumed=True) == 2 * block_size
    assert counted(bm, Counter.PROMPT_TOKENS, Counter.CACHED_TOKENS) == (
        6 * block_size,
        2 * block_size,
    )
    assert counted(bm, Counter.RESUMED_TOKENS, Counter.RESUMED_CACHED_TOKENS) == (
        3 * block_size,
        2 * block_size,
    )


@every_compute
@every_block_size
@every_hash
def test_published_blocks_are_counted_once(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    compute(bm, "A", [*words(block_size, 1, 2), 5])
    expected = 3 if block_size == 1 else 2
    for _ in range(5):
        assert bm.commit("A") == 0
        assert counted(bm, Counter.BLOCKS_PUBLISHED) == (expected,)
    bm.fork("A", "B")
    bm.allocate("C", tokens=words(block_size, 1, 2))
    assert bm.commit("B") == 0
    assert bm.commit("C") == 1, "its last block is a twin"
    assert counted(bm, Counter.BLOCKS_PUBLISHED) == (expected + 1,)


# ---------------------------------------------------------------- partial hits


@pytest.mark.parametrize("common", range(5))
@every_hash
def test_the_tail_of_a_match_may_be_copied(hash_bits: int, common: int) -> None:
    """A child that begins alike lends its first tokens: never a whole block of them."""
    bm = sharing_manager(8, 4, hash_bits=hash_bits)
    cached = words(4, 1, 2)
    compute_prompt(bm, "A", cached)
    asked = [*cached[: 4 + common], *range(900, 900 + 6 - common)]
    n_cached, copy = bm.allocate("B", tokens=asked, partial_hit=True)
    assert n_cached == 4 + common
    if common in (0, 4):
        assert copy is None
    else:
        source, destination, n_tokens = copy
        assert (source, n_tokens) == (bm.tables["A"][1], common)
        assert destination == bm.tables["B"][1]
        assert bm.ref[destination] == 1
    assert bm.allocate("C", tokens=asked) == (8 if common == 4 else 4)


@every_hash
def test_of_several_partial_hits_the_longest_is_copied(hash_bits: int) -> None:
    bm = sharing_manager(12, 4, hash_bits=hash_bits)
    for seq, tail in (("A", [5, 0, 0, 0]), ("B", [5, 6, 7, 0]), ("C", [5, 6, 0, 0])):
        compute_prompt(bm, seq, [1, 2, 3, 4, *tail])
    n_cached, copy = bm.allocate("D", tokens=[1, 2, 3, 4, 5, 6, 7, 8, 9], partial_hit=True)
    assert n_cached == 7
    assert copy == (bm.tables["B"][1], bm.tables["D"][1], 3)


# ---------------------------------------------------------------- identities


@every_block_size
@every_hash
def test_the_order_of_extra_parts_and_of_media_is_not_content(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1, 2)
    parts = (("tenant", "t"), ("tokenizer", 3))
    items = [Media(0, 1, b"cat"), Media(block_size, block_size + 1, b"dog")]
    compute_prompt(bm, "A", tokens, namespace=Namespace(extra=parts), media=items)
    for extra in permutations(parts):
        for media in permutations(items):
            assert lookup(bm, tokens, namespace=Namespace(extra=extra), media=media) == 2


@pytest.mark.parametrize("way", ["truncate", "fork"])
@blocks_with_a_middle
@every_hash
def test_text_that_goes_on_where_an_item_was_cut_is_not_that_item(
    hash_bits: int, block_size: int, way: str
) -> None:
    """Though the id of the text is that of the item's placeholders."""
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    tokens = [7] * (3 * block_size)
    item = [Media(0, 2 * block_size, b"cat")]
    compute_prompt(bm, "A", tokens, media=item)
    cut = block_size + 1
    if way == "truncate":
        bm.truncate("A", cut)
    bm.fork("A", "B", n_tokens=cut)
    bm.free_seq("A")
    bm.evict(9)
    bm.append_slots("B", 2 * block_size - 1)
    bm.commit("B", tokens[cut:])
    assert lookup(bm, tokens, media=item) == 1, "what was computed before the cut"
    assert lookup(bm, tokens) == 0
    assert lookup(bm, tokens, media=[Media(0, cut, b"cat")]) == 0


@every_block_size
@every_hash
def test_items_and_namespace_are_kept_over_a_preemption(hash_bits: int, block_size: int) -> None:
    """Also of a request that knew its tokens and had not computed any."""
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    tokens = [7] * (2 * block_size)
    item = [Media(block_size, 2 * block_size, b"cat")]
    bm.allocate("A", tokens=tokens, media=item, namespace="s")
    prompt = bm.prompt_of("A")
    bm.free_seq("A")
    bm.allocate("A", tokens=prompt, resumed=True)
    assert bm.commit("A") == 2
    assert lookup(bm, tokens, namespace="s", media=item) == 2
    assert lookup(bm, tokens, namespace="s") == 1
    assert lookup(bm, tokens) == 0


@every_append
@every_block_size
@every_hash
def test_the_namespace_of_a_request_without_tokens_is_kept_over_a_preemption(
    hash_bits: int, block_size: int, append: Append
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1, 2)
    bm.allocate("A", block_size, namespace="s")
    prompt = bm.prompt_of("A")
    assert len(prompt) == 0
    bm.free_seq("A")
    assert bm.allocate("A", block_size, tokens=prompt, resumed=True) == 0
    append(bm, "A", block_size)
    assert bm.commit("A", tokens) == 2
    assert lookup(bm, tokens, namespace="s") == 2
    assert lookup(bm, tokens) == 0


@every_block_size
@every_hash
def test_adapter_generations_never_hit_each_other(hash_bits: int, block_size: int) -> None:
    bm = sharing_manager(20, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1, 2)
    for generation in range(5):
        for older in range(5):
            namespace = Namespace(lora="adapter", lora_version=older)
            assert lookup(bm, tokens, namespace=namespace) == (2 if older < generation else 0)
        compute_prompt(
            bm, generation, tokens, namespace=Namespace(lora="adapter", lora_version=generation)
        )


@every_block_size
def test_two_managers_of_one_pool_share_their_prefixes(block_size: int) -> None:
    pool = BlockPool(8)
    first = BlockManager(8, block_size, pool=pool, prefix_caching=True)
    second = BlockManager(8, block_size, pool=pool, prefix_caching=True)
    tokens = words(block_size, 1, 2)
    first.allocate("A", tokens=tokens)
    first.commit("A")
    assert second.allocate("A", tokens=[*tokens, 5]) == 2 * block_size
    assert list(second.tables["A"])[:2] == list(first.tables["A"])
    first.free_seq("A")
    second.free_seq("A")
    pool.check()
    assert second.match(first.prompt([*tokens, 5])) == 2 * block_size
    with pytest.raises(ValueError, match="block_size"):
        BlockManager(8, block_size + 1, pool=pool, prefix_caching=True)


@every_block_size
def test_a_manager_that_ends_leaves_what_it_published(block_size: int) -> None:
    pool = BlockPool(8)
    first = BlockManager(8, block_size, pool=pool, prefix_caching=True)
    tokens = words(block_size, 1, 2)
    first.allocate("A", tokens=tokens)
    first.commit("A")
    del first
    pool.check()
    assert pool.num_evictable == 2
    second = BlockManager(8, block_size, pool=pool, prefix_caching=True)
    assert second.match([*tokens, 5]) == 2 * block_size


def test_with_the_switch_off_tokens_are_counted_and_nothing_else() -> None:
    bm = BlockManager(8, 4)
    tokens = list(range(8))
    assert bm.allocate("A", tokens=tokens) == 0
    assert bm.length("A") == 8
    assert bm.commit("A") == 0
    bm.free_seq("A")
    assert len(bm.free) == 8
    assert bm.match([*tokens, 8]) == 0
    assert bm.plan_allocate(tokens=tokens) == (0, 2, 8)
    assert bm.pool.index is None


# ---------------------------------------------------------------- storms


def freed_everything(bm: BlockManager, live: dict[Hashable, Any], rng: random.Random) -> None:
    for seq in live:
        bm.free_seq(seq)
    live.clear()


def freed_a_fifth(bm: BlockManager, live: dict[Hashable, Any], rng: random.Random) -> None:
    for seq in rng.sample(sorted(live, key=str), -(-len(live) // 5)):
        bm.free_seq(seq)
        del live[seq]


@pytest.mark.parametrize(
    "make_room", [freed_everything, freed_a_fifth], ids=["remove all", "remove 20 %"]
)
@pytest.mark.parametrize("block_size", [1, 2])
@pytest.mark.parametrize("merge", [False, True])
def test_random_requests_of_two_words(
    block_size: int, merge: bool, make_room: Callable[..., None]
) -> None:
    """Two tokens and at most eight of them: hits, twins and evictions all the time.
    All parameters together make 200,000 requests.

    A hit is compared with what was really computed into the block; blocks that were not
    hit belong to one sequence alone; no call sees a block twice.
    """
    rng = random.Random(2024)
    pool = BlockPool(64)
    PrefixIndex(pool, block_size)
    bm = BlockManager(64, block_size, pool=pool, prefix_caching=True, merge_duplicates=merge)
    computed: dict[int, tuple[int, ...]] = {}
    live: dict[Hashable, list[int]] = {}
    hits = 0
    for number in range(25_000):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
        try:
            cached = bm.allocate(number, tokens=tokens)
        except OutOfBlocks:
            make_room(bm, live, rng)
            bm.check()
            continue
        table = bm.tables[number].tolist()
        assert len(set(table)) == len(table)
        for column, block in enumerate(table):
            end = (column + 1) * block_size
            if end <= cached:
                assert computed[block] == tuple(tokens[:end])
            else:
                assert bm.ref[block] == 1, "a block that was not hit has one owner"
                computed[block] = tuple(tokens[:end])
        hits += cached
        bm.commit(number)
        live[number] = tokens
        if rng.random() < 0.3:
            bm.free_seq(seq := rng.choice(list(live)))
            del live[seq]
        if number % 50 == 0:
            bm.check()
    freed_everything(bm, live, rng)
    bm.check()
    evictions = counted(bm, Counter.EVICTIONS)[0]
    assert hits > 10_000
    assert evictions > 1_000
    cached_blocks = pool.num_evictable
    assert bm.evict(64) == cached_blocks
    assert sorted(bm.free) == list(range(64))
    assert bm.pool.index is not None
    assert len(bm.pool.index) == 0


@pytest.mark.parametrize("hash_bits", [0, 1, 63])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_in_a_pool_that_never_evicts_a_hit_is_the_longest_prefix_computed_so_far(
    block_size: int, hash_bits: int
) -> None:
    """Two words and at most eight of them have 510 contents: all fit."""
    rng = random.Random(7)
    bm = sharing_manager(2_000, block_size, hash_bits=hash_bits)
    published: set[tuple[int, ...]] = {()}
    for number in range(400):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
        usable = range(0, len(tokens), block_size)
        expected = max(length for length in usable if tuple(tokens[:length]) in published)
        assert bm.match(tokens) == expected
        assert bm.allocate(number, tokens=tokens) == expected
        bm.commit(number)
        bm.free_seq(number)
        published |= {
            tuple(tokens[:length]) for length in range(block_size, len(tokens) + 1, block_size)
        }
        assert index_of(bm).duplicates < number + 1
    assert bm.pool.num_used == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_pool_is_whole_after_shared_duplicate_and_empty_sequences(block_size: int) -> None:
    bm = sharing_manager(12, block_size)
    tokens = words(block_size, 1, 2)
    for order in permutations(["A", "shared", "duplicate", "empty"]):
        bm.allocate("empty", 0)
        bm.allocate("A", tokens=tokens)
        bm.allocate("duplicate", tokens=tokens)
        bm.commit("A")
        bm.commit("duplicate")
        bm.fork("A", "shared")
        for seq in order:
            bm.free_seq(seq)
        assert bm.pool.num_used == 0
        bm.evict(12)
        assert len(bm.free) == 12
