"""The orders of the queue: who is first, who cannot be kept out, who gets how much."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from policy_support import numbered, waiting

from kvcore import Request
from kvcore.order import FCFS, FairShare, Order, Priority, ShortestJob

EVERY_ORDER = [FCFS(), Priority(), Priority(ageing=3), ShortestJob(), ShortestJob(0), FairShare()]


def in_order(order: Order, queue: list[Request], step: int = 1) -> list[Hashable]:
    rest, seqs = list(queue), []
    while rest:
        seqs.append(rest.pop(order.first(rest, step)).seq)
    return seqs


@pytest.mark.parametrize("order", EVERY_ORDER, ids=lambda order: type(order).__name__)
def test_equals_are_served_in_order_of_arrival(order: Order) -> None:
    queue = numbered(*(waiting(name) for name in "abcd"))
    assert in_order(order, queue) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("order", EVERY_ORDER[1:], ids=lambda order: type(order).__name__)
def test_among_equals_the_preempted_come_first(order: Order) -> None:
    queue = numbered(waiting("new"), waiting("preempted", resumed=True))
    assert in_order(order, queue) == ["preempted", "new"]


def test_fcfs_takes_the_queue_as_it_is() -> None:
    queue = [waiting("c", arrival=3), waiting("a", arrival=1), waiting("b", arrival=2)]
    assert in_order(FCFS(), queue) == ["c", "a", "b"]


def test_the_more_important_comes_first_and_is_not_outranked_by_the_preempted() -> None:
    queue = numbered(
        waiting("low", resumed=True), waiting("high", priority=2), waiting("middle", priority=1)
    )
    assert in_order(Priority(), queue) == ["high", "middle", "low"]


def test_age_lifts_a_request_by_a_level_for_every_so_many_steps() -> None:
    old = waiting("old", priority=0, queued=10)
    new = waiting("new", priority=2, queued=29)
    queue = numbered(new, old)
    order = Priority(ageing=10)
    assert order.first(queue, step=29) == 0  # 0 + 1 level of age against 2
    assert order.first(queue, step=30) == 0  # 2 against 2: the first to arrive
    old.arrival, new.arrival = 0, 1
    assert order.first(queue, step=30) == 1
    assert Priority().first(queue, step=10_000) == 0


def served_at(order: Order, patient: Request, flood: Any, steps: int) -> int | None:
    """The step in which ``patient`` is served, if one is a step and ``flood`` goes on."""
    queue = numbered(patient)
    for step in range(1, steps + 1):
        newcomer = flood(step)
        newcomer.arrival, newcomer.queued = step, step - 1
        queue.append(newcomer)
        request = queue.pop(order.first(queue, step))
        order.charge(request, request.n_tokens)
        if request is patient:
            return step
    return None


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("ageing", [1, 7, 50])
def test_with_ageing_a_flood_of_important_requests_keeps_nobody_out(
    ageing: int, levels: int
) -> None:
    def flood(step: int) -> Request:
        return waiting(step, priority=levels)

    patient = waiting("patient", queued=0)
    step = served_at(Priority(ageing), patient, flood, 1000)
    assert step is not None
    assert step <= (levels + 1) * ageing + 1
    assert served_at(Priority(), waiting("patient", queued=0), flood, 1000) is None


@pytest.mark.parametrize("ageing", [1, 8, 0.5])
def test_with_ageing_a_flood_of_short_requests_keeps_no_long_one_out(ageing: float) -> None:
    def flood(step: int) -> Request:
        return waiting(step, 10, max_tokens=1)

    patient = waiting("patient", 200, max_tokens=101, queued=0)
    step = served_at(ShortestJob(ageing), patient, flood, 2000)
    assert step is not None
    assert step <= (300 - 10) / ageing + 2
    patient = waiting("patient", 200, max_tokens=101, queued=0)
    assert served_at(ShortestJob(0), patient, flood, 2000) is None


def test_work_is_the_prompt_and_what_each_sequence_may_generate() -> None:
    queue = numbered(
        waiting("prompt only", 70),
        waiting("short", 10, max_tokens=41),
        waiting("group", 10, max_tokens=41, siblings=("x", "y")),
    )
    assert in_order(ShortestJob(0), queue) == ["short", "prompt only", "group"]


class Server:
    """Serves one request at a time, whole; everybody's prompt and output is charged."""

    def __init__(self, order: FairShare) -> None:
        self.order = order
        self.queue: list[Request] = []
        self.served: Tally[Hashable] = Tally()
        self.arrivals = 0

    def add(self, tenant: Hashable, n_tokens: int, output: int = 0) -> Request:
        request = waiting(self.arrivals, n_tokens, tenant=tenant, max_tokens=output)
        request.arrival = self.arrivals
        self.arrivals += 1
        self.queue.append(request)
        return request

    def serve(self) -> Request:
        request = self.queue.pop(self.order.first(self.queue, 1))
        self.order.charge(request, request.n_tokens)
        assert request.max_tokens is not None
        if request.max_tokens:
            self.order.charge(request, request.max_tokens)
        self.served[request.tenant] += request.n_tokens + request.max_tokens
        return request


