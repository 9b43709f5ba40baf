"""Time statements against each other in one process, in interleaved rounds.

A row is a question ("what does ``append_slot`` cost?") with several contenders: kvcore,
a compiled no-op of the same signature, one list append+pop, the pure-Python reference.
Each round times every contender once, in an order that rotates, so a machine that slows
down for a while slows all of them and their ratios stay.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Contender", "Row", "Sample", "Target", "Timing", "measure"]

WARMUP_ROUNDS = 3
"""Rounds thrown away: the interpreter specialises the code, caches and predictors fill."""
LEAST_ROUNDS = 15
MOST_ROUNDS = 400
ROW_SECONDS = 0.6
"""Time after which a row that has its least rounds is done, preparation included."""

FINE_THREAD_TIME = time.get_clock_info("thread_time").resolution <= 1e-8
CLOCK = time.thread_time_ns if FINE_THREAD_TIME else time.perf_counter_ns
"""Processor time where it is fine enough: nothing here waits, and a machine that runs
something else in between has not made kvcore slower. It is slower to read, which the empty
loop takes off again."""

LIST_NS_OF_TARGETS = 50.0
"""The list append+pop beside which the targets in nanoseconds were written.

A target of 1.5 us is a ratio of 30 to it; on a slower machine both sides grow.
"""


def compile_loop(statement: str, each: str, names: Mapping[str, Any]) -> Callable[[], int]:
    """A function that runs ``for {each}: {statement}`` and returns the nanoseconds it took.

    The source is compiled anew for every contender: the interpreter specialises a call to
    the types seen at it, and contenders that shared one code object would spoil that for
    each other. ``names`` become locals.
    """
    source = (
        f"def timed(clock, {', '.join(names)}):\n"
        "    start = clock()\n"
        f"    for {each}:\n"
        f"        {statement}\n"
        "    return clock() - start\n"
    )
    scope: dict[str, Any] = {}
    exec(source, scope)
    timed = scope["timed"]
    return lambda: timed(CLOCK, **names)


class Contender:
    """One statement in a loop.

    Parameters
    ----------
    statement : str
        What is timed.
    each : str
        The head of the loop around it, such as ``"seq in seqs"``. The same loop around
        ``pass`` is timed as well and subtracted.
    names : mapping
        What the two strings refer to.
    operations : int
        Operations in one run of the loop; results are per operation.
    prepare : callable, optional
        Called before every run, outside the clock: puts the state back.
    verify : callable, optional
        Called once after the last run: raises unless the work was really done.
    """

    def __init__(
        self,
        statement: str,
        each: str,
        names: Mapping[str, Any],
        *,
        operations: int,
        prepare: Callable[[], object] | None = None,
        verify: Callable[[], object] | None = None,
    ) -> None:
        self.run = compile_loop(statement, each, names)
        self.run_empty = compile_loop("pass", each, names)
        self.operations = operations
        self.prepare = prepare
        self.verify = verify


@dataclass(frozen=True)
class Target:
    """What a row must reach and aims at, as its ratio to another contender."""

    must: float
    aim: float | None = None
    against: str = "list"

    @classmethod
    def ns(cls, must: float, aim: float | None = None) -> Target:
        """A target stated in nanoseconds where a list append+pop takes 50."""
        scale = 1.0 / LIST_NS_OF_TARGETS
        return cls(must * scale, None if aim is None else aim * scale)

    def verdict(self, ratio: float) -> str:
        """``aim`` or ``must`` when that is reached, ``MISSED`` otherwise."""
        if self.aim is not None and ratio <= self.aim:
            return "aim"
        return "must" if ratio <= self.must else "MISSED"


@dataclass
class Row:
    """A question and how to set up its contenders.

    ``build`` returns them by name, the subject first; it runs only if the row is selected,
    and what it made is dropped when the row is done. The contender named ``list`` is added
    by ``measure``.
    """

    name: str
    build: Callable[[], Mapping[str, Contender]]
    target: Target | None = None


@dataclass(frozen=True)
class Sample:
    """Nanoseconds per operation over the rounds of one contender, loop overhead removed."""

    minimum: float
    median: float
    upper: float
    """The 90th percentile: what the machine's noise does to a tenth of the rounds."""
    rounds: int

    @property
    def noise(self) -> float:
        """How far the median lies above the minimum, as a share of the minimum."""
        return max(0.0, self.median / self.minimum - 1.0)

    @classmethod
    def of(cls, full: list[int], empty: list[int], operations: int) -> Sample:
        """Minimum from minimum, median from median: each statistic loses its own overhead."""
        empty_median = statistics.median(empty)
        ninetieth = statistics.quantiles(full, n=10)[-1]
        return cls(
            (min(full) - min(empty)) / operations,
            (statistics.median(full) - empty_median) / operations,
            (ninetieth - empty_median) / operations,
            len(full),
        )


@dataclass
class Timing:
    """The result of one row: a sample for each contender, the subject first."""

    row: Row
    samples: dict[str, Sample] = field(default_factory=dict)

    @property
    def subject(self) -> Sample:
        """The sample of the first contender."""
        return next(iter(self.samples.values()))

    def ratios(self, other: str) -> tuple[float, float] | None:
        """Subject over ``other``: of the minima and of the medians; None without such."""
        sample = self.samples.get(other)
        if sample is None:
            return None
        return self.subject.minimum / sample.minimum, self.subject.median / sample.median

    @property
    def verdict(self) -> str:
        """Whether the target is reached, judged by the ratio of the minima."""
        if self.row.target is None:
            return ""
        ratios = self.ratios(self.row.target.against)
        return "" if ratios is None else self.row.target.verdict(ratios[0])


def list_append_pop() -> Contender:
    """The yardstick: one ``append`` to an empty list and the ``pop`` that empties it.

    Each pair gets the list's memory and gives it back. On a list that never runs empty it
    takes less than half; the targets were written beside this one, which took 1.5 times
    an empty Python call and takes that still.
    """
    names = {"values": [None] * 500, "items": []}
    return Contender("items.append(value); items.pop()", "value in values", names, operations=500)


def rotations(names: list[str]) -> Iterator[list[str]]:
    """The names for ever, each time beginning with the next of them."""
    while True:
        yield list(names)
        names.append(names.pop(0))


def measure(row: Row) -> Timing:
    """Run one row. The garbage collector is off while anything is timed."""
    contenders = dict(row.build()) | {"list": list_append_pop()}
    full: dict[str, list[int]] = {name: [] for name in contenders}
    empty: dict[str, list[int]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        for done, order in enumerate(rotations(list(contenders))):
            enough = time.perf_counter() - started > ROW_SECONDS
            if done >= WARMUP_ROUNDS + (LEAST_ROUNDS if enough else MOST_ROUNDS):
                break
            for name in order:
                contender = contenders[name]
                if contender.prepare is not None:
                    contender.prepare()
                full[name].append(contender.run())
                empty[name].append(contender.run_empty())
    finally:
        if collecting:
            gc.enable()
    for contender in contenders.values():
        if contender.verify is not None:
            contender.verify()
    return Timing(
        row,
        {
            name: Sample.of(
                full[name][WARMUP_ROUNDS:], empty[name][WARMUP_ROUNDS:], contender.operations
            )
            for name, contender in contenders.items()
        },
    )
