"""``python -m bench``: measure, print the table, write JSON. ``bench/README.md`` says more."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import (
    allocate,
    append,
    copies,
    emitters,
    engine,
    evict,
    flat,
    footprint,
    never_hits,
    peers,
    prefix,
    report,
    step,
)
from bench.extensions import UnavailableError
from bench.harness import Row, Timing, measure

Group = tuple[str, Callable[[], Iterator[Row]], Callable[[], str], Callable[[Timing], str]]

GROUPS: tuple[Group, ...] = (
    ("the next token", append.rows, report.ratio_head, report.ratio_line),
    ("whole sequences", allocate.rows, report.ratio_head, report.ratio_line),
    ("kernel metadata", emitters.rows, report.ratio_head, report.ratio_line),
    ("evictable blocks", evict.rows, report.ratio_head, report.ratio_line),
    ("prefix sharing", prefix.rows, report.ratio_head, report.ratio_line),
    ("scheduler", step.rows, report.ratio_head, report.ratio_line),
    ("engine steps", engine.rows, report.ratio_head, report.ratio_line),
    ("block copies", copies.rows, report.ratio_head, report.ratio_line),
    ("growth", flat.rows, report.growth_head, report.growth_lines),
)


def run(pattern: str) -> dict[str, Any]:
    """Measure every row that matches, printing each as it is done."""
    facts = report.machine_facts()
    result: dict[str, Any] = {"machine": facts, "rows": [], "figures": [], "skipped": {}}
    print(", ".join(f"{name} {facts[name]}" for name in ("kvcore", "commit", "python", "numpy")))
    print(f"{facts['cpu']}, {facts['cpus']} CPUs, load {facts['load']}")
    for group, rows, head, line in GROUPS:
        selected = [row for row in rows() if matches(group, row.name, pattern)]
        if selected:
            print(f"\n{group.upper()}\n{head()}")
        for row in selected:
            try:
                timing = measure(row)
            except UnavailableError as reason:
                result["skipped"][row.name] = str(reason)
                continue
            result["rows"].append(report.timing_as_json(group, timing))
            print(line(timing), flush=True)
    figures = [
        one
        for group, of_group in (
            ("footprint", footprint.figures),
            ("whole loads", never_hits.figures),
        )
        for one in of_group()
        if matches(group, one.name, pattern)
    ]
    if figures:
        print("\nFOOTPRINT AND WHOLE LOADS")
    for figure in figures:
        try:
            measured = figure.measure()
        except UnavailableError as reason:
            result["skipped"][figure.name] = str(reason)
            continue
        result["figures"].append(report.figure_as_json(figure, measured))
        print(report.figure_line(figure, measured), flush=True)
    return result


def matches(group: str, name: str, pattern: str) -> bool:
    """Whether the pattern is found in the group or the name, or matches one as a glob."""
    return any(
        pattern in text or fnmatch.fnmatchcase(text, pattern)
        for text in (group, name, f"{group}: {name}")
    )


def summary(result: dict[str, Any]) -> str:
    """What the table does not show: what was missed, what was skipped, what is absent."""
    missed = [row["name"] for row in result["rows"] if row["verdict"] == "MISSED"]
    missed += [figure["name"] for figure in result["figures"] if figure["missed"]]
    lines = [f"missed: {'; '.join(missed) or 'none'}"]
    lines += [f"skipped: {name}: {reason}" for name, reason in result["skipped"].items()]
    lines += [f"peer {name}: {reason}" for name, reason in peers.absent().items()]
    return "\n".join(lines)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--rows", default="*", metavar="PATTERN", help="only rows whose group or name matches"
    )
    arguments = parser.parse_args()
    result = run(arguments.rows)
    if not result["rows"] and not result["figures"] and not result["skipped"]:
        print(f"--rows: nothing matches {arguments.rows!r}", file=sys.stderr)
        return 2
    print(f"\n{summary(result)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
