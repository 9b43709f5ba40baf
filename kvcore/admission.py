"""How many blocks those that run are going to need, so that a newcomer leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvcore.running_rows import UNLIMITED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.request import Request
    from kvcore.running_view import RunningView

__all__ = ["Admission", "PredictedPeak", "ToCompletion", "Watermark", "peak_blocks"]


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
        n = len(view.seqs)
        if n == 0:
            return 0
        new = [(request, request.width)]
        new += [(parent, len(parent.siblings)) for parent in view.forming]
        lengths, prompts, limits = np.empty((3, n + sum(count for _, count in new)), np.int64)
        lengths[:n], prompts[:n], limits[:n] = view.lengths, view.prompt_tokens, view.limits
        places = []
        for one, count in new:
            places.append(n)
            n += count
            lengths[places[-1] : n] = one.n_tokens
            prompts[places[-1] : n] = one.prompt_tokens
            limits[places[-1] : n] = _final_tokens(one)
        generated = lengths - prompts
        left = np.maximum(self.expected_tokens - generated, generated // 10 + 1)
        np.minimum(left, limits - lengths, out=left)
        np.maximum(left, 0, out=left)
        if view.window is not None:
            finals = lengths + left
            return _growth(request, view, finals[: len(view.seqs)], finals[places].tolist())

        # Take off what is shared: of those that run in proportion to their blocks, of the
        # siblings to come the whole prompt.
        size, n = view.block_size, len(view.seqs)
        cells = (lengths[:n] + (size - 1)) // size
        now = int(cells.sum())
        surplus = now - view.bm.pool.num_used
        if surplus > 0:
            cells *= surplus
            cells //= now
            lengths[:n] -= cells * size
            now -= int(cells.sum())
        for place, (one, count) in zip(places, new, strict=True):
            own = 1 if one is request else 0
            lengths[place + own : place + count] -= one.n_tokens // size * size
        now += sum(-(-int(one) // size) for one in lengths[n:])
        peak = peak_blocks(lengths, left, size)
        return max(peak - now, 0)


def peak_blocks(lengths: NDArray[np.int64], left: NDArray[np.int64], block_size: int) -> int:
    """Return the most blocks that sequences are going to hold at once.

    A sequence of ``lengths[i]`` tokens that gets ``left[i]`` more, one a step, holds
    ``ceil((lengths[i] + t) / block_size)`` blocks after step ``t``, and none once
    ``t > left[i]``.

    Parameters
    ----------
    lengths, left : ndarray
        int64 ``(n,)``, at least 0 and below 2**31. Not empty.
    block_size : int

    Notes
    -----
    The most is held when somebody is about to leave. Sorted by ``left``, those still
    there at such a moment are the first ``k``, so running sums give the tokens of all of
    them at every moment, and with that the blocks up to one a sequence. Only moments that
    come so near to the peak are counted exactly, from how many of the ``k`` lengths have
    which remainder. O(n * log(n) + near * block_size), where near is at most n and as a
    rule a few.
    """
    keys = left << 31
    keys += lengths
    keys.sort()
    keys = keys[::-1]
    left = keys >> 31
    tokens = keys & (2**31 - 1)
    tokens += block_size - 1  # so that a sum divided by block_size is rounded up

    alive = np.arange(1, len(keys) + 1)
    most = alive * left
    most += tokens.cumsum()
    top = most.argmax()
    near = (most > most[top] - block_size * alive[top]).nonzero()[0]

    alive, t = alive[near], left[near]
    tokens = tokens[: alive[-1]]
    moment_and_rest = np.zeros(len(tokens), np.int64)
    moment_and_rest[alive[:-1]] = block_size
    moment_and_rest = moment_and_rest.cumsum()
    moment_and_rest += tokens
    moment_and_rest -= tokens // block_size * block_size
    counts = np.bincount(moment_and_rest, minlength=len(near) * block_size)
    counts = counts.reshape(-1, block_size).cumsum(axis=0)
    unused = np.einsum("ij,ij->i", counts, _rests(block_size)[t % block_size])
    return int((most[near] - unused).max()) // block_size


@lru_cache(maxsize=8)
def _rests(block_size: int) -> NDArray[np.int64]:
    """Return a table whose cell ``(i, j)`` is ``(i + j) % block_size``."""
    places = np.arange(block_size)
    rests: NDArray[np.int64] = (places + places[:, None]) % block_size
    return rests


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
