"""Memory over a long run: ``python tests/soak.py [requests] [seed]``, 10^6 requests by default.

An engine's load at full pool: admissions, decodes, preemptions, forks, rejected drafts,
aborts, pins, cached blocks, and a step always in flight. Nobody reads the changes. At
each sample everything is let go, so that whatever is left then was leaked.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

from kvcore import BlockManager, Counter, Scheduler

STATM = Path("/proc/self/statm")
MIB = 2**20


def resident_bytes() -> int | None:
    """Physical memory of this process, or None where that cannot show a leak.

    That is where the system does not say it, and under AddressSanitizer, which keeps
    freed memory for a while.
    """
    if not STATM.exists() or "libasan" in os.environ.get("LD_PRELOAD", ""):
        return None
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Growth(NamedTuple):
    """One entry a sample. Plain integers, which the garbage collector does not count."""

    resident: list[int]
    objects: list[int]

    def after_warm_up(self) -> tuple[int, int]:
        """Spread of the resident bytes and of the objects, the first fifth left out."""
        first = len(self.objects) // 5
        resident, objects = self.resident[first:], self.objects[first:]
        return max(resident) - min(resident), max(objects) - min(objects)


class Load:
    """Requests without end on a pool that is too small for them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bm = BlockManager(1000, 16)
        self.scheduler = Scheduler(self.bm, watermark_blocks=1)
        self.targets: dict[Hashable, int] = {}
        self.pins: list[int] = []
        self.in_flight = self.bm.fence()
        self.requests = 0
        self.preemptions = 0

    def new_id(self) -> str:
        self.requests += 1
        return f"request {self.requests}"

    def step(self) -> None:
        bm, scheduler, chance = self.bm, self.scheduler, self.chance
        while len(scheduler.waiting) < 8:
            request, prompt = self.new_id(), chance.randint(1, 600)
            self.targets[request] = prompt + chance.randint(1, 40)
            scheduler.add(request, prompt)
        step = scheduler.step()
        self.preemptions += len(step.preempted)
        launched = bm.fence()
        bm.settle(self.in_flight)
        self.in_flight = launched
        for seq in step:
            if bm.length(seq) >= self.targets[seq]:
                self.leave(seq)
        if scheduler.running:
            self.disturb(chance.choice(scheduler.running))

    def disturb(self, seq: Hashable) -> None:
        """Something that happens to one running sequence between two steps."""
        bm, chance = self.bm, self.chance
        event = chance.randrange(6)
        if event == 0:
            child = self.new_id()
            self.scheduler.fork(seq, child)
            self.targets[child] = self.targets[seq]
        elif event == 1 and bm.can_append(seq, 4):
            confirmed = bm.length(seq)
            bm.append_slots(seq, 4)
            bm.truncate(seq, confirmed + chance.randint(0, 4))
        elif event == 2:
            self.leave(seq)
        elif event == 3 and self.scheduler.waiting:
            self.leave(self.scheduler.waiting[-1][0])
        elif event == 4:
            for block in bm.table(seq):
                bm.pool.keep(block)
        else:
            self.pins.append(bm.table(seq)[0])
            bm.pin(self.pins[-1])
            if len(self.pins) > 20:
                bm.unpin(self.pins.pop(0))

    def leave(self, seq: Hashable) -> None:
        assert self.scheduler.finish(seq)
        del self.targets[seq]

    def let_go(self) -> None:
        for seq in [*self.scheduler.running, *(seq for seq, _ in self.scheduler.waiting)]:
            self.leave(seq)
        while self.pins:
            self.bm.unpin(self.pins.pop())
        self.bm.settle(self.in_flight)
        self.bm.check()
        assert len(self.bm) == 0
        assert self.bm.pool.num_used == 0


def soak(requests: int, seed: int, samples: int, report: Callable[[Load], None]) -> Growth:
    """Run that many requests and look at the memory ``samples`` times."""
    load = Load(seed)
    growth = Growth([], [])
    for sample in range(1, samples + 1):
        while load.requests < requests * sample // samples:
            load.step()
        load.let_go()
        gc.collect()
        growth.resident.append(resident_bytes() or 0)
        growth.objects.append(len(gc.get_objects()))
        report(load)
    return growth


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.perf_counter()

    def report(load: Load) -> None:
        counters = load.bm.counters
        print(
            f"{load.requests:>9,} requests  {time.perf_counter() - began:6.1f} s  "
            f"resident {(resident_bytes() or 0) / MIB:.2f} MiB  "
            f"{len(gc.get_objects()):,} objects  {load.preemptions:,} preempted  "
            f"{counters[Counter.COW_COPIES]:,} copied  {counters[Counter.EVICTIONS]:,} evicted  "
            f"{counters[Counter.TOKENS_APPENDED]:,} tokens",
            flush=True,
        )

    growth = soak(requests, seed, max(5, requests // 100_000), report)
    resident, objects = growth.after_warm_up()
    print(f"after warm-up: resident size within {resident / MIB:.2f} MiB, objects within {objects}")


if __name__ == "__main__":
    main()
