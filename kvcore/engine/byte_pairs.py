"""Byte pair encoding as of GPT-2, with the tables of a GGUF file."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

__all__ = ["BytePairTokenizer"]

_PIECE = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[^\W_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
"""Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): a
contraction, a word or signs, each with the space before it, or space. Digits are cut off
before, so that letters are all of ``\\w`` but ``_``."""
_CONTROL = 3


@cache
def _characters() -> dict[int, str]:
    """Say which character stands for each byte in the tables: printable ones for themselves."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }


class BytePairTokenizer:
    """The tokens of a GGUF file whose tokenizer is ``gpt2``, with each digit by itself.

    Parameters
    ----------
    metadata : dict
        Of the file. What is read are the ``tokenizer.ggml`` keys ``tokens``, ``merges``,
        ``token_type`` and ``eos_token_id``.

    Raises
    ------
    ValueError
        It is another kind of tokenizer.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"metadata: expected the tokenizer gpt2 of smollm, found {kind}")
        pieces = metadata["tokenizer.ggml.tokens"]
        self._tokens = {piece: token for token, piece in enumerate(pieces)}
        merges = metadata["tokenizer.ggml.merges"]
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        kinds = metadata["tokenizer.ggml.token_type"]
        controls = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _CONTROL]
        self._controls = re.compile("(" + "|".join(map(re.escape, controls)) + ")")
        bytes_of = {character: byte for byte, character in _characters().items()}
        self._bytes = [
            b"" if kind == _CONTROL else bytes(bytes_of[character] for character in piece)
            for piece, kind in zip(pieces, kinds, strict=True)
        ]
        self.end: int | None = metadata["tokenizer.ggml.eos_token_id"]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in which control tokens stand as they are written."""
        tokens = []
        for place, part in enumerate(self._controls.split(text)):
            if place % 2:
                tokens.append(self._tokens[part])
                continue
            for piece in _pieces(part):
                tokens += self._merged(piece.encode())
        return tokens

    def _merged(self, data: bytes) -> list[int]:
        """Merge the pairs of a piece, the one that comes first in the table first."""
        parts = [_characters()[byte] for byte in data]
        while True:
            ranked = [
                (rank, place)
                for place, pair in enumerate(pairwise(parts))
                if (rank := self._ranks.get(pair)) is not None
            ]
            if not ranked:
                return [self._tokens[part] for part in parts]
            _, place = min(ranked)
            parts[place : place + 2] = ["".join(parts[place : place + 2])]

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text, without control tokens."""
        return b"".join(self._bytes[token] for token in tokens)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at each digit, and the rest into words."""
    start = 0
    for place, character in enumerate(text):
        if unicodedata.category(character).startswith("N"):
            yield from _PIECE.findall(text[start:place])
            yield character
            start = place + 1
    yield from _PIECE.findall(text[start:])