def test_a_flood_by_one_tenant_delays_another_by_two_requests_at_most() -> None:
    server = Server(FairShare())
    for _ in range(1000):
        server.add("flood", 100)
    for _ in range(50):
        server.serve()
    mine = server.add("other", 100)
    assert mine in (server.serve(), server.serve(), server.serve())


def test_two_that_always_wait_get_the_same_whatever_the_size_of_their_requests() -> None:
    random = np.random.default_rng(1)
    server = Server(FairShare())
    largest = 0
    for _ in range(500):
        server.add("small", int(random.integers(1, 50)), int(random.integers(0, 50)))
        server.add("large", int(random.integers(500, 1000)), int(random.integers(0, 1000)))
    for _ in range(500):
        request = server.serve()
        largest = max(largest, request.n_tokens + (request.max_tokens or 0))
        if not any(one.tenant == "small" for one in server.queue):
            break
        difference = abs(server.served["small"] - server.served["large"])
        assert difference <= largest


def test_tenants_that_come_and_go_keep_nobody_out() -> None:
    """An id for every request, as of an anonymous user, is no way to the front."""
    server = Server(FairShare())
    for _ in range(3):
        server.add("regular", 100)
    for anonymous in range(100):
        server.add(anonymous, 100)
        server.serve()
    assert server.served["regular"] == 300


def test_shares_follow_the_weights() -> None:
    server = Server(FairShare({"paid": 3}))
    for _ in range(400):
        server.add("paid", 10)
        server.add("free", 10)
    for _ in range(400):
        server.serve()
    assert server.served["paid"] == pytest.approx(3 * server.served["free"], abs=40)


def test_nobody_saves_up_while_away() -> None:
    """After a pause a tenant gets half, not all that it did not ask for meanwhile."""
    server = Server(FairShare())
    server.add("idler", 10)
    for _ in range(300):
        server.add("worker", 10)
    for _ in range(101):
        server.serve()
    for _ in range(100):
        server.add("idler", 10)
    before = server.served.copy()
    for _ in range(100):
        server.serve()
    gain = server.served - before
    assert gain["idler"] == pytest.approx(gain["worker"], abs=20)


def test_output_that_is_charged_late_lifts_nobody_else() -> None:
    order = FairShare()
    long, short = numbered(waiting("l", 10, tenant="a"), waiting("s", 10, tenant="b"))
    assert order.first([long, short], 1) == 0
    order.charge(long, 10)
    order.charge(long, 1000)  # it leaves
    assert order.counter("a") == 1010
    assert order.counter("b") == 0
    queue = [waiting(i, 10, tenant="b", arrival=10 + i) for i in range(200)]
    queue.append(waiting("next", 10, tenant="a", arrival=5))
    for place in range(101):
        first = queue.pop(order.first(queue, 1))
        assert first.tenant == "b", place
        order.charge(first, 10)
    assert order.first(queue, 1) == len(queue) - 1


def test_looking_at_a_part_of_the_queue_changes_nothing() -> None:
    """``why`` asks for the order of all that wait, without anybody being served."""
    queue = [waiting(i, 10, tenant="ab"[i % 2], arrival=i) for i in range(20)]
    looked, plain = FairShare(), FairShare()
    for _ in range(10):
        assert in_order(looked, queue) == in_order(looked, queue)
        place = looked.first(queue, 1)
        assert place == plain.first(queue, 1)
        request = queue.pop(place)
        looked.charge(request, 10)
        plain.charge(request, 10)


def test_what_is_computed_again_is_on_nobodys_account() -> None:
    order = FairShare()
    again = waiting("a", 500, tenant="t", resumed=True)
    assert order.first([again], 1) == 0
    order.charge(again, 500)
    assert order.counter("t") == 0
    order.charge(again, 7)  # what it then generates
    assert order.counter("t") == 7


def test_tenants_that_are_gone_leave_nothing_behind() -> None:
    order = FairShare()
    for tenant in range(10_000):
        request = waiting(tenant, 10, tenant=tenant, arrival=tenant)
        order.first([request], 1)
        order.charge(request, 10)
    assert len(order._served) < 200


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Priority(0), "ageing .* got 0"),
        (lambda: ShortestJob(-1), "ageing .* got -1"),
        (lambda: ShortestJob(float("nan")), "ageing .* got nan"),
        (lambda: FairShare({"x": 0}), "weights: that of 'x' .* got 0"),
    ],
)
def test_arguments_that_make_no_sense_are_named(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
