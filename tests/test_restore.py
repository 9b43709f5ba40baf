"""A sequence that comes back with some of its blocks, and new ones for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from state import slab_snapshot, snapshot

from kvcore.block_manager import BlockManager
from kvcore.errors import OutOfBlocks
from kvcore.identity import Media


def test_a_table_comes_back_around_the_blocks_that_stayed() -> None:
    """Out: what "a" has for itself. In: the same content, found again once it is settled."""
    bm = BlockManager(12, 2, prefix_caching=True)
    bm.allocate("a", tokens=range(9))
    bm.commit("a")
    bm.fork("a", "b", 4)
    assert bm.exclusive_blocks("a").tolist() == [2, 3, 4]
    prompt, kept = bm.prompt_of("a"), bm.tables["a"].tolist()[:2]
    bm.free_seq("a")
    bm.evict(12)
    fresh = bm.restore("a", 9, [0, 1], kept, tokens=prompt)
    assert bm.tables["a"] == [*kept, *fresh.tolist()]
    assert bm.tokens("a").tolist() == list(range(9))
    assert bm.match(range(9)) == 4, "nothing is found before it is settled"
    bm.commit("a")
    assert bm.match(range(9)) == 8
    bm.check()


def test_what_was_written_before_a_reset_is_not_published_after_it() -> None:
    bm = BlockManager(12, 2, prefix_caching=True)
    bm.allocate("a", tokens=range(8))
    prompt = bm.prompt_of("a")
    bm.free_seq("a")
    bm.reset()
    bm.restore("a", 8, [], [], tokens=prompt)
    assert bm.commit("a") == 0
    bm.check()


@pytest.mark.parametrize(
    ("tokens", "identity", "entry"),
    [
        ([9, 2, 3, 4, 5], {}, 0),
        ([1, 2, 3, 9, 5], {}, 1),
        ([1, 2, 3, 4, 5], {"namespace": "tenant"}, 0),
        ([1, 2, 3, 4, 5], {"media": [Media(2, 4, b"picture")]}, 1),
    ],
    ids=["other tokens", "other tokens later", "another namespace", "a picture"],
)
def test_a_block_that_stayed_must_hold_what_it_is_said_to_hold(
    tokens: list[int], identity: dict[str, Any], entry: int
) -> None:
    bm = BlockManager(12, 2, prefix_caching=True)
    bm.allocate("a", tokens=[1, 2, 3, 4, 5])
    bm.commit("a")
    before = snapshot(bm) | slab_snapshot(bm)
    prompt = bm.prompt(tokens, **identity)
    named = f"blocks: entry {entry} is {entry}, which does not hold the tokens of column {entry}"
    with pytest.raises(ValueError, match=named):
        bm.restore("new", 5, [0, 1], [0, 1], tokens=prompt)
    assert snapshot(bm) | slab_snapshot(bm) == before
    with pytest.raises(TypeError, match=r"tokens must be a Prompt, got \[1, 2\]"):
        bm.restore("new", 5, [0], [0], tokens=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_tokens is 4, but 5 tokens are given"):
        bm.restore("new", 4, [0], [0], tokens=prompt)
    bm.restore("new", 5, [0, 1], [0, 1], tokens=bm.prompt([1, 2, 3, 4, 5]))
    assert bm.tokens("new").tolist() == [1, 2, 3, 4, 5]
    bm.check()


def test_what_came_back_without_its_tokens_is_never_published() -> None:
    """Nothing says in which namespace it was computed: another would find it."""
    bm = BlockManager(12, 2, prefix_caching=True)
    bm.allocate("a", tokens=[1, 2, 3], namespace="tenant")
    bm.free_seq("a")
    bm.restore("a", 3, [], [])
    bm.fork("a", "child")
    for seq in ("a", "child"):
        assert bm.commit(seq, [1, 2, 3]) == 0
        assert bm.published(seq) == 0
        with pytest.raises(ValueError, match=f"'{seq}' was restored without its tokens"):
            bm.prompt_of(seq)
        for namespace in (None, "tenant"):
            assert bm.match([1, 2, 3], namespace=namespace) == 0
    assert bm.tokens("a").tolist() == [1, 2, 3]
    bm.check()


BAD: dict[str, tuple[tuple[Any, ...], type[Exception]]] = {
    "live": (("a", 4, [], []), ValueError),
    "negative": (("new", -1, [], []), ValueError),
    "no integer": (("new", 1.5, [], []), TypeError),
    "fewer blocks": (("new", 4, [0, 1], [0]), ValueError),
    "descending": (("new", 4, [1, 0], [0, 1]), ValueError),
    "a column twice": (("new", 4, [0, 0], [0, 1]), ValueError),
    "past the table": (("new", 4, [2], [0]), ValueError),
    "a negative column": (("new", 4, [-1], [0]), ValueError),
    "a part of a column": (("new", 4, [0.5], [0]), TypeError),
    "a part of a block": (("new", 4, [0], [0.5]), TypeError),
    "an array of floats": (("new", 4, np.array([0.0]), [0]), TypeError),
    "no sequence": (("new", 4, 0, [0]), TypeError),
    "two dimensions": (("new", 4, [[0]], np.array([[0]])), TypeError),
    "a column beyond int32": (("new", 4, np.array([2**32]), [0]), ValueError),
    "a block beyond int64": (("new", 4, [0], [2**64]), ValueError),
    "a free block": (("new", 4, [0], [5]), ValueError),
    "past the pool": (("new", 4, [0], [8]), ValueError),
    "a hole where it writes": (("new", 3, [1], [-1]), ValueError),
    "no room": (("new", 40, [0], [0]), OutOfBlocks),
}


@pytest.mark.parametrize(("arguments", "error"), BAD.values(), ids=list(BAD))
def test_a_bad_argument_changes_nothing(arguments: Any, error: type[Exception]) -> None:
    """Neither do the arrays move that are read without a copy."""
    bm = BlockManager(8, 2, rows=1)
    bm.allocate("a", 4)
    before = snapshot(bm) | slab_snapshot(bm)
    with pytest.raises(error):
        bm.restore(*arguments)
    after = snapshot(bm) | slab_snapshot(bm)
    if error is OutOfBlocks:
        del before["counters"], after["counters"]
    assert after == before
    bm.check()


@pytest.mark.parametrize(
    ("arguments", "named", "value"),
    [
        (("new", 4, [0, 1.5], [0, 1]), "columns", "1.5"),
        (("new", 4, np.array([0.0]), [0]), "columns", "0.0"),
        (("new", 4, [0], ["0"]), "blocks", "'0'"),
        (("new", 4, [0], np.array([2**32])), "blocks", "4294967296"),
        (("new", 2.5, [0], [0]), "n_tokens", "2.5"),
        (("new", 4, 7, [0]), "columns", "7"),
    ],
)
def test_what_is_no_whole_number_is_named_and_never_cut(
    arguments: Any, named: str, value: str
) -> None:
    bm = BlockManager(8, 2)
    bm.allocate("a", 4)
    with pytest.raises((TypeError, ValueError), match=f"{named}.* {value}"):
        bm.restore(*arguments)


class Meddling:
    """An id like "a", which acts when it is compared the second time."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.compared = act, 0

    def __hash__(self) -> int:
        return hash("a")

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        if self.compared == 2:
            self.act()
        return self is other


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda bm: bm.pool.take_many(bm.num_available), OutOfBlocks),
        (lambda bm: bm.free_seq("kept"), ValueError),
    ],
    ids=["blocks gone", "a kept block gone"],
)
def test_what_changes_while_ids_are_compared_is_seen(
    act: Callable[[BlockManager], object], error: type[Exception]
) -> None:
    """The plan was good, then comparing the new id with "a" ran somebody else's code."""
    bm = BlockManager(8, 2)
    bm.allocate("a", 2)
    bm.allocate("kept", 2)
    seq = Meddling(lambda: act(bm))
    with pytest.raises(error):
        bm.restore(seq, 4, [0], [1])
    assert seq.compared >= 2
    assert seq not in bm
    bm.check()


