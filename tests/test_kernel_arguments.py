"""What the writers of kernel metadata refuse: they name it, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_support import UNTOUCHED, Output, int32

from kvcore import BlockManager
from kvcore.kernel_layouts import flex_tables, ragged, slices, trtllm_offsets, window_info
from kvcore.kernel_metadata import (
    block_table,
    csr,
    query_start_loc,
    sequence_lengths,
    slot_mapping,
)


def errors_bm() -> BlockManager:
    """Row 0 has 10 tokens in blocks of 4, row 1 none; row 2 lacks column 0; row 3 is nobody's."""
    bm = BlockManager(100, 4, rows=4)
    bm.allocate("a", 10)
    bm.allocate("b", 0)
    bm.allocate("c", 9)
    bm.release_outside_window(int32(2), int32(9), 5)
    assert bm.tables["c"][0] == -1
    return bm


def good_arguments(call: Callable[..., int]) -> dict[str, Any]:
    rows = int32(0, 1, 0)
    return {
        block_table: lambda: {"rows": rows, "out": Output(3, 3).array},
        csr: lambda: {
            "rows": rows,
            "indptr": Output(4).array,
            "indices": Output(6).array,
            "last_page_len": Output(3).array,
            "kv_len": Output(3).array,
        },
        slot_mapping: lambda: {
            "rows": rows,
            "starts": int32(8, 0, 2),
            "counts": int32(2, 0, 3),
            "out": Output(5, dtype=np.int64).array,
        },
        slices: lambda: {
            "rows": rows,
            "starts": int32(8, 0, 2),
            "counts": int32(2, 0, 3),
            "out": Output(3, 3).array,
        },
        trtllm_offsets: lambda: {"rows": rows, "out": Output(3, 2, 3).array, "layers": 2},
        ragged: lambda: {
            "rows": int32(0, 0, 0),
            "counts": int32(1, 1, 3),
            "kv_lens": Output(3).array,
            "page_indices": Output(3, 3).array,
            "cu_q_lens": Output(4).array,
            "num_seqs": Output(1).array,
            "distribution": Output(3).array,
        },
        flex_tables: lambda: {
            "rows": rows,
            "page_table": Output(3, 3, dtype=np.int64).array,
            "physical_to_logical": Output(3, 100, dtype=np.int64).array,
        },
        window_info: lambda: {"rows": rows, "out": Output(3, 3).array, "window": 4, "sinks": 1},
        query_start_loc: lambda: {"counts": int32(2, 0, 3), "out": Output(4).array},
        sequence_lengths: lambda: {
            "rows": rows,
            "out": Output(3).array,
            "counts": int32(2, 0, 3),
        },
    }[call]()


KEYWORDS = {
    "last_page_len", "kv_len", "lengths", "pad", "scale", "expand", "layers", "secondary",
    "num_seqs", "distribution", "chunk_prefill_size",
}  # fmt: skip


def invoke(call: Callable[..., int], arguments: dict[str, Any]) -> int:
    keywords = KEYWORDS | ({"counts"} if call is sequence_lengths else set())
    positional = [value for name, value in arguments.items() if name not in keywords]
    if call is not query_start_loc:
        positional.insert(0, errors_bm())
    return call(*positional, **{k: v for k, v in arguments.items() if k in keywords})


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


WITH_LENGTHS = [block_table, csr, trtllm_offsets, ragged, flex_tables, window_info]
CALLS = [*WITH_LENGTHS, slot_mapping, slices, query_start_loc, sequence_lengths]


@pytest.mark.parametrize("call", CALLS)
def test_the_good_arguments_are_good(call: Callable[..., int]) -> None:
    assert invoke(call, good_arguments(call)) > 0


OUTPUTS = [
    (call, name)
    for call in CALLS
    for name, value in good_arguments(call).items()
    if np.all(value == UNTOUCHED)
]


