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
from kvcore.eviction import Retention, RetentionPriority, SegmentedLRU
from kvcore.identity import Media
from kvcore.pool import BlockPool, EvictionPolicy
from kvcore.prefix_index import PrefixIndex


def writable(view: np.ndarray) -> np.ndarray:
    """The memory of a read-only array, to write to."""
    assert not view.flags.writeable
    memory = (ctypes.c_char * view.nbytes).from_address(view.ctypes.data)
    return np.ndarray(view.shape, view.dtype, buffer=memory)


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
        self.rows = {seq: bm.row(seq) for seq in bm}
        (self.rows_by_seq,) = [
            held for held in gc.get_referents(bm) if isinstance(held, dict) and held
        ]
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


def cell(name: str, *index: Any, value: Any) -> Callable[[Any], tuple[Any, Any, int]]:
    """Which array, where in it (rows by the name of their sequence), what to write."""

    def locate(victim: Any) -> tuple[Any, Any, int]:
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
        (cell("tables", "a", 1, value=8), "I1", 1),
        (cell("pins", 3, value=0), "I1", 3),
        (cell("pins", 3, value=2), "I1", 3),
        (cell("pins", 9, value=1), "I1", 9),
        (cell("fenced", 0, value=3), "I1", 3),
        (cell("fenced", 0, value=10), "I1", 10),
        (cell("fenced", 0, value=-1), "I1", -1),
        # I3: no write lands where another token is
        (cell("tables", "a", 1, value=0), "I3", 0),
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
        (cell("after", 5, value=10), "I4", None),
        (cell("after", 5, value=5), "I4", 5),
        (cell("after", 6, value=5), "I4", 5),
        (cell("before", 6, value=10), "I4", 6),
        (cell("before", 10, value=5), "I4", None),
        (cell("after", 5, value=7), "I4", 7),
    ],
)
def test_each_kind_of_damage_is_named(
    damage: Callable[[Any], tuple[Any, Any, int]], invariant: str, block: int | None
) -> None:
    assert_named(Corruptible(), damage, invariant, block)


def assert_named(
    victim: Any,
    damage: Callable[[Any], tuple[Any, Any, int]],
    invariant: str,
    block: int | None,
) -> None:
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


class Sharing:
    """A manager that shares prefixes, in the middle of its life.

    ======= ==================== ================================================
    block   state                because
    ======= ==================== ================================================
    0, 1    used, twice          "a", and "c" that hit them: content 1, 2
    2       used                 the tail of "a"
    3, 4    used                 "b", which computed the same: content 1, 2 again
    5       used                 the tail of "b"
    6, 7    evictable, 7 first   "d", which is gone: content 3, 4
    9       used                 "c": content 5, after 2, with a picture
    10      used                 the tail of "c"
    8, 11 … free
    ======= ==================== ================================================

    With 0 bits of hash all contents are in bucket 0, as 9, 7, 6, 1, 4, 0, 3.
    """

    RECORD = np.dtype(
        [
            ("hash", np.uint64),
            ("uid", np.int64),
            ("parent", np.int64),
            ("key", np.int32),
            ("chain", np.int32),
            ("before", np.int32),
            ("filled", np.int32),
            ("tokens", np.int32, 4),
            ("padding", np.int32, 2),
        ]
    )

    def __init__(self, hash_bits: int, eviction: EvictionPolicy | None = None) -> None:
        self.pool = pool = BlockPool(14, eviction=eviction)
        self.index = PrefixIndex(pool, 4, hash_bits=hash_bits)
        self.bm = bm = BlockManager(14, 4, pool=pool, prefix_caching=True, rows=6)
        ten = list(range(10, 20))
        for seq in ("a", "b"):
            bm.allocate(seq, tokens=ten, namespace="salt")
        for seq in ("a", "b"):
            bm.commit(seq)
        retention: list[Retention] = []
        if isinstance(eviction, RetentionPriority):
            retention = [Retention(0, 4, 60, 10), Retention(4, 8, 60, 5)]
        bm.allocate("d", tokens=range(9), retention=retention)
        bm.commit("d")
        bm.free_seq("d")
        more = [*ten[:8], 30, 31, 32, 33, 34]
        bm.allocate("c", tokens=more, namespace="salt", media=[Media(9, 11, b"picture")])
        bm.commit("c")
        self.find_arrays()
        self.assert_as_described()

    def find_arrays(self) -> None:
        bm = self.bm
        self.rows = {seq: bm.row(seq) for seq in bm}
        links, self.contents, self.keys = (
            [writable(held) for held in group]
            for holder in (self.pool, self.index)
            for group in gc.get_referents(holder)
            if isinstance(group, tuple)
        )
        self.marks, self.marks_before = links
        records, self.buckets, _ = self.contents
        for name in self.RECORD.names or ():
            setattr(self, name, records.view(self.RECORD)[name])
        self.key_references = self.keys[0]
        (by_row,) = [
            held
            for held in gc.get_referents(bm)
            if isinstance(held, np.ndarray) and held.shape == (5, len(bm.lengths))
        ]
        self.known, self.published, self.eras, self.roots, self.cuts = writable(by_row)
        self.keys_by_number = next(
            held for held in gc.get_referents(self.index) if isinstance(held, list) and b"" in held
        )

    def assert_as_described(self) -> None:
        bm = self.bm
        assert [bm.tables[seq].tolist() for seq in "abc"] == [[0, 1, 2], [3, 4, 5], [0, 1, 9, 10]]
        assert self.pool.evictable_blocks().tolist() == [7, 6]
        assert self.index.uids().tolist() == [1, 2, 0, 1, 2, 0, 3, 4, 0, 5, 0, 0, 0, 0]
        # The private arrays are what this test takes them for.
        assert self.uid.tolist() == self.index.uids().tolist()
        assert self.parent[[0, 1, 3, 4, 6, 7, 9]].tolist() == [0, 1, 0, 1, 0, 3, 2]
        assert self.tokens[9].tolist() == [30, 31, 32, 33]
        assert self.filled.tolist() == [4, 4, 2, 4, 4, 2, 4, 4, 1, 4, 1, 0, 0, 0]
        assert self.key[[0, 3, 9]].tolist() == [1, 1, 2]
        assert self.key_references[:3].tolist() == [0, 5, 1]
        assert self.known[:3].tolist() == [10, 10, 13]
        assert self.published[:3].tolist() == [2, 2, 3]
        assert self.roots[:3].tolist() == [1, 1, 1]
        bm.check()


