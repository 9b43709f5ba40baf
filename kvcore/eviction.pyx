"""In which order evictable blocks go. The protocol is ``eviction_t`` in ``pool.pxd``.

A pool without a policy evicts the least recently released block, tails before heads,
since sequences release their last block first. On traces of real services nothing simple
is far better; ``docs/hit-rates.md`` has the numbers.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t

from typing import NamedTuple

from kvcore._arguments cimport integer, number
from kvcore._arrays cimport aligned_zeros, int32_data, int32_zeros, int64_data, int64_zeros
from kvcore.pool cimport BlockPool, EvictionPolicy, first_of, link_last, pool_t, unlink

from kvcore.errors import InvariantError

cnp.import_array()

__all__ = ["LRU", "Retention", "RetentionPriority", "SegmentedLRU"]

cdef enum:
    PROBATION = 0
    PROTECTED = 1
    NUM_PRIORITIES = 101
    DEFAULT_PRIORITY = 35


cdef inline cnp.ndarray bytes_zeros(cnp.npy_intp count):
    return aligned_zeros(1, &count, cnp.NPY_UINT8, 1)


cdef inline cnp.ndarray doubles_zeros(cnp.npy_intp count):
    return aligned_zeros(1, &count, cnp.NPY_FLOAT64, sizeof(double))


class LRU(EvictionPolicy):
    """Least recently released first: what a pool does without a policy."""


# ---------------------------------------------------------------- segmented LRU


cdef void enter_segment(void *state, pool_t *pool, int32_t block) noexcept nogil:
    cdef segments_t *segments = <segments_t *>state
    cdef int32_t oldest
    segments.is_protected[block] = segments.was_hit[block]
    segments.num_protected += segments.was_hit[block]
    link_last(pool, block, PROTECTED if segments.was_hit[block] else PROBATION)
    # The block is counted in num_evictable already.
    while segments.num_protected > segments.share * pool.num_evictable:
        oldest = first_of(pool, PROTECTED)
        unlink(pool, oldest)
        link_last(pool, oldest, PROBATION)
        segments.was_hit[oldest] = segments.is_protected[oldest] = False
        segments.num_protected -= 1


cdef void leave_segment(void *state, pool_t *pool, int32_t block) noexcept nogil:
    cdef segments_t *segments = <segments_t *>state
    segments.num_protected -= segments.is_protected[block]
    segments.is_protected[block] = False


cdef void hit_segment(void *state, int32_t block) noexcept nogil:
    (<segments_t *>state).was_hit[block] = True


cdef void lose_segment(void *state, int32_t block) noexcept nogil:
    (<segments_t *>state).was_hit[block] = False


@cython.no_gc_clear
cdef class SegmentedLRU(EvictionPolicy):
    """Blocks that were hit outlive those that never were, as long as they are few.

    Two lists, each least recently released first: *probation*, which goes first, and
    *protected*, for blocks that a prefix match has used. When the protected ones are
    more than their share of the evictable blocks, the oldest of them move to the end of
    probation and must be hit again. So a scan of prompts that never return cannot drive
    out what others come back to. O(1) amortised for each release.

    After Karedla, Love and Wherry, "Caching strategies to improve disk system
    performance", IEEE Computer 27(3), 1994; here the share is of what can be evicted at
    the moment, since running sequences hold a part of the pool that changes.

    Parameters
    ----------
    protected : float
        Largest share of the evictable blocks that is protected, in [0, 1). 0 is plain
        LRU. The default does best over the traces of ``docs/hit-rates.md``; large shares
        keep stale prefixes and do worse than LRU.
    """

    def __cinit__(self, protected=0.25):
        cdef double share = number(protected, "protected")
        if not 0.0 <= share < 1.0:
            raise ValueError(f"protected must be at least 0 and below 1, got {protected!r}")
        self.protected = share
        self.num_levels = 2

    cdef int attach(self, BlockPool pool) except -1:
        cdef int32_t num_blocks = pool.state.num_blocks
        EvictionPolicy.attach(self, pool)
        cdef cnp.ndarray was_hit = bytes_zeros(num_blocks)
        cdef cnp.ndarray is_protected = bytes_zeros(num_blocks)
        self.arrays = (was_hit, is_protected)
        self.state.was_hit = <uint8_t *>cnp.PyArray_DATA(was_hit)
        self.state.is_protected = <uint8_t *>cnp.PyArray_DATA(is_protected)
        self.state.share = self.protected
        self.functions.state = &self.state
        self.functions.enter = enter_segment
        self.functions.leave = leave_segment
        self.functions.hit = hit_segment
        self.functions.lose = lose_segment
        return 0

    def __repr__(self):
        return f"SegmentedLRU(protected={self.protected})"

    cdef int check(self) except -1:
        cdef const pool_t *pool = &self.attached_to().state
        cdef int64_t counted = 0
        cdef int32_t block, level
        for level in range(2 if pool.next != NULL else 0):
            block = first_of(pool, level)
            while block < pool.num_blocks:
                if self.state.is_protected[block] != level:
                    raise InvariantError("I4", block, f"idle at level {level} by mistake")
                counted += level
                block = pool.next[block]
        if counted != self.state.num_protected:
            raise InvariantError(
                "I4", None, f"{counted} blocks are protected, {self.state.num_protected} counted"
            )
        return 0


# ---------------------------------------------------------------- retention priorities


class Retention(NamedTuple):
    """How long the blocks of some tokens are worth keeping.

    A block takes the range that its first token is in.

    Attributes
    ----------
    start : int
        First token of the range.
    stop : int or None
        The token after its last; None: to the end, generated tokens included.
    priority : int
        0 to 100; the lowest goes first.
    duration : float, optional
        How long a block keeps the priority after its last holder left. Default: always.
    """

    start: int
    stop: int | None
    priority: int
    duration: float | None = None


cdef inline void place(retention_t *state, int32_t where, int32_t block) noexcept nogil:
    state.heap[where] = block
    state.places[block] = where


cdef inline bint ends_before(
    const retention_t *state, int32_t one, int32_t other
) noexcept nogil:
    """Blocks whose time ends together go in the order in which they became idle."""
    if state.ends[one] != state.ends[other]:
        return state.ends[one] < state.ends[other]
    return state.entries[one] < state.entries[other]


cdef void sift(retention_t *state, int32_t where) noexcept nogil:
    """Move the block at ``where`` to its place in the heap."""
    cdef int32_t block = state.heap[where]
    cdef int32_t other
    while where > 0 and ends_before(state, block, state.heap[(where - 1) // 2]):
        place(state, where, state.heap[(where - 1) // 2])
        where = (where - 1) // 2
    while 2 * where + 1 < state.num_timed:
        other = 2 * where + 1
        if other + 1 < state.num_timed and ends_before(
            state, state.heap[other + 1], state.heap[other]
        ):
            other += 1
        if not ends_before(state, state.heap[other], block):
            break
        place(state, where, state.heap[other])
        where = other
    place(state, where, block)


cdef void stop_timer(retention_t *state, int32_t block) noexcept nogil:
    cdef int32_t where = state.places[block]
    cdef int32_t last
    if where < 0:
        return
    state.places[block] = -1
    state.num_timed -= 1
    last = state.heap[state.num_timed]
    if last != block:
        place(state, where, last)
        sift(state, where)


cdef void enter_priority(void *state, pool_t *pool, int32_t block) noexcept nogil:
    cdef retention_t *retention = <retention_t *>state
    link_last(pool, block, retention.priorities[block])
    if (
        retention.durations[block] >= 0.0
        and retention.priorities[block] != retention.default_priority
    ):
        retention.ends[block] = retention.now + retention.durations[block]
        retention.num_entries += 1
        retention.entries[block] = retention.num_entries
        retention.num_timed += 1
        place(retention, retention.num_timed - 1, block)
        sift(retention, retention.num_timed - 1)


cdef void leave_priority(void *state, pool_t *pool, int32_t block) noexcept nogil:
    stop_timer(<retention_t *>state, block)


cdef void lose_priority(void *state, int32_t block) noexcept nogil:
    cdef retention_t *retention = <retention_t *>state
    retention.priorities[block] = retention.default_priority
    retention.durations[block] = -1.0


@cython.no_gc_clear
cdef class RetentionPriority(EvictionPolicy):
    """Blocks go by priority, the lowest first; within one, least recently released first.

    Priorities come from the ``retention`` ranges of ``BlockManager.allocate``. One that
    has a duration falls back to the default, behind all others there, when it has been
    idle that long; a hit stops the clock. O(1) for each release and eviction, O(log n)
    for those with a duration.

    The clock is the caller's: ``advance`` tells the time, in any unit. So all ranks of
    a model that make the same calls evict the same blocks.

    Parameters
    ----------
    default : int
        Priority of blocks in no range, 0 to 100.
    """

    def __cinit__(self, default=DEFAULT_PRIORITY):
        self.state.default_priority = integer(default, "default", 0, NUM_PRIORITIES - 1)
        self.num_levels = NUM_PRIORITIES

    cdef int attach(self, BlockPool pool) except -1:
        cdef int32_t num_blocks = pool.state.num_blocks
        cdef int32_t block
        EvictionPolicy.attach(self, pool)
        cdef cnp.ndarray priorities = bytes_zeros(num_blocks)
        cdef cnp.ndarray durations = doubles_zeros(num_blocks)
        cdef cnp.ndarray ends = doubles_zeros(num_blocks)
        cdef cnp.ndarray heap = int32_zeros(num_blocks)
        cdef cnp.ndarray places = int32_zeros(num_blocks)
        cdef cnp.ndarray entries = int64_zeros(num_blocks)
        self.arrays = (priorities, durations, ends, heap, places, entries)
        self.state.entries = int64_data(entries)
        self.state.priorities = <uint8_t *>cnp.PyArray_DATA(priorities)
        self.state.durations = <double *>cnp.PyArray_DATA(durations)
        self.state.ends = <double *>cnp.PyArray_DATA(ends)
        self.state.heap = int32_data(heap)
        self.state.places = int32_data(places)
        for block in range(num_blocks):
            self.state.places[block] = -1
            lose_priority(&self.state, block)
        self.functions.state = &self.state
        self.functions.enter = enter_priority
        self.functions.leave = leave_priority
        self.functions.lose = lose_priority
        return 0

    @property
    def default(self):
        return self.state.default_priority

    @property
    def now(self):
        """What ``advance`` said last; 0 at first."""
        return self.state.now

    def __repr__(self):
        return f"RetentionPriority(default={self.default})"

    cdef void retain(self, int32_t block, uint8_t priority, double duration) noexcept:
        """The priority of a used block from now on; a negative duration: for always."""
        self.state.priorities[block] = priority
        self.state.durations[block] = duration

    def advance(self, now, /):
        """The time is ``now``: priorities whose duration is over fall to the default.

        Returns how many did. O(log n) for each. ``ValueError`` if time ran backwards.
        """
        cdef double time = number(now, "now")
        cdef int32_t block, count = 0
        cdef BlockPool pool = self.attached_to()
        with cython.critical_section(pool):
            if not time >= self.state.now:
                raise ValueError(f"now is {now!r}, but it was {self.state.now} before")
            self.state.now = time
            while self.state.num_timed and self.state.ends[self.state.heap[0]] <= time:
                block = self.state.heap[0]
                stop_timer(&self.state, block)
                lose_priority(&self.state, block)
                unlink(&pool.state, block)
                link_last(&pool.state, block, self.state.default_priority)
                count += 1
        return count

    cdef int check(self) except -1:
        cdef const pool_t *pool = &self.attached_to().state
        cdef int32_t block, level, place, timed = 0
        for level in range(self.num_levels if pool.next != NULL else 0):
            block = first_of(pool, level)
            while block < pool.num_blocks:
                if self.state.priorities[block] != level:
                    raise InvariantError(
                        "I4", block, f"of priority {self.state.priorities[block]} at level {level}"
                    )
                timed += self.state.places[block] >= 0
                block = pool.next[block]
        if timed != self.state.num_timed:
            raise InvariantError("I4", None, f"{timed} timers, {self.state.num_timed} counted")
        for place in range(timed):
            block = self.state.heap[place]
            if self.state.places[block] != place or (
                place and ends_before(&self.state, block, self.state.heap[(place - 1) // 2])
            ):
                raise InvariantError("I4", block, "its timer is out of order")
        return 0
