"""What can be read without a copy, and how long it stays true.

``bm.table(seq)``, the arrays of the manager, and the views under the names of the
problem statement.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from kvcore import BlockManager, BlockPool, BlockTable


@pytest.fixture
def bm() -> BlockManager:
    """A has blocks 0, 1, 2 with 10 tokens; B shares the first two; C has none."""
    manager = BlockManager(16, 4)
    manager.allocate("A", 10)
    manager.fork("A", "B", n_tokens=8)
    manager.allocate("C", 0)
    return manager


def refuses_writes(array: np.ndarray[Any, Any]) -> bool:
    before = array.tolist()
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 77
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    return bool(array.tolist() == before)


# ---------------------------------------------------------------- BlockTable as a sequence


def test_a_table_equals_the_list_of_its_blocks_and_nothing_else(bm: BlockManager) -> None:
    table = bm.table("A")
    assert isinstance(table, BlockTable)
    assert table == [0, 1, 2]
    assert [0, 1, 2] == table  # noqa: SIM300
    assert table == (0, 1, 2)
    assert table == bm.table("A")
    assert table == np.array([0, 1, 2])
    assert bm.table("C") == []
    assert bm.table("C") == bm.table("C")
    for other in ([0, 1], [0, 1, 2, 3], [0, 2, 1], [], bm.table("B"), None, "012", 0, {0, 1, 2}):
        assert table != other
        assert other != table


def test_a_table_cannot_be_hashed_because_it_changes(bm: BlockManager) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(bm.table("A"))


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(1, None),
        slice(None, -1),
        slice(None, None, -1),
        slice(0, 3, 2),
        slice(5, 9),
        slice(-2, None),
        0,
        2,
        -1,
        -3,
        np.int32(1),
        np.int64(-1),
    ],
    ids=str,
)
def test_indices_and_slices_read_like_a_list(bm: BlockManager, index: Any) -> None:
    item = bm.table("A")[index]
    assert item == [0, 1, 2][index]
    assert type(item) is type([0, 1, 2][index])


@pytest.mark.parametrize("index", [3, -4, 2**31, -(2**63), 2**70])
def test_an_index_past_the_table_is_an_error_not_a_stale_cell(bm: BlockManager, index: int) -> None:
    with pytest.raises(IndexError):
        bm.table("A")[index]


@pytest.mark.parametrize("index", ["0", 1.0, None, (0, 1), [0, 1], ..., (..., 0)], ids=repr)
def test_an_index_of_another_type_is_a_type_error(bm: BlockManager, index: Any) -> None:
    with pytest.raises(TypeError):
        bm.table("A")[index]


def test_iteration_membership_and_conversion(bm: BlockManager) -> None:
    table = bm.table("A")
    assert len(table) == 3
    assert list(table) == table.tolist() == [0, 1, 2]
    assert all(type(block) is int for block in [*table, *table.tolist()])
    assert 2 in table
    assert np.int32(2) in table
    assert 3 not in table
    assert "2" not in table
    assert not bm.table("C")
    assert str(table.tolist()) in repr(table)


def test_a_table_cannot_be_written_through(bm: BlockManager) -> None:
    table: Any = bm.table("A")
    with pytest.raises(TypeError):
        table[0] = 5
    with pytest.raises(TypeError):
        del table[0]
    with pytest.raises(AttributeError):
        table.append(5)
    assert table == [0, 1, 2]


# ---------------------------------------------------------------- the buffer


def test_the_buffer_is_the_slab_itself(bm: BlockManager) -> None:
    array = np.asarray(bm.table("A"))
    assert array.dtype == np.int32
    assert array.shape == (3,)
    assert array.flags.c_contiguous
    assert refuses_writes(array)
    assert np.shares_memory(array, bm.block_tables)
    start = bm.block_tables[bm.row("A")].ctypes.data
    assert array.ctypes.data == start
    table: Any = bm.table("A")
    view = memoryview(table)
    assert (view.format, view.itemsize, view.shape, view.readonly) == ("i", 4, (3,), True)
    assert view.tolist() == [0, 1, 2]
    assert np.array(bm.table("A")).flags.owndata
    assert np.asarray(bm.table("C")).shape == (0,)


def test_a_buffer_to_write_into_is_refused(bm: BlockManager) -> None:
    table: Any = bm.table("A")
    with pytest.raises((BufferError, ValueError, TypeError)):
        (ctypes.c_int32 * 3).from_buffer(table)
    with pytest.raises((BufferError, ValueError, TypeError)):
        BytesIO(bytes(12)).readinto(table)
    assert bm.table("A") == [0, 1, 2]


def test_the_object_follows_its_sequence_and_the_buffer_shows_the_cells(
    bm: BlockManager,
) -> None:
    table, buffer = bm.table("B"), np.asarray(bm.table("B"))
    bm.append_slots("B", 5)
    assert table == [0, 1, 3, 4]
    assert buffer.tolist() == [0, 1]
    bm.truncate("B", 3)
    assert table == [0]
    assert bm.append_slot("B") == (5, 3, 0)
    assert table == [5]
    assert buffer.tolist() == [5, 1]


@pytest.mark.parametrize(
    "read",
    [
        len,
        list,
        lambda table: table[0],
        lambda table: table[:],
        lambda table: 0 in table,
        lambda table: table == [0],
        lambda table: table.tolist(),
        memoryview,
        np.asarray,
    ],
    ids=["len", "iter", "index", "slice", "in", "eq", "tolist", "memoryview", "asarray"],
)
def test_reading_the_table_of_a_freed_sequence_is_a_key_error(
    bm: BlockManager, read: Callable[[BlockTable], object]
) -> None:
    table = bm.table("A")
    bm.free_seq("A")
    with pytest.raises(KeyError, match="A"):
        read(table)
    repr(table)
    bm.allocate("A", 1)
    assert table == bm.table("A")
    read(table)


# ---------------------------------------------------------------- growth


def grow_rows(bm: BlockManager) -> None:
    for seq in range(bm.block_tables.shape[0] + 1 - len(bm)):
        bm.allocate(("filler", seq), 0)


def grow_columns(bm: BlockManager) -> None:
    bm.allocate("long", (bm.block_tables.shape[1] + 1) * bm.block_size)


GROWTHS = pytest.mark.parametrize(
    ("grow", "axis"), [(grow_rows, 0), (grow_columns, 1)], ids=["rows", "columns"]
)


def small_manager() -> BlockManager:
    bm = BlockManager(200, 4, rows=4, columns=1)
    bm.allocate("A", 4)
    bm.allocate("B", 3)
    return bm


@GROWTHS
def test_growth_is_told_by_the_generation_and_old_views_keep_their_cells(
    grow: Callable[[BlockManager], None], axis: int
) -> None:
    bm = small_manager()
    tables, lengths, buffer = bm.block_tables, bm.lengths, np.asarray(bm.table("A"))
    rows = {seq: bm.row(seq) for seq in "AB"}
    cells = {seq: tables[rows[seq], :1].tolist() for seq in "AB"}
    assert bm.table_generation == 0

    grow(bm)

    assert bm.table_generation == 1
    assert bm.block_tables.shape[axis] > tables.shape[axis]
    assert not np.shares_memory(bm.block_tables, tables)
    assert not np.shares_memory(bm.lengths, lengths)
    assert {seq: bm.row(seq) for seq in "AB"} == rows
    assert {seq: bm.block_tables[rows[seq], :1].tolist() for seq in "AB"} == cells

    bm.free_seq("A")
    bm.append_slots("B", 1)
    bm.free_seq("B")
    bm.allocate("other", 4)
    assert {seq: tables[rows[seq], :1].tolist() for seq in "AB"} == cells
    assert (lengths[rows["A"]], lengths[rows["B"]]) == (4, 3)
    assert buffer.tolist() == cells["A"]
    assert refuses_writes(tables)
    assert refuses_writes(lengths)


@GROWTHS
def test_old_views_stay_readable_after_the_manager_is_gone(
    grow: Callable[[BlockManager], None], axis: int
) -> None:
    bm = small_manager()
    old, old_lengths = bm.block_tables, bm.lengths
    grow(bm)
    new, new_lengths, ref, counters = bm.block_tables, bm.lengths, bm.ref, bm.counters
    table, buffer = bm.table("A"), np.asarray(bm.table("B"))
    expected = [array.tolist() for array in (old, old_lengths, new)]
    assert new.shape[axis] > old.shape[axis]
    del bm
    gc.collect()
    # The table still holds the manager; the arrays hold only their own memory.
    assert table == [0]
    del table
    gc.collect()
    assert [array.tolist() for array in (old, old_lengths, new)] == expected
    assert buffer.tolist() == [1]
    assert len(ref) == 200
    assert counters.sum() > 0
    assert new_lengths.shape == (new.shape[0],)


def test_without_growth_the_views_stay_the_same_objects_memory_and_truth() -> None:
    bm = BlockManager(64, 4, rows=4, columns=16)
    tables, lengths, ref, counters = bm.block_tables, bm.lengths, bm.ref, bm.counters
    for round_ in range(50):
        bm.allocate("A", 6)
        bm.fork("A", "B")
        bm.append_slots("B", 4)
        bm.truncate("A", 2 + round_ % 4)
        for seq in "AB":
            row = bm.row(seq)
            assert tables[row, : len(bm.table(seq))].tolist() == bm.table(seq)
            assert lengths[row] == bm.lens[seq]
        assert ref.tolist() == bm.ref.tolist()
        assert int(ref.sum()) == len(bm.table("A")) + len(bm.table("B"))
        bm.free_seq("A")
        bm.free_seq("B")
        assert set(lengths.tolist()) == {-1}
    assert bm.table_generation == 0
    assert np.shares_memory(tables, bm.block_tables)
    assert np.shares_memory(lengths, bm.lengths)
    assert np.shares_memory(ref, bm.ref)
    assert np.shares_memory(counters, bm.counters)
    assert counters.tolist() == bm.counters.tolist()


def test_rows_and_columns_that_were_sized_right_never_grow() -> None:
    bm = BlockManager(64, 4, rows=8, columns=8)
    for seq in range(8):
        bm.allocate(seq, 1)
        bm.append_slots(seq, 31)
    assert bm.table_generation == 0
    bm.allocate(8, 0)
    assert bm.table_generation == 1


def test_a_row_is_a_sequences_for_life_through_every_growth() -> None:
    bm = BlockManager(4096, 1, rows=1, columns=1)
    rows = {}
    for seq in range(300):
        bm.allocate(seq, seq % 5)
        rows[seq] = bm.row(seq)
        bm.append_slots(seq, 1 + seq % 7)
    assert {seq: bm.row(seq) for seq in rows} == rows
    assert len(set(rows.values())) == 300
    assert bm.rows(list(rows)).tolist() == list(rows.values())
    assert bm.table_generation > 2


# ---------------------------------------------------------------- the arrays


@pytest.mark.parametrize("name", ["block_tables", "lengths", "ref", "counters"])
def test_arrays_are_aligned_contiguous_and_refuse_writes(bm: BlockManager, name: str) -> None:
    array = getattr(bm, name)
    assert array.ctypes.data % 64 == 0
    assert array.flags.c_contiguous
    assert refuses_writes(array)
    assert array.dtype == (np.int64 if name == "counters" else np.int32)
    with pytest.raises(AttributeError):
        setattr(bm, name, array)


def test_the_lengths_mark_rows_that_no_sequence_has(bm: BlockManager) -> None:
    lengths = bm.lengths
    live = {bm.row(seq): bm.lens[seq] for seq in bm}
    assert sorted(live.values()) == [0, 8, 10]
    for row, length in enumerate(lengths.tolist()):
        assert length == live.get(row, -1)
    row = bm.row("A")
    bm.free_seq("A")
    assert lengths[row] == -1


def test_rows_version_tells_when_a_cached_row_may_be_wrong(bm: BlockManager) -> None:
    calls: list[tuple[Callable[[], object], bool]] = [
        (lambda: bm.append_slots("A", 3), False),
        (lambda: bm.truncate("A", 3), False),
        (lambda: bm.reorder(["A"], ["B"]), False),
        (lambda: bm.allocate("D", 1), True),
        (lambda: bm.fork("D", "E"), True),
        (lambda: bm.free_seq("D"), True),
    ]
    for call, changes in calls:
        before = bm.rows_version
        call()
        assert (bm.rows_version != before) == changes


# ---------------------------------------------------------------- tables, lens, free


def test_tables_and_lens_are_read_only_mappings_of_the_live_sequences(bm: BlockManager) -> None:
    tables, lens = bm.tables, bm.lens
    views: list[Any] = [tables, lens]
    for view in views:
        assert isinstance(view, Mapping) is True
        assert list(view) == ["A", "B", "C"]
        assert len(view) == 3
        assert "A" in view
        assert "Z" not in view
        assert view.get("Z") is None
        with pytest.raises(KeyError, match="Z"):
            view["Z"]
        with pytest.raises(TypeError):
            view["A"] = []
        with pytest.raises(TypeError):
            del view["A"]
    assert dict(lens) == {"A": 10, "B": 8, "C": 0}
    assert {seq: list(table) for seq, table in tables.items()} == {
        "A": [0, 1, 2],
        "B": [0, 1],
        "C": [],
    }
    assert repr(lens) == repr(dict(lens))
    assert repr(tables) == repr({seq: list(table) for seq, table in tables.items()})


def test_the_views_hold_no_state(bm: BlockManager) -> None:
    tables, lens, free = bm.tables, bm.lens, bm.free
    bm.free_seq("A")
    bm.allocate("D", 5)
    assert list(tables) == list(lens) == ["B", "C", "D"]
    assert tables["D"] == [3, 4]
    assert lens["D"] == 5
    assert list(free) == [*range(5, 16), 2]


def test_free_reads_like_the_deque_of_the_listing(bm: BlockManager) -> None:
    free = bm.free
    assert len(free) == 13
    assert list(free) == list(range(3, 16))
    assert repr(free) == repr(list(range(3, 16)))
    for block in range(-1, 17):
        assert (block in free) == (block in range(3, 16))
    for other in (None, "3", 2**40, -(2**70)):
        assert other not in free
    bm.free_seq("B")
    bm.free_seq("A")
    assert list(free) == [*range(3, 16), 2, 1, 0]


def test_a_block_id_read_from_an_array_is_found_in_free(bm: BlockManager) -> None:
    held, free = bm.block_tables[bm.row("A"), 0], bm.pool.free_blocks()[0]
    assert held not in bm.free
    assert free in bm.free


def test_an_evictable_block_is_not_free(bm: BlockManager) -> None:
    bm.pool.keep(2)
    bm.free_seq("A")
    assert bm.pool.evictable_blocks().tolist() == [2]
    assert 2 not in bm.free
    assert len(bm.free) == 13
    bm.pool.forget(2)
    assert 2 in bm.free
    assert list(bm.free)[-1] == 2


def test_copies_of_the_lists_do_not_change_under_the_caller() -> None:
    """I10: what is not said to be live is the caller's."""
    bm = BlockManager(16, 4)
    bm.allocate("A", 6)
    bm.pool.keep(0)
    results: list[np.ndarray[Any, Any]] = [
        bm.pool.free_blocks(),
        bm.slots("A"),
        bm.rows(["A"]),
        bm.drain_changes(),
    ]
    slots, _ = bm.append_slots("A", 3)
    bm.fork("A", "B")
    out = np.empty(2, np.int64)
    _, copies = bm.append_batch(bm.rows(["A", "B"]), out)
    assert copies is not None
    results += [slots, copies, bm.pool.take_many(2), out]
    restored = bm.restore("E", 4, [], [])
    results += [bm.lengths_of(bm.rows("AB")), bm.exclusive_blocks("E"), restored]
    before = [array.tolist() for array in results]
    # As many copies as before: where those were written, there is room for these.
    bm.fork("A", "D")
    _, more = bm.append_batch(bm.rows(["D"]), np.empty(1, np.int64))
    assert more is not None
    assert len(more) == len(copies)
    bm.fork("A", "C")
    bm.append_batch(bm.rows(["A", "C"]), np.empty(2, np.int64))
    bm.append_slots("B", 6)
    bm.free_seq("A")
    bm.free_seq("C")
    bm.drain_changes()
    assert [array.tolist() for array in results] == before
    for array in results:
        assert array.flags.writeable


def test_a_table_of_one_manager_is_not_that_of_another_on_the_same_pool() -> None:
    pool = BlockPool(8)
    first, second = BlockManager(8, 4, pool=pool), BlockManager(8, 4, pool=pool)
    first.allocate("A", 8)
    second.allocate("A", 8)
    assert first.table("A") == [0, 1]
    assert second.table("A") == [2, 3]
    assert len(first.free) == len(second.free) == 4
    first.free_seq("A")
    assert second.table("A") == [2, 3]
    assert not np.shares_memory(first.block_tables, second.block_tables)
    assert np.shares_memory(first.ref, second.ref)
