"""The table, the JSON, and what must be known of the machine to read either."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sysconfig
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import kvcore
from bench.footprint import Figure, Measured
from bench.harness import Timing

__all__ = [
    "figure_as_json",
    "figure_line",
    "growth_head",
    "growth_lines",
    "machine_facts",
    "ratio_head",
    "ratio_line",
    "timing_as_json",
]

NAME_WIDTH = 51


def machine_facts() -> dict[str, Any]:
    """Whatever the numbers may depend on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kvcore": kvcore.__version__,
        "commit": commit(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "compiler": platform.python_compiler(),
        "numpy": np.__version__,
        "cython": cython_version(),
        "build": os.environ.get("KVCORE_BUILD") or "release",
        "interpreter_cflags": sysconfig.get_config_var("CFLAGS"),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
    }


def commit() -> str | None:
    """The commit of the checkout, with a ``+`` if files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, check=True, text=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, check=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout else "")


def cython_version() -> str | None:
    """Of the Cython that compiled the no-ops; kvcore's may differ if it was not built here."""
    try:
        return version("Cython")
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio_head() -> str:
    """Column titles of ``ratio_line``."""
    return (
        f"{'':{NAME_WIDTH}}{'ns min':>10}{'median':>10}{'noise':>7}"
        f"{'x no-op':>14}{'x append+pop':>16}{'reference x':>14}  target"
    )


def ratio_line(timing: Timing) -> str:
    """One row: each pair of ratios is of the minima / of the medians."""
    subject = timing.subject
    pairs = []
    for other in ("no-op", "list"):
        ratios = timing.ratios(other)
        pairs.append("" if ratios is None else "/".join(map(number, ratios)))
    reference = timing.ratios("reference")
    pairs.append("" if reference is None else "/".join(number(1 / ratio) for ratio in reference))
    line = (
        f"{timing.row.name:{NAME_WIDTH}}{number(subject.minimum):>10}{number(subject.median):>10}"
        f"{subject.noise:>7.0%}{pairs[0]:>14}{pairs[1]:>16}{pairs[2]:>14}"
    )
    target = timing.row.target
    if target is not None:
        aim = "" if target.aim is None else f", aim {number(target.aim)}"
        unit = "append+pop" if target.against == "list" else target.against
        line += f"  {timing.verdict:7} must {number(target.must)}{aim} x {unit}"
    for peer in sorted(timing.samples.keys() - {"kvcore", "no-op", "list", "reference"}):
        ratios = timing.ratios(peer)
        assert ratios is not None
        line += f"\n{'':{NAME_WIDTH}}{peer} takes {number(1 / ratios[0])} times as long"
    return line.rstrip()


def growth_head() -> str:
    """Column titles of ``growth_lines``."""
    return (
        f"{'':{NAME_WIDTH}}{'ns min':>9}{'median':>9}{'noise':>7}"
        f"{'x first':>14}{'x append+pop':>16}"
    )


def growth_lines(timing: Timing) -> str:
    """One line a contender, each compared with the first."""
    samples = dict(timing.samples)
    yardstick = samples.pop("list")
    first = timing.subject
    lines = [timing.row.name]
    for name, sample in samples.items():
        pairs = [
            f"{number(sample.minimum / other.minimum)}/{number(sample.median / other.median)}"
            for other in (first, yardstick)
        ]
        lines.append(
            f"  {name:{NAME_WIDTH - 2}}{number(sample.minimum):>9}{number(sample.median):>9}"
            f"{sample.noise:>7.0%}{pairs[0]:>14}{pairs[1]:>16}"
        )
    return "\n".join(lines)


def figure_line(figure: Figure, measured: Measured) -> str:
    """One number that is no ratio of times."""
    line = f"{figure.name:{NAME_WIDTH}}{number(measured.value):>9} {measured.unit}"
    if figure.must is not None:
        line += f"  {'MISSED' if figure.missed(measured) else 'must':7} must {number(figure.must)}"
    return f"{line}  ({measured.detail})"


def timing_as_json(group: str, timing: Timing) -> dict[str, Any]:
    """The row for the file; times in nanoseconds per operation."""
    ratios = {
        other: dict(zip(("minimum", "median"), pair, strict=True))
        for other in timing.samples
        if (pair := timing.ratios(other)) is not None
    }
    return {
        "group": group,
        "name": timing.row.name,
        "samples": {name: asdict(sample) for name, sample in timing.samples.items()},
        "ratios": ratios,
        "target": timing.row.target and asdict(timing.row.target),
        "verdict": timing.verdict,
    }


def figure_as_json(figure: Figure, measured: Measured) -> dict[str, Any]:
    """The figure for the file."""
    missed = figure.missed(measured)
    return {"name": figure.name, "must": figure.must, "missed": missed, **asdict(measured)}
