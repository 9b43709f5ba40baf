"""Bad arguments of every public call: the error, what it names, and that nothing changed.

Each integer argument is one entry of a table, with its call and its range, and meets
every wrong type and every number outside of the range; likewise for ids and arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from scenario_support import (
    Checked,
    checked_manager,
    checked_scheduler,
    manager_state,
    refused,
    scheduler_state,
)

from kvcore import BlockManager, BlockPool, RequestRefused, Scheduler

NUM_BLOCKS = 16
INT32_MAX = 2**31 - 1


class World(NamedTuple):
    """A: 10 tokens in blocks 0, 1, 2. B: its first 8. R runs. Block 8 is pinned, 9 kept."""

    bm: BlockManager
    scheduler: Scheduler
    pool: BlockPool

    @property
    def plain(self) -> BlockManager:
        return cast(BlockManager, cast(Checked, self.bm).target)

    def state(self) -> object:
        return manager_state(self.bm), scheduler_state(self.scheduler)


def new_world() -> World:
    bm = checked_manager(NUM_BLOCKS, 4)
    bm.allocate("A", 10)
    bm.fork("A", "B", n_tokens=8)
    scheduler = checked_scheduler(bm)
    scheduler.add("R", 6)
    scheduler.step()
    bm.pool.release_many(bm.pool.take_many(3))
    bm.pool.take_many(2)
    bm.pool.keep(9)
    bm.pool.release(9)
    bm.fence()
    return World(bm, scheduler, bm.pool)


@pytest.fixture
def world() -> World:
    return new_world()


# A and B.
ROWS, OUT = np.array([0, 1], np.int32), np.zeros(2, np.int64)
LENGTHS = np.array([8, 7], np.int32)
COUNTS = np.array([1, 1], np.int32)


class IntegerArgument(NamedTuple):
    """``call(world, value)`` passes ``value``; ``minimum`` and ``maximum`` are allowed.

    ``maximum`` is None where there is none."""

    name: str
    call: Callable[[World, Any], object]
    minimum: int
    maximum: int | None
    valid: int
    none_is_default: bool = False


INTEGERS = {
    "BlockPool": IntegerArgument(
        "num_blocks", lambda w, v: BlockPool(v).num_blocks, 1, 2**31 - 2, 3
    ),
    "BlockManager num_blocks": IntegerArgument(
        "num_blocks", lambda w, v: BlockManager(v, 4).num_blocks, 1, 2**31 - 2, 3
    ),
    "BlockManager block_size": IntegerArgument(
        "block_size", lambda w, v: BlockManager(4, v).block_size, 1, INT32_MAX, 3
    ),
    "BlockManager rows": IntegerArgument(
        "rows", lambda w, v: BlockManager(4, 4, rows=v).lengths.shape, 1, INT32_MAX, 3
    ),
    "BlockManager columns": IntegerArgument(
        "columns",
        lambda w, v: BlockManager(4, 4, columns=v).block_tables.shape,
        1,
        INT32_MAX,
        3,
    ),
    "take_many": IntegerArgument("count", lambda w, v: w.pool.take_many(v).tolist(), 0, 2**31, 3),
    "retain": IntegerArgument("block", lambda w, v: w.pool.retain(v), 0, NUM_BLOCKS - 1, 8),
    "release": IntegerArgument("block", lambda w, v: w.pool.release(v), 0, NUM_BLOCKS - 1, 8),
    "pins": IntegerArgument("block", lambda w, v: w.pool.pins(v), 0, NUM_BLOCKS - 1, 8),
    "keep": IntegerArgument("block", lambda w, v: w.pool.keep(v), 0, NUM_BLOCKS - 1, 8),
    "forget": IntegerArgument("block", lambda w, v: w.pool.forget(v), 0, NUM_BLOCKS - 1, 9),
    "is_kept": IntegerArgument("block", lambda w, v: w.pool.is_kept(v), 0, NUM_BLOCKS - 1, 9),
    "pin": IntegerArgument("block", lambda w, v: w.bm.pin(v), 0, NUM_BLOCKS - 1, 9),
    "unpin": IntegerArgument("block", lambda w, v: w.bm.unpin(v), 0, NUM_BLOCKS - 1, 8),
    "allocate": IntegerArgument("n_tokens", lambda w, v: w.bm.allocate("new", v), 0, INT32_MAX, 3),
    "can_allocate n_tokens": IntegerArgument(
        "n_tokens", lambda w, v: w.bm.can_allocate(v), 0, INT32_MAX, 3
    ),
    "can_allocate watermark": IntegerArgument(
        "watermark", lambda w, v: w.bm.can_allocate(1, watermark=v), 0, INT32_MAX, 3
    ),
    "append_slots": IntegerArgument(
        "n_tokens", lambda w, v: w.bm.append_slots("A", v)[0].tolist(), 0, INT32_MAX, 3
    ),
    "can_append": IntegerArgument(
        "n_tokens", lambda w, v: w.bm.can_append("A", v), 0, INT32_MAX, 3
    ),
    "truncate": IntegerArgument("n_tokens", lambda w, v: w.bm.truncate("A", v), 0, 10, 3),
    "fork": IntegerArgument(
        "n_tokens", lambda w, v: w.bm.fork("A", "new", n_tokens=v), 0, 10, 3, none_is_default=True
    ),
    "slots start": IntegerArgument("start", lambda w, v: w.bm.slots("A", v).tolist(), 0, 10, 3),
    "slots stop": IntegerArgument(
        "stop", lambda w, v: w.bm.slots("A", 0, v).tolist(), 0, 10, 3, none_is_default=True
    ),
    "restore n_tokens": IntegerArgument(
        "n_tokens", lambda w, v: w.bm.restore("new", v, [], []).tolist(), 0, INT32_MAX, 3
    ),
    "restore columns": IntegerArgument(
        "columns", lambda w, v: w.bm.restore("new", 10, [v], [2]).tolist(), 0, 2, 2
    ),
    "restore blocks": IntegerArgument(
        "blocks", lambda w, v: w.bm.restore("new", 10, [2], [v]).tolist(), 0, NUM_BLOCKS - 1, 2
    ),
    "release_outside_window window": IntegerArgument(
        "window", lambda w, v: w.bm.release_outside_window(ROWS, LENGTHS, v), 1, INT32_MAX, 3
    ),
    "release_outside_window sinks": IntegerArgument(
        "sinks", lambda w, v: w.bm.release_outside_window(ROWS, LENGTHS, 1, v), 0, INT32_MAX, 3
    ),
    "settle": IntegerArgument("step", lambda w, v: w.bm.settle(v), 1, 1, 1),
    "Scheduler watermark_blocks": IntegerArgument(
        "watermark_blocks",
        lambda w, v: Scheduler(w.plain, v).watermark_blocks,
        0,
        NUM_BLOCKS - 1,
        3,
    ),
    "Scheduler max_running": IntegerArgument(
        "max_running",
        lambda w, v: Scheduler(w.plain, max_running=v).max_running,
        1,
        None,
        3,
        none_is_default=True,
    ),
    "add": IntegerArgument(
        "n_tokens", lambda w, v: w.scheduler.add("new", v), 1, (NUM_BLOCKS - 1) * 4, 3
    ),
    "Scheduler.fork": IntegerArgument(
        "n_tokens", lambda w, v: w.scheduler.fork("R", "new", v), 0, 7, 3, none_is_default=True
    ),
}

every_integer = pytest.mark.parametrize("argument", INTEGERS.values(), ids=INTEGERS.keys())


class Indexable:
    """Any type may say that it is an integer."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