@pytest.mark.parametrize(("call", "name"), OUTPUTS)
def test_an_output_that_cannot_take_it_is_named_and_nothing_is_written(
    call: Callable[..., int], name: str
) -> None:
    arguments = good_arguments(call)
    good = arguments[name]
    shape = good.shape
    for bad, error in (
        (np.full(shape, UNTOUCHED, np.float32), TypeError),
        (np.full(shape, UNTOUCHED, np.int16), TypeError),
        (np.full(shape, 2**32 + UNTOUCHED, np.uint32), TypeError),
        ([UNTOUCHED], TypeError),
        (None, TypeError),
        (np.full((*shape, 1), UNTOUCHED, good.dtype), ValueError),
        (np.full(2 * shape[-1] + 4, UNTOUCHED, good.dtype)[::2], ValueError),
        (np.full(shape, UNTOUCHED, good.dtype.newbyteorder()), ValueError),
        (np.full((shape[0] - 1, *shape[1:]), UNTOUCHED, good.dtype), ValueError),
        (np.full((*shape[:-1], shape[-1] - 1), UNTOUCHED, good.dtype), ValueError),
        (read_only(good), ValueError),
    ):
        if bad is None and name in KEYWORDS:
            continue
        arguments[name] = bad
        kept = {key: np.array(value) for key, value in arguments.items()}
        with pytest.raises(error, match=name):
            invoke(call, arguments)
        for key, value in kept.items():
            np.testing.assert_array_equal(arguments[key], value)


INPUTS = [
    (call, name)
    for call in CALLS
    for name, value in good_arguments(call).items()
    if (call, name) not in OUTPUTS and np.ndim(value)
] + [(call, "lengths") for call in WITH_LENGTHS]


@pytest.mark.parametrize(("call", "name"), INPUTS)
def test_an_input_that_is_no_such_array_is_named(call: Callable[..., int], name: str) -> None:
    for bad, error in (
        (np.zeros(3, np.float32), TypeError),
        (np.zeros(3, np.int64), TypeError),
        (np.zeros((3, 1), np.int32), ValueError),
        (np.zeros(6, np.int32)[::2], ValueError),
        (np.zeros(2, np.int32), ValueError),
        (np.zeros(4, np.int32), ValueError),
        ([0, 1, 0], TypeError),
    ):
        arguments = good_arguments(call) | {name: bad}
        if name == "rows" and np.shape(bad) in ((2,), (4,)):
            continue
        if call is query_start_loc and np.shape(bad) == (2,):
            continue
        outputs = {key: arguments[key] for of, key in OUTPUTS if of is call}
        with pytest.raises(error, match=name if call is not query_start_loc else "counts|out"):
            invoke(call, arguments)
        assert all((out == UNTOUCHED).all() for out in outputs.values())


