"""The physical blocks: free list, ref counts, idle lists. Layout: ``pool.pxd``."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t

from weakref import ref as weak_reference

import numpy as np

from kvcore._arguments cimport integer, items
from kvcore._arrays cimport int32_data, int32_zeros, int64_data, int64_zeros

from kvcore.errors import InvariantError, OutOfBlocks

cnp.import_array()

__all__ = ["BlockPool", "EvictionPolicy"]

cdef enum:
    PORTION = 64  # blocks that evict() evicts at a time
    MAX_LEVELS = 128
    MAX_BLOCKS = 2147483647 - MAX_LEVELS  # the idle lists' sentinels are the ids after the last


@cython.no_gc_clear  # the pool calls it as long as it has blocks to give back
cdef class EvictionPolicy:
    """Decides in which order evictable blocks go: the base of those in ``kvcore.eviction``.

    A pool without one evicts the least recently released block first. A policy puts each
    block that becomes evictable into one of its levels; within a level the least recently
    released goes first, and the lowest level that has a block goes before all others. Its
    functions are C, called in the middle of operations that cannot fail (``eviction_t``
    in ``pool.pxd``): subclass it in Cython.

    A policy object serves one pool.
    """

    cdef int attach(self, BlockPool pool) except -1:
        """Make its state for a pool, whose size is known. Extended by subclasses."""
        if self.pool is not None:
            raise ValueError(f"eviction {self!r} serves another pool already")
        self.pool = weak_reference(pool)
        self.num_levels = max(self.num_levels, 1)
        return 0

    cdef BlockPool attached_to(self):
        """The pool that it serves, or a ValueError."""
        pool = None if self.pool is None else self.pool()
        if pool is None:
            raise ValueError(f"{self!r} serves no pool")
        return pool

    cdef int check(self) except -1:
        """For ``BlockPool.check``: verify its state, or raise ``InvariantError``."""
        return 0

    def __repr__(self):
        return f"{type(self).__name__}()"


@cython.final
@cython.no_gc_clear  # managers give blocks back when they die, in a cycle with it too
cdef class BlockPool:
    """The physical blocks: who is free, who is held how often, who may be evicted.

    Every block is in exactly one state:

    ========== ============================================================
    used       its ref count is above 0
    evictable  ref count 0, but its content was marked with ``keep``
    free       ref count 0, content worthless
    ========== ============================================================

    ``free + evictable + used == num_blocks``. A fresh pool hands out 0, 1, 2, …;
    freed blocks go to the back and come out oldest first; evictable blocks are
    taken only when no free one is left, least recently released first or as an
    eviction policy says.

    Managers hold blocks through their tables. A reference that Python code takes
    here itself (``take``, ``retain``) is a *pin*: the pool remembers how many pins
    a block has, so ``release`` can only give back what was taken here and never a
    table's reference.

    Parameters
    ----------
    num_blocks : int
        At least 1.
    eviction : EvictionPolicy, optional
        In which order evictable blocks go. Default: least recently released first.

    Raises
    ------
    TypeError, ValueError
        ``num_blocks`` is no integer, or out of range; ``eviction`` is no policy, or
        another pool's.
    """

    def __cinit__(self, num_blocks, *, eviction=None):
        cdef int32_t count = integer(num_blocks, "num_blocks", 1, MAX_BLOCKS)
        cdef int32_t block
        self.ref_array = int32_zeros(count)
        self.ring_array = int32_zeros(count)
        self.holders = []
        self.state.num_blocks = count
        self.state.num_free = count
        self.state.ref = int32_data(self.ref_array)
        self.state.ring = int32_data(self.ring_array)
        for block in range(count):
            self.state.ring[block] = block
        self.state.num_levels = 1
        if eviction is not None:
            if not isinstance(eviction, EvictionPolicy):
                raise TypeError(f"eviction must be an EvictionPolicy, got {eviction!r}")
            self.eviction = eviction
            self.eviction.attach(self)
            self.state.eviction = self.eviction.functions
            self.state.num_levels = self.eviction.num_levels

    cdef int allocate_links(self) except -1:
        cdef int32_t first = self.state.num_blocks
        cdef cnp.npy_intp size = <cnp.npy_intp>first + self.state.num_levels
        cdef cnp.ndarray after, before
        cdef int32_t block, sentinel
        if self.state.next != NULL:
            return 0
        after = int32_zeros(size)
        before = int32_zeros(size)
        self.link_arrays = (after, before)
        self.state.previous = int32_data(before)
        self.state.next = int32_data(after)
        for block in range(first):
            self.state.next[block] = UNMARKED
        for sentinel in range(first, first + self.state.num_levels):
            self.state.next[sentinel] = self.state.previous[sentinel] = sentinel
        return 0

    cdef int allocate_pins(self) except -1:
        self.pin_array = int32_zeros(self.state.num_blocks)
        self.pin_counts = int32_data(self.pin_array)
        return 0

    @property
    def index(self):
        """The ``PrefixIndex`` on this pool, or None."""
        return self.prefix_index

    @property
    def num_blocks(self):
        return self.state.num_blocks

    @property
    def num_free(self):
        return self.state.num_free

    @property
    def num_evictable(self):
        return self.state.num_evictable

    @property
    def num_used(self):
        with cython.critical_section(self):
            return self.state.num_blocks - available_blocks(&self.state)

    @property
    def ref(self):
        """Ref counts, int32 ``(num_blocks,)``: a live, read-only view without a copy."""
        return self.ref_array

    def __repr__(self):
        return (
            f"BlockPool(num_blocks={self.num_blocks}, used={self.num_used}, "
            f"evictable={self.num_evictable}, free={self.num_free})"
        )

    @cython.critical_section
    def take(self):
        """Take one block, with one pin on it. O(1).

        Raises ``OutOfBlocks`` when no free and no evictable block is left.
        """
        cdef int32_t block
        if self.pin_counts == NULL:
            self.allocate_pins()
        if available_blocks(&self.state) == 0:
            raise OutOfBlocks(1, 0)
        block = take_block(&self.state)
        self.pin_counts[block] = 1
        return block

    @cython.critical_section
    def take_many(self, count, /):
        """Take ``count`` blocks with one pin each, all or nothing. O(count).

        Returns a fresh int32 array ``(count,)``. Raises ``OutOfBlocks``, or
        ``ValueError`` for a negative count; then nothing was taken.
        """
        cdef cnp.npy_intp number = integer(count, "count", 0, MAX_BLOCKS)
        cdef cnp.npy_intp i
        cdef int32_t *out
        if number > available_blocks(&self.state):
            raise OutOfBlocks(number, available_blocks(&self.state))
        if self.pin_counts == NULL:
            self.allocate_pins()
        cdef cnp.ndarray blocks = cnp.PyArray_EMPTY(1, &number, cnp.NPY_INT32, 0)
        out = int32_data(blocks)
        take_blocks(&self.state, <int32_t>number, out)
        for i in range(number):
            self.pin_counts[out[i]] = 1
        return blocks

    @cython.critical_section
    def retain(self, block, /):
        """Add a pin to a used block, or revive an evictable one with it. O(1).

        ``ValueError``: out of range, or the block is free.
        """
        cdef int32_t b = integer(block, "block", 0, self.state.num_blocks - 1)
        if self.pin_counts == NULL:
            self.allocate_pins()
        if is_evictable(&self.state, b):
            unlink_evictable(&self.state, b, KEPT)
        elif self.state.ref[b] == 0:
            raise ValueError(f"block {b} is free: there is nothing to hold")
        self.state.ref[b] += 1
        self.pin_counts[b] += 1

    @cython.critical_section
    def release(self, block, /):
        """Drop one pin. O(1).

        The block becomes free, or evictable if it was marked with ``keep``, once
        nobody holds it. ``ValueError``: out of range, or it has no pin.
        """
        cdef int32_t b = integer(block, "block", 0, self.state.num_blocks - 1)
        if self.pin_counts == NULL or self.pin_counts[b] == 0:
            raise ValueError(f"block {b} has no pin to release")
        self.pin_counts[b] -= 1
        release_block(&self.state, b)

    @cython.critical_section
    def release_many(self, blocks, /):
        """Drop one pin for each entry of ``blocks``, in order, all or nothing. O(len).

        ``blocks`` is an int32 array or a sequence of integers. A block may be
        listed as often as it has pins; one time more is a ``ValueError`` naming it.
        """
        cdef cnp.ndarray listed = block_ids(blocks, self.state.num_blocks)
        cdef int32_t *ids = int32_data(listed)
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(listed)
        cdef cnp.npy_intp i, j
        if count and self.pin_counts == NULL:
            self.allocate_pins()
        for i in range(count):
            if self.pin_counts[ids[i]] == 0:
                for j in range(i):
                    self.pin_counts[ids[j]] += 1
                raise ValueError(f"blocks: entry {i}, block {ids[i]}, has no pin left to release")
            self.pin_counts[ids[i]] -= 1
        for i in range(count):
            release_block(&self.state, ids[i])

    @cython.critical_section
    def pins(self, block, /):
        """How many pins the block has."""
        cdef int32_t b = integer(block, "block", 0, self.state.num_blocks - 1)
        return 0 if self.pin_counts == NULL else self.pin_counts[b]

    @cython.critical_section
    def keep(self, block, /):
        """Mark a used block's content as wanted: it will become evictable, not free.

        ``ValueError``: out of range, or not used.
        """
        cdef int32_t b = integer(block, "block", 0, self.state.num_blocks - 1)
        if self.state.ref[b] == 0:
            raise ValueError(f"block {b} is not used: it has no content to keep")
        self.allocate_links()
        self.state.next[b] = KEPT

    @cython.critical_section
    def forget(self, block, /):
        """Undo ``keep``; an evictable block becomes free at once. O(1).

        What the prefix index knew of its content is dropped. Does nothing to a block
        without the mark. ``ValueError``: out of range.
        """
        cdef int32_t b = integer(block, "block", 0, self.state.num_blocks - 1)
        if is_evictable(&self.state, b):
            unlink_evictable(&self.state, b, UNMARKED)
            lose_content(&self.state, b)
            push_free(&self.state, b)
        elif self.state.next != NULL and self.state.next[b] == KEPT:
            lose_content(&self.state, b)

    @cython.critical_section
    def evict(self, count, /):
        """Let up to ``count`` evictable blocks become free, next victim first.

        Returns how many did. O(count).
        """
        cdef int64_t wanted = integer(count, "count", 0, MAX_BLOCKS)
        cdef int32_t number = <int32_t>min(wanted, self.state.num_evictable)
        cdef int32_t[PORTION] evicted
        cdef int32_t done = 0, portion, i
        while done < number:
            portion = min(number - done, PORTION)
            evict_blocks(&self.state, portion, evicted)
            for i in range(portion):
                push_free(&self.state, evicted[i])
            done += portion
        return number

    @cython.critical_section
    def is_kept(self, block, /):
        """Whether the block carries the mark of ``keep``."""
        cdef int32_t b = integer(block, "block", 0, self.state.num_blocks - 1)
        return self.state.next != NULL and self.state.next[b] != UNMARKED

    @cython.critical_section
    def free_blocks(self):
        """The free blocks in the order in which they will be taken: a copy. O(free)."""
        cdef cnp.npy_intp count = self.state.num_free
        cdef cnp.ndarray blocks = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        cdef int32_t i
        for i in range(self.state.num_free):
            int32_data(blocks)[i] = self.state.ring[ring_index(&self.state, i)]
        return blocks

    @cython.critical_section
    def evictable_blocks(self):
        """The evictable blocks, next victim first: a copy. O(evictable)."""
        cdef cnp.npy_intp count = self.state.num_evictable
        cdef cnp.ndarray blocks = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        cdef int32_t n = self.state.num_blocks
        cdef int32_t level, block
        cdef cnp.npy_intp i = 0
        for level in range(self.state.num_levels if count else 0):
            block = first_of(&self.state, level)
            while block < n:
                int32_data(blocks)[i] = block
                i += 1
                block = self.state.next[block]
        return blocks

    @cython.critical_section
    def check(self):
        """Verify the whole pool and every manager on it, or raise ``InvariantError``.

        O(num_blocks + table cells).
        """
        self.check_references()
        self.check_places()
        if self.prefix_index is not None:
            self.prefix_index._check()
        if self.eviction is not None:
            self.eviction.check()

    cdef int check_references(self) except -1:
        """I1: every ref count is the number of references that somebody holds."""
        # No Python code may run between the first read and the verdict: another thread
        # would change the state under it. Hence loops in C over everything.
        cdef cnp.ndarray held_array = int64_zeros(self.state.num_blocks)
        cdef int64_t *held = int64_data(held_array)
        cdef int32_t block
        for reference in self.holders:
            holder = reference()
            if holder is not None:
                holder._count_references(held_array)
        for block in range(self.state.num_blocks):
            if self.pin_counts != NULL:
                if self.pin_counts[block] < 0:
                    raise InvariantError("I4", block, f"{self.pin_counts[block]} pins")
                held[block] += self.pin_counts[block]
            if held[block] != self.state.ref[block]:
                raise InvariantError(
                    "I1", block, f"ref count {self.state.ref[block]}, holders {held[block]}"
                )
        return 0

    cdef int check_places(self) except -1:
        """I4: every block is in exactly the place that its ref count and mark say."""
        cdef pool_t *pool = &self.state
        cdef int32_t n = pool.num_blocks
        cdef cnp.ndarray listed_array = int32_zeros(n)
        cdef int32_t *listed = int32_data(listed_array)
        cdef int32_t i, block, before, level, evictable = 0
        if not (
            0 <= pool.num_free <= n
            and 0 <= pool.num_evictable <= n - pool.num_free
            and 0 <= pool.head < n
        ):
            raise InvariantError(
                "I4", None, f"{pool.num_free} free and {pool.num_evictable} evictable of {n}"
            )
        for i in range(pool.num_free):
            block = pool.ring[ring_index(pool, i)]
            if not 0 <= block < n or listed[block]:
                raise InvariantError("I4", block, "out of range or twice in the free list")
            if pool.next != NULL and pool.next[block] != UNMARKED:
                raise InvariantError("I4", block, "in the free list though its content is kept")
            listed[block] = True
        for level in range(pool.num_levels if pool.next != NULL else 0):
            before = n + level
            while pool.next[before] != n + level:
                block = pool.next[before]
                if not 0 <= block < n or listed[block]:
                    raise InvariantError("I4", block, "out of range or in two lists")
                if pool.previous[block] != before:
                    raise InvariantError("I4", block, "the links of the idle list disagree")
                if level < pool.lowest:
                    raise InvariantError("I4", block, f"idle at the empty level {level}")
                listed[block] = True
                evictable += 1
                before = block
            if pool.previous[n + level] != before:
                raise InvariantError("I4", None, f"the idle list of level {level} is not closed")
        if evictable != pool.num_evictable:
            raise InvariantError(
                "I4", None, f"{evictable} blocks in idle lists, {pool.num_evictable} counted"
            )
        for block in range(n):
            if listed[block] != (pool.ref[block] == 0):
                raise InvariantError(
                    "I4", block, f"ref count {pool.ref[block]}, but "
                    f"{'in' if listed[block] else 'not in'} a list of idle blocks"
                )
        return 0


cdef cnp.ndarray block_ids(blocks, int32_t num_blocks):
    """``blocks`` as a contiguous int32 array of ids in range, or an error."""
    if not isinstance(blocks, np.ndarray):
        blocks = np.array([
            integer(block, "blocks: a block", 0, num_blocks - 1)
            for block in items(blocks, "blocks")
        ], np.int32)
    if blocks.ndim != 1 or blocks.dtype.kind not in "iu":
        raise TypeError(
            f"blocks must be a 1-D sequence of integers, got {blocks.dtype} "
            f"of shape {blocks.shape}"
        )
    for bound in (blocks.min(), blocks.max()) if blocks.size else ():
        integer(bound, "blocks: a block", 0, num_blocks - 1)
    return np.ascontiguousarray(blocks, np.int32)