@pytest.mark.parametrize(
    ("damage", "invariant", "block"),
    [
        # I5: a content stands in the bucket of its hash as long as a block holds it
        (cell("buckets", 0, value=-1), "I5", None),
        (cell("buckets", 0, value=14), "I5", 14),
        (cell("buckets", 0, value=-2), "I5", -2),
        (cell("buckets", 0, value=8), "I5", 8),
        (cell("buckets", 0, value=7), "I5", 7),
        (cell("chain", 3, value=9), "I5", 9),
        (cell("chain", 3, value=3), "I5", 3),
        (cell("chain", 4, value=-1), "I5", None),
        (cell("chain", 0, value=8), "I5", 8),
        (cell("before", 4, value=6), "I5", 4),
        (cell("uid", 6, value=0), "I5", 6),
        (cell("uid", 6, value=-1), "I5", 6),
        (cell("uid", 6, value=6), "I5", 6),
        (cell("uid", 6, value=4), "I5", 6),
        (cell("uid", 10, value=5), "I5", 10),
        (cell("uid", 11, value=3), "I5", 11),
        (cell("hash", 6, value=0), "I5", 6),
        (cell("parent", 6, value=3), "I5", 6),
        (cell("parent", 6, value=-1), "I5", 6),
        (cell("key", 3, value=0), "I5", 3),
        (cell("key", 6, value=16), "I5", 6),
        (cell("key", 6, value=-1), "I5", 6),
        (cell("tokens", 3, 0, value=99), "I5", 3),
        (cell("filled", 8, value=5), "I5", 8),
        (cell("filled", 8, value=-1), "I5", 8),
        (cell("marks", 0, value=-1), "I5", 0),
        # I6: what is published is full, and what its sequences say it is
        (cell("filled", 6, value=3), "I6", 6),
        (cell("filled", 0, value=3), "I6", 0),
        (cell("filled", 2, value=1), "I6", 2),
        (cell("uid", 9, value=0), "I6", 9),
        (cell("uid", 3, value=2), "I6", 4),
        (cell("parent", 9, value=1), "I6", 9),
        (cell("known", "a", value=11), "I6", None),
        (cell("known", "a", value=-1), "I6", None),
        (cell("known", "c", value=11), "I6", None),
        (cell("published", "a", value=3), "I6", None),
        (cell("published", "a", value=-2), "I6", None),
        # I11: a key is kept exactly as long as something refers to it
        (cell("key", 6, value=2), "I11", None),
        (cell("key", 8, value=1), "I11", None),
        (cell("roots", "a", value=0), "I11", None),
        (cell("key_references", 1, value=4), "I11", None),
        (cell("key_references", 2, value=2), "I11", None),
        (cell("keys_by_number", 2, value=None), "I11", None),
    ],
)
def test_each_kind_of_damage_to_the_index_is_named(
    damage: Callable[[Any], tuple[Any, Any, int]], invariant: str, block: int | None
) -> None:
    """All contents in one bucket, so that it is known what comes after what."""
    assert_named(Sharing(hash_bits=0), damage, invariant, block)


