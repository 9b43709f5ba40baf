"""How many blocks those that run are going to need, so that a newcomer leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvcore.peak import peak_blocks
from kvcore.running_rows import UNLIMITED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.request import Request
    from kvcore.running_view import RunningView

__all__ = ["Admission", "PredictedPeak", "ToCompletion", "Watermark"]


class Admission(Protocol):
    """What is kept back from a request that wants to enter.

    A request enters if the blocks of its whole prompt, those that it finds cached not
    counted, are at most ``available - reserve``. A preempted request that finds nobody
    running is not asked about: it has to be able to come back.
    """

    def reserve(self, request: Request, view: RunningView) -> int:
        """Return the blocks that must still be available once ``request`` has entered.

        ``view`` has those that run, without it. This is called for the next in the queue
        at least once a step; and with nobody running when a request is added, where the
        answer must not change later: one that does not fit into the whole pool beside
        that is refused, so with nobody running everybody else must be let in.
        ``ValueError`` if the policy cannot judge the request.
        """
        ...

    def ended(self, request: Request, n_generated: int) -> None:
        """Learn that one of its sequences ended by itself after ``n_generated`` tokens."""
        return


class Watermark(Admission):
    """A fixed number of blocks. O(1)."""

    def __init__(self, blocks: int = 1) -> None:
        if blocks < 0:
            raise ValueError(f"blocks must be at least 0, got {blocks}")
        self.blocks = blocks

    def reserve(self, request: Request, view: RunningView) -> int:
        """Return the watermark."""
        return self.blocks


class ToCompletion(Admission):
    """All blocks that anybody can still come to need: nobody is ever preempted.

    That includes the block that a sequence shares with others and has to copy before it
    writes. It holds as long as nobody outside the scheduler takes blocks. The price is
    that blocks stay empty which are needed only if everybody generates ``max_tokens``.

    Every request must say its ``max_tokens``. While one runs that did not come through
    the queue and has no limit, nobody enters.
    """

    def reserve(self, request: Request, view: RunningView) -> int:
        """Sum up what is left to grow. O(running). ``ValueError`` without ``max_tokens``."""
        if request.max_tokens is None:
            raise ValueError(
                f"max_tokens of {request.seq!r} is None: ToCompletion admits only requests that "
                "say how many tokens they generate"
            )
        if (view.limits == UNLIMITED).any():
            return view.num_blocks
        new_finals = [_final_tokens(one) for one in (request, *view.forming)]
        return _growth(request, view, view.limits, new_finals)


class PredictedPeak(Admission):
    """What is missing at the moment at which those that run are going to hold the most.

    Everybody gets one token a step and leaves when its predicted length is reached. The
    blocks held at each of these moments, rounded up for every sequence, give the peak.
    How many tokens a request generates is learned from those that end: it is taken to be
    the running mean, or a tenth more than it has already generated, but never more than
    its ``max_tokens``. If this turns out too low, somebody is preempted.

    Parameters
    ----------
    expected_tokens : int
        Tokens that a request is taken to generate before any has ended.

    Attributes
    ----------
    expected_tokens : int
        What has been learned up to now.

    Notes
    -----
    The idea and the way of learning are LightLLM's (Gong et al., "Past-Future Scheduler
    for LLM Serving under SLA Guarantees", ASPLOS 2025; ``RouterStatics`` there): a mean
    that begins at 2,048 with the weight of a new length falling from 0.5 to 0.04, and
    lengths below 64 taken for 64. LightLLM adds up tokens; this counts blocks.

    What is shared now is taken off everybody in proportion to its blocks. That the prompt
    of a newcomer takes some steps is left out. With a sliding window, where sequences
    hardly grow, the sum of what is left to grow is kept.
    """

    def __init__(self, expected_tokens: int = 2048) -> None:
        if expected_tokens < 1:
            raise ValueError(f"expected_tokens must be at least 1, got {expected_tokens}")
        self.expected_tokens = expected_tokens
        self._weight = 0.5

    def ended(self, request: Request, n_generated: int) -> None:
        """Move the mean towards ``n_generated``. O(1)."""
        mean = self.expected_tokens
        self.expected_tokens = mean + round(self._weight * (max(n_generated, 64) - mean))
        self._weight = max(0.04, 0.8 * self._weight)

    def reserve(self, request: Request, view: RunningView) -> int:
        """Simulate. O(running * log(running)); ``peak_blocks`` says more."""
        if not view.seqs:
            return 0
        size, expected = view.block_size, self.expected_tokens
        lengths = view.lengths.astype(np.int64)
        generated = lengths - view.prompt_tokens
        left = np.maximum(expected - generated, generated // 10 + 1)
        np.minimum(left, view.limits - lengths, out=left)
        np.maximum(left, 0, out=left)
        coming = [request, *view.forming]
        coming_left = []
        for one in coming:
            done = one.n_tokens - one.prompt_tokens
            more = min(max(expected - done, done // 10 + 1), _final_tokens(one) - one.n_tokens)
            coming_left.append(max(more, 0))
        if view.window is not None:
            finals = [one.n_tokens + more for one, more in zip(coming, coming_left, strict=True)]
            return _growth(request, view, lengths + left, finals)

        # Take off what is shared: of those that run in proportion to their blocks, of the
        # siblings to come the whole prompt.
        cells = (lengths + (size - 1)) // size
        now = int(cells.sum())
        surplus = now - view.bm.pool.num_used
        if surplus > 0:
            cells *= surplus
            cells //= now
            lengths -= cells * size
            now -= int(cells.sum())
        new_lengths = [request.n_tokens]
        new_left = coming_left[:1]
        for one, more in zip(coming, coming_left, strict=True):
            siblings = one.width - 1
            new_lengths += [one.n_tokens % size] * siblings
            new_left += [more] * siblings
        now += sum(-(-length // size) for length in new_lengths)
        lengths, left = np.concatenate([lengths, new_lengths]), np.concatenate([left, new_left])
        return max(peak_blocks(lengths, left, size) - now, 0)


def _final_tokens(request: Request) -> int:
    """Tokens of each of its sequences at the end, as far as that is limited."""
    final = request.final_tokens
    return UNLIMITED if final is None else max(final, request.n_tokens)


def _growth(
    request: Request, view: RunningView, finals: NDArray[Any], new_finals: Sequence[int]
) -> int:
    """Blocks that a newcomer and those that run come to need until all have grown up.

    ``finals`` has the lengths to which those that run grow, ``new_finals`` that of the
    newcomer and those of ``view.forming``.
    """
    size = view.block_size
    blocks = -(-view.lengths // size)
    more = np.maximum(-(-finals // size) - blocks, 0)
    most, lag = UNLIMITED, 0
    if view.window is not None:
        # What a step takes and gives back is there again when that step and those planned
        # meanwhile are settled.
        lag = -(-2 * view.ahead // size)
        most = -(-view.sinks // size) + -(-(view.window + 2 * view.ahead) // size) + 1
        np.minimum(more, np.maximum(most - _held(view, blocks), lag), out=more)
    total = int(more.sum()) + _tails_to_copy(view, finals > view.lengths)
    for parent, final in zip(view.forming, new_finals[1:], strict=True):
        own = -(-final // size) - parent.n_tokens // size
        total += len(parent.siblings) * min(own, most) + (view.ahead > 1)
    shared = request.prompt_tokens // size
    own = shared + request.width * (-(-new_finals[0] // size) - shared)
    own -= request.blocks_to_enter(size)
    own = min(own, request.width * max(most - request.n_tokens // size, lag))
    if request.width > 1 and view.ahead > 1:
        own += 1  # see _tails_to_copy
    return total + max(own, 0)


def _held(view: RunningView, blocks: NDArray[Any]) -> NDArray[Any]:
    """Blocks that each sequence has, of the ``blocks`` that its table spans."""
    columns = np.arange(blocks.max(initial=0))
    tables = view.bm.block_tables[view.rows, : len(columns)]
    held: NDArray[Any] = ((tables >= 0) & (columns < blocks[:, None])).sum(axis=1)
    return held


def _tails_to_copy(view: RunningView, grows: NDArray[np.bool_]) -> int:
    """Count the copies that have to be made of blocks that are not full and shared.

    The last one to write needs none, unless a step in flight holds the block as well.
    """
    places = np.flatnonzero(grows & (view.lengths % view.block_size != 0))
    columns = view.lengths[places] // view.block_size
    tails = view.bm.block_tables[view.rows[places], columns]
    references = view.bm.ref[tails]
    if not (references > 1).any():
        return 0
    blocks, writers = np.unique(tails[references > 1], return_counts=True)
    if view.ahead > 1:
        return int(writers.sum())
    return int((writers - (view.bm.ref[blocks] == writers)).sum())
