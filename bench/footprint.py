"""What does kvcore weigh: bytes a block, bytes a sequence, milliseconds to import?

Each figure comes from fresh processes, so that nothing done before has a part in it.
Memory is resident memory once every cell was written: a page that nobody touches is free.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kvcore
from bench.extensions import UnavailableError

__all__ = ["Figure", "Measured", "figures"]

IMPORTS = 21
BLOCKS = 4_000_000
SEQUENCES = 100_000
FINDABLE = 1_000_448
"""A multiple of the 512 blocks of a prompt."""
COLUMNS = 80

IMPORT = """
import time
import numpy
start, start_cpu = time.perf_counter_ns(), time.process_time_ns()
import kvcore
print(time.perf_counter_ns() - start, time.process_time_ns() - start_cpu)
"""

RESIDENT = """
import os
from kvcore import BlockManager, BlockPool

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""

# Every block goes through the tables of a manager and back, so every cell is written. The
# manager is dropped before the reading: its tables are counted by the sequence.
POOL = f"""{RESIDENT}
before = resident()
pool = BlockPool({BLOCKS})
manager = BlockManager({BLOCKS}, 16, pool=pool, rows=1000, columns={BLOCKS} // 1000)
for seq in range(1000):
    manager.allocate(seq, {BLOCKS} // 1000 * 16)
assert pool.num_used == {BLOCKS}
{{mark}}
for seq in range(1000):
    manager.free_seq(seq)
del manager
print(resident() - before)
"""
UNMARKED_POOL = POOL.format(mark="")
KEPT_POOL = POOL.format(mark=f"for block in range({BLOCKS}): pool.keep(block)")
PINNED_POOL = POOL.format(
    mark=f"for block in range({BLOCKS}): pool.keep(block); pool.retain(block); pool.release(block)"
)

# The prompts are drawn before: what the manager keeps of them is its own copy.
FINDABLE_POOL = f"""{RESIDENT}
import numpy
prompts = numpy.random.default_rng(0).integers(32000, size=({FINDABLE} // 512, 8192), dtype="int32")
before = resident()
manager = BlockManager({FINDABLE}, 16, prefix_caching=True, columns=512)
for prompt in prompts:
    manager.allocate("prompt", tokens=prompt)
    manager.commit("prompt")
    manager.free_seq("prompt")
assert manager.pool.num_evictable == {FINDABLE}
print(resident() - before)
"""

SEQUENCE = f"""{RESIDENT}
ids = list(range(10**6, 10**6 + {SEQUENCES}))
before = resident()
manager = BlockManager({SEQUENCES}, 16, rows={SEQUENCES}, columns={COLUMNS})
pool_bytes = 8 * {SEQUENCES}
for seq in ids:
    manager.allocate(seq, 1)
manager.drain_changes()
print(resident() - before - pool_bytes)
"""


@dataclass(frozen=True)
class Measured:
    """A number that is not a ratio of times."""

    value: float
    unit: str
    detail: str = ""


@dataclass(frozen=True)
class Figure:
    """A question answered by one number, which must not exceed ``must``."""

    name: str
    measure: Callable[[], Measured]
    must: float | None = None

    def missed(self, measured: Measured) -> bool:
        """Whether the number exceeds ``must`` by more than the last digit shown."""
        return self.must is not None and round(measured.value, 1) > self.must


def in_new_process(script: str, environment: dict[str, str] | None = None) -> list[int]:
    """Run the script with the kvcore in use and return the integers that it prints."""
    directory = str(Path(kvcore.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (directory, os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path} | (environment or {}),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return [int(word) for word in result.stdout.split()]


def import_time() -> Measured:
    """Of ``import kvcore`` in a process that has numpy already; the median of many."""
    # With byte code, as an installed package has it, whatever the environment says about it.
    with tempfile.TemporaryDirectory() as cache:
        environment = {"PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
        in_new_process(IMPORT, environment)
        runs = [in_new_process(IMPORT, environment) for _ in range(IMPORTS)]
    wall, cpu = ([time / 1e6 for time in times] for times in zip(*runs, strict=True))
    return Measured(
        statistics.median(wall),
        "ms",
        f"median of {IMPORTS}; minimum {min(wall):.1f}, median of processor time "
        f"{statistics.median(cpu):.1f}",
    )


def resident_bytes(script: str, count: int, detail: str) -> Measured:
    """Growth of resident memory, divided by ``count``."""
    if not Path("/proc/self/statm").exists():
        raise UnavailableError("resident memory is read from /proc/self/statm, which is not here")
    (grown,) = in_new_process(script)
    return Measured(grown / count, "bytes", detail)


def figures() -> Iterator[Figure]:
    """All figures of this file."""
    million = f"{BLOCKS // 10**6} million blocks"
    for name, script, must in (
        ("prefix sharing off", UNMARKED_POOL, 16),
        ("every block kept for prefix sharing", KEPT_POOL, 16),
        ("every block kept, pinned from Python", PINNED_POOL, None),
    ):
        yield Figure(
            f"bytes a block, {name}", partial(resident_bytes, script, BLOCKS, million), must
        )
    yield Figure(
        "bytes a block, every block findable, 16 tokens",
        partial(
            resident_bytes,
            FINDABLE_POOL,
            FINDABLE,
            "a million blocks; their tokens are 64 of them",
        ),
    )
    yield Figure(
        "bytes a sequence, int ids",
        partial(
            resident_bytes,
            SEQUENCE,
            SEQUENCES,
            f"{SEQUENCES:,} sequences; a row of {COLUMNS} cells is {4 * COLUMNS} of them",
        ),
    )
    yield Figure("import kvcore, numpy imported before", import_time, must=15)
