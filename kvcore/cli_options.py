"""Options that several commands have: the load, the pool, the engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvcore.kv_shape import blocks_in, kv_shape, parse_memory
from kvcore.resume_cost import ResumeCost
from kvcore.step_time import StepTime, load_step_time
from kvcore.trace import Trace, read_trace
from kvcore.workload import AZURE_RATE, at_rate, synthetic_trace

__all__ = [
    "UsageError",
    "add_load",
    "add_steps",
    "load_trace",
    "pool_blocks",
    "positive",
    "probability",
    "resume_cost",
    "step_time_of",
    "steps_of",
    "whole",
]

SYNTHETIC_REQUESTS = 10_000
# 6 GiB of an 8-billion-parameter model with 8 KV heads: tight for the built-in load.
SYNTHETIC_BLOCKS = 3_072
# 24 GiB of the same: 196,608 tokens, more than the longest request of the Mooncake traces.
TRACE_BLOCKS = 12_288
# Of the same model: keys and values of 32 layers, 8 heads of 128, 16 bits.
BYTES_PER_TOKEN = 128 << 10


class UsageError(Exception):
    """Options that do not go together, or name something that is not there."""


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the trace and what is done to it."""
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="Mooncake JSONL, Azure CSV, lengths CSV or agentic JSON, plain or gzip; "
        "or a directory of agentic JSON",
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--limit", type=whole(1), metavar="N", help="only the first N requests")
    load.add_argument(
        "--n", type=whole(1), metavar="N", help="samples decoded in parallel from every prompt"
    )
    load.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="mean requests a second: stretches a trace's own arrival times, or draws Poisson "
        f"arrivals for one without (built-in workload {AZURE_RATE})",
    )
    load.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="of all that is drawn (default 0)"
    )
    load.add_argument(
        "--step-time",
        metavar="MODULE:FUNCTION",
        help="seconds of a step from (prefill tokens, decoding sequences, context tokens); "
        "the default assumes an 8-billion-parameter model on one accelerator",
    )


def add_steps(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add what an engine step may do; returns the group, for more of its kind."""
    steps = parser.add_argument_group("engine steps")
    steps.add_argument(
        "--max-partial-prefills",
        type=whole(1),
        default=4,
        metavar="N",
        help="most prompts that may be under way (default 4)",
    )
    steps.add_argument(
        "--draft-tokens",
        type=whole(0),
        default=0,
        metavar="K",
        help="speculative tokens in every decode",
    )
    steps.add_argument(
        "--acceptance",
        type=probability,
        default=0.7,
        metavar="P",
        help="probability that a draft is accepted after those before it were (default 0.7)",
    )
    steps.add_argument(
        "--window", type=whole(1), metavar="N", help="tokens that attention looks back"
    )
    steps.add_argument(
        "--sinks",
        type=whole(0),
        default=0,
        metavar="N",
        help="first tokens that attention sees besides the window",
    )
    steps.add_argument(
        "--in-flight",
        type=whole(0),
        default=0,
        metavar="N",
        help="steps that may be outstanding when the next is planned (default 0)",
    )
    return steps


def steps_of(options: argparse.Namespace) -> dict[str, Any]:
    """Name what ``add_steps`` has added as ``EngineOptions`` does. ``UsageError``."""
    if options.draft_tokens and options.in_flight:
        raise UsageError("--draft-tokens and --in-flight do not go together")
    return {
        "max_partial_prefills": options.max_partial_prefills,
        "draft_tokens": options.draft_tokens,
        "acceptance": options.acceptance,
        "window": options.window,
        "sink_tokens": options.sinks,
        "in_flight": options.in_flight,
        "seed": options.seed,
    }


def load_trace(options: argparse.Namespace) -> Trace:
    """Read or make the trace. ``TraceError``, ``OSError``, ``UsageError``."""
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
                raise UsageError(str(error)) from error
        elif trace.arrivals is None:
            raise UsageError(f"{options.trace} has lengths and no arrivals: give a --rate")
    if options.n is not None:
        trace = replace(trace, samples=np.full(len(trace), options.n, np.int64))
    return trace


def pool_blocks(options: argparse.Namespace) -> int:
    """Size the pool. ``ValueError`` or ``UsageError``."""
    if options.memory is None and options.model is None:
        return options.blocks or (TRACE_BLOCKS if options.trace else SYNTHETIC_BLOCKS)
    if options.memory is None or options.model is None:
        raise UsageError("--memory and --model size the pool together")
    if options.blocks is not None:
        raise UsageError("give either --blocks, or --memory and --model")
    return blocks_in(parse_memory(options.memory), kv_shape(options.model), options.block_size)


def resume_cost(block_size: int) -> ResumeCost:
    """Costs of the model that the default ``LinearStepTime`` assumes."""
    return ResumeCost(
        bytes_per_block=BYTES_PER_TOKEN * block_size,
        fragment_bytes=BYTES_PER_TOKEN * block_size // 64,
    )


def step_time_of(options: argparse.Namespace) -> StepTime | None:
    """Load ``--step-time``. ``UsageError``."""
    try:
        return load_step_time(options.step_time) if options.step_time else None
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least``."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdecimal() and least <= int(text) < 2**31:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number from {least}, found {text!r}")

    return parse


def positive(text: str) -> float:
    """Parse a number above 0."""
    value = _number(text)
    if 0.0 < value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")


def probability(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = _number(text)
    if 0.0 <= value <= 1.0:
        return value
    raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
