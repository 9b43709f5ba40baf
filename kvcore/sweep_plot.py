"""A sweep as a picture: one panel a quantity, one line a policy; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore.plot_style import styled_figure
from kvcore.sweep import SweepResult, SweepRow
from kvcore.trace import Trace

__all__ = ["save_sweep_plot"]

COLOURS = {"watermark": "#1d4e89", "predicted-peak": "#c8443c", "to-completion": "#2a9d8f"}
STYLES = {"newest": "-", "priority": ":", "cheapest": "--"}
MARKERS = {"never": "o", "always": "s", "cheapest": "^"}

PANELS: tuple[tuple[str, str, Callable[[SweepRow], float]], ...] = (
    ("goodput [tokens / s]", "linear", lambda row: row.goodput),
    (
        "preemptions",
        "symlog",
        lambda row: row.preemptions_recompute + row.preemptions_swap,
    ),
    ("recomputed tokens", "symlog", lambda row: row.recomputed_tokens),
    ("waiting, median [s]", "symlog", lambda row: row.waiting_p50),
    ("waiting, 99 % [s]", "symlog", lambda row: row.waiting_p99),
    ("time per output token, 99 % [s]", "linear", lambda row: row.per_token_p99),
)


def save_sweep_plot(trace: Trace, result: SweepResult, path: str | Path) -> None:
    """Draw a sweep into ``path``; its suffix chooses the format.

    Colours are admission policies, line styles victims, markers swap rules.

    Raises
    ------
    ImportError
        matplotlib is not installed; the message says how to get it.
    OSError
        The file cannot be written.
    """
    lines: dict[str, list[SweepRow]] = {}
    for row in result.rows:
        lines.setdefault(str(row.policy), []).append(row)
    ratios = sorted({row.ratio for row in result.rows})
    with styled_figure(13, 8.5, {"axes.grid": True, "grid.color": "#f1f3f5"}) as figure:
        from matplotlib.ticker import NullFormatter, NullLocator

        figure.suptitle(
            f"{trace.source}: {len(trace):,} requests, which need {result.needed_blocks:,} blocks"
        )
        panels: Any = figure.subplots(2, 3, sharex=True)
        for axes, (label, scale, value) in zip(panels.flat, PANELS, strict=True):
            for name, rows in lines.items():
                policy = rows[0].policy
                axes.plot(
                    [row.ratio for row in rows], [value(row) for row in rows], label=name,
                    color=COLOURS[policy.admission], ls=STYLES[policy.victim],
                    marker=MARKERS[policy.swap], ms=4, lw=1.3,
                )  # fmt: skip
            axes.set_ylabel(label)
            axes.set_xscale("log")
            axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_minor_formatter(NullFormatter())
            if scale == "symlog":
                axes.set_yscale("symlog", linthresh=0.1 if "[s]" in label else 1.0)
            axes.set_ylim(bottom=0)
        for axes in panels[-1]:
            axes.set_xlabel("blocks in the pool / blocks that the trace needs")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        figure.savefig(path, dpi=130)