NOT_INTEGERS: list[Any] = [
    3.0,
    2.5,
    float("nan"),
    float("inf"),
    "3",
    b"3",
    "",
    [3],
    (3,),
    {3},
    3j,
    object(),
    int,
    np.float64(3.0),
    np.float32(3.0),
    # Before numpy 2 it was an index, with a warning.
    *([np.bool_(True)] if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else []),
    np.array([3]),
    np.array([3, 3]),
    np.array(3.0),
    np.str_("3"),
    None,
]


@every_integer
def test_what_is_no_integer_is_a_type_error_that_names_argument_and_value(
    world: World, argument: IntegerArgument
) -> None:
    for value in NOT_INTEGERS:
        if value is None and argument.none_is_default:
            continue
        refused(
            TypeError,
            partial(argument.call, world, value),
            argument.name,
            repr(value),
            unchanged=world.state,
        )


@every_integer
def test_none_means_the_default_only_where_the_signature_says_so(
    world: World, argument: IntegerArgument
) -> None:
    if argument.none_is_default:
        argument.call(world, None)
    else:
        refused(TypeError, lambda: argument.call(world, None), "None", unchanged=world.state)


@every_integer
def test_an_integer_out_of_range_is_a_value_error_that_names_argument_and_value(
    world: World, argument: IntegerArgument
) -> None:
    for past in (1, 2, 2**31, 2**32, 2**63, 2**64, 2**64 + 3, 10**30):
        refused(
            ValueError,
            partial(argument.call, world, argument.minimum - past),
            argument.name,
            argument.minimum - past,
            unchanged=world.state,
        )
        if argument.maximum is None:
            argument.call(world, argument.minimum + past)
            continue
        refused(
            RequestRefused if argument is INTEGERS["add"] else ValueError,
            partial(argument.call, world, argument.maximum + past),
            argument.name,
            argument.maximum + past,
            unchanged=world.state,
        )


