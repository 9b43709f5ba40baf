"""The slow, obvious twin of kvcore: deques, dicts and lists, one block at a time.

It is the oracle of the property tests, so it takes no shortcut: a block is one entry
of one deque, every holder is written down, and a call that may fail counts what it
needs before it touches anything. Public operations, argument checks, exceptions and
results are those of the compiled classes, with plain lists for arrays.

Rows are the exception: which row a sequence gets is the core's own affair, so the
model numbers its sequences as they come and a test translates.

Where a call is wrong in two ways at once, the contract does not say which error comes
first, and a test that makes such calls accepts either.
"""

from __future__ import annotations

import operator
from collections import Counter as Multiset
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from kvcore.counters import Counter
from kvcore.errors import InvariantError, OutOfBlocks, RequestRefused
from kvcore.gauges import Gauges
from kvcore.scheduler import Reason, Resumed, Verdict

__all__ = ["ReferenceBlockManager", "ReferencePool", "ReferenceScheduler", "ReferenceStep"]

LARGEST_COUNT = 2**31 - 1


def as_integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def as_count(name: str, value: Any) -> int:
    number = as_integer(name, value)
    if not 0 <= number <= LARGEST_COUNT:
        raise ValueError(f"{name} out of range: {number}")
    return number


def blocks_for(n_tokens: int, block_size: int) -> int:
    return -(-n_tokens // block_size)


class ReferencePool:
    """Blocks, each used, evictable or free."""

    def __init__(self, num_blocks: Any) -> None:
        self.num_blocks = as_integer("num_blocks", num_blocks)
        if not 1 <= self.num_blocks <= LARGEST_COUNT:
            raise ValueError(f"num_blocks out of range: {num_blocks}")
        self.ref = [0] * self.num_blocks
        self._pins = [0] * self.num_blocks
        self._kept: set[int] = set()
        self._free = deque(range(self.num_blocks))
        self._evictable: deque[int] = deque()
        self.managers: list[ReferenceBlockManager] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return sum(1 for count in self.ref if count > 0)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._evictable)

    def free_blocks(self) -> list[int]:
        return list(self._free)

    def evictable_blocks(self) -> list[int]:
        return list(self._evictable)

    # Shared by pins and managers: every way in and every way out of "used".

    def take_reference(self) -> tuple[int, bool]:
        """A block with one reference on it, and whether it had to be evicted."""
        if self._free:
            block, evicted = self._free.popleft(), False
        elif self._evictable:
            block, evicted = self._evictable.popleft(), True
            self._kept.remove(block)
        else:
            raise OutOfBlocks(1, 0)
        self.ref[block] = 1
        return block, evicted

    def add_reference(self, block: int) -> None:
        if self.ref[block] == 0:
            self._evictable.remove(block)
        self.ref[block] += 1

    def drop_reference(self, block: int) -> bool:
        """True when that was the last one."""
        assert self.ref[block] > 0
        self.ref[block] -= 1
        if self.ref[block]:
            return False
        (self._evictable if block in self._kept else self._free).append(block)
        return True

    # Public operations.

    def _block(self, value: Any) -> int:
        block = as_integer("block", value)
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block out of range: {block}")
        return block

    def take(self) -> int:
        return self.take_many(1)[0]

    def take_many(self, count: Any) -> list[int]:
        count = as_count("count", count)
        if count > self.available:
            raise OutOfBlocks(count, self.available)
        blocks = [self.take_reference()[0] for _ in range(count)]
        for block in blocks:
            self._pins[block] += 1
        return blocks

    def retain(self, block: Any) -> None:
        block = self._block(block)
        if block in self._free:
            raise ValueError(f"block {block} is free")
        self.add_reference(block)
        self._pins[block] += 1

    def release(self, block: Any) -> None:
        self.release_many([block])

    def release_many(self, blocks: Any) -> None:
        blocks = [self._block(block) for block in blocks]
        for block, times in Multiset(blocks).items():
            if times > self._pins[block]:
                raise ValueError(f"block {block} has {self._pins[block]} pins")
        for block in blocks:
            self._pins[block] -= 1
            self.drop_reference(block)

    def pins(self, block: Any) -> int:
        return self._pins[self._block(block)]

    def keep(self, block: Any) -> None:
        block = self._block(block)
        if self.ref[block] == 0:
            raise ValueError(f"block {block} is not used")
        self._kept.add(block)

    def forget(self, block: Any) -> None:
        block = self._block(block)
        self._kept.discard(block)
        if block in self._evictable:
            self._evictable.remove(block)
            self._free.append(block)

    def is_kept(self, block: Any) -> bool:
        return self._block(block) in self._kept

    def check(self) -> None:
        """The invariants by their definition, over everyone who can hold a block."""
        holders: Multiset[int] = Multiset()
        for block, count in enumerate(self._pins):
            holders[block] += count
        for manager in self.managers:
            for table in manager.block_ids.values():
                holders.update(table)
            holders.update(block for _, block in manager.held)
        for block in range(self.num_blocks):
            if self.ref[block] != holders[block]:
                raise InvariantError("I1", block, f"{self.ref[block]} != {holders[block]}")
        idle = [block for block in range(self.num_blocks) if self.ref[block] == 0]
        if sorted([*self._free, *self._evictable]) != idle:
            raise InvariantError("I4", None, "free and evictable blocks are not the idle ones")
        for manager in self.managers:
            for seq, table in manager.block_ids.items():
                if len(table) != blocks_for(manager.lens[seq], manager.block_size):
                    raise InvariantError("I2", None, f"table of {seq!r}")


