"""What the property tests look at: all observable state, outcomes, and contents.

``snapshot`` reads a compiled manager and its plain-Python twin alike, so that one
comparison covers everything a caller can see.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from kvcore.errors import OutOfBlocks

__all__ = [
    "BlockMemory",
    "Mirror",
    "check_rows",
    "outcome",
    "plain",
    "pool_snapshot",
    "slab_snapshot",
    "snapshot",
]

MISUSE = (TypeError, ValueError, KeyError)


def plain(value: Any) -> Any:
    """Arrays and tuples as lists, numbers as int, so that results can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What a call did: its result, or its exception with the numbers it carries."""
    try:
        return "returned", plain(call(*arguments))
    except OutOfBlocks as error:
        return "raised", OutOfBlocks, error.needed, error.available
    except MISUSE as error:
        return "raised", type(error)


def pool_snapshot(pool: Any) -> dict[str, Any]:
    blocks = range(pool.num_blocks)
    return {
        "ref": list(map(int, pool.ref)),
        "free": plain(pool.free_blocks()),
        "evictable": plain(pool.evictable_blocks()),
        "kept": [block for block in blocks if pool.is_kept(block)],
        "pins": [pool.pins(block) for block in blocks],
        "counts": (pool.num_free, pool.num_evictable, pool.num_used),
    }


def snapshot(manager: Any) -> dict[str, Any]:
    """Everything that core and model must agree on."""
    return {
        **pool_snapshot(manager.pool),
        "tables": {seq: list(table) for seq, table in manager.tables.items()},
        "lens": dict(manager.lens),
        "order": list(manager),
        "counters": list(map(int, manager.counters)),
        "gauges": tuple(manager.gauges()),
        "free view": list(manager.free),
        "ref view": list(map(int, manager.ref)),
    }


def slab_snapshot(core: Any) -> dict[str, Any]:
    """What only the core has: rows, and the arrays that are read without a copy."""
    return {
        "rows": {seq: core.row(seq) for seq in core},
        "lengths": core.lengths.tolist(),
        "cells": {seq: core.block_tables[core.row(seq)].tolist() for seq in core},
        "shape": core.block_tables.shape,
        "generation": core.table_generation,
        "rows_version": core.rows_version,
    }


def check_rows(core: Any) -> None:
    """The slab and the lengths say the same as the tables, without a copy."""
    rows = {core.row(seq) for seq in core}
    assert len(rows) == len(core), "two sequences have one row"
    slab, lengths = core.block_tables, core.lengths
    assert {row for row, length in enumerate(lengths.tolist()) if length >= 0} == rows
    assert all(length == -1 for row, length in enumerate(lengths.tolist()) if row not in rows)
    for seq in core:
        row, table = core.row(seq), core.table(seq)
        assert lengths[row] == core.length(seq)
        assert slab[row, : len(table)].tolist() == table.tolist()
        if len(table):
            assert np.shares_memory(np.asarray(table), slab)


class Mirror:
    """A copy of the slab that knows only what ``drain_changes`` told it."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], int] = {}

    def drain(self, core: Any, touched: Iterable[tuple[Hashable, int]] | None = None) -> None:
        changes = core.drain_changes()
        assert changes.dtype == np.int32
        assert changes.shape == (len(changes), 3)
        cells = [(row, column) for row, column, _ in changes.tolist()]
        assert cells == sorted(set(cells)), "one entry a cell, in row then column order"
        if touched is not None:
            excess = set(cells) - {(core.row(seq), column) for seq, column in touched}
            assert not excess, f"cells reported that nobody touched: {excess}"
        self.cells.update(zip(cells, changes[:, 2].tolist(), strict=True))
        self.compare(core)

    def compare(self, core: Any) -> None:
        for seq in core:
            row, table = core.row(seq), core.table(seq).tolist()
            mirrored = [self.cells.get((row, column)) for column in range(len(table))]
            assert mirrored == table, f"the mirror of {seq!r} has {mirrored} for {table}"


class BlockMemory:
    """Simulated K/V memory, to see that a sequence reads back what it wrote (I3).

    Every token that a sequence is given a slot for is written there, copies are done
    when they are reported, and nothing else is ever written.
    """

    def __init__(self) -> None:
        self.contents: dict[tuple[int, int], int] = {}
        self.tokens: dict[Hashable, list[int]] = {}
        self._next_token = 0

    def _fresh_token(self) -> int:
        self._next_token += 1
        return self._next_token

    def copy(self, source: int, destination: int, block_size: int) -> None:
        for offset in range(block_size):
            self.contents.pop((destination, offset), None)
            if (source, offset) in self.contents:
                self.contents[destination, offset] = self.contents[source, offset]

    def copy_all(self, copies: Iterable[Iterable[int]], block_size: int) -> None:
        """Copies of one call or step: in any order, so no block may be on both sides."""
        pairs = [tuple(pair) for pair in copies]
        sources = {source for source, _ in pairs}
        destinations = [destination for _, destination in pairs]
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(destinations)
        for source, destination in reversed(pairs):
            self.copy(source, destination, block_size)

    def write(self, seq: Hashable, slots: Iterable[int], block_size: int) -> None:
        for slot in slots:
            token = self._fresh_token()
            self.contents[divmod(slot, block_size)] = token
            self.tokens.setdefault(seq, []).append(token)

    def begin(self, seq: Hashable, tokens: list[int]) -> None:
        self.tokens[seq] = list(tokens)

    def compare(self, manager: Any, seqs: Iterable[tuple[Hashable, Hashable]]) -> None:
        """``seqs``: pairs of the name here and the name in the manager."""
        size = manager.block_size
        for name, seq in seqs:
            read = [self.contents.get(divmod(slot, size)) for slot in plain(manager.slots(seq))]
            assert read == self.tokens[name], f"{seq!r} reads {read}, wrote {self.tokens[name]}"
