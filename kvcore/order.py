"""Who of those that wait is tried next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvcore.request import Resumed

if TYPE_CHECKING:
    from kvcore.request import Request

__all__ = ["FCFS", "FairShare", "Order", "Priority", "ShortestJob"]


class Order(Protocol):
    """The order of the queue.

    A step tries one request after the other until the first that cannot enter. So an
    order that always names the same one keeps the others out: whoever waits has to become
    the first within a bounded number of admissions.
    """

    def first(self, waiting: Sequence[Request], step: int) -> int:
        """Return the place in ``waiting`` of the request to try next.

        ``waiting`` is not empty. Its order is that of ``add``, but preempted requests come
        before, first those that ran before the others. ``step`` is the number of the step.

        This is called for every request that enters, also with a part of the queue, to
        explain it. The answer must depend on nothing but the arguments and what was
        charged, and ``waiting`` must stay as it is.
        """
        ...

    def charge(self, request: Request, n_tokens: int) -> None:
        """Note that the scheduler has spent ``n_tokens`` on a request.

        Once when it enters, for the tokens of its prompt that were not found cached; and
        for what it generated, when it leaves. By default nothing is noted.
        """
        return


class FCFS(Order):
    """First come, first served; those that were preempted before all others."""

    def first(self, waiting: Sequence[Request], step: int) -> int:
        """Return 0. O(1)."""
        return 0


class Priority(Order):
    """The most important first; among equals the preempted, then who came first.

    Parameters
    ----------
    ageing : int, optional
        Steps of waiting that count as one level of priority. With it everybody gets to the
        front: what arrives ``ageing * (levels more)`` steps later comes later. By default
        nobody ages, and important requests can keep others out for ever.

    Notes
    -----
    Age counts from when a request began to wait, and after a preemption anew. A victim
    that kept its age would at once be before the request that it made way for, return,
    and be pushed out again.
    """

    def __init__(self, ageing: int | None = None) -> None:
        if ageing is not None and ageing < 1:
            raise ValueError(f"ageing must be at least 1 step, got {ageing}")
        self.ageing = ageing

    def first(self, waiting: Sequence[Request], step: int) -> int:
        """Return the place of the highest level. O(waiting)."""

        def rank(request: Request) -> tuple[int, bool, int]:
            level = request.priority
            if self.ageing is not None:
                level += (step - request.queued) // self.ageing
            return -level, not isinstance(request, Resumed), request.arrival

        return _least(waiting, rank)


class ShortestJob(Order):
    """The least work first, in tokens to compute and to generate; preempted before others.

    Parameters
    ----------
    ageing : float
        Tokens by which a request counts as less work for every step that it waits. With 0
        short requests can keep a long one out for ever; with the default one of 8,000
        tokens gets to the front in 1,000 steps, whatever arrives.

    Notes
    -----
    Of a request that does not say how many tokens it generates, only the prompt counts.
    What will be found cached is not known here.
    """

    def __init__(self, ageing: float = 8.0) -> None:
        if not ageing >= 0:
            raise ValueError(f"ageing must be at least 0 tokens a step, got {ageing}")
        self.ageing = ageing

    def first(self, waiting: Sequence[Request], step: int) -> int:
        """Return the place of the least work. O(waiting)."""

        def rank(request: Request) -> tuple[bool, float, int]:
            final = max(request.final_tokens or 0, request.n_tokens)
            work = final + (request.width - 1) * (final - request.prompt_tokens)
            age = self.ageing * (step - request.queued)
            return not isinstance(request, Resumed), work - age, request.arrival

        return _least(waiting, rank)


class FairShare(Order):
    """The tenant first that has been served the least; within one the preempted, then FCFS.

    Every tenant has a counter of the tokens spent on it, divided by its weight. While two
    tenants wait all the time, their counters differ by no more than a prompt and what runs
    for one of them. Who returns after a pause, or is new, begins at the least counter of
    those that wait: nobody saves up what he did not ask for, and tenants that come and go
    keep nobody out. Tokens computed again after a preemption are on nobody's account.

    Parameters
    ----------
    weights : mapping of tenant to float, optional
        Shares; 1 for those not in it.

    Notes
    -----
    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models",
    OSDI 2024. They also suggest to count generated tokens double; here all count alike.
    """

    def __init__(self, weights: Mapping[Hashable, float] | None = None) -> None:
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not weight > 0:
                raise ValueError(f"weights: that of {tenant!r} must be above 0, got {weight}")
        self._served: dict[Hashable, float] = {}
        self._floor = 0.0
        self._next: Request | None = None
        self._behind: set[Hashable] = set()
        self._most_counters = 64

    def counter(self, tenant: Hashable) -> float:
        """Tokens a unit of weight that count as spent on a tenant."""
        return max(self._served.get(tenant, 0.0), self._floor)

    def first(self, waiting: Sequence[Request], step: int) -> int:
        """Return the place of the least counter. O(waiting)."""

        def rank(request: Request) -> tuple[float, bool, int]:
            is_new = not isinstance(request, Resumed)
            return self.counter(request.tenant), is_new, request.arrival

        place = _least(waiting, rank)
        self._next = waiting[place]
        self._behind = {request.tenant for request in waiting if request is not self._next}
        return place

    def charge(self, request: Request, n_tokens: int) -> None:
        """Add to the counter of its tenant. O(tenants that wait)."""
        enters = request is self._next
        if not (enters and isinstance(request, Resumed)):
            tokens = n_tokens / self._weights.get(request.tenant, 1)
            self._served[request.tenant] = self.counter(request.tenant) + tokens
        if enters:
            self._next = None
            known = self._behind & self._served.keys()
            begin = min(map(self.counter, known), default=self._floor)
            for tenant in self._behind - known:  # once, or they would be lifted on and on
                self._served[tenant] = begin
            self._floor = min(map(self.counter, self._behind or {request.tenant}))
        if len(self._served) > self._most_counters:  # forget who would begin anew anyway
            self._served = {who: n for who, n in self._served.items() if n > self._floor}
            self._most_counters = 2 * len(self._served) + 64


def _least(waiting: Sequence[Request], rank: Callable[[Request], Any]) -> int:
    ranks = [rank(request) for request in waiting]
    return ranks.index(min(ranks))
