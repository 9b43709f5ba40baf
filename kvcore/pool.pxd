# The free list, ref counts and idle list of one pool, and the operations on them.
#
#   ref       int32[n]    holders of each block
#   ring      int32[n]    the free list: a ring of num_free ids that starts at head
#   next, previous
#             int32[n+1]  the idle list: evictable blocks, least recently released
#                         first, linked both ways through the sentinel n. Allocated
#                         at the first keep(), so that a pool without prefix sharing
#                         neither pays for it nor touches it
#
# Block b is free      <=> ref[b] == 0 and b is in the ring
#            evictable <=> ref[b] == 0 and next[b] >= 0
#            used      <=> ref[b] >  0; next[b] == KEPT if it will become evictable
#
# num_free + num_evictable + used == num_blocks.
#
# A ring and not a linked list for the free blocks: taking 512 of them is a copy
# instead of 512 dependent loads, and nothing is ever removed from its middle.
# Evictable blocks are removed from the middle (a prefix hit), hence the links.
#
# The functions are inline so that a manager's loops contain them. They check
# nothing: each states what must hold. They need the GIL, or whatever else keeps
# other threads away from this pool.

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

cdef enum Link:
    UNMARKED = -1
    KEPT = -2

cdef struct pool_t:
    int32_t num_blocks
    int32_t num_free
    int32_t num_evictable
    int32_t head
    int32_t *ref
    int32_t *ring
    int32_t *next
    int32_t *previous


cdef class BlockPool:
    cdef pool_t state
    cdef int32_t *pin_counts
    cdef cnp.ndarray ref_array, ring_array, pin_array
    cdef tuple link_arrays
    cdef list holders  # weak references to the managers on this pool

    cdef int allocate_links(self) except -1
    cdef int allocate_pins(self) except -1
    cdef int check_references(self) except -1
    cdef int check_places(self) except -1


cdef inline int32_t available_blocks(const pool_t *pool) noexcept nogil:
    return pool.num_free + pool.num_evictable


cdef inline int32_t ring_index(const pool_t *pool, int32_t steps) noexcept nogil:
    """The ring position ``steps`` after the head, ``0 <= steps <= num_blocks``."""
    cdef int64_t index = <int64_t>pool.head + steps
    return <int32_t>(index - pool.num_blocks if index >= pool.num_blocks else index)


cdef inline void push_free(pool_t *pool, int32_t block) noexcept nogil:
    """Needs: ref[block] == 0, block in neither list."""
    pool.ring[ring_index(pool, pool.num_free)] = block
    pool.num_free += 1


cdef inline void push_evictable(pool_t *pool, int32_t block) noexcept nogil:
    """Needs: ref[block] == 0, next[block] == KEPT."""
    cdef int32_t sentinel = pool.num_blocks
    cdef int32_t last = pool.previous[sentinel]
    pool.next[last] = block
    pool.previous[block] = last
    pool.next[block] = sentinel
    pool.previous[sentinel] = block
    pool.num_evictable += 1


cdef inline void unlink_evictable(pool_t *pool, int32_t block, Link mark) noexcept nogil:
    """Needs: block is evictable. Leaves it in neither list, with the mark given."""
    cdef int32_t after = pool.next[block]
    cdef int32_t before = pool.previous[block]
    pool.next[before] = after
    pool.previous[after] = before
    pool.next[block] = mark
    pool.num_evictable -= 1


cdef inline bint is_evictable(const pool_t *pool, int32_t block) noexcept nogil:
    return pool.next != NULL and pool.next[block] >= 0


cdef inline int32_t take_block(pool_t *pool) noexcept nogil:
    """The oldest free block, else the least recently released evictable one; ref 1.

    Needs: available_blocks(pool) > 0.
    """
    cdef int32_t block
    if pool.num_free > 0:
        block = pool.ring[pool.head]
        pool.head = ring_index(pool, 1)
        pool.num_free -= 1
    else:
        block = pool.next[pool.num_blocks]
        unlink_evictable(pool, block, UNMARKED)
    pool.ref[block] = 1
    return block


cdef inline void take_blocks(pool_t *pool, int32_t count, int32_t *out) noexcept nogil:
    """``count`` blocks in the order in which take_block would give them.

    Needs: 0 <= count <= available_blocks(pool).
    """
    cdef int32_t from_ring = min(count, pool.num_free)
    cdef int32_t before_wrap = min(from_ring, pool.num_blocks - pool.head)
    cdef int32_t *ref = pool.ref
    cdef int32_t i
    memcpy(out, pool.ring + pool.head, before_wrap * sizeof(int32_t))
    memcpy(out + before_wrap, pool.ring, (from_ring - before_wrap) * sizeof(int32_t))
    pool.head = ring_index(pool, from_ring)
    pool.num_free -= from_ring
    for i in range(from_ring):
        ref[out[i]] = 1
    for i in range(from_ring, count):
        out[i] = take_block(pool)


cdef inline bint release_block(pool_t *pool, int32_t block) noexcept nogil:
    """Drop one reference; true if it was the last. Needs: ref[block] > 0."""
    pool.ref[block] -= 1
    if pool.ref[block] > 0:
        return False
    if pool.next != NULL and pool.next[block] == KEPT:
        push_evictable(pool, block)
    else:
        push_free(pool, block)
    return True


cdef inline int32_t release_blocks_reversed(
    pool_t *pool, const int32_t *blocks, int32_t count
) noexcept nogil:
    """Drop one reference to each block, last first; how many references were the last.

    Needs: each block's ref count is at least its occurrences in ``blocks``.
    """
    cdef int32_t *ref = pool.ref
    cdef int32_t *ring = pool.ring
    cdef int32_t num_blocks = pool.num_blocks
    cdef int32_t tail = ring_index(pool, pool.num_free)
    cdef int32_t freed = 0
    cdef int32_t i, block, left
    if pool.next != NULL:
        for i in range(count - 1, -1, -1):
            freed += release_block(pool, blocks[i])
        return freed
    # Locals, because the compiler must assume that a store into the ring may change
    # num_free. The store at the tail is unconditional: a block that is held leaves at
    # least one slot of the ring empty, and it counts only once the tail moves on.
    for i in range(count - 1, -1, -1):
        block = blocks[i]
        left = ref[block] - 1
        ref[block] = left
        ring[tail] = block
        if left == 0:
            freed += 1
            tail += 1
            if tail == num_blocks:
                tail = 0
    pool.num_free += freed
    return freed
