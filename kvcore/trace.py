"""Request traces: when each request arrived, how long its prompt and answer were.

``read_trace`` recognises a file by what is in it, never by its name, plain or gzip:

============== =================================================================
Mooncake JSONL one object a line: ``timestamp`` [ms], ``input_length``,
               ``output_length``; optional ``hash_ids`` for blocks of
               ``block_size`` (512) tokens, and ``n``, its parallel samples
Azure CSV      ``TIMESTAMP,ContextTokens,GeneratedTokens``
lengths CSV    ``num_prefill_tokens,num_decode_tokens``; optional ``arrived_at``
               [s]
agentic JSON   a session: ``block_size`` and ``requests`` of ``t`` [s], ``in``,
               ``out`` and optional ``hash_ids``; a directory of such files is
               one trace
============== =================================================================

Other columns and keys are ignored. Requests are ordered by arrival; those that
arrive together keep the order of their file.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import KVCoreError

__all__ = ["Trace", "TraceError", "read_trace"]

COLUMNS = (
    "prompt_tokens", "output_tokens", "arrivals", "samples", "hash_ids", "priorities", "tenants",
)  # fmt: skip
MOONCAKE_BLOCK_SIZE = 512
# The manager keeps a sequence's length as int32.
MAX_TOKENS = 2**31 - 1
# Up to here float64 holds every whole number.
MAX_TIME = 2**53

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTHS_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
# datetime stops at 6 digits of a second; Azure writes 7.
AZURE_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?", re.ASCII
)
FORMATS = "a Mooncake JSON line, an Azure or lengths CSV header, or an agentic session"


class TraceError(KVCoreError, ValueError):
    """A trace that cannot be read.

    Attributes
    ----------
    path : Path
    line : int or None
        Line of the file, from 1; None where the fault is not in one line.
    expected, found : str
    """

    def __init__(self, path: Path, line: int | None, expected: str, found: str) -> None:
        super().__init__(path, line, expected, found)
        self.path = path
        self.line = line
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        return f"{self.path}{line}: expected {self.expected}; found {self.found}"


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests as columns, one entry a request, in order of arrival.

    Parameters
    ----------
    source : str
        What to call it in a report.
    prompt_tokens : ndarray
        int64, each at least 1.
    output_tokens : ndarray
        int64, tokens that each sample of the request generates, each at least 0.
    arrivals : ndarray, optional
        float64, ascending seconds, the first one usually 0. None where only lengths
        are known.
    samples : ndarray, optional
        int64, sequences that each request decodes from its one prompt. Default 1.
    hash_ids : tuple of ndarray, optional
        int64 for each request: ids of its prompt's blocks of ``hash_block_size``
        tokens; equal ids mean equal content after equal content. The last id of a
        request may stand for a partial block.
    hash_block_size : int
        Tokens that one id stands for; 0 without ``hash_ids``.
    priorities, tenants : ndarray, optional
        int64: how important a request is, larger is more, and on whose account it runs.
        No file format has them; see ``workload.with_classes``.

    Raises
    ------
    ValueError
        Naming the column, the request and the value that is wrong, or no request at all.
    """

    source: str
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    arrivals: NDArray[np.float64] | None = None
    samples: NDArray[np.int64] | None = None
    hash_ids: tuple[NDArray[np.int64], ...] | None = None
    hash_block_size: int = 0
    priorities: NDArray[np.int64] | None = None
    tenants: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not len(self):
            raise ValueError("prompt_tokens is empty, a trace has at least one request")
        for name in COLUMNS[1:]:
            column = getattr(self, name)
            if column is not None and len(column) != len(self):
                raise ValueError(f"{name} has {len(column)} entries, prompt_tokens has {len(self)}")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 0), ("samples", 1)):
            column = getattr(self, name)
            if column is None:
                continue
            for request in np.flatnonzero((column < least) | (column > MAX_TOKENS))[:1]:
                raise ValueError(
                    f"{name}[{request}] must be from {least} to {MAX_TOKENS}, not {column[request]}"
                )
        if self.arrivals is not None:
            before = np.concatenate(([0.0], self.arrivals[:-1]))
            # Written so that NaN is caught too.
            in_order = (self.arrivals >= before) & (self.arrivals <= MAX_TIME)
            for request in np.flatnonzero(~in_order)[:1]:
                raise ValueError(
                    f"arrivals[{request}] must be from {before[request]} (the one before) "
                    f"to {MAX_TIME}, not {self.arrivals[request]}"
                )

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def head(self, limit: int) -> Self:
        """Return the first ``limit`` requests, at least 1, or all if there are fewer."""
        return replace(
            self,
            **{
                name: column[:limit]
                for name in COLUMNS
                if (column := getattr(self, name)) is not None
            },
        )


