"""How many prompt blocks of a trace are found cached, over the size of the cache.

Two curves that a replay can be held against, both with one request at a time, at the
grain of the trace's own ids:

* Least recently used, exactly, for every size at once: in a list ordered by last use, a
  cache of ``c`` blocks is the first ``c``, so a block's place in the list is the size from
  which on it is found (Mattson et al., 1970).
* Belady's MIN (1966), which knows the future and evicts what is needed last: no way of
  evicting block by block finds more.

What is counted: the leading blocks of a prompt that are in the cache when it arrives.
Then all its blocks are put in, used last block first, so that the end of a prompt goes
before its beginning, and blocks go until the cache has its size again. Nothing generated
is put in. A block is its id after those before it, as in the manager.

Both are quick because prompts are paths in a tree. The blocks of which a request was the
last user are the end of its path, and the blocks that a future request is the next user
of lie on one path. So a stretch of a path is counted at once, and not block by block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvcore.trace import Trace

__all__ = ["HitRateCurve", "hit_rate_curve"]

# Sizes that a curve is drawn through.
LRU_POINTS = 120
MIN_POINTS = 16


@dataclass(frozen=True, eq=False)
class HitRateCurve:
    """Hits by cache size, in the blocks of the trace's ids and in prompt tokens.

    The last block of a prompt may be a part of one; of its tokens, those in the prompt
    count.
    """

    block_size: int
    """Tokens that an id stands for."""
    unique_blocks: int
    """Different blocks in the trace: no larger cache finds more."""
    prompt_blocks: int
    """Ids of all prompts."""
    prompt_tokens: int
    """Tokens of all prompts, those without an id included."""
    lru_sizes: NDArray[np.int64]
    """Cache sizes in blocks, ascending from 1."""
    lru_hit_blocks: NDArray[np.int64]
    lru_hit_tokens: NDArray[np.int64]
    min_sizes: NDArray[np.int64]
    """The same for Belady's MIN."""
    min_hit_blocks: NDArray[np.int64]
    min_hit_tokens: NDArray[np.int64]


def hit_rate_curve(
    trace: Trace,
    lru_sizes: Iterable[int] | None = None,
    min_sizes: Iterable[int] | None = None,
) -> HitRateCurve:
    """Compute both curves for a trace with ``hash_ids``.

    Parameters
    ----------
    trace : Trace
    lru_sizes, min_sizes : iterable of int, optional
        Cache sizes in blocks, ascending, each at least 1. By default a choice of sizes
        from 1 to the number of different blocks that grow by a constant factor.

    Raises
    ------
    ValueError
        The trace has no ``hash_ids``.
    """
    if trace.hash_ids is None:
        raise ValueError(f"trace {trace.source!r} has no hash_ids, which a hit rate needs")
    paths, unique = _paths(trace.hash_ids)
    block_size = trace.hash_block_size
    tokens = [
        np.diff(np.minimum(np.arange(len(path) + 1) * block_size, n_tokens))
        for path, n_tokens in zip(paths, trace.prompt_tokens.tolist(), strict=True)
    ]
    lru = _spread(unique, LRU_POINTS) if lru_sizes is None else np.array([*lru_sizes], np.int64)
    best = _spread(unique, MIN_POINTS) if min_sizes is None else np.array([*min_sizes], np.int64)
    lru_blocks, lru_tokens = _lru(paths, tokens, unique)
    min_blocks, min_tokens = _belady(paths, tokens, unique, best.tolist())
    within = np.minimum(lru, unique)
    return HitRateCurve(
        block_size=block_size,
        unique_blocks=unique,
        prompt_blocks=sum(map(len, paths)),
        prompt_tokens=int(trace.prompt_tokens.sum()),
        lru_sizes=lru,
        lru_hit_blocks=lru_blocks[within],
        lru_hit_tokens=lru_tokens[within],
        min_sizes=best,
        min_hit_blocks=min_blocks,
        min_hit_tokens=min_tokens,
    )


def _spread(largest: int, points: int) -> NDArray[np.int64]:
    return np.unique(np.geomspace(1, max(largest, 1), points).round().astype(np.int64))


