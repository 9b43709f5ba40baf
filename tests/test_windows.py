"""Blocks that a sliding window gives back: which ones, and what a hole means to each call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcore.block_manager import BlockManager


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("sinks", [0, 1, 5])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
def test_the_blocks_given_back_are_those_that_no_later_token_sees(
    block_size: int, sinks: int, window: int
) -> None:
    """By the definition: token i sees itself, the window - 1 before it, and the sinks."""
    for n_tokens in range(30):
        bm = BlockManager(40, block_size)
        bm.allocate("a", n_tokens)
        table = bm.tables["a"].tolist()
        seen = {*range(sinks), *range(max(0, n_tokens - window + 1), n_tokens)}
        kept = {token // block_size for token in seen}
        kept |= set(range(-(-sinks // block_size)))
        if n_tokens % block_size:
            kept.add(n_tokens // block_size)  # the next token is written there
        expected = [block if column in kept else -1 for column, block in enumerate(table)]
        released = bm.release_outside_window(bm.rows(["a"]), int32(n_tokens), window, sinks)
        assert bm.tables["a"].tolist() == expected
        assert released == expected.count(-1) == bm.pool.num_free - (40 - len(table))
        assert bm.release_outside_window(bm.rows(["a"]), int32(n_tokens), window, sinks) == 0
        assert bm.gauges().logical_blocks == len(table) - released
        bm.check()


def holed(**options: bool) -> BlockManager:
    """Ten tokens in blocks of 2; the window has given columns 1, 2 and 3 back."""
    bm = BlockManager(12, 2, **options)
    bm.allocate("a", 10, **({"tokens": range(8)} if options else {}))
    assert bm.release_outside_window(bm.rows(["a"]), int32(10), 3, 2) == 3
    assert bm.tables["a"] == [0, -1, -1, -1, 4]
    return bm


def test_reading_or_cutting_inside_a_hole_is_refused_and_changes_nothing() -> None:
    bm = holed(prefix_caching=True)
    for call in (
        lambda: bm.slots("a"),
        lambda: bm.slots("a", 3, 4),
        lambda: bm.truncate("a", 5),
        lambda: bm.truncate_batch(bm.rows(["a"]), int32(5)),
        lambda: bm.fork("a", "b", 3),
        lambda: bm.tokens("a"),
        lambda: bm.prompt_of("a"),
    ):
        with pytest.raises(ValueError, match="window has given back"):
            call()
        assert bm.tables["a"] == [0, -1, -1, -1, 4]
        assert bm.lens == {"a": 10}
    assert bm.slots("a", 8).tolist() == [8, 9]
    assert bm.known("a") == 8
    bm.check()


def test_a_fork_shares_the_holes_and_the_changes_tell_of_them() -> None:
    bm = holed()
    bm.fork("a", "b")
    assert bm.tables["b"] == [0, -1, -1, -1, 4]
    changes = bm.drain_changes()
    assert [cell[2] for cell in changes.tolist()] == [0, -1, -1, -1, 4] * 2
    bm.free_seq("a")
    bm.free_seq("b")
    assert bm.pool.num_free == 12
    bm.check()


def test_a_mirror_that_had_the_blocks_is_told_that_they_are_given_back() -> None:
    bm = BlockManager(12, 2)
    bm.allocate("a", 10)
    row = bm.row("a")
    assert len(bm.drain_changes()) == 5
    bm.release_outside_window(bm.rows(["a"]), int32(10), 3, 2)
    changes = bm.drain_changes().tolist()
    assert changes[:3] == [[row, 1, -1], [row, 2, -1], [row, 3, -1]]
    assert bm.drain_changes().tolist() == []


def test_what_follows_a_hole_is_not_published() -> None:
    bm = holed(prefix_caching=True)
    assert bm.commit("a") == 1
    assert bm.match(range(8)) == 2
    bm.check()


def test_a_block_after_a_hole_may_be_forgotten() -> None:
    """What came after it in the table does not follow it any more, and that is no fault."""
    bm = BlockManager(12, 2, prefix_caching=True)
    bm.allocate("a", tokens=range(9))
    bm.commit("a")
    assert bm.release_outside_window(bm.rows(["a"]), int32(5), 3, 2) == 0
    assert bm.release_outside_window(bm.rows(["a"]), int32(6), 3, 2) == 1
    bm.pool.forget(bm.tables["a"][2])
    bm.check()


def test_a_step_in_flight_holds_what_the_window_gives_back() -> None:
    bm = BlockManager(12, 2)
    bm.allocate("a", 10)
    step = bm.fence()
    assert bm.release_outside_window(bm.rows(["a"]), int32(8), 3) == 3
    assert bm.pool.num_free == 7
    assert bm.settle(step) == 3
    assert bm.pool.num_free == 10
    bm.check()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_beams_with_equal_holes_are_compared_before_them_too(prefix_caching: bool) -> None:
    """Two holes are equal and say nothing of the sinks before them."""
    bm = BlockManager(20, 2, prefix_caching=prefix_caching)
    bm.allocate("a", 8)
    bm.allocate("b", 8)
    bm.release_outside_window(bm.rows(["a", "b"]), int32(8, 8), 3, 2)
    bm.reorder(["a"], ["b"])
    assert bm.tables["a"] == bm.tables["b"]
    bm.check()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([0, 9], [10, 1], 3, 0), "rows"),
        (([0], [11], 3, 0), "lengths"),
        (([0], [-1], 3, 0), "lengths"),
        (([0], [10, 10], 3, 0), "lengths"),
        (([0], [10], 0, 0), "window"),
        (([0], [10], 3, -1), "sinks"),
    ],
)
def test_a_bad_argument_is_named_and_gives_nothing_back(arguments: tuple, named: str) -> None:
    bm = BlockManager(12, 2)
    bm.allocate("a", 10)
    rows, lengths, window, sinks = arguments
    with pytest.raises(ValueError, match=named):
        bm.release_outside_window(int32(*rows), int32(*lengths), window, sinks)
    assert bm.pool.num_free == 7
    bm.check()


APPENDS: dict[str, Callable[[BlockManager, np.ndarray], object]] = {
    "append_slot": lambda bm, rows: bm.append_slot("a"),
    "append_slots": lambda bm, rows: bm.append_slots("a", 1),
    "append_batch": lambda bm, rows: bm.append_batch(rows, np.zeros(1, np.int64)),
    "append_batch with counts": lambda bm, rows: bm.append_batch(
        rows, np.zeros(1, np.int64), int32(1)
    ),
}


@pytest.mark.parametrize("append", APPENDS.values(), ids=list(APPENDS))
def test_a_table_may_span_more_columns_than_the_pool_has_blocks(
    append: Callable[[BlockManager, np.ndarray], object],
) -> None:
    """And the slab grows by doubling then too, not by a few columns at a time."""
    bm = BlockManager(4, 1, columns=1)
    bm.allocate("a", 1)
    rows, generation = bm.rows(["a"]), bm.table_generation
    for length in range(2, 4_000):
        append(bm, rows)
        assert bm.release_outside_window(rows, int32(length), 2) == 1
        assert bm.lens["a"] == length == len(bm.tables["a"])
    assert bm.tables["a"].tolist().count(-1) == 3_998
    assert bm.table_generation - generation < 12
    bm.check()
