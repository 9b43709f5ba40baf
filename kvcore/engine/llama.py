"""A Llama forward pass in numpy, whose keys and values are in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.engine.cache import PagedCache

    Floats = NDArray[np.float32]

__all__ = ["Chunk", "Llama", "LlamaShape", "LlamaWeights"]


class LlamaShape(NamedTuple):
    """The sizes of a model."""

    layers: int
    dim: int
    """Numbers that stand for a token between the layers."""
    hidden: int
    """Numbers inside a feed-forward layer."""
    heads: int
    kv_heads: int
    """Heads that have keys and values of their own; ``heads`` is a multiple of it."""
    vocab: int
    context: int
    """Most tokens of a sequence."""
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        """Numbers in a head's query, key or value of one token."""
        return self.dim // self.heads


class LlamaWeights(NamedTuple):
    """The arrays of a model, all float32. Matrices are ``(..., outputs, inputs)``."""

    embedding: Floats
    """``(vocab, dim)``."""
    attention_norm: Floats
    """``(layers, dim)``."""
    query: Floats
    """``(layers, dim, dim)``."""
    key: Floats
    """``(layers, kv_heads * head_size, dim)``."""
    value: Floats
    """As ``key``."""
    attention_out: Floats
    """``(layers, dim, dim)``."""
    feed_forward_norm: Floats
    """``(layers, dim)``."""
    gate: Floats
    """``(layers, hidden, dim)``."""
    up: Floats
    """As ``gate``."""
    down: Floats
    """``(layers, dim, hidden)``."""
    final_norm: Floats
    """``(dim,)``."""
    output: Floats
    """``(vocab, dim)``; the embedding again in a tied model."""


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence: a part of its prompt, or what it decodes."""

    tokens: Sequence[int]
    start: int
    """Position of the first one. All before it are in the cache."""
    slots: NDArray[np.int64]
    """Where the cache keeps them, one slot a token."""
    table: NDArray[np.int32]
    """The sequence's block table, as long as these tokens need it or longer."""
    sampled: int
    """Of how many of them, counted from the last, the logits are wanted."""


class Llama:
    """Weights, and the forward pass of a batch of chunks over them.

    As in Touvron et al., "LLaMA" (2023) and "Llama 2" (2023): RMSNorm before each block,
    rotary positions on neighbouring pairs (2i, 2i + 1), grouped queries, SwiGLU.
    """

    def __init__(self, shape: LlamaShape, weights: LlamaWeights) -> None:
        self.shape = shape
        self.weights = weights
        pairs = np.arange(0, shape.head_size, 2, dtype=np.float32) / shape.head_size
        angles = np.outer(np.arange(shape.context), shape.rope_theta**-pairs)
        self._cosines = np.cos(angles).astype(np.float32)[:, None, :]
        self._sines = np.sin(angles).astype(np.float32)[:, None, :]

    def forward(
        self,
        chunks: Sequence[Chunk],
        cache: PagedCache,
        window: int | None = None,
        sink_tokens: int = 0,
    ) -> Floats:
        """Compute the chunks of a step as one batch, and write their keys and values.

        Parameters
        ----------
        chunks : sequence of Chunk
            A token that another chunk of the same batch attends to may be among them.
            At least one.
        cache : PagedCache
            Read through the chunks' tables, written at their slots.
        window : int, optional
            A token attends to itself and the ``window - 1`` before it; default all.
        sink_tokens : int
            And to so many at the beginning.

        Returns
        -------
        ndarray
            float32 ``(n, vocab)``: the logits asked for, chunk by chunk.
        """
        shape, weights = self.shape, self.weights
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        slots = np.concatenate([chunk.slots for chunk in chunks])
        stops = np.cumsum([len(chunk.tokens) for chunk in chunks])
        rows = [
            slice(stop - len(chunk.tokens), stop) for chunk, stop in zip(chunks, stops, strict=True)
        ]
        positions = np.concatenate(
            [np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks]
        )
        cosines, sines = self._cosines[positions], self._sines[positions]
        reads = [
            _seen_by(chunk.start, chunk.start + len(chunk.tokens), window, sink_tokens)
            for chunk in chunks
        ]
        read_slots = [
            cache.slots(chunk.table, seen) for chunk, (seen, _) in zip(chunks, reads, strict=True)
        ]
        attended = np.empty((len(tokens), shape.dim), np.float32)

        states = weights.embedding[tokens]
        for layer in range(shape.layers):
            normed = _rms_norm(states, weights.attention_norm[layer], shape.norm_epsilon)
            queries = _heads(normed @ weights.query[layer].T, shape.heads)
            keys = _heads(normed @ weights.key[layer].T, shape.kv_heads)
            values = _heads(normed @ weights.value[layer].T, shape.kv_heads)
            queries = _rotate(queries, cosines, sines)
            # All is written before any is read: chunks of a group may share blocks.
            cache.write(layer, slots, _rotate(keys, cosines, sines), values)
            for own, seen, (_, hidden) in zip(rows, read_slots, reads, strict=True):
                keys, values = cache.read(layer, seen)
                attended[own] = _attend(queries[own], keys, values, hidden)
            states = states + attended @ weights.attention_out[layer].T
            normed = _rms_norm(states, weights.feed_forward_norm[layer], shape.norm_epsilon)
            gate = normed @ weights.gate[layer].T
            gated = gate / (1 + np.exp(-gate)) * (normed @ weights.up[layer].T)
            states = states + gated @ weights.down[layer].T
        wanted = np.concatenate(
            [
                np.arange(stop - chunk.sampled, stop)
                for chunk, stop in zip(chunks, stops, strict=True)
            ]
        )
        states = _rms_norm(states[wanted], weights.final_norm, shape.norm_epsilon)
        logits: Floats = states @ weights.output.T
        return logits


