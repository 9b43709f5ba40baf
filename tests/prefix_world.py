"""Managers with prefix caching and their model, driven side by side by numbers.

The world knows what every sequence's tokens truly are, from the moment a slot is handed
out; the managers learn it later, from ``commit``, as they do in an engine. Every slot
holds a number that stands for the token and all before it, so that a block shared with
the wrong sequence is read back as something else.
"""

from __future__ import annotations

import array
import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from reference_model import HOLE, NO_ERA, ReferenceBlockManager, ReferencePool
from state import (
    IndexMirror,
    Mirror,
    PrefixMemory,
    Uids,
    check_rows,
    outcome,
    plain,
    plain_key,
    prefix_snapshot,
    snapshot,
)

from kvcore.block_manager import BlockManager
from kvcore.identity import Media, Namespace, namespace_key
from kvcore.pool import BlockPool
from kvcore.prefix_index import PrefixIndex
from kvcore.prefix_log import Cleared, Removed, Stored

NAMES = range(8)
NAMESPACES: list[Any] = [
    *[None] * 6,
    "a",
    b"a",
    Namespace(lora="a"),
    Namespace(model="m", lora="a", lora_version=1),
]
PLACEHOLDER = 7  # stands for a token of a picture, and now and then is one of text
LONG_ENOUGH = 10**6  # capacity of a change log that never overflows


@dataclass(frozen=True)
class Setting:
    """What a world is made of."""

    num_blocks: int = 8
    block_size: int = 2
    vocabulary: int = 2
    hash_bits: int = 63
    # One manager each; None is one without prefix caching, with blocks of another size.
    merge_duplicates: tuple[bool | None, ...] = (False,)
    fenced: bool = False
    media: bool = True
    pin_quota: int | None = None
    log_capacity: int | None = LONG_ENOUGH


@dataclass
class Text:
    """What a sequence or a prompt truly says."""

    tokens: list[int] = field(default_factory=list)
    namespace: Any = None
    media: tuple[Media, ...] = ()

    def first(self, n_tokens: int) -> Text:
        media = tuple(item for item in self.media if item.stop <= n_tokens)
        return Text(self.tokens[:n_tokens], self.namespace, media)

    @property
    def who(self) -> dict[str, Any]:
        """The arguments next to the tokens."""
        return {"namespace": self.namespace, "media": self.media}


def container(tokens: Sequence[int], kind: int) -> Any:
    """The tokens as one of the things that an engine may have them in."""
    makers: list[Callable[[Sequence[int]], Any]] = [
        list,
        tuple,
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.array(tokens, np.uint32),
        lambda tokens: array.array("i", tokens),
        lambda tokens: memoryview(array.array("q", tokens)),
    ]
    return makers[kind % len(makers)](tokens)


