"""Small systems run until nothing is left to do, random ones and all of a family.

Every plan is carried out and every promise looked at after each call; see ``progress.py``.
More seeds: ``KVCORE_PROGRESS_SEEDS=20000``, or ``python tests/test_progress.py FROM TO``.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from progress import Engine

from kvcore import (
    FCFS,
    BlockManager,
    CheapestToResume,
    FairShare,
    LowestPriority,
    Newest,
    PredictedPeak,
    Priority,
    Request,
    ResumeCost,
    Scheduler,
    SharedSlots,
    ShortestJob,
    Slots,
    ToCompletion,
    Victim,
)

SEEDS = int(os.environ.get("KVCORE_PROGRESS_SEEDS", "2000"))


class AnyVictim(Victim):
    """Names whom it likes, also twice, and some who do not run."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.pushes = 20  # a policy that pushes for ever has no end

    def order(self, view: Any) -> Iterable[Request]:
        ghost = Request("ghost", 1)
        named = [*view.requests, ghost] * 2
        self.chance.shuffle(named)
        return named

    def for_admission(self, request: Request, view: Any) -> Iterable[Request]:
        self.pushes -= 1
        return self.order(view) if self.pushes >= 0 and self.chance.random() < 0.2 else ()


class NoVictim(Victim):
    """Lets nobody yield."""

    def order(self, view: Any) -> Iterable[Request]:
        return ()


