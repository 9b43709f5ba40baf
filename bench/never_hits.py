"""What does prefix sharing cost a load in which no two prompts are alike?

The same requests are served with sharing on and off, in turns, in one process: every prompt
hashed, looked up, published and in the end evicted, and not one hit. Once in a loop around
the scheduler that does nothing else, and once by ``kvcore.replay``, which keeps account of
everything.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.extensions import UnavailableError
from bench.footprint import Figure, Measured
from bench.prefix import VOCABULARY, sharing_manager
from bench.workload import BLOCK_SIZE, set_free_order, shuffled
from kvcore import BlockManager, Scheduler
from kvcore.replay import replay
from kvcore.workload import synthetic_trace

__all__ = ["figures"]

REQUESTS = 2_000
NUM_BLOCKS = 16_384
MOST_RUNNING = 128
ROUNDS = 7


class Served(NamedTuple):
    """What one run of all requests took."""

    seconds: float
    steps: int
    generated: int


class Load:
    """Requests of the built-in workload with random tokens; as many run as may.

    A loop around the scheduler that does as little as an engine can: all time that is not
    inside manager and scheduler goes into knowing which request ends.
    """

    def __init__(self) -> None:
        trace = synthetic_trace(REQUESTS)
        random = np.random.default_rng(0)
        self.prompts: list[NDArray[np.int32]] = [
            random.integers(VOCABULARY, size=tokens, dtype=np.int32)
            for tokens in trace.prompt_tokens.tolist()
        ]
        self.outputs = [max(tokens, 1) for tokens in trace.output_tokens.tolist()]
        self.sampled = random.integers(VOCABULARY, size=(1_024, MOST_RUNNING), dtype=np.int32)
        self.generated = sum(self.outputs)

    def serve(self, sharing: bool) -> Served:
        """All requests, from the first to the last."""
        if sharing:
            manager = sharing_manager(NUM_BLOCKS, rows=MOST_RUNNING)
        else:
            manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, rows=MOST_RUNNING)
            set_free_order(manager, shuffled(NUM_BLOCKS))
        scheduler: Any = Scheduler(manager, max_running=MOST_RUNNING)
        calendar: defaultdict[int, list[int]] = defaultdict(list)
        steps = 0
        start = time.thread_time_ns()
        for seq, prompt in enumerate(self.prompts):
            if sharing:
                scheduler.add(seq, tokens=prompt)
            else:
                scheduler.add(seq, len(prompt))
        while scheduler.running or scheduler.waiting:
            step = scheduler.step()
            if step.preempted:
                raise AssertionError("the pool is too small for this load")
            for seq, _, _ in step.prefills:
                calendar[steps + self.outputs[seq] - 1].append(seq)
            if sharing:
                # The token after a prompt is known once the prompt is computed: commits of
                # both are one call, as in an engine.
                manager.commit_batch(step.rows, self.sampled[steps % 1_024, : len(step)])
            for seq in calendar.pop(steps, ()):
                scheduler.finish(seq)
            steps += 1
        seconds = (time.thread_time_ns() - start) / 1e9
        manager.check()
        return Served(seconds, steps, self.generated)


def in_turns(off: Callable[[], float], on: Callable[[], float]) -> tuple[float, float]:
    """The least seconds of each, over many runs in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            for run, results in zip((off, on), seconds, strict=True):
                gc.collect()
                results.append(run())
    finally:
        if collecting:
            gc.enable()
    return min(seconds[0]), min(seconds[1])


def in_an_empty_engine() -> Measured:
    """How much longer the requests take with sharing on, ids of the output included."""
    load = Load()
    off, on = in_turns(lambda: load.serve(False).seconds, lambda: load.serve(True).seconds)
    tokens = sum(map(len, load.prompts))
    return Measured(
        (on - off) / REQUESTS * 1e6,
        "us a request",
        f"{off / REQUESTS * 1e6:.1f} without; {tokens / REQUESTS:,.0f} prompt and "
        f"{load.generated / REQUESTS:,.0f} output tokens a request",
    )


def in_a_replay() -> Measured:
    """The same as a share of a replay."""
    size = 512
    trace = synthetic_trace(REQUESTS)
    lengths = trace.prompt_tokens.tolist()
    stops = np.cumsum([-(-tokens // size) for tokens in lengths])
    ids = tuple(np.split(np.arange(stops[-1]), stops[:-1]))
    trace = replace(trace, hash_ids=ids, hash_block_size=size)

    def serve(sharing: bool) -> float:
        try:
            served = replay(trace, num_blocks=NUM_BLOCKS, prefix_caching=sharing)
        except TypeError as error:
            raise UnavailableError(f"replays of this kvcore share nothing: {error}") from error
        return served.cpu_seconds - served.drawing_seconds

    off, on = in_turns(partial(serve, False), partial(serve, True))
    return Measured(
        (on - off) / off * 100,
        "%",
        f"{(on - off) / REQUESTS * 1e6:.1f} us a request on top of {off / REQUESTS * 1e6:.1f}; "
        f"drawing the tokens of prompts is not counted",
    )


def figures() -> Iterator[Figure]:
    """All figures of this file."""
    yield Figure("sharing that never hits, in an empty engine", in_an_empty_engine)
    yield Figure("sharing that never hits, share of a replay", in_a_replay, must=5)
