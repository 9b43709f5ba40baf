"""Faults put into the data plane: the comparison of the real model's rows notices each.

What tells them apart: tokens often stay the same, logits do not, and where attention
reads the same tokens from other places only the check of what each slot holds can see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from model_support import TOLERANCE, Floats, Subject, WatchedEngine, largest_difference, subject

from kvcore import BlockManager, Step
from kvcore.engine import Chunk, Temperature

SIZE = 4
OUTPUT = 60
STEP = 40
"""The step in which a fault happens; all have eight full blocks by then."""

Fault = Callable[["FaultyEngine", list[Chunk]], None]


@pytest.fixture(params=["stories260K", "random"])
def model(request: pytest.FixtureRequest) -> Subject:
    return subject(request.param)


class FaultyEngine(WatchedEngine):
    """An engine in whose 40th step the data plane errs, once, for each that decodes."""

    def __init__(self, model: Subject, fault: Fault | None, watches_slots: bool) -> None:
        super().__init__(model.model, BlockManager(400, SIZE))
        self.fault, self.watches_slots = fault, watches_slots
        for place, prompt in enumerate(model.prompts):
            self.add(place, prompt, max_tokens=OUTPUT)

    def assert_slots(self, *read: Any) -> None:
        if self.watches_slots:
            super().assert_slots(*read)

    def chunks(self, step: Step) -> list[Chunk]:
        chunks = super().chunks(step)
        if step.number == STEP and self.fault is not None:
            self.fault(self, chunks)
        return chunks


def token_of(engine: FaultyEngine, chunk: Chunk, position: int) -> tuple[Floats, Any]:
    """The keys and values of a token, all layers, and the mark that says which token it is."""
    block, offset = chunk.table[position // SIZE], position % SIZE
    return engine.cache.blocks[:, :, block, offset], engine.marks[block, offset : offset + 1]


def copy_token(engine: FaultyEngine, chunk: Chunk, source: int, target: int) -> None:
    for read, written in zip(
        token_of(engine, chunk, source), token_of(engine, chunk, target), strict=True
    ):
        written[...] = read


def wrong_block(engine: FaultyEngine, chunks: list[Chunk]) -> None:
    """Each reads its second block in place of its fifth, as after a wrong table update."""
    for place, chunk in enumerate(chunks):
        table = np.array(chunk.table)
        table[4] = table[1]
        chunks[place] = chunk._replace(table=table)


def others_block(engine: FaultyEngine, chunks: list[Chunk]) -> None:
    """Each reads one block of the next sequence."""
    tables = [np.array(chunk.table) for chunk in chunks]
    for place, chunk in enumerate(chunks):
        table = tables[place].copy()
        table[4] = tables[place - 1][4]
        chunks[place] = chunk._replace(table=table)


def overwritten_slot(engine: FaultyEngine, chunks: list[Chunk]) -> None:
    """A later token is written over the first one: a slot that two hold."""
    for chunk in chunks:
        copy_token(engine, chunk, source=5 * SIZE + 1, target=0)


def stale_slot(engine: FaultyEngine, chunks: list[Chunk]) -> None:
    """The last token of a recent block is the one before it: its write was lost."""
    for chunk in chunks:
        last = chunk.start // SIZE * SIZE - 1
        copy_token(engine, chunk, source=last - 1, target=last)


def zeroed_block(engine: FaultyEngine, chunks: list[Chunk]) -> None:
    """A recent block was never copied to where it is read."""
    for chunk in chunks:
        block = chunk.table[chunk.start // SIZE - 1]
        engine.cache.blocks[:, :, block] = 0
        engine.marks[block] = -1


def released_block(engine: FaultyEngine, chunks: list[Chunk]) -> None:
    """Each reads a block that nobody holds."""
    free = engine.bm.pool.free_blocks()[0]
    for place, chunk in enumerate(chunks):
        table = np.array(chunk.table)
        table[4] = free
        chunks[place] = chunk._replace(table=table)


def swapped_blocks(engine: FaultyEngine, chunks: list[Chunk]) -> None:
    """Two full blocks change places in the table."""
    for place, chunk in enumerate(chunks):
        table = np.array(chunk.table)
        table[[2, 6]] = table[[6, 2]]
        chunks[place] = chunk._replace(table=table)


IN_LOGITS = [
    wrong_block,
    others_block,
    overwritten_slot,
    stale_slot,
    zeroed_block,
    released_block,
]


def named(faults: Sequence[Fault]) -> Any:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.__name__)


def test_without_a_fault_nothing_is_noticed(model: Subject) -> None:
    engine = FaultyEngine(model, None, watches_slots=True)
    engine.run()
    assert largest_difference(engine) < TOLERANCE
    assert len(engine.steps) > STEP


@named(IN_LOGITS)
def test_logits_show_what_was_read_wrongly(model: Subject, fault: Fault) -> None:
    engine = FaultyEngine(model, fault, watches_slots=False)
    engine.run()
    for place in range(len(model.prompts)):
        # Of each prompt, and by far: the least that was met is 0.12.
        assert largest_difference(engine, engine.texts[place]) > 30 * TOLERANCE


@named([*IN_LOGITS, swapped_blocks])
def test_the_check_of_slots_names_the_tokens(model: Subject, fault: Fault) -> None:
    engine = FaultyEngine(model, fault, watches_slots=True)
    with pytest.raises(AssertionError, match="reads other tokens at positions"):
        engine.run()
    assert len(engine.steps) == STEP - 1


def test_the_order_of_full_blocks_does_not_show_in_logits(model: Subject) -> None:
    """Keys carry their positions, and attention adds up in any order."""
    engine = FaultyEngine(model, swapped_blocks, watches_slots=False)
    engine.run()
    assert largest_difference(engine) < TOLERANCE


class NoCopies(WatchedEngine):
    """An engine that forgets copy-on-write."""

    def copy_blocks(self, step: Step) -> None:
        step.copies = step.copies[:0]
        super().copy_blocks(step)

    def assert_slots(self, *read: Any) -> None:
        pass


def test_a_skipped_copy_is_noticed(model: Subject) -> None:
    """Its target was never written, so what is read there is no number."""
    engine = NoCopies(model.model, BlockManager(400, SIZE))
    engine.add(
        "A", model.prompts[2], max_tokens=9, siblings=["A1"], sampling=Temperature(0.9, seed=5)
    )
    engine.run()
    assert largest_difference(engine) == np.inf
