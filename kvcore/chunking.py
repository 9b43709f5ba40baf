"""How the tokens that a step has left are shared out among prompts."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["share_budget"]


def share_budget(budget: int, remaining: Sequence[int]) -> list[int]:
    """Tokens for each prompt, of which ``remaining`` are still to be computed.

    Everybody gets an equal share, and what one does not need goes to the others, so a
    long prompt cannot keep the short ones waiting (max-min fairness). What does not
    divide goes to the first. O(n log n).
    """
    shares = [0] * len(remaining)
    order = sorted(range(len(remaining)), key=remaining.__getitem__)
    for done, place in enumerate(order):
        shares[place] = min(remaining[place], budget // (len(order) - done))
        budget -= shares[place]
    for place, need in enumerate(remaining):
        more = min(budget, need - shares[place])
        shares[place] += more
        budget -= more
    return shares
