"""Models in the format of llama2.c, such as stories260K: a weight file and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

from kvcore.engine.llama import Llama, LlamaShape, LlamaWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["StoriesTokenizer", "load_stories"]

_HEADER = Struct("<7i")
_PIECE = Struct("<fi")
_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")
_BEGIN = 1


def load_stories(path: Path) -> Llama:
    """Read a weight file: seven int32, then float32 tensors, all little endian.

    The header is dim, hidden, layers, heads, kv heads, vocab (negative if the output
    has weights of its own) and context. Every tensor has all layers one after the other.

    Raises
    ------
    ValueError
        The file is shorter or longer than its header says.
    """
    data = path.read_bytes()
    if len(data) < _HEADER.size:
        raise ValueError(f"{path}: expected a header of {_HEADER.size} bytes, found {len(data)}")
    dim, hidden, layers, heads, kv_heads, vocab, context = _HEADER.unpack_from(data)
    shape = LlamaShape(layers, dim, hidden, heads, kv_heads, abs(vocab), context)
    kv_dim = kv_heads * shape.head_size
    sizes = [
        ("embedding", (shape.vocab, dim)),
        ("attention_norm", (layers, dim)),
        ("query", (layers, dim, dim)),
        ("key", (layers, kv_dim, dim)),
        ("value", (layers, kv_dim, dim)),
        ("attention_out", (layers, dim, dim)),
        ("feed_forward_norm", (layers, dim)),
        ("gate", (layers, hidden, dim)),
        ("down", (layers, dim, hidden)),
        ("up", (layers, hidden, dim)),
        ("final_norm", (dim,)),
        # Cosines and sines of the positions, which the model computes itself.
        ("rotations", (context, shape.head_size)),
        *([("output", (shape.vocab, dim))] if vocab < 0 else []),
    ]
    expected = _HEADER.size + 4 * sum(int(np.prod(size)) for _, size in sizes)
    if len(data) != expected:
        raise ValueError(f"{path}: expected {expected} bytes after its header, found {len(data)}")
    tensors: dict[str, NDArray[np.float32]] = {}
    at = _HEADER.size
    for name, size in sizes:
        tensors[name] = np.frombuffer(data, "<f4", int(np.prod(size)), at).reshape(size)
        at += tensors[name].nbytes
    del tensors["rotations"]
    tensors.setdefault("output", tensors["embedding"])
    return Llama(shape, LlamaWeights(**tensors))


class StoriesTokenizer:
    """The pieces of a ``tok*.bin`` file, and how a text is merged from them.

    Parameters
    ----------
    path : Path
        An int32, then for each token a float32 score, an int32 length and its bytes.
    vocab : int
        How many tokens there are.
    """

    end: int | None = _BEGIN

    def __init__(self, path: Path, vocab: int) -> None:
        data = path.read_bytes()
        at = 4
        self._pieces: list[bytes] = []
        self._scores: list[float] = []
        for _ in range(vocab):
            score, length = _PIECE.unpack_from(data, at)
            at += _PIECE.size
            self._pieces.append(data[at : at + length])
            self._scores.append(score)
            at += length
        self._tokens = {piece: token for token, piece in enumerate(self._pieces)}

    def encode(self, text: str) -> list[int]:
        """Merge the characters pair by pair, the pair with the highest score first.

        A character that is no piece becomes its bytes. O(characters^2).
        """
        tokens = []
        for character in f" {text}" if text else "":
            piece = character.encode()
            known = self._tokens.get(piece)
            tokens += [known] if known is not None else [byte + 3 for byte in piece]
        while True:
            merges = [
                (-self._scores[merged], place, merged)
                for place in range(len(tokens) - 1)
                if (merged := self._merge(tokens[place], tokens[place + 1])) is not None
            ]
            if not merges:
                return [_BEGIN, *tokens]
            _, place, merged = min(merges)
            tokens[place : place + 2] = [merged]

    def _merge(self, left: int, right: int) -> int | None:
        return self._tokens.get(self._pieces[left] + self._pieces[right])

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Join the pieces, without the space that begins a text."""
        text = b"".join(self._piece(token) for token in tokens if token != _BEGIN)
        return text.removeprefix(b" ")

    def _piece(self, token: int) -> bytes:
        piece = self._pieces[token]
        byte = _BYTE.fullmatch(piece)
        return piece if byte is None else bytes([int(byte[1], 16)])