class PrefixWorld:
    """Up to two managers on one pool, and everything that can happen to them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        blocks, size = setting.num_blocks, setting.block_size
        pool, model_pool = BlockPool(blocks), ReferencePool(blocks)
        PrefixIndex(pool, size, hash_bits=setting.hash_bits)
        self.cores, self.models = [], []
        for merge in setting.merge_duplicates:
            shape, switches = (blocks, size + (merge is None)), {}
            if merge is not None:
                switches = {
                    "prefix_caching": True,
                    "merge_duplicates": merge,
                    "pin_quota": setting.pin_quota,
                }
            self.cores.append(BlockManager(*shape, pool=pool, rows=2, columns=2, **switches))
            self.models.append(ReferenceBlockManager(*shape, pool=model_pool, **switches))
        self.memory = PrefixMemory()
        self.mirrors = [Mirror() for _ in self.cores]
        self.uids = Uids()
        self.texts: dict[Hashable, Text] = {}
        self.past: deque[Text] = deque(maxlen=10)
        # The core's, the model's, what it says, and what computing it alone would give.
        self.prompts: deque[tuple[Any, Any, Text, list[int]]] = deque(maxlen=4)
        self.pins: list[tuple[Any, Any]] = []
        self.counts: dict[str, int] = {}
        self.log_capacity = setting.log_capacity
        if self.log_capacity is not None:
            self.begin_log(self.log_capacity)
        self.use(0)

    # ---------------------------------------------------------------- helpers

    def use(self, which: int) -> None:
        """The manager that the next operation is about."""
        self.which = which % len(self.cores)
        self.core, self.model = self.cores[self.which], self.models[self.which]
        self.size = self.model.block_size

    def happened(self, what: str, often: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + often

    def both(
        self, call: Callable[[Any], Any], core_call: Callable[[Any], Any] | None = None
    ) -> tuple[Any, ...]:
        expected = outcome(call, self.model)
        actual = outcome(core_call or call, self.core)
        assert actual == expected, f"{actual}, but the model says {expected}"
        return expected

    def pick(self, chance: random.Random, *, live: bool) -> Hashable:
        names = [name for name in NAMES if (name in self.model) == live]
        return chance.choice(names if names and chance.random() > 0.03 else NAMES)

    def name(self, seq: Hashable) -> Hashable:
        """Of a sequence, among all managers'."""
        return self.which, seq

    def random_tokens(self, chance: random.Random, count: int) -> list[int]:
        return [
            PLACEHOLDER if chance.random() < 0.08 else chance.randrange(self.setting.vocabulary)
            for _ in range(count)
        ]

    def new_text(self, chance: random.Random) -> Text:
        """Mostly the beginning of something said before, and a little more."""
        if self.past and chance.random() < 0.85:
            base = chance.choice(self.past)
            whole = len(base.tokens)
            text = base.first(chance.choice([whole, whole, chance.randint(0, whole)]))
        else:
            text = Text(namespace=chance.choice(NAMESPACES))
        longest = max(2, self.setting.num_blocks * self.size // 2)
        text.tokens += self.random_tokens(chance, chance.randint(0, self.size + 1))
        if self.setting.media and chance.random() < 0.2:
            start, length = len(text.tokens), chance.randint(1, 2 * self.size)
            item = Media(start, start + length, chance.choice([b"x", b"y"]))
            text.tokens += [PLACEHOLDER] * length
            text.media = (*text.media, item)
            text.tokens += self.random_tokens(chance, chance.randint(0, self.size))
        if chance.random() < 0.05:
            text.namespace = chance.choice(NAMESPACES)
        return text.first(longest)

    def old_text(self, chance: random.Random) -> Text:
        """Something said before or a part of it, or something new."""
        texts = [*self.past, *self.texts.values()]
        if not texts or chance.random() < 0.2:
            return self.new_text(chance)
        text = chance.choice(texts)
        return text.first(chance.choice([len(text.tokens), chance.randint(0, len(text.tokens))]))

    def alone(self, text: Text) -> list[int]:
        """What computing it without sharing anything would write."""
        return self.memory.contents_of(namespace_key(text.namespace), text.tokens, text.media)

    def grew(self, seq: Hashable, tokens: list[int], slots: list[int]) -> None:
        """The sequence was given slots for tokens of text."""
        contents = list(self.memory.tokens[self.name(seq)])
        text = self.texts[self.name(seq)]
        namespace = namespace_key(text.namespace)
        for token in tokens:
            contents.append(self.memory.after(contents, namespace, token))
        text.tokens += tokens
        self.memory.compute(self.name(seq), contents, slots, self.size)

    # -------------------------------------------------------------- sequences

    def allocate(self, chance: random.Random) -> None:
        seq, text = self.pick(chance, live=False), self.new_text(chance)
        kinds = ["tokens"] * 6 + ["count", "more", "prompt", "old prompt"]
        kind = chance.choice(kinds if self.model.prefix_caching else kinds[:8])
        switches: dict[str, Any] = {}
        if chance.random() < 0.2:
            switches["resumed"] = True
        if chance.random() < 0.3:
            switches["partial_hit"] = True
        n_tokens: int | None = None
        core_tokens: Any = container(text.tokens, chance.randrange(7))
        model_tokens: Any = text.tokens
        who = text.who
        if kind in ("count", "more"):
            unknown = self.random_tokens(chance, chance.randint(0, 2 * self.size))
            n_tokens = len(text.tokens) + len(unknown)
        if kind == "count":
            core_tokens = model_tokens = None
            text = Text(text.tokens, text.namespace)
            who = {"namespace": text.namespace}
        elif kind == "prompt":
            core_tokens, model_tokens = (
                self.core.prompt(core_tokens, **who),
                self.model.prompt(model_tokens, **who),
            )
            self.prompts.append((core_tokens, model_tokens, text, self.alone(text)))
            who = {}
        contents = self.alone(text)
        if kind == "old prompt" and self.prompts:
            core_tokens, model_tokens, text, contents = chance.choice(self.prompts)
            who = {}
        if n_tokens is not None:
            text = Text(text.tokens + unknown, text.namespace, text.media)
            contents = self.alone(text)
        result = self.both(
            lambda model: model.allocate(seq, n_tokens, tokens=model_tokens, **who, **switches),
            lambda core: core.allocate(seq, n_tokens, tokens=core_tokens, **who, **switches),
        )
        if result[0] != "returned":
            refused = len(result) > 2
            self.happened("refused" if refused else "misused")
            if refused and chance.random() < 0.7:
                self.free_seq(chance)
            return
        cached, pair = result[1] if "partial_hit" in switches else (result[1], None)
        self.happened("allocated")
        self.happened("blocks hit", cached // self.size)
        if pair is not None:
            self.happened("partial hits")
            self.memory.copy_head(*pair)
        self.texts[self.name(seq)] = Text(list(text.tokens), text.namespace, text.media)
        self.past.append(text)
        self.memory.compute(self.name(seq), contents, self.model.slots(seq)[cached:], self.size)

    def append_slots(self, chance: random.Random) -> None:
        seq, count = (
            self.pick(chance, live=True),
            chance.choice([1, 1, 1, 2, self.size, 3 * self.size]),
        )
        if chance.random() < 0.5:
            result = self.both(lambda manager: manager.append_slots(seq, count))
        else:
            count = 1
            result = self.both(lambda manager: manager.append_slot(seq))
            if result[0] == "returned":
                block, offset, source = result[1]
                pair = None if source is None else (source, block)
                result = "returned", ([block * self.size + offset], pair)
        if result[0] == "returned":
            slots, pair = result[1]
            self.memory.copy_all([pair] if pair else [], self.size)
            self.grew(seq, self.random_tokens(chance, count), slots)

    def append_batch(self, chance: random.Random) -> None:
        seqs = [seq for seq in self.model if chance.random() < 0.8]
        seqs += seqs[: chance.choice([0, 0, 0, 2])]
        out = np.full(len(seqs), -7, np.int64)
        expected_out = [-7] * len(seqs)
        expected = self.model.append_batch(self.model.rows(seqs), expected_out)
        served, copies = self.core.append_batch(self.core.rows(seqs), out)
        assert (served, plain(copies)) == expected
        assert out.tolist() == expected_out
        self.memory.copy_all([] if copies is None else copies.tolist(), self.size)
        for seq, slot in zip(seqs[:served], expected_out, strict=False):
            self.grew(seq, self.random_tokens(chance, 1), [slot])

    def truncate(self, chance: random.Random) -> None:
        seq = self.pick(chance, live=True)
        length = self.model.lens.get(seq, 3)
        n_tokens = length - chance.choice([0, 1, 1, 2, self.size, length])
        if self.both(lambda manager: manager.truncate(seq, n_tokens))[0] == "returned":
            # Somebody may ask for what it said before.
            self.past.append(self.texts[self.name(seq)])
            self.texts[self.name(seq)] = self.texts[self.name(seq)].first(n_tokens)
            del self.memory.tokens[self.name(seq)][n_tokens:]

    def has_holes(self, seq: Hashable) -> bool:
        return HOLE in self.model.block_ids[seq]

    def can_be_told(self, seq: Hashable) -> bool:
        """Whether there is a prompt of it."""
        return not self.has_holes(seq) and self.model.knowledge[seq].era != NO_ERA

    def slide(self, chance: random.Random) -> None:
        """A window gives back what is settled and out of its sight."""
        seqs = [seq for seq in self.model if chance.random() < 0.3]
        window, sinks = chance.randint(1, 2 * self.size), chance.choice([0, 0, 1, self.size])
        lengths = [max(0, self.model.lens[seq] - chance.randint(0, 2)) for seq in seqs]
        result = self.both(
            lambda model: model.release_outside_window(model.rows(seqs), lengths, window, sinks),
            lambda core: core.release_outside_window(
                core.rows(seqs), np.array(lengths, np.int32), window, sinks
            ),
        )
        self.happened("given back by a window", result[1])

    def swap(self, chance: random.Random) -> None:
        """Out, with a copy of what it has for itself, and in again, with what was known.

        In between the index may forget what the sequence has published or built on.
        """
        seq = self.pick(chance, live=True)
        moved = self.both(lambda manager: manager.exclusive_blocks(seq))
        if moved[0] != "returned":
            return
        table, length = list(self.model.block_ids[seq]), self.model.lens[seq]
        text, contents = self.texts[self.name(seq)], self.memory.tokens[self.name(seq)]
        kept = [column for column in range(len(table)) if column not in moved[1]]
        blocks = [table[column] for column in kept]
        pinned = [block for block in blocks if block != HOLE]
        prompt = model_prompt = None
        if self.model.prefix_caching and self.can_be_told(seq) and chance.random() < 0.9:
            prompt, model_prompt = self.core.prompt_of(seq), self.model.prompt_of(seq)
        data = [
            [self.memory.contents.get((table[column], offset)) for offset in range(self.size)]
            for column in moved[1]
        ]
        for block in pinned:
            self.both(lambda manager, block=block: manager.pin(block))
        self.both(lambda manager: manager.free_seq(seq))
        del self.texts[self.name(seq)], self.memory.tokens[self.name(seq)]
        self.past.append(text)
        if self.model.prefix_caching:
            for verb in ("reset", "forget", "evict"):
                if chance.random() < 0.15:
                    getattr(self, verb)(chance)
        self.equal()
        result = self.both(
            lambda model: model.restore(seq, length, kept, blocks, tokens=model_prompt),
            lambda core: core.restore(seq, length, np.array(kept, np.int64), blocks, tokens=prompt),
        )
        for block in pinned:
            self.both(lambda manager, block=block: manager.unpin(block))
        if result[0] != "returned":
            return
        self.texts[self.name(seq)] = text
        self.memory.begin(self.name(seq), contents)
        for block, numbers in zip(result[1], data, strict=True):
            for offset, number in enumerate(numbers):
                if number is not None:
                    self.memory.contents[block, offset] = number
        self.happened("restored")
        self.happened("restored around blocks that stayed", len(pinned) > 0)
        if self.model.prefix_caching and chance.random() < 0.7:
            # It says again what is settled: all that was.
            published = self.both(lambda manager: manager.commit(seq))
            self.happened("published that were restored", published[1])

    def preempt_one(self, chance: random.Random) -> None:
        seq = self.pick(chance, live=True)
        if seq in self.model and self.can_be_told(seq):
            self.preempt(seq)

    def preempt(self, seq: Hashable) -> None:
        """Out and in again, with what was known of it."""
        text, contents = self.texts[self.name(seq)], self.memory.tokens[self.name(seq)]
        prompt, model_prompt = self.core.prompt_of(seq), self.model.prompt_of(seq)
        known = len(model_prompt)
        assert prompt.tokens.tolist() == model_prompt.tokens
        self.both(lambda manager: manager.free_seq(seq))
        self.past.append(self.texts.pop(self.name(seq)))
        del self.memory.tokens[self.name(seq)]
        result = self.both(
            lambda model: model.allocate(seq, len(text.tokens), tokens=model_prompt, resumed=True),
            lambda core: core.allocate(seq, len(text.tokens), tokens=prompt, resumed=True),
        )
        if result[0] == "returned":
            self.happened("resumed")
            self.texts[self.name(seq)] = text
            self.memory.compute(
                self.name(seq), contents, self.model.slots(seq)[result[1] :], self.size
            )
            n_settled = known - known % 2
            self.both(lambda manager: manager.commit(seq, n_settled=n_settled))

    def cut_media(self, chance: random.Random) -> None:
        """Text in the place of the end of a picture, with the same ids as that had."""
        live = {seq: self.texts[self.name(seq)] for seq in self.model}
        seqs = [
            seq
            for seq, text in live.items()
            if any(i.stop - i.start > 1 for i in text.media) and self.can_be_told(seq)
        ]
        if not seqs:
            return
        seq = chance.choice(seqs)
        item = chance.choice([item for item in live[seq].media if item.stop - item.start > 1])
        n_tokens = chance.randint(item.start + 1, item.stop - 1)
        self.both(lambda manager: manager.truncate(seq, n_tokens))
        self.past.append(live[seq])
        self.texts[self.name(seq)] = live[seq].first(n_tokens)
        del self.memory.tokens[self.name(seq)][n_tokens:]
        count = item.stop - n_tokens
        result = self.both(lambda manager: manager.append_slots(seq, count))
        if result[0] == "returned":
            slots, pair = result[1]
            self.memory.copy_all([pair] if pair else [], self.size)
            self.grew(seq, [PLACEHOLDER] * count, slots)
            new = self.texts[self.name(seq)].tokens[self.model.known(seq) :]
            self.both(lambda manager: manager.commit(seq, new))
            self.happened("pictures cut")
            self.equal()  # also learns the numbers of what was published
            if chance.random() < 0.5:
                self.preempt(seq)

    def fork(self, chance: random.Random) -> None:
        parent, child = self.pick(chance, live=True), self.pick(chance, live=False)
        if parent not in self.model and child in self.model:
            return
        length = self.model.lens.get(parent, 3)
        n_tokens = chance.choice([None, length, length - 1, chance.randint(0, length)])
        result = self.both(lambda manager: manager.fork(parent, child, n_tokens))
        if result[0] == "returned":
            self.forked(parent, child, length if n_tokens is None else n_tokens)

    def forked(self, parent: Hashable, child: Hashable, n_tokens: int) -> None:
        self.texts[self.name(child)] = self.texts[self.name(parent)].first(n_tokens)
        contents = self.memory.tokens[self.name(parent)][:n_tokens]
        self.memory.begin(self.name(child), contents)

    def reorder(self, chance: random.Random) -> None:
        seqs = [seq for seq in self.model if chance.random() < 0.6]
        parents = [chance.choice(list(self.model)) for _ in seqs]
        result = self.both(lambda manager: manager.reorder(seqs, parents))
        assert result[0] == "returned"
        texts = [self.texts[self.name(parent)] for parent in parents]
        contents = [self.memory.tokens[self.name(parent)] for parent in parents]
        for seq, text, content in zip(seqs, texts, contents, strict=True):
            self.texts[self.name(seq)] = Text(list(text.tokens), text.namespace, text.media)
            self.memory.begin(self.name(seq), content)

    def free_seq(self, chance: random.Random) -> None:
        seq = self.pick(chance, live=True)
        if self.both(lambda manager: manager.free_seq(seq))[0] == "returned":
            self.past.append(self.texts.pop(self.name(seq)))
            del self.memory.tokens[self.name(seq)]

    # ----------------------------------------------------------------- commit

    def commit(self, chance: random.Random) -> None:
        seq = self.pick(chance, live=True)
        if seq not in self.model:
            self.both(lambda manager: manager.commit(seq))
            return
        known, text = self.model.known(seq), self.texts[self.name(seq)]
        new = text.tokens[known:]
        if chance.random() < 0.3:
            new = new[: chance.randint(0, len(new))]
        n_settled = None
        if chance.random() < 0.3:
            n_settled = chance.randint(0, known + len(new))
        kind = chance.randrange(7)
        tokens = None if not new and kind % 2 else new
        if chance.random() < 0.05:
            # One token or settled token too many.
            if chance.random() < 0.5:
                tokens = [*text.tokens[known:], 0]
            else:
                n_settled = known + len(new) + 1
        result = self.both(
            lambda model: model.commit(seq, tokens, n_settled=n_settled),
            lambda core: core.commit(
                seq, None if tokens is None else container(tokens, kind), n_settled=n_settled
            ),
        )
        if result[0] == "returned":
            self.happened("published", result[1])

    def commit_what_others_know_otherwise(self, chance: random.Random) -> None:
        """Refused where somebody else shares the block and knows the token."""
        model = self.model
        ignorant = [seq for seq in model if model.known(seq) < model.lens[seq]]
        unused = [seq for seq in NAMES if seq not in model]
        if ignorant and unused:
            seq, child = chance.choice(ignorant), unused[0]
            self.both(lambda manager: manager.fork(seq, child))
            self.forked(seq, child, model.lens[seq])
            self.contradict_in_one_batch(seq, child)
            tokens = self.texts[self.name(seq)].tokens[model.known(seq) :]
            self.both(lambda manager: manager.commit(seq, tokens))
        contradictions = []
        for seq, other in itertools.permutations(model, 2):
            for position in range(model.known(seq), min(model.lens[seq], model.known(other))):
                column = position // self.size
                if model.tables[seq][column] == model.tables[other][column] != HOLE:
                    contradictions.append((seq, position))
        if contradictions:
            seq, position = chance.choice(contradictions)
            new = self.texts[self.name(seq)].tokens[model.known(seq) :]
            new[position - model.known(seq)] += 1
            result = self.both(
                lambda model: model.commit(seq, new),
                lambda core: core.commit(seq, container(new, chance.randrange(7))),
            )
            assert result[0] == "raised"
            self.happened("contradicted")

    def contradict_in_one_batch(self, seq: Hashable, other: Hashable) -> None:
        """Two that share a block of which neither knows the next token."""
        token = self.texts[self.name(seq)].tokens[self.model.known(seq)]
        result = self.both(
            lambda model: model.commit_batch(model.rows([seq, other]), [token, token + 1]),
            lambda core: core.commit_batch(core.rows([seq, other]), [token, token + 1]),
        )
        assert result[0] == "raised"

    def commit_batch(self, chance: random.Random) -> None:
        """The next unknown token of each; now and then two, or of one that has none."""
        seqs = [
            seq
            for seq in self.model
            if self.model.known(seq) < self.model.lens[seq] and chance.random() < 0.9
        ]
        if chance.random() < 0.2:
            seqs += seqs[:2]
        tokens = []
        told = {seq: self.model.known(seq) for seq in seqs}
        for seq in seqs:
            text = self.texts[self.name(seq)]
            tokens.append(text.tokens[told[seq]] if told[seq] < len(text.tokens) else 0)
            told[seq] += 1
        kind = chance.choice([np.int32, np.int64, np.uint32])
        result = self.both(
            lambda model: model.commit_batch(model.rows(seqs), tokens),
            lambda core: core.commit_batch(core.rows(seqs), np.array(tokens, kind)),
        )
        if result[0] == "returned":
            self.happened("published", result[1])
            self.happened("published by a batch", result[1])

    def commit_pending(self, chance: random.Random) -> None:
        """As commit_batch, from an array by row; of some the token is not known."""
        seqs = [seq for seq in self.model if chance.random() < 0.7]
        if chance.random() < 0.05:
            seqs += seqs[:1]
        pending = np.full(self.core.block_tables.shape[0], -1, np.int32)
        model_pending = {}
        for seq in seqs:
            told = self.texts[self.name(seq)].tokens[self.model.known(seq) :]
            model_pending[self.model.row(seq)] = told[0] if told and chance.random() < 0.9 else -1
            pending[self.core.row(seq)] = model_pending[self.model.row(seq)]
        sampled = None
        if chance.random() < 0.7:
            sampled = [chance.randrange(self.setting.vocabulary) for _ in seqs]
        result = self.both(
            lambda model: model.commit_pending(model.rows(seqs), model_pending, sampled),
            lambda core: core.commit_pending(
                core.rows(seqs), pending, None if sampled is None else np.array(sampled, np.int32)
            ),
        )
        for seq in seqs:
            assert pending[self.core.row(seq)] == model_pending[self.model.row(seq)]
        if result[0] == "returned":
            self.happened("published that were pending", result[1])

    def decode(self, chance: random.Random) -> None:
        """A few steps of an engine: a token each, and what is written is published."""
        for _ in range(chance.randint(1, self.size + 1)):
            self.append_batch(chance)
            self.equal()
            self.commit_batch(chance)
            self.equal()

    # ---------------------------------------------------------------- reading

    def ask(self, chance: random.Random) -> None:
        """Questions, which change nothing; and that ``can`` is ``do``."""
        text = self.old_text(chance)
        extra, watermark = chance.choice([0, 0, 1, self.size]), chance.choice([0, 0, 1, 2])
        n_tokens = chance.choice([None, len(text.tokens) + extra])
        tokens = container(text.tokens, chance.randrange(7))
        self.both(
            lambda model: model.match(text.tokens, **text.who),
            lambda core: core.match(tokens, **text.who),
        )
        plan = self.both(
            lambda model: model.plan_allocate(n_tokens, tokens=text.tokens, **text.who),
            lambda core: core.plan_allocate(n_tokens, tokens=tokens, **text.who),
        )[1]
        self.both(
            lambda model: model.can_allocate(n_tokens, watermark, tokens=text.tokens, **text.who),
            lambda core: core.can_allocate(n_tokens, watermark, tokens=tokens, **text.who),
        )
        do = outcome(
            lambda: copy.deepcopy(self.model).allocate(
                "new", n_tokens, tokens=text.tokens, **text.who
            )
        )
        assert (do[0] == "returned") == (plan[1] <= plan[2])
        assert do == ("returned", plan[0]) or do[2:] == tuple(plan[1:])

    def ask_prompts(self, chance: random.Random) -> None:
        text, other = self.old_text(chance), self.old_text(chance)
        prompt = self.core.prompt(container(text.tokens, chance.randrange(7)), **text.who)
        model_prompt = self.model.prompt(text.tokens, **text.who)
        assert len(prompt) == len(model_prompt)
        assert prompt.tokens.tolist() == text.tokens
        assert prompt.num_full_blocks == model_prompt.num_full_blocks
        common = self.core.prompt(other.tokens, **other.who)
        model_common = self.model.prompt(other.tokens, **other.who)
        assert prompt.common_blocks(common) == model_prompt.common_blocks(model_common)
        self.both(
            lambda model: model.match(model_prompt),
            lambda core: core.match(prompt),
        )
        seq = self.pick(chance, live=True)
        if seq in self.model and self.can_be_told(seq):
            prompt, model_prompt = self.core.prompt_of(seq), self.model.prompt_of(seq)
            assert prompt.tokens.tolist() == model_prompt.tokens
            self.both(lambda model: model.match(model_prompt), lambda core: core.match(prompt))
            told = self.texts[self.name(seq)].first(len(model_prompt))
            contents = self.memory.tokens[self.name(seq)][: len(model_prompt)]
            self.prompts.append((prompt, model_prompt, told, contents))
        else:
            self.both(lambda manager: len(manager.prompt_of(seq)))

    # ---------------------------------------------------------------- holders

    def pin_or_unpin_prefix(self, chance: random.Random) -> None:
        if self.pins and chance.random() < 0.7:
            core_pin, model_pin = self.pins.pop(chance.randrange(len(self.pins)))
            model_pin.release()
            if chance.random() < 0.5:
                core_pin.release()
                core_pin.release()
            del core_pin
            return
        text = self.old_text(chance)
        pins = []
        for manager in (self.model, self.core):
            try:
                pins.append(manager.pin_prefix(text.tokens, **text.who))
            except ValueError:
                pins.append(None)
        model_pin, core_pin = pins
        assert (model_pin is None) == (core_pin is None)
        if model_pin is None:
            self.happened("over the quota")
            return
        assert tuple(core_pin.blocks) == model_pin.blocks
        assert core_pin.n_tokens == model_pin.n_tokens
        self.happened("prefixes pinned")
        self.pins.append((core_pin, model_pin))

    def pin(self, chance: random.Random) -> None:
        block = chance.randrange(self.model.num_blocks)
        self.both(lambda manager: manager.pin(block))

    def unpin(self, chance: random.Random) -> None:
        """Only what no prefix pin holds: those give back their own."""
        pool = self.model.pool
        own = [block for _, pin in self.pins for block in pin.blocks]
        pinned = [block for block in range(pool.num_blocks) if pool.pins(block) > own.count(block)]
        for block in pinned if chance.random() < 0.5 else pinned[:1]:
            self.both(lambda manager, block=block: manager.unpin(block))

    def keep(self, chance: random.Random) -> None:
        block = chance.randrange(self.model.num_blocks)
        self.both(lambda manager: manager.pool.keep(block))

    def forget_block(self, chance: random.Random) -> None:
        block = chance.randrange(self.model.num_blocks)
        self.both(lambda manager: manager.pool.forget(block))

    def take(self, chance: random.Random) -> None:
        count = chance.randint(0, 2)
        self.both(lambda manager: manager.pool.take_many(count))

    def fence(self, chance: random.Random) -> None:
        self.both(lambda manager: manager.fence())

    def settle(self, chance: random.Random) -> None:
        step = self.model.newest_step - chance.choice([0, 0, 1, 2, -1])
        self.both(lambda manager: manager.settle(step))

    # ------------------------------------------------------------ forgetting

    def evict(self, chance: random.Random) -> None:
        count = chance.randint(0, 3)
        self.both(lambda manager: manager.evict(count))

    def forget(self, chance: random.Random) -> None:
        text = self.old_text(chance)
        tokens = container(text.tokens, chance.randrange(7))
        result = self.both(
            lambda model: model.forget(text.tokens, **text.who),
            lambda core: core.forget(tokens, **text.who),
        )
        self.happened("forgotten", result[1])

    def reset(self, chance: random.Random) -> None:
        what = chance.random()
        if what < 0.3:
            self.both(lambda manager: manager.reset())
            self.happened("resets")
        elif what < 0.5:
            epoch = self.model.epoch + chance.choice([0, 1])
            self.both(lambda manager: manager.set_epoch(epoch))

    # ------------------------------------------------------------ change logs

    def begin_log(self, capacity: int) -> None:
        self.log_capacity = capacity
        self.index_mirror = IndexMirror()
        self.complete = False  # the first drain tells what was there
        self.cores[0].pool.index.start_log(capacity)
        self.models[0].index.start_log()

    def drain_log(self, _: random.Random) -> None:
        index, expected = self.cores[0].pool.index, self.models[0].index
        if self.log_capacity is None:
            return
        changes = index.drain()
        self.index_mirror.apply(changes)
        self.index_mirror.compare(index, self.core.num_blocks)
        wanted = expected.drain()
        capacity = self.log_capacity or self.core.num_blocks
        overflowed = len(wanted) > capacity
        if self.complete and not overflowed:
            assert self.after_clearing(map(self.plain_change, changes)) == (
                self.after_clearing(wanted)
            )
            self.happened("changes told one by one", len(wanted))
        self.happened("times the log overflowed", overflowed)
        self.complete = True
        assert index.drain() == []

    @staticmethod
    def after_clearing(changes: Any) -> list[Any]:
        """What was told before a clearing was in vain, and need not be told."""
        changes = list(changes)
        cleared = [place for place, change in enumerate(changes) if change == ("cleared",)]
        return changes[cleared[-1] :] if cleared else changes

    def plain_change(self, change: Any) -> tuple[Any, ...]:
        """With the model's numbers, which it has told already or tells now."""
        if isinstance(change, Cleared):
            return ("cleared",)
        if isinstance(change, Removed):
            return "removed", self.uids.to_model[change.uid]
        assert isinstance(change, Stored)
        to_model = self.uids.to_model
        return (
            "stored",
            to_model[change.uid],
            to_model[change.parent],
            tuple(change.tokens),
            plain_key(change.key),
        )

    def restart_log(self, chance: random.Random) -> None:
        index = self.cores[0].pool.index
        if self.log_capacity is not None:
            self.drain_log(chance)
            index.stop_log()
            self.models[0].index.stop_log()
            self.log_capacity = None
        if chance.random() < 0.8:
            self.begin_log(chance.choice([0, 1, 2, 3, 5, LONG_ENOUGH]))

    def drain_tables(self, _: random.Random) -> None:
        self.mirrors[self.which].drain(self.core, self.model.touched_cells())

    # -------------------------------------------------------------- and all

    verbs = (
        *["allocate"] * 9,
        *["append_slots"] * 4,
        *["append_batch"] * 2,
        "decode",
        *["truncate"] * 2,
        *["cut_media"] * 2,
        *["preempt_one"] * 2,
        *["swap"] * 2,
        "slide",
        *["fork"] * 3,
        "reorder",
        *["free_seq"] * 13,
        *["commit"] * 9,
        *["commit_batch"] * 2,
        *["commit_pending"] * 2,
        *["commit_what_others_know_otherwise"] * 2,
        *["ask"] * 2,
        "ask_prompts",
        *["pin_or_unpin_prefix"] * 2,
        "pin",
        *["unpin"] * 3,
        "keep",
        "forget_block",
        "take",
        "evict",
        "forget",
        "reset",
        *["drain_log"] * 3,
        "restart_log",
        "drain_tables",
    )
    fence_verbs = (*["fence"] * 3, *["settle"] * 3)
    # Of a manager that knows no prefixes.
    plain_verbs = frozenset(
        ["allocate", "append_slots", "append_batch", "truncate", "fork", "reorder", "free_seq"]
    ).union(["slide", "swap"], fence_verbs)

    def do(self, verb: str, number: int, which: int = 0) -> None:
        self.use(which)
        if not self.model.prefix_caching and verb not in self.plain_verbs:
            verb = "free_seq"
        getattr(self, verb)(random.Random(number))
        self.equal()

    def equal(self) -> None:
        for core, model in zip(self.cores, self.models, strict=True):
            expected = snapshot(model)
            for part, actual in snapshot(core).items():
                assert actual == expected[part], f"{part}: {actual}, not {expected[part]}"
            if model.prefix_caching:
                prefix_snapshot(core, model, self.uids)
            check_rows(core)
        self.models[0].check()
        self.cores[0].check()
        for which, core in enumerate(self.cores):
            self.memory.compare(core, [((which, seq), seq) for seq in core])

    def end(self) -> None:
        """Everything is let go: nothing is lost, and nothing stays that is not cached."""
        self.drain_log(random.Random(0))
        for core_pin, _ in self.pins:
            core_pin.release()
        for core in self.cores:
            for seq in list(core):
                core.free_seq(seq)
            core.settle(core.fence())
        core = self.cores[0]
        pool = core.pool
        for block in range(pool.num_blocks):
            pool.release_many([block] * pool.pins(block))
        core.check()
        assert core.reset() == []
        for block in range(pool.num_blocks):
            pool.forget(block)
        assert sorted(pool.free_blocks().tolist()) == list(range(pool.num_blocks))
        assert len(pool.index) == 0
        core.check()
