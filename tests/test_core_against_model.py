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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
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
from kvcore.pool import BlockPool

NAMES: list[Hashable] = [0, 1, "two", ("three", 3), None, -5, 6.5, frozenset({7})]

WRONG_NUMBERS = [-1, -(2**31), 2**31, 2**63, 2**64, -(2**70), 1.0, "3", [], b"1", np.float32(2)]

index = st.integers(0, 1_000)
small = st.integers(0, 12)
# Mostly what works, so that the machine gets somewhere.
odd_numbers = st.sampled_from([np.int64(3), np.uint8(2), True, 10**6])
count = st.one_of(small, small, small, st.integers(13, 70), odd_numbers)
wrong_number = st.sampled_from(WRONG_NUMBERS)
name = st.tuples(st.sampled_from(["live"] * 6 + ["dead", "any"]), index)
new_name = st.tuples(st.sampled_from(["dead"] * 6 + ["live", "any"]), index)


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

    @rule(count=st.one_of(count, wrong_number))
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
    """One manager with its own pool."""

    num_managers = 1

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

    # ---------------------------------------------------------------- helpers

    def pick(self, choice: tuple[str, int], which: int) -> Hashable:
        kind, number = choice
        model = self.models[which % self.num_managers]
        names = [name for name in NAMES if kind == "any" or (name in model) == (kind == "live")]
        names = names or NAMES
        return names[number % len(names)]

    def both(
        self, which: int, call: Callable[[Any], Any], *, wrong_twice: bool = False
    ) -> tuple[Any, ...]:
        """A call that is wrong in two ways at once may raise either error."""
        which %= self.num_managers
        expected = outcome(call, self.models[which])
        actual = outcome(call, self.cores[which])
        assert actual == expected or (wrong_twice and actual[0] == expected[0] == "raised")
        return expected

    def wrote(self, which: int, seq: Hashable, slots: list[int], copies: list[list[int]]) -> None:
        which %= self.num_managers
        size = self.models[which].block_size
        self.memory.copy_all(copies, size)
        self.memory.write((which, seq), slots, size)

    # ------------------------------------------------------------- sequences

    @rule(which=index, seq=new_name, n_tokens=count)
    def allocate(self, which: int, seq: tuple[str, int], n_tokens: Any) -> None:
        chosen = self.pick(seq, which)
        result = self.both(which, lambda manager: manager.allocate(chosen, n_tokens))
        if result[0] == "returned":
            which %= self.num_managers
            self.memory.begin((which, chosen), [])
            slots = plain(self.models[which].slots(chosen))
            self.wrote(which, chosen, slots, [])

    @rule(which=index, seq=name)
    def append_slot(self, which: int, seq: tuple[str, int]) -> None:
        chosen = self.pick(seq, which)
        result = self.both(which, lambda manager: manager.append_slot(chosen))
        if result[0] == "returned":
            block, offset, source = result[1]
            size = self.models[which % self.num_managers].block_size
            copies = [] if source is None else [[source, block]]
            self.wrote(which, chosen, [block * size + offset], copies)

    @rule(which=index, seq=name, n_tokens=count)
    def append_slots(self, which: int, seq: tuple[str, int], n_tokens: Any) -> None:
        chosen = self.pick(seq, which)
        result = self.both(which, lambda manager: manager.append_slots(chosen, n_tokens))
        if result[0] == "returned":
            slots, pair = result[1]
            self.wrote(which, chosen, slots, [] if pair is None else [pair])

    @rule(which=index, choices=st.lists(index, max_size=12), spare=st.integers(0, 2))
    def append_batch(self, which: int, choices: list[int], spare: int) -> None:
        which %= self.num_managers
        core, model = self.cores[which], self.models[which]
        live = list(model)
        seqs = [live[choice % len(live)] for choice in choices] if live else []
        out = np.full(len(seqs) + spare, -7, np.int64)
        expected_out = [-7] * len(out)
        rows = core.rows(seqs)
        rows.flags.writeable = False
        expected = model.append_batch(model.rows(seqs), expected_out)
        served, copies = core.append_batch(rows, out)
        assert (served, plain(copies)) == expected
        assert out.tolist() == expected_out
        if copies is not None:
            assert copies.dtype == np.int32
            self.memory.copy_all(copies.tolist(), model.block_size)
        for seq, slot in zip(seqs[:served], out.tolist(), strict=False):
            self.memory.write((which, seq), [slot], model.block_size)

    @rule(which=index, fault=index, good=index)
    def append_batch_wrong(self, which: int, fault: int, good: int) -> None:
        core = self.cores[which % self.num_managers]
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

    @rule(which=index, seq=name, keep=index)
    def truncate(self, which: int, seq: tuple[str, int], keep: int) -> None:
        chosen = self.pick(seq, which)
        length = self.models[which % self.num_managers].lens.get(chosen, 3)
        n_tokens = keep % (length + 2)
        result = self.both(which, lambda manager: manager.truncate(chosen, n_tokens))
        if result[0] == "returned":
            del self.memory.tokens[which % self.num_managers, chosen][n_tokens:]

    @rule(which=index, parent=name, child=new_name, share=st.one_of(st.none(), index))
    def fork(
        self, which: int, parent: tuple[str, int], child: tuple[str, int], share: int | None
    ) -> None:
        old, new = self.pick(parent, which), self.pick(child, which)
        model = self.models[which % self.num_managers]
        n_tokens = None if share is None else share % (model.lens.get(old, 3) + 2)
        result = self.both(
            which,
            lambda manager: manager.fork(old, new, n_tokens),
            wrong_twice=old not in model and new in model,
        )
        if result[0] == "returned":
            which %= self.num_managers
            self.memory.begin((which, new), self.memory.tokens[which, old][:n_tokens])

    @rule(which=index, pairs=st.lists(st.tuples(name, name), max_size=5), longer=st.integers(0, 9))
    def reorder(self, which: int, pairs: list[Any], longer: int) -> None:
        seqs = list(dict.fromkeys(self.pick(seq, which) for seq, _ in pairs))
        parents = [self.pick(parent, which) for _, parent in pairs][: len(seqs)]
        seqs += seqs[:1] if longer == 8 else []
        parents += parents[:1] if longer >= 8 else []
        result = self.both(which, lambda manager: manager.reorder(seqs, parents), wrong_twice=True)
        if result[0] == "returned":
            which %= self.num_managers
            were = [list(self.memory.tokens[which, parent]) for parent in parents]
            for seq, tokens in zip(seqs, were, strict=True):
                self.memory.begin((which, seq), tokens)

    @rule(which=index, seq=name)
    def free_seq(self, which: int, seq: tuple[str, int]) -> None:
        chosen = self.pick(seq, which)
        result = self.both(which, lambda manager: manager.free_seq(chosen))
        if result[0] == "returned":
            del self.memory.tokens[which % self.num_managers, chosen]

    # ----------------------------------------------- wrong in exactly one way

    @rule(
        which=index,
        live=st.tuples(st.just("live"), index),
        dead=st.tuples(st.just("dead"), index),
        wrong=wrong_number,
        operation=index,
    )
    def one_wrong_argument(
        self, which: int, live: tuple[str, int], dead: tuple[str, int], wrong: Any, operation: int
    ) -> None:
        alive, unused = self.pick(live, which), self.pick(dead, which)
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
        model = self.models[which % self.num_managers]
        if alive in model and unused not in model:
            self.both(which, calls[operation % len(calls)])

    @rule(which=index, live=st.tuples(st.just("live"), index), operation=index)
    def unhashable_name(self, which: int, live: tuple[str, int], operation: int) -> None:
        alive = self.pick(live, which)
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
        core = self.cores[which % self.num_managers]
        if alive in core:
            with pytest.raises(TypeError):
                calls[operation % len(calls)](core)

    # --------------------------------------------------------------- holders

    @rule(which=index, block=st.integers(-1, 16), operation=st.sampled_from(["pin", "unpin"]))
    def pins(self, which: int, block: int, operation: str) -> None:
        self.both(which, lambda manager: getattr(manager, operation)(block))

    @rule(
        which=index,
        block=st.integers(0, 16),
        operation=st.sampled_from(["keep", "keep", "keep", "forget", "release"]),
    )
    def pool_block(self, which: int, block: int, operation: str) -> None:
        self.both(which, lambda manager: getattr(manager.pool, operation)(block))

    @rule(which=index, count=st.integers(0, 3))
    def take_many(self, which: int, count: int) -> None:
        self.both(which, lambda manager: manager.pool.take_many(count))

    @rule(which=index)
    def release_all_pins(self, which: int) -> None:
        model = self.models[which % self.num_managers].pool
        listed = [block for block in range(model.num_blocks) for _ in range(model.pins(block))]
        self.both(which, lambda manager: manager.pool.release_many(listed))

    @rule(which=index)
    def keep_all_used(self, which: int) -> None:
        for block, held in enumerate(list(self.models[0].pool.ref)):
            if held:
                self.both(which, lambda manager, block=block: manager.pool.keep(block))

    # --------------------------------------------------------------- reading

    @rule(which=index, seq=name, start=st.integers(-1, 9), stop=st.one_of(st.none(), small))
    def read(self, which: int, seq: tuple[str, int], start: int, stop: int | None) -> None:
        chosen = self.pick(seq, which)
        for call in (
            lambda manager: manager.length(chosen),
            lambda manager: list(manager.table(chosen)),
            lambda manager: list(manager.tables[chosen]),
            lambda manager: manager.lens[chosen],
            lambda manager: chosen in manager,
            lambda manager: chosen in manager.tables,
            lambda manager: chosen in manager.lens,
            lambda manager: manager.slots(chosen, start, stop),
            lambda manager: manager.slots(chosen),
            lambda manager: len(manager),
            lambda manager: start in manager.free,
            lambda manager: len(manager.free),
        ):
            self.both(which, call)
        core = self.cores[which % self.num_managers]
        assert outcome(core.row, chosen)[0] == outcome(core.rows, [chosen])[0]
        if chosen in core:
            assert core.slots(chosen).dtype == np.int64
            assert core.rows([chosen]).tolist() == [core.row(chosen)]

    @rule(which=index, seq=name, n_tokens=small, watermark=st.integers(0, 4))
    def can_is_do(self, which: int, seq: tuple[str, int], n_tokens: int, watermark: int) -> None:
        chosen = self.pick(seq, which)
        self.both(which, lambda manager: manager.can_allocate(n_tokens, watermark))
        self.both(which, lambda manager: manager.can_allocate(n_tokens))
        self.both(which, lambda manager: manager.can_append(chosen))
        can = self.both(which, lambda manager: manager.can_append(chosen, n_tokens))
        if can[0] == "returned":
            # The doing call on a copy: the model's answer is the core's plan.
            trial = copy.deepcopy(self.models[which % self.num_managers])
            done = outcome(trial.append_slots, chosen, n_tokens)
            assert can[1] == (done[0] == "returned")

    @rule(which=index)
    def drain(self, which: int) -> None:
        which %= self.num_managers
        core, model = self.cores[which], self.models[which]
        self.mirrors[which].drain(core, model.touched_cells())
        assert core.drain_changes().shape == (0, 3)

    @rule(which=index)
    def take_view(self, which: int) -> None:
        which %= self.num_managers
        core = self.cores[which]
        self.views.append((which, core.table_generation, core.block_tables, None))

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

    @rule(which=index)
    def fence(self, which: int) -> None:
        self.both(which, lambda manager: manager.fence())

    @rule(which=index, step=st.integers(-1, 8))
    def settle(self, which: int, step: int) -> None:
        self.both(which, lambda manager: manager.settle(step))

    @precondition(lambda self: any(model.newest_step for model in self.models))
    @rule(which=index, behind=st.integers(0, 2))
    def settle_newest(self, which: int, behind: int) -> None:
        step = self.models[which % self.num_managers].newest_step - behind
        self.both(which, lambda manager: manager.settle(step))


class SharedPoolMachine(FencedManagerMachine):
    """Two managers with block sizes of their own on one pool."""

    num_managers = 2


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
