"""Each allocation inside a call is refused, one at a time, and nothing may have changed (I7).

What CPython's own tests use does it: the first, second, third, … request for memory fails,
until the call makes fewer. A call must have all its memory before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from state import plain, slab_snapshot, snapshot

from kvcore.block_manager import BlockManager

_testcapi = pytest.importorskip("_testcapi", reason="this CPython comes without its own tests")
if not hasattr(_testcapi, "set_nomemory"):
    pytest.skip("no set_nomemory in this CPython", allow_module_level=True)

MOST = 60  # allocations in any of these calls


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def everything(bm: BlockManager) -> dict[str, Any]:
    state = snapshot(bm) | slab_snapshot(bm)
    if bm.prefix_index is not None:
        index = bm.prefix_index
        state["identities"] = [index.identity(block) for block in range(bm.num_blocks)]
        state["known"] = {seq: bm.tokens(seq).tolist() for seq in bm}
        state["published"] = {seq: bm.published(seq) for seq in bm}
        state["index"] = (len(index), index.duplicates, index.collisions, index.epoch)
    return state


def refused_one_by_one(
    make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]],
) -> int:
    """``make()``: a call, and what reads all the state that it may change.

    Returns how many of its allocations were refused.
    """
    call, read = make()
    expected = plain(call()), read()
    refusals = 0
    for number in range(MOST):
        call, read = make()
        before = read()
        refused, result = False, None
        _testcapi.set_nomemory(number, number + 1)
        try:
            result = call()
        except MemoryError:
            refused = True
        finally:
            _testcapi.remove_mem_hooks()
        if not refused:
            assert (plain(result), read()) == expected
            continue
        refusals += 1
        assert read() == before, f"allocation {number} was refused, and something changed"
        assert plain(call()) == expected[0], "the call is served once there is memory"
    return refusals


def batch(in_flight: bool) -> BlockManager:
    """Rows of 16 columns, all in use by "a"; "b" and "c" share a partial block."""
    bm = BlockManager(40, 4, rows=3, columns=16)
    bm.allocate("a", 64)
    bm.allocate("b", 6)
    bm.fork("b", "c")
    if in_flight:
        bm.fence()
    return bm


def beams(in_flight: bool) -> BlockManager:
    bm = BlockManager(40, 4, rows=3)
    for seq in "abc":
        bm.allocate(seq, 9)
    if in_flight:
        bm.fence()
    return bm


def sharing(in_flight: bool) -> BlockManager:
    """Two that compute the same, three tokens of whose block are known, and one idle copy."""
    bm = BlockManager(20, 4, rows=4, prefix_caching=True, merge_duplicates=True)
    for seq in "abc":
        bm.allocate(seq, 4, tokens=[1, 2, 3])
    if in_flight:
        bm.fence()
    return bm


def restored(in_flight: bool) -> BlockManager:
    """One row, in use, of 16 columns."""
    bm = BlockManager(40, 4, rows=1, columns=16, prefix_caching=True)
    bm.allocate("a", tokens=range(11), namespace="tenant")
    if in_flight:
        bm.fence()
    return bm


Make = Callable[[bool], BlockManager]
Call = Callable[[BlockManager, np.ndarray, dict[str, Any]], object]
CALLS: dict[str, tuple[Make, Call]] = {
    "append_slot": (batch, lambda bm, rows, _: bm.append_slot("a")),
    "append_slots": (batch, lambda bm, rows, _: bm.append_slots("a", 9)),
    "append_batch": (batch, lambda bm, rows, with_: bm.append_batch(rows, with_["out"])),
    "append_batch with counts": (
        batch,
        lambda bm, rows, with_: bm.append_batch(rows, with_["out"], with_["counts"]),
    ),
    "plan_append": (batch, lambda bm, rows, with_: bm.plan_append(rows, with_["counts"])),
    "truncate": (batch, lambda bm, rows, _: bm.truncate("a", 7)),
    "truncate_batch": (batch, lambda bm, rows, with_: bm.truncate_batch(rows, with_["lengths"])),
    "release_outside_window": (
        batch,
        lambda bm, rows, with_: bm.release_outside_window(rows, with_["lengths"], 2),
    ),
    "exclusive_blocks": (batch, lambda bm, rows, _: bm.exclusive_blocks("a")),
    "lengths_of": (batch, lambda bm, rows, _: bm.lengths_of(rows)),
    "fork": (batch, lambda bm, rows, _: bm.fork("a", "d")),
    "free_seq": (batch, lambda bm, rows, _: bm.free_seq("a")),
    "reorder": (beams, lambda bm, rows, _: bm.reorder("abc", "bca")),
    "commit_batch": (sharing, lambda bm, rows, with_: bm.commit_batch(rows, with_["counts"])),
    "commit_pending": (
        sharing,
        lambda bm, rows, with_: bm.commit_pending(rows, with_["pending"], with_["counts"]),
    ),
    "restore": (
        restored,
        lambda bm, rows, with_: bm.restore("new", 100, [1], [1], tokens=with_["prompt"]),
    ),
}


@pytest.mark.parametrize("in_flight", [False, True], ids=["settled", "in flight"])
@pytest.mark.parametrize(("make", "call"), CALLS.values(), ids=list(CALLS))
def test_a_refused_allocation_changes_nothing(make: Make, call: Call, in_flight: bool) -> None:
    def begin() -> tuple[Callable[[], Any], Callable[[], Any]]:
        bm = make(in_flight)
        rows = bm.rows(list(bm))
        with_ = {
            "out": np.zeros(8, np.int64),
            "counts": np.full(len(rows), 2, np.int32),
            "lengths": np.full(len(rows), 5, np.int32),
            "pending": np.full(4, 4, np.int32),
            "prompt": bm.prompt_of("a") if bm.prefix_caching else None,
        }

        def read() -> object:
            bm.check()
            return everything(bm), {name: plain(with_[name]) for name in ("pending", "counts")}

        return lambda: call(bm, rows, with_), read

    # A call that gives blocks back needs memory for the fence only.
    assert refused_one_by_one(begin) >= in_flight
