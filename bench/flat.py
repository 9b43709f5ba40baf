"""Does the cost of an operation grow with the pool, the sequences, or the time running?

It must not, but for cache misses: a pool of 10^7 blocks is 80 MB, and blocks that come back
oldest first are always the coldest. ``bench.instructions`` tells the two apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial

from bench.harness import Contender, Row
from bench.workload import BLOCK_SIZE, Crowd, phases, set_free_order, shuffled
from kvcore import BlockManager

__all__ = ["churn", "rows"]

POOLS = (1_000, 100_000, 10_000_000)
LIVE = (10, 1_000, 10_000)
OPERATIONS = 1_000_000
NUM_SEQS = 10


def appends(crowd: Crowd) -> Contender:
    """``append_slot``, 16 tokens for each sequence of the crowd."""
    seqs = [seq for seq, _ in crowd.starts]
    return Contender(
        "manager.append_slot(seq)",
        "seq in calls",
        {"manager": crowd.manager, "calls": seqs * BLOCK_SIZE},
        operations=len(seqs) * BLOCK_SIZE,
        prepare=crowd.restore,
        verify=partial(crowd.expect_grown, BLOCK_SIZE),
    )


def requests(crowd: Crowd) -> Contender:
    """``allocate`` of 32 blocks and ``free_seq``, beside the crowd."""
    return Contender(
        "manager.allocate(seq, n_tokens); manager.free_seq(seq)",
        "seq in seqs",
        {"manager": crowd.manager, "seqs": range(90_000, 90_064), "n_tokens": 32 * BLOCK_SIZE},
        operations=64,
    )


Question = Callable[[Crowd], Contender]


def by_pool(question: Question, scattered: bool) -> Mapping[str, Contender]:
    """The same work in pools of three sizes."""
    contenders = {}
    for size in POOLS:
        manager = BlockManager(size, BLOCK_SIZE)
        if scattered:
            set_free_order(manager, shuffled(size))
        crowd = Crowd(manager, range(NUM_SEQS), phases(NUM_SEQS, 480))
        contenders[f"{size:,} blocks"] = question(crowd)
    return contenders


def by_live(question: Question) -> Mapping[str, Contender]:
    """Ten sequences do the work, in the company of more and more others."""
    contenders = {}
    for live in LIVE:
        manager = BlockManager(500_000, BLOCK_SIZE, rows=live)
        for other in range(NUM_SEQS, live):
            manager.allocate(other, 480)
        crowd = Crowd(manager, range(NUM_SEQS), phases(NUM_SEQS, 480))
        contenders[f"{live:,} live"] = question(crowd)
    return contenders


def by_age(question: Question) -> Mapping[str, Contender]:
    """A new manager with its free list in random order, against one that has seen much."""
    contenders = {}
    for operations in (0, OPERATIONS):
        manager = BlockManager(10_000, BLOCK_SIZE)
        set_free_order(manager, shuffled(10_000))
        churn(manager, operations)
        crowd = Crowd(manager, range(NUM_SEQS), phases(NUM_SEQS, 480))
        contenders[f"after {operations:,} operations"] = question(crowd)
    return contenders


def churn(manager: BlockManager, operations: int) -> None:
    """That many random operations; at the end everything is free."""
    draw = random.Random(0)
    live: list[Hashable] = []
    for seq in range(operations):
        kind = draw.random()
        if live and kind < 0.7:
            manager.append_slot(live[draw.randrange(len(live))])
        elif len(live) < 60 and kind < 0.85:
            if live and kind < 0.75:
                manager.fork(live[draw.randrange(len(live))], seq)
            else:
                manager.allocate(seq, draw.randrange(1, 1_000))
            live.append(seq)
        elif live:
            manager.free_seq(live.pop(draw.randrange(len(live))))
    for left in live:
        manager.free_seq(left)


def rows() -> Iterator[Row]:
    """All rows of this file; the first contender of each is the smallest or youngest."""
    questions: tuple[tuple[str, Question], ...] = (
        ("append_slot, 16 tokens", appends),
        ("allocate and free 32 blocks", requests),
    )
    for name, question in questions:
        yield Row(f"{name}, free list in order", partial(by_pool, question, False))
        yield Row(f"{name}, free list shuffled", partial(by_pool, question, True))
        yield Row(f"{name}, beside other sequences", partial(by_live, question))
        yield Row(f"{name}, by age", partial(by_age, question))