INTEGER_TYPES: list[Callable[[int], Any]] = [
    *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    np.array,
    Indexable,
]


@every_integer
def test_every_type_of_integer_is_accepted_and_means_the_same(argument: IntegerArgument) -> None:
    expected_world = new_world()
    expected = argument.call(expected_world, argument.valid), expected_world.state()
    for integer_type in INTEGER_TYPES:
        world = new_world()
        assert (argument.call(world, integer_type(argument.valid)), world.state()) == expected


@every_integer
def test_a_bool_is_the_integer_that_python_says_it_is(argument: IntegerArgument) -> None:
    outcomes = []
    for value in (1, True):
        fresh = new_world()
        try:
            outcomes.append((argument.call(fresh, value), fresh.state()))
        except ValueError as error:
            outcomes.append((str(error), fresh.state()))
    assert outcomes[0] == outcomes[1]


# ---------------------------------------------------------------- ids

UNKNOWN = ("no", "such id")

CALLS_ON_A_LIVE_ID: dict[str, Callable[[World, Any], object]] = {
    "append_slot": lambda w, seq: w.bm.append_slot(seq),
    "append_slots": lambda w, seq: w.bm.append_slots(seq, 1),
    "append_slots of 0": lambda w, seq: w.bm.append_slots(seq, 0),
    "can_append": lambda w, seq: w.bm.can_append(seq),
    "truncate": lambda w, seq: w.bm.truncate(seq, 0),
    "fork": lambda w, seq: w.bm.fork(seq, "new"),
    "fork of 0": lambda w, seq: w.bm.fork(seq, "new", n_tokens=0),
    "reorder seqs": lambda w, seq: w.bm.reorder(["A", seq], ["B", "A"]),
    "reorder parents": lambda w, seq: w.bm.reorder(["A", "B"], ["B", seq]),
    "free_seq": lambda w, seq: w.bm.free_seq(seq),
    "exclusive_blocks": lambda w, seq: w.bm.exclusive_blocks(seq),
    "length": lambda w, seq: w.bm.length(seq),
    "table": lambda w, seq: w.bm.table(seq),
    "row": lambda w, seq: w.bm.row(seq),
    "rows": lambda w, seq: w.bm.rows(["A", seq]),
    "slots": lambda w, seq: w.bm.slots(seq),
    "tables[]": lambda w, seq: w.bm.tables[seq],
    "lens[]": lambda w, seq: w.bm.lens[seq],
    "Scheduler.fork": lambda w, seq: w.scheduler.fork(seq, "new"),
    "why": lambda w, seq: w.scheduler.why(seq),
}
CALLS_THAT_CREATE_AN_ID: dict[str, Callable[[World, Any], object]] = {
    "allocate": lambda w, seq: w.bm.allocate(seq, 1),
    "fork": lambda w, seq: w.bm.fork("A", seq),
    "restore": lambda w, seq: w.bm.restore(seq, 4, [0], [0]),
    "add": lambda w, seq: w.scheduler.add(seq, 1),
    "Scheduler.fork": lambda w, seq: w.scheduler.fork("R", seq),
}