def read_trace(path: str | Path) -> Trace:
    """Read a trace file, or a directory of agentic sessions.

    A directory is read as the ``*.json`` and ``*.json.gz`` in it, merged by arrival,
    then file name, then position in the file. Block ids are local to a session, so
    they are renumbered until no two sessions share one.

    Raises
    ------
    TraceError
        At the first thing that is not as it should be: the file, the line, what was
        expected and what was there.
    OSError
        The file cannot be opened or read.
    """
    path = Path(path)
    columns = _Columns()
    if path.is_dir():
        sessions = [file for file in path.iterdir() if file.name.endswith((".json", ".json.gz"))]
        if not sessions:
            raise TraceError(path, None, "agentic sessions in *.json or *.json.gz", "none")
        for file in sorted(sessions):
            _read_file(file, columns, only_sessions=True)
    else:
        _read_file(path, columns)
    if not columns.prompt_tokens:
        raise TraceError(path, None, "at least one request", "none")
    return columns.trace(path.resolve().name)


@dataclass
class _Columns:
    """A trace while it is read: in file order, times in the unit of the file."""

    times: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    hash_ids: list[NDArray[np.int64]] = field(default_factory=list)
    next_hash_id: int = 0
    hash_block_size: int = 0
    units_per_second: int = 1

    def trace(self, source: str) -> Trace:
        order = np.arange(len(self.prompt_tokens))
        arrivals = None
        if self.times:
            times = np.array(self.times)
            order = np.argsort(times, kind="stable")
            arrivals = (times[order] - times.min()) / self.units_per_second
        has_ids = any(ids.size for ids in self.hash_ids)
        return Trace(
            source,
            np.array(self.prompt_tokens, np.int64)[order],
            np.array(self.output_tokens, np.int64)[order],
            arrivals,
            np.array(self.samples, np.int64)[order] if self.samples else None,
            tuple(self.hash_ids[request] for request in order) if has_ids else None,
            self.hash_block_size if has_ids else 0,
        )


