"""``kvcore sweep``: serve a trace from pools of several sizes under several policies."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvcore.cli_options import (
    UsageError,
    add_load,
    add_steps,
    load_trace,
    positive,
    resume_cost,
    step_time_of,
    steps_of,
    whole,
)
from kvcore.cli_output import add_json, add_plot, check_outputs, is_drawn, write_json
from kvcore.engine_replay import EngineOptions
from kvcore.policy_choices import ADMISSIONS, ORDERS, SWAPS, VICTIMS
from kvcore.progress import ProgressBar
from kvcore.sweep import SweepSettings, policies_of, sweep
from kvcore.sweep_plot import save_sweep_plot
from kvcore.sweep_report import sweep_csv, sweep_json, sweep_table
from kvcore.workload import with_classes

__all__ = ["add_sweep"]

DONE, FAILED = 0, 1
RATIOS = (0.5, 0.65, 0.8, 1.0, 1.25, 1.6, 2.0)


def add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "sweep",
        help="compare policies over the size of the pool",
        description=(
            "Find out how many blocks a trace needs, then serve it from pools of several sizes "
            "under every combination of the named policies, with engine steps, and compare "
            "goodput, preemptions, recomputed tokens and waiting."
        ),
    )
    parser.set_defaults(run=_sweep, parser=parser)
    add_load(parser)
    points = parser.add_argument_group("the points")
    points.add_argument(
        "--ratios",
        type=positive,
        nargs="+",
        default=RATIOS,
        metavar="R",
        help="blocks in the pool as shares of what the trace needs "
        f"(default {' '.join(map(str, RATIOS))})",
    )
    points.add_argument(
        "--admission", choices=ADMISSIONS, nargs="+", default=ADMISSIONS, help="default: all"
    )
    points.add_argument(
        "--victim",
        choices=VICTIMS,
        nargs="+",
        default=VICTIMS,
        help="default: all; priority comes with the order of priorities, drawn from --seed",
    )
    points.add_argument(
        "--swap",
        choices=("never", *SWAPS),
        nargs="+",
        default=["never"],
        help="what becomes of who yields (default never: recomputed); the host has as many "
        "blocks as the trace needs",
    )
    steps = add_steps(parser)
    steps.add_argument(
        "--token-budget",
        type=whole(1),
        default=2048,
        metavar="N",
        help="most tokens that a step computes (default 2048)",
    )
    steps.add_argument("--order", choices=ORDERS, default="fcfs", help="default fcfs")
    steps.add_argument("--block-size", type=whole(1), default=16, metavar="N", help="default 16")
    steps.add_argument(
        "--max-running", type=whole(1), metavar="N", help="most sequences that run at once"
    )
    steps.add_argument("--no-prefix-caching", action="store_true")
    parallel = parser.add_argument_group("parallel work")
    parallel.add_argument(
        "--jobs",
        type=whole(1),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: one a CPU)",
    )
    parallel.add_argument("--ray", action="store_true", help="on a Ray cluster; needs kvcore[ray]")
    output = parser.add_argument_group("output")
    add_json(output)
    output.add_argument("--csv", metavar="FILE", help="write the numbers as CSV")
    add_plot(output, "draw them")


def _sweep(options: argparse.Namespace) -> int:
    check_outputs(options.json, options.csv, options.plot)
    settings = SweepSettings(
        EngineOptions(
            options.token_budget,
            order=ORDERS[options.order],
            cost=resume_cost(options.block_size),
            **steps_of(options),
        ),
        block_size=options.block_size,
        max_running=options.max_running,
        prefix_caching=not options.no_prefix_caching,
        step_time=step_time_of(options),
    )
    trace = with_classes(load_trace(options), seed=options.seed)
    policies = policies_of(options.admission, options.victim, options.swap)
    bar = ProgressBar(sys.stderr) if sys.stderr.isatty() else None
    try:
        result = sweep(
            trace,
            options.ratios,
            policies,
            settings,
            jobs=options.jobs,
            ray=options.ray,
            progress=bar,
        )
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    finally:
        if bar is not None:
            bar.clear()

    write_json(sweep_json(trace, result), options.json)
    if options.csv:
        Path(options.csv).write_text(sweep_csv(result), encoding="utf-8")
    plot_missing = bool(options.plot) and not is_drawn(
        lambda: save_sweep_plot(trace, result, options.plot), options.plot
    )
    if options.json != "-":
        print(sweep_table(trace, result))
    sys.stdout.flush()
    return FAILED if plot_missing else DONE