@pytest.mark.parametrize("call", CALLS_ON_A_LIVE_ID.values(), ids=list(CALLS_ON_A_LIVE_ID))
@pytest.mark.parametrize("seq", [UNKNOWN, None, 0, "", "a", b"A"], ids=repr)
def test_an_unknown_id_is_a_key_error_that_names_it(
    world: World, call: Callable[[World, Any], object], seq: object
) -> None:
    refused(KeyError, lambda: call(world, seq), repr(seq), unchanged=world.state)


@pytest.mark.parametrize(
    "call", CALLS_THAT_CREATE_AN_ID.values(), ids=list(CALLS_THAT_CREATE_AN_ID)
)
def test_a_live_id_is_a_value_error_that_names_it(
    world: World, call: Callable[[World, Any], object]
) -> None:
    refused(ValueError, lambda: call(world, "B"), repr("B"), unchanged=world.state)


# The queue is searched by equality: ``why`` looks at no hash.
CALLS_THAT_HASH = {f"old id in {name}": call for name, call in CALLS_ON_A_LIVE_ID.items()}
CALLS_THAT_HASH |= {f"new id in {name}": call for name, call in CALLS_THAT_CREATE_AN_ID.items()}
del CALLS_THAT_HASH["old id in why"]

every_call_that_hashes = pytest.mark.parametrize(
    "call", CALLS_THAT_HASH.values(), ids=list(CALLS_THAT_HASH)
)


@every_call_that_hashes
@pytest.mark.parametrize("seq", [["A"], {"A": 1}, {1}, np.zeros(2)], ids=repr)
def test_an_id_that_cannot_be_hashed_is_a_type_error(
    world: World, call: Callable[[World, Any], object], seq: object
) -> None:
    refused(TypeError, lambda: call(world, seq), unchanged=world.state)


class BadId:
    """An id whose comparison fails, hashed like "A" so that it is compared."""

    def __hash__(self) -> int:
        return hash("A")

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("comparing ids failed")


@every_call_that_hashes
def test_an_id_whose_comparison_fails_changes_nothing(
    world: World, call: Callable[[World, Any], object]
) -> None:
    refused(ArithmeticError, lambda: call(world, BadId()), unchanged=world.state)


@pytest.mark.parametrize(
    "seq",
    [0, -1, "text", b"bytes", None, (1, "a"), 2.5, frozenset({1}), True, np.int64(3)],
    ids=repr,
)
def test_any_hashable_is_an_id(seq: Any) -> None:
    bm = checked_manager(8, 4)
    bm.allocate(seq, 5)
    bm.append_slot(seq)
    bm.fork(seq, (seq, "child"))
    assert bm.tables[seq] == [0, 1]
    assert seq in bm
    assert list(bm) == [seq, (seq, "child")]
    bm.free_seq(seq)
    assert seq not in bm
    scheduler = checked_scheduler(bm)
    scheduler.add(seq, 3)
    assert scheduler.step() == [seq]
    assert scheduler.finish(seq)


def test_ids_that_are_equal_are_one_id(world: World) -> None:
    world.bm.allocate(1, 4)
    assert world.bm.table(1.0) == world.bm.table(True) == world.bm.table(np.int64(1))
    refused(ValueError, lambda: world.bm.allocate(1.0, 4), 1.0, unchanged=world.state)


# ---------------------------------------------------------------- arrays and lists


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


