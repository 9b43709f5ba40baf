"""Cluster K6: the change log of the prefix index, and the counters of hits.

Events and counters are state: one Stored and one Removed for each content, causes before
effects, and what a resume finds is counted apart from what users find.
"""

from __future__ import annotations

from itertools import permutations

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
    sharing_manager,
    sharing_scheduler,
    words,
)
from scenario_support import admitted, every_block_size, found_cached

from kvcore import BlockManager, Counter, OutOfBlocks, Scheduler
from kvcore.prefix_log import Cleared, Removed, Stored


def follow(mirror: dict[int, Stored], bm: BlockManager) -> None:
    """Bring the mirror up to date, and see that it is the index then."""
    for change in index_of(bm).drain():
        if isinstance(change, Cleared):
            mirror.clear()
        elif isinstance(change, Removed):
            del mirror[change.uid]
        else:
            assert isinstance(change, Stored)
            assert change.uid not in mirror
            mirror[change.uid] = change
    assert {uid: tuple(stored) for uid, stored in mirror.items()} == {
        identity.uid: tuple(identity) for identity in identities(bm).values()
    }


def logged(bm: BlockManager) -> list[Stored | Removed | Cleared]:
    return list(index_of(bm).drain())


@pytest.mark.parametrize("order", list(permutations(range(3))))
@every_compute
@every_block_size
@every_hash
def test_K6_01_each_block_of_a_chain_is_removed_once_in_whatever_order_it_is_reclaimed(
    hash_bits: int, block_size: int, compute: Compute, order: tuple[int, ...]
) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    compute(bm, "A", words(block_size, 1, 2, 3))
    table = list(bm.tables["A"])
    uids = [index_of(bm).identity(block).uid for block in table]
    for block in table:
        bm.pin(block)
    bm.free_seq("A")
    index_of(bm).start_log()
    mirror: dict[int, Stored] = {}
    follow(mirror, bm)
    assert list(mirror) == uids
    for column in order:
        bm.unpin(table[column])
        assert bm.evict(9) == 1
        assert logged(bm) == [Removed(uids[column])]
    assert logged(bm) == []


@every_block_size
@every_hash
def test_K6_01_a_content_is_removed_with_its_last_copy(hash_bits: int, block_size: int) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    index_of(bm).start_log()
    assert logged(bm) == [Cleared()]
    compute_together(bm, "ABC", words(block_size, 1))
    (stored,) = logged(bm)
    assert isinstance(stored, Stored)
    for seq in "CAB":
        bm.free_seq(seq)
    for _ in range(2):
        bm.evict(1)
        assert logged(bm) == []
    bm.evict(1)
    assert logged(bm) == [Removed(stored.uid)]


