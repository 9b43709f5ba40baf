"""How the next token is chosen from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BeamSearch", "Continuation", "Greedy", "Sampling", "Temperature"]


class Sampling(Protocol):
    """Chooses the next token of one sequence.

    The choice depends on the arguments alone. So a sequence that was preempted and
    computed again goes on as it would have, and a draft that was guessed right is what
    would have been sampled.
    """

    def choose(self, logits: NDArray[np.float32], sample: int, position: int) -> int:
        """Choose from ``(vocab,)`` logits the token at a position of a request's n-th sample."""


class Greedy:
    """The most likely token."""

    def choose(self, logits: NDArray[np.float32], sample: int, position: int) -> int:
        """Return it; of equals the lowest."""
        return int(logits.argmax())


class Temperature:
    """A token at random, the likely ones more often.

    Parameters
    ----------
    temperature : float
        Above 0: the higher, the more even the choice.
    seed : int

    Notes
    -----
    The largest of logits plus Gumbel noise is a sample of their softmax (Gumbel, 1954).
    """

    def __init__(self, temperature: float = 1.0, seed: int = 0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.temperature = temperature
        self.seed = seed

    def choose(self, logits: NDArray[np.float32], sample: int, position: int) -> int:
        """Return it. Each sample and position has a noise of its own."""
        noise = np.random.default_rng([self.seed, sample, position]).gumbel(size=len(logits))
        return int((logits / self.temperature + noise).argmax())


class Continuation(NamedTuple):
    """How one beam goes on."""

    parent: int
    """The beam that it goes on from."""
    token: int
    score: float
    """Logarithm of the probability of all that was generated."""


class BeamSearch:
    """The most likely continuations of all sequences of a request together."""

    def advance(
        self, scores: NDArray[np.float64], logits: NDArray[np.float32]
    ) -> list[Continuation]:
        """Choose for k beams, of these scores and ``(k, vocab)`` logits, how each goes on.

        A beam that has continuations keeps its best one, so that as few as possible move.
        O(k * vocab).
        """
        count, vocab = logits.shape
        totals = scores[:, None] + _log_softmax(logits)
        flat = totals.ravel()
        best = np.argpartition(-flat, count - 1)[:count]
        best = best[np.lexsort((best, -flat[best]))]
        chosen: list[Continuation | None] = [None] * count
        moved = []
        for place in best.tolist():
            one = Continuation(place // vocab, place % vocab, float(flat[place]))
            if chosen[one.parent] is None:
                chosen[one.parent] = one
            else:
                moved.append(one)
        return [moved.pop(0) if one is None else one for one in chosen]


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
