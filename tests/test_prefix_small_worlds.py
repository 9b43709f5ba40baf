"""Every state that prefix sharing can reach in a tiny pool, and every operation from each.

As ``test_small_worlds`` does it without prefixes: a breadth-first search in which states
that differ only in the numbers of their blocks and identities are one, and in which each
transition runs on a real manager and is compared with the model. Tokens are 0 and 1; a
sequence may be told any of them, whatever another was told.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from reference_model import Node, ReferenceBlockManager
from state import Uids, outcome, prefix_snapshot, snapshot

from kvcore.block_manager import BlockManager
from kvcore.pool import BlockPool
from kvcore.prefix_index import PrefixIndex

Operation = tuple[Any, ...]
NAMES = (0, 1, 2)


class World(NamedTuple):
    """What exists in it."""

    num_blocks: int
    block_size: int
    sequences: int
    longest: int
    vocabulary: int = 2
    hash_bits: int = 63
    merge: bool = False
    forgetting: bool = True
    partial: bool = False
    steps: int = 0


def begin(world: World) -> tuple[BlockManager, ReferenceBlockManager]:
    pool = BlockPool(world.num_blocks)
    PrefixIndex(pool, world.block_size, hash_bits=world.hash_bits)
    shape = (world.num_blocks, world.block_size)
    switches: dict[str, Any] = {"prefix_caching": True, "merge_duplicates": world.merge}
    core = BlockManager(*shape, pool=pool, rows=1, columns=1, **switches)
    return core, ReferenceBlockManager(*shape, **switches)


def texts(world: World) -> Iterator[tuple[int, ...]]:
    for length in range(1, world.longest + 1):
        yield from itertools.product(range(world.vocabulary), repeat=length)


def canonical(model: ReferenceBlockManager, world: World) -> tuple[Any, ...]:
    """The state with blocks and identities renamed in the order in which they are met."""
    pool, index = model.pool, model.index
    order = itertools.chain(
        pool._free,
        pool._evictable,
        *(model.block_ids.get(seq, ()) for seq in NAMES),
        (block for _, block in model.held),
        range(pool.num_blocks),
    )
    new = {block: number for number, block in enumerate(dict.fromkeys(order))}

    def name(node: Node | None) -> Any:
        """A content without copies is found by nobody: all such are alike."""
        if node is index.root or node is None:
            return node is index.root
        return tuple(new[block] for block in node.copies)

    sequences = []
    for seq in NAMES:
        if seq not in model.lens:
            sequences.append(None)
            continue
        knows, table = model.knowledge[seq], model.block_ids[seq]
        closed = knows.closed or knows.era != index.era
        sequences.append(
            (
                model.lens[seq],
                tuple(new[block] for block in table),
                tuple(knows.tokens),
                None if closed else knows.published,
            )
        )
    identities = sorted(
        (node.uid * world.partial, new[block], name(node), name(node.parent), node.tokens)
        for block, node in index.nodes.items()
    )
    # A hit inside a block takes the newest of several: then their order matters, else not.
    identities = [identity[1:] for identity in identities]
    held = tuple((model.newest_step - step, new[block]) for step, block in model.held)
    in_flight = model.newest_step - model.settled_step
    marked = tuple(
        tuple(sorted(new[block] for block in blocks if pool.ref[block] > 0))
        for blocks in (pool._kept, index.barred)
    )
    counts = (len(pool._free), len(pool._evictable), in_flight)
    return counts, tuple(sequences), tuple(identities), held, marked


def operations(model: ReferenceBlockManager, world: World) -> Iterator[Operation]:
    if len(model.held) > 2:
        yield "settle", model.newest_step
        return
    live = list(model.lens)
    dead = [seq for seq in NAMES[: world.sequences] if seq not in model.lens]
    # Names are alike: only the first that is not live begins a sequence.
    for child in dead[:1]:
        for text in texts(world):
            yield "allocate", child, text
            if world.partial:
                yield "allocate", child, text, True
        for parent in live:
            for n_tokens in range(model.lens[parent] + 1):
                yield "fork", parent, child, n_tokens
    for seq in live:
        if model.lens[seq] < world.longest:
            yield "append_slot", seq
        for n_tokens in range(model.lens[seq]):
            yield "truncate", seq, n_tokens
        known = len(model.knowledge[seq].tokens)
        yield "commit", seq, (), known
        if known < model.lens[seq]:
            for token in range(world.vocabulary):
                yield "commit", seq, (token,), known
                yield "commit", seq, (token,), known + 1
        yield "free_seq", seq
    for seq, parent in itertools.permutations(live, 2):
        yield "reorder", (seq,), (parent,)
    yield "evict", 1
    if world.forgetting:
        yield ("reset",)
        for text in texts(world):
            if len(text) % world.block_size == 0:
                yield "forget", text
        for block in range(world.num_blocks):
            if block in model.pool._kept:
                yield "forget_block", block
    if world.steps:
        if model.newest_step - model.settled_step < world.steps:
            yield ("fence",)
        else:
            yield "settle", model.newest_step - world.steps + 1
            yield "settle", model.newest_step


def perform(manager: Any, operation: Operation) -> Any:
    verb, *arguments = operation
    if verb == "allocate":
        switches = {"partial_hit": True} if arguments[2:] else {}
        return manager.allocate(arguments[0], tokens=arguments[1], **switches)
    if verb == "commit":
        return manager.commit(*arguments[:2], n_settled=arguments[2])
    if verb == "forget_block":
        return manager.pool.forget(*arguments)
    return getattr(manager, verb)(*arguments)


def replay(world: World, path: Any) -> tuple[BlockManager, ReferenceBlockManager]:
    """Both brought to where ``path``, a linked list, ends."""
    steps = []
    while path is not None:
        path, operation = path
        steps.append(operation)
    core, model = begin(world)
    for operation in reversed(steps):
        perform(core, operation)
        perform(model, operation)
    return core, model


def transition(
    core: BlockManager, model: ReferenceBlockManager, operation: Operation, world: World
) -> bool:
    """One operation on both; whether it was refused."""
    expected = outcome(perform, model, operation)
    assert outcome(perform, core, operation) == expected
    assert snapshot(core) == snapshot(model)
    prefix_snapshot(core, model, Uids())
    for text in texts(world):
        assert core.match(text) == model.match(text)
    core.check()
    return expected[0] == "raised"


def explore(world: World) -> tuple[int, int]:
    """Numbers of states and transitions."""
    seen = {canonical(begin(world)[1], world)}
    layer: list[Any] = [None]
    transitions = 0
    while layer:
        next_layer = []
        for path in layer:
            core, model = replay(world, path)
            before = canonical(model, world)
            for operation in list(operations(model, world)):
                if core is None:
                    core, model = replay(world, path)
                try:
                    refused = transition(core, model, operation, world)
                except Exception as error:
                    error.add_note(f"{operation} after {path} in {world}")
                    raise
                transitions += 1
                key = canonical(model, world)
                if refused or key == before:
                    # Nothing changed, so the same pair serves for the next operation.
                    assert key == before
                    continue
                if key not in seen:
                    seen.add(key)
                    next_layer.append((path, operation))
                core = None
        layer = next_layer
    return len(seen), transitions


SMALL = [
    World(1, 1, 2, 2),
    World(2, 1, 1, 2),
    World(2, 1, 1, 2, hash_bits=0),
    World(2, 2, 1, 3, partial=True),
    World(2, 1, 2, 2, vocabulary=1, merge=True),
]
MORE = [
    World(2, 1, 2, 2, forgetting=False),
    World(3, 1, 2, 3, vocabulary=1, forgetting=False, merge=True),
]
LARGE = [
    World(2, 1, 2, 2),
    World(3, 2, 1, 4, vocabulary=1, partial=True),
    World(3, 1, 2, 2, vocabulary=1),
    World(3, 1, 2, 2, vocabulary=1, merge=True),
    World(3, 1, 2, 2, forgetting=False),
    World(2, 1, 2, 2, vocabulary=1, forgetting=False, steps=1),
]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
WORLDS = SMALL[:2] if PROFILE == "dev" else SMALL + MORE
if PROFILE == "nightly":
    WORLDS = WORLDS + LARGE


def title(world: World) -> str:
    switches = [
        name for name in ("merge", "forgetting", "partial", "steps") if getattr(world, name)
    ]
    switches += ["no_hash"] * (world.hash_bits == 0)
    shape = f"{world.num_blocks}x{world.block_size}x{world.sequences}"
    return "-".join([shape, f"vocabulary{world.vocabulary}", *switches])


@pytest.fixture(scope="module")
def covered(summary: list[str]) -> Iterator[list[tuple[int, int]]]:
    """States and transitions of each world."""
    counts: list[tuple[int, int]] = []
    yield counts
    states, transitions = (sum(count[column] for count in counts) for column in (0, 1))
    summary.append(
        f"small worlds of prefixes: {transitions:,} transitions from {states:,} states "
        f"of {len(counts)} worlds"
    )


@pytest.mark.parametrize("world", WORLDS, ids=title)
def test_every_operation_in_every_state(world: World, covered: list[tuple[int, int]]) -> None:
    covered.append(explore(world))
