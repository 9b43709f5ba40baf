"""How the tokens that a step has left are shared out among prompts."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["share_budget"]


def share_budget(budget: int, remaining: Sequence[int]) -> list[int]:
    """Tokens for each prompt, of which ``remaining`` are still to be computed, oldest first.

    The oldest gets an equal share at least, so it always gets on and nobody waits for
    ever to be the oldest. The rest goes to the shortest first, so that a long prompt
    does not keep short ones waiting. O(n log n).
    """
    if sum(remaining) <= budget:
        return list(remaining)
    shares = [0] * len(remaining)
    if remaining:
        shares[0] = min(remaining[0], -(-budget // len(remaining)))
        budget -= shares[0]
    for place in sorted(range(len(remaining)), key=remaining.__getitem__):
        more = min(budget, remaining[place] - shares[place])
        shares[place] += more
        budget -= more
    return shares
