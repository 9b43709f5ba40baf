"""Bad arguments of the calls of prefix sharing: the error, what it names, nothing changed.

As in ``test_arguments``: each integer is one entry of a table and meets every wrong type and
every number out of range; likewise tokens, namespaces and media in every call that takes them.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from prefix_support import (
    compute_prompt,
    identities,
    index_of,
    prefix_state,
    sharing_manager,
    sharing_scheduler,
    words,
)
from scenario_support import Checked, manager_state, refused, scheduler_state
from test_arguments import INTEGER_TYPES, NOT_INTEGERS, UNKNOWN, BadId

from kvcore import BlockManager, BlockPool, Scheduler
from kvcore.eviction import LRU, Retention, RetentionPriority, SegmentedLRU
from kvcore.identity import Media, Namespace
from kvcore.prefix_index import PrefixIndex

SIZE = 4
NUM_BLOCKS = 24
INT32_MAX = 2**31 - 1
LARGEST_TOKEN = INT32_MAX


class World(NamedTuple):
    """A: 10 known tokens, 2 blocks of them published. B: its first 8. C: 16 tokens of room,
    none known. D: 8 known tokens, not settled. Three idle blocks are cached, and a scheduler
    runs R."""

    bm: BlockManager
    scheduler: Scheduler

    @property
    def plain(self) -> BlockManager:
        return cast(BlockManager, cast(Checked, self.bm).target)

    def state(self) -> object:
        return prefix_state(self.bm), scheduler_state(self.scheduler)


A_TOKENS = [*words(SIZE, 1, 2), 12, 13]
IDLE = words(SIZE, 5, 6, 7)


def new_world() -> World:
    bm = sharing_manager(NUM_BLOCKS, SIZE, pin_quota=4)
    compute_prompt(bm, "A", A_TOKENS)
    bm.fork("A", "B", n_tokens=8)
    bm.allocate("C", 16)
    bm.allocate("D", tokens=words(SIZE, 8, 9))
    compute_prompt(bm, "idle", IDLE)
    bm.free_seq("idle")
    scheduler = sharing_scheduler(bm)
    scheduler.add("R", tokens=words(SIZE, 11)[:3])
    scheduler.step()
    return World(bm, scheduler)


@pytest.fixture
def world() -> World:
    return new_world()


# ---------------------------------------------------------------- integers


class IntegerArgument(NamedTuple):
    """``call(world, value)`` passes ``value``; ``minimum`` and ``maximum`` are allowed."""

    name: str
    call: Callable[[World, Any], object]
    minimum: int
    maximum: int | None
    valid: int
    none_is_default: bool = False


def log_of_capacity(world: World, capacity: Any) -> int:
    index_of(world.bm).start_log(capacity)
    return len(index_of(world.bm).drain())


INTEGERS = {
    "allocate n_tokens beside tokens": IntegerArgument(
        "n_tokens",
        lambda w, v: w.bm.allocate("new", v, tokens=IDLE),
        12,
        INT32_MAX,
        13,
        none_is_default=True,
    ),
    "plan_allocate": IntegerArgument(
        "n_tokens", lambda w, v: w.bm.plan_allocate(v), 0, INT32_MAX, 3
    ),
    "plan_allocate n_tokens beside tokens": IntegerArgument(
        "n_tokens",
        lambda w, v: w.bm.plan_allocate(v, tokens=IDLE),
        12,
        INT32_MAX,
        13,
        none_is_default=True,
    ),
    "can_allocate n_tokens beside tokens": IntegerArgument(
        "n_tokens",
        lambda w, v: w.bm.can_allocate(v, tokens=IDLE),
        12,
        INT32_MAX,
        13,
        none_is_default=True,
    ),
    "can_allocate watermark": IntegerArgument(
        "watermark", lambda w, v: w.bm.can_allocate(tokens=IDLE, watermark=v), 0, INT32_MAX, 3
    ),
    "commit n_settled": IntegerArgument(
        "n_settled", lambda w, v: w.bm.commit("D", n_settled=v), 0, 8, 4, none_is_default=True
    ),
    "commit n_settled beside tokens": IntegerArgument(
        "n_settled",
        lambda w, v: w.bm.commit("C", [1, 2, 3, 4, 5], n_settled=v),
        0,
        5,
        4,
        none_is_default=True,
    ),
    "BlockManager.evict": IntegerArgument("count", lambda w, v: w.bm.evict(v), 0, INT32_MAX, 2),
    "BlockPool.evict": IntegerArgument("count", lambda w, v: w.bm.pool.evict(v), 0, INT32_MAX, 2),
    "set_epoch": IntegerArgument("epoch", lambda w, v: w.bm.set_epoch(v), -(2**63), 2**63 - 1, 3),
    "pin_quota": IntegerArgument(
        "pin_quota",
        lambda w, v: BlockManager(NUM_BLOCKS, SIZE, prefix_caching=True, pin_quota=v).num_blocks,
        0,
        INT32_MAX,
        3,
        none_is_default=True,
    ),
    "PrefixIndex block_size": IntegerArgument(
        "block_size", lambda w, v: PrefixIndex(BlockPool(4), v).block_size, 1, INT32_MAX, 3
    ),
    "PrefixIndex hash_bits": IntegerArgument(
        "hash_bits",
        lambda w, v: PrefixIndex(BlockPool(4), 4, hash_bits=v).block_size,
        0,
        63,
        3,
    ),
    "identity": IntegerArgument(
        "block", lambda w, v: index_of(w.bm).identity(v), 0, NUM_BLOCKS - 1, 1
    ),
    "start_log": IntegerArgument("capacity", log_of_capacity, 0, INT32_MAX, 3),
    "add n_tokens beside tokens": IntegerArgument(
        "n_tokens",
        lambda w, v: w.scheduler.add("new", v, tokens=IDLE),
        12,
        None,
        13,
        none_is_default=True,
    ),
}
every_integer = pytest.mark.parametrize("argument", INTEGERS.values(), ids=list(INTEGERS))


@every_integer
def test_what_is_no_integer_is_a_type_error_that_names_argument_and_value(
    world: World, argument: IntegerArgument
) -> None:
    for value in NOT_INTEGERS:
        if value is None and argument.none_is_default:
            argument.call(new_world(), None)
            continue
        refused(
            TypeError,
            partial(argument.call, world, value),
            argument.name,
            repr(value),
            unchanged=world.state,
        )


@every_integer
def test_an_integer_out_of_range_is_a_value_error_that_names_argument_and_value(
    world: World, argument: IntegerArgument
) -> None:
    for past in (1, 2, 2**31, 2**32, 2**63, 2**64, 2**64 + 3, 10**30):
        outside = [argument.minimum - past]
        if argument.maximum is not None:
            outside.append(argument.maximum + past)
        for value in outside:
            refused(
                ValueError,
                partial(argument.call, world, value),
                argument.name,
                value,
                unchanged=world.state,
            )


@every_integer
def test_every_type_of_integer_is_accepted_and_means_the_same(argument: IntegerArgument) -> None:
    expected_world = new_world()
    expected = argument.call(expected_world, argument.valid), expected_world.state()
    for integer_type in INTEGER_TYPES:
        world = new_world()
        assert (argument.call(world, integer_type(argument.valid)), world.state()) == expected


# ---------------------------------------------------------------- ids

CALLS_ON_A_LIVE_ID: dict[str, Callable[[World, Any], object]] = {
    "commit": lambda w, seq: w.bm.commit(seq),
    "commit of tokens": lambda w, seq: w.bm.commit(seq, [1]),
    "commit of nothing": lambda w, seq: w.bm.commit(seq, []),
    "known": lambda w, seq: w.bm.known(seq),
    "published": lambda w, seq: w.bm.published(seq),
    "tokens": lambda w, seq: w.bm.tokens(seq),
    "prompt_of": lambda w, seq: w.bm.prompt_of(seq),
}
CALLS_THAT_CREATE_AN_ID: dict[str, Callable[[World, Any], object]] = {
    "allocate of tokens": lambda w, seq: w.bm.allocate(seq, tokens=IDLE),
    "allocate of a Prompt": lambda w, seq: w.bm.allocate(seq, tokens=w.bm.prompt(IDLE)),
    "allocate in a namespace": lambda w, seq: w.bm.allocate(seq, 3, namespace="s"),
    "allocate with a copy": lambda w, seq: w.bm.allocate(seq, tokens=IDLE, partial_hit=True),
    "add of tokens": lambda w, seq: w.scheduler.add(seq, tokens=IDLE),
}
CALLS_WITH_AN_ID = CALLS_ON_A_LIVE_ID | CALLS_THAT_CREATE_AN_ID


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


@pytest.mark.parametrize("call", CALLS_WITH_AN_ID.values(), ids=list(CALLS_WITH_AN_ID))
def test_an_id_that_cannot_be_hashed_or_compared_changes_nothing(
    world: World, call: Callable[[World, Any], object]
) -> None:
    for seq in (["A"], {"A": 1}, np.zeros(2)):
        refused(TypeError, partial(call, world, seq), unchanged=world.state)
    refused(ArithmeticError, lambda: call(world, BadId()), unchanged=world.state)


# ---------------------------------------------------------------- tokens


def pinned(world: World, tokens: Any) -> object:
    pin = world.bm.pin_prefix(tokens)
    return pin.blocks, pin.n_tokens, pin.release()


TOKEN_CALLS: dict[str, Callable[[World, Any], object]] = {
    "allocate": lambda w, t: w.bm.allocate("new", tokens=t),
    "allocate more": lambda w, t: w.bm.allocate("new", 20, tokens=t),
    "allocate resumed": lambda w, t: w.bm.allocate("new", tokens=t, resumed=True),
    "allocate with a copy": lambda w, t: w.bm.allocate("new", tokens=t, partial_hit=True),
    "match": lambda w, t: w.bm.match(t),
    "plan_allocate": lambda w, t: w.bm.plan_allocate(tokens=t),
    "can_allocate": lambda w, t: w.bm.can_allocate(tokens=t),
    "commit": lambda w, t: w.bm.commit("C", t),
    "forget": lambda w, t: w.bm.forget(t),
    "pin_prefix": pinned,
    "prompt": lambda w, t: w.bm.prompt(t).tokens.tolist(),
    "Scheduler.add": lambda w, t: w.scheduler.add("new", tokens=t),
}
every_token_call = pytest.mark.parametrize("call", TOKEN_CALLS.values(), ids=list(TOKEN_CALLS))
# A commit appends: what it is given is no prompt.
PROMPT_CALLS = {name: call for name, call in TOKEN_CALLS.items() if name not in ("commit",)}
every_prompt_call = pytest.mark.parametrize("call", PROMPT_CALLS.values(), ids=list(PROMPT_CALLS))


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def as_torch(dtype: str, tokens: list[int]) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.tensor(tokens, dtype=getattr(torch, dtype))


class OnlyDLPack:
    """An array of another library: nothing but the protocol."""

    def __init__(self, tokens: list[int], dtype: type) -> None:
        self._array = np.array(tokens, dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


TOKEN_TYPES: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "list of numpy integers": lambda t: [np.int64(token) for token in t],
    "int32": lambda t: np.array(t, np.int32),
    "int64": lambda t: np.array(t, np.int64),
    "uint32": lambda t: np.array(t, np.uint32),
    "read-only int32": lambda t: read_only(np.array(t, np.int32)),
    "read-only int64": lambda t: read_only(np.array(t, np.int64)),
    "part of an int32": lambda t: np.array([9, *t, 9], np.int32)[1:-1],
    "every other of an int32": lambda t: np.repeat(np.array(t, np.int32), 2)[::2],
    "a reversed int64": lambda t: np.array(t[::-1], np.int64)[::-1],
    "a column of a uint32": lambda t: np.array([[token, 0] for token in t], np.uint32).reshape(
        -1, 2
    )[:, 0],
    "array i": lambda t: array("i", t),
    "array q": lambda t: array("q", t),
    "array I": lambda t: array("I", t),
    "memoryview int32": lambda t: memoryview(np.array(t, np.int32)),
    "memoryview of an array": lambda t: memoryview(array("q", t)),
    "memoryview read-only": lambda t: memoryview(array("i", t)).toreadonly(),
    "torch int32": partial(as_torch, "int32"),
    "torch int64": partial(as_torch, "int64"),
    "DLPack int32": lambda t: OnlyDLPack(t, np.int32),
    "DLPack int64": lambda t: OnlyDLPack(t, np.int64),
}


TOKENS_OF_A_PROMPT = [
    [],
    [5],
    IDLE,
    [*IDLE, 3],
    A_TOKENS,
    [*IDLE[:6], 99, 98],
    [0, LARGEST_TOKEN, 0, LARGEST_TOKEN, 1],
]


@every_token_call
@pytest.mark.parametrize("make", TOKEN_TYPES.values(), ids=list(TOKEN_TYPES))
def test_every_kind_of_tokens_means_what_the_list_means(
    call: Callable[[World, Any], object], make: Callable[[list[int]], Any]
) -> None:
    for tokens in TOKENS_OF_A_PROMPT:
        outcomes = []
        for given in (tokens, make(tokens)):
            world = new_world()
            try:
                outcomes.append((call(world, given), world.state()))
            except ValueError as error:  # no prompt is empty to a scheduler
                assert tokens == []
                outcomes.append((str(error), world.state()))
        assert outcomes[0] == outcomes[1]


CHANGEABLE = ["list", "int32", "int64", "uint32", "every other of an int32", "array i", "array q"]
CHANGEABLE += ["memoryview int32", "memoryview of an array", "torch int32", "torch int64"]


@every_token_call
@pytest.mark.parametrize("name", CHANGEABLE)
def test_the_tokens_given_may_be_changed_afterwards(
    call: Callable[[World, Any], object], name: str
) -> None:
    given = TOKEN_TYPES[name](IDLE)
    worlds = new_world(), new_world()
    call(worlds[0], IDLE)
    call(worlds[1], given)
    given[0] = 77
    given[5] = 77
    assert worlds[0].state() == worlds[1].state()
    for world in worlds:
        world.bm.check()


NOT_TOKENS: dict[str, tuple[Any, type[Exception]]] = {
    "a number": (5, TypeError),
    "a float": (5.0, TypeError),
    "an object": (object(), TypeError),
    "text": ("1234", TypeError),
    "bytes": (b"1234", TypeError),
    "bytearray": (bytearray(b"1234"), TypeError),
    "texts": (["1", "2"], TypeError),
    "floats": ([1.0, 2.0], TypeError),
    "None inside": ([1, None], TypeError),
    "lists inside": ([[1], [2]], TypeError),
    "a float64 array": (np.array([1.0, 2.0]), TypeError),
    "a float32 array": (np.array([1.0, 2.0], np.float32), TypeError),
    "a bool array": (np.array([True]), TypeError),
    "an object array": (np.array([1, 2], object), TypeError),
    "an int8 array": (np.array([1, 2], np.int8), TypeError),
    "an int16 array": (np.array([1, 2], np.int16), TypeError),
    "a uint16 array": (np.array([1, 2], np.uint16), TypeError),
    "a uint64 array": (np.array([1, 2], np.uint64), TypeError),
    "a complex array": (np.array([1j]), TypeError),
    "a text array": (np.array(["a"]), TypeError),
    "a time array": (np.array([1, 2], "m8[s]"), TypeError),
    "other byte order": (np.array([1, 2], np.dtype(np.int32).newbyteorder()), TypeError),
    "array of double": (array("d", [1.0]), TypeError),
    "array of short": (array("h", [1]), TypeError),
    "memoryview of bytes": (memoryview(b"1234"), TypeError),
    "2-D": (np.zeros((2, 2), np.int32), ValueError),
    "2-D of one row": (np.zeros((1, 4), np.int64), ValueError),
    "0-D": (np.array(3, np.int32), ValueError),
    "3-D empty": (np.zeros((0, 2, 2), np.int32), ValueError),
    "DLPack of floats": (OnlyDLPack([1, 2], np.float32), TypeError),
    "DLPack of int16": (OnlyDLPack([1, 2], np.int16), TypeError),
}


@every_token_call
@pytest.mark.parametrize(("value", "error"), NOT_TOKENS.values(), ids=list(NOT_TOKENS))
def test_what_is_no_list_of_tokens_is_an_error_that_names_them(
    world: World, call: Callable[[World, Any], object], value: Any, error: type[Exception]
) -> None:
    refused(error, lambda: call(world, value), "tokens", unchanged=world.state)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "int16", "uint8"])
def test_a_tensor_of_another_type_is_a_type_error(world: World, dtype: str) -> None:
    tokens = as_torch(dtype, [1, 0])
    for call in TOKEN_CALLS.values():
        refused(TypeError, partial(call, world, tokens), "tokens", unchanged=world.state)


def test_a_tensor_of_two_dimensions_or_of_another_device_is_refused(world: World) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    for call in TOKEN_CALLS.values():
        refused(
            ValueError,
            partial(call, world, torch.zeros((2, 2), dtype=torch.int32)),
            "tokens",
            unchanged=world.state,
        )
        meta = torch.zeros(2, dtype=torch.int32, device="meta")
        with pytest.raises((TypeError, ValueError, BufferError)):
            call(world, meta)


WRONG_TOKENS: dict[str, tuple[Callable[[list[int]], Any], tuple[int, ...]]] = {
    "list": (list, (-1, -(2**31), 2**31, 2**32 + 1, 2**63, -(2**63) - 1, 10**30)),
    "tuple": (tuple, (-1, 2**31, 2**32 + 1, 2**64)),
    "int32": (lambda t: np.array(t, np.int32), (-1, -(2**31))),
    "int64": (
        lambda t: np.array(t, np.int64),
        (-1, -(2**31), 2**31, 2**32, 2**32 + 5, -(2**63), 2**63 - 1),
    ),
    "uint32": (lambda t: np.array(t, np.uint32), (2**31, 2**32 - 1)),
    "strided": (lambda t: np.repeat(np.array(t, np.int64), 2)[::2], (-1, 2**32)),
    "array": (lambda t: array("q", t), (-1, 2**32)),
    "torch": (partial(as_torch, "int64"), (-1, 2**31, 2**32)),
}


@every_token_call
@pytest.mark.parametrize(("make", "wrong"), WRONG_TOKENS.values(), ids=list(WRONG_TOKENS))
def test_a_token_out_of_range_is_named_with_its_position(
    world: World,
    call: Callable[[World, Any], object],
    make: Callable[[list[int]], Any],
    wrong: tuple[int, ...],
) -> None:
    for token in wrong:
        for position in (0, 1, 7, 8, 11):
            tokens = list(IDLE)
            tokens[position] = token
            refused(
                ValueError,
                partial(call, world, make(tokens)),
                "tokens",
                token,
                position,
                unchanged=world.state,
            )


class Failing:
    """A sequence or a token that raises while it is read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, position: int) -> int:
        if position == 2:
            raise ArithmeticError("cannot be read")
        return position

    def __index__(self) -> int:
        raise ArithmeticError("cannot be read")


