"""Reading traces: the formats, their traps, and errors that say where and what."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_traces import (
    AGENTIC,
    ARXIV,
    AZURE_CODE,
    AZURE_CONV,
    CONVERSATION,
    SHAREGPT,
    SYNTHETIC,
    real_trace,
    trace_path,
)

from kvcore import KVCoreError
from kvcore.trace import Trace, TraceError, read_trace

MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 27, "input_length": 512, "output_length": 7, "hash_ids": [0]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:46.6805901,396,109"
)
LENGTHS = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n3,1,4,3.0\n"
)


def session(*requests: tuple[float, int, int], block_size: int = 64, **more: Any) -> str:
    rows = [
        {"t": t, "in": tokens_in, "out": out, "hash_ids": list(range(1, tokens_in // 64 + 1))}
        for t, tokens_in, out in requests
    ]
    return json.dumps({"id": "x", "block_size": block_size, "requests": rows, **more})


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Read a text as a file whose name says nothing."""

    def read(text: str | bytes) -> Trace:
        file = tmp_path / "trace"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_trace(file)

    return read


def columns(trace: Trace) -> tuple[list[float] | None, list[int], list[int]]:
    arrivals = None if trace.arrivals is None else trace.arrivals.tolist()
    return arrivals, trace.prompt_tokens.tolist(), trace.output_tokens.tolist()


# ------------------------------------------------------------------ formats


def test_mooncake_times_are_milliseconds_and_ids_may_end_in_a_partial_block(read: Any) -> None:
    trace = read(MOONCAKE)
    assert columns(trace) == ([0.0, 0.027], [600, 512], [5, 7])
    assert trace.hash_block_size == 512
    assert [ids.tolist() for ids in trace.hash_ids] == [[0, 1], [0]]


def test_mooncake_lines_may_state_samples_and_another_block_size(read: Any) -> None:
    trace = read(
        '{"timestamp": 5, "input_length": 33, "output_length": 2, "hash_ids": [7, 8, 9],'
        ' "block_size": 16, "n": 4}\n'
        '{"timestamp": 6, "input_length": 16, "output_length": 2, "hash_ids": [7],'
        ' "block_size": 16}\n'
    )
    assert trace.samples.tolist() == [4, 1]
    assert trace.hash_block_size == 16


def test_mooncake_lines_need_no_ids(read: Any) -> None:
    trace = read('{"timestamp": 0, "input_length": 600, "output_length": 5}\n')
    assert trace.hash_ids is None
    assert trace.hash_block_size == 0


def test_azure_times_have_seven_digits_and_all_of_them_count(read: Any) -> None:
    arrivals, prompts, outputs = columns(read(AZURE))
    assert arrivals == [0.0, 1e-7]
    assert (prompts, outputs) == ([374, 396], [44, 109])


def test_azure_times_may_carry_a_zone_or_no_fraction(read: Any) -> None:
    trace = read(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-12 00:00:00+00:00,1,1\n"
        "2024-05-12 00:00:00.25+00:00,1,1\n"
        "2024-05-13 00:00:01,1,1\n"
    )
    assert trace.arrivals.tolist() == [0.0, 0.25, 86_401.0]


def test_azure_columns_are_found_by_name_among_others(read: Any) -> None:
    trace = read("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00,3,10,20\n")
    assert columns(trace) == ([0.0], [10], [20])


def test_lengths_have_no_arrivals(read: Any) -> None:
    assert columns(read(LENGTHS)) == (None, [74, 3], [918, 1])


def test_lengths_with_arrivals_have_them_in_seconds(read: Any) -> None:
    trace = read("arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,10,2\n4,20,3\n")
    assert columns(trace) == ([0.0, 2.5], [10, 20], [2, 3])


def test_a_session_has_ids_for_full_blocks_only(read: Any) -> None:
    trace = read(session((0.0, 130, 9), (2.5, 64, 0)))
    assert columns(trace) == ([0.0, 2.5], [130, 64], [9, 0])
    assert [ids.tolist() for ids in trace.hash_ids] == [[1, 2], [1]]


def test_a_session_may_be_laid_out_over_many_lines(read: Any) -> None:
    text = json.dumps(json.loads(session((0.0, 130, 9))), indent=2)
    assert columns(read(text)) == ([0.0], [130], [9])


