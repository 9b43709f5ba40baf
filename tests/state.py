"""What the property tests look at: all observable state, outcomes, and contents.

``snapshot`` reads a compiled manager and its plain-Python twin alike, so that one
comparison covers everything a caller can see.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from kvcore.errors import OutOfBlocks
from kvcore.identity import decode_key, namespace_key
from kvcore.prefix_log import Cleared, Removed, Stored

__all__ = [
    "BlockMemory",
    "IndexMirror",
    "Mirror",
    "PrefixMemory",
    "Uids",
    "check_rows",
    "outcome",
    "plain",
    "plain_key",
    "pool_snapshot",
    "prefix_snapshot",
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


def plain_key(key: bytes) -> tuple[bytes, tuple[tuple[bytes, int, int], ...]]:
    """A block's key as the model writes it."""
    namespace, media = decode_key(key)
    return namespace_key(namespace), tuple(tuple(part) for part in media)


class Uids:
    """Which number of an identity in the core is which in the model: one to one, for ever."""

    def __init__(self) -> None:
        self.to_model = {0: 0}
        self.to_core = {0: 0}

    def pair(self, core: int, model: int) -> None:
        assert self.to_model.setdefault(core, model) == model, f"{core} is used a second time"
        assert self.to_core.setdefault(model, core) == core, f"{core}: one content, two numbers"


def prefix_snapshot(core: Any, model: Any, uids: Uids) -> None:
    """All that can be seen of the prefix index and of what is known is equal in both."""
    index, expected = core.pool.index, model.index
    assert len(index) == len(expected)
    assert index.epoch == expected.epoch == core.epoch
    assert index.duplicates == expected.duplicates
    by_block = index.uids().tolist()
    for block in range(core.num_blocks):
        identity, node = index.identity(block), expected.nodes.get(block)
        assert (identity is None) == (node is None), f"block {block} has {identity}, not {node}"
        assert by_block[block] == (0 if identity is None else identity.uid)
        if identity is None or node is None:
            continue
        uids.pair(identity.uid, node.uid)
        uids.pair(identity.parent, node.parent.uid)
        assert list(identity.tokens) == list(node.tokens)
        assert plain_key(identity.key) == node.key
    for seq in model:
        assert outcome(core.tokens, seq) == outcome(model.tokens, seq)
        assert core.known(seq) == model.known(seq)
        assert core.published(seq) == model.published(seq)


class IndexMirror:
    """What somebody elsewhere knows who only reads the change log (I12)."""

    def __init__(self) -> None:
        self.contents: dict[int, tuple[int, tuple[int, ...], bytes]] = {}
        self.began = False

    def apply(self, changes: Iterable[Any]) -> None:
        ages: set[int] = set()
        for change in changes:
            if isinstance(change, Cleared):
                self.contents.clear()
                self.began = True
                continue
            assert self.began, "what was there before the log has not been told"
            if isinstance(change, Stored):
                assert change.uid not in self.contents, f"{change.uid} stored twice"
                ages.add(change.uid)
                content = (change.parent, tuple(change.tokens), change.key)
                self.contents[change.uid] = content
                assert all(
                    parent != change.uid
                    for child, (parent, _, _) in self.contents.items()
                    if child in ages
                ), f"{change.uid} stored after a child of its"
            else:
                assert isinstance(change, Removed)
                del self.contents[change.uid]

    def compare(self, index: Any, num_blocks: int) -> None:
        identities = [index.identity(block) for block in range(num_blocks)]
        assert self.contents == {
            identity.uid: (identity.parent, tuple(identity.tokens), identity.key)
            for identity in identities
            if identity is not None
        }


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
            wrote = self.tokens[name]
            assert len(wrote) == manager.length(seq)
            # All that a window has not given back: through the table, as a kernel reads.
            for column, block in enumerate(manager.tables[seq]):
                if block >= 0:
                    expected = wrote[column * size : (column + 1) * size]
                    read = [self.contents.get((block, offset)) for offset in range(len(expected))]
                    assert read == expected, f"{seq!r} reads {read}, wrote {expected}"


class PrefixMemory(BlockMemory):
    """Memory in which a token's content depends on all that came before it, as K and V do.

    What a sequence that shares reads through its table is compared with what it would
    have computed alone. Contents are numbers, equal where the whole prefix is equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Hashable, int] = {}

    def contents_of(
        self, namespace: bytes, tokens: Sequence[int], media: Iterable[Any]
    ) -> list[int]:
        """The content of every token of a prompt, computed without sharing anything."""
        seen = {
            position: (item.digest, position - item.start, item.stop - item.start)
            for item in media
            for position in range(item.start, item.stop)
        }
        contents: list[int] = []
        for position, token in enumerate(tokens):
            contents.append(self.after(contents, namespace, token, seen.get(position)))
        return contents

    def after(
        self, contents: Sequence[int], namespace: bytes, token: int, media: Hashable = None
    ) -> int:
        """The content of the token that follows these."""
        before = contents[-1] if contents else self._number(namespace)
        return self._number((before, token, media))

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def compute(
        self, name: Hashable, contents: Sequence[int], slots: Iterable[int], block_size: int
    ) -> None:
        """The sequence is that long now; the last tokens are computed into these slots."""
        slots = list(slots)
        self.begin(name, list(contents))
        for slot, content in zip(slots, contents[len(contents) - len(slots) :], strict=True):
            self.contents[divmod(slot, block_size)] = content

    def copy_head(self, source: int, destination: int, n_tokens: int) -> None:
        """The first tokens of a block, for a hit that ends inside it."""
        for offset in range(n_tokens):
            self.contents[destination, offset] = self.contents[source, offset]