@pytest.mark.parametrize(
    ("damage", "invariant", "block"),
    [
        (cell("tokens", 0, 1, value=99), "I5", 3),
        (cell("tokens", 1, 2, value=99), "I5", 4),
        (cell("tokens", 4, 2, value=99), "I5", 4),
        (cell("tokens", 6, 3, value=99), "I5", 6),
        (cell("tokens", 7, 3, value=99), "I5", 7),
        (cell("tokens", 9, 3, value=99), "I5", 9),
        (cell("key", 9, value=1), "I5", 9),
        (cell("hash", 6, value=1 << 63), "I5", 6),
    ],
)
def test_a_content_that_is_not_what_it_was_is_named(
    damage: Callable[[Any], tuple[Any, Any, int]], invariant: str, block: int | None
) -> None:
    """The hash, which only finds candidates elsewhere, is the witness here."""
    assert_named(Sharing(hash_bits=61), damage, invariant, block)


class Windowed(Sharing):
    """Tables with holes, and such that were put together again.

    ======= ==================== ================================================
    block   state                because
    ======= ==================== ================================================
    0       used                 "a": content 1, which the window sees as a sink
    1       evictable            "a": content 2, which the window has given back
    2       used, twice          "a" and "c": content 3
    3, 4    used                 "a": content 4, and its tail
    5       used                 "b": content 5, which stayed when it was swapped out
    6       evictable            "b": content 6, before that
    8, 9    used                 "b": what came back, not published; its tail
    10      used                 the tail of "c", of which no token is known
    7, 11 … free
    ======= ==================== ================================================
    """

    def __init__(self) -> None:
        self.pool = pool = BlockPool(16)
        self.index = PrefixIndex(pool, 4, hash_bits=0)
        self.bm = bm = BlockManager(16, 4, pool=pool, prefix_caching=True, rows=6)
        bm.allocate("a", tokens=range(18))
        bm.commit("a")
        bm.release_outside_window(bm.rows(["a"]), np.array([12], np.int32), 5, 1)
        bm.allocate("b", tokens=range(100, 111), namespace="salt")
        bm.commit("b")
        bm.pin(5)
        prompt = bm.prompt_of("b")
        bm.free_seq("b")
        bm.restore("b", 11, [0], [5], tokens=prompt)
        bm.unpin(5)
        bm.restore("c", 14, [0, 1, 2], [-1, -1, 2])
        self.tables, self.lengths = writable(bm.block_tables), writable(bm.lengths)
        self.ref = writable(bm.ref)
        self.find_arrays()
        self.assert_as_described()

    def assert_as_described(self) -> None:
        bm = self.bm
        assert [bm.tables[seq].tolist() for seq in "abc"] == [
            [0, -1, 2, 3, 4],
            [5, 8, 9],
            [-1, -1, 2, 10],
        ]
        assert self.pool.evictable_blocks().tolist() == [1, 6]
        assert self.index.uids().tolist() == [1, 2, 3, 4, 0, 5, 6, *[0] * 9]
        # The private arrays are what this test takes them for.
        assert self.uid.tolist() == self.index.uids().tolist()
        assert self.filled[[4, 8, 9, 10]].tolist() == [2, 4, 3, 0]
        assert self.known[:3].tolist() == [18, 11, 0]
        assert self.published[:3].tolist() == [4, 0, 0]
        assert self.eras[:3].tolist() == [0, 0, -1]
        assert self.roots[0] == self.roots[2] == 0 != self.roots[1]
        bm.check()


