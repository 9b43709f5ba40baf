"""The textbook in plain Python: a dict of lists, a list of counts, a deque of free blocks.

Written for the comparison alone. It decides what kvcore decides, block id for block id, in
the most direct Python that does so; the oracle of the tests is another program.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence

__all__ = [
    "PoolExhaustedError",
    "ReferenceEngine",
    "ReferenceManager",
    "ReferencePool",
    "ReferencePrefixManager",
    "ReferenceScheduler",
]


class PoolExhaustedError(Exception):
    """Nothing is left to take."""


class ReferencePool:
    """Free blocks in a deque, evictable ones in an ordered dict, counts in a list."""

    def __init__(self, num_blocks: int) -> None:
        self.free: deque[int] = deque(range(num_blocks))
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.ref = [0] * num_blocks
        self.kept: set[int] = set()

    def take(self) -> int:
        """The oldest free block, else the evictable one that was released first."""
        if self.free:
            block = self.free.popleft()
        elif self.evictable:
            block, _ = self.evictable.popitem(last=False)
            self.kept.discard(block)
        else:
            raise PoolExhaustedError
        self.ref[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more holder; an evictable block comes back to life."""
        if self.ref[block] == 0:
            del self.evictable[block]
        self.ref[block] += 1

    def release(self, block: int) -> None:
        """One holder less."""
        self.ref[block] -= 1
        if self.ref[block] == 0:
            if block in self.kept:
                self.evictable[block] = None
            else:
                self.free.append(block)

    def keep(self, block: int) -> None:
        """Its content stays wanted after the last holder leaves."""
        self.kept.add(block)


class ReferenceManager:
    """Tables and lengths by sequence id, over a pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = ReferencePool(num_blocks)
        self.tables: dict[Hashable, list[int]] = {}
        self.lens: dict[Hashable, int] = {}

    def allocate(self, seq: Hashable, n_tokens: int) -> None:
        """A new table, all or nothing."""
        if seq in self.tables:
            raise ValueError(seq)
        needed = (n_tokens + self.block_size - 1) // self.block_size
        pool = self.pool
        if needed > len(pool.free) + len(pool.evictable):
            raise PoolExhaustedError
        self.tables[seq] = [pool.take() for _ in range(needed)]
        self.lens[seq] = n_tokens

    def append_slot(self, seq: Hashable) -> tuple[int, int, int | None]:
        """The slot of the next token; a shared partial block is replaced first."""
        table = self.tables[seq]
        length = self.lens[seq]
        offset = length % self.block_size
        source = None
        if offset == 0:
            table.append(self.pool.take())
        elif self.pool.ref[table[-1]] > 1:
            source = table[-1]
            table[-1] = self.pool.take()
            self.pool.release(source)
        self.lens[seq] = length + 1
        return table[-1], offset, source

    def append_slots(
        self, seq: Hashable, n_tokens: int
    ) -> tuple[list[int], tuple[int, int] | None]:
        """Slots of the next ``n_tokens`` tokens, and the copy they need."""
        slots = []
        copy = None
        for _ in range(n_tokens):
            block, offset, source = self.append_slot(seq)
            slots.append(block * self.block_size + offset)
            if source is not None:
                copy = source, block
        return slots, copy

    def append_batch(
        self, seqs: Iterable[Hashable], out: list[int]
    ) -> tuple[int, list[tuple[int, int]]]:
        """One token for each sequence."""
        copies = []
        served = 0
        for seq in seqs:
            block, offset, source = self.append_slot(seq)
            out[served] = block * self.block_size + offset
            served += 1
            if source is not None:
                copies.append((source, block))
        return served, copies

    def truncate(self, seq: Hashable, n_tokens: int) -> None:
        """Drop the tail."""
        table = self.tables[seq]
        kept = (n_tokens + self.block_size - 1) // self.block_size
        while len(table) > kept:
            self.pool.release(table.pop())
        self.lens[seq] = n_tokens

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """The child shares all blocks of the parent."""
        if child in self.tables:
            raise ValueError(child)
        table = self.tables[parent]
        for block in table:
            self.pool.retain(block)
        self.tables[child] = table[:]
        self.lens[child] = self.lens[parent]

    def reorder(self, seqs: Sequence[Hashable], parents: Sequence[Hashable]) -> None:
        """One beam step, the way it is written without a call for it: hold, then drop."""
        tables = [self.tables[parent][:] for parent in parents]
        lens = [self.lens[parent] for parent in parents]
        for table in tables:
            for block in table:
                self.pool.retain(block)
        for seq, table, length in zip(seqs, tables, lens, strict=True):
            for block in self.tables[seq]:
                self.pool.release(block)
            self.tables[seq] = table
            self.lens[seq] = length

    def free_seq(self, seq: Hashable) -> None:
        """Release the blocks, last first."""
        for block in reversed(self.tables.pop(seq)):
            self.pool.release(block)
        del self.lens[seq]


class ReferencePrefixPool(ReferencePool):
    """A pool whose kept blocks can be found by content: chained, and compared exactly."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.by_content: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        """``(uid of the block before, tokens)`` to ``(uid, block)``."""
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.last_uid = 0

    def take(self) -> int:
        block = super().take()
        self.drop(block)
        return block

    def drop(self, block: int) -> None:
        """The block is found no more."""
        content = self.content.pop(block, None)
        if content is not None:
            del self.by_content[content]
            self.kept.discard(block)

    def evict(self, count: int) -> int:
        """Make up to ``count`` evictable blocks free, the longest released first."""
        count = min(count, len(self.evictable))
        for _ in range(count):
            block, _ = self.evictable.popitem(last=False)
            self.drop(block)
            self.free.append(block)
        return count

    def publish(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        """Let the block be found under this content; returns the content's uid."""
        content = (parent, tokens)
        found = self.by_content.get(content)
        if found is not None:
            return found[0]
        self.last_uid += 1
        self.by_content[content] = (self.last_uid, block)
        self.content[block] = content
        self.kept.add(block)
        return self.last_uid


