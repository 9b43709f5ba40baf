"""Guesses of the next tokens, to be verified in one pass (speculative decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Drafter", "PromptLookup"]


class Drafter(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most ``count`` tokens that may follow."""


class PromptLookup:
    """What followed the last few tokens the last time they came.

    The method is Apoorv Saxena's "Prompt Lookup Decoding" (2023).

    Parameters
    ----------
    match : int
        How many tokens have to agree.
    """

    def __init__(self, match: int = 2) -> None:
        self.match = match

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Look from the end to the beginning. O(tokens * match)."""
        tail = list(tokens[-self.match :])
        for start in range(len(tokens) - self.match - 1, -1, -1):
            if list(tokens[start : start + self.match]) == tail:
                return list(tokens[start + self.match : start + self.match + count])
        return []
