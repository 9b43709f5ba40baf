"""What does a whole ``Scheduler.step()`` cost?"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from typing import Any

from bench.extensions import load
from bench.harness import Contender, Row, Target
from bench.reference import ReferenceManager, ReferenceScheduler
from bench.workload import BLOCK_SIZE, phases
from kvcore import BlockManager
from kvcore.scheduler import Scheduler

__all__ = ["Batch", "rows"]

TOKENS = 480
STEPS = 16

TARGET = Target.ns(must=10_000, aim=5_000)


class Batch:
    """A scheduler with ``count`` sequences running, at every position of a block alike."""

    def __init__(self, manager: Any, scheduler: Any, count: int) -> None:
        self.manager = manager
        self.scheduler = scheduler
        self.seqs: list[Hashable] = [10_000 + i for i in range(count)]
        self.lengths = phases(count, TOKENS)
        self.admit()

    def admit(self) -> None:
        """Queue all and run the step that lets them in."""
        self.scheduler.waiting.extend(zip(self.seqs, self.lengths, strict=True))
        if len(self.scheduler.step()) != len(self.seqs):
            raise AssertionError("not every sequence was admitted")

    def truncate(self) -> None:
        """Every sequence as it was after its first step."""
        for seq, length in zip(self.seqs, self.lengths, strict=True):
            self.manager.truncate(seq, length + 1)

    def readmit(self) -> None:
        """Empty the scheduler, and all anew."""
        for seq in list(self.scheduler.running):
            self.scheduler.finish(seq)
        self.admit()

    def expect_running(self) -> None:
        """Fail unless the last run really was ``STEPS`` steps of all sequences."""
        grown = [self.manager.lens[seq] for seq in self.scheduler.running]
        if sum(grown) != sum(self.lengths) + len(self.lengths) * (1 + STEPS):
            raise AssertionError("the steps did not append a token to every sequence")

    def expect_exchanged(self) -> None:
        """Fail unless as many run as ever."""
        if len(self.scheduler.running) != len(self.seqs) or self.scheduler.waiting:
            raise AssertionError(f"{len(self.scheduler.running)} run, not {len(self.seqs)}")


def batches(count: int) -> dict[str, Batch]:
    """The same running sequences under kvcore and under the reference."""
    blocks = count * (TOKENS // BLOCK_SIZE + 4)
    ours = BlockManager(blocks, BLOCK_SIZE, rows=count)
    reference = ReferenceManager(blocks, BLOCK_SIZE)
    return {
        "kvcore": Batch(ours, Scheduler(ours), count),
        "reference": Batch(reference, ReferenceScheduler(reference), count),
    }


def steady(count: int) -> Mapping[str, Contender]:
    """Nobody comes, nobody goes; each step a sixteenth of the sequences takes a block."""
    by_name = batches(count)
    contenders = {
        name: Contender(
            "scheduler.step()",
            "_ in steps",
            {"scheduler": batch.scheduler, "steps": range(STEPS)},
            operations=STEPS,
            prepare=batch.truncate,
            verify=batch.expect_running,
        )
        for name, batch in by_name.items()
    }
    floor = Contender(
        "scheduler.step()",
        "_ in steps",
        {"scheduler": load("floor").Floor(by_name["kvcore"].seqs), "steps": range(STEPS)},
        operations=STEPS,
    )
    return {"kvcore": contenders["kvcore"], "no-op": floor, "reference": contenders["reference"]}


def exchange(count: int) -> Mapping[str, Contender]:
    """Before each step one request finishes and another one arrives."""
    leaving = [10_000 + i for i in range(0, count, count // STEPS)]
    pairs = [(old, 90_000 + old) for old in leaving]
    return {
        name: Contender(
            "scheduler.finish(old); scheduler.waiting.append((new, n_tokens)); scheduler.step()",
            "old, new in pairs",
            {"scheduler": batch.scheduler, "pairs": pairs, "n_tokens": TOKENS},
            operations=len(pairs),
            prepare=batch.readmit,
            verify=batch.expect_exchanged,
        )
        for name, batch in batches(count).items()
    }


def rows() -> Iterator[Row]:
    """All rows of this file."""
    yield Row("Scheduler.step, 256 running, steady", partial(steady, 256), TARGET)
    yield Row("Scheduler.step, 1024 running, steady", partial(steady, 1024))
    yield Row("finish + add + step, 256 running", partial(exchange, 256))