class ReferencePrefixManager(ReferenceManager):
    """A manager that shares equal prefixes: a dict by content, walked block by block."""

    pool: ReferencePrefixPool

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = ReferencePrefixPool(num_blocks)
        self.known: dict[Hashable, list[int]] = {}
        self.uids: dict[Hashable, list[int]] = {}

    def walk(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Blocks and uids of the longest cached prefix that leaves a token to compute."""
        size = self.block_size
        blocks: list[int] = []
        uids: list[int] = []
        uid = 0
        for start in range(0, (len(tokens) - 1) // size * size, size):
            found = self.pool.by_content.get((uid, tuple(tokens[start : start + size])))
            if found is None:
                break
            uid, block = found
            blocks.append(block)
            uids.append(uid)
        return blocks, uids

    def match(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest cached prefix."""
        return len(self.walk(tokens)[0]) * self.block_size

    def allocate_prompt(self, seq: Hashable, tokens: Sequence[int]) -> int:
        """A table whose first blocks are the cached ones; returns the tokens they hold."""
        pool = self.pool
        blocks, uids = self.walk(tokens)
        idle = sum(pool.ref[block] == 0 for block in blocks)
        needed = (len(tokens) + self.block_size - 1) // self.block_size - len(blocks)
        if needed > len(pool.free) + len(pool.evictable) - idle:
            raise PoolExhaustedError
        cached = len(blocks) * self.block_size
        for block in blocks:
            pool.retain(block)
        self.tables[seq] = blocks + [pool.take() for _ in range(needed)]
        self.lens[seq] = len(tokens)
        self.known[seq] = list(tokens)
        self.uids[seq] = uids
        return cached

    def commit(self, seq: Hashable, tokens: Iterable[int] = ()) -> int:
        """These tokens follow the known ones; publish the blocks that are full now."""
        size = self.block_size
        known = self.known[seq]
        uids = self.uids[seq]
        table = self.tables[seq]
        before = len(uids)
        known.extend(tokens)
        for column in range(before, len(known) // size):
            content = tuple(known[column * size : (column + 1) * size])
            uids.append(self.pool.publish(table[column], uids[-1] if uids else 0, content))
        return len(uids) - before

    def commit_batch(self, seqs: Iterable[Hashable], tokens: Iterable[int]) -> int:
        """One token for each sequence."""
        return sum(self.commit(seq, (token,)) for seq, token in zip(seqs, tokens, strict=True))

    def truncate(self, seq: Hashable, n_tokens: int) -> None:
        super().truncate(seq, n_tokens)
        del self.known[seq][n_tokens:]
        del self.uids[seq][n_tokens // self.block_size :]

    def append_slot(self, seq: Hashable) -> tuple[int, int, int | None]:
        table = self.tables[seq]
        if self.lens[seq] % self.block_size:  # a block that is written again is another one
            self.pool.drop(table[-1])
        return super().append_slot(seq)

    def free_seq(self, seq: Hashable) -> None:
        super().free_seq(seq)
        del self.known[seq], self.uids[seq]

    def evict(self, count: int) -> int:
        """Make up to ``count`` cached blocks free."""
        return self.pool.evict(count)


class ReferenceScheduler:
    """First come, first served; oldest decodes first; the newest yields."""

    def __init__(self, manager: ReferenceManager, watermark_blocks: int = 1) -> None:
        self.manager = manager
        self.watermark_blocks = watermark_blocks
        self.waiting: deque[tuple[Hashable, int]] = deque()
        self.running: list[Hashable] = []

    def finish(self, seq: Hashable) -> None:
        """End a running request."""
        self.running.remove(seq)
        self.manager.free_seq(seq)

    def step(self) -> list[Hashable]:
        """Admit by watermark, then one slot for each running sequence."""
        manager = self.manager
        while self.waiting:
            seq, n_tokens = self.waiting[0]
            needed = (n_tokens + manager.block_size - 1) // manager.block_size
            if len(manager.pool.free) - needed < self.watermark_blocks:
                break
            self.waiting.popleft()
            manager.allocate(seq, n_tokens)
            self.running.append(seq)
        decoded = []
        position = 0
        while position < len(self.running):
            seq = self.running[position]
            try:
                manager.append_slot(seq)
            except PoolExhaustedError:
                newest = self.running.pop()
                self.waiting.appendleft((newest, manager.lens[newest]))
                manager.free_seq(newest)
            else:
                decoded.append(seq)
                position += 1
        return decoded


class ReferenceEngine:
    """Steps of an engine: decodes, then prompts in chunks; the newest yields and is recomputed.

    Without a prefix manager no token is kept.
    """

    def __init__(self, manager: ReferenceManager, token_budget: int) -> None:
        self.manager = manager
        self.token_budget = token_budget
        self.waiting: deque[tuple[Hashable, list[int], int]] = deque()
        self.running: list[Hashable] = []
        self.computed: dict[Hashable, int] = {}
        """Tokens computed of prompts under way."""
        self.last: dict[Hashable, int] = {}
        """The token sampled last, which no step has written yet."""
        self.left: dict[Hashable, int] = {}
        """Tokens that it may still sample."""
        self.decoded: list[Hashable] = []
        self.completed: list[Hashable] = []

    def add(self, seq: Hashable, tokens: Iterable[int], max_tokens: int) -> None:
        """Queue a request."""
        self.waiting.append((seq, list(tokens), max_tokens))

    def finish(self, seq: Hashable) -> None:
        """End a running request."""
        self.running.remove(seq)
        self.manager.free_seq(seq)
        self.computed.pop(seq, None)
        self.last.pop(seq, None)
        del self.left[seq]

    def step(self) -> list[tuple[Hashable, int, int]]:
        """Plan a step; returns the chunks of prompts. ``decoded`` and ``completed`` follow it."""
        manager = self.manager
        self.decoded = []
        self.completed = []
        waiting_before = len(self.waiting)
        position = 0
        while position < len(self.running):
            seq = self.running[position]
            if seq not in self.computed:
                try:
                    manager.append_slot(seq)
                except PoolExhaustedError:
                    self.preempt(self.running[-1])
                    continue
                self.decoded.append(seq)
            position += 1
        budget = self.token_budget - len(self.decoded)
        if len(self.waiting) == waiting_before:
            self.admit(budget)
        chunks = []
        for seq, start in list(self.computed.items()):
            stop = min(manager.lens[seq], start + budget)
            budget -= stop - start
            chunks.append((seq, start, stop - start))
            self.computed[seq] = stop
            if stop == manager.lens[seq]:
                del self.computed[seq]
                self.completed.append(seq)
        return chunks

    def preempt(self, seq: Hashable) -> None:
        """Take the blocks of a request back; it goes on from its tokens later."""
        tokens = [0] * self.manager.lens[seq]
        if isinstance(self.manager, ReferencePrefixManager):
            tokens = [*self.manager.known[seq], self.last[seq]]
        self.waiting.appendleft((seq, tokens, self.left[seq]))
        self.finish(seq)

    def admit(self, budget: int) -> None:
        """Let requests enter while they fit."""
        manager = self.manager
        while self.waiting and budget > 0:
            seq, tokens, max_tokens = self.waiting[0]
            cached = 0
            try:
                if isinstance(manager, ReferencePrefixManager):
                    cached = manager.allocate_prompt(seq, tokens)
                else:
                    manager.allocate(seq, len(tokens))
            except PoolExhaustedError:
                return
            self.waiting.popleft()
            self.running.append(seq)
            self.computed[seq] = cached
            self.left[seq] = max_tokens
            budget -= len(tokens) - cached

    def update(self, tokens: Iterable[int]) -> list[Hashable]:
        """Take the sampled tokens of ``decoded`` and ``completed``; returns who has ended."""
        manager = self.manager
        sampled = iter(tokens)
        ended = []
        for seqs in (self.decoded, self.completed):
            for seq in seqs:
                token = next(sampled)
                if isinstance(manager, ReferencePrefixManager):
                    manager.commit(seq, (self.last[seq],) if seqs is self.decoded else ())
                self.last[seq] = token
                self.left[seq] -= 1
                if self.left[seq] == 0:
                    ended.append(seq)
        for seq in ended:
            self.finish(seq)
        return ended
