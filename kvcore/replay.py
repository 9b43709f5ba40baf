"""Replay a trace through the real block manager and scheduler, step by step.

Nothing is modelled but time: every prompt is allocated, every generated token is
appended, parallel samples are forked, and what does not fit is preempted, by the code
that an engine would call. A ``StepTime`` says how long each step took, and so which
requests have arrived before the next one.

Prompts of a trace with ``hash_ids`` are given as tokens that stand in for theirs, are
published when they have been computed, and share what they have in common. What was
generated is not known and never shared.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from time import perf_counter, thread_time, thread_time_ns

import numpy as np

from kvcore.block_manager import BlockManager
from kvcore.engine_replay import EngineOptions, EngineRun
from kvcore.errors import InvariantError
from kvcore.eviction import LRU
from kvcore.pool import EvictionPolicy
from kvcore.replay_result import PrefixHits, ReplayResult, Series
from kvcore.replay_run import Progress, ReplayRun
from kvcore.scheduler import Reason, Scheduler
from kvcore.step_time import LinearStepTime, StepTime
from kvcore.textbook_replay import TextbookRun
from kvcore.trace import Trace

__all__ = ["PrefixHits", "ReplayResult", "Series", "replay"]


def replay(
    trace: Trace,
    *,
    num_blocks: int,
    block_size: int = 16,
    watermark_blocks: int = 1,
    max_running: int | None = None,
    prefix_caching: bool = True,
    eviction: EvictionPolicy | None = None,
    engine: EngineOptions | None = None,
    step_time: StepTime | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Serve ``trace`` from a pool of ``num_blocks`` and report what happened.

    With textbook steps, a request with several samples computes its prompt once and forks
    right after; the first sample generates its first token in that step, the others in
    the next. A request that generates nothing still gets the slot that the scheduler
    gives to everyone who is admitted, and ends in that step. With engine steps, all
    samples generate their first token in the step that completes their prompt, and a
    request that generates nothing ends there.

    Parameters
    ----------
    trace : Trace
        With arrivals.
    num_blocks, block_size : int
        The pool.
    watermark_blocks, max_running : int
        As in ``Scheduler``.
    prefix_caching : bool
        Whether the prompts of a trace with ``hash_ids`` share. Others never do.
    eviction : EvictionPolicy, optional
        Which cached block goes first. Default ``LRU()``.
    engine : EngineOptions, optional
        Engine steps, and how they are scheduled. Default: textbook steps.
    step_time : callable, optional
        Default ``LinearStepTime()``.
    progress : callable, optional
        Called now and then with the requests done and the requests in all.

    Raises
    ------
    ValueError
        The trace has no arrivals, ``step_time`` returned no length of time, or what
        ``Scheduler`` says of its options.
    InvariantError
        The manager is not clean after the last request. A bug, never expected.
    """
    if trace.arrivals is None:
        raise ValueError(f"trace {trace.source!r} has lengths only, it needs arrivals")
    sharing = prefix_caching and trace.hash_ids is not None
    policy = eviction or LRU()
    manager = BlockManager(num_blocks, block_size, prefix_caching=sharing, eviction=policy)
    run: ReplayRun
    if engine is None:
        scheduler = Scheduler(manager, watermark_blocks, max_running=max_running)
        run = TextbookRun(trace, manager, scheduler, step_time or LinearStepTime())
    else:
        scheduler = engine.scheduler(manager, watermark_blocks, max_running)
        run = EngineRun(trace, manager, scheduler, step_time or LinearStepTime(), engine)
    readings = [thread_time_ns() for _ in range(1_001)]
    clock_cost = median(later - earlier for earlier, later in pairwise(readings))
    wall_start, cpu_start = perf_counter(), thread_time()
    run.serve(progress)
    wall_seconds, cpu_seconds = perf_counter() - wall_start, thread_time() - cpu_start
    manager_ns = run.manager_ns - clock_cost * run.timed_calls
    manager.check()
    if len(manager) or manager.pool.num_used:
        raise InvariantError(
            "I9", None, f"{len(manager)} sequences, {manager.pool.num_used} blocks left at the end"
        )
    reasons = list(run.rejected.values())
    return ReplayResult(
        num_blocks=manager.num_blocks,
        block_size=manager.block_size,
        watermark_blocks=watermark_blocks,
        max_running=scheduler.options.max_running,
        requests=len(trace),
        finished=run.finished,
        rejected={reason: reasons.count(reason) for reason in Reason if reason in reasons},
        steps=run.steps,
        prefill_tokens=run.prefill_tokens,
        generated_tokens=run.generated_tokens,
        finished_tokens=run.finished_tokens,
        counters=manager.counters.copy(),
        preemptions=run.preemptions,
        recomputed_tokens=run.recomputed_tokens,
        prefix_hits=run.prefix_hits(type(policy).__name__) if sharing else None,
        engine=run.figures() if isinstance(run, EngineRun) else None,
        peak_used=run.peak_used,
        mean_used=run.used_block_seconds / run.now if run.now else 0.0,
        token_steps=run.token_steps,
        logical_block_steps=run.logical_block_steps,
        used_block_steps=run.used_block_steps,
        simulated_seconds=run.now,
        waiting_seconds=np.array(run.waiting_seconds),
        first_token_seconds=np.array(run.first_token_seconds),
        per_token_seconds=np.array(run.per_token_seconds),
        series=run.series(),
        wall_seconds=wall_seconds,
        cpu_seconds=cpu_seconds,
        manager_seconds=max(manager_ns, 0.0) / 1e9,
        drawing_seconds=run.drawing_ns / 1e9,
    )
