"""What does the next token cost: one call a sequence, or one call a batch?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from bench.extensions import load
from bench.harness import Contender, Row, Target
from bench.reference import ReferenceManager
from bench.workload import BLOCK_SIZE, Crowd, phases
from kvcore import BlockManager

__all__ = ["rows"]

POOL = 32_768
NUM_SEQS = 256
BATCH_SEQS = 4_096
"""Sequences that a batch row works on, in as many calls as it takes."""
TOKENS = 480

INSIDE = BLOCK_SIZE - 1
"""Tokens that fit after the first of a block: none of them needs a new block."""

CALL_TARGET = Target(must=1.6, aim=1.3, against="no-op")
BATCH_TARGET = Target.ns(must=5, aim=2)


def int_ids() -> list[Hashable]:
    """Ids past CPython's small integers."""
    return [10_000 + i for i in range(NUM_SEQS)]


def str_ids() -> list[Hashable]:
    """Ids as long as those of a serving engine's requests."""
    return [f"cmpl-{i:032x}-0" for i in range(NUM_SEQS)]


def one_call(ids: Callable[[], list[Hashable]], crossing: bool) -> Mapping[str, Contender]:
    """``append_slot`` over 256 sequences, for 15 tokens inside a block or 16 anywhere."""
    seqs = ids()
    tokens = BLOCK_SIZE if crossing else INSIDE
    lengths = phases(NUM_SEQS, TOKENS) if crossing else [TOKENS + 1] * NUM_SEQS
    contenders = {}
    for name, manager in (
        ("kvcore", BlockManager(POOL, BLOCK_SIZE, rows=NUM_SEQS)),
        ("no-op", load("floor").Floor()),
        ("reference", ReferenceManager(POOL, BLOCK_SIZE)),
    ):
        crowd = None if name == "no-op" else Crowd(manager, seqs, lengths)
        contenders[name] = Contender(
            "manager.append_slot(seq)",
            "seq in calls",
            {"manager": manager, "calls": seqs * tokens},
            operations=tokens * NUM_SEQS,
            prepare=crowd.restore if crowd else None,
            verify=partial(crowd.expect_grown, tokens) if crowd else None,
        )
    return contenders


class Pairs:
    """Parents and children that share a partial tail, forked anew before every run."""

    def __init__(self, manager: Any, count: int) -> None:
        self.manager = manager
        self.pairs = [(2 * i, 2 * i + 1) for i in range(count)]
        self.parents = Crowd(manager, [parent for parent, _ in self.pairs], [TOKENS + 5] * count)
        self.fork()

    def fork(self) -> None:
        for parent, child in self.pairs:
            self.manager.fork(parent, child)

    def restore(self) -> None:
        for _, child in self.pairs:
            self.manager.free_seq(child)
        self.parents.restore()
        self.fork()

    def expect_copied(self) -> None:
        """Fail unless parent and child have tails of their own now."""
        self.parents.expect_grown(1)
        for parent, child in self.pairs:
            if self.manager.tables[parent][-1] == self.manager.tables[child][-1]:
                raise AssertionError(f"{parent} and {child} still share their tail")


def one_call_copying() -> Mapping[str, Contender]:
    """``append_slot`` where every call replaces a shared block; the child's call is not timed."""
    contenders = {
        "no-op": Contender(
            "manager.append_slot(seq)",
            "seq in seqs",
            {"manager": load("floor").Floor(), "seqs": int_ids()},
            operations=NUM_SEQS,
        )
    }
    for name, manager in (
        ("kvcore", BlockManager(POOL, BLOCK_SIZE, rows=2 * NUM_SEQS)),
        ("reference", ReferenceManager(POOL, BLOCK_SIZE)),
    ):
        pairs = Pairs(manager, NUM_SEQS)
        contenders[name] = Contender(
            "manager.append_slot(seq)",
            "seq in seqs",
            {"manager": manager, "seqs": [parent for parent, _ in pairs.pairs]},
            operations=NUM_SEQS,
            prepare=pairs.restore,
            verify=pairs.expect_copied,
        )
    return {name: contenders[name] for name in ("kvcore", "no-op", "reference")}


def batches(
    seqs: list[Any], size: int, manager: BlockManager, reference: ReferenceManager
) -> dict[str, tuple[Any, list[Any], Any]]:
    """Each contender's manager, its batches of ``size``, and its output array."""
    parts = [seqs[i : i + size] for i in range(0, len(seqs), size)]
    rows = [manager.rows(part) for part in parts]
    out = np.empty(size, np.int64)
    return {
        "kvcore": (manager, rows, out),
        "no-op": (load("floor").Floor(), rows, out),
        "reference": (reference, parts, [0] * size),
    }


