"""Engine steps of the scheduler and their plain-Python twin, call by call.

Random systems, all short sequences of calls in tiny pools, and a state machine. After every
call: the same step, the same queues and reasons, the same blocks in the same order.
More: ``KVCORE_TWIN_SEEDS=20000``, ``KVCORE_TWIN_DEPTH=6``, ``HYPOTHESIS_PROFILE=nightly``.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from reference_engine_scheduler import ReferenceEngineScheduler, ReferenceEngineStep
from reference_model import ReferenceBlockManager
from state import Uids, outcome, prefix_snapshot, snapshot

from kvcore import BlockManager, RequestRefused, Resumed, Scheduler, Step

SEEDS = int(os.environ.get("KVCORE_TWIN_SEEDS", "600"))
DEPTH = int(os.environ.get("KVCORE_TWIN_DEPTH", "3"))


class Both:
    """A scheduler and its twin, driven by the same calls and compared after each."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark: int,
        caching: bool,
        host_blocks: int = 0,
        **options: Any,
    ) -> None:
        self.core = BlockManager(num_blocks, block_size, rows=1, columns=1, prefix_caching=caching)
        self.model = ReferenceBlockManager(num_blocks, block_size, prefix_caching=caching)
        self.hosts: tuple[Any, ...] = (None, None)
        if host_blocks:
            self.hosts = (
                BlockManager(host_blocks, block_size),
                ReferenceBlockManager(host_blocks, block_size),
            )
        core_host, model_host = self.hosts
        self.scheduler = Scheduler(self.core, watermark, host=core_host, **options)
        self.twin = ReferenceEngineScheduler(self.model, watermark, host=model_host, **options)
        self.flights: list[tuple[Step, ReferenceEngineStep]] = []
        self.uids = Uids()
        self.born = 0
        self.is_compared = True

    # --- Calls -------------------------------------------------------------------------

    def add(
        self, tokens: list[int], max_tokens: int | None = None, siblings: int = 0, unknown: int = 0
    ) -> Hashable:
        """A request whose last ``unknown`` tokens nobody tells."""
        self.born += 1
        name = self.born
        others = [f"{name}.{number}" for number in range(siblings)]
        n_tokens = len(tokens) + unknown
        refused = self.twin.add(
            name, n_tokens, tokens=tokens, max_tokens=max_tokens, siblings=others
        )
        more = {"tokens": tokens, "max_tokens": max_tokens, "siblings": others}
        if refused is None:
            self.scheduler.add(name, n_tokens, **more)
        else:
            with pytest.raises(RequestRefused, match=f"{refused[1]} .* can have {refused[2]}"):
                self.scheduler.add(name, n_tokens, **more)
        self.compare()
        return name

    def put(self, n_tokens: int) -> None:
        """A pair goes into the queue unseen."""
        self.born += 1
        self.twin.put(self.born, n_tokens)
        self.scheduler.waiting.append((self.born, n_tokens))
        self.compare()

    def end(self, name: Hashable, how: str) -> None:
        assert getattr(self.scheduler, how)(name) == getattr(self.twin, how)(name)
        self.compare()

    def managers(self, call: Callable[[Any], Any]) -> tuple[Any, ...]:
        """What somebody outside does with the blocks."""
        expected = outcome(call, self.model)
        assert outcome(call, self.core) == expected
        self.compare()
        return expected

    @property
    def may_plan(self) -> bool:
        return len(self.twin.outstanding) <= self.twin.in_flight

    @property
    def is_quiet(self) -> bool:
        return not (self.flights or self.names())

    def plan(self) -> Step:
        expected, step = self.twin.step(), self.scheduler.step()
        self.compare_steps(step, expected)
        if expected.is_reported:
            assert self.scheduler.update(step) == []
        else:
            self.flights.append((step, expected))
        self.compare()
        return step

    def report(
        self,
        choose: Callable[[int], int],
        *,
        tells: bool = True,
        finished: tuple[Hashable, ...] = (),
        parents: dict[Hashable, Hashable] | None = None,
        failed: tuple[Hashable, ...] = (),
    ) -> list[Hashable]:
        """``choose(n)`` is a number below n: of drafts rejected, and tokens sampled."""
        step, expected = self.flights.pop(0)
        rejected = [choose(count) for count in expected.counts]
        number = sum(expected.counts) - sum(rejected)
        number += len(expected.sampled) - len(expected.decoded)
        tokens = [choose(3) for _ in range(number)] if tells else None
        drafts = self.twin.each > 1
        ended = self.twin.update(
            expected,
            tokens,
            finished=finished,
            rejected=rejected,
            parents=parents,
            swap_failed=failed,
        )
        got = self.scheduler.update(
            step,
            None if tokens is None else np.array(tokens, np.int64),
            finished=finished,
            rejected=np.array(rejected, np.int64) if drafts else None,
            parents=parents,
            swap_failed=failed,
        )
        assert got == ended
        assert step.lengths.tolist() == expected.lengths
        assert self.scheduler.update(step) == []
        self.compare()
        return ended

    def names(self) -> list[Hashable]:
        """Everybody of whom anything is left."""
        names = [*self.twin.running, *self.twin.swapped]
        names += [life.name for request in self.twin.going_out for life in request.members]
        for life in self.twin.lives:
            names += life.request.siblings if life.in_prompt else ()
        for request in self.twin.queue:
            names += request.names
        return names

    def names_to_take(self) -> list[Hashable]:
        """Of those that have no blocks yet; somebody outside may take one."""
        unborn = [life.request.siblings for life in self.twin.lives if life.in_prompt]
        waiting = [request.names for request in self.twin.queue]
        return [name for names in (*unborn, *waiting) for name in names]

    # --- Comparison --------------------------------------------------------------------

    def compare_steps(self, step: Step, expected: ReferenceEngineStep) -> None:
        def names(lives: list[Any]) -> list[Hashable]:
            return [life.name for life in lives]

        assert step == names(expected.decoded)
        assert step.number == expected.number
        assert step.slots.tolist() == expected.slots
        assert step.lengths.tolist() == expected.lengths
        if self.twin.each > 1:
            assert step.counts.tolist() == expected.counts
        else:
            assert step.counts is None
        assert step.rows.tolist() == [self.core.row(seq) for seq in step]
        assert step.prefills == [(life.name, at, count) for life, at, count in expected.chunks]
        assert step.completed == names(expected.completed)
        assert step.forks == [(one.name, other.name) for one, other in expected.forks]
        assert step.sampled == names(expected.sampled)
        copies = [tuple(pair) for pair in step.copies.tolist()]
        assert sorted(copies) == sorted(expected.copies)
        assert step.preempted == expected.preempted
        assert step.swapped_out == expected.swapped_out
        assert step.swapped_in == expected.swapped_in
        assert sorted(map(tuple, step.swap_out.tolist())) == sorted(expected.swap_out)
        assert sorted(map(tuple, step.swap_in.tolist())) == sorted(expected.swap_in)
        assert step.stalled == names(expected.stalled)
        assert step.rejected == expected.rejected
        stats = step.stats
        assert (stats.running, stats.waiting) == (len(self.twin.lives), len(self.twin.queue))

    def compare(self) -> None:
        if not self.is_compared:
            return
        scheduler, twin = self.scheduler, self.twin
        assert list(scheduler.waiting) == twin.waiting
        for request, expected in zip(scheduler.waiting, twin.queue, strict=True):
            ids = [request.seq, *(one.seq for one in getattr(request, "others", ()))]
            assert [*ids, *request.siblings] == expected.names
            assert isinstance(request, Resumed) == expected.came_back
        assert scheduler.running == twin.running
        assert scheduler.swapped == twin.swapped
        assert scheduler.counters.as_dict() == twin.counters
        for seq in [*(name for name, _ in twin.waiting[:2]), *twin.running[-2:], *twin.swapped]:
            assert self.why(scheduler, seq) == self.why(twin, seq)
        assert snapshot(self.core) == snapshot(self.model)
        if self.twin.host is not None:
            core_host, model_host = self.hosts
            assert snapshot(core_host) == snapshot(model_host)
        if self.model.prefix_caching:
            prefix_snapshot(self.core, self.model, self.uids)

    @staticmethod
    def why(scheduler: Any, seq: Hashable) -> Any:
        try:
            return scheduler.why(seq)
        except KeyError:
            return None