@every_token_call
def test_tokens_that_fail_while_they_are_read_change_nothing(
    world: World, call: Callable[[World, Any], object]
) -> None:
    refused(ArithmeticError, lambda: call(world, Failing()), unchanged=world.state)
    refused(ArithmeticError, lambda: call(world, [1, 2, Failing()]), unchanged=world.state)


def test_tokens_that_change_the_manager_while_they_are_read_break_nothing() -> None:
    """Reading a token may run any code. What that did stays done, and what is read is whole."""

    class Meddling:
        def __init__(self, world: World) -> None:
            self.world = world

        def __index__(self) -> int:
            for seq in ("A", "C", "new"):
                if seq in self.world.bm:
                    self.world.bm.free_seq(seq)
            self.world.bm.reset()
            self.world.bm.evict(9)
            return 3

    for name, call in TOKEN_CALLS.items():
        world = new_world()
        tokens: Any = [*IDLE, Meddling(world)]
        if name == "commit":
            with pytest.raises(KeyError):
                call(world, tokens)
        else:
            call(world, tokens)
        world.bm.check()
        identities(world.bm)
        for seq in list(world.bm):
            world.bm.free_seq(seq)
        assert world.bm.pool.num_used == 0


# ---------------------------------------------------------------- tokens and lengths