def _paths(hash_ids: Sequence[NDArray[np.int64]]) -> tuple[list[NDArray[np.int64]], int]:
    """Give blocks numbers, equal ones to equal ids after equal ids; and say how many."""
    numbers: dict[tuple[int, int], int] = {}
    paths = []
    for ids in hash_ids:
        number = -1
        path = []
        for block_id in ids.tolist():
            number = numbers.setdefault((number, block_id), len(numbers))
            path.append(number)
        paths.append(np.array(path, np.int64))
    return paths, len(numbers)


def _lru(
    paths: list[NDArray[np.int64]], tokens: list[NDArray[np.int64]], unique: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hit blocks and hit tokens of each cache size from 0 to ``unique``."""
    # Entry d: blocks (tokens) found at place d of the list, so by d + 1 blocks or more.
    found_blocks = np.zeros(unique + 1, np.int64)
    found_tokens = np.zeros(unique + 1, np.int64)
    # The request that used a block last.
    last_user = np.full(unique, -1, np.int64)
    # Of the path of a request, the blocks that nobody used since begin at this depth.
    kept_from = [0] * len(paths)
    kept = _Sums(len(paths))
    for request, path in enumerate(paths):
        for start, stop in _runs(last_user[path]):
            user = int(last_user[path[start]])
            if user < 0:
                break
            # Ahead in the list: what later requests used last, the ``start`` blocks above
            # among it that have been moved already, and what this user used after it.
            place = kept.after(user) + start + start - kept_from[user]
            found_blocks[place : place + stop - start] += 1
            found_tokens[place : place + stop - start] += tokens[request][start:stop]
            kept_from[user] = stop
            kept.add(user, start - stop)
        last_user[path] = request
        kept.add(request, len(path))
    return (
        np.concatenate(([0], np.cumsum(found_blocks[:unique]))),
        np.concatenate(([0], np.cumsum(found_tokens[:unique]))),
    )


def _belady(
    paths: list[NDArray[np.int64]],
    tokens: list[NDArray[np.int64]],
    unique: int,
    sizes: list[int],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hit blocks and hit tokens of each of ``sizes`` under Belady's MIN."""
    never = len(paths)
    next_user = np.full(unique, never, np.int64)
    # For each request: (the next user, how many blocks of the path), from the start down.
    stretches: list[list[tuple[int, int]]] = []
    for request in reversed(range(len(paths))):
        path = paths[request]
        users = next_user[path]
        runs = [(int(users[start]), stop - start) for start, stop in _runs(users)]
        stretches.append([run for run in runs if run[0] < never])
        next_user[path] = request
    stretches.reverse()

    up_to = [np.concatenate(([0], np.cumsum(counts))).tolist() for counts in tokens]
    hit_blocks, hit_tokens = [], []
    for size in sizes:
        # Cached blocks by their next user. They are the beginning of its path by then:
        # of blocks that are needed at once, the deepest goes first.
        cached = [0] * len(paths)
        latest: list[int] = []
        total = blocks = n_tokens = 0
        for request, runs in enumerate(stretches):
            hits = cached[request]
            blocks += hits
            n_tokens += up_to[request][hits]
            total -= hits
            for user, length in runs:
                if not cached[user]:
                    heappush(latest, -user)
                cached[user] += length
                total += length
            while total > size:
                user = -latest[0]
                leaving = min(cached[user], total - size)
                cached[user] -= leaving
                total -= leaving
                if not cached[user]:
                    heappop(latest)
        hit_blocks.append(blocks)
        hit_tokens.append(n_tokens)
    return np.array(hit_blocks, np.int64), np.array(hit_tokens, np.int64)


def _runs(values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Start and stop of each run of equal values."""
    if not len(values):
        return []
    starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
    return list(pairwise([*starts, len(values)]))


class _Sums:
    """Counts by request whose sum over a range takes O(log n) (Fenwick, 1994)."""

    def __init__(self, length: int) -> None:
        self._tree = [0] * (length + 1)
        self._total = 0

    def add(self, index: int, count: int) -> None:
        self._total += count
        index += 1
        while index < len(self._tree):
            self._tree[index] += count
            index += index & -index

    def after(self, index: int) -> int:
        """Sum of the counts behind ``index``."""
        index += 1
        up_to = 0
        while index:
            up_to += self._tree[index]
            index -= index & -index
        return self._total - up_to