def test_a_live_id_is_refused_before_the_slab_grows_for_it() -> None:
    """The manager has one row, and it is taken."""
    bm = BlockManager(8, 2, rows=1)
    bm.allocate("a", 4)
    before = slab_snapshot(bm)
    for call in (
        lambda: bm.fork("a", "a"),
        lambda: bm.allocate("a", 1),
        lambda: bm.restore("a", 4, [0], [0]),
    ):
        with pytest.raises(ValueError, match="'a' is a live sequence already"):
            call()
        assert slab_snapshot(bm) == before


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_beam_from_a_restored_sequence_gets_all_of_its_blocks(prefix_caching: bool) -> None:
    """The last block stayed and the ones before it did not: equal at the end, not before."""
    bm = BlockManager(12, 2, prefix_caching=prefix_caching)
    bm.allocate("a", 6)
    fresh = bm.restore("b", 6, [2], [2])
    assert bm.tables["b"] == [*fresh.tolist(), 2] == [3, 4, 2]
    bm.reorder(["b"], ["a"])
    assert bm.tables["b"] == bm.tables["a"] == [0, 1, 2]
    assert bm.pool.num_free == 9
    bm.check()


def test_the_counts_of_a_batch_are_checked() -> None:
    bm = BlockManager(8, 2)
    bm.allocate("a", 3)
    rows, out = bm.rows(["a"]), np.full(4, -7, np.int64)
    bad: list[tuple[Any, type[Exception]]] = [
        (np.array([0], np.int32), ValueError),
        (np.array([-1], np.int32), ValueError),
        (np.array([1, 1], np.int32), ValueError),
        (np.array([5], np.int32), ValueError),  # more than out has
        (np.array([2**31 - 1], np.int32), ValueError),
        (np.array([1], np.int64), TypeError),
        ([1], TypeError),
    ]
    before = snapshot(bm)
    for counts, error in bad:
        with pytest.raises(error):
            bm.append_batch(rows, out, counts)
        assert snapshot(bm) == before
        assert (out == -7).all()
    for call in (
        lambda: bm.plan_append(rows, without=rows),
        lambda: bm.plan_append(np.array([0, 0], np.int32)),
        lambda: bm.plan_append(np.array([1], np.int32)),
        lambda: bm.truncate_batch(rows, np.array([4], np.int32)),
        lambda: bm.truncate_batch(rows, np.array([-1], np.int32)),
        lambda: bm.truncate_batch(np.array([0, 0], np.int32), np.array([1, 1], np.int32)),
        lambda: bm.lengths_of(np.array([3], np.int32)),
    ):
        with pytest.raises(ValueError, match=r"rows|without|lengths"):
            call()
        assert snapshot(bm) == before
    assert bm.lengths_of(rows).tolist() == [3]
    bm.check()
