"""What a replay found, as a table, as JSON, and as a plot of characters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.counters import Counter
from kvcore.hit_rate_curve import HitRateCurve
from kvcore.replay_result import EngineFigures, PrefixHits, ReplayResult, Series
from kvcore.trace import Trace

__all__ = ["as_json", "as_table", "as_text_plot", "by_column"]

# Nine levels each, from empty to full.
BLOCK_LEVELS = " ▁▂▃▄▅▆▇█"
ASCII_LEVELS = " .:-=+*#@"


# What the rates mean; printed beside them, and in the JSON.
DEFINITIONS = {
    "goodput": "output tokens of finished requests / simulated seconds",
    "token_hit_rate": (
        "known prompt tokens in leading blocks found cached / known prompt tokens, "
        "of requests admitted for the first time"
    ),
    "block_hit_rate": "the same in blocks that the known prompt tokens fill",
    "hit_rate_curve": (
        "prompt tokens in leading blocks found cached / prompt tokens; one request at a time, "
        "blocks of the trace's ids, outputs not cached"
    ),
}


def as_json(
    trace: Trace, result: ReplayResult, curve: HitRateCurve | None = None
) -> dict[str, Any]:
    """Return the numbers of the table, ready for ``json.dump``.

    The same for the same trace and options, except under ``"measured"``: CPU and wall
    time of this process. Keys stay; new ones may join them. ``"prefix_cache"`` is None
    where prompts did not share, ``"hit_rate_curve"`` where no ``curve`` is given.
    """
    count = {counter: int(result.counters[counter]) for counter in Counter}
    return {
        "trace": {
            "source": trace.source,
            "requests": len(trace),
            "prompt_tokens": int(trace.prompt_tokens.sum()),
            "output_tokens": int(trace.output_tokens.sum()),
        },
        "pool": {
            "num_blocks": result.num_blocks,
            "block_size": result.block_size,
            "watermark_blocks": result.watermark_blocks,
            "max_running": result.max_running,
        },
        "requests": {
            "finished": result.finished,
            "rejected": sum(result.rejected.values()),
            "rejected_by_reason": {
                reason.name.lower(): number for reason, number in result.rejected.items()
            },
        },
        "work": {
            "steps": result.steps,
            "prefill_tokens": result.prefill_tokens,
            "generated_tokens": result.generated_tokens,
            "appends": count[Counter.TOKENS_APPENDED],
            "blocks_taken": count[Counter.BLOCKS_TAKEN],
            "forks": count[Counter.SEQUENCES_FORKED],
            "cow_copies": count[Counter.COW_COPIES],
            "preemptions": result.preemptions,
            "recomputed_tokens": result.recomputed_tokens,
        },
        "goodput": {
            "tokens_per_second": round(result.goodput, 6),
            "finished_tokens": result.finished_tokens,
            "definition": DEFINITIONS["goodput"],
        },
        "engine": _engine(result.engine),
        "memory": {
            "peak_used_blocks": result.peak_used,
            "mean_used_blocks": round(result.mean_used, 6),
            "peak_usage": round(result.peak_used / result.num_blocks, 6),
            "mean_usage": round(result.mean_used / result.num_blocks, 6),
            "internal_fragmentation": round(result.internal_fragmentation, 6),
            "sharing_ratio": round(result.sharing_ratio, 6),
        },
        "prefix_cache": _prefix_cache(result.prefix_hits),
        "hit_rate_curve": _hit_rate_curve(curve),
        "simulated_seconds": {
            "total": round(result.simulated_seconds, 6),
            "waiting": _distribution(result.waiting_seconds),
            "time_to_first_token": _distribution(result.first_token_seconds),
            "time_per_output_token": _distribution(result.per_token_seconds),
        },
        "measured": {
            "wall_seconds": result.wall_seconds,
            "cpu_seconds": result.cpu_seconds,
            "manager_cpu_seconds": result.manager_seconds,
            "manager_cpu_seconds_per_generated_token": result.manager_seconds_per_token,
            "manager_share_of_cpu": result.manager_share,
            "manager_share_of_simulated": result.manager_share_of_simulated,
        },
    }


def _engine(figures: EngineFigures | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    settings = {
        field.name: getattr(figures, field.name)
        for field in fields(figures)
        if field.name not in ("counters", "stalled")
    }
    return {**settings, "stalled": figures.stalled, "counters": figures.counters.as_dict()}


def _prefix_cache(hits: PrefixHits | None) -> dict[str, Any] | None:
    if hits is None:
        return None
    names = ("token_hit_rate", "block_hit_rate")
    return {
        "eviction": hits.eviction,
        "prompts": hits.prompts,
        "prompt_tokens": hits.prompt_tokens,
        "cached_tokens": hits.cached_tokens,
        "token_hit_rate": round(hits.token_rate, 6),
        "prompt_blocks": hits.prompt_blocks,
        "cached_blocks": hits.cached_blocks,
        "block_hit_rate": round(hits.block_rate, 6),
        "resumed_tokens": hits.resumed_tokens,
        "resumed_cached_tokens": hits.resumed_cached_tokens,
        "evictions": hits.evictions,
        "definitions": {name: DEFINITIONS[name] for name in names},
    }


def _hit_rate_curve(curve: HitRateCurve | None) -> dict[str, Any] | None:
    if curve is None:
        return None

    def points(
        sizes: NDArray[np.int64], blocks: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> dict[str, list[Any]]:
        return {
            "cache_tokens": (sizes * curve.block_size).tolist(),
            "token_hit_rate": (tokens / curve.prompt_tokens).round(6).tolist(),
            "block_hit_rate": (blocks / max(curve.prompt_blocks, 1)).round(6).tolist(),
        }

    return {
        "block_size": curve.block_size,
        "unique_blocks": curve.unique_blocks,
        "prompt_blocks": curve.prompt_blocks,
        "prompt_tokens": curve.prompt_tokens,
        "lru": points(curve.lru_sizes, curve.lru_hit_blocks, curve.lru_hit_tokens),
        "belady_min": points(curve.min_sizes, curve.min_hit_blocks, curve.min_hit_tokens),
        "definition": DEFINITIONS["hit_rate_curve"],
    }


def _distribution(values: NDArray[np.float64]) -> dict[str, float | None]:
    names = ("mean", "p50", "p90", "p99", "max")
    if not values.size:
        return dict.fromkeys(names)
    numbers = (values.mean(), *np.quantile(values, (0.5, 0.9, 0.99, 1.0)))
    return {name: round(float(number), 6) for name, number in zip(names, numbers, strict=True)}


def as_table(trace: Trace, result: ReplayResult) -> str:
    """Lay the numbers out for a reader, about 75 columns wide."""
    document = as_json(trace, result)
    pool, work, memory = document["pool"], document["work"], document["memory"]
    requests, seconds = document["requests"], document["simulated_seconds"]
    running = "" if pool["max_running"] is None else f", at most {pool['max_running']:,} running"
    lines = [
        f"{trace.source}: {document['trace']['requests']:,} requests, "
        f"{document['trace']['prompt_tokens']:,} prompt tokens, "
        f"{document['trace']['output_tokens']:,} output tokens",
        f"pool of {pool['num_blocks']:,} blocks of {pool['block_size']} tokens, "
        f"watermark {pool['watermark_blocks']:,}{running}",
        "",
        "Requests",
        _line("finished", f"{requests['finished']:,}"),
        _line("rejected", f"{requests['rejected']:,}"),
        *(_line(f"  {reason.value}", f"{n:,}") for reason, n in result.rejected.items()),
        "",
        "Work",
        _line("steps", f"{work['steps']:,}"),
        _line("prompt tokens computed", f"{work['prefill_tokens']:,}"),
        _line("tokens generated", f"{work['generated_tokens']:,}"),
        _line("appends", f"{work['appends']:,}"),
        _line("forks", f"{work['forks']:,}"),
        _line("copy-on-write copies", f"{work['cow_copies']:,}"),
        _line("preemptions", f"{work['preemptions']:,}"),
        _line("tokens recomputed", f"{work['recomputed_tokens']:,}"),
        _line("goodput", f"{result.goodput:,.1f}", f"tokens/s: {DEFINITIONS['goodput']}"),
        *_engine_lines(result.engine),
        "",
        "Memory",
        _line("peak use", f"{result.peak_used:,} blocks", f"{memory['peak_usage']:.1%}"),
        _line("mean use", f"{result.mean_used:,.0f} blocks", f"{memory['mean_usage']:.1%}"),
        _line("internal fragmentation", f"{result.internal_fragmentation:.2%}"),
        _line("sharing", f"{result.sharing_ratio:.3f}", "logical blocks to a physical one"),
        *_prefix_lines(result.prefix_hits),
        "",
        f"Simulated seconds, {seconds['total']:,.0f} in all",
        _line("", *(f"{name:>9}" for name in ("mean", "p50", "p90", "p99", "max"))),
        *(
            _line(label, *(_cell(value) for value in seconds[key].values()))
            for label, key in (
                ("waiting", "waiting"),
                ("time to first token", "time_to_first_token"),
                ("time per output token", "time_per_output_token"),
            )
        ),
        "",
        "Manager and scheduler, CPU time measured here",
        _line("in all", f"{result.manager_seconds:.2f} s"),
        _line("per generated token", f"{result.manager_seconds_per_token * 1e9:,.0f} ns"),
        _line(
            "share of this replay",
            f"{result.manager_share:.1%}",
            f"of {result.cpu_seconds:.2f} s CPU, {result.wall_seconds:.2f} s wall",
        ),
        _line(
            "share of simulated time",
            f"{result.manager_share_of_simulated:.3%}",
            "of the time of the engine it would have served",
        ),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _engine_lines(figures: EngineFigures | None) -> list[str]:
    if figures is None:
        return []
    counters = figures.counters
    blocked = {
        name.removeprefix("admission_blocked_"): count
        for name, count in counters.as_dict().items()
        if name.startswith("admission_blocked_") and count
    }
    why = ", ".join(f"{name} {count:,}" for name, count in blocked.items())
    lines = [
        "",
        f"Engine steps of {figures.token_budget:,} tokens: {figures.order}, {figures.victim}, "
        f"{figures.admission}",
        _line("preempted to recompute", f"{counters.preemptions_recompute:,}", "sequences"),
        _line("preempted to the host", f"{counters.preemptions_swap:,}", "sequences"),
        _line("steps that admitted less", f"{sum(blocked.values()):,}", why),
        _line("stalled", f"{figures.stalled:,}", "times a sequence sat a step out"),
    ]
    if figures.host_blocks:
        moved = f"of {figures.host_blocks:,} host blocks, swap {figures.swap}"
        out, back = counters.swap_out_blocks, counters.swap_in_blocks
        lines.append(_line("blocks out and back", f"{out:,} {back:,}", moved))
    if figures.draft_tokens:
        rejected = f"{counters.rejected_draft_tokens:,} rejected"
        lines.append(_line("drafts", f"{counters.draft_tokens:,}", rejected))
    return lines


def _prefix_lines(hits: PrefixHits | None) -> list[str]:
    if hits is None:
        return []
    return [
        "",
        f"Prefix cache, {hits.eviction}",
        _line("prompts with known tokens", f"{hits.prompts:,}", "admitted for the first time"),
        _line(
            "hit rate by tokens",
            f"{hits.token_rate:.2%}",
            f"{hits.cached_tokens:,} found of {hits.prompt_tokens:,} known prompt tokens",
        ),
        _line(
            "hit rate by blocks",
            f"{hits.block_rate:.2%}",
            f"{hits.cached_blocks:,} found of {hits.prompt_blocks:,} that those tokens fill",
        ),
        _line(
            "found again after yielding",
            f"{hits.resumed_cached_tokens:,}",
            f"of {hits.resumed_tokens:,} known tokens, not in the rates",
        ),
        _line("blocks evicted", f"{hits.evictions:,}"),
    ]


def _line(label: str, value: str, *more: str) -> str:
    return f"  {label:<26}{value:>16}  {'  '.join(more)}"


def _cell(value: float | None) -> str:
    return f"{'none' if value is None else format(value, '.3f'):>9}"


def as_text_plot(result: ReplayResult, *, width: int = 80, ascii_only: bool = False) -> str:
    """Draw the pool over simulated time in characters: blocks above, sequences below.

    A column shows the most that was seen in its stretch of time. The row on top of the
    area is the whole pool.
    """
    levels, shared_cell = (ASCII_LEVELS, "o") if ascii_only else (BLOCK_LEVELS, "▒")
    margin, height = 18, 8
    columns = max(width - margin, 10)
    series, end = result.series, result.simulated_seconds
    used = by_column(series.used, series, columns, end) * height / result.num_blocks
    shared = by_column(series.shared, series, columns, end) * height / result.num_blocks
    legend = f"Blocks in use ({shared_cell} shared)" if shared.any() else "Blocks in use"
    lines = [f"{legend} over {end:,.0f} simulated seconds"]
    for row in reversed(range(height)):
        label = f"{result.num_blocks:,}" if row == height - 1 else "0" if row == 0 else ""
        filled = np.rint(np.clip(used - row, 0.0, 1.0) * (len(levels) - 1)).astype(int)
        cells = np.where(shared >= row + 0.5, shared_cell, np.array(list(levels))[filled])
        lines.append(f"{label:>{margin - 2}} |{''.join(cells)}")
    preempted = np.diff(by_column(series.preemptions, series, columns, end), prepend=0)
    for name, total, values in (
        ("running, peak", series.running.max(), by_column(series.running, series, columns, end)),
        ("waiting, peak", series.waiting.max(), by_column(series.waiting, series, columns, end)),
        ("preemptions", result.preemptions, preempted),
    ):
        # What is there at all must not round to nothing.
        filled = np.ceil(values * ((len(levels) - 1) / max(values.max(), 1))).astype(int)
        cells = np.array(list(levels))[filled]
        label = f"{name} {total:,}"
        lines.append(f"{label:>{margin - 2}} |{''.join(cells)}")
    return "\n".join(line.rstrip() for line in lines)


def by_column(
    values: NDArray[np.int64], series: Series, columns: int, end: float
) -> NDArray[np.int64]:
    """Find the highest value in each of ``columns`` equal stretches of time up to ``end``."""
    edges = np.linspace(0.0, end, columns + 1)
    # A stretch begins with the point that still holds then.
    first = np.searchsorted(series.seconds, edges[:-1], side="right") - 1
    last = np.maximum(np.searchsorted(series.seconds, edges[1:], side="left"), first + 1)
    return np.array([values[a:b].max() for a, b in zip(first, last, strict=True)])