class System:
    """What to run, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        size = chance.randint(1, 4)
        blocks = chance.randint(2, 16)
        caching = chance.random() < 0.5
        drafts = chance.choice([0, 0, 0, 1, 3])
        in_flight = 0 if drafts else chance.choice([0, 0, 1, 2])
        is_tight = self.is_tight = chance.random() < 0.4  # blocks run out, so that much is swapped
        if is_tight:
            blocks = chance.randint(3, 8)
        has_host = is_tight or chance.random() < 0.4
        host = BlockManager(chance.randint(1, 12), size) if has_host else None
        window = chance.choice([None] * (9 if is_tight else 3) + [1, 2, 5])
        budget = chance.randint(3, 20) * (1 + drafts)
        self.victim = chance.choice([Newest, LowestPriority, CheapestToResume, AnyVictim, NoVictim])
        victims = {AnyVictim: (chance,), CheapestToResume: (ResumeCost(bytes_per_block=1000),)}
        watermark = 0 if is_tight else chance.randint(0, min(3, blocks - 1))
        admission = None
        if not is_tight:
            admission = chance.choice([None, ToCompletion(), PredictedPeak(4)])
        orders = [FCFS(), Priority(), Priority(ageing=3), ShortestJob(), FairShare()]
        resources = chance.choice(
            [
                (),
                (),
                (Slots("state", chance.randint(3, 6)),),
                (SharedSlots("a", 1, lambda r: r.tenant),),
            ]
        )
        swap = chance.choice([None, lambda candidate: chance.random() < 0.5]) if host else None
        self.settings = {
            "blocks": blocks, "size": size, "caching": caching, "drafts": drafts,
            "in_flight": in_flight, "host": host and host.num_blocks, "window": window,
            "budget": budget, "victim": self.victim.__name__, "admission": admission,
        }  # fmt: skip
        self.bm = BlockManager(blocks, size, prefix_caching=caching, rows=1, columns=1)
        self.scheduler = Scheduler(
            self.bm,
            watermark,
            token_budget=budget,
            max_running=None if is_tight else chance.choice([None, 3]),
            max_partial_prefills=chance.choice([1, 2, 4]),
            wait_for_prefix=chance.random() < 0.8,
            order=chance.choice(orders),
            victim=self.victim(*victims.get(self.victim, ())),
            admission=admission,
            resources=resources,
            draft_tokens=drafts,
            in_flight=in_flight,
            window=window,
            sink_tokens=chance.choice([0, 0, 1, 3]) if window else 0,
            host=host,
            swap=swap,
        )
        self.engine = Engine(self.scheduler, chance)
        self.engine.reject_drafts = chance.choice([0.0, 0.5, 1.0])
        self.engine.fail_swaps = chance.choice([0.0, 0.2, 0.6])
        self.engine.knows_tokens = chance.random() < 0.8
        self.abort_rate = chance.choice([0.0, 0.02, 0.1])
        self.finish_rate = chance.choice([0.0, 0.05])
        self.holds: list[tuple[int, int]] = []

    def run(self) -> Engine:
        engine, chance = self.engine, self.chance
        to_come, added, since = chance.randint(1, 12 if self.is_tight else 8), 0, 0
        arrival_rate = 0.8 if self.is_tight else 0.4
        steps = 0
        while to_come or not engine.is_quiet:
            steps += 1
            assert steps < 1500, "no end"
            if to_come and chance.random() < arrival_rate:
                to_come, added = to_come - 1, added + 1
                widths = [0, 0, 0, 0, 0, 1, 2] if self.is_tight else [0, 0, 0, 1, 2]
                siblings = tuple(f"{added}.{n}" for n in range(chance.choice(widths)))
                longest = min(9, self.bm.num_blocks * self.bm.block_size // 2)
                prompt = [0] * chance.randint(1, longest)
                if chance.random() < 0.3:
                    prompt[-1] = 1
                engine.add(
                    str(added), prompt, chance.choice([0, 1, 2, 3, 5, 8]), siblings,
                    priority=chance.randint(0, 2), tenant=chance.choice("ab"),
                )  # fmt: skip
            self.hold_outside(steps)
            if len(engine.flights) <= self.scheduler.options.in_flight:
                before = engine.prefilled + engine.sampled
                engine.plan()
                if chance.random() < 0.3:
                    engine.execute()
                since = (
                    0 if engine.prefilled + engine.sampled > before or engine.flights else since + 1
                )
            live = [one.seq for one in engine.sequences.values() if one.ended is None]
            if live and chance.random() < self.abort_rate:
                engine.abort(chance.choice(live))
            full = len(engine.flights) > self.scheduler.options.in_flight
            if engine.flights and (full or chance.random() < 0.6):
                engine.report(self.finish_rate)
            is_stuck = self.victim is NoVictim and since > 25
            if is_stuck and self.scheduler.running:
                engine.abort(self.scheduler.running[-1])  # the policy's own deadlock
        for block, _ in self.holds:
            self.bm.unpin(block)
        engine.check_end()
        return engine

    def hold_outside(self, now: int) -> None:
        """Hold some blocks in use for some steps, as a transfer does."""
        for hold in [hold for hold in self.holds if hold[1] <= now]:
            self.bm.unpin(hold[0])
            self.holds.remove(hold)
        if self.chance.random() < 0.05:
            used = [block for block in range(self.bm.num_blocks) if self.bm.ref[block] > 0]
            if used:
                block = self.chance.choice(used)
                self.bm.pin(block)
                self.holds.append((block, now + self.chance.randint(1, 8)))


def run(seed: int) -> Engine:
    system = System(seed)
    try:
        return system.run()
    except Exception as error:
        error.add_note(f"seed {seed}: {system.settings}")
        raise


@pytest.mark.parametrize("part", range(8))
def test_random_systems_come_to_rest(part: int) -> None:
    for seed in range(part, SEEDS, 8):
        run(seed)


def test_the_same_seed_gives_the_same_plans() -> None:
    for seed in range(60):
        assert run(seed).log == run(seed).log


def run_small(
    blocks: int, size: int, requests: tuple[tuple[int, int], ...], abort: tuple[int, int] | None
) -> Engine:
    """Run requests ``(prompt, limit)``, all there at first; abort one before a given call."""
    bm = BlockManager(blocks, size, rows=1, columns=1)
    engine = Engine(Scheduler(bm, 0, token_budget=3), random.Random(0))
    for seq, (prompt, limit) in enumerate(requests):
        engine.add(seq, [0] * prompt, limit)
    calls = 0
    # A token at least in each step, and each at most once a life; Newest: whoever is
    # preempted has somebody older beside it, who ends before it can be preempted often.
    most = 4 + 2 * sum(prompt + limit for prompt, limit in requests) * len(requests)
    while not engine.is_quiet:
        assert calls < 2 * most, "no end"
        if abort is not None and calls == abort[0]:
            one = engine.sequences.get(abort[1])
            if one is not None and one.ended is None:
                engine.abort(abort[1])
        if engine.flights:
            engine.report()
        else:
            engine.plan()
        calls += 1
    engine.check_end()
    for one in engine.sequences.values():
        assert one.preemptions <= sum(limit for _, limit in requests)
    return engine


def test_all_small_systems_come_to_rest() -> None:
    """Up to three requests of any size up to 3, each aborted at some of its moments."""
    shapes = list(itertools.product([1, 3], [1, 3]))
    for blocks, size in itertools.product(range(2, 6), [1, 2]):
        for number in (1, 2, 3):
            for requests in itertools.product(shapes, repeat=number):
                run_small(blocks, size, requests, None)
                if number < 3:
                    for abort in itertools.product(range(1, 12), range(number)):
                        run_small(blocks, size, requests, abort)


if __name__ == "__main__":
    import traceback

    totals: Counter[str] = Counter()
    failures: dict[str, list[int]] = {}
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            totals.update(run(seed).scheduler.counters.as_dict())
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{type(error).__name__} {frame.name}:{frame.lineno} {str(error)[:60]}"
            failures.setdefault(name, []).append(seed)
    print(dict(totals))
    for name, seeds in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(len(seeds), name, seeds[:5])