@pytest.mark.parametrize("namespace", [None, "s"])
@every_compute
@every_block_size
@every_hash
def test_K6_02_every_stored_block_names_its_parent(
    hash_bits: int, block_size: int, compute: Compute, namespace: str | None
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    index_of(bm).start_log()
    assert logged(bm) == [Cleared()]
    compute(bm, "A", words(block_size, 1, 2, 3), namespace=namespace)
    changes = logged(bm)
    stored = [change for change in changes if isinstance(change, Stored)]
    assert stored == changes
    assert [change.tokens for change in stored] == [words(block_size, name) for name in (1, 2, 3)]
    assert [change.parent for change in stored] == [0, stored[0].uid, stored[1].uid]
    assert [bool(change.key) for change in stored] == [namespace is not None, False, False]
    # A second branch hangs on what is there.
    compute_prompt(bm, "B", words(block_size, 1, 2, 4), namespace=namespace)
    (branch,) = logged(bm)
    assert isinstance(branch, Stored)
    assert branch.parent == stored[1].uid


@pytest.mark.parametrize("started", ["before", "after"])
@every_block_size
@every_hash
def test_K6_02_a_log_that_starts_late_tells_parents_before_children(
    hash_bits: int, block_size: int, started: str
) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    index = index_of(bm)
    if started == "before":
        index.start_log()
    # The child is computed into a block of a lower number than its parent's.
    bm.pool.take_many(2)
    bm.allocate("A", tokens=words(block_size, 1))
    bm.commit("A")
    bm.pool.release_many([0, 1])
    bm.append_slots("A", block_size)
    bm.commit("A", words(block_size, 2))
    assert bm.tables["A"] == [2, 0]
    if started == "after":
        index.start_log()
    first, parent, child = logged(bm)
    assert first == Cleared()
    assert isinstance(parent, Stored)
    assert isinstance(child, Stored)
    assert (parent.parent, child.parent) == (0, parent.uid)


@every_compute
@every_block_size
@every_hash
def test_K6_03_what_is_evicted_and_computed_again_is_removed_before_it_is_stored(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(1, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1)
    compute(bm, "A", tokens)
    bm.free_seq("A")
    index_of(bm).start_log(2)
    mirror: dict[int, Stored] = {}
    follow(mirror, bm)
    (old,) = mirror
    bm.evict(1)
    compute(bm, "A", tokens)
    removed, stored = logged(bm)
    assert removed == Removed(old)
    assert isinstance(stored, Stored)
    assert (stored.tokens, stored.parent) == (tokens, 0)
    assert stored.uid > old


@pytest.mark.parametrize("capacity", [0, 1, 2, 5, 1000])
@every_block_size
@every_hash
def test_K6_03_a_mirror_follows_whatever_is_evicted_and_stored_between_two_readings(
    hash_bits: int, block_size: int, capacity: int
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    index_of(bm).start_log(capacity)
    mirror: dict[int, Stored] = {}
    most = 0
    for round_number in range(12):
        for name in (1, 2, 1, 3 + round_number % 3):
            compute_prompt(bm, "A", words(block_size, name, name + 50))
            bm.free_seq("A")
            if round_number % 2:
                bm.evict(1 + round_number % 4)
            if round_number % 3 == 0:
                follow(mirror, bm)
        if round_number == 7:
            bm.reset()
        follow(mirror, bm)
        most = max(most, len(mirror))
    assert most == 4


# ---------------------------------------------------------------- hits of users and of resumes

USER_HITS = (Counter.PROMPT_TOKENS, Counter.CACHED_TOKENS)
RESUME_HITS = (Counter.RESUMED_TOKENS, Counter.RESUMED_CACHED_TOKENS)
resumable = pytest.mark.parametrize("block_size", [2, 4, 16])


def preempted(bm: BlockManager, prefix_cached: bool = False) -> Scheduler:
    """A scheduler whose request A (two full blocks and a token) has just been preempted.

    "older" has filled its one block and needs a second; A's third is the last one.
    """
    block_size = bm.block_size
    if prefix_cached:
        compute_prompt(bm, "somebody", words(block_size, 1))
        bm.free_seq("somebody")
    scheduler = sharing_scheduler(bm)
    scheduler.add("older", tokens=words(block_size, 8)[:-1])
    scheduler.add("A", tokens=words(block_size, 1, 2))
    decoded = {"older": 700, "A": 701}
    step = engine_step(bm, scheduler, decoded)
    assert step == ["older", "A"]
    assert found_cached(step) == [0, block_size if prefix_cached else 0]
    step = engine_step(bm, scheduler, decoded)
    assert (step, step.preempted, admitted(step), found_cached(step)) == (["older"], ["A"], [], [])
    return scheduler


@pytest.mark.parametrize("prefix_cached", [False, True])
@resumable
@every_hash
def test_K6_05_what_a_resumed_request_finds_is_no_hit_of_a_user(
    hash_bits: int, block_size: int, prefix_cached: bool
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    scheduler = preempted(bm, prefix_cached)
    user_hits = counted(bm, *USER_HITS)
    of_somebody = block_size if prefix_cached else 0
    assert user_hits == (3 * block_size - 1 + of_somebody, of_somebody)
    for _ in range(3):  # a retry is no request either
        assert scheduler.step() == ["older"]
        bm.truncate("older", block_size + 1)
    assert counted(bm, *USER_HITS, *RESUME_HITS) == (*user_hits, 0, 0)
    assert lookup(bm, words(block_size, 1, 2)) == 2
    assert scheduler.finish("older")
    step = engine_step(bm, scheduler, {"A": 702})
    assert admitted(step) == [("A", 2 * block_size + 1)]
    assert found_cached(step) == [2 * block_size]
    assert counted(bm, *USER_HITS) == user_hits
    assert counted(bm, *RESUME_HITS) == (2 * block_size + 1, 2 * block_size)


@resumable
@every_hash
def test_K6_05_a_refused_request_is_counted_nowhere(hash_bits: int, block_size: int) -> None:
    bm = sharing_manager(3, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1, 2))
    before = bm.counters.tolist()
    for _ in range(10):
        for resumed in (False, True):
            with pytest.raises(OutOfBlocks):
                bm.allocate("B", tokens=words(block_size, 1, 2, 3, 4), resumed=resumed)
    after = bm.counters.tolist()
    after[Counter.OUT_OF_BLOCKS] -= 20
    assert after == before


@pytest.mark.parametrize("prefix_cached", [False, True])
@resumable
@every_hash
def test_K6_08_the_cached_tokens_of_a_request_do_not_outlive_its_preemption(
    hash_bits: int, block_size: int, prefix_cached: bool
) -> None:
    """There is no number kept with a request: each step tells what its own lookup found.
    Here nothing of what the first admission found, or computed, is left at the second."""
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    scheduler = preempted(bm, prefix_cached)
    bm.evict(9)
    assert scheduler.finish("older")
    bm.evict(9)
    step = engine_step(bm, scheduler, {"A": 702})
    assert admitted(step) == [("A", 2 * block_size + 1)]
    assert found_cached(step) == [0]
    assert bm.published("A") == (2 * block_size + 2) // block_size
    assert counted(bm, *RESUME_HITS) == (2 * block_size + 1, 0)
    assert counted(bm, Counter.CACHED_TOKENS) == (block_size if prefix_cached else 0,)
