"""The queue of those that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from kvcore.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue(deque[Request]):
    """A deque of requests into which plain ``(seq, n_tokens)`` pairs may be put as well.

    They become requests on the way in, and those that have no place yet in the order of
    arrival get the next one.

    Attributes
    ----------
    arrivals : int
        The next place in the order of arrival.
    step : int
        Number of the step that is planned, or was last.
    """

    arrivals: int = 0
    step: int = 0

    def append(self, request: tuple[Hashable, int], /) -> None:
        """Put a request last."""
        super().append(self._request(request))

    def appendleft(self, request: tuple[Hashable, int], /) -> None:
        """Put a request first."""
        super().appendleft(self._request(request))

    def extend(self, requests: Iterable[tuple[Hashable, int]], /) -> None:
        """Put requests last, in their order."""
        super().extend([self._request(request) for request in requests])

    def extendleft(self, requests: Iterable[tuple[Hashable, int]], /) -> None:
        """Put requests first, in the reverse of their order."""
        super().extendleft([self._request(request) for request in requests])

    def insert(self, place: int, request: tuple[Hashable, int], /) -> None:
        """Put a request at a place."""
        super().insert(place, self._request(request))

    def _request(self, pair: tuple[Hashable, int]) -> Request:
        request = pair if isinstance(pair, Request) else Request(*pair)
        if request.arrival < 0:
            request.arrival = self.arrivals
            self.arrivals += 1
        if request.queued <= request.admitted:
            request.queued = self.step
        return request