@pytest.mark.parametrize(
    ("damage", "invariant", "block"),
    [
        # A hole is nobody's, and a block that is no hole has a holder there.
        (cell("tables", "a", 1, value=1), "I1", 1),
        (cell("tables", "c", 0, value=9), "I1", 9),
        (cell("tables", "a", 2, value=-1), "I1", 2),
        (cell("tables", "b", 0, value=-1), "I1", 5),
        (cell("tables", "b", 1, value=6), "I1", 6),
        (cell("ref", 2, value=1), "I1", 2),
        (cell("ref", 8, value=2), "I1", 8),
        # No token of a table overwrites another of it.
        (cell("tables", "b", 1, value=9), "I3", 9),
        (cell("tables", "b", 1, value=5), "I3", 5),
        (cell("tables", "a", 1, value=0), "I3", 0),
        # A hole is a hole of a whole block: a token may be appended to the last one.
        (cell("tables", "a", 4, value=-1), "I2", -1),
        (cell("tables", "c", 3, value=-1), "I2", -1),
        (cell("tables", "a", 1, value=-2), "I2", -2),
        (cell("tables", "a", 1, value=16), "I2", 16),
        (cell("lengths", "a", value=7), "I2", -1),
        (cell("lengths", "c", value=1), "I2", -1),
        # What is after a hole is published, or not, and known, or not, like all else.
        (cell("uid", 2, value=0), "I6", 2),
        (cell("uid", 3, value=0), "I6", 3),
        (cell("parent", 3, value=1), "I6", 3),
        (cell("filled", 4, value=1), "I6", 4),
        (cell("filled", 8, value=3), "I6", 8),
        (cell("filled", 9, value=2), "I6", 9),
        (cell("known", "a", value=19), "I6", None),
        (cell("known", "b", value=12), "I6", None),
        (cell("known", "c", value=13), "I6", 10),
        (cell("published", "a", value=5), "I6", None),
        (cell("published", "b", value=2), "I6", 8),
        (cell("roots", "b", value=0), "I11", None),
        (cell("roots", "c", value=1), "I11", None),
        (cell("key", 5, value=0), "I11", None),
    ],
)
def test_damage_to_tables_with_holes_and_restored_ones_is_named(
    damage: Callable[[Any], tuple[Any, Any, int]], invariant: str, block: int | None
) -> None:
    assert_named(Windowed(), damage, invariant, block)


def test_a_hole_where_no_window_was_used_is_no_hole() -> None:
    bm = BlockManager(8, 4)
    bm.allocate("a", 8)
    cells = writable(bm.block_tables)[bm.row("a")]
    cells[0] = -1
    with pytest.raises(InvariantError) as report:
        bm.check()
    assert (report.value.invariant, report.value.block) == ("I2", -1)
    cells[0] = 0  # it is given back when the manager ends


class Ordered(Sharing):
    """The same under an eviction policy, whose arrays are looked at too."""

    def __init__(self, eviction: EvictionPolicy, *names: str) -> None:
        super().__init__(0, eviction)
        (arrays,) = [held for held in gc.get_referents(eviction) if isinstance(held, tuple)]
        for name, array in zip(names, arrays, strict=True):
            setattr(self, name, writable(array))


@pytest.mark.parametrize(
    ("damage", "block"),
    [
        (cell("is_protected", 6, value=1), 6),
        (cell("is_protected", 7, value=1), 7),
        (cell("marks", 14 + 1, value=6), 6),
    ],
)
def test_damage_to_a_segmented_lru_is_named(
    damage: Callable[[Any], tuple[Any, Any, int]], block: int | None
) -> None:
    assert_named(Ordered(SegmentedLRU(), "was_hit", "is_protected"), damage, "I4", block)


def test_copies_of_a_content_that_stand_apart_are_found() -> None:
    """A match finds the first copy, and whoever removes it must find the next one there."""
    victim = Sharing(hash_bits=0)
    # From 9, 7, 6, 1, 4, 0, 3 to 9, 7, 6, 1, 0, 4, 3.
    for block, after in ((1, 0), (0, 4), (4, 3)):
        victim.chain[block] = after
        victim.before[after] = block
    with pytest.raises(InvariantError) as report:
        victim.bm.check()
    assert (report.value.invariant, report.value.block) == ("I5", 4)


def test_a_protected_block_that_is_not_counted_is_found() -> None:
    victim = Ordered(SegmentedLRU(), "was_hit", "is_protected")
    probation, protected = 14, 15
    for before, after in ((7, probation), (protected, 6), (6, protected)):
        victim.marks[before] = after
        victim.marks_before[after] = before
    victim.is_protected[6] = True
    with pytest.raises(InvariantError, match="1 blocks are protected, 0 counted"):
        victim.bm.check()


@pytest.mark.parametrize(
    ("damage", "block"),
    [
        (cell("priorities", 6, value=36), 6),
        (cell("places", 6, value=-1), None),
        (cell("places", 7, value=1), 7),
        (cell("heap", 0, value=6), 6),
        (cell("ends", 6, value=0), 6),
        (cell("marks", 14 + 90, value=6), 6),
    ],
)
def test_damage_to_priorities_is_named(
    damage: Callable[[Any], tuple[Any, Any, int]], block: int | None
) -> None:
    """Both idle blocks have a priority that ends: 7 at 5 s, first in the heap, 6 at 10 s."""
    victim = Ordered(
        RetentionPriority(), "priorities", "durations", "ends", "heap", "places", "entries"
    )
    assert_named(victim, damage, "I4", block)


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