def test_calls_need_tokens_or_a_number_of_them(world: World) -> None:
    bm: Any = world.bm
    scheduler: Any = world.scheduler
    for call in (
        lambda: bm.allocate("new"),
        lambda: bm.allocate("new", namespace="s"),
        lambda: bm.allocate("new", None, tokens=None),
        lambda: bm.plan_allocate(),
        lambda: bm.can_allocate(),
        lambda: bm.can_allocate(watermark=1),
        lambda: bm.match(),
        lambda: bm.match(None),
        lambda: bm.prompt(),
        lambda: bm.prompt(None),
        lambda: bm.forget(),
        lambda: bm.forget(None),
        lambda: bm.pin_prefix(),
        lambda: bm.pin_prefix(None),
        lambda: bm.prompt_of(),
        lambda: bm.commit(),
        lambda: bm.commit_batch(np.zeros(0, np.int32)),
        lambda: bm.evict(),
        lambda: bm.set_epoch(),
        lambda: bm.reset(1),
        lambda: bm.allocate("new", tokens=IDLE, unknown=1),
        lambda: bm.match(IDLE, unknown=1),
        lambda: scheduler.add("new"),
        lambda: scheduler.add("new", namespace="s"),
    ):
        refused(TypeError, call, unchanged=world.state)