BAD_BATCHES: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "rows list": ([0, 1], OUT, TypeError, "rows"),
    "rows None": (None, OUT, TypeError, "rows"),
    "rows int64": (ROWS.astype(np.int64), OUT, TypeError, "rows"),
    "rows uint32": (ROWS.astype(np.uint32), OUT, TypeError, "rows"),
    "rows float": (ROWS.astype(np.float32), OUT, TypeError, "rows"),
    "rows object": (ROWS.astype(object), OUT, TypeError, "rows"),
    "rows bool": (ROWS.astype(bool), OUT, TypeError, "rows"),
    "rows other byte order": (ROWS.astype(ROWS.dtype.newbyteorder()), OUT, ValueError, "rows"),
    "rows 2-D": (ROWS.reshape(1, 2), OUT, ValueError, "rows"),
    "rows 0-D": (np.array(0, np.int32), OUT, ValueError, "rows"),
    "rows strided": (np.zeros(4, np.int32)[::2], OUT, ValueError, "rows"),
    "rows reversed": (ROWS[::-1], OUT, ValueError, "rows"),
    "rows negative": (np.array([0, -1], np.int32), OUT, ValueError, "rows"),
    "rows past the slab": (np.array([0, 10**6], np.int32), OUT, ValueError, "rows"),
    "rows at the limit": (np.array([0, INT32_MAX], np.int32), OUT, ValueError, "rows"),
    "rows at the other limit": (np.array([0, -(2**31)], np.int32), OUT, ValueError, "rows"),
    "rows of nobody": (np.array([0, 5], np.int32), OUT, ValueError, "rows"),
    "out list": (ROWS, [0, 0], TypeError, "out"),
    "out None": (ROWS, None, TypeError, "out"),
    "out int32": (ROWS, OUT.astype(np.int32), TypeError, "out"),
    "out uint64": (ROWS, OUT.astype(np.uint64), TypeError, "out"),
    "out float": (ROWS, OUT.astype(np.float64), TypeError, "out"),
    "out short": (ROWS, OUT[:1], ValueError, "out"),
    "out empty": (ROWS, OUT[:0], ValueError, "out"),
    "out 2-D": (ROWS, np.zeros((2, 2), np.int64), ValueError, "out"),
    "out strided": (ROWS, np.zeros(4, np.int64)[::2], ValueError, "out"),
    "out read-only": (ROWS, read_only(np.zeros(2, np.int64)), ValueError, "out"),
}


@pytest.mark.parametrize("batch", BAD_BATCHES.values(), ids=list(BAD_BATCHES))
def test_a_bad_array_of_a_batch_is_named_and_nothing_is_written(
    world: World, batch: tuple[Any, Any, type[Exception], str]
) -> None:
    rows, out, error, name = batch
    before = repr(out)
    refused(error, lambda: world.bm.append_batch(rows, out), name, unchanged=world.state)
    assert repr(out) == before


@pytest.mark.parametrize(("row", "position"), [(5, 0), (5, 1), (-1, 2), (10**6, 2)])
def test_a_row_of_nobody_is_named_wherever_it_stands(world: World, row: int, position: int) -> None:
    rows = np.insert(world.bm.rows(["A", "B"]), position, row).astype(np.int32)
    out = np.full(3, -7, np.int64)
    refused(ValueError, lambda: world.bm.append_batch(rows, out), row, unchanged=world.state)
    assert out.tolist() == [-7] * 3


@pytest.mark.parametrize("shift", [-4, 0, 4, 8, 12])
def test_rows_and_out_in_the_same_memory_are_refused(world: World, shift: int) -> None:
    """The slots would overwrite rows that were not read yet."""
    memory = np.zeros(64, np.uint8)
    out = memory[16:32].view(np.int64)
    rows = memory[16 + shift : 24 + shift].view(np.int32)
    rows[:] = [world.bm.row("A"), world.bm.row("B")]
    if not np.shares_memory(rows, out):
        world.bm.append_batch(rows, out)
        return
    refused(ValueError, lambda: world.bm.append_batch(rows, out), "out", unchanged=world.state)


class ArrayArgument(NamedTuple):
    """``call(world, array)`` passes ``array``, of int32, with an entry for each of two rows."""

    name: str
    call: Callable[[World, Any], object]
    none_is_default: bool = False


