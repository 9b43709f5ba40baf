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


def test_what_only_a_step_in_flight_holds_is_coming() -> None:
    """What ended holds blocks 0 and 1, of which "fork" shares the first; "b" holds 2."""
    bm = BlockManager(12, 4)
    bm.allocate("ended", 8)
    bm.fork("ended", "fork", 4)
    bm.allocate("b", 4)
    nobody, b, both = bm.rows([]), bm.rows(["b"]), bm.rows(["b", "fork"])
    step = bm.fence()
    bm.free_seq("ended")
    assert bm.plan_append(nobody) == (0, 9, 1)
    assert bm.plan_append(nobody, without=b) == (0, 9, 2)
    assert bm.plan_append(nobody, without=both) == (0, 9, 3)
    bm.settle(step)
    assert bm.plan_append(nobody) == (0, 10, 0)
    assert bm.plan_append(nobody, without=both) == (0, 12, 0)
    bm.check()


@pytest.mark.parametrize("counts", [None, [1], [2**31 - 1]], ids=repr)
def test_a_sequence_of_the_largest_length_is_said_to_grow_no_more(counts: list[int] | None) -> None:
    """Lengths are int32: one token more would be a negative one."""
    bm = BlockManager(4, 2**30)
    bm.allocate("a", 2**31 - 1)
    given = None if counts is None else np.array(counts, np.int32)
    name = "rows" if counts is None else "counts"
    with pytest.raises(ValueError, match=f"{name}: a sequence cannot grow past 2147483647 tokens"):
        bm.plan_append(bm.rows(["a"]), given)
    bm.truncate("a", 2**31 - 2)
    assert bm.plan_append(bm.rows(["a"]), np.array([1], np.int32)) == (0, 2, 0)
