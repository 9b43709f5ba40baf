"""What does sharing equal prefixes cost: match, publish, revive, evict, decode with it on?

Unless a row says otherwise, every block of the pool is full, findable, and held by nobody,
the blocks of a prompt lie at random ids, and a prompt is an int32 array that numpy made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvcore
from bench import peers
from bench.extensions import UnavailableError, load
from bench.harness import Contender, Row, Target
from bench.reference import ReferencePrefixManager, ReferenceScheduler
from bench.workload import BLOCK_SIZE, phases, set_free_order, shuffled
from kvcore import BlockManager
from kvcore.scheduler import Scheduler

__all__ = ["rows", "sharing_manager"]

BLOCKS = 512
"""Full blocks of a prompt: 8,192 tokens. One token more makes all of them matchable."""
TOKENS = BLOCKS * BLOCK_SIZE

POOLS = {"32k": 64 * BLOCKS, "262k": 512 * BLOCKS}
SMALL = 19 * BLOCKS  # about 10^4
LARGE = 1_953 * BLOCKS  # about 10^6
WINDOW = 4
"""Prompts that one run revives, evicts or publishes."""

HOT = 32
"""Calls of a run of the hot rows: the first finds what the contenders before it left."""

EVICTED = 625
"""Blocks of 10,000 tokens."""

DECODING = 256
STEPS = BLOCK_SIZE
VOCABULARY = 32_000

MATCH_TARGETS = {"32k": Target.ns(must=12_000, aim=8_000), "262k": Target.ns(must=20_000)}
KEPT_TARGET = Target.ns(must=4_000)
PUBLISH_TARGET = Target.ns(must=60)
BLOCK_TARGET = Target.ns(must=30)
BLOCK_TARGET_LARGE = Target.ns(must=4 * 30)
EVICT_TARGET = Target.ns(must=15_000)

Tokens = NDArray[np.int32]


def drawn(shape: int | tuple[int, int], seed: int = 0) -> Tokens:
    """Random tokens."""
    return np.random.default_rng(seed).integers(VOCABULARY, size=shape, dtype=np.int32)


def sharing_manager(num_blocks: int, **options: Any) -> Any:
    """A manager that shares prefixes, its free blocks in random order."""
    try:
        manager = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=True, **options)
    except TypeError as error:
        raise UnavailableError(f"this kvcore does not share prefixes: {error}") from error
    set_free_order(manager, shuffled(num_blocks))
    return manager


def compute(manager: Any, prompt: Any) -> None:
    """What an engine does with a prompt: it stays findable, and nobody holds it."""
    manager.allocate("prompt", tokens=prompt)
    manager.commit("prompt")
    manager.free_seq("prompt")


def compute_in_reference(manager: ReferencePrefixManager, prompt: Sequence[int]) -> None:
    """The same in plain Python."""
    manager.allocate_prompt("prompt", prompt)
    manager.commit("prompt")
    manager.free_seq("prompt")


class Cached:
    """A pool full of prompts that were computed one after the other, but for some free blocks."""

    def __init__(
        self, num_blocks: int, tokens: int = TOKENS, free: int = 0, **options: Any
    ) -> None:
        columns = tokens // BLOCK_SIZE + 1
        self.manager = sharing_manager(num_blocks + free, columns=columns, **options)
        self.prompts = drawn((num_blocks * BLOCK_SIZE // tokens, tokens))
        for prompt in self.prompts:
            compute(self.manager, prompt)
        if self.manager.pool.num_free != free:
            raise AssertionError("the pool is not full")

    def wanted(self) -> list[Tokens]:
        """Each prompt with one more token, so that all its blocks may be taken."""
        return list(np.pad(self.prompts, ((0, 0), (0, 1))))

    def tables(self, wanted: Sequence[Tokens]) -> list[Tokens]:
        """The blocks in which the prompts lie."""
        found = []
        for tokens in wanted:
            with self.manager.pin_prefix(tokens) as pin:
                found.append(np.array(pin.blocks, np.int32))
        return found

    def expect_match(self, wanted: Sequence[Any]) -> None:
        """Fail unless every block of each is found."""
        for tokens in wanted:
            found = self.manager.match(tokens)
            if found != len(tokens) // BLOCK_SIZE * BLOCK_SIZE:
                raise AssertionError(f"{found} of {len(tokens)} tokens were found")
        self.manager.check()


# ------------------------------------------------------------ match
def memcmp(cached: Cached, wanted: Sequence[Tokens], turns: int = 1) -> Contender:
    """Compare the same bytes at the same places, knowing where: the floor of verifying."""
    store = np.zeros((cached.manager.num_blocks, BLOCK_SIZE), np.int32)
    copy_blocks = load("floor").copy_blocks
    pairs = list(zip(wanted, cached.tables(wanted), strict=True))
    for tokens, table in pairs:
        copy_blocks(tokens, store, table)
    return Contender(
        "compare(tokens, store, table)",
        "tokens, table in pairs",
        {"compare": load("floor").compare_blocks, "store": store, "pairs": pairs * turns},
        operations=len(pairs) * turns,
        verify=partial(expect_equal, pairs, store),
    )


def expect_equal(pairs: Sequence[tuple[Tokens, Tokens]], store: Tokens) -> None:
    """Fail unless the floor compared every block."""
    for tokens, table in pairs:
        if load("floor").compare_blocks(tokens, store, table) != len(table):
            raise AssertionError("the floor found a difference")


def match_statement(manager: Any, wanted: Sequence[Any], **more: Any) -> Contender:
    """``match`` of each of them."""
    return Contender(
        "manager.match(tokens)",
        "tokens in wanted",
        {"manager": manager, "wanted": wanted},
        operations=len(wanted),
        **more,
    )


def matches(pool: str, kept: bool, others: bool = False) -> Mapping[str, Contender]:
    """The same cached prompt again and again, its hashes made anew or kept by the caller.

    ``others``: those that take a hundred times as long, and sweep the processor's caches
    in between.
    """
    cached = Cached(POOLS[pool])
    tokens = cached.wanted()[0]
    subject = cached.manager.prompt(tokens) if kept else tokens
    contenders = {
        "kvcore": match_statement(
            cached.manager, [subject] * HOT, verify=partial(cached.expect_match, [subject])
        ),
        "no-op": match_statement(load("floor").Floor(), [subject] * HOT),
        "memcmp": memcmp(cached, [tokens], turns=HOT),
    }
    if others:
        prompts = cached.prompts.tolist() if peers.present() else []
        reference = ReferencePrefixManager(POOLS[pool], BLOCK_SIZE)
        for prompt in cached.prompts.tolist():
            compute_in_reference(reference, prompt)
        contenders["reference"] = match_statement(reference, [tokens.tolist()])
        ask = peers.match_hashed if kept else peers.match
        contenders |= ask(POOLS[pool], prompts, tokens.tolist())
    return contenders


def matches_in_turn(pool: str, kept: bool) -> Mapping[str, Contender]:
    """Every prompt of the pool, one after the other: no cache of the processor holds them."""
    cached = Cached(POOLS[pool])
    wanted = cached.wanted()
    subjects = [cached.manager.prompt(tokens) if kept else tokens for tokens in wanted]
    return {
        "kvcore": match_statement(
            cached.manager, subjects, verify=partial(cached.expect_match, subjects)
        ),
        "memcmp": memcmp(cached, wanted),
    }


def misses() -> Mapping[str, Contender]:
    """A prompt of which not even the first block is known."""
    cached = Cached(POOLS["32k"])
    wanted = list(drawn((8, TOKENS + 1), seed=1))
    return {
        "kvcore": match_statement(cached.manager, wanted),
        "no-op": match_statement(load("floor").Floor(), wanted),
    }


def hashes() -> Mapping[str, Contender]:
    """``prompt``: hashing alone, and the object that keeps it."""
    manager = sharing_manager(64)
    return {
        "kvcore": Contender(
            "manager.prompt(tokens)",
            "tokens in wanted",
            {"manager": manager, "wanted": list(drawn((8, TOKENS), seed=1))},
            operations=8,
        )
    }


# ------------------------------------------------------------ publish
class Publishing:
    """Sequences whose blocks are written but not findable; a run publishes them."""

    def __init__(self, with_tokens: bool) -> None:
        pool = POOLS["32k"]
        self.manager = sharing_manager(pool, columns=BLOCKS)
        for prompt in drawn((pool // BLOCKS - WINDOW, TOKENS)):
            compute(self.manager, prompt)
        self.pairs: list[tuple[Hashable, Tokens]] = list(enumerate(drawn((WINDOW, TOKENS), seed=1)))
        self.with_tokens = with_tokens

    def start_over(self) -> None:
        """The sequences new, in blocks that were free."""
        for seq, prompt in self.pairs:
            if seq in self.manager.tables:
                self.manager.free_seq(seq)
                self.manager.forget(prompt)
        for seq, prompt in self.pairs:
            if self.with_tokens:
                self.manager.allocate(seq, tokens=prompt)
            else:
                self.manager.allocate(seq, TOKENS)

    def expect_published(self) -> None:
        """Fail unless the last run published every block."""
        for seq, _ in self.pairs:
            if self.manager.published(seq) != BLOCKS:
                raise AssertionError(f"{self.manager.published(seq)} blocks were published")
        self.manager.check()


def publishes(with_tokens: bool) -> Mapping[str, Contender]:
    """``commit`` of whole prompts, a block: hashed by ``allocate`` before, or given now."""
    publishing = Publishing(with_tokens)
    statement = "manager.commit(seq)" if with_tokens else "manager.commit(seq, tokens)"
    names = {"manager": publishing.manager, "pairs": publishing.pairs}
    operations = WINDOW * BLOCKS
    floor = load("floor")
    store = np.zeros((POOLS["32k"], BLOCK_SIZE), np.int32)
    places = shuffled(POOLS["32k"])[: WINDOW * BLOCKS].reshape(WINDOW, BLOCKS)
    contenders = {
        "kvcore": Contender(
            statement,
            "seq, tokens in pairs",
            names,
            operations=operations,
            prepare=publishing.start_over,
            verify=publishing.expect_published,
        ),
        "memcpy": Contender(
            "copy(tokens, store, table)",
            "(_, tokens), table in pairs",
            {
                "copy": floor.copy_blocks,
                "store": store,
                "pairs": list(zip(publishing.pairs, places, strict=True)),
            },
            operations=operations,
        ),
    }
    if with_tokens:
        prompts = [prompt.tolist() for _, prompt in publishing.pairs]
        reference = ReferencePrefixManager(2 * operations, BLOCK_SIZE)
        contenders["reference"] = Contender(
            "manager.commit(seq)",
            "seq in seqs",
            {"manager": reference, "seqs": range(WINDOW)},
            operations=operations,
            prepare=partial(reallocate_reference, reference, prompts),
        )
        contenders |= peers.publish(2 * operations, prompts)
    return contenders


def reallocate_reference(manager: ReferencePrefixManager, prompts: Sequence[Sequence[int]]) -> None:
    """The sequences new, and nothing findable."""
    for seq in list(manager.tables):
        manager.free_seq(seq)
    manager.evict(manager.pool.evictable.__len__())
    for seq, prompt in enumerate(prompts):
        manager.allocate_prompt(seq, prompt)


# ------------------------------------------------------------ revive and evict
class Turning(Cached):
    """A full pool whose prompts a run uses up, oldest first, and which then gets them back.

    In a large pool these are the ones that were left alone for longest: cold memory.
    """

    def __init__(self, num_blocks: int, per_run: int, tokens: int = TOKENS, **options: Any) -> None:
        super().__init__(num_blocks, tokens, **options)
        self.per_run = per_run
        self.turn = 0
        self.seqs: list[Hashable] = list(range(per_run))

    @cached_property
    def kept(self) -> list[Any]:
        """Each prompt and one more token, hashed."""
        return [self.manager.prompt(tokens) for tokens in self.wanted()]

    @cached_property
    def window(self) -> list[Any]:
        """Prompts of this run. Changed in place: the timed code holds it."""
        return self.kept[: self.per_run]

    def show_next(self) -> None:
        """Move on to the prompts that are the oldest now."""
        self.turn += 1
        first = self.turn * self.per_run
        count = len(self.kept)
        self.window[:] = [self.kept[(first + i) % count] for i in range(self.per_run)]

    def end_and_show_next(self) -> None:
        """End the sequences of the last run; their blocks are the youngest then."""
        if self.manager.tables:
            self.expect_all_hit()
            for seq in self.seqs:
                self.manager.free_seq(seq)
            self.show_next()

    def expect_all_hit(self) -> None:
        """Fail unless the last run took every block from the cache."""
        for seq in self.seqs:
            if self.manager.published(seq) != self.prompts.shape[1] // BLOCK_SIZE:
                raise AssertionError(f"sequence {seq} was not cached")

    def hold_window(self) -> None:
        """Sequences that share the oldest prompts, for a run that frees them."""
        self.show_next()
        for seq, prompt in zip(self.seqs, self.window, strict=True):
            self.manager.allocate(seq, tokens=prompt)

    def compute_again(self) -> None:
        """After a run that evicted the oldest prompts: compute them, and show the next."""
        for seq in list(self.manager.tables):
            self.manager.free_seq(seq)
        if not self.manager.pool.num_free:
            return  # nothing has run yet
        first = self.turn * self.per_run
        for i in range(first, first + self.per_run):
            compute(self.manager, self.prompts[i % len(self.prompts)])
        if self.manager.pool.num_free:
            raise AssertionError("something else was evicted than the oldest prompts")
        self.turn += 1


def revives(size: int) -> Mapping[str, Contender]:
    """Admit prompts that are cached and idle, hashes kept; a block."""
    turning = Turning(size, WINDOW, free=WINDOW)
    return {
        "kvcore": Contender(
            "manager.allocate(seq, tokens=prompt)",
            "seq, prompt in zip(seqs, window)",
            {"manager": turning.manager, "seqs": turning.seqs, "window": turning.window},
            operations=WINDOW * BLOCKS,
            prepare=turning.end_and_show_next,
            verify=turning.manager.check,
        )
    }


def releases(size: int) -> Mapping[str, Contender]:
    """End sequences all of whose blocks stay findable; a block."""
    turning = Turning(size, WINDOW, free=WINDOW)
    return {
        "kvcore": Contender(
            "manager.free_seq(seq)",
            "seq in seqs",
            {"manager": turning.manager, "seqs": turning.seqs},
            operations=WINDOW * BLOCKS,
            prepare=turning.hold_window,
            verify=turning.manager.check,
        )
    }


def evicting_allocations(size: int) -> Mapping[str, Contender]:
    """Admit prompts for which every block has to be evicted; a block."""
    turning = Turning(size, WINDOW)
    return {
        "kvcore": Contender(
            "manager.allocate(seq, n_tokens)",
            "seq in seqs",
            {"manager": turning.manager, "seqs": turning.seqs, "n_tokens": TOKENS},
            operations=WINDOW * BLOCKS,
            prepare=turning.compute_again,
            verify=turning.manager.check,
        )
    }


def evictions(
    size: int, prompts_per_run: int, policy: str = "LRU", others: bool = False
) -> Mapping[str, Contender]:
    """``evict(625)``: 10,000 tokens of one prompt or of 25."""
    kind = getattr(kvcore, policy, None)
    if kind is None:
        raise UnavailableError(f"this kvcore has no {policy}")
    tokens = EVICTED // prompts_per_run * BLOCK_SIZE
    turning = Turning(size, prompts_per_run, tokens, eviction=kind())
    contenders = {
        "kvcore": evict_statement(
            turning.manager, prepare=turning.compute_again, verify=turning.manager.check
        )
    }
    if others:
        contenders["no-op"] = evict_statement(load("floor").Floor())
        prompts = turning.prompts.tolist()
        reference = ReferencePrefixManager(size, BLOCK_SIZE)
        state = {"turn": 0}

        def compute_again() -> None:
            missing = len(reference.pool.free) // (tokens // BLOCK_SIZE)
            for _ in range(missing):
                compute_in_reference(reference, prompts[state["turn"] % len(prompts)])
                state["turn"] += 1

        contenders["reference"] = evict_statement(reference, prepare=compute_again)
        contenders |= peers.evict(size, prompts, EVICTED)
    return contenders


def evict_statement(manager: Any, **more: Any) -> Contender:
    """One call of ``evict``."""
    return Contender(
        "manager.evict(count)",
        "_ in once",
        {"manager": manager, "count": EVICTED, "once": (None,)},
        operations=1,
        **more,
    )


def hits_and_frees() -> Mapping[str, Contender]:
    """Admit and end a request whose prompt is cached, as after a conversation's last turn."""
    cached = Cached(POOLS["32k"], free=1)
    tokens = cached.wanted()[0]
    reference = ReferencePrefixManager(POOLS["32k"], BLOCK_SIZE)
    prompts = cached.prompts.tolist()
    for prompt in prompts:
        compute_in_reference(reference, prompt)

    def statement(call: str, manager: Any, prompt: Any, **more: Any) -> Contender:
        return Contender(
            f"{call}; manager.free_seq(0)",
            "_ in turns",
            {"manager": manager, "prompt": prompt, "turns": range(8)},
            operations=8,
            **more,
        )

    ours = "manager.allocate(0, tokens=prompt)"
    return {
        "kvcore": statement(
            ours, cached.manager, cached.manager.prompt(tokens), verify=cached.manager.check
        ),
        "no-op": statement(ours, load("floor").Floor(), tokens),
        "reference": statement("manager.allocate_prompt(0, prompt)", reference, tokens.tolist()),
        **peers.hit_and_free(POOLS["32k"], prompts, tokens.tolist()),
    }


