"""``python -m bench.instructions``: machine instructions per operation, under Callgrind.

Where a clock says 5 % and means the weather, this says the same number every time, on any
machine with the same compiler. It does not know what a cache miss or a mispredicted branch
costs. The rows are those of ``python -m bench``; preparation and loop are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.__main__ import GROUPS, matches
from bench.extensions import UnavailableError, load
from bench.harness import Row

__all__ = ["count"]

CONTENDERS = ("kvcore", "no-op")
"""The others are Python, whose instructions tell little and take long here."""

WARMUP_RUNS = 3
"""CPython's specialiser and lazily allocated arrays are done after these."""

DEFAULT_ROWS = ("the next token", "whole sequences", "scheduler")


def selected(patterns: list[str]) -> list[Row]:
    """Rows that match one of the patterns."""
    return [
        row
        for group, rows, *_ in GROUPS
        for row in rows()
        if any(matches(group, row.name, pattern) for pattern in patterns)
    ]


def work(patterns: list[str]) -> None:
    """Under Callgrind: run each contender, then its empty loop, each as one counted call.

    Prints one line for each pair, in the order of the profiles that Callgrind writes.
    """
    counted = load("floor").counted
    for row in selected(patterns):
        try:
            contenders = row.build()
        except UnavailableError as reason:
            print(f"skipped: {row.name}: {reason}", file=sys.stderr)
            continue
        for name, contender in contenders.items():
            if name in CONTENDERS or "kvcore" not in contenders:
                for _ in range(WARMUP_RUNS):
                    if contender.prepare is not None:
                        contender.prepare()
                    contender.run()
                    contender.run_empty()
                if contender.prepare is not None:
                    contender.prepare()
                counted(contender.run)
                counted(contender.run_empty)
                print(json.dumps([row.name, name, contender.operations]), flush=True)


def count(patterns: list[str], directory: Path) -> list[tuple[str, str, float]]:
    """Row, contender, instructions per operation; the profiles are left in ``directory``."""
    load("floor")  # compiled here rather than under Callgrind
    function = "kvcore_bench_counted"
    worker = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--collect-atstart=no",
            f"--toggle-collect={function}",
            f"--dump-after={function}",
            f"--callgrind-out-file={directory}/profile",
            sys.executable,
            "-m",
            "bench.instructions",
            "--worker",
            *patterns,
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    if worker.returncode:
        raise SystemExit(f"valgrind failed:\n{worker.stderr}")
    results = []
    for i, line in enumerate(worker.stdout.splitlines()):
        row, contender, operations = json.loads(line)
        full, empty = (profile_total(directory, 2 * i + part) for part in (1, 2))
        results.append((row, contender, (full - empty) / operations))
    return results


def profile_total(directory: Path, part: int) -> int:
    """The instructions of the ``part``-th profile that the worker wrote."""
    text = (directory / f"profile.{part}").read_text()
    found = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{directory}/profile.{part} holds no total")
    return int(found[1])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument(
        "patterns",
        nargs="*",
        default=list(DEFAULT_ROWS),
        metavar="PATTERN",
        help="rows whose group or name matches; by default all but growth and evictable blocks",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the profiles there for callgrind_annotate"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.patterns)
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        results = count(arguments.patterns, directory)
    by_row: dict[str, dict[str, float]] = {}
    for row, contender, instructions in results:
        by_row.setdefault(row, {})[contender] = instructions
    print("instructions an operation")
    for row, counts in by_row.items():
        print(f"{row:52}" + "".join(f"{n:>12,.1f} {name}" for name, n in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
