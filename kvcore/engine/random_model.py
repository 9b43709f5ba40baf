"""A model of random weights: no download, no sense, but every path of a real one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcore.engine.llama import Llama, LlamaShape, LlamaWeights
from kvcore.engine.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SMALL", "random_llama"]

SMALL = LlamaShape(
    layers=2, dim=32, hidden=64, heads=4, kv_heads=2, vocab=ByteTokenizer.vocab, context=512
)
"""A shape for tests: it computes a token in a tenth of a millisecond."""


def random_llama(shape: LlamaShape = SMALL, seed: int = 0) -> Llama:
    """Draw weights of any shape. The same seed gives the same model.

    Matrices are scaled so that what they return is about as large as what they get, and
    queries and keys three times as large, so that attention is not nearly uniform and a
    single wrong key shows.
    """
    random = np.random.default_rng(seed)
    layers, dim, hidden = shape.layers, shape.dim, shape.hidden
    kv_dim = shape.kv_heads * shape.head_size

    def matrix(*size: int, gain: float = 1.0) -> NDArray[np.float32]:
        return random.normal(0.0, gain * size[-1] ** -0.5, size).astype(np.float32)

    embedding = random.normal(0.0, 1.0, (shape.vocab, dim)).astype(np.float32)
    weights = LlamaWeights(
        embedding=embedding,
        attention_norm=np.ones((layers, dim), np.float32),
        query=matrix(layers, dim, dim, gain=3.0**0.5),
        key=matrix(layers, kv_dim, dim, gain=3.0**0.5),
        value=matrix(layers, kv_dim, dim),
        attention_out=matrix(layers, dim, dim),
        feed_forward_norm=np.ones((layers, dim), np.float32),
        gate=matrix(layers, hidden, dim),
        up=matrix(layers, hidden, dim),
        down=matrix(layers, dim, hidden),
        final_norm=np.ones(dim, np.float32),
        output=matrix(shape.vocab, dim, gain=3.0),
    )
    return Llama(shape, weights)
