"""What a batch would take, with and without a step in flight."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.block_manager import BlockManager
from kvcore.counters import Counter


@pytest.mark.parametrize("in_flight", [False, True])
def test_of_the_only_holders_of_a_tail_the_last_copies_only_while_a_step_is_in_flight(
    in_flight: bool,
) -> None:
    bm = BlockManager(12, 4)
    bm.allocate("a", 6)
    for child in ("b", "c"):
        bm.fork("a", child)
    if in_flight:
        bm.fence()
    rows = bm.rows(["a", "b", "c"])
    plan = bm.plan_append(rows)
    assert plan == (3 if in_flight else 2, 10, 0)
    assert bm.plan_append(rows[:1], without=rows[1:]).needed == in_flight
    before = bm.counters[Counter.BLOCKS_TAKEN]
    assert bm.append_batch(rows, np.zeros(3, np.int64))[0] == 3
    assert bm.counters[Counter.BLOCKS_TAKEN] - before == plan.needed
    bm.check()
