"""Engine steps one call at a time: planned and reported, every invariant checked after each."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kvcore import BlockManager, Scheduler, Step

SIZE = 4
"""Tokens a block."""


def scheduler_over(
    num_blocks: int, watermark: int = 0, *, prefix_caching: bool = False, **options: Any
) -> Scheduler:
    options.setdefault("token_budget", 64)
    bm = BlockManager(num_blocks, SIZE, prefix_caching=prefix_caching)
    return Scheduler(bm, watermark, **options)


def scheduler_of_size(block_size: int, num_blocks: int, **options: Any) -> Scheduler:
    """Without a watermark, over blocks of another size."""
    return Scheduler(BlockManager(num_blocks, block_size), 0, **options)


def check(scheduler: Scheduler) -> None:
    scheduler.bm.check()
    tier = scheduler._swapping.host
    if tier is not None:
        tier.host.check()


def plan(scheduler: Scheduler) -> Step:
    step = scheduler.step()
    check(scheduler)
    return step


def report(
    scheduler: Scheduler, step: Step, tokens: list[int] | None = None, **results: Any
) -> list[Hashable]:
    """Report the results of a step; who has ended by them."""
    ended = scheduler.update(step, tokens, **results)
    check(scheduler)
    return ended


def run(scheduler: Scheduler, tokens: list[int] | None = None, **results: Any) -> Step:
    """Plan a step and report it at once."""
    step = plan(scheduler)
    report(scheduler, step, tokens, **results)
    return step


def run_steps(scheduler: Scheduler, count: int) -> Step:
    """Run some steps; returns the last."""
    for _ in range(count - 1):
        run(scheduler)
    return run(scheduler)


def table(scheduler: Scheduler, seq: Hashable) -> list[int]:
    blocks: list[int] = scheduler.bm.tables[seq].tolist()
    return blocks