def test_more_tokens_than_the_number_of_them_are_refused(world: World) -> None:
    for call in (
        lambda: world.bm.allocate("new", 11, tokens=IDLE),
        lambda: world.bm.plan_allocate(11, tokens=IDLE),
        lambda: world.bm.can_allocate(11, tokens=IDLE),
        lambda: world.bm.allocate("new", 11, tokens=world.bm.prompt(IDLE)),
        lambda: world.scheduler.add("new", 11, tokens=IDLE),
    ):
        refused(ValueError, call, "n_tokens", 11, 12, unchanged=world.state)


def test_more_tokens_than_a_sequence_has_cannot_be_committed(world: World) -> None:
    """A knows all of its tokens, B too, C none of 16."""
    for seq, room in (("A", 0), ("B", 0), ("C", 16), ("D", 0)):
        for excess in (1, 2, 100):
            tokens = list(range(room + excess))
            for form in (tokens, np.array(tokens, np.int32), np.array(tokens, np.int64)):
                refused(
                    ValueError,
                    partial(world.bm.commit, seq, form),
                    "tokens",
                    unchanged=world.state,
                )
    world.bm.commit("C", list(range(16)))
    refused(ValueError, lambda: world.bm.commit("C", [1]), "tokens", unchanged=world.state)


def test_what_is_not_known_cannot_be_settled(world: World) -> None:
    refused(
        ValueError,
        lambda: world.bm.commit("C", [1, 2], n_settled=3),
        "n_settled",
        3,
        unchanged=world.state,
    )
    # Settling less than before is what a late report says.
    assert world.bm.commit("A", n_settled=0) == 0
    assert world.bm.published("A") == 2


