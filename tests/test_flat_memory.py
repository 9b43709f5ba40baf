"""Memory is flat over time (I11): ``soak.py`` at a tenth of its length.

K9-05, K9-06 and K1-17 under one load: forks, preemptions, rejected drafts, aborts, pins,
cached blocks, steps in flight, and nobody who reads the changes.
"""

from __future__ import annotations

import pytest
from soak import MIB, Load, resident_bytes, soak

from kvcore import Counter

REQUESTS = 100_000


@pytest.mark.skipif(resident_bytes() is None, reason="the resident size says nothing here")
def test_memory_and_objects_are_flat_over_100_000_requests() -> None:
    """80,000 requests after the warm-up may add 1 MiB, 13 bytes each, and no object."""
    loads: list[Load] = []

    def report(load: Load) -> None:
        loads[:] = [load]

    growth = soak(REQUESTS, seed=1, samples=10, report=report)

    (load,) = loads
    counters = load.bm.counters
    assert load.preemptions > REQUESTS / 300
    assert counters[Counter.SEQUENCES_FORKED] > REQUESTS / 100
    assert counters[Counter.COW_COPIES] > REQUESTS / 100
    assert counters[Counter.EVICTIONS] > REQUESTS / 100
    resident, objects = growth.after_warm_up()
    assert objects == 0
    assert resident <= MIB


def test_changes_that_nobody_read_are_told_once_and_only_for_live_cells() -> None:
    load = Load(seed=2)
    while load.requests < 5_000:
        load.step()
    live_cells = load.bm.gauges().logical_blocks
    assert len(load.bm.drain_changes()) == live_cells
    assert len(load.bm.drain_changes()) == 0
    load.let_go()
    assert len(load.bm.drain_changes()) == 0
