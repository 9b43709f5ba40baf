"""Memory that the system refuses to prefix sharing: an error, and nothing has changed (I7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from state import IndexMirror, plain, snapshot
from test_failure_injection import BIG, no_more_memory

from kvcore.block_manager import BlockManager
from kvcore.pool import BlockPool

Call = Callable[[BlockManager, Any], Any]


def busy() -> BlockManager:
    """Some blocks cached, some of them idle, and a log that has something to tell."""
    bm = BlockManager(12, 4, prefix_caching=True, merge_duplicates=True)
    assert bm.pool.index is not None
    bm.pool.index.start_log(100)
    for seq in range(3):
        bm.allocate(seq, tokens=[seq] * 9, namespace="tenant")
        bm.commit(seq)
    bm.free_seq(1)
    bm.fork(0, "fork")
    return bm


def everything(bm: BlockManager) -> dict[str, Any]:
    index = bm.pool.index
    assert index is not None
    return {
        **snapshot(bm),
        "identities": [index.identity(block) for block in range(bm.num_blocks)],
        "tokens": {seq: bm.tokens(seq).tolist() for seq in bm},
        "published": {seq: bm.published(seq) for seq in bm},
        "index": (len(index), index.duplicates, index.collisions, index.epoch),
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda bm, tokens: bm.prompt(tokens),
        lambda bm, tokens: bm.match(tokens, namespace="tenant"),
        lambda bm, tokens: bm.plan_allocate(tokens=tokens),
        lambda bm, tokens: bm.can_allocate(tokens=tokens),
        lambda bm, tokens: bm.allocate("new", tokens=tokens, namespace="other"),
        lambda bm, tokens: bm.allocate("new", tokens=tokens, partial_hit=True),
        lambda bm, tokens: bm.forget(tokens),
        lambda bm, tokens: bm.pin_prefix(tokens),
        lambda bm, tokens: bm.commit(0, tokens),
    ],
    ids=["prompt", "match", "plan", "can", "allocate", "partial_hit", "forget", "pin", "commit"],
)
def test_a_prompt_that_the_system_has_no_room_for_changes_nothing(call: Call) -> None:
    bm = busy()
    # Twice what the allocator may keep for itself of memory that was freed before.
    tokens = np.zeros(2 * BIG, np.int32)
    before = everything(bm)
    for _ in range(3):
        with no_more_memory(), pytest.raises(MemoryError):
            call(bm, tokens)
        assert everything(bm) == before
        bm.check()
    assert bm.match([1] * 9, namespace="tenant") == 8


def test_a_log_that_the_system_has_no_room_for_leaves_the_one_that_runs() -> None:
    bm, mirror = busy(), IndexMirror()
    index = bm.pool.index
    assert index is not None
    mirror.apply(index.drain())
    bm.forget([1] * 8, namespace="tenant")
    before = everything(bm)
    with no_more_memory(), pytest.raises(MemoryError):
        index.start_log(BIG)
    assert plain(everything(bm)) == plain(before)
    changes = index.drain()
    assert len(changes) == 2, "the two blocks that were forgotten, and not all anew"
    mirror.apply(changes)
    mirror.compare(index, bm.num_blocks)
    bm.check()


def test_marking_a_block_needs_memory_the_first_time_only() -> None:
    pool = BlockPool(BIG // 16)
    blocks = pool.take_many(2).tolist()
    pool.keep(blocks[0])
    with no_more_memory():
        pool.keep(blocks[1])
    pool.check()
