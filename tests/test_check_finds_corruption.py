"""``check()`` must see what it promises to see: each invariant is broken once.

The public arrays are written through their addresses, as a stray kernel would do it;
the private ones are reached through the garbage collector, which sees every object that
a compiled class holds. After each report the damage is undone and ``check()`` is clean.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore.block_manager import BlockManager
from kvcore.errors import InvariantError, KVCoreError
from kvcore.pool import BlockPool


def writable(view: np.ndarray) -> np.ndarray:
    """The memory of a read-only array of int32, to write to."""
    assert not view.flags.writeable
    assert view.dtype == np.int32
    pointer = ctypes.cast(view.ctypes.data, ctypes.POINTER(ctypes.c_int32))
    return np.ctypeslib.as_array(pointer, shape=view.shape)


def int32_arrays(holder: object, known: list[np.ndarray]) -> list[np.ndarray]:
    """The one-dimensional int32 arrays that a compiled object holds, but for known ones."""
    known_addresses = {array.ctypes.data for array in known}
    return [
        writable(held)
        for held in gc.get_referents(holder)
        if isinstance(held, np.ndarray)
        and held.ndim == 1
        and held.dtype == np.int32
        and held.ctypes.data not in known_addresses
    ]


class Corruptible:
    """A manager in the middle of its life, with every kind of holder.

    ======= ==================== ======================================
    block   state                because
    ======= ==================== ======================================
    0       used, twice          in the tables of "a" and "b"
    1       used                 in the table of "a"
    2       used                 in the table of "b", after its copy of 1
    3       used                 pinned
    4       used                 held by the fence
    5, 6    evictable            kept and released, 5 first
    7, 8, 9 free
    ======= ==================== ======================================
    """

    def __init__(self) -> None:
        self.bm = bm = BlockManager(10, 4, rows=4)
        bm.allocate("a", 6)
        bm.fork("a", "b")
        bm.append_slot("b")
        bm.pool.take()
        bm.allocate("c", 12)
        for block in (5, 6):
            bm.pool.keep(block)
            bm.pin(block)
        bm.truncate("c", 4)
        bm.unpin(5)
        bm.unpin(6)
        bm.fence()
        bm.truncate("c", 0)
        self.ref = writable(bm.ref)
        self.tables = writable(bm.block_tables)
        self.lengths = writable(bm.lengths)
        self.ring, self.pins = int32_arrays(bm.pool, [bm.ref])
        (links,) = [held for held in gc.get_referents(bm.pool) if isinstance(held, tuple)]
        self.after, self.before = map(writable, links)
        self.mirrored, self.spare, self.fenced = int32_arrays(bm, [bm.lengths])
        (self.rows_by_seq,) = [held for held in gc.get_referents(bm) if isinstance(held, dict)]
        self.rows = {seq: bm.row(seq) for seq in bm}
        self.assert_as_described()

    def assert_as_described(self) -> None:
        bm = self.bm
        assert bm.tables["a"] == [0, 1]
        assert bm.tables["b"] == [0, 2]
        assert bm.ref.tolist() == [2, 1, 1, 1, 1, 0, 0, 0, 0, 0]
        assert bm.pool.evictable_blocks().tolist() == [5, 6]
        assert list(bm.free) == [7, 8, 9]
        # The private arrays are what this test takes them for.
        assert {7, 8, 9} <= set(self.ring.tolist())
        assert self.pins.tolist() == [bm.pool.pins(block) for block in range(10)]
        assert self.after[10] == 5
        assert self.before[10] == 6
        assert self.fenced[0] == 4
        assert self.mirrored.tolist() == [0, 0, 0, 0]
        assert self.rows_by_seq == self.rows
        assert len(self.spare) == 4
        bm.check()


def cell(name: str, *index: Any, value: int) -> Callable[[Corruptible], tuple[Any, Any, int]]:
    """Which array, where in it (rows by the name of their sequence), what to write."""

    def locate(victim: Corruptible) -> tuple[Any, Any, int]:
        where = tuple(victim.rows.get(part, part) for part in index)
        return getattr(victim, name), where if len(where) > 1 else where[0], value

    return locate


free_place = -1  # the last of the free list is the last of the ring here


@pytest.mark.parametrize(
    ("damage", "invariant", "block"),
    [
        # I1: ref count == holders
        (cell("ref", 1, value=2), "I1", 1),
        (cell("ref", 0, value=1), "I1", 0),
        (cell("ref", 2, value=0), "I1", 2),
        (cell("ref", 3, value=2), "I1", 3),
        (cell("ref", 4, value=2), "I1", 4),
        (cell("ref", 5, value=1), "I1", 5),
        (cell("ref", 8, value=1), "I1", 8),
        (cell("ref", 9, value=-1), "I1", 9),
        (cell("tables", "b", 1, value=1), "I1", 1),
        (cell("tables", "a", 1, value=0), "I1", 0),
        (cell("tables", "a", 1, value=8), "I1", 1),
        (cell("pins", 3, value=0), "I1", 3),
        (cell("pins", 3, value=2), "I1", 3),
        (cell("pins", 9, value=1), "I1", 9),
        (cell("fenced", 0, value=3), "I1", 3),
        (cell("fenced", 0, value=10), "I1", 10),
        (cell("fenced", 0, value=-1), "I1", -1),
        # I2: a table holds exactly ceil(length / block_size) blocks
        (cell("lengths", "a", value=4), "I1", 1),
        (cell("lengths", "a", value=0), "I1", 0),
        (cell("lengths", "a", value=-1), "I2", None),
        (cell("lengths", "c", value=-1), "I2", None),
        (cell("lengths", "a", value=-2), "I2", None),
        (cell("lengths", "a", value=2**31 - 1), "I2", None),
        (cell("lengths", 3, value=0), "I2", None),
        (cell("lengths", 3, value=5), "I2", None),
        (cell("tables", "a", 0, value=10), "I2", 10),
        (cell("tables", "b", 1, value=-1), "I2", -1),
        (cell("rows_by_seq", "intruder", value=0), "I2", None),
        (cell("mirrored", "a", value=3), "I2", None),
        (cell("mirrored", "a", value=-1), "I2", None),
        (cell("spare", 0, value=0), "I2", None),
        (cell("spare", 0, value=4), "I2", None),
        # I4: every id in exactly one place, no count below 0
        (cell("pins", 3, value=-1), "I4", 3),
        (cell("ring", free_place, value=8), "I4", 8),
        (cell("ring", free_place, value=0), "I4", 0),
        (cell("ring", free_place, value=5), "I4", 5),
        (cell("ring", free_place, value=10), "I4", 10),
        (cell("ring", free_place, value=-1), "I4", -1),
        (cell("after", 8, value=-2), "I4", 8),
        (cell("after", 10, value=6), "I4", 6),
        (cell("after", 10, value=-1), "I4", -1),
        (cell("after", 5, value=10), "I4", 10),
        (cell("after", 5, value=5), "I4", 5),
        (cell("after", 6, value=5), "I4", None),
        (cell("before", 6, value=10), "I4", 6),
        (cell("before", 10, value=5), "I4", None),
        (cell("after", 5, value=7), "I4", 7),
    ],
)
def test_each_kind_of_damage_is_named(
    damage: Callable[[Corruptible], tuple[Any, Any, int]], invariant: str, block: int | None
) -> None:
    victim = Corruptible()
    array, where, value = damage(victim)
    absent = object()
    before = array.get(where, absent) if isinstance(array, dict) else array[where]
    array[where] = value
    for check in (victim.bm.check, victim.bm.pool.check):
        with pytest.raises(InvariantError) as report:
            check()
        assert (report.value.invariant, report.value.block) == (invariant, block)
        assert invariant in str(report.value)
        assert isinstance(report.value, KVCoreError)
        assert isinstance(report.value, AssertionError)
    if before is absent:
        del array[where]
    else:
        array[where] = before
    victim.assert_as_described()


def test_a_row_lost_from_the_dict_is_found() -> None:
    """A sequence that nobody can name any more still holds its blocks."""
    victim = Corruptible()
    lost = victim.rows_by_seq.pop("a")
    with pytest.raises(InvariantError, match="I2"):
        victim.bm.check()
    victim.rows_by_seq["a"] = lost
    victim.rows_by_seq["b"] = lost
    with pytest.raises(InvariantError, match="I2"):
        victim.bm.check()


def test_any_manager_of_a_shared_pool_finds_the_damage_of_another() -> None:
    pool = BlockPool(6)
    first, second = BlockManager(6, 2, pool=pool), BlockManager(6, 3, pool=pool)
    first.allocate("a", 4)
    second.allocate("a", 4)
    first.check()
    writable(second.block_tables)[second.row("a"), 0] = 0
    for check in (first.check, second.check, pool.check):
        with pytest.raises(InvariantError) as report:
            check()
        assert (report.value.invariant, report.value.block) == ("I1", 0)


def test_check_costs_nothing_to_repeat() -> None:
    """It only reads: a thousand checks later everything is as it was."""
    victim = Corruptible()
    for _ in range(1_000):
        victim.bm.check()
    victim.assert_as_described()


def test_no_view_can_be_written() -> None:
    """What the tests above need an address for cannot happen by an assignment."""
    bm = BlockManager(4, 4)
    bm.allocate("a", 5)
    table = np.asarray(bm.tables["a"])
    for view in (bm.ref, bm.pool.ref, bm.block_tables, bm.lengths, bm.counters, table):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    with pytest.raises(TypeError):
        memoryview(bm.tables["a"])[0] = 0
    with pytest.raises(TypeError):
        bm.tables["a"][0] = 0  # type: ignore[index]
