"""``python bench/compare.py A.json B.json``: what changed between two runs of ``bench``.

Nanoseconds of two runs are not comparable: the machine was another one, or in another mood.
Each row is therefore compared by its ratio to the yardstick that ran beside it (the no-op if
the target speaks of it, else a list append+pop), B over A: below 1, B is faster. A change
counts only if both the minima and the medians moved the same way by more than their noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NAME_WIDTH = 52
LEAST_CHANGE = 0.10
"""Below this share nothing is called a change, however quiet the runs were."""


def read(path: Path) -> dict[str, Any]:
    """One file that ``python -m bench --json`` wrote."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from error
    if not isinstance(result, dict) or not {"machine", "rows", "figures"} <= result.keys():
        raise SystemExit(f"{path}: not written by python -m bench --json")
    return result


def yardstick(row: dict[str, Any]) -> str:
    """The contender that the row is judged against."""
    against: str = row["target"]["against"] if row["target"] else "list"
    return against


def change(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float, str]:
    """Ratio B over A of the minima and of the medians, and what to call it."""
    other = yardstick(a)
    minimum, median = (
        b["ratios"][other][which] / a["ratios"][other][which] for which in ("minimum", "median")
    )
    noise = max(LEAST_CHANGE, *(unrest(row, other) for row in (a, b)))
    if max(minimum, median) < 1 / (1 + noise):
        return minimum, median, "faster"
    if min(minimum, median) > 1 + noise:
        return minimum, median, "SLOWER"
    return minimum, median, ""


def unrest(row: dict[str, Any], other: str) -> float:
    """How far the row's own two ratios, of minima and of medians, lie apart."""
    ratios = row["ratios"][other]
    low, high = sorted((ratios["minimum"], ratios["median"]))
    return float(high / low - 1)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    arguments = parser.parse_args()
    first, second = read(arguments.a), read(arguments.b)
    for name in sorted(first["machine"].keys() | second["machine"].keys()):
        values = first["machine"].get(name), second["machine"].get(name)
        if values[0] != values[1] and name not in ("date", "load"):
            print(f"{name}: {values[0]} -> {values[1]}")
    rows = {row["name"]: row for row in second["rows"]}
    print(
        f"{'':{NAME_WIDTH}}{'A':>9}{'B':>9}  {'yardstick':12}{'B/A min':>9}{'median':>8}"
        "  change, verdict"
    )
    for a in first["rows"]:
        b = rows.pop(a["name"], None)
        if b is None:
            print(f"{a['name']:{NAME_WIDTH}}only in A")
            continue
        other = yardstick(a)
        minimum, median, word = change(a, b)
        verdicts = "" if a["verdict"] == b["verdict"] else f"{a['verdict']} -> {b['verdict']}"
        print(
            f"{a['name']:{NAME_WIDTH}}{a['ratios'][other]['minimum']:>9.2f}"
            f"{b['ratios'][other]['minimum']:>9.2f}  {'x ' + other:12}{minimum:>9.2f}{median:>8.2f}"
            f"  {word}  {verdicts}".rstrip()
        )
    for name in rows:
        print(f"{name:{NAME_WIDTH}}only in B")
    figures = {figure["name"]: figure for figure in second["figures"]}
    for a in first["figures"]:
        b = figures.get(a["name"])
        if b is not None:
            print(f"{a['name']:{NAME_WIDTH}}{a['value']:>9.2f}{b['value']:>9.2f}  {a['unit']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