def _heads(states: Floats, heads: int) -> Floats:
    return states.reshape(len(states), heads, -1)


def _rms_norm(states: Floats, scale: Floats, epsilon: float) -> Floats:
    mean = np.mean(states * states, axis=-1, keepdims=True)
    normed: Floats = states / np.sqrt(mean + np.float32(epsilon)) * scale
    return normed


def _rotate(heads: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Turn each pair of numbers by its angle at the token's position."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    rotated = np.empty_like(heads)
    rotated[..., 0::2] = even * cosines - odd * sines
    rotated[..., 1::2] = even * sines + odd * cosines
    return rotated


def _seen_by(
    start: int, stop: int, window: int | None, sink_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Find the positions that tokens from ``start`` to ``stop`` attend to, any of them.

    And which of these each must not see, ``(stop - start, positions)``; None if it is all
    one token, which sees all of them.
    """
    first = 0 if window is None else max(start - window + 1, 0)
    seen = np.concatenate([np.arange(min(sink_tokens, first)), np.arange(first, stop)])
    if stop - start == 1:
        return seen, None
    own = np.arange(start, stop)[:, None]
    hidden = seen > own
    if window is not None:
        hidden |= (seen <= own - window) & (seen >= sink_tokens)
    return seen, hidden


def _attend(
    queries: Floats, keys: Floats, values: Floats, hidden: NDArray[np.bool_] | None
) -> Floats:
    """Attention of ``(n, heads, size)`` queries over some keys, but for those hidden from each.

    Keys and values are ``(m, kv_heads, size)``. Returns ``(n, heads * size)``.
    """
    n, heads, size = queries.shape
    length, kv_heads, _ = keys.shape
    # Heads with the same keys become rows of one matrix: (kv_heads, group * n, size).
    grouped = queries.reshape(n, kv_heads, -1, size).transpose(1, 2, 0, 3)
    scores: Floats = grouped.reshape(kv_heads, -1, size) @ keys.transpose(1, 2, 0)
    scores *= np.float32(size**-0.5)
    if hidden is not None:
        scores.reshape(kv_heads, -1, n, length)[..., hidden] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = scores @ values.transpose(1, 0, 2)
    return mixed.reshape(kv_heads, -1, n, size).transpose(2, 0, 1, 3).reshape(n, heads * size)
