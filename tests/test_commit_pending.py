"""A token that is sampled in one step and written in the next: ``commit_pending``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from state import plain, snapshot

from kvcore.block_manager import BlockManager
from kvcore.counters import Counter
from kvcore.eviction import Retention, RetentionPriority

SIZE = 3


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def state(bm: BlockManager) -> dict[str, Any]:
    index = bm.prefix_index
    return snapshot(bm) | {
        "known": {seq: (bm.known(seq), bm.published(seq)) for seq in bm},
        "tokens": {seq: bm.tokens(seq).tolist() for seq in bm},
        "identities": None if index is None else [index.identity(b) for b in range(bm.num_blocks)],
    }


def commit_one_by_one(
    bm: BlockManager, seqs: list[str], pending: dict[str, int], sampled: list[int] | None
) -> int:
    """The slow and obvious one: ``commit`` of what is pending, and a new one in its place."""
    published = 0
    for place, seq in enumerate(seqs):
        if pending[seq] >= 0:
            published += bm.commit(seq, [pending[seq]])
            pending[seq] = -1 if sampled is None else sampled[place]
    return published


def one_step(
    chance: random.Random, quick: BlockManager, slow: BlockManager, pending: np.ndarray
) -> int:
    """A token for some, in any order, of whom each writes its pending one."""
    by_seq = {seq: int(pending[quick.row(seq)]) for seq in slow}
    seqs = [seq for seq in slow if chance.random() < 0.8]
    chance.shuffle(seqs)
    rows = quick.rows(seqs)
    for bm in (quick, slow):
        served, _ = bm.append_batch(bm.rows(seqs), np.zeros(len(seqs), np.int64))
        assert served == len(seqs)
    sampled = None
    if chance.random() < 0.9:
        sampled = [chance.randrange(3) for _ in seqs]
    expected = commit_one_by_one(slow, seqs, by_seq, sampled)
    published = quick.commit_pending(rows, pending, None if sampled is None else int32(*sampled))
    assert published == expected
    assert {seq: int(pending[quick.row(seq)]) for seq in slow} == by_seq
    assert quick.lengths_of(rows).tolist() == [quick.length(seq) for seq in seqs]
    assert state(quick) == state(slow)
    quick.check()
    return published


@pytest.mark.parametrize("merge_duplicates", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["settled", "in flight"])
def test_it_does_what_a_commit_for_each_does(merge_duplicates: bool, in_flight: bool) -> None:
    """In few tokens and small blocks, so that they fill, are found again, and are merged."""
    published = merged = 0
    for seed in range(20):
        chance = random.Random(seed)
        quick, slow = (
            BlockManager(150, SIZE, prefix_caching=True, merge_duplicates=merge_duplicates)
            for _ in range(2)
        )
        pending = np.full(quick.block_tables.shape[0], -1, np.int32)
        for seq in "abcdef":
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 6))]
            for bm in (quick, slow):
                bm.allocate(seq, tokens=tokens)
                bm.commit(seq)
            if chance.random() < 0.8:
                pending[quick.row(seq)] = chance.randrange(3)
        for _ in range(12):
            for bm in (quick, slow):
                if in_flight:
                    bm.fence()
            published += one_step(chance, quick, slow, pending)
        merged += int(quick.counters[Counter.DUPLICATES_MERGED])
    assert published > 200
    assert (merged > 10) == merge_duplicates


def test_what_it_wrote_is_found_when_the_block_is_full() -> None:
    bm = BlockManager(8, 2, prefix_caching=True)
    bm.allocate("a", tokens=[1, 2, 3])
    assert bm.commit("a") == 1
    pending, rows = int32(*[-1] * 64), bm.rows(["a"])
    pending[rows] = 4
    bm.append_slot("a")
    assert bm.match([1, 2, 3, 4, 0]) == 2, "its data has not been written"
    assert bm.commit_pending(rows, pending, int32(5)) == 1
    assert bm.match([1, 2, 3, 4, 0]) == 4
    assert pending[rows].tolist() == [5]
    bm.append_slot("a")
    assert bm.commit_pending(rows, pending, int32(6)) == 0, "a block that is not full"
    assert bm.allocate("b", tokens=[1, 2, 3, 4, 5, 6]) == 4
    assert bm.tables["b"][:2] == bm.tables["a"][:2]
    bm.check()


@pytest.mark.parametrize(
    "commit",
    [
        lambda bm, rows: bm.commit_pending(rows, int32(*[2] * 64)),
        lambda bm, rows: bm.commit_batch(rows, [2]),
    ],
    ids=["commit_pending", "commit_batch"],
)
def test_what_it_publishes_is_retained_as_the_request_asked(
    commit: Callable[[BlockManager, np.ndarray], int],
) -> None:
    """Least recently used, "a" would go first."""
    bm = BlockManager(8, 2, prefix_caching=True, eviction=RetentionPriority())
    bm.allocate("a", 2, tokens=[1], retention=[Retention(0, 2, 90)])
    assert commit(bm, bm.rows(["a"])) == 1
    bm.allocate("b", tokens=[3, 4])
    bm.commit("b")
    bm.free_seq("a")
    bm.free_seq("b")
    assert bm.evict(1) == 1
    assert (bm.match([1, 2, 0]), bm.match([3, 4, 0])) == (2, 0)


def test_a_token_that_is_not_known_stops_what_comes_after_it_for_good() -> None:
    """Also if something is said to be sampled: it follows what nobody knows."""
    bm = BlockManager(8, 2, prefix_caching=True)
    bm.allocate("a", tokens=[1, 2])
    bm.commit("a")
    pending, rows = int32(*[-1] * 64), bm.rows(["a"])
    for _ in range(4):
        bm.append_slot("a")
        assert bm.commit_pending(rows, pending, int32(5)) == 0
        assert (pending == -1).all()
    assert bm.known("a") == 2
    pending[rows] = 9
    assert bm.commit_pending(rows, pending) == 0
    assert bm.known("a") == 3
    assert (pending == -1).all(), "by default what was sampled is not known"


def test_without_prefix_caching_it_does_nothing() -> None:
    bm = BlockManager(8, 2)
    bm.allocate("a", 3)
    pending, before = int32(*[4] * 64), state(bm)
    assert bm.commit_pending(bm.rows(["a"]), pending, int32(5)) == 0
    assert (pending == 4).all()
    assert state(bm) == before


def two_that_wait() -> tuple[BlockManager, np.ndarray]:
    """ "a" and "b" have one token each whose id is pending; "full" has none."""
    bm = BlockManager(8, 2, rows=4, prefix_caching=True)
    for seq in ("a", "b"):
        bm.allocate(seq, 3, tokens=[1, 2])
    bm.allocate("full", tokens=[1])
    return bm, int32(7, 8, 9, -1)


ROWS = int32(0, 1)
MEMORY = int32(*[1] * 8)
BAD: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "a row twice": ((int32(0, 1, 0), None, None), ValueError, "rows: row 0 is named twice"),
    "a row twice, not known": ((int32(0, 1, 2, 2), int32(7, 8, -1, -1), None), ValueError, "row 2"),
    "a row of nobody": ((int32(0, 3), None, None), ValueError, "rows: entry 1 is 3"),
    "a negative row": ((int32(0, -1), None, None), ValueError, "rows: entry 1 is -1"),
    "a row past the slab": ((int32(0, 4), None, None), ValueError, "rows: entry 1 is 4"),
    "a row all of whose tokens are known": (
        (int32(0, 1, 2), None, None),
        ValueError,
        "rows: entry 2 is 2, all of whose 1 tokens are known",
    ),
    "rows int64": ((ROWS.astype(np.int64), None, None), TypeError, "rows"),
    "rows strided": ((int32(0, 0, 1)[::2], None, None), ValueError, "rows"),
    "rows a list": (([0, 1], None, None), TypeError, "rows"),
    "pending int64": ((ROWS, np.zeros(4, np.int64), None), TypeError, "pending"),
    "pending short": ((ROWS, int32(7), None), ValueError, "pending has 1 entries, but .* row 1"),
    "pending read-only": ((ROWS, MEMORY.view(), None), ValueError, "pending is read-only"),
    "pending over rows": ((MEMORY[:2], MEMORY[1:], None), ValueError, "pending must not overlap r"),
    "pending over sampled": (
        (ROWS, MEMORY[1:5], MEMORY[:2]),
        ValueError,
        "pending must not overlap sampled",
    ),
    "sampled negative": ((ROWS, None, int32(5, -1)), ValueError, "sampled: entry 1 .* got -1"),
    "sampled short": ((ROWS, None, int32(5)), ValueError, "sampled has 1 entries for 2 rows"),
    "sampled long": ((ROWS, None, int32(5, 6, 7)), ValueError, "sampled has 3 entries for 2 rows"),
    "sampled int64": ((ROWS, None, np.zeros(2, np.int64)), TypeError, "sampled"),
    "sampled a list": ((ROWS, None, [5, 6]), TypeError, r"sampled .* got \[5, 6\]"),
}
BAD["pending read-only"][0][1].flags.writeable = False


@pytest.mark.parametrize(("arguments", "error", "named"), BAD.values(), ids=list(BAD))
def test_a_bad_argument_is_named_and_nothing_is_pending_instead(
    arguments: tuple[Any, ...], error: type[Exception], named: str
) -> None:
    bm, usual = two_that_wait()
    rows, pending, sampled = arguments
    pending = usual if pending is None else pending
    before = state(bm), plain(pending), plain(rows)
    for _ in range(3):
        with pytest.raises(error, match=named):
            bm.commit_pending(rows, pending, sampled)
        assert (state(bm), plain(pending), plain(rows)) == before
    bm.check()
    assert bm.commit_pending(ROWS, usual, int32(5, 6)) == 2, "the blocks of the prompts"
    assert usual.tolist() == [5, 6, 9, -1]
    assert bm.tokens("b").tolist() == [1, 2, 8]


def test_a_token_that_another_knows_otherwise_is_refused_with_all_before_it() -> None:
    bm, pending = two_that_wait()
    bm.fork("a", "fork")
    pending[bm.row("fork")] = 6
    before = state(bm)
    with pytest.raises(ValueError, match=r"token 2 of the sequence is 6, .* to hold 7"):
        bm.commit_pending(bm.rows(["b", "a", "fork"]), pending, int32(0, 0, 0))
    assert pending.tolist() == [7, 8, 9, 6]
    assert state(bm) == before
    pending[bm.row("fork")] = 7
    bm.commit_pending(bm.rows(["b", "a", "fork"]), pending)
    assert bm.tokens("fork").tolist() == [1, 2, 7]


def test_where_a_window_has_given_the_block_back_nothing_can_be_written() -> None:
    bm = BlockManager(8, 2, prefix_caching=True)
    bm.allocate("a", 8, tokens=[1, 2])
    bm.release_outside_window(bm.rows(["a"]), int32(8), 1)
    pending = int32(*[4] * 64)
    with pytest.raises(ValueError, match="window has given back"):
        bm.commit_pending(bm.rows(["a"]), pending)
    assert (pending == 4).all()


def test_the_lengths_of_rows_are_a_new_array_in_their_order() -> None:
    bm = BlockManager(40, SIZE, rows=2)
    for n_tokens, seq in enumerate("abcde"):
        bm.allocate(seq, 2 * n_tokens)
    rows = bm.rows(list("ecaae"))
    lengths = bm.lengths_of(rows)
    assert lengths.tolist() == [8, 4, 0, 0, 8]
    assert lengths.dtype == np.int32
    bm.append_slot("e")
    assert lengths.tolist() == [8, 4, 0, 0, 8], "what was handed out stays what it was"
    lengths[:] = 0
    assert bm.lens["e"] == 9
    assert bm.lengths_of(rows[:0]).tolist() == []


def test_token_ids_are_what_commit_takes_and_refuse_what_it_refuses() -> None:
    bm = BlockManager(4, 4, prefix_caching=True)
    given = np.array([5, 0, 2**31 - 1])
    ids = bm.token_ids(given)
    assert (ids.dtype, ids.tolist()) == (np.int32, given.tolist())
    ids[0] = 6
    assert given[0] == 5
    for tokens, error in (([1, -1], ValueError), ([2**31], ValueError), ([1.5], TypeError)):
        with pytest.raises(error, match="tokens: token"):
            bm.token_ids(tokens)
        bm.allocate("A", 2)
        with pytest.raises(error, match="tokens: token"):
            bm.commit("A", tokens)
        bm.free_seq("A")
    with pytest.raises(TypeError, match="tokens must be"):
        bm.token_ids(None)