class RandomSystem:
    """What to run, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        drafts = chance.choice([0, 0, 0, 1, 2, 4])
        is_tight = chance.random() < 0.7  # so that somebody yields all the time
        blocks = chance.randint(3, 8) if is_tight else chance.randint(2, 24)
        in_flight = 0 if drafts else chance.choice([0, 0, 1, 2])
        window = chance.choice([None, None, None, 1, 2, 5])
        self.settings: dict[str, Any] = {
            "num_blocks": blocks,
            "block_size": chance.randint(1, 3 if is_tight else 4),
            "watermark": chance.choice([0, 0, 1]) if is_tight else chance.randint(0, 2) % blocks,
            "caching": chance.random() < 0.5,
            "token_budget": chance.choice([3, 4, 6, 10, 20]) * (1 + drafts),
            "max_running": None if is_tight else chance.choice([None, 1, 2]),
            "wait_for_prefix": chance.random() < 0.8,
            "max_partial_prefills": chance.choice([1, 2, 4]),
            "draft_tokens": drafts,
            "in_flight": in_flight,
            "window": window,
            "host_blocks": chance.choice([0, 0, 0, 3, 12, 12]),
            "sink_tokens": chance.choice([0, 1, 3]) if window else 0,
        }
        tokens = blocks * self.settings["block_size"]
        self.most_tokens = tokens // 2 if is_tight else tokens + 1
        self.siblings = [1, 1, 2] if chance.random() < 0.2 else [0, 0, 0, 0, 1, 2]
        self.prompts = [1, 2, 3] if chance.random() < 0.5 else [1, 2, 3, 5, 9, 14]
        self.arrival_rate = 0.8 if is_tight else 0.3
        self.both = Both(**self.settings)
        self.held: list[int] = []
        self.taken: list[Hashable] = []  # names, and a block each
        self.abort_rate = chance.choice([0, 0, 0, 0.03, 0.15])
        self.finish_rate = chance.choice([0, 0, 0.1])
        self.hold_rate = chance.choice([0, 0, 0, 0.05, 0.3])
        self.move_rate = chance.choice([0, 0.3])
        self.fail_rate = chance.choice([0, 0, 0.3])
        self.tells = chance.random() < 0.9

    def run(self) -> None:
        both, chance = self.both, self.chance
        to_come = chance.randint(2, 14)
        for _ in range(100):
            if to_come and chance.random() < self.arrival_rate:
                to_come -= 1
                self.add()
            self.hold()
            if both.may_plan and (not both.flights or chance.random() < 0.6):
                both.plan()
            if chance.random() < self.abort_rate and both.names():
                self.end(chance.choice(both.names()))
            if both.flights and (not both.may_plan or chance.random() < 0.5):
                self.report()
            if not to_come and both.is_quiet:
                break

    def add(self) -> None:
        chance, both = self.chance, self.both
        n_tokens = min(chance.choice(self.prompts), self.most_tokens)
        if chance.random() < 0.03:
            both.put(chance.choice([0, n_tokens, 2 * self.most_tokens]))
            return
        tokens = [0] * n_tokens
        if chance.random() < 0.5:
            tokens[chance.randrange(n_tokens)] = 1
        unknown = chance.choice([0, 0, 0, 0, 0, 1, 4])
        siblings = chance.choice(self.siblings)
        limit = chance.choice([None, 0, 1, 2, 5, *[self.most_tokens] * 5])
        both.add(tokens, limit, siblings, unknown)

    def end(self, name: Hashable) -> None:
        self.both.end(name, self.chance.choice(["abort", "finish"]))

    def report(self) -> None:
        both, chance = self.both, self.chance
        finished = [
            life.name
            for life in both.flights[0][1].sampled
            if chance.random() < self.finish_rate or both.twin.number > 60
        ]
        step = both.flights[0][1]
        moving = [*step.swapped_out, *step.swapped_in]
        both.report(
            chance.randrange,
            tells=self.tells,
            finished=tuple(finished),
            failed=tuple(name for name in moving if chance.random() < self.fail_rate),
            parents={} if both.twin.in_flight else self.parents(),
        )

    def parents(self) -> dict[Hashable, Hashable]:
        """Some beams go on from others."""
        parents = {}
        for life in self.both.flights[0][1].decoded:
            others = [one for one in life.request.members if not one.in_prompt]
            if life in self.both.twin.lives and self.chance.random() < self.move_rate:
                parents[life.name] = self.chance.choice(others).name
        return parents

    def hold(self) -> None:
        """Somebody outside holds blocks for a while, free ones and those of sequences."""
        both, chance = self.both, self.chance
        if self.held and chance.random() < 0.35:
            block = self.held.pop(chance.randrange(len(self.held)))
            both.managers(lambda manager: manager.unpin(block))
        if chance.random() < self.hold_rate:
            used = [block for block, count in enumerate(both.model.ref) if count]
            if used and chance.random() < 0.5:
                self.held.append(chance.choice(used))
                both.managers(lambda manager: manager.pin(self.held[-1]))
            elif both.model.num_available:
                self.held.append(both.managers(lambda manager: manager.pool.take())[1])
        names = both.names_to_take()
        if names and chance.random() < self.hold_rate / 5:
            name = chance.choice(names)
            if both.managers(lambda manager: manager.allocate(name, 1))[0] == "returned":
                self.taken.append(name)
        elif self.taken and chance.random() < 0.2:
            name = self.taken.pop()
            both.managers(lambda manager: manager.free_seq(name))


def run(seed: int) -> None:
    system = RandomSystem(seed)
    try:
        system.run()
    except Exception as error:
        error.add_note(f"seed {seed}: {system.settings}")
        raise


@pytest.mark.parametrize("part", range(8))
def test_random_systems(part: int) -> None:
    for seed in range(part, SEEDS, 8):
        run(seed)


# --- All short sequences of calls ------------------------------------------------------

CALLS = ("add", "add longer", "add a group", "step", "abort the newest", "finish the oldest")
CALLS_IN_FLIGHT = ("add longer", "add a group", "plan", "report", "abort the newest")


def call(both: Both, name: str) -> bool:
    """False if there is nothing that it could be done to."""
    size = both.core.block_size
    if name == "add":
        both.add([0], 4)
    elif name == "add longer":
        both.add([0] * (size + 1), 2)
    elif name == "add a group":
        both.add([0] * size, 3, siblings=1)
    elif name in ("plan", "step"):
        if not both.may_plan:
            return False
        both.plan()
        if name == "step" and both.flights:
            both.report(lambda _: 0)
    elif name == "report":
        if not both.flights:
            return False
        both.report(lambda _: 0)
    else:
        names = both.names()
        if not names:
            return False
        is_abort = name == "abort the newest"
        both.end(names[-1] if is_abort else names[0], "abort" if is_abort else "finish")
    return True


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("with_", ["nothing", "caching", "host"])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(2, 2), (3, 1), (4, 2)])
def test_all_short_sequences(num_blocks: int, block_size: int, with_: str, in_flight: int) -> None:
    """Two requests run; then every sequence of calls, and a few steps for what it led to."""
    done: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ("",)
    for calls in itertools.product(CALLS_IN_FLIGHT if in_flight else CALLS, repeat=DEPTH):
        if calls[: len(impossible)] == impossible:
            continue
        both = Both(
            num_blocks,
            block_size,
            0,
            with_ == "caching",
            host_blocks=2 if with_ == "host" else 0,
            token_budget=3,
            in_flight=in_flight,
        )
        both.is_compared = False
        for first in ("add", "add longer", "plan", "report", "plan", "report"):
            call(both, first)
        for place, name in enumerate(calls):
            # What it has in common with the one before has been compared.
            both.is_compared = both.is_compared or calls[: place + 1] != done[: place + 1]
            if not call(both, name):
                impossible = calls[: place + 1]
                break
        for _ in range(4):
            if both.may_plan:
                both.plan()
            if both.flights:
                both.report(lambda _: 0)
        done = calls


# --- A state machine -------------------------------------------------------------------

number = st.integers(0, 1_000)


class EngineStepMachine(RuleBasedStateMachine):
    """Few rules, each with many ways, so that steps are what happens most."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        watermark=st.sampled_from([0, 0, 1]),
        caching=st.booleans(),
        budget=st.sampled_from([2, 3, 5, 8, 16]),
        ahead=st.sampled_from([(0, 0), (0, 0), (1, 0), (2, 0), (0, 1), (0, 3)]),
        max_running=st.sampled_from([None, None, None, 1, 2]),
        partial=st.integers(1, 3),
        host_blocks=st.sampled_from([0, 0, 2, 8]),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        watermark: int,
        caching: bool,
        budget: int,
        ahead: tuple[int, int],
        max_running: int | None,
        partial: int,
        host_blocks: int,
    ) -> None:
        in_flight, drafts = ahead
        self.both = Both(
            num_blocks,
            block_size,
            watermark,
            caching,
            host_blocks,
            token_budget=budget * (1 + drafts),
            max_running=max_running,
            max_partial_prefills=partial,
            draft_tokens=drafts,
            in_flight=in_flight,
        )
        self.outsiders: list[Hashable] = []
        for _ in range(3):
            self.both.add([0], 6)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        limit=st.one_of(st.none(), st.integers(0, 8)),
        siblings=st.sampled_from([0, 0, 1, 2]),
        unknown=st.sampled_from([0, 0, 0, 2]),
    )
    def add(self, tokens: list[int], limit: int | None, siblings: int, unknown: int) -> None:
        self.both.add(tokens, limit, siblings, unknown)

    @rule(n_tokens=st.sampled_from([0, 1, 5, 1000]))
    def put(self, n_tokens: int) -> None:
        self.both.put(n_tokens)

    @rule(who=number, how=st.sampled_from(["finish", "abort"]))
    def end(self, who: int, how: str) -> None:
        names = [*self.both.names(), "nobody"]
        name = names[who % len(names)]
        self.both.end(name, how)

    @rule(choices=st.lists(number, min_size=4, max_size=4), times=st.integers(1, 6))
    def steps(self, choices: list[int], times: int) -> None:
        for _ in range(times):
            self.plan()
            self.report(choices=choices, tells=True, ends=False)

    @rule()
    def plan(self) -> None:
        if self.both.may_plan:
            self.both.plan()

    @rule(
        choices=st.lists(number, min_size=1, max_size=6),
        tells=st.sampled_from([True, True, True, False]),
        ends=st.booleans(),
    )
    def report(self, choices: list[int], tells: bool, ends: bool) -> None:
        if not self.both.flights:
            return
        drawn = itertools.cycle(choices)
        step = self.both.flights[0][1]
        sampled = [life.name for life in step.sampled]
        moving = [*step.swapped_out, *step.swapped_in]
        self.both.report(
            lambda below: next(drawn) % below,
            tells=tells,
            finished=tuple(sampled[: choices[0] % 2]) if ends else (),
            failed=tuple(moving[: choices[-1] % 2]) if ends else (),
        )

    @rule(
        act=st.sampled_from(["come", "take a name", "go", "pin", "unpin", "evict", "reset"]),
        size=number,
    )
    def outside(self, act: str, size: int) -> None:
        both = self.both
        block = size % both.model.num_blocks
        names = both.names_to_take() if act == "take a name" else []
        if act == "come" or names:
            name = names[size % len(names)] if names else f"outsider {size}"
            done = both.managers(lambda manager: manager.allocate(name, size % 7))
            if done[0] == "returned":
                self.outsiders.append(name)
        elif act == "go" and self.outsiders:
            name = self.outsiders.pop()
            both.managers(lambda manager: manager.free_seq(name))
        elif act in ("pin", "unpin"):
            both.managers(lambda manager: getattr(manager, act)(block))
        elif both.model.prefix_caching:
            both.managers(
                lambda manager: manager.evict(size % 3) if act == "evict" else manager.reset()
            )


TestEngineSteps = EngineStepMachine.TestCase