ROW_ARGUMENTS = {
    "plan_append": ArrayArgument("rows", lambda w, rows: w.bm.plan_append(rows)),
    "append_batch with counts": ArrayArgument(
        "rows", lambda w, rows: w.bm.append_batch(rows, np.zeros(9, np.int64), COUNTS)
    ),
    "truncate_batch": ArrayArgument("rows", lambda w, rows: w.bm.truncate_batch(rows, LENGTHS)),
    "release_outside_window": ArrayArgument(
        "rows", lambda w, rows: w.bm.release_outside_window(rows, LENGTHS, 1)
    ),
    "lengths_of": ArrayArgument("rows", lambda w, rows: w.bm.lengths_of(rows)),
}
WITHOUT = ArrayArgument(
    "without", lambda w, rows: w.bm.plan_append(ROWS[:0], without=rows), none_is_default=True
)
# Those with an entry for each row.
NUMBER_ARGUMENTS = {
    "append_batch": ArrayArgument(
        "counts",
        lambda w, counts: w.bm.append_batch(ROWS, np.zeros(9, np.int64), counts),
        none_is_default=True,
    ),
    "plan_append": ArrayArgument(
        "counts", lambda w, counts: w.bm.plan_append(ROWS, counts), none_is_default=True
    ),
    "truncate_batch": ArrayArgument("lengths", lambda w, n: w.bm.truncate_batch(ROWS, n)),
    "release_outside_window": ArrayArgument(
        "lengths", lambda w, n: w.bm.release_outside_window(ROWS, n, 1)
    ),
}
ALL_ROW_ARGUMENTS = {**ROW_ARGUMENTS, "plan_append without": WITHOUT}
ARRAY_ARGUMENTS = {
    **{f"{call} rows": argument for call, argument in ALL_ROW_ARGUMENTS.items()},
    **{f"{call} {each.name}": each for call, each in NUMBER_ARGUMENTS.items()},
}
NOT_ARRAYS: dict[str, tuple[Any, type[Exception]]] = {
    "list": ([0, 1], TypeError),
    "None": (None, TypeError),
    "int64": (COUNTS.astype(np.int64), TypeError),
    "int16": (COUNTS.astype(np.int16), TypeError),
    "uint32": (COUNTS.astype(np.uint32), TypeError),
    "float": (COUNTS.astype(np.float32), TypeError),
    "object": (COUNTS.astype(object), TypeError),
    "bool": (COUNTS.astype(bool), TypeError),
    "other byte order": (COUNTS.astype(COUNTS.dtype.newbyteorder()), ValueError),
    "2-D": (COUNTS.reshape(1, 2), ValueError),
    "0-D": (np.array(0, np.int32), ValueError),
    "strided": (np.array([1, 0, 0, 0], np.int32)[::2], ValueError),
    "reversed": (ROWS[::-1], ValueError),
}


@pytest.mark.parametrize("argument", ARRAY_ARGUMENTS.values(), ids=list(ARRAY_ARGUMENTS))
@pytest.mark.parametrize(("array", "error"), NOT_ARRAYS.values(), ids=list(NOT_ARRAYS))
def test_what_is_no_array_of_int32_is_an_error_that_names_the_argument(
    world: World, argument: ArrayArgument, array: Any, error: type[Exception]
) -> None:
    if array is None and argument.none_is_default:
        argument.call(world, None)
        return
    refused(error, lambda: argument.call(world, array), argument.name, unchanged=world.state)


@pytest.mark.parametrize("argument", ALL_ROW_ARGUMENTS.values(), ids=list(ALL_ROW_ARGUMENTS))
@pytest.mark.parametrize("row", [5, -1, 10**6, INT32_MAX, -(2**31)])
@pytest.mark.parametrize("place", [0, 1])
def test_a_row_of_nobody_is_named_with_its_place(
    world: World, argument: ArrayArgument, row: int, place: int
) -> None:
    rows = np.roll(np.array([row, 0], np.int32), place)
    named = f"{argument.name}: entry {place} is {row}"
    refused(ValueError, lambda: argument.call(world, rows), named, unchanged=world.state)


@pytest.mark.parametrize("call", ["plan_append", "truncate_batch", "plan_append without"])
def test_a_row_named_twice_is_refused_where_it_would_have_no_meaning(
    world: World, call: str
) -> None:
    argument, rows = ALL_ROW_ARGUMENTS[call], np.array([1, 1], np.int32)
    named = f"{argument.name}: row 1 is named twice"
    refused(ValueError, lambda: argument.call(world, rows), named, unchanged=world.state)
    if argument is WITHOUT:
        both = partial(world.bm.plan_append, ROWS, without=ROWS[1:])
        refused(ValueError, both, named, unchanged=world.state)


