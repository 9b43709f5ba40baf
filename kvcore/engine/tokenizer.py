"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["ByteTokenizer", "Tokenizer"]


class Tokenizer(Protocol):
    """What turns a prompt into tokens, and what was generated into text."""

    end: int | None
    """The token that ends a text, if there is one."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, at least one."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the UTF-8 text of a prompt and what follows it.

        The text of more tokens begins with the text of fewer; the last character may be
        incomplete.
        """


class ByteTokenizer:
    """Each byte is its own token; 256 begins a text, and nothing ends one."""

    begin = 256
    vocab = 257
    end: int | None = None

    def encode(self, text: str) -> list[int]:
        """Return the beginning and the bytes."""
        return [self.begin, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes."""
        return bytes(token for token in tokens if token != self.begin)
