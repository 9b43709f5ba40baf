"""What a sweep found, as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, fields
from typing import Any

from kvcore.sweep import SweepResult, SweepRow
from kvcore.trace import Trace

__all__ = ["sweep_csv", "sweep_json", "sweep_table"]

GOODPUT = "output tokens of finished requests / simulated seconds until the last one ended"

HEADINGS = (
    "policy", "pool", "goodput", "preempted", "swapped", "recomputed", "waiting p50", "p90",
    "p99", "TPOT p99",
)  # fmt: skip


def sweep_json(trace: Trace, result: SweepResult) -> dict[str, Any]:
    """Return everything, ready for ``json.dump``; the same for the same trace and options.

    NaN, of quantiles over nobody, becomes None.
    """
    return {
        "trace": {"source": trace.source, "requests": len(trace)},
        "needed_blocks": result.needed_blocks,
        "definitions": {"goodput": GOODPUT, "ratio": "blocks in the pool / needed_blocks"},
        "rows": [
            {name: None if value != value else value for name, value in asdict(row).items()}
            for row in result.rows
        ],
    }


def sweep_csv(result: SweepResult) -> str:
    """Return one line a point under a line of names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(SweepRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in result.rows)
    return text.getvalue()


def sweep_table(trace: Trace, result: SweepResult) -> str:
    """Lay out what tells policies apart; the table is Markdown."""
    cells = [HEADINGS, *(_cells(row) for row in result.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{trace.source}: {len(trace):,} requests, which need {result.needed_blocks:,} blocks",
        f"goodput: {GOODPUT}; waiting and TPOT in simulated seconds",
        "",
        _line(HEADINGS, widths),
        "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths))
        + "|",
        *(_line(row, widths) for row in cells[1:]),
    ]  # fmt: skip
    refused = sum(row.rejected for row in result.rows)
    if refused:
        lines += ["", f"{refused:,} requests were refused or outgrew their pool, over all rows."]
    return "\n".join(lines)


def _cells(row: SweepRow) -> tuple[str, ...]:
    return (
        str(row.policy),
        f"{row.ratio:g}",
        f"{row.goodput:,.1f}",
        f"{row.preemptions_recompute:,}",
        f"{row.preemptions_swap:,}",
        f"{row.recomputed_tokens:,}",
        f"{row.waiting_p50:,.2f}",
        f"{row.waiting_p90:,.2f}",
        f"{row.waiting_p99:,.2f}",
        f"{row.per_token_p99:.4f}",
    )


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    texts = [f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]
    return "| " + " | ".join(texts) + " |"
