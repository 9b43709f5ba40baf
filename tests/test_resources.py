"""Resources are taken and given back once, whoever gives back however often."""

from __future__ import annotations

import pytest
from policy_support import numbered, waiting

from kvcore import BlockManager, Request
from kvcore.resources import BlocksOf, Resource, SharedSlots, Slots


def three() -> list[Request]:
    return numbered(
        waiting("a", 5, tenant="x"), waiting("b", 9, tenant="y"), waiting("c", 1, tenant="x")
    )


def every_resource() -> list[Resource]:
    return [
        Slots("places", 4),
        Slots("states", 9, needed=lambda request: request.n_tokens // 2),
        SharedSlots("adapters", 2, key=lambda request: request.tenant),
        BlocksOf("cross", BlockManager(8, 4), n_tokens=lambda request: request.n_tokens),
    ]


@pytest.mark.parametrize("resource", every_resource(), ids=lambda one: one.name)
def test_what_is_taken_is_what_was_needed_and_all_of_it_comes_back(resource: Resource) -> None:
    requests = three()
    levels = [resource.available]
    for request in requests:
        needed = resource.needed(request)
        assert 0 <= needed <= resource.available <= resource.total
        resource.take(request)
        levels.append(levels[-1] - needed)
        assert resource.available == levels[-1]
    for request in [requests[1], requests[0], requests[1], requests[2], requests[0]]:
        resource.give(request)
    assert resource.available == resource.total


@pytest.mark.parametrize("resource", every_resource(), ids=lambda one: one.name)
def test_who_has_taken_nothing_gives_nothing(resource: Resource) -> None:
    stranger, holder = waiting("stranger"), waiting("a", 5, tenant="x", arrival=0)
    resource.take(holder)
    before = resource.available
    resource.give(stranger)
    assert resource.available == before
    resource.give(holder)
    assert resource.available == resource.total


def test_a_preempted_request_gives_and_takes_again_under_its_arrival() -> None:
    slots = Slots("places", 3)
    first = waiting("a", siblings=("a.1",), arrival=7)
    slots.take(first)
    assert slots.available == 1
    slots.give(first)
    again = waiting("a", resumed=True, siblings=("a.1",), arrival=7)
    slots.take(again)
    assert slots.available == 1


def test_slots_count_the_sequences_of_a_group_or_what_they_are_told() -> None:
    group = waiting("a", siblings=("b", "c"))
    assert Slots("places", 9).needed(group) == 3
    assert Slots("places", 9, needed=2).needed(group) == 6
    assert Slots("places", 9, needed=lambda request: 1).needed(group) == 1


def test_a_slot_is_shared_until_the_last_user_leaves() -> None:
    adapters = SharedSlots("adapters", 1, key=lambda request: request.tenant)
    a, b, c, plain = numbered(
        waiting("a", tenant="x"), waiting("b", tenant="x"), waiting("c", tenant="y"), waiting("d")
    )
    assert adapters.needed(a) == 1
    adapters.take(a)
    assert (adapters.needed(b), adapters.needed(c), adapters.needed(plain)) == (0, 1, 0)
    adapters.take(b)
    adapters.take(plain)
    adapters.give(a)
    assert adapters.available == 0
    adapters.give(b)
    adapters.give(plain)
    assert adapters.available == 1
    assert adapters.needed(c) == 1


def test_blocks_of_a_second_pool_are_allocated_under_the_id_of_the_request() -> None:
    bm = BlockManager(4, 4)
    cross = BlocksOf("cross", bm, n_tokens=lambda request: request.n_tokens - 1)
    nothing, some = numbered(waiting("nothing", 1), waiting("some", 10))
    assert (cross.needed(nothing), cross.needed(some)) == (0, 3)
    cross.take(nothing)
    cross.take(some)
    assert "nothing" not in bm
    assert bm.tables["some"] == [0, 1, 2]
    cross.give(nothing)
    cross.give(some)
    assert "some" not in bm
    bm.check()


def test_arguments_that_make_no_sense_are_named() -> None:
    with pytest.raises(ValueError, match=r"total .* got 0"):
        Slots("places", 0)
    with pytest.raises(ValueError, match=r"total .* got 0"):
        SharedSlots("adapters", 0, key=lambda request: None)
    with pytest.raises(ValueError, match=r"needed of places .* got -1"):
        Slots("places", 3, needed=lambda request: -1).needed(waiting("a"))
    with pytest.raises(ValueError, match=r"n_tokens of cross .* got -2"):
        BlocksOf("cross", BlockManager(3, 4), n_tokens=lambda request: -2).needed(waiting("a"))