class ReferenceBlockManager:
    """Tables and lengths over a pool."""

    def __init__(
        self, num_blocks: Any, block_size: Any, *, pool: ReferencePool | None = None
    ) -> None:
        self.block_size = as_integer("block_size", block_size)
        if not 1 <= self.block_size <= LARGEST_COUNT:
            raise ValueError(f"block_size out of range: {block_size}")
        self.pool = ReferencePool(num_blocks) if pool is None else pool
        self.num_blocks = self.pool.num_blocks
        self.pool.managers.append(self)
        self.block_ids: dict[Hashable, list[int]] = {}
        self.lens: dict[Hashable, int] = {}
        self.counters = [0] * len(Counter)
        self.newest_step = 0
        self.settled_step = 0
        self.held: deque[tuple[int, int]] = deque()
        self._rows: dict[Hashable, int] = {}
        self._next_row = 0
        # Cells before this column are as they were at the last drain of changes.
        self._unchanged: dict[Hashable, int] = {}

    # References of this manager.

    def _take(self) -> int:
        block, evicted = self.pool.take_reference()
        self.counters[Counter.BLOCKS_TAKEN] += 1
        self.counters[Counter.EVICTIONS] += evicted
        return block

    def _drop(self, block: int) -> None:
        """Let go, or hold on until the newest step in flight has settled."""
        if self.newest_step > self.settled_step:
            self.held.append((self.newest_step, block))
        else:
            self._drop_now(block)

    def _drop_now(self, block: int) -> None:
        self.counters[Counter.BLOCKS_RELEASED] += self.pool.drop_reference(block)

    def _need(self, blocks: int) -> None:
        available = self.pool.available
        if blocks > available:
            self.counters[Counter.OUT_OF_BLOCKS] += 1
            raise OutOfBlocks(blocks, available)

    def _live(self, seq: Hashable) -> Hashable:
        if seq not in self.lens:
            raise KeyError(seq)
        return seq

    def _not_live(self, seq: Hashable) -> None:
        if seq in self.lens:
            raise ValueError(f"sequence {seq!r} is live")

    def _begin(self, seq: Hashable, table: list[int], n_tokens: int) -> None:
        self.block_ids[seq] = table
        self.lens[seq] = n_tokens
        self._rows[seq] = self._next_row
        self._next_row += 1
        self._unchanged[seq] = 0

    # Sequences.

    def allocate(self, seq: Hashable, n_tokens: Any) -> None:
        n_tokens = as_count("n_tokens", n_tokens)
        self._not_live(seq)
        blocks = blocks_for(n_tokens, self.block_size)
        self._need(blocks)
        self._begin(seq, [self._take() for _ in range(blocks)], n_tokens)
        self.counters[Counter.SEQUENCES_ALLOCATED] += 1

    def can_allocate(self, n_tokens: Any, watermark: Any = 0) -> bool:
        blocks = blocks_for(as_count("n_tokens", n_tokens), self.block_size)
        return blocks + as_count("watermark", watermark) <= self.pool.available

    def _copies_tail(self, seq: Hashable, n_tokens: int) -> bool:
        partial = self.lens[seq] % self.block_size != 0
        return n_tokens > 0 and partial and self.pool.ref[self.block_ids[seq][-1]] > 1

    def _blocks_to_append(self, seq: Hashable, n_tokens: int) -> int:
        length = self.lens[seq]
        return (
            blocks_for(length + n_tokens, self.block_size)
            - blocks_for(length, self.block_size)
            + self._copies_tail(seq, n_tokens)
        )

    def append_slot(self, seq: Hashable) -> tuple[int, int, int | None]:
        slots, copy = self.append_slots(seq, 1)
        block, offset = divmod(slots[0], self.block_size)
        return block, offset, None if copy is None else copy[0]

    def append_slots(
        self, seq: Hashable, n_tokens: Any
    ) -> tuple[list[int], tuple[int, int] | None]:
        n_tokens = as_count("n_tokens", n_tokens)
        seq = self._live(seq)
        if self.lens[seq] + n_tokens > LARGEST_COUNT:
            raise ValueError(f"n_tokens out of range: {n_tokens}")
        self._need(self._blocks_to_append(seq, n_tokens))
        table = self.block_ids[seq]
        copy = None
        if self._copies_tail(seq, n_tokens):
            shared, fresh = table[-1], self._take()
            table[-1] = fresh
            self._unchanged[seq] = min(self._unchanged[seq], len(table) - 1)
            self._drop(shared)
            copy = (shared, fresh)
            self.counters[Counter.COW_COPIES] += 1
        slots = []
        for position in range(self.lens[seq], self.lens[seq] + n_tokens):
            if position == len(table) * self.block_size:
                table.append(self._take())
            slots.append(table[-1] * self.block_size + position % self.block_size)
        self.lens[seq] += n_tokens
        self.counters[Counter.TOKENS_APPENDED] += n_tokens
        return slots, copy

    def append_batch(
        self, rows: Sequence[int], out: list[int]
    ) -> tuple[int, list[list[int]] | None]:
        by_row = {row: seq for seq, row in self._rows.items()}
        for row in rows:
            if row not in by_row:
                raise ValueError(f"no sequence has row {row}")
        if len(out) < len(rows):
            raise ValueError(f"out has {len(out)} entries for {len(rows)} rows")
        copies: list[list[int]] = []
        for served, row in enumerate(rows):
            try:
                slots, copy = self.append_slots(by_row[row], 1)
            except OutOfBlocks:
                return served, copies or None
            out[served] = slots[0]
            if copy is not None:
                copies.append(list(copy))
        return len(rows), copies or None

    def can_append(self, seq: Hashable, n_tokens: Any = 1) -> bool:
        n_tokens = as_count("n_tokens", n_tokens)
        blocks = self._blocks_to_append(self._live(seq), n_tokens)
        return blocks <= self.pool.available

    def truncate(self, seq: Hashable, n_tokens: Any) -> None:
        n_tokens = as_count("n_tokens", n_tokens)
        seq = self._live(seq)
        if n_tokens > self.lens[seq]:
            raise ValueError(f"n_tokens {n_tokens} is more than the {self.lens[seq]} there are")
        table = self.block_ids[seq]
        while len(table) > blocks_for(n_tokens, self.block_size):
            self._drop(table.pop())
        self._unchanged[seq] = min(self._unchanged[seq], len(table))
        self.lens[seq] = n_tokens

    def fork(self, parent: Hashable, child: Hashable, n_tokens: Any = None) -> None:
        if n_tokens is not None:
            n_tokens = as_count("n_tokens", n_tokens)
        parent = self._live(parent)
        self._not_live(child)
        if n_tokens is None:
            n_tokens = self.lens[parent]
        if n_tokens > self.lens[parent]:
            raise ValueError(f"n_tokens {n_tokens} is more than the parent has")
        shared = self.block_ids[parent][: blocks_for(n_tokens, self.block_size)]
        for block in shared:
            self.pool.add_reference(block)
        self._begin(child, shared, n_tokens)
        self.counters[Counter.SEQUENCES_FORKED] += 1

    def reorder(self, seqs: Sequence[Hashable], parents: Sequence[Hashable]) -> None:
        seqs, parents = list(seqs), list(parents)
        if len(seqs) != len(parents):
            raise ValueError(f"{len(seqs)} seqs, {len(parents)} parents")
        for seq in [*seqs, *parents]:
            self._live(seq)
        if len(set(seqs)) != len(seqs):
            raise ValueError("seqs are not distinct")
        becoming = [(list(self.block_ids[parent]), self.lens[parent]) for parent in parents]
        changed = [
            self._common_prefix(self.block_ids[seq], table)
            for seq, (table, _) in zip(seqs, becoming, strict=True)
        ]
        for first, (table, _) in zip(changed, becoming, strict=True):
            for block in table[first:]:
                self.pool.add_reference(block)
        for seq, first, (table, length) in zip(seqs, changed, becoming, strict=True):
            for block in reversed(self.block_ids[seq][first:]):
                self._drop(block)
            self.block_ids[seq] = table
            self.lens[seq] = length
            self._unchanged[seq] = min(self._unchanged[seq], first)

    @staticmethod
    def _common_prefix(left: list[int], right: list[int]) -> int:
        for column, (a, b) in enumerate(zip(left, right, strict=False)):
            if a != b:
                return column
        return min(len(left), len(right))

    def free_seq(self, seq: Hashable) -> None:
        seq = self._live(seq)
        for block in reversed(self.block_ids.pop(seq)):
            self._drop(block)
        for record in (self.lens, self._rows, self._unchanged):
            del record[seq]
        self.counters[Counter.SEQUENCES_FREED] += 1

    # Holders.

    def pin(self, block: Any) -> None:
        self.pool.retain(block)

    def unpin(self, block: Any) -> None:
        self.pool.release(block)

    def fence(self) -> int:
        self.newest_step += 1
        return self.newest_step

    def settle(self, step: Any) -> int:
        step = as_integer("step", step)
        if not 1 <= step <= self.newest_step:
            raise ValueError(f"step {step} was never issued")
        self.settled_step = max(self.settled_step, step)
        dropped = 0
        while self.held and self.held[0][0] <= step:
            self._drop_now(self.held.popleft()[1])
            dropped += 1
        return dropped

    # Reading.

    def __contains__(self, seq: object) -> bool:
        return seq in self.lens

    def __len__(self) -> int:
        return len(self.lens)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.lens)

    def length(self, seq: Hashable) -> int:
        return self.lens[self._live(seq)]

    def table(self, seq: Hashable) -> list[int]:
        return self.block_ids[self._live(seq)]

    def row(self, seq: Hashable) -> int:
        return self._rows[self._live(seq)]

    def rows(self, seqs: Sequence[Hashable]) -> list[int]:
        return [self.row(seq) for seq in seqs]

    def slots(self, seq: Hashable, start: Any = 0, stop: Any = None) -> list[int]:
        start = as_count("start", start)
        if stop is not None:
            stop = as_count("stop", stop)
        seq = self._live(seq)
        if stop is None:
            stop = self.lens[seq]
        if not 0 <= start <= stop <= self.lens[seq]:
            raise ValueError(f"slots {start}:{stop} of {self.lens[seq]} tokens")
        table = self.block_ids[seq]
        return [
            table[position // self.block_size] * self.block_size + position % self.block_size
            for position in range(start, stop)
        ]

    @property
    def tables(self) -> dict[Hashable, list[int]]:
        return self.block_ids

    @property
    def num_available(self) -> int:
        return self.pool.available

    @property
    def free(self) -> deque[int]:
        return self.pool._free

    @property
    def ref(self) -> list[int]:
        return self.pool.ref

    def touched_cells(self) -> set[tuple[Hashable, int]]:
        """The live ``(seq, column)`` that may differ from the last call's.

        The core's ``drain_changes`` may report these and no others.
        """
        touched = {
            (seq, column)
            for seq, table in self.block_ids.items()
            for column in range(self._unchanged[seq], len(table))
        }
        self._unchanged = {seq: len(table) for seq, table in self.block_ids.items()}
        return touched

    def gauges(self) -> Gauges:
        pool = self.pool
        return Gauges(
            num_blocks=pool.num_blocks,
            block_size=self.block_size,
            free=pool.num_free,
            evictable=pool.num_evictable,
            used=pool.num_used,
            shared=sum(1 for count in pool.ref if count > 1),
            pinned=sum(1 for count in pool._pins if count > 0),
            fenced=len(self.held),
            sequences=len(self.lens),
            tokens=sum(self.lens.values()),
            logical_blocks=sum(map(len, self.block_ids.values())),
        )

    def check(self) -> None:
        self.pool.check()


class ReferenceStep(list[Hashable]):
    """The decoded sequences, with the rest of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[int] = []
        self.copies: list[list[int]] = []
        self.prefills: list[tuple[Hashable, int]] = []
        self.preempted: list[Hashable] = []
        self.rejected: dict[Hashable, Verdict] = {}


class ReferenceScheduler:
    """One sequence at a time, in the order of the rules."""

    def __init__(
        self, bm: ReferenceBlockManager, watermark_blocks: int = 1, max_running: int | None = None
    ) -> None:
        self.bm = bm
        self.watermark_blocks = watermark_blocks
        self.max_running = max_running
        self.waiting: deque[tuple[Hashable, int]] = deque()
        self.running: list[Hashable] = []

    def add(self, seq: Hashable, n_tokens: Any) -> None:
        n_tokens = as_integer("n_tokens", n_tokens)
        if n_tokens < 1:
            raise ValueError(f"n_tokens must be at least 1: {n_tokens}")
        if seq in self.bm:
            raise ValueError(f"{seq!r} is live")
        if self._why_never((seq, n_tokens)):
            raise RequestRefused
        self.waiting.append((seq, n_tokens))

    def fork(self, parent: Hashable, child: Hashable, n_tokens: Any = None) -> None:
        self.bm.fork(parent, child, n_tokens)
        self.running.append(child)

    def finish(self, seq: Hashable) -> bool:
        if seq in self.running:
            self.running.remove(seq)
            self.bm.free_seq(seq)
            return True
        for request in self.waiting:
            if request[0] == seq:
                self.waiting.remove(request)
                return True
        return False

    abort = finish

    def why(self, seq: Hashable) -> Verdict:
        names = [name for name, _ in self.waiting]
        if seq not in names:
            raise KeyError(seq)
        ahead = names.index(seq)
        request = self.waiting[ahead]
        verdict = self._why_never(request) or self._why_not_now(request)
        return verdict._replace(reason=Reason.BEHIND, ahead=ahead) if ahead else verdict

    def _blocks(self, request: tuple[Hashable, Any]) -> int:
        next_token = 1 if isinstance(request, Resumed) else 0
        return blocks_for(request[1] + next_token, self.bm.block_size)

    def _why_never(self, request: tuple[Hashable, Any]) -> Verdict | None:
        everything = self.bm.num_blocks
        try:
            # One that was forked from nothing may come back to nothing.
            fewest = 0 if isinstance(request, Resumed) else 1
            sensible = fewest <= operator.index(request[1]) < LARGEST_COUNT
        except TypeError:
            sensible = False
        if not sensible:
            return Verdict(Reason.BAD_LENGTH, 0, everything)
        needed = self._blocks(request)
        if isinstance(request, Resumed):
            if needed > everything:
                return Verdict(Reason.OUTGREW_POOL, needed, everything)
        elif needed + self.watermark_blocks > everything:
            return Verdict(Reason.NEVER_FITS, needed, everything - self.watermark_blocks)
        return None

    def _why_not_now(self, request: tuple[Hashable, int]) -> Verdict:
        available, needed = self.bm.pool.available, self._blocks(request)
        comes_back_alone = isinstance(request, Resumed) and not self.running
        if request[0] in self.bm:
            reason = Reason.LIVE_ID
        elif self.max_running is not None and len(self.running) >= self.max_running:
            reason = Reason.MAX_RUNNING
        elif needed > available:
            reason = Reason.BLOCKS
        elif needed + self.watermark_blocks > available and not comes_back_alone:
            reason = Reason.WATERMARK
        else:
            reason = Reason.FITS
        return Verdict(reason, needed, available)

    def step(self) -> ReferenceStep:
        step = ReferenceStep()
        while self.waiting:
            head = self.waiting[0]
            never = self._why_never(head)
            now = never or self._why_not_now(head)
            if never or (now.reason is Reason.LIVE_ID and head[0] not in self.running):
                step.rejected[head[0]] = now
            elif now.reason is Reason.FITS:
                self.bm.allocate(*head)
                self.running.append(head[0])
                step.prefills.append((head[0], head[1]))
            else:
                break
            self.waiting.popleft()
        withheld: list[int] = []
        for seq in list(self.running):
            while seq in self.running:
                try:
                    (slot,), copy = self.bm.append_slots(seq, 1)
                except OutOfBlocks:
                    self._preempt(self.running.pop(), step, withheld)
                else:
                    step.append(seq)
                    step.slots.append(slot)
                    if copy is not None:
                        step.copies.append(list(copy))
                    break
        for block in withheld:
            self.bm.unpin(block)
        return step

    def _preempt(self, victim: Hashable, step: ReferenceStep, withheld: list[int]) -> None:
        request = Resumed(victim, self.bm.lens[victim])
        # An engine does the copies of a step first and in any order, so a block that one
        # of them reads must not become the destination of another.
        sources = {source for source, _ in step.copies}
        for block in reversed(self.bm.block_ids[victim]):
            if block in sources and self.bm.ref[block] == 1:
                self.bm.pin(block)
                withheld.append(block)
        self.bm.free_seq(victim)
        step.prefills = [prefill for prefill in step.prefills if prefill[0] != victim]
        never = self._why_never(request)
        if never:
            step.rejected[victim] = never
        else:
            step.preempted.append(victim)
            self.waiting.appendleft(request)