# ---------------------------------------------------------------- batches

ROWS = np.array([0, 1], np.int32)
TOKENS = np.array([1, 2], np.int32)
BAD_BATCHES: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "rows None": (None, TOKENS, TypeError, "rows"),
    "rows int64": (ROWS.astype(np.int64), TOKENS, TypeError, "rows"),
    "rows float": (ROWS.astype(np.float32), TOKENS, TypeError, "rows"),
    "rows 2-D": (ROWS.reshape(1, 2), TOKENS, ValueError, "rows"),
    "rows strided": (np.zeros(4, np.int32)[::2], TOKENS, ValueError, "rows"),
    "rows negative": (np.array([0, -1], np.int32), TOKENS, ValueError, "rows"),
    "rows past the slab": (np.array([0, 10**6], np.int32), TOKENS, ValueError, "rows"),
    "rows of nobody": (np.array([0, 40], np.int32), TOKENS, ValueError, "rows"),
    "tokens None": (ROWS, None, TypeError, "tokens"),
    "tokens float": (ROWS, TOKENS.astype(np.float32), TypeError, "tokens"),
    "tokens int16": (ROWS, TOKENS.astype(np.int16), TypeError, "tokens"),
    "tokens uint64": (ROWS, TOKENS.astype(np.uint64), TypeError, "tokens"),
    "tokens bool": (ROWS, TOKENS.astype(bool), TypeError, "tokens"),
    "tokens short": (ROWS, TOKENS[:1], ValueError, "tokens"),
    "tokens long": (ROWS, np.zeros(3, np.int32), ValueError, "tokens"),
    "tokens empty": (ROWS, TOKENS[:0], ValueError, "tokens"),
    "tokens 2-D": (ROWS, TOKENS.reshape(2, 1), ValueError, "tokens"),
    "tokens negative": (ROWS, np.array([1, -5], np.int32), ValueError, "-5"),
    "tokens too large": (ROWS, np.array([1, 2**31], np.int64), ValueError, str(2**31)),
    "tokens far too large": (ROWS, np.array([1, 2**32 + 1], np.int64), ValueError, str(2**32 + 1)),
    "tokens too large unsigned": (ROWS, np.array([1, 2**32 - 1], np.uint32), ValueError,
                                  str(2**32 - 1)),
}  # fmt: skip


def batch_world() -> World:
    """Rows 0 and 1 have room for tokens, and nobody else is there."""
    bm = sharing_manager(NUM_BLOCKS, SIZE)
    for seq in ("A", "B"):
        bm.allocate(seq, 9)
        assert bm.row(seq) == "AB".index(seq)
        bm.commit(seq, words(SIZE, 1)[:3])
    return World(bm, sharing_scheduler(bm))


@pytest.mark.parametrize("batch", BAD_BATCHES.values(), ids=list(BAD_BATCHES))
def test_a_bad_array_of_a_batch_of_tokens_is_named_and_nothing_is_committed(
    batch: tuple[Any, Any, type[Exception], str],
) -> None:
    rows, tokens, error, name = batch
    world = batch_world()
    refused(error, lambda: world.bm.commit_batch(rows, tokens), name, unchanged=world.state)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_every_type_of_token_commits_the_same_as_one_by_one(dtype: type) -> None:
    one_by_one, batch = batch_world(), batch_world()
    rows = np.array([0, 1, 0, 1, 1], np.int32)
    tokens = [7, 8, LARGEST_TOKEN, 0, 5]
    published = sum(
        one_by_one.bm.commit("AB"[row], [token])
        for row, token in zip(rows.tolist(), tokens, strict=True)
    )
    assert batch.bm.commit_batch(rows, np.array(tokens, dtype)) == published == 2
    for seq in "AB":
        assert batch.bm.tokens(seq).tolist() == one_by_one.bm.tokens(seq).tolist()
    assert batch.bm.commit_batch(rows[:0], np.zeros(0, dtype)) == 0


@pytest.mark.parametrize("position", range(4))
def test_a_batch_with_no_room_for_one_token_commits_none(position: int) -> None:
    world = batch_world()
    world.bm.allocate("full", 1)
    world.bm.commit("full", [3])
    rows = np.insert(np.array([0, 1, 0], np.int32), position, world.bm.row("full"))
    rows = rows.astype(np.int32)
    tokens = np.arange(4, dtype=np.int32)
    refused(ValueError, lambda: world.bm.commit_batch(rows, tokens), unchanged=world.state)
    six = np.zeros(7, np.int32)
    refused(ValueError, lambda: world.bm.commit_batch(six, six), unchanged=world.state)
    world.bm.commit_batch(six[:6], six[:6])


# ---------------------------------------------------------------- namespaces, media, prompts