@pytest.mark.parametrize("text", [MOONCAKE, AZURE, LENGTHS, session((0.0, 130, 9))])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "a"])
def test_the_format_is_told_by_the_content_plain_or_gzip_whatever_the_name(
    tmp_path: Path, text: str, name: str
) -> None:
    (tmp_path / "plain").write_bytes(text.encode())
    (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    assert columns(read_trace(tmp_path / name)) == columns(read_trace(tmp_path / "plain"))


@pytest.mark.parametrize("text", [MOONCAKE, AZURE, LENGTHS, session((0.0, 130, 9))])
def test_a_final_newline_a_blank_line_and_a_byte_order_mark_change_nothing(
    read: Any, text: str
) -> None:
    expected = columns(read(text))
    assert columns(read(text.rstrip("\n"))) == expected
    assert columns(read(text + "\n\n")) == expected
    assert columns(read(b"\xef\xbb\xbf" + text.encode())) == expected


def test_requests_that_arrive_together_keep_the_order_of_the_file(read: Any) -> None:
    line = '{{"timestamp": {}, "input_length": {}, "output_length": 1}}\n'
    # Odd prompts arrive 3 ms after the even ones.
    trace = read("".join(line.format(3 * (prompt % 2), prompt) for prompt in range(1, 201)))
    assert trace.arrivals.tolist() == [0.0] * 100 + [0.003] * 100
    assert trace.prompt_tokens.tolist() == [*range(2, 201, 2), *range(1, 201, 2)]


def test_sessions_of_a_directory_merge_by_time_file_and_index(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(session((0.0, 101, 1), (5.0, 102, 1), (5.0, 103, 1)))
    (tmp_path / "a.json").write_text(session((0.0, 201, 1), (5.0, 202, 1)))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(session((1.0, 301, 1)).encode()))
    (tmp_path / "LICENSE").write_text("not a trace")
    trace = read_trace(tmp_path)
    assert columns(trace)[:2] == ([0, 0, 1, 5, 5, 5], [201, 101, 301, 202, 102, 103])


def test_block_ids_of_different_sessions_never_meet(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(session((0.0, 128, 1), (1.0, 192, 1)))
    hash_ids = read_trace(tmp_path).hash_ids
    assert hash_ids is not None
    a_first, b_first, a_second, b_second = (set(ids.tolist()) for ids in hash_ids)
    assert a_first < a_second
    assert b_first < b_second
    assert not a_second & b_second


# ------------------------------------------------------------------ errors

GOOD_LINE = '{"timestamp": 0, "input_length": 600, "output_length": 5}\n'
BAD = {
    "no JSON": (GOOD_LINE + "{oops\n", 2, "a JSON object", "{oops"),
    "no object": (GOOD_LINE + "[1]\n", 2, "a JSON object", "[1]"),
    "no key": (GOOD_LINE + '{"timestamp": 1, "input_length": 6}\n', 2, "output_length", "none"),
    "a wrong type": (
        GOOD_LINE + GOOD_LINE.replace("600", '"600"'), 2, "input_length, a whole number", "600",
    ),
    "a bool": (GOOD_LINE + GOOD_LINE.replace("600", "true"), 2, "input_length", "True"),
    "a fraction": (GOOD_LINE + GOOD_LINE.replace("600", "6.5"), 2, "input_length", "6.5"),
    "an empty prompt": (GOOD_LINE + GOOD_LINE.replace("600", "0"), 2, "from 1 to", "0"),
    "a negative output": (GOOD_LINE + GOOD_LINE.replace("5}", "-5}"), 2, "from 0 to", "-5"),
    "a length past int32": (
        GOOD_LINE + GOOD_LINE.replace("600", "2147483648"), 2, "2147483647", "2147483648",
    ),
    "no samples": (GOOD_LINE + GOOD_LINE.replace("}", ', "n": 0}'), 2, "n, a whole number", "0"),
    "no time": (GOOD_LINE.replace("0,", "NaN,", 1), 1, "timestamp, milliseconds", "nan"),
    "a time in words": (GOOD_LINE.replace("0,", '"now",', 1), 1, "timestamp", "now"),
    "too few ids": (MOONCAKE.replace("[0, 1]", "[0]"), 1, "2 hash_ids", "1"),
    "too many ids": (MOONCAKE.replace("[0]", "[0, 1]"), 2, "1 hash_ids", "2"),
    "ids that are no numbers": (MOONCAKE.replace("[0]", '["a"]'), 2, "hash_ids", "['a']"),
    "huge ids": (MOONCAKE.replace("[0]", f"[{2**63}]"), 2, "hash_ids", str(2**63)),
    "two block sizes": (
        GOOD_LINE + GOOD_LINE.replace("}", ', "block_size": 16}'), 2, "block_size 512", "16",
    ),
    "an Azure comma": (AZURE.replace("46.6805901", "46.68,05"), 3, "3 columns", "4"),
    "an Azure month": (
        AZURE.replace("11-16 18:15:46.6805901", "13-16 18:15:46"), 3, "TIMESTAMP", "13",
    ),
    "an Azure word": (AZURE.replace("2023-11-16 18:15:46.6805901", "noon"), 3, "TIMESTAMP", "noon"),
    "an Azure length": (AZURE.replace("396", "3.5"), 3, "ContextTokens", "3.5"),
    "an empty cell": (AZURE.replace("396", ""), 3, "ContextTokens", "nothing"),
    "a missing cell": (LENGTHS + "5,6\n", 4, "4 columns", "2"),
    "a negative length": (LENGTHS.replace("918", "-918"), 2, "num_decode_tokens", "-918"),
    "an arrival": (
        "arrived_at,num_prefill_tokens,num_decode_tokens\nsoon,1,1\n", 2, "arrived_at", "soon",
    ),
    "a session of words": (session().replace("[]", '"none"'), 1, "a list of requests", "none"),
    "a request that is none": (session().replace("[]", "[3]"), 1, "requests[0]: an object", "3"),
    "a request without in": (
        session((0.0, 64, 1), (1.0, 65, 1)).replace('"in": 65, ', ""), 1, "requests[1]: in", "none",
    ),
    "a session with partial blocks": (
        session((0.0, 130, 1)).replace("[1, 2]", "[1, 2, 3]"), 1, "requests[0]: 2 hash_ids", "3",
    ),
    "a session without block size": (
        session((0.0, 130, 1)).replace("block_size", "size"), 1, "block_size", "none",
    ),
    "two sessions": (session((0.0, 1, 1)) + "\n" + session((0.0, 1, 1)), 2, "the end", '{"id"'),
    "another CSV": ("a,b\n1,2\n", 1, "Mooncake", "a,b"),
    "another object": ('{"a": 1}\n', 1, "Mooncake", '{"a": 1}'),
    "nothing": ("", 1, "Mooncake", "nothing"),
    "a header alone": ("num_prefill_tokens,num_decode_tokens\n", None, "one request", "none"),
    "no requests": (session(), None, "one request", "none"),
    "bytes": (b"\xff\xfe\x00", None, "UTF-8", "0xff"),
    "half a gzip file": (gzip.compress(AZURE.encode())[:-9], None, "gzip", "end"),
    "no gzip file inside": (gzip.compress(b"")[:10] + b"\xff" * 9, None, "gzip", "block type"),
    "a spoilt gzip file": (gzip.compress(AZURE.encode())[:-8] + b"\0" * 8, None, "gzip", "CRC"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "line", "expected", "found"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_with_file_line_expected_and_found(
    read: Any, tmp_path: Path, text: str | bytes, line: int | None, expected: str, found: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read(text)
    error = caught.value
    assert error.path == tmp_path / "trace"
    assert error.line == line
    assert expected in error.expected
    assert found in error.found
    place = error.path if line is None else f"{error.path}:{line}"
    assert str(error) == f"{place}: expected {error.expected}; found {error.found}"
    assert isinstance(error, KVCoreError)
    assert isinstance(error, ValueError)


def test_a_directory_holds_sessions_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="agentic sessions"):
        read_trace(tmp_path)
    (tmp_path / "a.json").write_text(session((0.0, 64, 1)))
    (tmp_path / "b.json").write_text(MOONCAKE)
    with pytest.raises(TraceError, match=r"b\.json:1: expected an agentic session"):
        read_trace(tmp_path)


def test_sessions_of_a_directory_have_one_block_size(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(session((0.0, 1, 1)))
    (tmp_path / "b.json").write_text(session((0.0, 1, 1), block_size=32))
    with pytest.raises(TraceError, match=r"b\.json:1: expected block_size 64 as before; found 32"):
        read_trace(tmp_path)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        read_trace(tmp_path / "missing")


# ------------------------------------------------------------------ the columns


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("prompt_tokens", [4, 0], r"prompt_tokens\[1\] must be from 1 to 2147483647, not 0"),
        ("output_tokens", [-1, 4], r"output_tokens\[0\] must be from 0 to 2147483647, not -1"),
        ("output_tokens", [1], r"output_tokens has 1 entries, prompt_tokens has 2"),
        ("samples", [1, 0], r"samples\[1\] must be from 1"),
        ("arrivals", [2.0, 1.0], r"arrivals\[1\] must be from 2.0"),
        ("arrivals", [-1.0, 1.0], r"arrivals\[0\] must be from 0.0"),
        ("arrivals", [0.0, float("nan")], r"arrivals\[1\] must be .* not nan"),
        ("arrivals", [0.0, float("inf")], r"arrivals\[1\] must be .* not inf"),
        ("arrivals", [0.0], r"arrivals has 1 entries"),
    ],
)
def test_columns_that_make_no_trace_are_refused_by_name(
    column: str, values: list[float], message: str
) -> None:
    good: dict[str, Any] = {
        "prompt_tokens": np.array([4, 4]),
        "output_tokens": np.array([1, 1]),
        "arrivals": np.array([0.0, 0.0]),
        "samples": np.array([1, 1]),
    }
    Trace("good", **good)
    with pytest.raises(ValueError, match=message):
        Trace("bad", **{**good, column: np.array(values)})


def test_a_trace_has_a_request(read: Any) -> None:
    with pytest.raises(ValueError, match="prompt_tokens is empty"):
        read(MOONCAKE).head(0)


def test_head_cuts_every_column(read: Any) -> None:
    trace = read(MOONCAKE.replace("}", ', "n": 2}'))
    head = trace.head(1)
    assert columns(head) == ([0.0], [600], [5])
    assert head.samples.tolist() == [2]
    assert [ids.tolist() for ids in head.hash_ids] == [[0, 1]]
    assert len(trace.head(100)) == 2
    assert read(LENGTHS).head(1).arrivals is None


# ------------------------------------------------------------------ the real files


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "span"),
    [
        (CONVERSATION, 12_031, 144_793_823, 4_122_048, 3_537),
        (SYNTHETIC, 3_993, 61_194_628, 595_432, 1_022),
        (AZURE_CODE, 8_819, 18_059_974, 245_896, 3_435.9),
        (AZURE_CONV, 19_366, 22_361_870, 4_088_665, 3_501.7),
        (SHAREGPT, 30_731, 71_911_571, 13_481_988, None),
        (ARXIV, 28_257, 73_131_321, 8_234_948, None),
        (AGENTIC, 1_013, 75_180_211, 483_457, 21_085),
    ],
)
def test_the_real_files_have_their_known_totals(
    name: str, requests: int, prompt_tokens: int, output_tokens: int, span: float | None
) -> None:
    trace = real_trace(name)
    assert len(trace) == requests
    assert trace.prompt_tokens.sum() == prompt_tokens
    assert trace.output_tokens.sum() == output_tokens
    if span is None:
        assert trace.arrivals is None
    else:
        assert trace.arrivals is not None
        assert trace.arrivals[0] == 0.0
        assert trace.arrivals[-1] == pytest.approx(span, abs=0.1)


@pytest.mark.parametrize(
    ("name", "block_size", "ids", "unique"),
    [
        (CONVERSATION, 512, 288_500, 182_790),
        (SYNTHETIC, 512, 121_877, 43_924),
        (AGENTIC, 64, 1_174_174, 71_268),
    ],
)
def test_the_real_files_have_their_known_block_ids(
    name: str, block_size: int, ids: int, unique: int
) -> None:
    trace = real_trace(name)
    assert trace.hash_ids is not None
    assert trace.hash_block_size == block_size
    every = np.concatenate(trace.hash_ids)
    assert len(every) == ids
    assert len(np.unique(every)) == unique


@pytest.mark.parametrize(
    ("name", "distinct_times", "cv_of_gaps"),
    [(CONVERSATION, 1_180, 3.03), (SYNTHETIC, 3_982, 1.01), (AZURE_CONV, 19_366, 1.09)],
)
def test_the_real_files_keep_their_ties_and_gaps(
    name: str, distinct_times: int, cv_of_gaps: float
) -> None:
    arrivals = real_trace(name).arrivals
    assert arrivals is not None
    gaps = np.diff(arrivals)
    assert len(np.unique(arrivals)) == distinct_times
    assert gaps.std() / gaps.mean() == pytest.approx(cv_of_gaps, abs=0.006)


def test_one_real_session_is_read_alone() -> None:
    trace = read_trace(trace_path(AGENTIC) / "trace_0057.json")
    assert (len(trace), trace.prompt_tokens.max(), trace.output_tokens.sum()) == (8, 15_225, 1_821)