def batch(size: int, crossing: bool) -> Mapping[str, Contender]:
    """``append_batch`` of ``size`` rows, over 4,096 sequences in all."""
    seqs = list(range(BATCH_SEQS))
    tokens = BLOCK_SIZE if crossing else INSIDE
    lengths = phases(BATCH_SEQS, 64) if crossing else [64 + 1] * BATCH_SEQS
    manager = BlockManager(POOL, BLOCK_SIZE, rows=BATCH_SEQS)
    reference = ReferenceManager(POOL, BLOCK_SIZE)
    crowds = {
        "kvcore": Crowd(manager, seqs, lengths),
        "reference": Crowd(reference, seqs, lengths),
    }
    contenders = {}
    for name, (target, parts, out) in batches(seqs, size, manager, reference).items():
        crowd = crowds.get(name)
        contenders[name] = Contender(
            "manager.append_batch(part, out)",
            "part in parts",
            {"manager": target, "parts": parts * tokens, "out": out},
            operations=tokens * BATCH_SEQS,
            prepare=crowd.restore if crowd else None,
            verify=partial(crowd.expect_grown, tokens) if crowd else None,
        )
    return contenders


def batch_copying(size: int) -> Mapping[str, Contender]:
    """``append_batch`` where every second row replaces a shared block."""
    seqs = list(range(BATCH_SEQS))
    manager = BlockManager(POOL * 8, BLOCK_SIZE, rows=BATCH_SEQS)
    reference = ReferenceManager(POOL * 8, BLOCK_SIZE)
    pairs = {
        "kvcore": Pairs(manager, BATCH_SEQS // 2),
        "reference": Pairs(reference, BATCH_SEQS // 2),
    }
    contenders = {}
    for name, (target, parts, out) in batches(seqs, size, manager, reference).items():
        pair = pairs.get(name)
        contenders[name] = Contender(
            "manager.append_batch(part, out)",
            "part in parts",
            {"manager": target, "parts": parts, "out": out},
            operations=BATCH_SEQS,
            prepare=pair.restore if pair else None,
            verify=pair.expect_copied if pair else None,
        )
    return contenders


def chunk() -> Mapping[str, Contender]:
    """``append_slots`` of 512 tokens: a chunk of a prompt."""
    seqs = int_ids()[:32]
    contenders = {}
    for name, manager in (
        ("kvcore", BlockManager(POOL, BLOCK_SIZE, columns=128)),
        ("no-op", load("floor").Floor()),
        ("reference", ReferenceManager(POOL, BLOCK_SIZE)),
    ):
        crowd = None if name == "no-op" else Crowd(manager, seqs, phases(len(seqs), TOKENS))
        contenders[name] = Contender(
            "manager.append_slots(seq, 512)",
            "seq in seqs",
            {"manager": manager, "seqs": seqs},
            operations=len(seqs),
            prepare=crowd.restore if crowd else None,
            verify=partial(crowd.expect_grown, 512) if crowd else None,
        )
    return contenders


def changes() -> Mapping[str, Contender]:
    """``drain_changes`` once a step of 256 running, a sixteenth of which took a block."""
    seqs = list(range(NUM_SEQS))
    managers = [BlockManager(POOL, BLOCK_SIZE, rows=NUM_SEQS) for _ in range(8)]
    for manager in managers:
        Crowd(manager, seqs, phases(NUM_SEQS, TOKENS))
        manager.drain_changes()
    batch_rows = managers[0].rows(seqs)
    out = np.empty(NUM_SEQS, np.int64)

    def one_step() -> None:
        for manager in managers:
            manager.append_batch(batch_rows, out)

    return {
        name: Contender(
            "manager.drain_changes()",
            "manager in managers",
            {"managers": targets},
            operations=len(targets),
            prepare=one_step if name == "kvcore" else None,
        )
        for name, targets in (("kvcore", managers), ("no-op", [load("floor").Floor()] * 8))
    }


def rows() -> Iterator[Row]:
    """All rows of this file."""
    for crossing, where in ((False, "inside a block"), (True, "16 tokens, 1 new block")):
        for ids, kind in ((int_ids, "int"), (str_ids, "str")):
            yield Row(
                f"append_slot, {kind} ids, {where}", partial(one_call, ids, crossing), CALL_TARGET
            )
    yield Row("append_slot, every call copies on write", one_call_copying)
    for crossing, where in ((False, "inside a block"), (True, "16 tokens, 1 new block")):
        for size in (1, 32, 256, 1024, 4096):
            yield Row(
                f"append_batch of {size}, a row, {where}",
                partial(batch, size, crossing),
                BATCH_TARGET if size >= 256 else None,
            )
    yield Row("append_batch of 256, a row, half copy on write", partial(batch_copying, 256))
    yield Row("append_slots of 512 tokens", chunk)
    yield Row("drain_changes, 256 running", changes)