NAMESPACE_CALLS: dict[str, Callable[..., object]] = {
    "allocate": lambda w, **identity: w.bm.allocate("new", tokens=IDLE, **identity),
    "allocate a number": lambda w, **identity: w.bm.allocate("new", 12, **identity),
    "match": lambda w, **identity: w.bm.match(IDLE, **identity),
    "plan_allocate": lambda w, **identity: w.bm.plan_allocate(tokens=IDLE, **identity),
    "can_allocate": lambda w, **identity: w.bm.can_allocate(tokens=IDLE, **identity),
    "prompt": lambda w, **identity: len(w.bm.prompt(IDLE, **identity)),
    "forget": lambda w, **identity: w.bm.forget(IDLE, **identity),
    "pin_prefix": lambda w, **identity: w.bm.pin_prefix(IDLE, **identity).n_tokens,
    "Scheduler.add": lambda w, **identity: w.scheduler.add("new", tokens=IDLE, **identity),
}
every_namespace_call = pytest.mark.parametrize(
    "call", NAMESPACE_CALLS.values(), ids=list(NAMESPACE_CALLS)
)


@every_namespace_call
def test_what_is_no_namespace_is_an_error_that_names_it(
    world: World, call: Callable[..., object]
) -> None:
    for namespace in (5, 1.5, ("a",), ["a"], {"salt": "a"}, object(), Media(0, 1, b"x"), True):
        refused(
            TypeError, partial(call, world, namespace=namespace), "namespace", unchanged=world.state
        )
    for namespace in ("", b"", "x" * 5000, "\ud800"):
        refused(ValueError, partial(call, world, namespace=namespace), unchanged=world.state)
    for namespace in (None, "s", b"s", Namespace(lora="a"), Namespace()):
        call(new_world(), namespace=namespace)


@every_namespace_call
def test_what_is_no_media_is_an_error_that_names_it(
    world: World, call: Callable[..., object]
) -> None:
    bad: list[tuple[Any, type[Exception]]] = [
        (5, TypeError),
        ([5], TypeError),
        ([(0, 1, b"x")], TypeError),
        ([None], TypeError),
        (Media(0, 1, b"x"), TypeError),
        ("text", TypeError),
        ([Media(0, 13, b"x")], ValueError),
        ([Media(12, 13, b"x")], ValueError),
        ([Media(0, 4, b"x"), Media(3, 5, b"y")], ValueError),
        ([Media(0, 4, b"x"), Media(0, 4, b"x")], ValueError),
        ([Media(2**20, 2**21, b"x")], ValueError),
    ]
    for media, error in bad:
        refused(error, partial(call, world, media=media), "media", unchanged=world.state)
    for empty in ((), []):
        call(new_world(), media=empty)
    for good in ([Media(0, 12, b"x")], (Media(4, 5, b"y"), Media(0, 4, b"x"))):
        if call is NAMESPACE_CALLS["allocate a number"]:  # an item is part of known tokens
            refused(ValueError, partial(call, world, media=good), "media", unchanged=world.state)
        else:
            call(new_world(), media=good)


@every_prompt_call
def test_a_prompt_of_another_index_is_refused(
    world: World, call: Callable[[World, Any], object]
) -> None:
    """Its hashes and its keys mean nothing here, whatever its block size."""
    for foreign in (new_world().bm, sharing_manager(NUM_BLOCKS, 3)):
        prompt = foreign.prompt(IDLE)
        refused(ValueError, partial(call, world, prompt), unchanged=world.state)
        mine = world.bm.prompt(IDLE)
        with pytest.raises(ValueError, match=r"\w"):
            mine.common_blocks(prompt)


@every_namespace_call
def test_a_prompt_has_its_own_namespace_and_media(
    world: World, call: Callable[..., object]
) -> None:
    calls: dict[str, Callable[..., object]] = {
        "allocate": partial(world.bm.allocate, "new"),
        "plan_allocate": world.bm.plan_allocate,
        "can_allocate": world.bm.can_allocate,
        "add": partial(world.scheduler.add, "new"),
    }
    first: dict[str, Callable[..., object]] = {
        "match": world.bm.match,
        "forget": world.bm.forget,
        "pin_prefix": world.bm.pin_prefix,
    }
    prompt = world.bm.prompt(IDLE, namespace="s")
    for identity in ({"namespace": "s"}, {"namespace": "t"}, {"media": [Media(0, 1, b"x")]}):
        for named in calls.values():
            refused(ValueError, partial(named, tokens=prompt, **identity), unchanged=world.state)
        for positional in first.values():
            refused(ValueError, partial(positional, prompt, **identity), unchanged=world.state)


@pytest.mark.parametrize("prompt", [None, 5, IDLE, "x", object()], ids=repr)
def test_common_blocks_of_no_prompt_is_a_type_error(world: World, prompt: Any) -> None:
    mine = world.bm.prompt(IDLE)
    refused(TypeError, lambda: mine.common_blocks(prompt), unchanged=world.state)


def test_a_prompt_is_what_it_was_made_of(world: World) -> None:
    tokens = np.array(A_TOKENS, np.int32)
    prompt = world.bm.prompt(tokens)
    tokens[:] = 7
    assert len(prompt) == 10
    assert prompt.num_full_blocks == 2
    assert prompt.tokens.dtype == np.int32
    assert prompt.tokens.tolist() == A_TOKENS
    with pytest.raises(ValueError, match="read-only"):
        prompt.tokens[0] = 7
    with pytest.raises((AttributeError, TypeError)):
        prompt.tokens = tokens
    assert prompt.common_blocks(world.bm.prompt_of("A")) == 2
    assert prompt.common_blocks(world.bm.prompt([*A_TOKENS[:7], 99, 98])) == 1
    assert prompt.common_blocks(world.bm.prompt(A_TOKENS, namespace="s")) == 0
    assert world.bm.match(prompt) == 8


# ---------------------------------------------------------------- pins with a quota


