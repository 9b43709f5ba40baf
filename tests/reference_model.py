"""The slow, obvious twin of kvcore: deques, dicts and lists, one block at a time.

It is the oracle of the property tests, so it takes no shortcut: a block is one entry
of one deque, every holder is written down, and a call that may fail counts what it
needs before it touches anything. Public operations, argument checks, exceptions and
results are those of the compiled classes, with plain lists for arrays.

The prefix index is a trie of tokens: a block's identity is a node, found by walking from
the root and comparing. Nothing is hashed.

Rows are the exception: which row a sequence gets is the core's own affair, so the
model numbers its sequences as they come and a test translates. So are the numbers of
identities.

Where a call is wrong in two ways at once, the contract does not say which error comes
first, and a test that makes such calls accepts either.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter as Multiset
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcore.counters import Counter
from kvcore.errors import InvariantError, OutOfBlocks, RequestRefused
from kvcore.gauges import Gauges
from kvcore.identity import Media, namespace_key
from kvcore.scheduler import Reason, Request, Resumed, Verdict

__all__ = [
    "Node",
    "ReferenceBlockManager",
    "ReferenceIndex",
    "ReferencePool",
    "ReferencePrefixPin",
    "ReferencePrompt",
    "ReferenceScheduler",
    "ReferenceStep",
]

LARGEST_COUNT = 2**31 - 1
LARGEST_TOKEN = 2**31 - 1
HOLE = -1
"""In a table, instead of a block that a window has given back."""
NO_ERA = -1
"""Of a sequence that was restored without its tokens: nobody knows its namespace."""

MediaParts = tuple[tuple[bytes, int, int], ...]
"""Of the media that a block touches: digest, offset from the block, length."""

Key = tuple[bytes, MediaParts]
"""Of a block: its namespace (of column 0 only) and media."""

Change = tuple[Any, ...]
"""``("stored", uid, parent, tokens, key)``, ``("removed", uid)`` or ``("cleared",)``."""


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


def as_count_or_hole(name: str, value: Any) -> int:
    number = as_integer(name, value)
    return number if number == HOLE else as_count(name, number)


def as_tokens(value: Any) -> list[int]:
    """Ids of tokens, as a list of int."""
    if isinstance(value, str | bytes):
        raise TypeError(f"tokens must be integers, not {value!r}")
    try:
        tokens = [as_integer("a token", token) for token in value]
    except TypeError:
        raise TypeError(f"tokens must be integers, not {value!r}") from None
    for position, token in enumerate(tokens):
        if not 0 <= token <= LARGEST_TOKEN:
            raise ValueError(f"token {token} at {position}")
    return tokens


def blocks_for(n_tokens: int, block_size: int) -> int:
    return -(-n_tokens // block_size)


def media_by_column(
    media: Sequence[Media], n_tokens: int, block_size: int
) -> dict[int, MediaParts]:
    """What media each block touches, of those that touch any."""
    touched: dict[int, MediaParts] = {}
    end = 0
    for item in sorted(media, key=lambda item: item.start):
        if item.start < end:
            raise ValueError(f"media overlap: {item}")
        end = item.stop
        for column in range(item.start // block_size, blocks_for(end, block_size)):
            part = (item.digest, item.start - column * block_size, item.stop - item.start)
            touched[column] = (*touched.get(column, ()), part)
    if end > n_tokens:
        raise ValueError(f"media end at {end} of {n_tokens}")
    return touched


@dataclass(frozen=True)
class ReferencePrompt:
    """Tokens and all else that tells who may share them."""

    tokens: list[int]
    namespace: bytes
    media: dict[int, MediaParts]
    block_size: int
    cut_column: int = LARGEST_COUNT  # the first that nobody shares
    # In which era a sequence wrote it that may still publish it, if one did.
    era: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_full_blocks(self) -> int:
        return len(self.tokens) // self.block_size

    def content(self, column: int) -> tuple[Key, tuple[int, ...]]:
        """What a child of the node before it is found by."""
        size = self.block_size
        key = (self.namespace if column == 0 else b"", self.media.get(column, ()))
        return key, tuple(self.tokens[column * size : (column + 1) * size])

    def common_blocks(self, other: ReferencePrompt) -> int:
        common = 0
        while common < min(self.num_full_blocks, other.num_full_blocks):
            if self.content(common) != other.content(common):
                break
            common += 1
        return common


@dataclass(eq=False)
class Node:
    """One content: the tokens of a full block, its key, and everything before it."""

    uid: int
    parent: Node | None
    key: Key
    tokens: tuple[int, ...]
    # Nodes without copies are dead and not listed. What followed one cannot be found again.
    children: dict[tuple[Key, tuple[int, ...]], Node] = field(default_factory=dict)
    # The first one is canonical: the oldest, then the newest of those that came while it
    # was there.
    copies: list[int] = field(default_factory=list)

    def stored(self) -> Change:
        assert self.parent is not None
        return "stored", self.uid, self.parent.uid, self.tokens, self.key


class ReferenceIndex:
    """Which blocks hold which content: a trie of tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node(0, None, (b"", ()), ())
        self.nodes: dict[int, Node] = {}  # by block
        self.barred: set[int] = set()  # had an identity, and may get none while they are held
        self.newest_uid = 0
        self.epoch = 0
        self.era = 0  # counts the resets
        self.duplicates = 0
        self._changes: list[Change] | None = None
        self._capacity = 0

    def __len__(self) -> int:
        return len(self.nodes)

    def find(self, prompt: ReferencePrompt, most: int) -> list[Node]:
        """The nodes of the longest cached prefix, at most that many."""
        found: list[Node] = []
        while len(found) < most:
            child = (found[-1] if found else self.root).children.get(prompt.content(len(found)))
            if child is None:
                break
            found.append(child)
        return found

    def publish(self, block: int, parent: Node, key: Key, tokens: tuple[int, ...]) -> Node:
        assert block not in self.nodes
        node = parent.children.get((key, tokens))
        if node is None:
            self.newest_uid += 1
            node = Node(self.newest_uid, parent, key, tokens)
            parent.children[key, tokens] = node
            self._log(node.stored())
        else:
            self.duplicates += 1
        node.copies.insert(1, block)
        self.nodes[block] = node
        return node

    def drop(self, block: int) -> None:
        """The block holds that content no longer, or it is not wanted any more."""
        node = self.nodes.pop(block, None)
        if node is None:
            return
        self.barred.add(block)
        node.copies.remove(block)
        if not node.copies:
            assert node.parent is not None
            del node.parent.children[node.key, node.tokens]
            self._log(("removed", node.uid))

    # What changed, for a mirror.

    def live(self) -> dict[int, Node]:
        return {node.uid: node for node in self.nodes.values()}

    def _log(self, change: Change) -> None:
        if self._changes is not None:
            self._changes.append(change)

    def start_log(self) -> None:
        """Of any length: the model keeps no capacity."""
        self._changes = [("cleared",), *(node.stored() for _, node in sorted(self.live().items()))]

    def stop_log(self) -> None:
        self._changes = None

    def drain(self) -> list[Change]:
        assert self._changes is not None
        changes, self._changes = self._changes, []
        return changes

    def check(self, ref: list[int]) -> None:
        for block, node in self.nodes.items():
            if block not in node.copies:
                raise InvariantError("I5", block, "not among the copies of its content")
        for node in self.live().values():
            if len(node.tokens) != self.block_size or len(set(node.copies)) != len(node.copies):
                raise InvariantError("I6", None, f"content {node.uid}")


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
        self.index: ReferenceIndex | None = None
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
            self.forget_content(block)
        else:
            raise OutOfBlocks(1, 0)
        self.ref[block] = 1
        if self.index is not None:
            self.index.barred.discard(block)
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

    def forget_content(self, block: int) -> None:
        """Neither wanted nor found any more."""
        self._kept.discard(block)
        if self.index is not None:
            self.index.drop(block)

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
        self.forget_content(block)
        if block in self._evictable:
            self._evictable.remove(block)
            self._free.append(block)

    def evict(self, count: Any) -> int:
        count = as_count("count", count)
        victims = list(self._evictable)[:count]
        for block in victims:
            self.forget(block)
        return len(victims)

    def is_kept(self, block: Any) -> bool:
        return self._block(block) in self._kept

    def check(self) -> None:
        """The invariants by their definition, over everyone who can hold a block."""
        holders: Multiset[int] = Multiset()
        for block, count in enumerate(self._pins):
            holders[block] += count
        for manager in self.managers:
            for seq, table in manager.block_ids.items():
                blocks = [block for block in table if block != HOLE]
                if len(set(blocks)) != len(blocks):
                    raise InvariantError("I3", None, f"{seq!r} has a block twice")
                holders.update(blocks)
            holders.update(block for _, block in manager.held)
        for block in range(self.num_blocks):
            if self.ref[block] != holders[block]:
                raise InvariantError("I1", block, f"{self.ref[block]} != {holders[block]}")
        idle = [block for block in range(self.num_blocks) if self.ref[block] == 0]
        if sorted([*self._free, *self._evictable]) != idle:
            raise InvariantError("I4", None, "free and evictable blocks are not the idle ones")
        if self.index is not None:
            self.index.check(self.ref)
            for block in self.index.nodes:
                if block not in self._kept:
                    raise InvariantError("I4", block, "has an identity and is not kept")
        for manager in self.managers:
            for seq, table in manager.block_ids.items():
                length, size = manager.lens[seq], manager.block_size
                if len(table) != blocks_for(length, size):
                    raise InvariantError("I2", None, f"table of {seq!r}")
                if HOLE in table[length // size :]:
                    raise InvariantError("I2", None, f"{seq!r} has a hole where it writes next")


@dataclass
class Knowledge:
    """What a manager with prefix caching knows of a sequence's content."""

    tokens: list[int]
    namespace: bytes
    media: dict[int, MediaParts]
    era: int
    published: int
    closed: bool = False  # something that it builds on was forgotten
    # The first that is never published: an item of media may end there before its end.
    cut_column: int = LARGEST_COUNT

    def first(self, n_tokens: int, length: int, block_size: int) -> Knowledge:
        """Of its first ``n_tokens`` of ``length``, as a fork or a truncation keeps it."""
        blocks = blocks_for(n_tokens, block_size)
        column, offset = divmod(n_tokens, block_size)
        media = {column: parts for column, parts in self.media.items() if column < blocks}
        cut_column = self.cut_column if self.cut_column < blocks else LARGEST_COUNT
        if n_tokens < length and offset and column in media:
            cut_column = column
        return replace(
            self,
            tokens=self.tokens[:n_tokens],
            media=media,
            published=min(self.published, column),
            cut_column=cut_column,
        )


class ReferencePrefixPin:
    """Pins on the blocks of a cached prefix."""

    def __init__(self, pool: ReferencePool, blocks: list[int], block_size: int) -> None:
        self.pool = pool
        self.blocks = tuple(blocks)
        self.n_tokens = len(blocks) * block_size
        self.released = False

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.pool.release_many(reversed(self.blocks))


class ReferenceBlockManager:
    """Tables and lengths over a pool."""

    def __init__(
        self,
        num_blocks: Any,
        block_size: Any,
        *,
        pool: ReferencePool | None = None,
        prefix_caching: bool = False,
        merge_duplicates: bool = False,
        pin_quota: int | None = None,
    ) -> None:
        self.block_size = as_integer("block_size", block_size)
        if not 1 <= self.block_size <= LARGEST_COUNT:
            raise ValueError(f"block_size out of range: {block_size}")
        self.pool = ReferencePool(num_blocks) if pool is None else pool
        self.num_blocks = self.pool.num_blocks
        self.prefix_caching = prefix_caching
        self.merge_duplicates = merge_duplicates
        self.pin_quota = pin_quota
        self.prefix_pins: list[ReferencePrefixPin] = []
        if prefix_caching:
            if self.pool.index is None:
                self.pool.index = ReferenceIndex(self.block_size)
            elif self.pool.index.block_size != self.block_size:
                raise ValueError(f"block_size {block_size} is not the index's")
        self.knowledge: dict[Hashable, Knowledge] = {}
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

    def _drop_all(self, blocks: list[int]) -> None:
        """What a sequence lets go: the last first, and nothing where a hole is."""
        for block in reversed(blocks):
            if block != HOLE:
                self._drop(block)

    def _share_all(self, blocks: list[int]) -> None:
        for block in blocks:
            if block != HOLE:
                self.pool.add_reference(block)

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

    def _no_hole(self, seq: Hashable, start: int, stop: int) -> None:
        """The blocks of these tokens are all there."""
        if start < stop:
            stop = blocks_for(stop, self.block_size)
            if HOLE in self.block_ids[seq][start // self.block_size : stop]:
                raise ValueError(f"a hole in {seq!r} between {start} and {stop}")

    def _no_cut(self, seq: Hashable, n_tokens: int) -> None:
        """A table of that many tokens does not end inside a hole."""
        column, offset = divmod(n_tokens, self.block_size)
        if offset and self.block_ids[seq][column] == HOLE:
            raise ValueError(f"{n_tokens} tokens of {seq!r} end in a hole")

    def _by_row(self, rows: Sequence[int]) -> list[Hashable]:
        by_row = {row: seq for seq, row in self._rows.items()}
        for row in rows:
            if row not in by_row:
                raise ValueError(f"no sequence has row {row}")
        return [by_row[row] for row in rows]

    def _begin(self, seq: Hashable, table: list[int], n_tokens: int) -> None:
        self.block_ids[seq] = table
        self.lens[seq] = n_tokens
        self._rows[seq] = self._next_row
        self._next_row += 1
        self._unchanged[seq] = 0

    # Prompts.

    @property
    def index(self) -> ReferenceIndex:
        if not self.prefix_caching:
            raise ValueError("prefix_caching is off")
        assert self.pool.index is not None
        return self.pool.index

    def prompt(self, tokens: Any, *, namespace: Any = None, media: Any = ()) -> ReferencePrompt:
        assert self.index is not None
        return self._prompt(tokens, namespace, media)

    def _prompt(self, tokens: Any, namespace: Any, media: Any) -> ReferencePrompt:
        if isinstance(tokens, ReferencePrompt):
            if namespace is not None or tuple(media):
                raise ValueError("a prompt has its namespace and media")
            return tokens
        ids = as_tokens(tokens)
        touched = media_by_column(media, len(ids), self.block_size)
        return ReferencePrompt(ids, namespace_key(namespace), touched, self.block_size)

    def prompt_of(self, seq: Hashable) -> ReferencePrompt:
        assert self.index is not None
        knows = self.knowledge[self._live(seq)]
        if knows.era == NO_ERA:
            raise ValueError(f"{seq!r} was restored without its tokens")
        self._no_hole(seq, 0, len(knows.tokens))
        blocks = blocks_for(len(knows.tokens), self.block_size)
        media = {column: parts for column, parts in knows.media.items() if column < blocks}
        return ReferencePrompt(
            list(knows.tokens),
            knows.namespace,
            media,
            self.block_size,
            knows.cut_column,
            None if knows.closed else knows.era,
        )

    # What a prompt would get.

    def _hits(self, prompt: ReferencePrompt, n_tokens: int) -> list[Node]:
        """The nodes that an allocation shares: the last token is always computed."""
        if not self.prefix_caching:
            return []
        usable = min(prompt.num_full_blocks, max(0, n_tokens - 1) // self.block_size)
        return self.index.find(prompt, min(usable, prompt.cut_column))

    def _partial_hit(self, prompt: ReferencePrompt, hits: list[Node], n_tokens: int) -> Any:
        """The child of the last hit that goes on like the prompt, and for how many tokens."""
        start = len(hits) * self.block_size
        wanted = prompt.tokens[start : min(start + self.block_size, n_tokens - 1)]
        key, _ = prompt.content(len(hits))
        best, most = None, 0
        if len(hits) >= prompt.cut_column:
            return best, most
        parent = hits[-1] if hits else self.index.root
        for child in sorted(parent.children.values(), key=lambda child: child.uid):
            if child.key != key or key[1]:
                continue
            common = 0
            while common < len(wanted) and child.tokens[common] == wanted[common]:
                common += 1
            if common and common >= most:
                best, most = child, common
        return best, most

    def match(self, tokens: Any, *, namespace: Any = None, media: Any = ()) -> int:
        prompt = self._prompt(tokens, namespace, media)
        return len(self._hits(prompt, len(prompt))) * self.block_size

    def _arguments(
        self, n_tokens: Any, tokens: Any, namespace: Any, media: Any
    ) -> tuple[int, ReferencePrompt]:
        if n_tokens is None and tokens is None:
            raise TypeError("neither n_tokens nor tokens")
        if n_tokens is not None:
            n_tokens = as_count("n_tokens", n_tokens)
        prompt = self._prompt(() if tokens is None else tokens, namespace, media)
        if n_tokens is None:
            n_tokens = len(prompt)
        if n_tokens < len(prompt):
            raise ValueError(f"n_tokens {n_tokens} is less than the {len(prompt)} tokens")
        return n_tokens, prompt

    def _plan(self, n_tokens: int, hits: list[Node]) -> tuple[int, int]:
        """New blocks needed; blocks available without the idle ones among the hits."""
        idle = sum(1 for node in hits if self.pool.ref[node.copies[0]] == 0)
        return blocks_for(n_tokens, self.block_size) - len(hits), self.pool.available - idle

    def plan_allocate(
        self, n_tokens: Any = None, *, tokens: Any = None, namespace: Any = None, media: Any = ()
    ) -> tuple[int, int, int]:
        n_tokens, prompt = self._arguments(n_tokens, tokens, namespace, media)
        hits = self._hits(prompt, n_tokens)
        return len(hits) * self.block_size, *self._plan(n_tokens, hits)

    def can_allocate(
        self,
        n_tokens: Any = None,
        watermark: Any = 0,
        *,
        tokens: Any = None,
        namespace: Any = None,
        media: Any = (),
    ) -> bool:
        watermark = as_count("watermark", watermark)
        _, needed, available = self.plan_allocate(
            n_tokens, tokens=tokens, namespace=namespace, media=media
        )
        return needed + watermark <= available

    # Sequences.

    def allocate(
        self,
        seq: Hashable,
        n_tokens: Any = None,
        *,
        tokens: Any = None,
        namespace: Any = None,
        media: Any = (),
        retention: Any = (),
        resumed: bool = False,
        partial_hit: bool = False,
    ) -> Any:
        n_tokens, prompt = self._arguments(n_tokens, tokens, namespace, media)
        self._not_live(seq)
        hits = self._hits(prompt, n_tokens)
        needed, available = self._plan(n_tokens, hits)
        if needed > available:
            self.counters[Counter.OUT_OF_BLOCKS] += 1
            raise OutOfBlocks(needed, available)
        source, more = None, 0
        if partial_hit and self.prefix_caching:
            node, more = self._partial_hit(prompt, hits, n_tokens)
            source = None if node is None else node.copies[0]
        if source is not None and needed > available - (self.pool.ref[source] == 0):
            # It would have to be evicted for the block that it is to be copied to.
            source = None
        table = [node.copies[0] for node in hits]
        for block in table if source is None else [*table, source]:
            self.pool.add_reference(block)
        table += [self._take() for _ in range(needed)]
        self._begin(seq, table, n_tokens)
        cached, copy = len(hits) * self.block_size, None
        if source is not None:
            copy = (source, table[len(hits)], more)
            cached += more
            self._drop(source)
        self.counters[Counter.SEQUENCES_ALLOCATED] += 1
        if self.prefix_caching:
            self.knowledge[seq] = Knowledge(
                list(prompt.tokens),
                prompt.namespace,
                prompt.media,
                self.index.era,
                len(hits),
                cut_column=prompt.cut_column,
            )
            found = Counter.RESUMED_CACHED_TOKENS if resumed else Counter.CACHED_TOKENS
            asked = Counter.RESUMED_TOKENS if resumed else Counter.PROMPT_TOKENS
            self.counters[found] += cached
            self.counters[asked] += len(prompt)
        return (cached, copy) if partial_hit else cached

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
        if n_tokens > 0 and self.lens[seq] % self.block_size and self.pool.ref[table[-1]] == 1:
            self._rewrite(table[-1])
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

    def _rewrite(self, block: int) -> None:
        """Its one holder is going to write into it: what it holds will not be that any more."""
        if self.prefix_caching and block in self.pool._kept:
            self.pool.forget_content(block)
            self.index.barred.discard(block)

    def append_batch(
        self, rows: Sequence[int], out: list[int], counts: Sequence[int] | None = None
    ) -> tuple[int, list[list[int]] | None]:
        seqs = self._by_row(rows)
        counts = self._counts(rows, counts)
        if len(out) < sum(counts):
            raise ValueError(f"out has {len(out)} entries for {sum(counts)} tokens")
        copies: list[list[int]] = []
        filled = 0
        for served, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
            try:
                slots, copy = self.append_slots(seq, count)
            except OutOfBlocks:
                return served, copies or None
            out[filled : filled + count] = slots
            filled += count
            if copy is not None:
                copies.append(list(copy))
        return len(rows), copies or None

    @staticmethod
    def _counts(rows: Sequence[int], counts: Sequence[int] | None) -> Sequence[int]:
        if counts is None:
            return [1] * len(rows)
        if len(counts) != len(rows):
            raise ValueError(f"{len(counts)} counts for {len(rows)} rows")
        for count in counts:
            if count < 1:
                raise ValueError(f"counts: {count}")
        return counts

    def plan_append(
        self,
        rows: Sequence[int],
        counts: Sequence[int] | None = None,
        without: Sequence[int] | None = None,
    ) -> tuple[int, int, int]:
        seqs, gone = self._by_row(rows), self._by_row(without or ())
        counts = self._counts(rows, counts)
        if len({*seqs, *gone}) != len(seqs) + len(gone):
            raise ValueError(f"a row twice in {rows} and {without}")
        given_up = [block for seq in gone for block in self.block_ids[seq] if block != HOLE]
        in_flight = self.newest_step > self.settled_step
        held = [block for _, block in self.held]
        now = Multiset({block: self.pool.ref[block] for block in range(self.num_blocks)})
        later = now - Multiset(given_up + held)
        if not in_flight:
            now = later
        needed = 0
        for seq, count in zip(seqs, counts, strict=True):
            length, size = self.lens[seq], self.block_size
            needed += blocks_for(length + count, size) - blocks_for(length, size)
            tail = self.block_ids[seq][-1] if length % size else None
            if now[tail] > 1:
                needed += 1
                now[tail] -= not in_flight  # a fence holds it instead
        used = sum(count > 0 for count in self.pool.ref)
        nobodys = used - len(later)
        idle = self.pool.available
        return (needed, idle, nobodys) if in_flight else (needed, idle + nobodys, 0)

    def plan_by_doing(
        self, rows: Sequence[int], counts: Sequence[int] | None, without: Sequence[int]
    ) -> tuple[int, int, int]:
        """What ``plan_append`` says, of a copy where it is done, with blocks from nowhere."""
        trial = copy.deepcopy(self)
        for seq in self._by_row(without):
            trial.free_seq(seq)
        available = trial.pool.available
        settled = copy.deepcopy(trial)
        settled.settle(settled.fence())
        counts = self._counts(rows, counts)
        more = range(trial.num_blocks, trial.num_blocks + sum(counts) + len(rows))
        trial.pool._free.extend(more)
        trial.pool.ref += [0 for _ in more]
        before = trial.counters[Counter.BLOCKS_TAKEN]
        trial.append_batch(rows, [0] * sum(counts), counts)
        needed = trial.counters[Counter.BLOCKS_TAKEN] - before
        return needed, available, settled.pool.available - available

    def can_append(self, seq: Hashable, n_tokens: Any = 1) -> bool:
        n_tokens = as_count("n_tokens", n_tokens)
        blocks = self._blocks_to_append(self._live(seq), n_tokens)
        return blocks <= self.pool.available

    def truncate(self, seq: Hashable, n_tokens: Any) -> None:
        n_tokens = as_count("n_tokens", n_tokens)
        seq = self._live(seq)
        if n_tokens > self.lens[seq]:
            raise ValueError(f"n_tokens {n_tokens} is more than the {self.lens[seq]} there are")
        self._no_cut(seq, n_tokens)
        table, length = self.block_ids[seq], self.lens[seq]
        kept = blocks_for(n_tokens, self.block_size)
        self._drop_all(table[kept:])
        del table[kept:]
        self._unchanged[seq] = min(self._unchanged[seq], len(table))
        self.lens[seq] = n_tokens
        if self.prefix_caching:
            self.knowledge[seq] = self.knowledge[seq].first(n_tokens, length, self.block_size)

    def truncate_batch(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        seqs = self._by_row(rows)
        if len(lengths) != len(rows) or len(set(rows)) != len(rows):
            raise ValueError(f"{lengths} for {rows}")
        for seq, length in zip(seqs, lengths, strict=True):
            if not 0 <= length <= self.lens[seq]:
                raise ValueError(f"{length} of the {self.lens[seq]} tokens of {seq!r}")
            self._no_cut(seq, length)
        for seq, length in zip(seqs, lengths, strict=True):
            self.truncate(seq, length)

    def release_outside_window(
        self, rows: Sequence[int], lengths: Sequence[int], window: Any, sinks: Any = 0
    ) -> int:
        window, sinks = as_count("window", window), as_count("sinks", sinks)
        seqs = self._by_row(rows)
        if window < 1 or len(lengths) != len(rows):
            raise ValueError(f"a window of {window}, {lengths} for {rows}")
        for seq, settled in zip(seqs, lengths, strict=True):
            if not 0 <= settled <= self.lens[seq]:
                raise ValueError(f"{settled} of the {self.lens[seq]} tokens of {seq!r}")
        released = 0
        for seq, settled in zip(seqs, lengths, strict=True):
            table = self.block_ids[seq]
            # The next token is number `settled`, and the first that it sees this one.
            first_seen = settled - (window - 1)
            columns = []
            for column in reversed(range(blocks_for(sinks, self.block_size), len(table))):
                if (column + 1) * self.block_size <= first_seen:
                    if table[column] == HOLE:
                        break  # those before it are none of this call's
                    columns.append(column)
            for column in columns:
                self._drop(table[column])
                table[column] = HOLE
                self._unchanged[seq] = min(self._unchanged[seq], column)
            released += len(columns)
        return released

    def exclusive_blocks(self, seq: Hashable) -> list[int]:
        table = self.block_ids[self._live(seq)]
        return [
            column
            for column, block in enumerate(table)
            if block != HOLE and self.pool.ref[block] == 1
        ]

    def restore(
        self,
        seq: Hashable,
        n_tokens: Any,
        columns: Sequence[int],
        blocks: Sequence[int],
        *,
        tokens: ReferencePrompt | None = None,
    ) -> list[int]:
        n_tokens = as_count("n_tokens", n_tokens)
        total = blocks_for(n_tokens, self.block_size)
        columns = [as_integer("a column", column) for column in columns]
        blocks = [as_count_or_hole("a block", block) for block in blocks]
        if len(columns) != len(blocks):
            raise ValueError(f"{len(columns)} columns for {len(blocks)} blocks")
        if columns != sorted(set(columns)) or any(not 0 <= one < total for one in columns):
            raise ValueError(f"columns {columns} of {total}")
        for column, block in zip(columns, blocks, strict=True):
            if block == HOLE:
                if (column + 1) * self.block_size > n_tokens:
                    raise ValueError(f"a hole in column {column}, which is written next")
            elif block >= self.num_blocks or self.pool.ref[block] == 0:
                raise ValueError(f"block {block} is not used")
        if tokens is not None and not isinstance(tokens, ReferencePrompt):
            raise TypeError(f"no prompt: {tokens!r}")
        if not self.prefix_caching:
            tokens = None
        if tokens is not None and len(tokens) > n_tokens:
            raise ValueError(f"{len(tokens)} tokens of {n_tokens}")
        self._not_live(seq)
        table = [HOLE] * total
        for column, block in zip(columns, blocks, strict=True):
            table[column] = block
            if tokens is not None and block != HOLE:
                self._agrees(tokens, column, block)
        self._need(total - len(columns))
        self._share_all(blocks)
        fresh = [self._take() for _ in range(total - len(columns))]
        missing = iter(fresh)
        for column in range(total):
            if column not in columns:
                table[column] = next(missing)
        self._begin(seq, table, n_tokens)
        self.counters[Counter.SEQUENCES_ALLOCATED] += 1
        if self.prefix_caching:
            self.knowledge[seq] = Knowledge([], b"", {}, NO_ERA, 0)
        if tokens is not None:
            self.knowledge[seq] = Knowledge(
                list(tokens.tokens),
                tokens.namespace,
                tokens.media,
                self.index.era,
                0,
                # What was written before a reset, or after something was forgotten.
                closed=tokens.era != self.index.era,
                cut_column=tokens.cut_column,
            )
        return fresh

    def _agrees(self, prompt: ReferencePrompt, column: int, block: int) -> None:
        """Nobody knows other tokens of that block, nor the tokens under another key."""
        size = self.block_size
        tokens = prompt.tokens[column * size : (column + 1) * size]
        key, _ = prompt.content(column)
        contents = []
        if block in self.index.nodes:
            contents.append((self.index.nodes[block].key, self.index.nodes[block].tokens))
        for other, table in self.block_ids.items():
            known = self.knowledge[other]
            # Who was restored without its tokens has no key to say.
            if table[column : column + 1] == [block] and known.era != NO_ERA:
                before = known.namespace if column == 0 else b""
                noted = known.tokens[column * size : (column + 1) * size]
                contents.append(((before, known.media.get(column, ())), tuple(noted)))
        for other_key, noted in contents:
            if any(a != b for a, b in zip(tokens, noted, strict=False)):
                raise ValueError(f"block {block} holds {noted}, not {tokens}")
            if tokens and other_key != key:
                raise ValueError(f"block {block} is of {other_key}, not of {key}")

    def fork(self, parent: Hashable, child: Hashable, n_tokens: Any = None) -> None:
        if n_tokens is not None:
            n_tokens = as_count("n_tokens", n_tokens)
        parent = self._live(parent)
        self._not_live(child)
        if n_tokens is None:
            n_tokens = self.lens[parent]
        if n_tokens > self.lens[parent]:
            raise ValueError(f"n_tokens {n_tokens} is more than the parent has")
        self._no_cut(parent, n_tokens)
        shared = self.block_ids[parent][: blocks_for(n_tokens, self.block_size)]
        self._share_all(shared)
        self._begin(child, shared, n_tokens)
        if self.prefix_caching:
            knows = self.knowledge[parent]
            self.knowledge[child] = knows.first(n_tokens, self.lens[parent], self.block_size)
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
        knowing = [
            replace(self.knowledge[parent], tokens=list(self.knowledge[parent].tokens))
            for parent in parents
            if self.prefix_caching
        ]
        changed = [
            self._common_prefix(self.block_ids[seq], table)
            for seq, (table, _) in zip(seqs, becoming, strict=True)
        ]
        for first, (table, _) in zip(changed, becoming, strict=True):
            self._share_all(table[first:])
        for seq, first, (table, length) in zip(seqs, changed, becoming, strict=True):
            self._drop_all(self.block_ids[seq][first:])
            self.block_ids[seq] = table
            self.lens[seq] = length
            self._unchanged[seq] = min(self._unchanged[seq], first)
        self.knowledge.update(zip(seqs, knowing, strict=False))

    @staticmethod
    def _common_prefix(left: list[int], right: list[int]) -> int:
        for column, (a, b) in enumerate(zip(left, right, strict=False)):
            if a != b:
                return column
        return min(len(left), len(right))

    def free_seq(self, seq: Hashable) -> None:
        seq = self._live(seq)
        self._drop_all(self.block_ids.pop(seq))
        for record in (self.lens, self._rows, self._unchanged):
            del record[seq]
        self.knowledge.pop(seq, None)
        self.counters[Counter.SEQUENCES_FREED] += 1

    # What the blocks hold.

    def commit(self, seq: Hashable, tokens: Any = None, *, n_settled: Any = None) -> int:
        new = [] if tokens is None else as_tokens(tokens)
        if n_settled is not None:
            n_settled = as_count("n_settled", n_settled)
        seq = self._live(seq)
        if not self.prefix_caching:
            return 0
        known = len(self.knowledge[seq].tokens) + len(new)
        if known > self.lens[seq]:
            raise ValueError(f"{known} known tokens of {self.lens[seq]}")
        if n_settled is None:
            n_settled = known
        if n_settled > known:
            raise ValueError(f"n_settled {n_settled} of {known} known tokens")
        self._no_hole(seq, known - len(new), known)
        self._learn(seq, new)
        return self._publish(seq, n_settled)

    def _learn(self, seq: Hashable, tokens: list[int]) -> None:
        knows = self.knowledge[seq]
        for position, token in enumerate(tokens, len(knows.tokens)):
            column, offset = divmod(position, self.block_size)
            block = self.block_ids[seq][column]
            # Those who share the block; what is in its twins is another's.
            noted = [
                known.tokens[position]
                for other, known in self.knowledge.items()
                if position < len(known.tokens) and self.block_ids[other][column] == block
            ]
            if block in self.index.nodes:
                noted.append(self.index.nodes[block].tokens[offset])
            if any(other != token for other in noted):
                raise ValueError(f"token {token} at {position}, which is known as {noted}")
        knows.tokens += tokens

    def _publish(self, seq: Hashable, n_settled: int) -> int:
        knows, table, size = self.knowledge[seq], self.block_ids[seq], self.block_size
        index, published = self.index, 0
        if knows.era != index.era or knows.closed:
            return 0
        while knows.published < min(n_settled // size, knows.cut_column):
            column = knows.published
            block = table[column]
            parent = index.nodes.get(table[column - 1]) if column else index.root
            node = index.nodes.get(block)
            if (
                block == HOLE
                or parent is None
                or block in index.barred
                or (node is not None and node.parent is not parent)
            ):
                knows.closed = True
                break
            if node is None:
                key = (b"" if column else knows.namespace, knows.media.get(column, ()))
                tokens = tuple(knows.tokens[column * size : (column + 1) * size])
                twin = parent.children.get((key, tokens))
                if self.merge_duplicates and twin is not None:
                    index.duplicates += 1
                    self.pool.add_reference(twin.copies[0])
                    table[column] = twin.copies[0]
                    self._unchanged[seq] = min(self._unchanged[seq], column)
                    self._drop(block)
                    self.counters[Counter.DUPLICATES_MERGED] += 1
                else:
                    index.publish(block, parent, key, tokens)
                    self.pool.keep(block)
                published += 1
            knows.published += 1
        self.counters[Counter.BLOCKS_PUBLISHED] += published
        return published

    def commit_batch(self, rows: Sequence[int], tokens: Sequence[int]) -> int:
        tokens = as_tokens(tokens)
        if len(rows) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens for {len(rows)} rows")
        seqs = self._by_row(rows)
        if not self.prefix_caching:
            return 0
        times = Multiset(seqs)
        for seq, count in times.items():
            if len(self.knowledge[seq].tokens) + count > self.lens[seq]:
                raise ValueError(f"more tokens than {seq!r} has")
        before = {seq: list(self.knowledge[seq].tokens) for seq in times}
        try:
            for seq, token in zip(seqs, tokens, strict=True):
                known = len(self.knowledge[seq].tokens)
                self._no_hole(seq, known, known + 1)
                self._learn(seq, [token])
        except ValueError:
            for seq, told in before.items():
                self.knowledge[seq].tokens = told
            raise
        return sum(self._publish(seq, len(self.knowledge[seq].tokens)) for seq in times)

    def commit_pending(
        self, rows: Sequence[int], pending: Any, sampled: Sequence[int] | None = None
    ) -> int:
        self._by_row(rows)
        if len(set(rows)) != len(rows) or (sampled is not None and len(sampled) != len(rows)):
            raise ValueError(f"{sampled} for {rows}")
        if not self.prefix_caching:
            return 0
        places = [place for place, row in enumerate(rows) if pending[row] >= 0]
        written = [rows[place] for place in places]
        published = self.commit_batch(written, [pending[row] for row in written])
        for place, row in zip(places, written, strict=True):
            pending[row] = -1 if sampled is None else sampled[place]
        return published

    def known(self, seq: Hashable) -> int:
        seq = self._live(seq)
        return len(self.knowledge[seq].tokens) if self.prefix_caching else 0

    def published(self, seq: Hashable) -> int:
        seq = self._live(seq)
        if not self.prefix_caching:
            return 0
        knows = self.knowledge[seq]
        return 0 if knows.closed or knows.era != self.index.era else knows.published

    def tokens(self, seq: Hashable) -> list[int]:
        self._no_hole(seq, 0, self.known(seq))
        return list(self.knowledge[seq].tokens) if self.prefix_caching else []

    @property
    def epoch(self) -> int:
        return self.index.epoch

    def set_epoch(self, epoch: Any) -> list[int]:
        epoch = as_integer("epoch", epoch)
        if epoch == self.index.epoch:
            return []
        self.index.epoch = epoch
        return self.reset()

    def reset(self) -> list[int]:
        index, pool = self.index, self.pool
        had = sorted(index.nodes)
        changes, index._changes = index._changes, None
        for block in [block for block in pool._evictable if block in index.nodes]:
            pool.forget(block)
        for block in sorted(index.nodes):
            pool.forget(block)
        index._changes = changes
        index.era += 1
        index._log(("cleared",))
        return [block for block in had if pool._pins[block]]

    def forget(self, tokens: Any, *, namespace: Any = None, media: Any = ()) -> int:
        """Descendants first, and of a content the last block first."""
        prompt = self._prompt(tokens, namespace, media)
        doomed = self.index.find(prompt, prompt.num_full_blocks)
        for node in doomed:
            doomed += [child for child in node.children.values() if child not in doomed]
        blocks = sorted((node.uid, block) for node in doomed for block in node.copies)
        for _, block in reversed(blocks):
            self.pool.forget(block)
        return len(blocks)

    def evict(self, count: Any) -> int:
        return self.pool.evict(count)

    def pin_prefix(
        self, tokens: Any, *, namespace: Any = None, media: Any = ()
    ) -> ReferencePrefixPin:
        prompt = self._prompt(tokens, namespace, media)
        found = self.index.find(prompt, prompt.num_full_blocks)
        blocks = [node.copies[0] for node in found]
        self.prefix_pins = [pin for pin in self.prefix_pins if not pin.released]
        pinned = sum(len(pin.blocks) for pin in self.prefix_pins)
        if self.pin_quota is not None and pinned + len(blocks) > self.pin_quota:
            raise ValueError(f"pin_quota {self.pin_quota}: {pinned} and {len(blocks)} more")
        for block in blocks:
            self.pool.retain(block)
        pin = ReferencePrefixPin(self.pool, blocks, self.block_size)
        self.prefix_pins.append(pin)
        return pin

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
        self._no_hole(seq, start, stop)
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
            logical_blocks=sum(
                block != HOLE for table in self.block_ids.values() for block in table
            ),
            cached=0 if pool.index is None else len(pool.index),
        )

    def check(self) -> None:
        self.pool.check()


class ReferenceStep(list[Hashable]):
    """The decoded sequences, with the rest of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[int] = []
        self.copies: list[list[int]] = []
        self.prefills: list[tuple[Hashable, int, int]] = []
        self.preempted: list[Hashable] = []
        self.stalled: list[Hashable] = []
        self.rejected: dict[Hashable, Verdict] = {}


class ReferenceScheduler:
    """Textbook steps: one sequence at a time, in the order of the rules."""

    def __init__(
        self,
        bm: ReferenceBlockManager,
        watermark_blocks: int = 1,
        max_running: int | None = None,
        wait_for_prefix: bool = True,
    ) -> None:
        self.bm = bm
        self.watermark_blocks = watermark_blocks
        self.max_running = max_running
        self.wait_for_prefix = wait_for_prefix
        self.waiting: deque[tuple[Hashable, int]] = deque()
        self.running: list[Hashable] = []
        self.stalled: list[Hashable] = []  # of the last step

    def add(
        self, seq: Hashable, n_tokens: Any = None, *, tokens: Any = None, namespace: Any = None
    ) -> None:
        known = 0 if tokens is None else len(tokens)
        counted = n_tokens is None and tokens is not None
        n_tokens = known if counted else as_integer("n_tokens", n_tokens)
        if n_tokens < max(known, 1):
            raise ValueError(f"n_tokens must be at least 1 and {known}: {n_tokens}")
        if seq in self.bm:
            raise ValueError(f"{seq!r} is live")
        if self._why_never((seq, n_tokens)):
            raise RequestRefused
        prompt: Any = None
        if self.bm.prefix_caching and tokens is not None:
            prompt = self.bm.prompt(tokens, namespace=namespace)
        self.waiting.append(Request(seq, n_tokens, prompt))

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
            if seq in self.stalled and seq in self.running:
                needed, available, _ = self.bm.plan_append(self.bm.rows([seq]))
                return Verdict(Reason.STALLED, needed, available)
            raise KeyError(seq)
        ahead = names.index(seq)
        request = self.waiting[ahead]
        verdict = self._why_never(request) or self._why_not_now(request)
        if ahead:
            return verdict._replace(reason=Reason.BEHIND, ahead=ahead)
        if verdict.reason is Reason.FITS and isinstance(request, Request) and request.waited:
            return verdict._replace(reason=Reason.PREFIX)
        return verdict

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
            return Verdict(
                Reason.NEVER_FITS,
                needed,
                everything - self.watermark_blocks,
                reserve=self.watermark_blocks,
            )
        return None

    def _hits(self, request: tuple[Hashable, int]) -> list[Node]:
        prompt: Any = getattr(request, "prompt", None)
        return [] if prompt is None else self.bm._hits(prompt, request[1])

    def _waits(self, request: tuple[Hashable, int], entered: list[ReferencePrompt]) -> bool:
        """Whether somebody who enters in this step computes a block that it could share."""
        prompt: Any = getattr(request, "prompt", None)
        if prompt is None or not self.wait_for_prefix or request.waited:  # type: ignore[attr-defined]
            return False
        usable = (request[1] - 1) // self.bm.block_size
        hits = len(self._hits(request))
        return any(min(prompt.common_blocks(other), usable) > hits for other in entered)

    def _why_not_now(self, request: tuple[Hashable, int]) -> Verdict:
        hits = self._hits(request)
        needed = self._blocks(request) - len(hits)
        # An idle hit stops being available and needs no other block.
        idle = sum(1 for node in hits if self.bm.ref[node.copies[0]] == 0)
        available = self.bm.pool.available - idle
        comes_back_alone = isinstance(request, Resumed) and not self.running
        reserve = 0 if comes_back_alone else self.watermark_blocks
        if request[0] in self.bm:
            reason = Reason.LIVE_ID
        elif self.max_running is not None and len(self.running) >= self.max_running:
            reason = Reason.MAX_RUNNING
        elif needed > available:
            reason = Reason.BLOCKS
        elif needed + reserve > available:
            reason = Reason.WATERMARK
        else:
            reason = Reason.FITS
        return Verdict(reason, needed, available, reserve=reserve)

    def step(self) -> ReferenceStep:
        step = ReferenceStep()
        self._admit(step)
        self._make_room(step)
        for seq in self.running:
            try:
                (slot,), copy = self.bm.append_slots(seq, 1)
            except OutOfBlocks:
                step.stalled.append(seq)
                continue
            step.append(seq)
            step.slots.append(slot)
            if copy is not None:
                step.copies.append(list(copy))
        self.stalled = step.stalled
        return step

    def _admit(self, step: ReferenceStep) -> None:
        entered: list[ReferencePrompt] = []
        while self.waiting:
            head = self.waiting[0]
            never = self._why_never(head)
            now = never or self._why_not_now(head)
            if never or (now.reason is Reason.LIVE_ID and head[0] not in self.running):
                step.rejected[head[0]] = now
            elif now.reason is Reason.FITS and self._waits(head, entered):
                head.waited = True  # type: ignore[attr-defined]
                break
            elif now.reason is Reason.FITS:
                prompt: Any = getattr(head, "prompt", None)
                if prompt is not None:
                    entered.append(prompt)
                cached = self.bm.allocate(*head, tokens=prompt, resumed=isinstance(head, Resumed))
                self.running.append(head[0])
                if head[1]:
                    step.prefills.append((head[0], cached, head[1] - cached))
            else:
                break
            self.waiting.popleft()

    def _make_room(self, step: ReferenceStep) -> None:
        """Who yields is decided before anything is appended."""
        if self.bm.pool.available >= len(self.running) or self._suffices([]):
            return
        for seq in list(self.running):
            never = self._why_never(Resumed(seq, self.bm.lens[seq]))
            if never:
                self._take_out(seq, step)
                step.rejected[seq] = never
        victims: list[Hashable] = []
        while not self._suffices(victims):
            if len(self.running) - len(victims) <= 1:
                return  # nobody yields in vain
            victims.append(self.running[-1 - len(victims)])
        for seq in victims:
            request = Resumed(seq, self.bm.lens[seq])
            if self.bm.prefix_caching:
                known: Any = self.bm.prompt_of(seq)
                request.prompt = known
            self._take_out(seq, step)
            step.preempted.append(seq)
            self.waiting.appendleft(request)

    def _suffices(self, victims: list[Hashable]) -> bool:
        """Whether all others get their tokens, if some now and some when steps have settled."""
        others = [seq for seq in self.running if seq not in victims]
        needed, available, coming = self.bm.plan_append(
            self.bm.rows(others), without=self.bm.rows(victims)
        )
        return needed <= available + coming

    def _take_out(self, seq: Hashable, step: ReferenceStep) -> None:
        self.bm.free_seq(seq)
        self.running.remove(seq)
        step.prefills = [prefill for prefill in step.prefills if prefill[0] != seq]
