"""Every state that a tiny pool can reach, and every operation from each of them.

A breadth-first search from the empty pool. States that differ only in the numbers of
their blocks are one state (blocks are renamed in the order in which the free list, the
tables and the other holders name them), so the search is finite. Each transition runs
on a real manager, brought into the state by the path that led there, and is compared
with the model: result or exception, whole state, ``check()``.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from reference_model import ReferenceBlockManager
from state import outcome

from kvcore.block_manager import BlockManager

Operation = tuple[Any, ...]
NAMES = (0, 1, 2)
MOST_HELD = 3


class World(NamedTuple):
    """What exists in it. Pins, marks and steps multiply the states: small pools only."""

    num_blocks: int
    block_size: int
    sequences: int
    pins: bool = False
    kept: bool = False
    steps: int = 0
    reorder: bool = False


def clone(model: ReferenceBlockManager) -> ReferenceBlockManager:
    """A deep copy, much faster than the general one."""
    pool, twin = model.pool, copy.copy(model)
    twin.pool = copy.copy(pool)
    twin.pool.ref, twin.pool._pins = pool.ref[:], pool._pins[:]
    twin.pool._kept = set(pool._kept)
    twin.pool._free, twin.pool._evictable = deque(pool._free), deque(pool._evictable)
    twin.pool.managers = [twin]
    twin.block_ids = {seq: table[:] for seq, table in model.block_ids.items()}
    twin.lens, twin.counters = model.lens.copy(), model.counters[:]
    twin.held, twin._rows = deque(model.held), model._rows.copy()
    twin._unchanged = model._unchanged.copy()
    return twin


def canonical(model: ReferenceBlockManager) -> tuple[Any, ...]:
    """The state with its blocks renamed in the order in which they are met."""
    pool = model.pool
    newest = model.newest_step
    order = itertools.chain(
        pool._free,
        pool._evictable,
        *(model.block_ids.get(seq, ()) for seq in NAMES),
        (block for _, block in model.held),
        range(pool.num_blocks),
    )
    new = {block: number for number, block in enumerate(dict.fromkeys(order))}
    return (
        len(pool._free),
        len(pool._evictable),
        tuple(
            (model.lens[seq], tuple(new[block] for block in model.block_ids[seq]))
            if seq in model.lens
            else None
            for seq in NAMES
        ),
        tuple((newest - step, new[block]) for step, block in model.held),
        newest - model.settled_step,
        tuple(sorted((new[block], pins) for block, pins in enumerate(pool._pins) if pins)),
        tuple(sorted(new[block] for block in pool._kept)),
    )


def operations(model: ReferenceBlockManager, world: World) -> Iterator[Operation]:
    if len(model.held) > MOST_HELD:
        # A fork can be freed again and again while a step is in flight.
        yield "settle", model.newest_step
        return
    live = list(model.lens)
    dead = [seq for seq in NAMES[: world.sequences] if seq not in model.lens]
    most_tokens = (model.pool.available + 1) * world.block_size
    # Names are alike: only the first that is not live begins a sequence.
    for child in dead[:1]:
        for n_tokens in range(most_tokens + 1):
            yield "allocate", child, n_tokens
        for parent in live:
            for n_tokens in range(model.lens[parent] + 2):
                yield "fork", parent, child, n_tokens
    for seq in live:
        yield "append_slot", seq
        for n_tokens in (2, world.block_size + 1):
            yield "append_slots", seq, n_tokens
        for n_tokens in range(model.lens[seq] + 2):
            yield "truncate", seq, n_tokens
        yield "free_seq", seq
    if live:
        yield "append_batch", *live
        yield "append_batch", *reversed(live), *live
        yield "allocate", live[0], 1
    for seq in dead[:1]:
        yield "append_slot", seq
        yield "free_seq", seq
    if world.reorder and live:
        for parents in itertools.product(live, repeat=len(live)):
            yield "reorder", tuple(live), parents
        for seq, parent in itertools.permutations(live, 2):
            yield "reorder", (seq,), (parent,)
    for block in range(world.num_blocks):
        if world.pins:
            if model.pool._pins[block] < 1 or model.pool.ref[block] == 0:
                yield "pin", block
            yield "unpin", block
        if world.kept:
            yield "keep", block
            yield "forget", block
    if world.steps:
        if model.newest_step - model.settled_step < world.steps:
            yield ("fence",)
        for step in range(max(0, model.settled_step - 1), model.newest_step + 2):
            yield "settle", step


def perform(manager: Any, operation: Operation) -> Any:
    verb, *arguments = operation
    if verb in ("keep", "forget"):
        return getattr(manager.pool, verb)(*arguments)
    if verb != "append_batch":
        return getattr(manager, verb)(*arguments)
    slots: Any = [-1] * len(arguments)
    rows: Any = manager.rows(arguments)
    if isinstance(manager, BlockManager):
        slots = np.array(slots, np.int64)
    served, copies = manager.append_batch(rows, slots)
    return served, copies, slots


def core_state(core: BlockManager) -> list[Any]:
    """All of the state, as plain values. Both of these run once for each transition."""
    pool = core.pool
    blocks = range(pool.num_blocks)
    return [
        {seq: core.table(seq).tolist() for seq in core},
        {seq: core.length(seq) for seq in core},
        core.ref.tolist(),
        pool.free_blocks().tolist(),
        pool.evictable_blocks().tolist(),
        [pool.pins(block) for block in blocks],
        [block for block in blocks if pool.is_kept(block)],
        core.gauges().fenced,
    ]


def model_state(model: ReferenceBlockManager) -> list[Any]:
    pool = model.pool
    return [
        model.block_ids,
        model.lens,
        pool.ref,
        list(pool._free),
        list(pool._evictable),
        pool._pins,
        sorted(pool._kept),
        len(model.held),
    ]


def replay(world: World, path: Any) -> BlockManager:
    """A fresh manager brought to where ``path``, a linked list, ends."""
    steps = []
    while path is not None:
        path, operation = path
        steps.append(operation)
    core = BlockManager(world.num_blocks, world.block_size, rows=1, columns=1)
    for operation in reversed(steps):
        perform(core, operation)
    return core


def transition(
    core: BlockManager, model: ReferenceBlockManager, operation: Operation, where: Any
) -> bool:
    """One operation on both; whether it was refused."""
    counted = core.counters - np.array(model.counters)
    expected = outcome(perform, model, operation)
    actual = outcome(perform, core, operation)
    assert actual == expected, (where, operation)
    assert core_state(core) == model_state(model), (where, operation)
    # The core may have been refused things before that its model was not asked.
    assert (core.counters - counted == model.counters).all(), (where, operation)
    core.check()
    return expected[0] == "raised"


def explore(world: World) -> tuple[int, int]:
    """Numbers of states and transitions."""
    start = ReferenceBlockManager(world.num_blocks, world.block_size)
    seen = {canonical(start)}
    layer: list[tuple[ReferenceBlockManager, Any]] = [(start, None)]
    transitions = 0
    while layer:
        next_layer = []
        for before, path in layer:
            core = model = None
            for operation in operations(before, world):
                if core is None or model is None:
                    core, model = replay(world, path), clone(before)
                refused = transition(core, model, operation, (world, path))
                transitions += 1
                if refused:
                    # Nothing changed, so the same pair serves for the next operation.
                    assert model_state(model) == model_state(before)
                    continue
                key = canonical(model)
                if key not in seen:
                    seen.add(key)
                    next_layer.append((model, (path, operation)))
                core = model = None
        layer = next_layer
    return len(seen), transitions


PLAIN = [World(blocks, size, 3) for blocks in (1, 2, 3) for size in (1, 2, 3)]
PLAIN += [World(4, 1, 3), World(4, 2, 3), World(4, 3, 2)]
WITH_HOLDERS = [
    World(4, 1, 3, reorder=True),
    World(3, 2, 2, reorder=True),
    World(3, 1, 2, pins=True),
    World(3, 1, 2, kept=True),
    World(2, 2, 2, pins=True, kept=True),
    World(2, 1, 2, pins=True, steps=1),
    World(2, 1, 2, kept=True, steps=1),
    World(2, 2, 1, pins=True, kept=True, steps=2),
    World(3, 1, 2, steps=1, reorder=True),
    World(2, 2, 2, steps=2, reorder=True),
]
LARGE = [
    World(4, 3, 3),
    World(4, 2, 3, reorder=True),
    World(3, 1, 2, pins=True, kept=True),
    World(2, 1, 2, pins=True, kept=True, steps=1, reorder=True),
    World(3, 1, 2, steps=2, reorder=True),
    World(3, 1, 2, kept=True, steps=1, reorder=True),
]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
WORLDS = PLAIN + WITH_HOLDERS
if PROFILE == "dev":
    WORLDS = [world for world in WORLDS if world.num_blocks < 3]
elif PROFILE == "nightly":
    WORLDS += LARGE


def title(world: World) -> str:
    switches = [name for name in ("pins", "kept", "steps", "reorder") if getattr(world, name)]
    return f"{world.num_blocks}x{world.block_size}x{world.sequences}" + "".join(
        f"-{switch}" for switch in switches
    )


@pytest.fixture(scope="module")
def covered(summary: list[str]) -> Iterator[list[tuple[int, int]]]:
    """States and transitions of each world."""
    counts: list[tuple[int, int]] = []
    yield counts
    states, transitions = (sum(column) for column in zip(*counts, strict=True))
    summary.append(
        f"small worlds: {transitions:,} transitions from {states:,} states of {len(counts)} worlds"
    )


@pytest.mark.parametrize("world", WORLDS, ids=title)
def test_every_operation_in_every_state(world: World, covered: list[tuple[int, int]]) -> None:
    covered.append(explore(world))
