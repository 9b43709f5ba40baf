"""Who yields when blocks run out."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcore.request import Request
    from kvcore.resume_cost import ResumeCost
    from kvcore.running_view import RunningView

__all__ = ["CheapestToResume", "LowestPriority", "Newest", "Victim"]


class Victim(Protocol):
    """The order in which running requests yield.

    The scheduler takes requests from it until there is room, and none if all of them
    together would not make room. It passes over those that are about to end anyway, and
    never takes the last one that runs; so there is progress with any order.
    """

    def order(self, view: RunningView) -> Iterable[Request]:
        """Yield requests of ``view.requests`` for a shortage of the next tokens.

        The best victim comes first. Requests left out never yield to a shortage: if
        nobody yields, those that lack a block sit out until one is there.
        """
        ...

    def for_admission(self, request: Request, view: RunningView) -> Iterable[Request]:
        """Yield those whom a waiting ``request`` may push out, the best victim first.

        It is asked for the next in the queue when that finds too little room. "A may push
        B out" must be a strict order, or two requests push each other out for ever. By
        default nobody is pushed out.
        """
        return ()


class Newest(Victim):
    """Who was admitted last yields first: the least work is lost."""

    def order(self, view: RunningView) -> Iterable[Request]:
        """Yield all, the newest first. O(running)."""
        return reversed(view.requests)


class LowestPriority(Victim):
    """The least important yields first, among equals the newest.

    A waiting request pushes out those that are less important than itself. Priorities are
    compared as they were given; ageing lets nobody push.

    Parameters
    ----------
    most_preemptions : int, optional
        Preemptions after which a request is not pushed out any more, so that a steady
        stream of important requests cannot keep it from ending. None: never.
    """

    def __init__(self, most_preemptions: int | None = 4) -> None:
        if most_preemptions is not None and most_preemptions < 1:
            raise ValueError(f"most_preemptions must be at least 1, got {most_preemptions}")
        self.most_preemptions = most_preemptions

    def order(self, view: RunningView) -> Iterable[Request]:
        """Yield all, the least important first. O(running log running)."""
        victims = view.requests[::-1]
        victims.sort(key=lambda one: one.priority)
        return victims

    def for_admission(self, request: Request, view: RunningView) -> Iterable[Request]:
        """Yield those less important than ``request``. O(running log running)."""
        for one in self.order(view):
            if one.priority >= request.priority:
                return
            if self.most_preemptions is None or one.preemptions < self.most_preemptions:
                yield one


class CheapestToResume(Victim):
    """First whoever costs the least time to bring back for each block that it gives.

    Parameters
    ----------
    cost : ResumeCost
        What it takes to compute tokens again, or to move blocks.
    swaps : bool
        Whether the scheduler has host memory: then the cheaper of the two counts.

    Notes
    -----
    Only blocks that nobody else holds are a gain, and only their tokens are lost. Who
    gives none comes last.
    """

    def __init__(self, cost: ResumeCost, swaps: bool = False) -> None:
        self.cost = cost
        self.swaps = swaps

    def order(self, view: RunningView) -> Iterable[Request]:
        """Yield all, the cheapest first, among equals the newest. O(blocks of all)."""

        def seconds_a_block(request: Request) -> float:
            gain = view.exclusive_blocks(request)
            if not gain:
                return inf
            seconds = self.cost.recompute(min(view.tokens(request), gain * view.block_size))
            if self.swaps:
                seconds = min(seconds, self.cost.swap(gain))
            return seconds / gain

        victims = view.requests[::-1]
        victims.sort(key=seconds_a_block)
        return victims