# ------------------------------------------------------------ decode
class Decoding:
    """Sequences that decode, at every position of a block alike or all at the same one."""

    def __init__(self, manager: Any, lengths: Sequence[int], ahead: int = 0) -> None:
        self.manager = manager
        self.in_python = isinstance(manager, ReferencePrefixManager)
        self.lengths = lengths
        self.ahead = ahead
        self.seqs: list[Hashable] = [10_000 + i for i in range(len(lengths))]
        prompts = [drawn(length, seed=100 + i) for i, length in enumerate(lengths)]
        self.prompts: list[Any] = (
            [prompt.tolist() for prompt in prompts]
            if self.in_python
            else [manager.prompt(prompt) for prompt in prompts]
        )
        self.random = np.random.default_rng(2)
        self.tokens = np.empty((STEPS, len(lengths)), np.int32)
        """What each step decodes. Changed in place: the timed code holds its rows."""
        self.rows = np.empty(len(lengths), np.int32)
        self.begin()

    def begin(self) -> None:
        """Every sequence anew, ``ahead`` slots ahead of its known tokens.

        It finds its full blocks again. The last one is another one, of which nothing is
        noted, as it would be had the sequence come here by decoding.
        """
        manager = self.manager
        for seq, prompt in zip(self.seqs, self.prompts, strict=True):
            if seq in manager.tables:
                manager.free_seq(seq)
            if self.in_python:
                manager.allocate_prompt(seq, prompt)
            else:
                manager.allocate(seq, tokens=prompt)
            manager.commit(seq)
            if self.ahead:
                manager.append_slots(seq, self.ahead)
        if not self.in_python:
            self.rows[:] = manager.rows(self.seqs)
        # Other tokens each time: those of the last run are findable still.
        self.tokens[:] = self.random.integers(VOCABULARY, size=self.tokens.shape)

    def expect_known(self, grown: int) -> None:
        """Fail unless every sequence knows ``grown`` more tokens."""
        for seq, length in zip(self.seqs, self.lengths, strict=True):
            if self.manager.known(seq) != length + grown:
                raise AssertionError(f"{self.manager.known(seq)} tokens are known")
        self.manager.check()