BAD_NUMBERS = {  # A has 10 tokens and B has 8
    "counts": [
        ([], "counts has 0 entries for 2 rows"),
        ([1], "counts has 1 entries for 2 rows"),
        ([1, 1, 1], "counts has 3 entries for 2 rows"),
        ([1, 0], "counts: entry 1 must be at least 1, got 0"),
        ([-(2**31), 1], f"counts: entry 0 must be at least 1, got {-(2**31)}"),
    ],
    "lengths": [
        ([], "lengths has 0 entries for 2 rows"),
        ([1], "lengths has 1 entries for 2 rows"),
        ([1, 1, 1], "lengths has 3 entries for 2 rows"),
        ([11, 1], "lengths: entry 0 is 11, but its row has 10 tokens"),
        ([1, 9], "lengths: entry 1 is 9, but its row has 8 tokens"),
        ([1, -1], "lengths: entry 1 is -1"),
    ],
}


@pytest.mark.parametrize("argument", NUMBER_ARGUMENTS.values(), ids=list(NUMBER_ARGUMENTS))
def test_numbers_for_rows_are_as_many_as_the_rows_and_in_range(
    world: World, argument: ArrayArgument
) -> None:
    for numbers, named in BAD_NUMBERS[argument.name]:
        call = partial(argument.call, world, np.array(numbers, np.int32))
        refused(ValueError, call, named, unchanged=world.state)


def test_counts_past_the_largest_length_and_past_out_are_refused(world: World) -> None:
    most = np.array([1, INT32_MAX], np.int32)
    refused(
        ValueError,
        lambda: world.bm.plan_append(ROWS, most),
        "counts: a sequence cannot grow past",
        INT32_MAX,
        unchanged=world.state,
    )
    refused(
        ValueError,
        lambda: world.bm.append_batch(ROWS, OUT, most),
        f"out has 2 entries for {2**31} tokens",
        unchanged=world.state,
    )


@pytest.mark.parametrize("shift", [-4, 0, 8])
def test_counts_and_out_in_the_same_memory_are_refused(world: World, shift: int) -> None:
    memory = np.zeros(64, np.uint8)
    out, counts = memory[16:32].view(np.int64), memory[16 + shift : 24 + shift].view(np.int32)
    counts[:] = 1
    refused(
        ValueError,
        lambda: world.bm.append_batch(ROWS, out, counts),
        "out must not overlap counts in memory",
        unchanged=world.state,
    )


BAD_BLOCK_LISTS: dict[str, tuple[Any, type[Exception]]] = {
    "None": (None, TypeError),
    "an int": (8, TypeError),
    "text": ("8", TypeError),
    "floats": ([8.0], TypeError),
    "a float array": (np.array([8.0]), TypeError),
    "bools": (np.array([True]), TypeError),
    "texts": (["8"], TypeError),
    "None inside": ([8, None], TypeError),
    "two dimensions": ([[8]], TypeError),
    "negative": ([8, -1], ValueError),
    "past the end": ([8, NUM_BLOCKS], ValueError),
    "beyond int32": ([8, 2**32 + 8], ValueError),
    "beyond int64": ([8, 2**64 + 8], ValueError),
    "uint64": (np.array([8, 2**63], np.uint64), ValueError),
    "a free block": ([8, 15], ValueError),
    "a table's block": ([8, 0], ValueError),
    "an evictable block": ([8, 9], ValueError),
    "once too often": ([8, 8], ValueError),
}


@pytest.mark.parametrize(("blocks", "error"), BAD_BLOCK_LISTS.values(), ids=list(BAD_BLOCK_LISTS))
def test_a_bad_list_of_blocks_is_named_and_releases_nothing(
    world: World, blocks: Any, error: type[Exception]
) -> None:
    refused(error, lambda: world.pool.release_many(blocks), "blocks", unchanged=world.state)


@pytest.mark.parametrize(
    "blocks",
    [
        [8],
        (8,),
        np.array([8], np.int32),
        np.array([8], np.int64),
        np.array([8], np.uint8),
        [np.int64(8)],
        np.array([8, 0, 0])[::3],
    ],
    ids=repr,
)
def test_every_kind_of_list_of_blocks_is_accepted(world: World, blocks: Any) -> None:
    world.pool.release_many(blocks)
    assert 8 in world.bm.free
    world.pool.release_many([])
    world.pool.release_many(np.array([], np.int32))


