"""What one step decided, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.block_manager import BlockManager
    from kvcore.request import Request, Verdict

__all__ = ["SchedulerCounters", "Step", "StepStats"]

NO_PAIRS = np.empty((0, 2), np.int32)
NO_PAIRS.flags.writeable = False
NO_ROWS = np.empty(0, np.int32)
NO_ROWS.flags.writeable = False


def _no_pairs() -> NDArray[np.int32]:
    return NO_PAIRS


class StepStats(NamedTuple):
    """The figures of one step, named as the metrics of a forward pass usually are."""

    num_prefill: int
    """Prompts of which a part is computed."""
    prefill_tokens: int
    """Tokens of those parts."""
    prefill_kv_tokens: int
    """Tokens before those parts, cached or computed earlier."""
    var_prefill_length: float
    """Variance of the lengths of those parts."""
    num_decode: int
    """Sequences that decode."""
    decode_kv_tokens: int
    """Tokens that those sequences have, this step's included."""
    var_decode_kv_tokens: float
    """Variance of their lengths."""
    draft_tokens: int
    """Slots given to drafts."""
    preempted: int
    """Sequences that lost their blocks, to be recomputed."""
    swapped_out: int
    """Sequences whose blocks go to host memory."""
    swapped_in: int
    """Sequences whose blocks come back."""
    stalled: int
    """Running sequences that sit this step out."""
    running: int
    """Sequences that run after this step was planned."""
    waiting: int
    """Requests that wait."""
    swapped: int
    """Requests in host memory."""
    free: int
    """Free blocks after this step was planned."""
    evictable: int
    """Blocks that nobody holds and that are still cached."""
    used: int
    """Blocks that somebody holds."""


