"""Core and plain-Python model, driven side by side through every public operation.

After every call: same result or same exception with the same numbers, the whole
observable state equal, ``check()`` clean, and every sequence still reads back exactly
the tokens that it wrote (I3).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from reference_model import ReferenceBlockManager, ReferencePool
from state import (
    BlockMemory,
    Mirror,
    check_rows,
    outcome,
    plain,
    pool_snapshot,
    snapshot,
)

from kvcore.block_manager import BlockManager
from kvcore.counters import Counter
from kvcore.pool import BlockPool

NAMES: list[Hashable] = [
    0,
    1,
    "two",
    ("three", 3),
    None,
    -5,
    6.5,
    frozenset({7}),
    b"8",
    *range(9, 13),
]

WRONG_NUMBERS = [-1, -(2**31), 2**31, 2**63, 2**64, -(2**70), 1.0, "3", [], b"1", np.float32(2)]

index = st.integers(0, 1_000)
small = st.integers(0, 12)
odd_numbers = st.sampled_from([np.int64(3), np.uint8(2), True])
wrong_number = st.sampled_from(WRONG_NUMBERS)


class PoolMachine(RuleBasedStateMachine):
    """A pool on its own."""

    @initialize(num_blocks=st.integers(1, 9))
    def begin(self, num_blocks: int) -> None:
        self.core = BlockPool(num_blocks)
        self.model = ReferencePool(num_blocks)

    def both(self, call: Callable[[Any], Any]) -> None:
        assert outcome(call, self.core) == outcome(call, self.model)

    @rule()
    def take(self) -> None:
        self.both(lambda pool: pool.take())

    @rule(count=st.one_of(small, odd_numbers, wrong_number))
    def take_many(self, count: Any) -> None:
        self.both(lambda pool: pool.take_many(count))

    @rule(
        operation=st.sampled_from(
            ["retain", "release", "release", "keep", "keep", "forget", "pins", "is_kept"]
        ),
        block=st.one_of(st.integers(-1, 9), st.integers(0, 4), wrong_number),
    )
    def one_block(self, operation: str, block: Any) -> None:
        self.both(lambda pool: getattr(pool, operation)(block))

    @rule(
        blocks=st.lists(st.integers(0, 8), max_size=6),
        wrong=st.one_of(st.none(), st.none(), wrong_number),
        as_array=st.booleans(),
    )
    def release_many(self, blocks: list[Any], wrong: Any, as_array: bool) -> None:
        if wrong is not None:
            blocks = [*blocks, wrong]
        elif as_array:
            self.both(lambda pool: pool.release_many(np.array(blocks, np.int32)))
            return
        expected = outcome(self.model.release_many, blocks)
        actual = outcome(self.core.release_many, blocks)
        # A list that mixes an id out of range with a "3" is wrong in two ways.
        assert actual == expected or (wrong is not None and actual[0] == "raised")

    @rule(times=st.integers(0, 3), block=st.integers(0, 8))
    def release_as_often_as_pinned_and_more(self, times: int, block: int) -> None:
        if block < self.core.num_blocks:
            listed = [block] * (self.core.pins(block) + times)
            self.both(lambda pool: pool.release_many(listed))

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "core"):
            assert pool_snapshot(self.core) == pool_snapshot(self.model)
            self.model.check()
            self.core.check()


class ManagerMachine(RuleBasedStateMachine):
    """One manager with its own pool.

    ``work`` does most of what happens, several operations at a time: machines with a rule
    for each operation spend their steps on managers that are almost empty.
    """

    num_managers = 1
    fenced = False
    windowed = False

    @initialize(
        num_blocks=st.one_of(st.integers(1, 16), st.integers(17, 70)),
        block_sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        rows=st.integers(1, 3),
        columns=st.integers(1, 3),
    )
    def begin(self, num_blocks: int, block_sizes: tuple[int, int], rows: int, columns: int) -> None:
        sizes = block_sizes[: self.num_managers]
        shared: Any = {}
        shared_model: Any = {}
        if self.num_managers > 1:
            shared["pool"] = BlockPool(num_blocks)
            shared_model["pool"] = ReferencePool(num_blocks)
        self.cores = [
            BlockManager(num_blocks, size, rows=rows, columns=columns, **shared) for size in sizes
        ]
        self.models = [ReferenceBlockManager(num_blocks, size, **shared_model) for size in sizes]
        self.memory = BlockMemory()
        self.mirrors = [Mirror() for _ in sizes]
        # The model never gives a row twice, so that its row stands for one life.
        self.row_of_life: list[dict[int, int]] = [{} for _ in sizes]
        self.assigned: list[tuple[int, list[int]]] = [
            (core.rows_version, []) for core in self.cores
        ]
        self.views: list[tuple[int, int, np.ndarray, np.ndarray | None]] = []
        self.use(0)

    # ---------------------------------------------------------------- helpers

    def use(self, which: int) -> None:
        """The manager that the next operations are about."""
        self.which = which % self.num_managers
        self.core, self.model = self.cores[self.which], self.models[self.which]
        self.size = self.model.block_size

    def pick(self, number: int, *, live: bool) -> Hashable:
        """Nearly always what was asked for, where there is one."""
        names = [name for name in NAMES if (name in self.model) == live]
        if not names or number % 20 == 0:
            names = NAMES
        return names[number // 20 % len(names)]

    def both(self, call: Callable[[Any], Any], *, wrong_twice: bool = False) -> tuple[Any, ...]:
        """A call that is wrong in two ways at once may raise either error."""
        expected = outcome(call, self.model)
        actual = outcome(call, self.core)
        assert actual == expected or (wrong_twice and actual[0] == expected[0] == "raised")
        return expected

    def wrote(self, seq: Hashable, slots: list[int], copies: list[list[int]]) -> None:
        self.memory.copy_all(copies, self.size)
        self.memory.write((self.which, seq), slots, self.size)

    def tokens(self, number: int) -> int:
        """Mostly few, so that many fit; sometimes more than there is room for."""
        if number % 8 == 0:
            return number % ((self.model.num_blocks + 1) * self.size)
        return number % (3 * self.size + 1)

    # ------------------------------------------------------------- operations

    def allocate(self, name: int, n_tokens: int) -> None:
        seq = self.pick(name, live=False)
        result = self.both(lambda manager: manager.allocate(seq, self.tokens(n_tokens)))
        if result[0] == "returned":
            self.memory.begin((self.which, seq), [])
            self.wrote(seq, self.model.slots(seq), [])

    def append_slot(self, name: int, _: int) -> None:
        seq = self.pick(name, live=True)
        result = self.both(lambda manager: manager.append_slot(seq))
        if result[0] == "returned":
            block, offset, source = result[1]
            copies = [] if source is None else [[source, block]]
            self.wrote(seq, [block * self.size + offset], copies)

    def append_slots(self, name: int, n_tokens: int) -> None:
        seq = self.pick(name, live=True)
        result = self.both(lambda manager: manager.append_slots(seq, self.tokens(n_tokens)))
        if result[0] == "returned":
            slots, pair = result[1]
            self.wrote(seq, slots, [] if pair is None else [pair])

    def append_batch(self, chooser: int, spare: int) -> None:
        """All live sequences from some first one on, some of them twice."""
        live = list(self.model)
        seqs = live[chooser % 5 :] + live[: chooser // 5 % 6]
        out = np.full(len(seqs) + spare % 3, -7, np.int64)
        expected_out = [-7] * len(out)
        rows = self.core.rows(seqs)
        rows.flags.writeable = False
        expected = self.model.append_batch(self.model.rows(seqs), expected_out)
        served, copies = self.core.append_batch(rows, out)
        assert (served, plain(copies)) == expected
        assert out.tolist() == expected_out
        if copies is not None:
            assert copies.dtype == np.int32
            self.memory.copy_all(copies.tolist(), self.size)
        for seq, slot in zip(seqs[:served], out.tolist(), strict=False):
            self.memory.write((self.which, seq), [slot], self.size)

    def some(self, chooser: int) -> list[Hashable]:
        """Live sequences in an order that is not theirs."""
        live = list(self.model)
        return [*live[chooser % 5 :], *live[: chooser % 5]][: 1 + chooser // 5 % 7]

    def append_counts(self, chooser: int, numbers: int) -> None:
        """A batch with drafts: several tokens a row; the plan is what it then takes."""
        seqs = self.some(chooser)
        counts = [1 + (numbers >> place) % (2 * self.size) for place in range(len(seqs))]
        out = np.full(sum(counts) + numbers % 3, -7, np.int64)
        expected_out = [-7] * len(out)
        before = int(self.core.counters[Counter.BLOCKS_TAKEN])
        plan = self.core.plan_append(self.core.rows(seqs), np.array(counts, np.int32))
        expected = self.model.append_batch(self.model.rows(seqs), expected_out, counts)
        served, copies = self.core.append_batch(
            self.core.rows(seqs), out, np.array(counts, np.int32)
        )
        assert (served, plain(copies)) == expected
        assert out.tolist() == expected_out
        taken = int(self.core.counters[Counter.BLOCKS_TAKEN]) - before
        assert (served == len(seqs)) == (plan.needed <= plan.available)
        assert taken == plan.needed if served == len(seqs) else taken <= plan.available
        self.memory.copy_all([] if copies is None else copies.tolist(), self.size)
        for seq, count in zip(seqs[:served], counts, strict=False):
            slots, expected_out = expected_out[:count], expected_out[count:]
            self.memory.write((self.which, seq), slots, self.size)

    def plan_append(self, chooser: int, numbers: int) -> None:
        seqs = self.some(chooser)
        cut = numbers % (len(seqs) + 1)
        seqs, gone = seqs[cut:], seqs[:cut]
        counts = [1 + (numbers >> place) % (2 * self.size) for place in range(len(seqs))]
        if numbers % 2:
            counts = [1] * len(seqs)
        given = None if numbers % 2 else np.array(counts, np.int32)
        plan = self.core.plan_append(
            self.core.rows(seqs), counts=given, without=self.core.rows(gone)
        )
        rows, without = self.model.rows(seqs), self.model.rows(gone)
        assert tuple(plan) == self.model.plan_append(rows, counts, without)
        assert tuple(plan) == self.model.plan_by_doing(rows, counts, without)

    def truncate_batch(self, chooser: int, numbers: int) -> None:
        seqs = self.some(chooser)
        lengths = [
            max(0, self.model.lens[seq] - (numbers >> place) % (self.size + 2))
            for place, seq in enumerate(seqs)
        ]
        if numbers % 16 == 8:
            seqs, lengths = [*seqs, seqs[0]] if seqs else [], [*lengths, *lengths[:1]]
        rows, core_rows = self.model.rows(seqs), self.core.rows(seqs)
        expected = outcome(self.model.truncate_batch, rows, lengths)
        assert outcome(self.core.truncate_batch, core_rows, np.array(lengths, np.int32)) == expected
        if expected[0] == "returned":
            for seq, length in zip(seqs, lengths, strict=True):
                del self.memory.tokens[self.which, seq][length:]

    def slide(self, chooser: int, numbers: int) -> None:
        """Exactly the blocks wholly outside go; all that the window or a sink sees stays."""
        seqs = self.some(chooser)
        window, sinks = 1 + numbers % (2 * self.size), numbers // 7 % 3 * (numbers % 5)
        lengths = [max(0, self.model.lens[seq] - (numbers >> 5) % 3) for seq in seqs]
        expected = self.model.release_outside_window(self.model.rows(seqs), lengths, window, sinks)
        released = self.core.release_outside_window(
            self.core.rows(seqs), np.array(lengths, np.int32), window, sinks
        )
        assert released == expected

    def swap(self, name: int, numbers: int) -> None:
        """Out, with a copy of what it has for itself, and in again."""
        seq = self.pick(name, live=True)
        exclusive = self.both(lambda manager: manager.exclusive_blocks(seq))
        if exclusive[0] != "returned":
            return
        table, length = list(self.model.block_ids[seq]), self.model.lens[seq]
        contents = [
            [self.memory.contents.get((block, offset)) for offset in range(self.size)]
            for block in table
        ]
        kept = [column for column in range(len(table)) if column not in exclusive[1]]
        pinned = [table[column] for column in kept if table[column] >= 0]
        for block in pinned:
            self.both(lambda manager, block=block: manager.pin(block))
        self.both(lambda manager: manager.free_seq(seq))
        self.equal_but_for(seq)
        blocks = [table[column] for column in kept]
        if numbers % 8 == 0:
            self.both(lambda manager: manager.pool.take_many(numbers // 8 % 4))
        result = self.both(lambda manager: manager.restore(seq, length, kept, blocks))
        for block in pinned:
            self.both(lambda manager, block=block: manager.unpin(block))
        if result[0] != "returned":
            del self.memory.tokens[self.which, seq]
            return
        for column, block in zip(exclusive[1], result[1], strict=True):
            for offset in range(self.size):
                self.memory.contents[block, offset] = contents[column][offset]

    def equal_but_for(self, seq: Hashable) -> None:
        tokens = self.memory.tokens.pop((self.which, seq))
        self.equal()
        self.memory.tokens[self.which, seq] = tokens

    def truncate(self, name: int, keep: int) -> None:
        seq = self.pick(name, live=True)
        n_tokens = keep % (self.model.lens.get(seq, 3) + 2)
        if self.both(lambda manager: manager.truncate(seq, n_tokens))[0] == "returned":
            del self.memory.tokens[self.which, seq][n_tokens:]

    def fork(self, names: int, share: int) -> None:
        parent, child = self.pick(names, live=True), self.pick(names // 7, live=False)
        n_tokens = None if share % 2 else share % (self.model.lens.get(parent, 3) + 2)
        result = self.both(
            lambda manager: manager.fork(parent, child, n_tokens),
            wrong_twice=parent not in self.model and child in self.model,
        )
        if result[0] == "returned":
            tokens = self.memory.tokens[self.which, parent][:n_tokens]
            self.memory.begin((self.which, child), tokens)

    def reorder(self, chooser: int, fault: int) -> None:
        """Beams from each other or from one that is none; now and then a wrong list."""
        seqs = list(self.model)[: chooser % 6]
        parents = [self.pick(chooser * 31 + 7 * place, live=True) for place in range(len(seqs))]
        seqs += seqs[:1] if fault % 16 == 8 else []
        parents += parents[:1] if fault % 16 >= 8 and fault % 32 < 10 else []
        result = self.both(lambda manager: manager.reorder(seqs, parents), wrong_twice=True)
        if result[0] == "returned":
            were = [list(self.memory.tokens[self.which, parent]) for parent in parents]
            for seq, tokens in zip(seqs, were, strict=True):
                self.memory.begin((self.which, seq), tokens)

    def free_seq(self, name: int, _: int) -> None:
        seq = self.pick(name, live=True)
        if self.both(lambda manager: manager.free_seq(seq))[0] == "returned":
            del self.memory.tokens[self.which, seq]

    def pin(self, block: int, verb: int) -> None:
        block = block % (self.model.num_blocks + 2) - 1
        verbs = ["pin", "unpin", "unpin"]
        self.both(lambda manager: getattr(manager, verbs[verb % 3])(block))

    def keep(self, block: int, verb: int) -> None:
        block = block % (self.model.num_blocks + 2) - 1
        verbs = ["keep", "keep", "forget", "release"]
        self.both(lambda manager: getattr(manager.pool, verbs[verb % 4])(block))

    def keep_table(self, name: int, _: int) -> None:
        """As prefix sharing will: what a sequence leaves behind is evictable."""
        for block in list(self.model.block_ids.get(self.pick(name, live=True), [])):
            self.both(lambda manager, block=block: manager.pool.keep(block))

    def take_or_release_pins(self, count: int, _: int) -> None:
        pool = self.model.pool
        pinned = [block for block in range(pool.num_blocks) for _ in range(pool.pins(block))]
        if pinned:
            self.both(lambda manager: manager.pool.release_many(pinned))
        else:
            self.both(lambda manager: manager.pool.take_many(count % 4))

    def drain(self, _: int, __: int) -> None:
        self.mirrors[self.which].drain(self.core, self.model.touched_cells())
        assert self.core.drain_changes().shape == (0, 3)

    def take_view(self, _: int, __: int) -> None:
        view = self.core.block_tables
        self.views.append((self.which, self.core.table_generation, view, None))

    def fence(self, _: int, __: int) -> None:
        self.both(lambda manager: manager.fence())

    def settle(self, step: int, behind: int) -> None:
        """Mostly one of the newest, in any order; also ones that were never begun."""
        step = self.model.newest_step + 1 - behind % 4 if step % 4 else step % 10 - 1
        self.both(lambda manager: manager.settle(step))

    verbs = (
        *["allocate"] * 2,
        *["append_slot"] * 6,
        *["append_slots"] * 3,
        *["append_batch"] * 4,
        *["fork"] * 4,
        *["truncate"] * 2,
        *["free_seq"] * 3,
        *["reorder", "pin", "keep", "keep_table", "take_or_release_pins", "drain", "take_view"],
        *["append_counts", "plan_append", "truncate_batch", "swap"] * 2,
    )
    window_verbs = ("slide",) * 4
    fence_verbs = (*["fence"] * 3, *["settle"] * 3)

    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        verbs = self.verbs + self.fence_verbs * self.fenced + self.window_verbs * self.windowed
        operation = st.tuples(index, st.sampled_from(verbs), index, index)
        for which, verb, first, second in data.draw(st.lists(operation, min_size=5, max_size=15)):
            self.use(which)
            getattr(self, verb)(first, second)
            self.equal()

    # ----------------------------------------------------------------- misuse

    @rule(which=index, names=index, wrong=wrong_number, operation=index)
    def one_wrong_argument(self, which: int, names: int, wrong: Any, operation: int) -> None:
        self.use(which)
        alive, unused = self.pick(names, live=True), self.pick(names, live=False)
        calls: list[Callable[[Any], Any]] = [
            lambda manager: manager.allocate(unused, wrong),
            lambda manager: manager.can_allocate(wrong),
            lambda manager: manager.can_allocate(1, wrong),
            lambda manager: manager.append_slots(alive, wrong),
            lambda manager: manager.can_append(alive, wrong),
            lambda manager: manager.truncate(alive, wrong),
            lambda manager: manager.fork(alive, unused, wrong),
            lambda manager: manager.slots(alive, wrong),
            lambda manager: manager.slots(alive, 0, wrong),
            lambda manager: manager.settle(wrong),
            lambda manager: manager.pin(wrong),
            lambda manager: manager.unpin(wrong),
        ]
        if alive in self.model and unused not in self.model:
            self.both(calls[operation % len(calls)])

    @rule(which=index, name=index, odd=odd_numbers, operation=index)
    def odd_integers_are_integers(self, which: int, name: int, odd: Any, operation: int) -> None:
        self.use(which)
        seq = self.pick(name, live=True)
        calls: list[Callable[[Any], Any]] = [
            lambda manager: manager.can_allocate(odd, odd),
            lambda manager: manager.can_append(seq, odd),
            lambda manager: manager.slots(seq, 0, odd),
            lambda manager: manager.pool.pins(odd),
        ]
        self.both(calls[operation % len(calls)])

    @rule(which=index, name=index, operation=index)
    def unhashable_name(self, which: int, name: int, operation: int) -> None:
        self.use(which)
        alive = self.pick(name, live=True)
        calls: list[Callable[[Any], Any]] = [
            lambda core: core.allocate([], 1),
            lambda core: core.can_append([], 1),
            lambda core: core.append_slot([]),
            lambda core: core.append_slots([], 1),
            lambda core: core.truncate([], 0),
            lambda core: core.fork([], "new"),
            lambda core: core.fork(alive, []),
            lambda core: core.reorder([[]], [alive]),
            lambda core: core.reorder([alive], [[]]),
            lambda core: core.free_seq([]),
            lambda core: core.length([]),
            lambda core: core.table([]),
            lambda core: core.row([]),
            lambda core: core.rows([[]]),
            lambda core: core.slots([]),
            lambda core: core.tables[[]],
            lambda core: core.lens[[]],
        ]
        if alive in self.model:
            with pytest.raises(TypeError):
                calls[operation % len(calls)](self.core)

    @rule(which=index, fault=index, good=index)
    def append_batch_wrong(self, which: int, fault: int, good: int) -> None:
        self.use(which)
        core = self.core
        live = [core.row(seq) for seq in core]
        rows = np.array(live[: good % 4], np.int32)
        out = np.full(len(rows) + 2, -7, np.int64)
        unused = next(row for row in range(10**6) if row not in live)
        read_only = out.copy()
        read_only.flags.writeable = False
        wrong = [
            (rows.astype(np.int64), out),
            (rows.astype(np.uint32), out),
            (rows.astype(np.float32), out),
            (rows.astype(">i4"), out),
            (np.concatenate([rows, rows])[None, :], out),
            (np.array([7, 7, *rows], np.int32).reshape(1, -1), out),
            (np.array(5, np.int32), out),
            (np.zeros(2 * len(rows) + 4, np.int32)[::2], out),
            (rows.tolist(), out),
            (None, out),
            (np.append(rows, np.int32(unused)), out),
            (np.append(rows, np.int32(-1)), out),
            (np.append(rows, np.int32(2**31 - 1)), out),
            (np.append(rows, np.int32(core.block_tables.shape[0])), out),
            (out.view(np.int32)[: len(rows) + 1], out),
            (rows, out.astype(np.int32)),
            (rows, out.astype(np.uint64)),
            (rows, out.astype(np.float64)),
            (rows, out.astype(">i8")),
            (rows, out[None, :]),
            (rows, np.zeros(2 * len(rows) + 4, np.int64)[::2]),
            (rows, out.tolist()),
            (rows, None),
            (rows, read_only),
        ]
        if len(rows):
            wrong.append((rows, out[: len(rows) - 1]))
        bad_rows, bad_out = wrong[fault % len(wrong)]
        with pytest.raises((TypeError, ValueError)):
            core.append_batch(bad_rows, bad_out)
        assert (out == -7).all()

    # --------------------------------------------------------------- reading

    @rule(which=index, name=index, start=st.integers(-1, 9), stop=st.one_of(st.none(), small))
    def read(self, which: int, name: int, start: int, stop: int | None) -> None:
        self.use(which)
        seq = self.pick(name, live=True)
        for call in (
            lambda manager: manager.length(seq),
            lambda manager: list(manager.table(seq)),
            lambda manager: list(manager.tables[seq]),
            lambda manager: manager.lens[seq],
            lambda manager: seq in manager,
            lambda manager: seq in manager.tables,
            lambda manager: seq in manager.lens,
            lambda manager: manager.slots(seq, start, stop),
            lambda manager: manager.slots(seq),
            lambda manager: len(manager),
            lambda manager: start in manager.free,
            lambda manager: len(manager.free),
            lambda manager: manager.num_available,
        ):
            self.both(call)
        assert outcome(self.core.row, seq)[0] == outcome(self.core.rows, [seq])[0]
        if seq in self.core:
            assert self.core.slots(seq, self.core.length(seq)).dtype == np.int64
            assert self.core.rows([seq]).tolist() == [self.core.row(seq)]

    @rule(which=index, name=index, n_tokens=small, watermark=st.integers(0, 4))
    def can_is_do(self, which: int, name: int, n_tokens: int, watermark: int) -> None:
        self.use(which)
        seq = self.pick(name, live=True)
        self.both(lambda manager: manager.can_allocate(n_tokens, watermark))
        self.both(lambda manager: manager.can_allocate(n_tokens))
        self.both(lambda manager: manager.can_append(seq))
        can = self.both(lambda manager: manager.can_append(seq, n_tokens))
        if can[0] == "returned":
            # The doing call on a copy: the model's answer is the core's plan.
            done = outcome(copy.deepcopy(self.model).append_slots, seq, n_tokens)
            assert can[1] == (done[0] == "returned")

    # ------------------------------------------------------------ comparison

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "cores"):
            return
        for which, (core, model) in enumerate(zip(self.cores, self.models, strict=True)):
            assert snapshot(core) == snapshot(model)
            model.check()
            core.check()
            core.pool.check()
            check_rows(core)
            self.memory.compare(core, [((which, seq), seq) for seq in core])
            for seq in core:
                first_row = self.row_of_life[which].setdefault(model.row(seq), core.row(seq))
                assert core.row(seq) == first_row, "a sequence keeps its row for life"
            version, lives = self.assigned[which]
            self.assigned[which] = (core.rows_version, model.rows(list(model)))
            assert lives == self.assigned[which][1] or core.rows_version != version
        self.compare_views()

    def compare_views(self) -> None:
        """A view is live until the generation changes and frozen from then on (I10)."""
        for number, (which, generation, view, frozen) in enumerate(self.views):
            core = self.cores[which]
            if frozen is not None:
                assert (view == frozen).all()
            elif core.table_generation != generation:
                assert core.table_generation > generation
                self.views[number] = (which, generation, view, view.copy())
            else:
                assert (view == core.block_tables).all()
                assert view.shape == core.block_tables.shape
            assert not view.flags.writeable

    def teardown(self) -> None:
        """Everything given back: nothing is lost and nothing is free twice."""
        if not hasattr(self, "cores"):
            return
        for core in self.cores:
            for seq in list(core):
                core.free_seq(seq)
            last = core.fence()
            core.settle(last)
        pool = self.cores[0].pool
        for block in range(pool.num_blocks):
            pool.release_many([block] * pool.pins(block))
            pool.forget(block)
        assert sorted(pool.free_blocks().tolist()) == list(range(pool.num_blocks))
        for core in self.cores:
            core.check()


class FencedManagerMachine(ManagerMachine):
    """With steps in flight: what is let go stays held until they have settled."""

    fenced = True


class SharedPoolMachine(FencedManagerMachine):
    """Two managers with block sizes of their own on one pool."""

    num_managers = 2


class WindowMachine(ManagerMachine):
    """Tables with holes, whatever else happens to them."""

    windowed = True


class SharedWindowMachine(SharedPoolMachine):
    """The same with a fence and a second manager."""

    windowed = True


def test_a_manager_that_dies_gives_back_all_that_it_held() -> None:
    """Tables and fence; what Python code pinned stays pinned, the other manager's too."""
    pool = BlockPool(12)
    survivor, mortal = BlockManager(12, 4, pool=pool), BlockManager(12, 2, pool=pool)
    survivor.allocate("a", 8)
    mortal.allocate("a", 8)
    mortal.fork("a", "b", 3)
    mortal.append_slot("b")
    pool.keep(4)
    mortal.pin(2)
    mortal.fence()
    mortal.truncate("a", 3)
    assert pool.num_used == 7
    del mortal
    gc.collect()
    pool.check()
    assert np.flatnonzero(pool.ref).tolist() == [0, 1, 2]
    assert pool.evictable_blocks().tolist() == [4]
    assert survivor.tables["a"] == [0, 1]
    survivor.check()


TestPool = PoolMachine.TestCase
TestManager = ManagerMachine.TestCase
TestFencedManager = FencedManagerMachine.TestCase
TestSharedPool = SharedPoolMachine.TestCase
TestWindow = WindowMachine.TestCase
TestSharedWindow = SharedWindowMachine.TestCase