def decoding_manager(count: int, tokens: int) -> Any:
    """Room for the sequences, and as many blocks again for what is findable still."""
    return sharing_manager(2 * count * (tokens // BLOCK_SIZE + 4), rows=count)


def commits(lengths: Sequence[int], steps: int) -> Mapping[str, Contender]:
    """``commit_batch`` alone, a row."""
    manager = decoding_manager(len(lengths), max(lengths))
    decoding = Decoding(manager, lengths, ahead=steps)
    names = {"rows": decoding.rows, "steps": list(decoding.tokens[:steps])}
    statement = "manager.commit_batch(rows, tokens)"
    operations = len(lengths) * steps
    return {
        "kvcore": Contender(
            statement,
            "tokens in steps",
            {"manager": manager, **names},
            operations=operations,
            prepare=decoding.begin,
            verify=partial(decoding.expect_known, steps),
        ),
        "no-op": Contender(
            statement,
            "tokens in steps",
            {"manager": load("floor").Floor(), **names},
            operations=operations,
        ),
    }


def append_and_commit(lengths: Sequence[int]) -> Mapping[str, Contender]:
    """The token of a step: its slots, then its ids; a row, without sharing beside it."""
    count = len(lengths)
    out = np.empty(count, np.int64)
    manager = decoding_manager(count, max(lengths))
    decoding = Decoding(manager, lengths)
    off = BlockManager(manager.num_blocks, BLOCK_SIZE, rows=count)
    set_free_order(off, shuffled(off.num_blocks))
    for seq, length in zip(decoding.seqs, lengths, strict=True):
        off.allocate(seq, length)

    def truncate() -> None:
        for seq, length in zip(decoding.seqs, lengths, strict=True):
            off.truncate(seq, length)

    reference = ReferencePrefixManager(manager.num_blocks, BLOCK_SIZE)
    in_python = Decoding(reference, lengths)
    ids: list[list[int]] = [[] for _ in range(STEPS)]

    def begin_in_python() -> None:
        in_python.begin()
        ids[:] = in_python.tokens.tolist()

    names = {"out": out, "steps": list(decoding.tokens)}
    operations = count * STEPS
    return {
        "kvcore": Contender(
            "manager.append_batch(rows, out); manager.commit_batch(rows, tokens)",
            "tokens in steps",
            {"manager": manager, "rows": decoding.rows, **names},
            operations=operations,
            prepare=decoding.begin,
            verify=partial(decoding.expect_known, STEPS),
        ),
        "sharing off": Contender(
            "manager.append_batch(rows, out)",
            "tokens in steps",
            {"manager": off, "rows": off.rows(decoding.seqs), **names},
            operations=operations,
            prepare=truncate,
        ),
        "reference": Contender(
            "manager.append_batch(seqs, out); manager.commit_batch(seqs, tokens)",
            "tokens in steps",
            {"manager": reference, "seqs": in_python.seqs, "out": [0] * count, "steps": ids},
            operations=operations,
            prepare=begin_in_python,
        ),
    }


class Running:
    """A scheduler that runs sequences whose tokens are known, or only counted."""

    def __init__(self, manager: Any, lengths: Sequence[int], sharing: bool) -> None:
        self.manager = manager
        self.scheduler: Any = Scheduler(manager)
        self.sharing = sharing
        self.lengths = lengths
        prompts = [drawn(length, seed=100 + i) for i, length in enumerate(lengths)]
        self.prompts = [manager.prompt(prompt) for prompt in prompts] if sharing else []
        self.tokens = drawn((STEPS, len(lengths)), seed=2)

    def begin(self) -> None:
        """All anew, after the step that admits them and decodes their first token."""
        for seq in list(self.scheduler.running):
            self.scheduler.finish(seq)
        for i, length in enumerate(self.lengths):
            if self.sharing:
                self.scheduler.add(10_000 + i, tokens=self.prompts[i])
            else:
                self.scheduler.add(10_000 + i, length)
        step = self.scheduler.step()
        if len(step) != len(self.lengths):
            raise AssertionError("not every sequence was admitted")
        if self.sharing:
            self.tokens[:] = (self.tokens + 7) % VOCABULARY
            self.manager.commit_batch(step.rows, self.tokens[0])


def steps_with_sharing(count: int) -> Mapping[str, Contender]:
    """``Scheduler.step`` and the commit of what it decoded; without sharing beside it."""
    contenders = {}
    lengths = phases(count, 480)
    blocks = 2 * count * (480 // BLOCK_SIZE + 4)
    for name, sharing, statement in (
        ("kvcore", True, "manager.commit_batch(scheduler.step().rows, tokens)"),
        ("sharing off", False, "scheduler.step()"),
    ):
        manager = (
            sharing_manager(blocks, rows=count)
            if sharing
            else BlockManager(blocks, BLOCK_SIZE, rows=count)
        )
        running = Running(manager, lengths, sharing)
        contenders[name] = Contender(
            statement,
            "tokens in steps",
            {
                "manager": manager,
                "scheduler": running.scheduler,
                "steps": list(running.tokens),
            },
            operations=STEPS,
            prepare=running.begin,
            verify=manager.check,
        )
    reference = ReferencePrefixManager(blocks, BLOCK_SIZE)
    in_python = Decoding(reference, lengths)
    plain: Any = ReferenceScheduler(reference)
    plain.running.extend(in_python.seqs)
    contenders["reference"] = Contender(
        "manager.commit_batch(scheduler.step(), tokens)",
        "tokens in steps",
        {"manager": reference, "scheduler": plain, "steps": in_python.tokens.tolist()},
        operations=STEPS,
        prepare=in_python.begin,
    )
    return contenders


# ------------------------------------------------------------ rows
def rows() -> Iterator[Row]:
    """All rows of this file."""
    for pool, target in MATCH_TARGETS.items():
        yield Row(
            f"hash + match 8,192 tokens, pool of {pool}", partial(matches, pool, False), target
        )
        yield Row(
            f"match 8,192 tokens, hashes kept, pool of {pool}",
            partial(matches, pool, True),
            KEPT_TARGET,
        )
    for pool in POOLS:
        yield Row(
            f"hash + match, every prompt of {pool} in turn", partial(matches_in_turn, pool, False)
        )
        yield Row(
            f"match, hashes kept, every prompt of {pool} in turn",
            partial(matches_in_turn, pool, True),
        )
    yield Row("hash + match 8,192 tokens, beside others", partial(matches, "32k", False, True))
    yield Row("match, hashes kept, beside others", partial(matches, "32k", True, True))
    yield Row("match 8,192 tokens, nothing cached", misses)
    yield Row("prompt: hash 8,192 tokens and keep it", hashes)
    yield Row("commit of a prompt, a block", partial(publishes, True), PUBLISH_TARGET)
    yield Row("commit with its tokens, a block", partial(publishes, False))
    mixed = phases(DECODING, 480)
    boundary = [480 + BLOCK_SIZE - 1] * DECODING
    yield Row(
        "commit_batch of 256, each fills a block", partial(commits, boundary, 1), PUBLISH_TARGET
    )
    yield Row("commit_batch of 256, a row", partial(commits, mixed, STEPS))
    yield Row("append_batch + commit_batch of 256, a row", partial(append_and_commit, mixed))
    questions: tuple[tuple[str, Callable[[int], Mapping[str, Contender]]], ...] = (
        ("allocate, all blocks idle hits", revives),
        ("free, all blocks findable", releases),
        ("allocate, all blocks evicted", evicting_allocations),
    )
    for what, build in questions:
        yield Row(f"{what}, 10^4, a block", partial(build, SMALL), BLOCK_TARGET)
        yield Row(f"{what}, 10^6, a block", partial(build, LARGE), BLOCK_TARGET_LARGE)
    yield Row("allocate 512 hits, hashes kept, and free", hits_and_frees)
    small, large = 16 * EVICTED, 1_600 * EVICTED
    for policy in ("LRU", "SegmentedLRU", "RetentionPriority"):
        yield Row(
            f"evict 10,000 tokens, 10^4, {policy}",
            partial(evictions, small, 25, policy),
            EVICT_TARGET,
        )
        yield Row(f"evict 10,000 tokens, 10^6, {policy}", partial(evictions, large, 25, policy))
    for prompts, name in ((25, "25 prompts"), (1, "1 prompt")):
        yield Row(
            f"evict 10,000 tokens of {name}, beside others",
            partial(evictions, small, prompts, others=True),
        )
    yield Row("Scheduler.step + commit_batch, 256 running", partial(steps_with_sharing, 256))