class SchedulerCounters:
    """What a scheduler has done since it was made. Each event counts once."""

    requests_added: int = 0
    finished: int = 0
    """Sequences that ended by themselves."""
    aborted: int = 0
    """Sequences that were ended from outside, waiting ones included."""
    rejected: int = 0
    """Requests that were dropped by a step."""
    preemptions_recompute: int = 0
    """Sequences that lost their blocks, to be recomputed."""
    preemptions_swap: int = 0
    """Sequences whose blocks went to host memory."""
    recomputed_tokens: int = 0
    """Tokens computed again because of a preemption; those found cached are not."""
    swap_out_blocks: int = 0
    swap_in_blocks: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed, recomputed ones included."""
    sampled_tokens: int = 0
    """Tokens generated: results that were accepted."""
    draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    ignored_results: int = 0
    """Results of sequences that were gone, or had been preempted since."""
    admission_blocked_watermark: int = 0
    """Steps in which this kept the next request out."""
    admission_blocked_blocks: int = 0
    admission_blocked_max_running: int = 0
    admission_blocked_budget: int = 0
    admission_blocked_resource: int = 0

    def as_dict(self) -> dict[str, int]:
        """Every counter by its name."""
        return {name: getattr(self, name) for name in type(self).__annotations__}

    def __repr__(self) -> str:
        counted = ", ".join(f"{name}={number}" for name, number in self.as_dict().items())
        return f"SchedulerCounters({counted})"


# A steady step leaves most of these as they are: they come into being when asked for.
_EMPTY: dict[str, Callable[[], Any]] = {
    "prefills": list,
    "completed": list,
    "forks": list,
    "preempted": list,
    "swapped_out": list,
    "swapped_in": list,
    "stalled": list,
    "rejected": dict,
    "copies": _no_pairs,
    "swap_out": _no_pairs,
    "swap_in": _no_pairs,
}


class Step(list[Hashable]):
    """What one step decided: the list of decoded sequences, oldest first, and more.

    An engine runs ``swap_out``, ``swap_in`` and ``copies`` in this order, and then the
    prefills and decodes. Of textbook steps, only those up to ``rejected`` can be there.

    Attributes
    ----------
    rows, slots : ndarray
        int32 and int64, parallel to the list: each sequence's row in
        ``BlockManager.block_tables`` and the slot of its new token. The caller owns
        ``slots``; ``rows`` is read-only and may be shared between steps.
    copies : ndarray
        int32 ``(k, 2)``: block copies ``(src, dst)`` to run before anything else, in
        any order. No block is both a source and a destination.
    prefills : list of (seq, start, count)
        The tokens ``start`` to ``start + count`` of prompts, to be computed. What is
        before them is cached or was computed by earlier steps.
    preempted : list
        Sequences whose blocks were taken back; they wait again.
    stalled : list
        Running sequences that sit this step out: the block of their next token is
        held by a step in flight, by a swap, or outside the scheduler.
    rejected : dict of seq to Verdict
        Requests that were dropped for good in this step, and why.
    number : int
        1 for a scheduler's first step.
    lengths : ndarray
        int32, parallel to the list: tokens of each sequence, this step's included.
    counts : ndarray or None
        int32, parallel to the list, with drafts: how many tokens each sequence gets,
        1 and its drafts. ``slots`` then holds that many for each, one after the other.
    completed : list
        Sequences whose prompt this step completes: they sample their next token.
    forks : list of (parent, child)
        Siblings that begin to run beside a sequence whose prompt this step completes.
    swap_out, swap_in : ndarray
        int32 ``(k, 2)``: block copies ``(device, host)`` and ``(host, device)``.
    swapped_out, swapped_in : list
        The sequences that they belong to.
    """

    rows: NDArray[np.int32]
    slots: NDArray[np.int64]
    lengths: NDArray[np.int32]
    prefills: list[tuple[Hashable, int, int]]
    completed: list[Hashable]
    forks: list[tuple[Hashable, Hashable]]
    preempted: list[Hashable]
    swapped_out: list[Hashable]
    swapped_in: list[Hashable]
    stalled: list[Hashable]
    rejected: dict[Hashable, Verdict]
    copies: NDArray[np.int32]
    swap_out: NDArray[np.int32]
    swap_in: NDArray[np.int32]
    number: int
    counts: NDArray[np.int32] | None = None

    # For the scheduler that made it.
    bm: BlockManager
    fence: int = 0
    host_fence: int = 0
    is_updated: bool = False
    is_short: bool = False
    makes_way_for: Request | None = None
    departures: int = 0
    ending: tuple[Hashable, ...] | list[Hashable] = ()
    going_out: tuple[Request, ...] | list[Request] = ()
    coming_in: tuple[Request, ...] | list[Request] = ()
    levels: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)

    def __getattr__(self, name: str) -> Any:
        make = _EMPTY.get(name)
        if make is None:
            raise AttributeError(f"a step has no {name!r}")
        value = make()
        setattr(self, name, value)
        return value

    @property
    def sampled(self) -> list[Hashable]:
        """Sequences that sample a token: the decoded ones, then those completed.

        A completed sequence is followed by the siblings that start from its prompt.
        """
        if "completed" not in self.__dict__:
            return list(self)
        sampled = list(self)
        for seq in self.completed:
            sampled.append(seq)
            sampled += [child for parent, child in self.forks if parent == seq]
        return sampled

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not (self or self.prefills or len(self.swap_out) or len(self.swap_in))

    @property
    def table_changes(self) -> NDArray[np.int32]:
        """int32 ``(k, 3)``: the ``(row, column, block)`` cells that changed since asked last.

        For a mirror of the block tables on the device. This drains the manager's log,
        so ask each step once, before the next is planned.
        """
        return self.bm.drain_changes()

    @property
    def stats(self) -> StepStats:
        """The figures of this step. O(decodes + prefills)."""
        chunks = [count for _, _, count in self.prefills]
        running, waiting, swapped, free, evictable = self.levels
        return StepStats(
            num_prefill=len(chunks),
            prefill_tokens=sum(chunks),
            prefill_kv_tokens=sum(start for _, start, _ in self.prefills),
            var_prefill_length=float(np.var(chunks)) if chunks else 0.0,
            num_decode=len(self),
            decode_kv_tokens=int(self.lengths.sum()),
            var_decode_kv_tokens=float(np.var(self.lengths)) if self else 0.0,
            draft_tokens=0 if self.counts is None else int(self.counts.sum()) - len(self),
            preempted=len(self.preempted),
            swapped_out=len(self.swapped_out),
            swapped_in=len(self.swapped_in),
            stalled=len(self.stalled),
            running=running,
            waiting=waiting,
            swapped=swapped,
            free=free,
            evictable=evictable,
            used=self.bm.num_blocks - free - evictable,
        )