def _read_file(path: Path, columns: _Columns, only_sessions: bool = False) -> None:
    place = _Place(path)
    try:
        with path.open("rb") as raw:
            # 1f 8b opens every gzip file; peek leaves it in place.
            is_gzip = raw.peek(2)[:2] == b"\x1f\x8b"
            binary = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            with io.TextIOWrapper(binary, encoding="utf-8-sig") as text:
                _read_text(place, text, columns, only_sessions)
    except UnicodeDecodeError as error:
        place.fail("UTF-8 text", f"byte {error.object[error.start]:#04x}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        place.fail("a whole gzip file", str(error))


def _read_text(
    place: _Place, text: io.TextIOWrapper, columns: _Columns, only_sessions: bool
) -> None:
    first = text.readline()
    place = place.at(1)
    if first.lstrip().startswith("{"):
        # Only a document laid out over several lines has a brace alone in its first.
        document = place.json(first + text.read() if first.strip() == "{" else first)
        if "requests" in document:
            for line, more in enumerate(text, 2):
                if more.strip():
                    place.at(line).fail("the end of the file", _shown(more))
            return _read_session(place, document, columns)
        if "timestamp" in document and not only_sessions:
            return _read_mooncake(place, chain([first], text), columns)
    elif not only_sessions:
        header = [name.strip() for name in first.split(",")]
        if set(AZURE_COLUMNS) <= set(header) or set(LENGTHS_COLUMNS) <= set(header):
            return _read_csv(place, header, text, columns)
    place.fail("an agentic session" if only_sessions else FORMATS, _shown(first))


def _read_mooncake(place: _Place, lines: Iterable[str], columns: _Columns) -> None:
    columns.units_per_second = 1000
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = place.at(number)
        row = place.json(line)
        block_size = place.block_size(row, columns, default=MOONCAKE_BLOCK_SIZE)
        columns.times.append(place.time(row, "timestamp", "milliseconds"))
        prompt = place.count(row, "input_length", 1)
        columns.prompt_tokens.append(prompt)
        columns.output_tokens.append(place.count(row, "output_length", 0))
        columns.samples.append(place.count(row, "n", 1, default=1))
        # The last id may stand for a partial block.
        columns.hash_ids.append(place.ids(row, -(-prompt // block_size)))


def _read_session(place: _Place, document: dict[str, Any], columns: _Columns) -> None:
    block_size = place.block_size(document, columns)
    requests = document["requests"]
    if not isinstance(requests, list):
        place.fail("a list of requests", _shown(requests))
    first_id = columns.next_hash_id
    for index, row in enumerate(requests):
        place = place.at(place.line, f"requests[{index}]: ")
        if not isinstance(row, dict):
            place.fail("an object", _shown(row))
        columns.times.append(place.time(row, "t", "seconds"))
        prompt = place.count(row, "in", 1)
        columns.prompt_tokens.append(prompt)
        columns.output_tokens.append(place.count(row, "out", 0))
        # Only full blocks have an id.
        ids = place.ids(row, prompt // block_size) + first_id
        columns.hash_ids.append(ids)
        columns.next_hash_id = max(columns.next_hash_id, int(ids.max(initial=-1)) + 1)


def _read_csv(place: _Place, header: list[str], lines: Iterable[str], columns: _Columns) -> None:
    is_azure = set(AZURE_COLUMNS) <= set(header)
    prompt, output = AZURE_COLUMNS[1:] if is_azure else LENGTHS_COLUMNS
    columns.units_per_second = 10**9 if is_azure else 1
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        place = place.at(number)
        cells = line.rstrip("\n").split(",")
        if len(cells) != len(header):
            place.fail(f"{len(header)} columns", f"{len(cells)}")
        row: dict[str, Any] = {
            name: int(cell) if cell.isascii() and cell.isdecimal() else cell
            for name, cell in zip(header, cells, strict=True)
        }
        if is_azure:
            columns.times.append(place.nanoseconds(row, "TIMESTAMP"))
        elif "arrived_at" in row:
            columns.times.append(place.time(row, "arrived_at", "seconds"))
        columns.prompt_tokens.append(place.count(row, prompt, 1))
        columns.output_tokens.append(place.count(row, output, 0))


@dataclass(frozen=True)
class _Place:
    """Where in a file the reader is, and what it may find there."""

    path: Path
    line: int | None = None
    within: str = ""

    def at(self, line: int | None, within: str = "") -> _Place:
        return _Place(self.path, line, within)

    def fail(self, expected: str, found: str) -> NoReturn:
        raise TraceError(self.path, self.line, self.within + expected, found) from None

    def json(self, text: str) -> dict[str, Any]:
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            self.fail("a JSON object", f"{_shown(text)} ({error})")
        except RecursionError:
            self.fail("a JSON object", f"{_shown(text)} (nested too deeply)")
        if not isinstance(document, dict):
            self.fail("a JSON object", _shown(text))
        return document

    def get(self, row: dict[str, Any], name: str, expected: str) -> Any:
        if name not in row:
            self.fail(f"{name}, {expected}", "none")
        return row[name]

    def count(self, row: dict[str, Any], name: str, least: int, default: int | None = None) -> int:
        if default is not None and name not in row:
            return default
        expected = f"a whole number from {least} to {MAX_TOKENS}"
        value = self.get(row, name, expected)
        # type, because JSON's true is an int to isinstance.
        if type(value) is not int or not least <= value <= MAX_TOKENS:
            self.fail(f"{name}, {expected}", _shown(value))
        return value

    def block_size(self, row: dict[str, Any], columns: _Columns, default: int | None = None) -> int:
        value = self.count(row, "block_size", 1, default)
        if columns.hash_block_size not in (0, value):
            self.fail(f"block_size {columns.hash_block_size} as before", str(value))
        columns.hash_block_size = value
        return value

    def time(self, row: dict[str, Any], name: str, unit: str) -> float:
        expected = f"{unit} from 0 to {MAX_TIME}"
        value = self.get(row, name, expected)
        try:
            # A cell of a CSV is text.
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{name}, {expected}", _shown(value))
        if type(value) not in (int, float) or not 0 <= value <= MAX_TIME:
            self.fail(f"{name}, {expected}", _shown(value))
        return value

    def nanoseconds(self, row: dict[str, Any], name: str) -> int:
        expected = f"{name}, a time like 2023-11-16 18:15:46.6805900"
        match = AZURE_TIME.fullmatch(str(row[name]))
        if match is None:
            self.fail(expected, _shown(row[name]))
        try:
            whole = datetime.fromisoformat(match[1] + "+00:00")
        except ValueError:
            self.fail(expected, _shown(row[name]))
        return int(whole.timestamp()) * 10**9 + int((match[2] or "").ljust(9, "0"))

    def ids(self, row: dict[str, Any], length: int) -> NDArray[np.int64]:
        if "hash_ids" not in row:
            return np.empty(0, np.int64)
        ids = row["hash_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            self.fail("hash_ids, a list of whole numbers", _shown(ids))
        if len(ids) != length:
            self.fail(f"{length} hash_ids for the length of the prompt", str(len(ids)))
        try:
            return np.array(ids, np.int64)
        except OverflowError:
            self.fail("hash_ids below 2**63", _shown(max(ids, key=abs)))


def _shown(value: object) -> str:
    text = value.strip() if isinstance(value, str) else repr(value)
    if not text:
        return "nothing"
    return text if len(text) <= 60 else text[:57] + "..."