BAD_REORDERS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "fewer parents": (["A", "B"], ["A"], ValueError, "parents"),
    "more parents": (["A"], ["A", "B"], ValueError, "parents"),
    "a child twice": (["A", "A"], ["A", "B"], ValueError, "'A'"),
    "seqs None": (None, ["A"], TypeError, "seqs"),
    "parents None": (["A"], None, TypeError, "parents"),
    "seqs a number": (5, ["A"], TypeError, "seqs"),
    "unknown child": (["A", "B", UNKNOWN], ["B", "A", "A"], KeyError, repr(UNKNOWN)),
    "unknown parent": (["A", "B", "R"], ["B", "A", UNKNOWN], KeyError, repr(UNKNOWN)),
}


@pytest.mark.parametrize(
    ("seqs", "parents", "error", "named"), BAD_REORDERS.values(), ids=list(BAD_REORDERS)
)
def test_a_bad_beam_step_is_named_and_changes_nothing(
    world: World, seqs: Any, parents: Any, error: type[Exception], named: str
) -> None:
    refused(error, lambda: world.bm.reorder(seqs, parents), named, unchanged=world.state)


@pytest.mark.parametrize("seqs", [None, 5], ids=repr)
def test_the_rows_of_no_sequence_of_ids_are_a_type_error_that_names_it(
    world: World, seqs: Any
) -> None:
    refused(TypeError, lambda: world.bm.rows(seqs), "seqs", unchanged=world.state)


# ---------------------------------------------------------------- blocks in the wrong state


@pytest.mark.parametrize(
    ("call", "block"),
    [
        ("retain", 15),
        ("release", 15),
        ("release", 0),
        ("release", 9),
        ("keep", 15),
        ("keep", 9),
    ],
)
def test_a_block_in_the_wrong_state_is_a_value_error_that_names_it(
    world: World, call: str, block: int
) -> None:
    refused(ValueError, lambda: getattr(world.pool, call)(block), block, unchanged=world.state)


@pytest.mark.parametrize("call", ["pin", "unpin"])
def test_a_free_block_cannot_be_pinned_or_unpinned(world: World, call: str) -> None:
    refused(ValueError, lambda: getattr(world.bm, call)(15), 15, unchanged=world.state)


def test_forget_does_nothing_to_a_block_without_the_mark(world: World) -> None:
    before = world.state()
    for block in (0, 8, 15):
        world.pool.forget(block)
        assert world.state() == before


# ---------------------------------------------------------------- the rest


@pytest.mark.parametrize("pool", ["pool", 8, object(), BlockManager(8, 4)], ids=repr)
def test_a_pool_of_another_type_is_a_type_error_that_names_it(pool: Any) -> None:
    refused(
        TypeError, lambda: BlockManager(8, 4, pool=pool), "pool", repr(pool), unchanged=lambda: None
    )


@pytest.mark.parametrize("bm", [None, 8, "bm", BlockPool(8)], ids=repr)
def test_a_scheduler_on_something_else_is_a_type_error_that_names_it(bm: Any) -> None:
    refused(TypeError, lambda: Scheduler(bm), "bm", repr(bm), unchanged=lambda: None)


@pytest.mark.parametrize("step", [0, -1, 2, 3, 2**40])
def test_a_step_that_was_never_issued_cannot_be_settled(world: World, step: int) -> None:
    refused(ValueError, lambda: world.bm.settle(step), "step", step, unchanged=world.state)


def test_calls_without_their_arguments_or_with_unknown_ones_are_type_errors(world: World) -> None:
    bm: Any = world.bm
    scheduler: Any = world.scheduler
    for call in (
        lambda: bm.allocate("new"),
        lambda: bm.allocate("new", 1, 2),
        lambda: bm.append_slot(),
        lambda: bm.append_slots("A"),
        lambda: bm.append_batch(ROWS),
        lambda: bm.fork("A"),
        lambda: bm.free_seq(),
        lambda: bm.truncate("A"),
        lambda: bm.reorder(["A"]),
        lambda: bm.fence(1),
        lambda: bm.settle(),
        lambda: bm.check(1),
        lambda: bm.gauges(1),
        lambda: bm.allocate("new", 1, unknown=1),
        lambda: bm.pool.take(1),
        lambda: bm.pool.take_many(),
        lambda: scheduler.add("new"),
        lambda: scheduler.step(1),
        lambda: scheduler.finish(),
    ):
        refused(TypeError, call, unchanged=world.state)
