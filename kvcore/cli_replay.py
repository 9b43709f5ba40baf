"""``kvcore replay``: serve a trace and show what happens to the memory."""

from __future__ import annotations

import argparse
import shutil
import sys

from kvcore.cli_options import (
    SYNTHETIC_BLOCKS,
    TRACE_BLOCKS,
    UsageError,
    add_load,
    add_steps,
    load_trace,
    pool_blocks,
    resume_cost,
    step_time_of,
    steps_of,
    whole,
)
from kvcore.cli_output import add_json, add_plot, check_outputs, is_drawn, write_json
from kvcore.engine_replay import EngineOptions
from kvcore.eviction import LRU, SegmentedLRU
from kvcore.hit_rate_curve import hit_rate_curve
from kvcore.plot import save_plot
from kvcore.policy_choices import ADMISSIONS, ORDERS, SWAPS, VICTIMS, admission_of, victim_of
from kvcore.progress import ProgressBar
from kvcore.replay import replay
from kvcore.report import as_json, as_table, as_text_plot
from kvcore.workload import with_classes

__all__ = ["add_replay"]

DONE, FAILED = 0, 1
EVICTION = {"lru": LRU, "segmented-lru": SegmentedLRU}
ENGINE_ONLY = (
    "max_partial_prefills", "draft_tokens", "acceptance", "window", "sinks", "in_flight", "order",
    "victim", "admission", "host_blocks", "swap",
)  # fmt: skip


def add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "replay",
        help="serve a trace of requests and show what happens to the memory",
        description=(
            "Serve a trace of requests from a pool of blocks, with the real block manager and "
            "scheduler and a simulated clock, and show what happened to the memory and to the "
            "requests. Without TRACE, a built-in workload that follows the Azure 2023 "
            "conversation trace. With --token-budget the steps are those of an engine, with "
            "chunked prompts; without, everybody who is admitted decodes in the same step."
        ),
    )
    parser.set_defaults(run=_replay, parser=parser)
    add_load(parser)
    pool = parser.add_argument_group("the pool")
    pool.add_argument(
        "--blocks",
        type=whole(1),
        metavar="N",
        help=f"blocks in the pool (default {TRACE_BLOCKS:,}; "
        f"built-in workload {SYNTHETIC_BLOCKS:,})",
    )
    pool.add_argument(
        "--memory", metavar="SIZE", help="memory for the pool, like 24GiB; needs --model"
    )
    pool.add_argument(
        "--model", help="name of a well-known model, or a config.json, to size its tokens"
    )
    pool.add_argument(
        "--block-size", type=whole(1), default=16, metavar="N", help="tokens a block (default 16)"
    )
    pool.add_argument(
        "--watermark",
        type=whole(0),
        metavar="N",
        help="blocks that admission leaves free (default 1 %% of the pool)",
    )
    pool.add_argument(
        "--max-running", type=whole(1), metavar="N", help="most sequences that run at once"
    )
    pool.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="compute every prompt in full; prompts share by default if TRACE has block ids",
    )
    pool.add_argument(
        "--eviction", choices=EVICTION, help="which cached block goes first (default lru)"
    )
    steps = add_steps(parser)
    steps.add_argument(
        "--token-budget", type=whole(1), metavar="N", help="most tokens that a step computes"
    )
    policies = parser.add_argument_group("policies of engine steps")
    policies.add_argument(
        "--order",
        choices=ORDERS,
        help="who is admitted next (default fcfs, or priority with --victim priority); "
        "priorities and tenants are drawn from --seed",
    )
    policies.add_argument(
        "--victim", choices=VICTIMS, default="newest", help="who yields (default newest)"
    )
    policies.add_argument(
        "--admission",
        choices=ADMISSIONS,
        default="watermark",
        help="what is kept back from newcomers (default watermark)",
    )
    policies.add_argument(
        "--host-blocks",
        type=whole(0),
        default=0,
        metavar="N",
        help="blocks in host memory, to which who yields is swapped",
    )
    policies.add_argument(
        "--swap",
        choices=SWAPS,
        default="always",
        help="whether that is always so, or only if cheaper than recomputing (default always)",
    )
    output = parser.add_argument_group("output")
    add_json(output)
    add_plot(output, "draw the pool over time, and the hit rate over its size if prompts share")


def _replay(options: argparse.Namespace) -> int:
    check_outputs(options.json, options.plot)
    try:
        num_blocks = pool_blocks(options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    step_time = step_time_of(options)
    watermark = max(num_blocks // 100, 1) if options.watermark is None else options.watermark
    if watermark >= num_blocks:
        raise UsageError(f"--watermark {watermark} leaves nothing of {num_blocks} blocks")
    engine = _engine(options, watermark)
    trace = load_trace(options)
    if engine is not None:
        trace = with_classes(trace, seed=options.seed)
    sharing = trace.hash_ids is not None and not options.no_prefix_caching
    if options.eviction and not sharing:
        reason = "--no-prefix-caching" if options.no_prefix_caching else "a trace without block ids"
        raise UsageError(f"--eviction orders cached blocks, and {reason} has none")

    bar = ProgressBar(sys.stderr) if sys.stderr.isatty() else None
    try:
        result = replay(
            trace,
            num_blocks=num_blocks,
            block_size=options.block_size,
            watermark_blocks=watermark,
            max_running=options.max_running,
            prefix_caching=sharing,
            eviction=EVICTION[options.eviction or "lru"](),
            engine=engine,
            step_time=step_time,
            progress=bar,
        )
    finally:
        if bar is not None:
            bar.clear()

    curve = hit_rate_curve(trace) if sharing and options.plot else None
    write_json(as_json(trace, result, curve), options.json)
    plot_missing = bool(options.plot) and not is_drawn(
        lambda: save_plot(trace, result, options.plot, curve), options.plot
    )
    if options.json != "-":
        print(as_table(trace, result))
        if plot_missing or (sys.stdout.isatty() and not options.plot):
            width = min(shutil.get_terminal_size().columns, 120)
            print()
            print(as_text_plot(result, width=width, ascii_only=not _speaks_unicode()))
    sys.stdout.flush()
    return FAILED if plot_missing else DONE


def _engine(options: argparse.Namespace, watermark: int) -> EngineOptions | None:
    if options.token_budget is None:
        for name in ENGINE_ONLY:
            if getattr(options, name) != options.parser.get_default(name):
                raise UsageError(f"--{name.replace('_', '-')} needs a --token-budget")
        return None
    each = 1 + options.draft_tokens
    running = options.max_running or options.token_budget // each
    if not each <= running * each <= options.token_budget:
        raise UsageError(
            f"--token-budget {options.token_budget} is too little for {max(running, 1)} running "
            f"sequences of {each} tokens a step"
        )
    steps = steps_of(options)
    if options.swap != "always" and not options.host_blocks:
        raise UsageError(f"--swap {options.swap} needs --host-blocks")
    cost = resume_cost(options.block_size)
    order = options.order or ("priority" if options.victim == "priority" else "fcfs")
    return EngineOptions(
        options.token_budget,
        order=ORDERS[order],
        victim=victim_of(options.victim, cost, swaps=bool(options.host_blocks)),
        admission=admission_of(options.admission, watermark),
        host_blocks=options.host_blocks,
        swap=cost if options.swap == "cheapest" else None,
        cost=cost,
        **steps,
    )


def _speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
