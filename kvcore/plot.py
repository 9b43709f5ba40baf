"""The pool over simulated time, and hit rates over its size, as a picture; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvcore.hit_rate_curve import HitRateCurve
from kvcore.plot_style import FRAME, INK, styled_figure
from kvcore.replay_result import ReplayResult
from kvcore.report import by_column
from kvcore.trace import Trace

__all__ = ["save_plot"]

SHARED = "#1d4e89"
USED = "#7fb2e5"
FREE = "#f1f3f5"
RUNNING = "#2a9d8f"
WAITING = "#e9a13b"
PREEMPTED = "#c8443c"
REPLAYED = "#8e44ad"

# Each shows the most that was seen in its part of the time.
COLUMNS = 400


def save_plot(
    trace: Trace, result: ReplayResult, path: str | Path, curve: HitRateCurve | None = None
) -> None:
    """Draw blocks, queues and preemptions of a replay into ``path``.

    With a ``curve``, also the hit rate over the size of the pool, and where in it the
    replay came out. The suffix of the path chooses the format: ``.png``, ``.svg`` or
    ``.pdf``.

    Raises
    ------
    ImportError
        matplotlib is not installed; the message says how to get it.
    OSError
        The file cannot be written.
    """
    size = 11, 7.5 if curve is None else 11
    with styled_figure(*size, {"legend.borderaxespad": 0.2}) as figure:
        from matplotlib.ticker import MaxNLocator

        over_time: Any = figure
        if curve is not None:
            parts: Any = figure.subfigures(2, 1, height_ratios=[7.5, 3.5])
            over_time = parts[0]
            _draw_hit_rates(parts[1].subplots(), result, curve)
        pool, queues, preemptions = over_time.subplots(
            3, 1, sharex=True, gridspec_kw={"height_ratios": [5, 3, 1.6]}
        )
        figure.suptitle(
            f"{trace.source}: {len(trace):,} requests, "
            f"{result.num_blocks:,} blocks of {result.block_size} tokens"
        )
        series, end = result.series, result.simulated_seconds
        minutes = end > 600
        edges = np.linspace(0.0, end / 60 if minutes else end, COLUMNS + 1)
        used, shared, running, waiting, preempted = (
            by_column(values, series, COLUMNS, end)
            for values in (
                series.used, series.shared, series.running, series.waiting, series.preemptions
            )
        )  # fmt: skip

        pool.set_facecolor(FREE)
        pool.stairs(used, edges, fill=True, color=USED, label="used")
        if shared.any():
            pool.stairs(shared, edges, fill=True, color=SHARED, label="used and shared")
        pool.fill_between([], [], color=FREE, lw=0.8, ec=FRAME, label="free")
        watermark = result.num_blocks - result.watermark_blocks
        pool.axhline(watermark, color=INK, lw=0.8, ls="--", label="watermark")
        pool.set_ylim(0, result.num_blocks)
        pool.set_ylabel("blocks")

        queues.stairs(waiting, edges, baseline=None, color=WAITING, lw=1.3, label="waiting")
        queues.stairs(running, edges, baseline=None, color=RUNNING, lw=1.3, label="running")
        queues.set_ylim(bottom=0)
        queues.set_ylabel("sequences")

        # Wider columns: preemptions are few.
        counts = np.diff(preempted[3::4], prepend=0)
        preemptions.stairs(
            counts, edges[::4], fill=True, color=PREEMPTED,
            label=f"preemptions, {result.preemptions:,} in all",
        )  # fmt: skip
        preemptions.set_ylim(0, max(int(counts.max()), 1) * 1.05)
        preemptions.set_ylabel("preemptions")
        preemptions.set_xlim(0, max(edges[-1], 1e-9))
        preemptions.set_xlabel(f"simulated {'minutes' if minutes else 'seconds'}")

        for axes in (pool, queues, preemptions):
            axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
        figure.savefig(path, dpi=150)


def _draw_hit_rates(axes: Any, result: ReplayResult, curve: HitRateCurve) -> None:
    """Rates by tokens: blocks of the replay and those of the trace differ in size."""
    per_size = curve.block_size / result.block_size
    largest = max(curve.unique_blocks * per_size, result.num_blocks)
    highest = 0.0
    for sizes, hit_tokens, label, colour, style in (
        (curve.min_sizes, curve.min_hit_tokens, "Belady's bound", INK, "--"),
        (curve.lru_sizes, curve.lru_hit_tokens, "LRU, one request at a time", SHARED, "-"),
    ):
        rates = hit_tokens * (100.0 / curve.prompt_tokens)
        highest = max(highest, float(rates[-1]))
        axes.plot(
            # Where all is found, more blocks change nothing.
            np.append(sizes * per_size, largest), np.append(rates, rates[-1]),
            color=colour, ls=style, lw=1.3, label=label,
        )  # fmt: skip
    hits = result.prefix_hits
    if hits is not None:
        axes.plot(
            [result.num_blocks], [100.0 * hits.token_rate], color=REPLAYED, ls="", marker="o",
            ms=8, label=f"this replay, {hits.eviction}: {hits.token_rate:.1%}", zorder=3,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(0, min(1.15 * highest + 1, 100))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.set_xlabel(f"blocks of {result.block_size} tokens in the pool")
    axes.set_ylabel("prompt tokens found cached")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