def test_a_pinned_prefix_beyond_the_quota_names_it_and_pins_nothing(world: World) -> None:
    """Of four blocks, A's two are pinned, and three more are asked for."""
    pin = world.bm.pin_prefix(A_TOKENS)
    assert len(pin.blocks) == 2
    refused(ValueError, lambda: world.bm.pin_prefix(IDLE), "pin_quota", 4, unchanged=world.state)
    again = world.bm.pin_prefix(A_TOKENS)
    refused(
        ValueError, lambda: world.bm.pin_prefix(A_TOKENS), "pin_quota", 4, unchanged=world.state
    )
    for held in (pin, again):
        held.release()
    with world.bm.pin_prefix(IDLE) as held:
        assert held.n_tokens == 12
        assert world.bm.evict(9) == 0
    assert world.bm.evict(9) == 3


def test_a_released_pin_releases_nothing_twice(world: World) -> None:
    first, second = world.bm.pin_prefix(IDLE[:8]), world.bm.pin_prefix(IDLE[:8])
    for _ in range(10):
        first.release()
    world.bm.check()
    assert world.bm.ref[list(second.blocks)].tolist() == [1, 1]
    del second
    world.bm.check()
    assert world.bm.gauges().pinned == 0


# ---------------------------------------------------------------- construction


def test_an_index_that_does_not_fit_its_pool_or_manager_is_refused() -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool, 4)
    refused(
        ValueError,
        lambda: BlockManager(8, 16, pool=pool, prefix_caching=True),
        "block_size",
        16,
        4,
        unchanged=lambda: pool.index is index,
    )
    refused(ValueError, lambda: PrefixIndex(pool, 4), unchanged=lambda: pool.index is index)
    for bad in (None, 8, "pool", BlockManager(8, 4)):
        refused(TypeError, partial(cast(Any, PrefixIndex), bad, 4), "pool", unchanged=lambda: None)
    assert BlockManager(8, 16, pool=pool).match([1, 2, 3]) == 0


def test_a_policy_of_eviction_belongs_to_one_pool_and_is_given_once() -> None:
    for bad in (5, "lru", object(), BlockPool):
        refused(
            TypeError,
            partial(cast(Any, BlockPool), 8, eviction=bad),
            "eviction",
            unchanged=lambda: None,
        )
    bm: Any = BlockManager
    policy = LRU()
    pool = BlockPool(8, eviction=policy)
    refused(ValueError, lambda: BlockPool(8, eviction=policy), "eviction", unchanged=lambda: None)
    refused(
        ValueError,
        lambda: bm(8, 4, pool=pool, prefix_caching=True, eviction=LRU()),
        "eviction",
        unchanged=lambda: None,
    )


# ---------------------------------------------------------------- policies of eviction

NOT_NUMBERS: list[Any] = ["x", b"1", [1.0], (0.5,), object(), 1j]


def test_a_share_that_is_none_is_an_error_that_names_it() -> None:
    for value in (*NOT_NUMBERS, None):
        refused(TypeError, partial(SegmentedLRU, value), "protected", unchanged=lambda: None)
    for share in (-0.1, -1, 1, 1.0, 1.5, 10**30, float("nan"), float("inf"), float("-inf")):
        refused(
            ValueError, partial(SegmentedLRU, share), "protected", share, unchanged=lambda: None
        )
    assert SegmentedLRU(0).protected == 0.0
    assert SegmentedLRU(np.float32(0.5)).protected == 0.5


def retaining_world(duration: float | None = None) -> tuple[BlockManager, RetentionPriority]:
    """Two idle blocks of a high priority, and two of the default."""
    policy = RetentionPriority()
    pool = BlockPool(NUM_BLOCKS, eviction=policy)
    bm = BlockManager(NUM_BLOCKS, SIZE, pool=pool, prefix_caching=True)
    bm.allocate("A", tokens=words(SIZE, 1, 2), retention=[Retention(0, None, 90, duration)])
    bm.allocate("B", tokens=words(SIZE, 3, 4))
    for seq in "AB":
        bm.commit(seq)
        bm.free_seq(seq)
    return cast(BlockManager, Checked(bm, bm.check)), policy


def test_a_default_priority_that_is_none_is_an_error_that_names_it() -> None:
    for value in NOT_INTEGERS:
        refused(TypeError, partial(RetentionPriority, value), "default", unchanged=lambda: None)
    for priority in (-1, 101, 256, 2**31, 2**64, -(2**64)):
        refused(
            ValueError,
            partial(RetentionPriority, priority),
            "default",
            priority,
            unchanged=lambda: None,
        )
    assert [RetentionPriority(np.int8(p)).default for p in (0, 35, 100)] == [0, 35, 100]


def test_a_time_that_is_none_or_runs_backwards_is_refused_and_expires_nothing() -> None:
    bm, policy = retaining_world(duration=10.0)
    order = bm.pool.evictable_blocks().tolist()
    assert policy.advance(5.0) == 0

    def state() -> object:
        return policy.now, bm.pool.evictable_blocks().tolist(), prefix_state(bm)

    for value in (*NOT_NUMBERS, None):
        refused(TypeError, partial(policy.advance, value), "now", unchanged=state)
    for now in (4.9, 0, -1.0, float("nan"), float("inf"), float("-inf")):
        refused(ValueError, partial(policy.advance, now), "now", now, unchanged=state)
    assert policy.advance(np.float64(5.0)) == 0
    assert bm.pool.evictable_blocks().tolist() == order
    assert policy.advance(10) == 2
    assert bm.pool.evictable_blocks().tolist() == order


