"""The ``kvcore`` command."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvcore import __version__
from kvcore.eviction import LRU, SegmentedLRU
from kvcore.hit_rate_curve import hit_rate_curve
from kvcore.kv_shape import blocks_in, kv_shape, parse_memory
from kvcore.plot import save_plot
from kvcore.progress import ProgressBar
from kvcore.replay import replay
from kvcore.report import as_json, as_table, as_text_plot
from kvcore.step_time import load_step_time
from kvcore.trace import Trace, TraceError, read_trace
from kvcore.workload import AZURE_RATE, at_rate, synthetic_trace

__all__ = ["main"]

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

SYNTHETIC_REQUESTS = 10_000
# 6 GiB of an 8-billion-parameter model with 8 KV heads: tight for the built-in load.
SYNTHETIC_BLOCKS = 3_072
# 24 GiB of the same: 196,608 tokens, more than the longest request of the Mooncake traces.
TRACE_BLOCKS = 12_288
EVICTION = {"lru": LRU, "segmented-lru": SegmentedLRU}
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 1: a file could not be read or written, or the replay failed. 2: the
    options make no sense (argparse itself exits with it). 130: interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="kvcore", description="Block manager and scheduler of a paged KV cache."
    )
    parser.add_argument("--version", action="version", version=f"kvcore {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_replay(commands)
    options = parser.parse_args(argv)
    try:
        code: int = options.run(options)
    except _UsageError as error:
        options.parser.error(str(error))
    except BrokenPipeError:
        # The reader of our output has seen enough. What is still buffered goes nowhere,
        # or the interpreter would complain about it on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (TraceError, OSError) as error:
        print(f"kvcore: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


class _UsageError(Exception):
    """Options that do not go together, or name something that is not there."""


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="serve a trace of requests and show what happens to the memory",
        description=(
            "Serve a trace of requests from a pool of blocks, with the real block manager and "
            "scheduler and a simulated clock, and show what happened to the memory and to the "
            "requests. Without TRACE, a built-in workload that follows the Azure 2023 "
            "conversation trace."
        ),
    )
    parser.set_defaults(run=_replay, parser=parser)
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="Mooncake JSONL, Azure CSV, lengths CSV or agentic JSON, plain or gzip; "
        "or a directory of agentic JSON",
    )
    pool = parser.add_argument_group("the pool")
    pool.add_argument(
        "--blocks",
        type=_whole(1),
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
        "--block-size", type=_whole(1), default=16, metavar="N", help="tokens a block (default 16)"
    )
    pool.add_argument(
        "--watermark",
        type=_whole(0),
        metavar="N",
        help="blocks that admission leaves free (default 1 %% of the pool)",
    )
    pool.add_argument(
        "--max-running", type=_whole(1), metavar="N", help="most sequences that run at once"
    )
    pool.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="compute every prompt in full; prompts share by default if TRACE has block ids",
    )
    pool.add_argument(
        "--eviction", choices=EVICTION, help="which cached block goes first (default lru)"
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--limit", type=_whole(1), metavar="N", help="only the first N requests")
    load.add_argument(
        "--n", type=_whole(1), metavar="N", help="samples decoded in parallel from every prompt"
    )
    load.add_argument(
        "--rate",
        type=_positive,
        metavar="R",
        help="mean requests a second: stretches a trace's own arrival times, or draws Poisson "
        f"arrivals for one without (built-in workload {AZURE_RATE})",
    )
    load.add_argument(
        "--seed", type=_whole(0), default=0, metavar="N", help="of all that is drawn (default 0)"
    )
    load.add_argument(
        "--step-time",
        metavar="MODULE:FUNCTION",
        help="seconds of a step from (prefill tokens, decoding sequences, context tokens); "
        "the default assumes an 8-billion-parameter model on one accelerator",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", help="write the numbers as JSON; - for standard output"
    )
    output.add_argument(
        "--plot",
        type=_plot_path,
        metavar="FILE",
        help="draw the pool over time, and the hit rate over its size if prompts share: "
        ".png, .svg, .pdf",
    )


def _replay(options: argparse.Namespace) -> int:
    for path in (options.json, options.plot):
        if path not in (None, "-") and not Path(path).parent.is_dir():
            raise _UsageError(f"{path}: there is no such directory")
    try:
        num_blocks = _num_blocks(options)
        step_time = load_step_time(options.step_time) if options.step_time else None
    except (ValueError, ImportError) as error:
        raise _UsageError(str(error)) from error
    watermark = max(num_blocks // 100, 1) if options.watermark is None else options.watermark
    if watermark >= num_blocks:
        raise _UsageError(f"--watermark {watermark} leaves nothing of {num_blocks} blocks")
    trace = _load(options)
    sharing = trace.hash_ids is not None and not options.no_prefix_caching
    if options.eviction and not sharing:
        reason = "--no-prefix-caching" if options.no_prefix_caching else "a trace without block ids"
        raise _UsageError(f"--eviction orders cached blocks, and {reason} has none")

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
            step_time=step_time,
            progress=bar,
        )
    finally:
        if bar is not None:
            bar.clear()

    code = DONE
    curve = hit_rate_curve(trace) if sharing and options.plot else None
    document = json.dumps(as_json(trace, result, curve), indent=2)
    if options.json == "-":
        print(document)
    elif options.json:
        Path(options.json).write_text(document + "\n", encoding="utf-8")
    plot_missing = False
    if options.plot:
        try:
            save_plot(trace, result, options.plot, curve)
        except ImportError as error:
            print(f"kvcore: {options.plot} was not drawn: {error}", file=sys.stderr)
            plot_missing, code = True, FAILED
    if options.json != "-":
        print(as_table(trace, result))
        if plot_missing or (sys.stdout.isatty() and not options.plot):
            width = min(shutil.get_terminal_size().columns, 120)
            print()
            print(as_text_plot(result, width=width, ascii_only=not _speaks_unicode()))
    sys.stdout.flush()
    return code


def _num_blocks(options: argparse.Namespace) -> int:
    if options.memory is None and options.model is None:
        return options.blocks or (TRACE_BLOCKS if options.trace else SYNTHETIC_BLOCKS)
    if options.memory is None or options.model is None:
        raise _UsageError("--memory and --model size the pool together")
    if options.blocks is not None:
        raise _UsageError("give either --blocks, or --memory and --model")
    return blocks_in(parse_memory(options.memory), kv_shape(options.model), options.block_size)


def _load(options: argparse.Namespace) -> Trace:
    if options.trace is None:
        trace = synthetic_trace(
            options.limit or SYNTHETIC_REQUESTS, rate=options.rate or AZURE_RATE, seed=options.seed
        )
    else:
        trace = read_trace(options.trace)
        if options.limit is not None:
            trace = trace.head(options.limit)
        if options.rate is not None:
            try:
                trace = at_rate(trace, options.rate, seed=options.seed)
            except ValueError as error:
                raise _UsageError(str(error)) from error
        elif trace.arrivals is None:
            raise _UsageError(f"{options.trace} has lengths and no arrivals: give a --rate")
    if options.n is not None:
        trace = replace(trace, samples=np.full(len(trace), options.n, np.int64))
    return trace


def _speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.isascii() and text.isdecimal() and least <= int(text) < 2**31:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number from {least}, found {text!r}")

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0.0 < value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")


def _plot_path(text: str) -> str:
    if text.endswith(PLOT_SUFFIXES):
        return text
    raise argparse.ArgumentTypeError(
        f"expected a name that ends in {', '.join(PLOT_SUFFIXES)}, found {text!r}"
    )
