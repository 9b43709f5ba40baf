"""The problem statement's own evidence, and programs in the style of its interface.

* 120,000 random allocate / append / fork / free operations; its three invariants, from
  their definitions, and ``check()`` after every single one.
* 120 sequences on a pool of 200 blocks, to completion, preempted on the way, nothing
  leaked.
* A fork at 6 tokens with blocks of 4.
* The same small programs run unchanged over a textbook implementation and over kvcore.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from state import BlockMemory

from kvcore.block_manager import BlockManager
from kvcore.errors import OutOfBlocks
from kvcore.scheduler import Scheduler

# ------------------------------------------------------------------ random operations


def assert_the_three_invariants(bm: BlockManager) -> np.ndarray:
    """From their definitions; returns how many tables have each block."""
    tables = [np.asarray(bm.tables[seq]) for seq in bm]
    cells = np.concatenate([np.empty(0, np.int32), *tables])
    occurrences = np.bincount(cells, minlength=bm.num_blocks)
    assert (bm.ref == occurrences).all()
    free = list(bm.free)
    assert len(set(free)) == len(free)
    assert sorted(free) == np.flatnonzero(occurrences == 0).tolist()
    for table, seq in zip(tables, bm, strict=True):
        assert len(table) == -(-bm.lens[seq] // bm.block_size)
    return occurrences


@pytest.mark.parametrize(
    ("seed", "num_blocks", "block_size"), [(1, 24, 4), (2, 48, 3), (3, 16, 1), (4, 32, 16)]
)
def test_120_000_random_operations_keep_the_three_invariants(
    seed: int, num_blocks: int, block_size: int, summary: list[str]
) -> None:
    """30,000 operations for each of four shapes of pool; every check after every one."""
    chooser = random.Random(seed)
    bm = BlockManager(num_blocks, block_size, rows=2, columns=2)
    memory = BlockMemory()
    refused = copied = 0
    for number in range(30_000):
        live = list(bm)
        operation = chooser.choice(["allocate", "fork", "free", "free"] + ["append"] * 8)
        seq = chooser.choice(live) if live else None
        written = None
        try:
            if operation == "allocate" or seq is None:
                bm.allocate(number, chooser.randrange(3 * block_size + 1))
                memory.begin(number, [])
                memory.write(number, bm.slots(number).tolist(), block_size)
            elif operation == "append":
                block, offset, source = bm.append_slot(seq)
                if source is not None:
                    memory.copy(source, block, block_size)
                    copied += 1
                memory.write(seq, [block * block_size + offset], block_size)
                written = block
            elif operation == "fork":
                bm.fork(seq, number)
                memory.begin(number, memory.tokens[seq])
            else:
                bm.free_seq(seq)
                del memory.tokens[seq]
        except OutOfBlocks:
            refused += 1
        occurrences = assert_the_three_invariants(bm)
        bm.check()
        if written is not None:
            assert occurrences[written] == 1, "a write where another sequence can read"
        if number % 50 == 0:
            memory.compare(bm, [(live_seq, live_seq) for live_seq in bm])
    assert refused > 100
    assert copied > 100 or block_size == 1
    summary.append(
        f"random operations: 30,000 on {num_blocks} blocks of {block_size} "
        f"(seed {seed}), {copied} copies, {refused} refusals, all checks after each"
    )
    for seq in list(bm):
        bm.free_seq(seq)
    assert sorted(bm.free) == list(range(num_blocks))


# ------------------------------------------------------------------ a run to completion


def run_to_completion(
    bm: Any, scheduler: Any, requests: list[tuple[int, int]]
) -> tuple[dict[int, int], int]:
    """Every request generates its number of tokens, then finishes as the listing's user
    would have it: out of ``running``, and its blocks freed. Returns the tokens of each
    at its end, and the number of preemptions."""
    target = {seq: prompt + new for seq, (prompt, new) in enumerate(requests)}
    ended: dict[int, int] = {}
    preemptions = 0
    for seq, (prompt, _) in enumerate(requests):
        scheduler.waiting.append((seq, prompt))
    for _ in range(100_000):
        ran_before = set(scheduler.running)
        decoded = scheduler.step()
        waiting = {seq for seq, _ in scheduler.waiting}
        preemptions += len(ran_before & waiting)
        for seq in list(decoded):
            if bm.lens[seq] >= target[seq]:
                ended[seq] = bm.lens[seq]
                scheduler.running.remove(seq)
                bm.free_seq(seq)
        if not scheduler.running and not scheduler.waiting:
            break
    assert ended == target
    return ended, preemptions


def requests_of(seed: int, number: int = 120) -> list[tuple[int, int]]:
    chooser = random.Random(seed)
    return [(chooser.randrange(1, 120), chooser.randrange(1, 160)) for _ in range(number)]


@pytest.mark.parametrize("seed", range(5))
def test_120_sequences_on_200_blocks_run_to_completion_without_a_leak(
    seed: int, summary: list[str]
) -> None:
    bm = BlockManager(200, 8)
    scheduler = Scheduler(bm, watermark_blocks=1)
    _, preemptions = run_to_completion(bm, scheduler, requests_of(seed))
    bm.check()
    assert preemptions > 0
    assert sorted(bm.free) == list(range(200))
    assert not bm.ref.any()
    summary.append(f"120 sequences on 200 blocks (seed {seed}): {preemptions} preemptions, no leak")


# ------------------------------------------------------------------ the fork of the text


def test_fork_at_6_tokens_with_blocks_of_4() -> None:
    """The first writer copies the partial block, the second then owns it and does not."""
    bm = BlockManager(num_blocks=8, block_size=4)
    bm.allocate(0, 6)
    bm.fork(0, 1)
    assert list(bm.ref[:3]) == [2, 2, 0]
    assert bm.append_slot(0) == (2, 2, 1)
    assert bm.append_slot(1) == (1, 2, None)
    assert bm.tables[0] == [0, 2]
    assert bm.tables[1] == [0, 1]
    assert list(bm.ref[:3]) == [2, 1, 1]
    bm.check()


# ------------------------------------------------------------------ a textbook twin


class TextbookBlocks:
    """The structures of the problem statement in their simplest form."""

    out_of_blocks: type[Exception] = OutOfBlocks

    def __init__(self, num_blocks: int, block_size: int, *, tail_first: bool) -> None:
        self.block_size = block_size
        self.free: deque[int] = deque(range(num_blocks))
        self.ref = [0] * num_blocks
        self.tables: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}
        self._order: Callable[[list[int]], Iterable[int]] = reversed if tail_first else iter

    def _fresh(self, how_many: int) -> list[int]:
        if how_many > len(self.free):
            raise OutOfBlocks(how_many, len(self.free))
        fresh = [self.free.popleft() for _ in range(how_many)]
        for block in fresh:
            self.ref[block] = 1
        return fresh

    def _leave(self, block: int) -> None:
        self.ref[block] -= 1
        if not self.ref[block]:
            self.free.append(block)

    def allocate(self, seq: int, n_tokens: int) -> None:
        self.tables[seq] = self._fresh((n_tokens + self.block_size - 1) // self.block_size)
        self.lens[seq] = n_tokens

    def append_slot(self, seq: int) -> tuple[int, int, int | None]:
        table, position = self.tables[seq], self.lens[seq]
        source = None
        if position % self.block_size == 0:
            table.extend(self._fresh(1))
        elif self.ref[table[-1]] > 1:
            source = table[-1]
            table[-1:] = self._fresh(1)
            self._leave(source)
        self.lens[seq] = position + 1
        return table[-1], position % self.block_size, source

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = self.tables[parent][:]
        self.lens[child] = self.lens[parent]
        for block in self.tables[child]:
            self.ref[block] += 1

    def free_seq(self, seq: int) -> None:
        del self.lens[seq]
        for block in self._order(self.tables.pop(seq)):
            self._leave(block)


class TextbookScheduler:
    """First come, first served; oldest decodes first; the newest yields."""

    def __init__(self, bm: TextbookBlocks, watermark_blocks: int = 1) -> None:
        self.bm = bm
        self.watermark_blocks = watermark_blocks
        self.waiting: deque[tuple[int, int]] = deque()
        self.running: list[int] = []

    def _head_fits(self) -> bool:
        if not self.waiting:
            return False
        blocks = (self.waiting[0][1] + self.bm.block_size - 1) // self.bm.block_size
        return len(self.bm.free) >= blocks + self.watermark_blocks

    def step(self) -> list[int]:
        while self._head_fits():
            seq, n_tokens = self.waiting.popleft()
            self.bm.allocate(seq, n_tokens)
            self.running.append(seq)
        decoded: list[int] = []
        while len(decoded) < len(self.running):
            seq = self.running[len(decoded)]
            try:
                self.bm.append_slot(seq)
            except OutOfBlocks:
                newest = self.running.pop()
                self.waiting.appendleft((newest, self.bm.lens[newest]))
                self.bm.free_seq(newest)
            else:
                decoded.append(seq)
        return decoded


def block_program(bm: Any, seed: int, with_ids: bool) -> list[Any]:
    """A user of ``allocate``, ``append_slot``, ``fork``, ``free_seq``, ``free``, ``ref``,
    ``tables`` and ``lens``, logging all that it sees."""
    chooser = random.Random(seed)
    seen: list[Any] = []
    for number in range(1_500):
        live = sorted(bm.lens)
        act = chooser.randrange(8)
        seq = chooser.choice(live) if live else -1
        try:
            if act == 0 or not live:
                bm.allocate(number, chooser.randrange(1, 14))
            elif act == 1:
                bm.fork(seq, number)
            elif act == 2:
                bm.free_seq(seq)
            else:
                block, offset, source = bm.append_slot(seq)
                seen.append((offset, source is None, bm.ref[block] == 1))
                if with_ids:
                    seen.append((block, source))
        except OutOfBlocks:
            seen.append("out of blocks")
        seen.append((len(bm.free), sorted(bm.ref), dict(bm.lens)))
        seen.append({seq: len(bm.tables[seq]) for seq in bm.tables})
        seen.append([block in bm.free for block in range(len(bm.ref))].count(True))
        if with_ids:
            seen.append((list(bm.free), list(bm.ref)))
            seen.append({seq: list(table) for seq, table in bm.tables.items()})
            assert all(bm.tables[seq] == list(bm.tables[seq]) for seq in bm.tables)
    assert "out of blocks" in seen
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_a_program_for_the_listing_runs_unchanged(seed: int) -> None:
    """Equal in all it sees but block ids, which depend on the order of release."""
    textbook = block_program(TextbookBlocks(20, 4, tail_first=False), seed, with_ids=False)
    assert block_program(BlockManager(20, 4), seed, with_ids=False) == textbook


@pytest.mark.parametrize("seed", range(10))
def test_with_the_documented_release_order_even_the_ids_are_equal(seed: int) -> None:
    """The order of release, last block first, is the only difference from the listing."""
    textbook = block_program(TextbookBlocks(20, 4, tail_first=True), seed, with_ids=True)
    assert block_program(BlockManager(20, 4), seed, with_ids=True) == textbook


@pytest.mark.parametrize("seed", range(5))
def test_a_scheduler_program_for_the_listing_runs_unchanged(seed: int) -> None:
    """Both bring every request to the same end. When the preempted come back may differ:
    kvcore asks for the block of their next token too, so that they do not bounce."""
    textbook = TextbookBlocks(200, 8, tail_first=False)
    expected, preempted = run_to_completion(
        textbook, TextbookScheduler(textbook), requests_of(seed)
    )
    bm = BlockManager(200, 8)
    ended, preemptions = run_to_completion(bm, Scheduler(bm), requests_of(seed))
    assert ended == expected
    assert preempted > 0
    assert preemptions > 0
    assert preemptions <= preempted


@pytest.mark.parametrize("seed", range(5))
def test_steps_without_preemption_are_those_of_the_listing(seed: int) -> None:
    """Step by step: who decodes, who waits, who runs, how long everybody is."""
    chooser = random.Random(seed)
    textbook = TextbookBlocks(64, 4, tail_first=True)
    bm = BlockManager(64, 4)
    sides: list[tuple[Any, Any]] = [(textbook, TextbookScheduler(textbook)), (bm, Scheduler(bm))]
    for number in range(400):
        prompt, ends, which = chooser.randrange(1, 30), chooser.random() < 0.3, chooser.random()
        seen = []
        for manager, scheduler in sides:
            if len(manager.free) > 24 and len(scheduler.waiting) < 3:
                scheduler.waiting.append((number, prompt))
            decoded = scheduler.step()
            # Room to grow is kept by ending the oldest, so that nobody is preempted.
            while scheduler.running and (ends or len(manager.free) < len(scheduler.running) + 1):
                place = int(which * len(scheduler.running)) if ends else 0
                leaving = scheduler.running[place]
                scheduler.running.remove(leaving)
                manager.free_seq(leaving)
                if ends:
                    break
            seen.append(
                (
                    list(decoded),
                    list(scheduler.waiting),
                    list(scheduler.running),
                    dict(manager.lens),
                    {seq: list(manager.tables[seq]) for seq in manager.tables},
                    list(manager.free),
                )
            )
        assert seen[0] == seen[1]