BAD_RETENTION: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (5, TypeError, "retention"),
    "one range alone": (Retention(0, 4, 50), TypeError, "retention"),
    "numbers": ([5], TypeError, "retention"),
    "None inside": ([None], TypeError, "retention"),
    "text": ("abcd", TypeError, "retention"),
    "a pair": ([(0, 4)], TypeError, "retention"),
    "start below 0": ([Retention(-1, 4, 50)], ValueError, "-1"),
    "start a float": ([Retention(cast(Any, 1.0), 4, 50)], TypeError, "start"),
    "start past int32": ([Retention(2**31, None, 50)], ValueError, str(2**31)),
    "empty": ([Retention(4, 4, 50)], ValueError, "stop"),
    "backwards": ([Retention(4, 3, 50)], ValueError, "stop"),
    "stop a float": ([Retention(0, cast(Any, 4.0), 50)], TypeError, "stop"),
    "stop past int32": ([Retention(0, 2**32, 50)], ValueError, str(2**32)),
    "priority below 0": ([Retention(0, 4, -1)], ValueError, "priority"),
    "priority above 100": ([Retention(0, 4, 101)], ValueError, "101"),
    "priority a float": ([Retention(0, 4, cast(Any, 1.5))], TypeError, "priority"),
    "priority None": ([Retention(0, 4, cast(Any, None))], TypeError, "priority"),
    "duration below 0": ([Retention(0, 4, 50, -1.0)], ValueError, "duration"),
    "duration nan": ([Retention(0, 4, 50, float("nan"))], ValueError, "duration"),
    "duration inf": ([Retention(0, 4, 50, float("inf"))], ValueError, "duration"),
    "duration text": ([Retention(0, 4, 50, cast(Any, "x"))], TypeError, "duration"),
    "overlapping": ([Retention(0, 5, 50), Retention(4, 8, 60)], ValueError, "4"),
    "after an open end": ([Retention(0, None, 50), Retention(9, 10, 60)], ValueError, "9"),
    "the second one bad": ([Retention(0, 4, 50), Retention(4, 8, 200)], ValueError, "200"),
}


@pytest.mark.parametrize("case", BAD_RETENTION.values(), ids=list(BAD_RETENTION))
def test_bad_ranges_of_retention_are_named_and_change_nothing(
    case: tuple[Any, type[Exception], str],
) -> None:
    value, error, named = case
    bm, _ = retaining_world()
    scheduler = sharing_scheduler(bm)

    def state() -> object:
        return prefix_state(bm), scheduler_state(scheduler)

    for call in (
        lambda: bm.allocate("new", 8, retention=value),
        lambda: bm.allocate("new", tokens=words(SIZE, 1, 5), retention=value),
        lambda: bm.plan_allocate(8, retention=value),
        lambda: scheduler.add("new", 8, retention=value),
        lambda: scheduler.add("new", tokens=words(SIZE, 1, 5), retention=value),
    ):
        refused(error, call, "retention", named, unchanged=state)


def test_retention_needs_a_policy_that_knows_it(world: World) -> None:
    ranges = [Retention(0, None, 90)]
    for call in (
        lambda: world.bm.allocate("new", 8, retention=ranges),
        lambda: world.bm.plan_allocate(8, retention=ranges),
        lambda: world.scheduler.add("new", 8, retention=ranges),
    ):
        refused(ValueError, call, "retention", "RetentionPriority", unchanged=world.state)
    world.bm.allocate("new", 8, retention=[])


def test_calls_that_need_an_index_say_that_prefix_caching_is_off() -> None:
    bm = BlockManager(8, 4)
    bm.allocate("A", 8)
    calls: list[Callable[[], object]] = [
        lambda: bm.prompt(IDLE),
        lambda: bm.prompt_of("A"),
    ]
    for call in calls:
        refused(ValueError, call, "prefix_caching", unchanged=lambda: manager_state(bm))
    assert bm.pin_prefix(IDLE).blocks == ()
    assert (bm.match([*IDLE, 1]), bm.forget(IDLE), bm.evict(9)) == (0, 0, 0)
    assert (bm.known("A"), bm.published("A"), bm.commit("A")) == (0, 0, 0)


def test_int64_tokens_that_overlap_in_memory_are_read_one_by_one() -> None:
    """Their stride is that of int32, and they are not."""
    plain = np.array([7, 0, 8, 0, 9, 0, 10, 0], np.int32)
    wide = np.lib.stride_tricks.as_strided(plain.view(np.int64), (3,), (4,))
    bm = BlockManager(8, 1, prefix_caching=True)
    with pytest.raises(ValueError, match=f"token 1 .*{8 << 32}"):
        bm.prompt(wide)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("count", [1, 3, 4, 9])
@pytest.mark.parametrize("step", [1, 2, -1])
def test_tokens_need_not_be_aligned(dtype: type[np.generic], count: int, step: int) -> None:
    """A record read off the wire begins anywhere; the sanitizers see a load that minds."""
    plain = np.arange(5, 5 + count * abs(step), dtype=dtype)
    shifted = np.frombuffer(b"\0" + plain.tobytes(), dtype, offset=1)[::step]
    assert not shifted.flags.aligned
    bm = BlockManager(32, 1, prefix_caching=True)
    bm.allocate("A", tokens=shifted)
    assert bm.tokens("A").tolist() == plain[::step].tolist()
    bm.allocate("B", count)
    bm.commit("B", shifted)
    assert bm.tokens("B").tolist() == plain[::step].tolist()
    wrong = shifted.copy().astype(dtype)
    wrong[-1] = np.array(-1).astype(dtype)
    shifted = np.frombuffer(b"\0" + wrong.tobytes(), dtype, offset=1)
    with pytest.raises(ValueError, match=f"token {len(wrong) - 1} must be .* got {wrong[-1]}"):
        bm.prompt(shifted)
