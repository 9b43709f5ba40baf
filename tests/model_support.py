"""A plain forward pass with contiguous keys and values, and an engine that is watched."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcore import BlockManager, Step
from kvcore.engine import (
    ByteTokenizer,
    Chunk,
    Engine,
    Llama,
    Tokenizer,
    load_model,
    random_llama,
)

Floats = NDArray[np.float32]

TOLERANCE = 1e-3
"""Of logits. Other chunks of the same tokens make 2e-5; a wrong key makes more than this."""


class Contiguous:
    """The textbook's forward pass: one sequence, its keys and values one after the other."""

    def __init__(self, model: Llama, window: int = 10_000, sink_tokens: int = 0) -> None:
        shape = model.shape
        self.shape, self.weights = shape, model.weights
        self.window, self.sink_tokens = window, sink_tokens
        size = (shape.layers, shape.context, shape.kv_heads, shape.head_size)
        self.keys, self.values = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self.length = 0
        frequencies = shape.rope_theta ** -(np.arange(0, shape.head_size, 2) / shape.head_size)
        self.turns = np.exp(1j * np.arange(shape.context)[:, None] * frequencies)

    def extend(self, tokens: Sequence[int], wanted: int | None = None) -> Floats:
        """Logits after each of the last ``wanted`` of these further tokens, default all."""
        shape, weights = self.shape, self.weights
        start, stop = self.length, self.length + len(tokens)
        self.length = stop
        x = weights.embedding[np.array(tokens)]
        for layer in range(shape.layers):
            h = self.normed(x, weights.attention_norm[layer])
            q = self.turned(h @ weights.query[layer].T, start)
            self.keys[layer, start:stop] = self.turned(h @ weights.key[layer].T, start)
            self.values[layer, start:stop] = (h @ weights.value[layer].T).reshape(
                len(tokens), shape.kv_heads, shape.head_size
            )
            mixed = self.attention(q, self.keys[layer, :stop], self.values[layer, :stop])
            x = x + mixed @ weights.attention_out[layer].T
            h = self.normed(x, weights.feed_forward_norm[layer])
            gate = h @ weights.gate[layer].T
            h = gate / (1 + np.exp(-gate)) * (h @ weights.up[layer].T)
            x = x + h @ weights.down[layer].T
        x = x[len(tokens) - (len(tokens) if wanted is None else wanted) :]
        logits: Floats = self.normed(x, weights.final_norm) @ weights.output.T
        return logits

    def normed(self, x: Floats, scale: Floats) -> Floats:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean + np.float32(self.shape.norm_epsilon)) * scale
        return normed

    def turned(self, x: Floats, start: int) -> Floats:
        turns = self.turns[start : start + len(x), None]
        cosines, sines = turns.real.astype(np.float32), turns.imag.astype(np.float32)
        heads = x.reshape(len(x), -1, self.shape.head_size // 2, 2)
        first, second = heads[..., 0], heads[..., 1]
        both = [first * cosines - second * sines, first * sines + second * cosines]
        return np.stack(both, axis=-1).reshape(len(x), -1, self.shape.head_size)

    def attention(self, q: Floats, keys: Floats, values: Floats) -> Floats:
        n, stop = len(q), len(keys)
        group = self.shape.heads // self.shape.kv_heads
        there, here = np.arange(stop), np.arange(stop - n, stop)[:, None]
        sees = (there <= here) & ((here - there < self.window) | (there < self.sink_tokens))
        mask = np.where(sees, 0, -np.inf)
        mixed = np.empty((n, self.shape.kv_heads, group, self.shape.head_size), np.float32)
        for head in range(self.shape.kv_heads):
            own = q[:, head * group : (head + 1) * group].transpose(1, 0, 2)
            scores = own.reshape(group * n, -1) @ keys[:, head].T
            scores *= np.float32(self.shape.head_size**-0.5)
            scores += np.tile(mask, (group, 1)).astype(np.float32)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed[:, head] = (scores @ values[:, head]).reshape(group, n, -1).transpose(1, 0, 2)
        return mixed.reshape(n, -1)


class Subject:
    """A model with prompts, and what the plain forward pass makes of them."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        window: int = 10_000,
        sink_tokens: int = 0,
    ) -> None:
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self.window, self.sink_tokens = window, sink_tokens
        self._after: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The prompt and the ``count`` most likely tokens after it."""
        text = self._after.setdefault(tuple(prompt), list(prompt))
        if len(text) < len(prompt) + count:
            plain = Contiguous(self.model, self.window, self.sink_tokens)
            if len(text) > 1:
                plain.extend(text[:-1])
            while len(text) < len(prompt) + count:
                text.append(int(plain.extend(text[-1:])[-1].argmax()))
        return text[: len(prompt) + count]

    def seeing(self, window: int, sink_tokens: int) -> Subject:
        """The same model when its tokens attend to a window and to the first ones."""
        return Subject(self.model, self.tokenizer, self.prompts, window, sink_tokens)


PROMPTS = (
    "",
    "Once upon a time",
    "Lily and Ben were playing in the park",
    "One day, a big dog",
    "Tom had a red car",
)


@cache
def subject(name: str) -> Subject:
    """The real model, which ``KVCORE_MODEL`` must name, or the random one."""
    if name == "random":
        model, tokenizer = random_llama(seed=3), ByteTokenizer()
        return Subject(model, tokenizer, [tokenizer.encode(text) for text in PROMPTS])
    folder = os.environ.get("KVCORE_MODEL")
    if not folder:
        pytest.skip("KVCORE_MODEL does not name the folder of the real model")
    if not Path(folder).exists():
        pytest.skip(f"{folder} is not there")
    real, pieces = load_model(folder)
    return Subject(real, pieces, [pieces.encode(text) for text in PROMPTS])


class WatchedEngine(Engine):
    """An engine that remembers which token of which text was written into each slot.

    Every slot that a chunk is going to read is compared with that: attention adds up what
    it reads in any order, so two full blocks that change places do not show in logits.
    """

    def __init__(self, model: Llama, bm: BlockManager, **options: Any) -> None:
        super().__init__(model, bm, **options)
        size = bm.block_size
        self.marks = np.full((bm.num_blocks, size), -1, np.int64)
        host_blocks = 0 if self.host is None else self.host.num_blocks
        self.host_marks = np.full((host_blocks, size), -1, np.int64)
        self.namespaces: dict[Hashable, Any] = {}
        self.seen: list[tuple[tuple[int, ...], Floats]] = []
        self.steps: list[Step] = []
        self.moved = 0
        self._computed: list[Hashable] = []

    def add(self, seq: Hashable, tokens: Sequence[int], **request: Any) -> None:
        super().add(seq, tokens, **request)
        for one in [seq, *request.get("siblings", ())]:
            self.namespaces[one] = request.get("namespace")

    def step(self) -> Step:
        step = super().step()
        self.steps.append(step)
        self.bm.check()
        assert np.isnan(self.cache.blocks[:, :, self.bm.pool.free_blocks()]).all()
        if self.host is not None:
            self.host.check()
        return step

    def _advance_beams(self, beams: Any, results: Any) -> None:
        super()._advance_beams(beams, results)
        self.moved += len(results.parents)

    def copy_blocks(self, step: Step) -> None:
        super().copy_blocks(step)
        for pairs, source, target in (
            (step.swap_out, self.marks, self.host_marks),
            (step.swap_in, self.host_marks, self.marks),
            (step.copies, self.marks, self.marks),
        ):
            target[pairs[:, 1]] = source[pairs[:, 0]]

    def chunks(self, step: Step) -> list[Chunk]:
        self._computed = [*step, *(seq for seq, _, _ in step.prefills)]
        return super().chunks(step)

    def forward(self, chunks: Sequence[Chunk]) -> Floats:
        histories = [
            self.texts[seq][: chunk.start] + list(chunk.tokens)
            for seq, chunk in zip(self._computed, chunks, strict=True)
        ]
        expected = [
            self.marks_of(seq, history)
            for seq, history in zip(self._computed, histories, strict=True)
        ]
        size = self.bm.block_size
        for chunk, marks in zip(chunks, expected, strict=True):
            blocks, offsets = np.divmod(chunk.slots, size)
            going_on = ~np.isin(blocks, blocks[offsets == 0])
            before = self.cache.blocks[:, :, blocks[going_on], offsets[going_on]]
            assert np.isnan(before).all(), "a slot is written that still holds a token"
            self.marks.ravel()[chunk.slots] = marks[chunk.start :]
        for seq, chunk, marks in zip(self._computed, chunks, expected, strict=True):
            self.assert_slots(seq, chunk, marks)
        logits = super().forward(chunks)
        at = 0
        for chunk, history in zip(chunks, histories, strict=True):
            for back in range(chunk.sampled - 1, -1, -1):
                self.seen.append((tuple(history[: len(history) - back]), logits[at]))
                at += 1
        return logits

    def assert_slots(self, seq: Hashable, chunk: Chunk, marks: NDArray[np.int64]) -> None:
        """What the table leads to are the tokens of the text, one after the other."""
        positions = np.arange(len(marks))
        first = chunk.start - (self._window or 10_000) + 1
        positions = positions[(positions >= first) | (positions < self._sink_tokens)]
        size = self.bm.block_size
        found = self.marks[np.asarray(chunk.table)[positions // size], positions % size]
        wrong = positions[found != marks[positions]]
        assert len(wrong) == 0, f"{seq!r} reads other tokens at positions {wrong}"

    def marks_of(self, seq: Hashable, text: Sequence[int]) -> NDArray[np.int64]:
        """A number for each token that stands for it, all before it, and the namespace."""
        mark, marks = hash(self.namespaces[seq]), []
        for token in text:
            mark = hash((mark, token)) & 0x7FFF_FFFF_FFFF_FFFF
            marks.append(mark)
        return np.array(marks, np.int64)

    def cached_tokens(self) -> dict[Hashable, int]:
        """Of each sequence, how many tokens were found cached when it first began."""
        cached: dict[Hashable, int] = {}
        for step in self.steps:
            for seq, start, _ in step.prefills:
                cached.setdefault(seq, start)
        return cached


def largest_difference(engine: WatchedEngine, of: Sequence[int] | None = None) -> float:
    """Between the logits that an engine has seen and the plain forward pass's.

    By default of all texts, else of one.
    """
    worst = 0.0
    plain = Contiguous(engine.model, engine._window or 10_000, engine._sink_tokens)
    text: tuple[int, ...] = ()
    rows: list[Floats] = []
    # A text comes before those that it begins with, and what two share is computed once.
    for history, logits in sorted(engine.seen, key=lambda one: one[0], reverse=True):
        if of is not None and history != tuple(of[: len(history)]):
            continue
        shared = next(
            (
                place
                for place, pair in enumerate(zip(text, history, strict=False))
                if len({*pair}) > 1
            ),
            min(len(text), len(history)),
        )
        if shared < len(history):
            plain.length = shared
            rows[shared:] = plain.extend(history[shared:])
            text = history
        difference = float(np.abs(logits - rows[len(history) - 1]).max())
        worst = max(worst, np.inf if np.isnan(difference) else difference)
    return worst