@pytest.mark.parametrize(
    ("call", "changed", "named"),
    [
        (call, {"rows": int32(0, 1, bad)}, f"rows: entry 2 is {bad}")
        for call in CALLS
        if call is not query_start_loc
        for bad in (3, 4, -1, 2**31 - 1, -(2**31))
    ]
    + [
        (call, {"lengths": int32(10, 0, bad)}, f"lengths: entry 2 is {bad}")
        for call in WITH_LENGTHS
        for bad in (11, -1, 2**31 - 1)
    ]
    + [
        (call, {"rows": int32(0, 1, 2), "lengths": int32(10, 0, 3)}, "lengths: entry 2 is 3")
        for call in WITH_LENGTHS
    ]
    + [
        (block_table, {"expand": 3}, "expand is 3"),
        (csr, {"expand": 3}, "expand is 3"),
        (block_table, {"expand": 0}, "expand .* got 0"),
        (csr, {"expand": 8}, "expand .* got 8"),
        (block_table, {"expand": 2}, "3 columns, but row 0 has 6 pages"),
        (csr, {"indices": Output(8).array, "expand": 2}, "8 entries for 10 pages"),
        (block_table, {"scale": 0}, "scale .* got 0"),
        (
            block_table,
            {"scale": 2**31 // 99 + 1},
            f"the largest id, {(2**31 // 99 + 1) * 99}, .* int32",
        ),
        (block_table, {"pad": 2**31}, "pad .* got 2147483648"),
        (block_table, {"pad": -(2**31) - 1}, "pad .* got -2147483649"),
    ]
    + [
        (call, changed, named)
        for call in (slot_mapping, slices)
        for changed, named in (
            ({"starts": int32(-1, 0, 2)}, "starts: entry 0 is -1"),
            ({"counts": int32(2, 0, -1)}, "counts: entry 2 is -1"),
            ({"starts": int32(9, 0, 2)}, "entry 0 is 9, 2, but its row has 10 tokens"),
            ({"counts": int32(2, 1, 2)}, "entry 1 is 0, 1, but its row has 0 tokens"),
            ({"counts": int32(2, 0, 2**31 - 1)}, "counts: entry 2"),
            (
                {"rows": int32(2, 1, 0), "starts": int32(3, 0, 2)},
                "starts: entry 0 is 3, .* block of token 3",
            ),
        )
    ]
    + [
        (slices, {"out": np.full((2, 3), UNTOUCHED, np.int32)}, "out must have 3 rows, got 2"),
        (slices, {"out": np.full((3, 2), UNTOUCHED, np.int32)}, "2 entries along axis 1 for 3"),
        (trtllm_offsets, {"layers": 0}, "layers .* got 0"),
        (trtllm_offsets, {"layers": 2**31 // 200 + 1}, f"layers is {2**31 // 200 + 1}"),
        (trtllm_offsets, {"out": np.full((3, 1, 3), UNTOUCHED, np.int32)}, "axis 1, got 1"),
        (trtllm_offsets, {"out": np.full((3, 2, 2), UNTOUCHED, np.int32)}, "2 columns, .* 3 pages"),
        (ragged, {"counts": int32(1, 0, 3)}, "counts: entry 1 is 0"),
        (ragged, {"counts": int32(1, 1, 11)}, "counts: entry 2 is 11"),
        (ragged, {"counts": int32(1, 2, 1)}, "rows: entry 2 has 1 tokens"),
        (ragged, {"chunk_prefill_size": 1}, "chunk_prefill_size .* got 1"),
        (ragged, {"page_indices": np.full(8, UNTOUCHED, np.int32)}, "page_indices of shape"),
        (ragged, {"page_indices": np.full((9, 1), UNTOUCHED, np.int32)}, r"shape \(9, 1\) is not"),
        (ragged, {"cu_q_lens": np.full(5, UNTOUCHED, np.int32)}, "cu_q_lens has 5 entries for 3"),
        (
            ragged,
            {
                "kv_lens": np.full(2, UNTOUCHED, np.int32),
                "page_indices": np.full((2, 3), UNTOUCHED, np.int32),
                "cu_q_lens": np.full(3, UNTOUCHED, np.int32),
            },
            "kv_lens has 2 entries for 3 rows",
        ),
        (window_info, {"window": 0}, "window .* got 0"),
        (window_info, {"sinks": -1}, "sinks .* got -1"),
        (window_info, {"out": np.full((2, 3), UNTOUCHED, np.int32)}, "out must have 3 rows, got 2"),
        (query_start_loc, {"counts": int32(2, -1, 3)}, "counts: entry 1 is -1"),
        (query_start_loc, {"counts": int32(2**31 - 1, 1, 3)}, "counts: 2147483651 tokens"),
        (sequence_lengths, {"counts": int32(2, 1, 3)}, "counts: entry 1 is 1"),
        (sequence_lengths, {"counts": int32(11, 0, 3)}, "counts: entry 0 is 11"),
        (sequence_lengths, {"counts": int32(-1, 0, 3)}, "counts: entry 0 is -1"),
    ],
)
def test_a_wrong_number_is_named_and_nothing_is_written(
    call: Callable[..., int], changed: dict[str, Any], named: str
) -> None:
    arguments = good_arguments(call) | changed
    outputs = [arguments[key] for of, key in OUTPUTS if of is call]
    with pytest.raises(ValueError, match=named):
        invoke(call, arguments)
    assert all((out == UNTOUCHED).all() for out in outputs)


@pytest.mark.parametrize("call", CALLS)
def test_outputs_overlap_nothing(call: Callable[..., int]) -> None:
    for of, name in OUTPUTS:
        if of is not call:
            continue
        for other, value in good_arguments(call).items():
            if other == name or not np.ndim(value):
                continue
            arguments = good_arguments(call)
            out = arguments[name]
            memory = np.empty(out.nbytes + value.nbytes, np.int8)
            # One element in common: the last of one is in the first of the other.
            start = out.nbytes - max(out.itemsize, value.itemsize)
            arguments[name] = memory[: out.nbytes].view(out.dtype).reshape(out.shape)
            arguments[other] = (
                memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
            )
            arguments[other][...] = value
            before = memory.tolist()
            with pytest.raises(ValueError, match=f"({name}|{other}) must not overlap"):
                invoke(call, arguments)
            assert memory.tolist() == before
            start = out.nbytes
            arguments = good_arguments(call)
            arguments[other] = (
                memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
            )
            arguments[name] = memory[: out.nbytes].view(out.dtype).reshape(out.shape)
            arguments[other][...] = value
            invoke(call, arguments)


def test_flex_tables_are_int64_only() -> None:
    for name in ("page_table", "physical_to_logical"):
        arguments = good_arguments(flex_tables)
        arguments[name] = arguments[name].astype(np.int32)
        with pytest.raises(TypeError, match=f"{name} must be an array of int64, got int32"):
            invoke(flex_tables, arguments)
