"""What the scenario tests share: a manager that verifies itself, and exact snapshots.

The scenarios were written for blocks of 4 tokens. ``scaled`` turns their lengths into
those of another block size that need the same number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import numpy as np
import pytest
from state import snapshot

from kvcore import BlockManager, BlockPool, Counter, OutOfBlocks, Scheduler, Step

Copies = list[tuple[int, int]]
Append = Callable[[BlockManager, Hashable, int], tuple[list[int], Copies]]


def admitted(step: Step) -> list[tuple[Hashable, int]]:
    """Who is admitted in a textbook step, and how many tokens it has."""
    return [(seq, start + count) for seq, start, count in step.prefills]


def found_cached(step: Step) -> list[int]:
    """How many of those tokens were found cached."""
    return [start for _, start, _ in step.prefills]


class Checked:
    """Passes every call on and runs ``check()`` after it, also after one that raised."""

    def __init__(self, target: Any, checks: Callable[[], None]) -> None:
        self.target = target
        self._checks = checks

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.target, name)
        if isinstance(attribute, BlockPool):
            return Checked(attribute, self._checks)
        if not callable(attribute):
            return attribute

        def checked_call(*args: Any, **options: Any) -> Any:
            try:
                return attribute(*args, **options)
            finally:
                self._checks()

        return checked_call

    def __contains__(self, item: object) -> bool:
        return item in self.target

    def __iter__(self) -> Any:
        return iter(self.target)

    def __len__(self) -> int:
        return len(self.target)


def checked_pool(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks)
    return cast(BlockPool, Checked(pool, pool.check))


def checked_manager(num_blocks: int, block_size: int, **options: Any) -> BlockManager:
    bm = BlockManager(num_blocks, block_size, **options)
    return cast(BlockManager, Checked(bm, bm.check))


def checked_scheduler(
    bm: BlockManager, watermark_blocks: int = 1, max_running: int | None = None
) -> Scheduler:
    plain = cast(Checked, bm).target
    scheduler = Scheduler(plain, watermark_blocks, max_running=max_running)
    return cast(Scheduler, Checked(scheduler, plain.check))


def scaled(tokens: int, block_size: int) -> int:
    """The length that needs as many blocks of ``block_size`` as ``tokens`` needs of 4."""
    return -(-tokens * block_size // 4)


def manager_state(bm: BlockManager) -> dict[str, Any]:
    """All that a refused call must leave as it was: not the counter of refusals, and not
    the capacity of the slab, which may grow ahead of a call that then finds no block."""
    state = snapshot(bm) | {"rows": {seq: bm.row(seq) for seq in bm}}
    del state["counters"][Counter.OUT_OF_BLOCKS]
    return state


def scheduler_state(scheduler: Scheduler) -> dict[str, Any]:
    return {"waiting": list(scheduler.waiting), "running": list(scheduler.running)}


def refused(
    error: type[Exception],
    call: Callable[[], object],
    *mentioned: object,
    unchanged: Callable[[], object],
) -> pytest.ExceptionInfo[Exception]:
    """``call`` raises exactly ``error`` ten times over and ``unchanged()`` stays the same.

    ``mentioned`` are the values that the message must show.
    """
    before = unchanged()
    for attempt in range(10):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        for value in mentioned:
            assert str(value) in str(caught.value)
        if attempt in (0, 9):
            assert unchanged() == before
    return caught


def out_of_blocks(
    bm: BlockManager, call: Callable[[], object], needed: int, available: int
) -> None:
    """``call`` meets a shortage ten times over, says its numbers, and changes nothing."""
    counted = int(bm.counters[Counter.OUT_OF_BLOCKS])
    caught = refused(OutOfBlocks, call, unchanged=lambda: manager_state(bm))
    shortage = cast(OutOfBlocks, caught.value)
    assert (shortage.needed, shortage.available) == (needed, available)
    assert bm.counters[Counter.OUT_OF_BLOCKS] == counted + 10


def append_singly(bm: BlockManager, seq: Hashable, n_tokens: int) -> tuple[list[int], Copies]:
    slots: list[int] = []
    copies: Copies = []
    for _ in range(n_tokens):
        block, offset, cow_src = bm.append_slot(seq)
        slots.append(block * bm.block_size + offset)
        if cow_src is not None:
            copies.append((cow_src, block))
    return slots, copies


def append_in_bulk(bm: BlockManager, seq: Hashable, n_tokens: int) -> tuple[list[int], Copies]:
    slots, copy = bm.append_slots(seq, n_tokens)
    return slots.tolist(), [] if copy is None else [copy]


def append_as_batch(bm: BlockManager, seq: Hashable, n_tokens: int) -> tuple[list[int], Copies]:
    """The batch call reports a shortage by a count; here it raises like the other two."""
    rows = np.full(n_tokens, bm.row(seq), np.int32)
    out = np.full(n_tokens, -1, np.int64)
    served, copies = bm.append_batch(rows, out)
    assert out[served:].tolist() == [-1] * (n_tokens - served)
    if served < n_tokens:
        raise OutOfBlocks(1, bm.pool.num_free + bm.pool.num_evictable)
    pairs = [] if copies is None else [(int(src), int(dst)) for src, dst in copies]
    return out.tolist(), pairs


every_append = pytest.mark.parametrize(
    "append",
    [
        pytest.param(append_singly, id="append_slot"),
        pytest.param(append_in_bulk, id="append_slots"),
        pytest.param(append_as_batch, id="append_batch"),
    ],
)
every_block_size = pytest.mark.parametrize("block_size", [1, 4, 16])
blocks_with_a_middle = pytest.mark.parametrize("block_size", [4, 16])
