"""Who yields first, and who may push whom out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from policy_support import running, view_of, waiting

from kvcore import BlockManager, Request
from kvcore.resume_cost import ResumeCost
from kvcore.victim import CheapestToResume, LowestPriority, Newest


def ids(requests: Iterable[Request]) -> list[object]:
    return [request.seq for request in requests]


def test_the_newest_yields_first_and_nobody_is_pushed_out() -> None:
    bm = BlockManager(10, 4)
    view = view_of(bm, [running(bm, name, 4, 4) for name in "abc"])
    assert ids(Newest().order(view)) == ["c", "b", "a"]
    assert ids(Newest().for_admission(waiting("d", priority=9), view)) == []


def test_the_least_important_yields_first_among_equals_the_newest() -> None:
    bm = BlockManager(10, 4)
    priorities = {"a": 1, "b": 0, "c": 2, "d": 0, "e": 1}
    view = view_of(bm, [running(bm, name, 4, 4, priority=p) for name, p in priorities.items()])
    assert ids(LowestPriority().order(view)) == ["d", "b", "e", "a", "c"]


def test_only_the_strictly_less_important_are_pushed_out() -> None:
    bm = BlockManager(10, 4)
    priorities = {"a": 1, "b": 0, "c": 2, "d": 0}
    view = view_of(bm, [running(bm, name, 4, 4, priority=p) for name, p in priorities.items()])
    victim = LowestPriority()
    assert ids(victim.for_admission(waiting("x", priority=0), view)) == []
    assert ids(victim.for_admission(waiting("x", priority=1), view)) == ["d", "b"]
    assert ids(victim.for_admission(waiting("x", priority=3), view)) == ["d", "b", "a", "c"]


def test_no_two_requests_push_each_other_out() -> None:
    bm = BlockManager(10, 4)
    for mine in range(3):
        for other in range(3):
            a = running(bm, "a", 4, 4, priority=mine)
            pushes = ids(
                LowestPriority().for_admission(waiting("b", priority=other), view_of(bm, [a]))
            )
            bm.free_seq("a")
            b = running(bm, "b", 4, 4, priority=other)
            back = ids(
                LowestPriority().for_admission(waiting("a", priority=mine), view_of(bm, [b]))
            )
            bm.free_seq("b")
            assert not (pushes and back)


def test_who_was_preempted_often_is_not_pushed_out_any_more_but_yields_to_a_shortage() -> None:
    bm = BlockManager(10, 4)
    view = view_of(bm, [running(bm, "a", 4, 4, preemptions=3), running(bm, "b", 4, 4)])
    important = waiting("x", priority=1)
    assert ids(LowestPriority(3).for_admission(important, view)) == ["b"]
    assert ids(LowestPriority(4).for_admission(important, view)) == ["b", "a"]
    assert ids(LowestPriority(None).for_admission(important, view)) == ["b", "a"]
    assert ids(LowestPriority(3).order(view)) == ["b", "a"]
    with pytest.raises(ValueError, match=r"most_preemptions .* got 0"):
        LowestPriority(0)


def test_the_cheapest_is_who_gives_most_for_its_tokens() -> None:
    """A tail of one token costs little and gives a block; a shared block gives nothing."""
    bm = BlockManager(40, 16)
    nearly_empty = running(bm, "nearly empty", 17, 17)  # 17 tokens for 2 blocks
    full = running(bm, "full", 32, 32)  # 32 tokens for 2 blocks
    bm.fork("full", "outsider")
    bm.truncate("outsider", 32)
    shared = running(bm, "shared", 48, 48)
    bm.fork("shared", "other outsider", 32)  # 2 of its 3 blocks
    view = view_of(bm, [shared, nearly_empty, full])
    order = ids(CheapestToResume(ResumeCost()).order(view))
    assert order == ["nearly empty", "shared", "full"]


def test_with_host_memory_the_cheaper_way_counts() -> None:
    bm = BlockManager(600, 16)
    few = running(bm, "few", 17, 17)
    many = running(bm, "many", 4000, 4000)
    view = view_of(bm, [many, few])
    slow_start = ResumeCost(seconds_per_copy=1e-3)
    assert ids(CheapestToResume(slow_start).order(view)) == ["few", "many"]
    assert ids(CheapestToResume(slow_start, swaps=True).order(view)) == ["many", "few"]
