"""Requests and views for tests of policies alone, without a scheduler."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from kvcore import BlockManager, Request, Resumed
from kvcore.running_rows import UNLIMITED, RowNotes
from kvcore.running_view import RunningView


def waiting(seq: Hashable, n_tokens: int = 8, *, resumed: bool = False, **more: Any) -> Request:
    return (Resumed if resumed else Request)(seq, n_tokens, **more)


def numbered(*requests: Request) -> list[Request]:
    """The requests, arrived in this order."""
    for place, request in enumerate(requests):
        request.arrival = place
    return list(requests)


def view_of(bm: BlockManager, requests: Sequence[Request], **more: Any) -> RunningView:
    """A view of requests whose members are live sequences of ``bm``."""
    by_seq = {seq: request for request in requests for seq in request.members}
    notes = RowNotes()
    for seq, request in by_seq.items():
        limit = UNLIMITED if request.final_tokens is None else request.final_tokens
        notes.enter(bm.row(seq), limit, request.prompt_tokens, -1)
    seqs = list(by_seq)
    rows = bm.rows(seqs) if seqs else np.empty(0, np.int32)
    return RunningView(bm, by_seq, seqs, rows, notes, step=1, **more)


def running(bm: BlockManager, seq: Hashable, prompt: int, length: int, **more: Any) -> Request:
    """A request that runs in ``bm`` with ``length`` tokens."""
    request = Request(seq, prompt, **more)
    bm.allocate(seq, length)
    request.members.append(seq)
    return request
