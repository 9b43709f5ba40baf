"""What do whole sequences cost: allocate, free, fork, truncate, a beam step?"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bench import peers
from bench.extensions import load
from bench.harness import Contender, Row, Target
from bench.reference import ReferenceManager
from bench.workload import BLOCK_SIZE, Crowd, set_free_order, shuffled
from kvcore import BlockManager

__all__ = ["rows"]

BLOCKS = 512
"""Blocks of a sequence: 8,192 tokens."""
TOKENS = BLOCKS * BLOCK_SIZE
NUM_SEQS = 16
POOL = (NUM_SEQS + 2) * BLOCKS

ALLOCATE_TARGET = Target.ns(must=1_500, aim=1_000)
FORK_TARGET = Target.ns(must=1_200, aim=800)


def managers() -> tuple[tuple[str, Any], ...]:
    """One of each contender, with room for ``POOL`` blocks in long tables."""
    return (
        ("kvcore", BlockManager(POOL, BLOCK_SIZE, columns=BLOCKS + 64)),
        ("no-op", load("floor").Floor()),
        ("reference", ReferenceManager(POOL, BLOCK_SIZE)),
    )


def whole(freeing: bool, scattered: bool) -> Mapping[str, Contender]:
    """Allocate or free 512 blocks, handed out in id order or in random order."""
    seqs = [10_000 + i for i in range(NUM_SEQS)]
    order = shuffled(POOL) if scattered else np.arange(POOL, dtype=np.int32)
    contenders = {}
    for name, manager in managers():
        names = {"manager": manager, "seqs": seqs, "n_tokens": TOKENS}
        contenders[name] = Contender(
            "manager.free_seq(seq)" if freeing else "manager.allocate(seq, n_tokens)",
            "seq in seqs",
            names,
            operations=NUM_SEQS,
            prepare=None if name == "no-op" else partial(start_over, manager, order, freeing, seqs),
            verify=getattr(manager, "check", None),
        )
    return {**contenders, **peers.allocate_or_free(BLOCKS, NUM_SEQS, freeing)}


def start_over(manager: Any, order: Any, freeing: bool, seqs: Sequence[Hashable]) -> None:
    """Everything free in that order; then, for a row that frees, everything allocated."""
    for seq in list(manager.tables):
        manager.free_seq(seq)
    set_free_order(manager, order)
    if freeing:
        for seq in seqs:
            manager.allocate(seq, TOKENS)


def forks(freeing: bool, scattered: bool) -> Mapping[str, Contender]:
    """Fork a sequence of 512 blocks 16 times, or free the 16 forks."""
    order = shuffled(POOL) if scattered else np.arange(POOL, dtype=np.int32)
    children = [10_000 + i for i in range(NUM_SEQS)]
    contenders = {}
    for name, manager in managers():
        if name != "no-op":
            set_free_order(manager, order)
            manager.allocate(0, TOKENS)
        contenders[name] = Contender(
            "manager.free_seq(child)" if freeing else "manager.fork(0, child)",
            "child in children",
            {"manager": manager, "children": children},
            operations=NUM_SEQS,
            prepare=None if name == "no-op" else partial(refork, manager, freeing, children),
            verify=getattr(manager, "check", None),
        )
    return contenders


def refork(manager: Any, freeing: bool, children: Sequence[Hashable]) -> None:
    """The forks gone; then, for a row that frees them, there again."""
    for child in children:
        if child in manager.tables:
            manager.free_seq(child)
        if freeing:
            manager.fork(0, child)


def truncates(n_tokens: int) -> Mapping[str, Contender]:
    """Take back the last ``n_tokens`` tokens of 256 sequences, as a rejected draft would."""
    seqs = [10_000 + i for i in range(256)]
    contenders = {}
    for name, manager in (
        ("kvcore", BlockManager(8 * POOL, BLOCK_SIZE, rows=len(seqs))),
        ("no-op", load("floor").Floor()),
        ("reference", ReferenceManager(8 * POOL, BLOCK_SIZE)),
    ):
        crowd = None if name == "no-op" else Crowd(manager, seqs, [489] * len(seqs))
        contenders[name] = Contender(
            "manager.truncate(seq, kept)",
            "seq in seqs",
            {"manager": manager, "seqs": seqs, "kept": 489},
            operations=len(seqs),
            prepare=partial(grow, manager, seqs, n_tokens) if crowd else None,
            verify=partial(crowd.expect_grown, 0) if crowd else None,
        )
    return contenders


def grow(manager: Any, seqs: Sequence[Hashable], n_tokens: int) -> None:
    """``n_tokens`` more in every sequence."""
    for seq in seqs:
        manager.append_slots(seq, n_tokens)


class Beams:
    """A beam search in progress: long common history, tails that differ in a block or two."""

    def __init__(self, manager: Any, width: int) -> None:
        self.manager = manager
        self.seqs = list(range(width))
        manager.allocate(0, TOKENS)
        for seq in self.seqs[1:]:
            manager.fork(0, seq)
        for seq in self.seqs:
            manager.append_slots(seq, 20)


def reorders(width: int) -> Mapping[str, Contender]:
    """Reorder alone: each beam becomes its neighbour, so nothing can be skipped."""
    contenders = {}
    for name, manager in managers():
        beams = list(range(width)) if name == "no-op" else Beams(manager, width).seqs
        contenders[name] = Contender(
            "manager.reorder(seqs, parents)",
            "_ in steps",
            {
                "manager": manager,
                "seqs": beams,
                "parents": beams[1:] + beams[:1],
                "steps": range(16),
            },
            operations=16,
            verify=getattr(manager, "check", None),
        )
    return contenders


def beam_steps(width: int) -> Mapping[str, Contender]:
    """A step of beam search: survivors drawn at random, then a token for each beam."""
    draw = random.Random(0)
    plans = [sorted(draw.choices(range(width), k=width)) for _ in range(32)]
    contenders = {}
    for name, manager in managers():
        if name == "no-op":
            continue
        beams = Beams(manager, width)
        is_kvcore = name == "kvcore"
        contenders[name] = Contender(
            "manager.reorder(seqs, parents); manager.append_batch(rows, out)",
            "parents in plans",
            {
                "manager": manager,
                "seqs": beams.seqs,
                "plans": plans,
                "rows": manager.rows(beams.seqs) if is_kvcore else beams.seqs,
                "out": np.empty(width, np.int64) if is_kvcore else [0] * width,
            },
            operations=len(plans),
            prepare=partial(back_to, manager, beams.seqs),
            verify=getattr(manager, "check", None),
        )
    return contenders


def back_to(manager: Any, seqs: Sequence[Hashable]) -> None:
    """Undo the tokens of the last run."""
    for seq in seqs:
        manager.truncate(seq, TOKENS + 20)


def rows() -> Iterator[Row]:
    """All rows of this file."""
    orders: tuple[tuple[bool, str], ...] = ((False, "fresh pool"), (True, "shuffled pool"))
    questions: tuple[tuple[str, Callable[..., Any], bool, Target], ...] = (
        ("allocate", whole, False, ALLOCATE_TARGET),
        ("free", whole, True, ALLOCATE_TARGET),
        ("fork", forks, False, FORK_TARGET),
        ("free the fork of", forks, True, ALLOCATE_TARGET),
    )
    for verb, build, freeing, target in questions:
        for scattered, pool in orders:
            yield Row(f"{verb} 512 blocks, {pool}", partial(build, freeing, scattered), target)
    yield Row("truncate by 4 tokens, same block", partial(truncates, 4))
    yield Row("truncate by 20 tokens, 1 or 2 blocks", partial(truncates, 20))
    for width in (4, 8):
        yield Row(f"reorder of {width} beams, 512 blocks", partial(reorders, width))
        yield Row(f"beam step of {width}: reorder + append_batch", partial(beam_steps, width))
