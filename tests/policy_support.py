"""Requests and views for tests of policies alone, without a scheduler."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kvcore import FCFS, BlockManager, Request, Resumed, Scheduler
from kvcore.roster import Roster
from kvcore.running_view import RunningView


def waiting(seq: Hashable, n_tokens: int = 8, *, resumed: bool = False, **more: Any) -> Request:
    return (Resumed if resumed else Request)(seq, n_tokens, **more)


def numbered(*requests: Request) -> list[Request]:
    """The requests, arrived in this order."""
    for place, request in enumerate(requests):
        request.arrival = place
    return list(requests)


def view_of(bm: BlockManager, requests: Sequence[Request], **more: Any) -> RunningView:
    """A view of requests whose members are live sequences of ``bm``; ``more`` are options."""
    options = Scheduler(bm, token_budget=64, **more).options
    roster = Roster(bm, options, FCFS(), ())
    roster.step = 1
    for request in requests:
        members, request.members = request.members, []
        for seq in members:
            roster.enter(seq, request)
    return RunningView(roster)


def running(bm: BlockManager, seq: Hashable, prompt: int, length: int, **more: Any) -> Request:
    """A request that runs in ``bm`` with ``length`` tokens."""
    request = Request(seq, prompt, **more)
    bm.allocate(seq, length)
    request.members.append(seq)
    return request
