# The free list, ref counts and idle lists of one pool, and the operations on them.
#
#   ref       int32[n]    holders of each block
#   ring      int32[n]    the free list: a ring of num_free ids that starts at head
#   next, previous
#             int32[n+levels]
#                         the idle lists: evictable blocks, linked both ways through a
#                         sentinel for each level, n + level. The front of the lowest
#                         level that has any goes first. Without an eviction policy
#                         there is one level: least recently released first. Allocated
#                         when first needed, so that a pool without prefix sharing
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

cdef extern from *:
    """
    static inline void kvcore_prefetch(const void *address)
    {
    #if defined(__GNUC__) || defined(__clang__)
        __builtin_prefetch(address);
        /* GCC drops the call of a function that does nothing but prefetch. */
        __asm__ volatile ("");
    #else
        (void)address;
    #endif
    }
    """
    void prefetch "kvcore_prefetch"(const void *address) noexcept nogil

cdef enum:
    AHEAD = 16  # victims whose memory is on its way while others are evicted

cdef enum Link:
    UNMARKED = -1
    KEPT = -2

cdef struct pool_t

# An eviction policy says at which level a block becomes evictable. Its functions run in
# the middle of a commit: they must not fail, and they need no more than O(log n).
cdef struct eviction_t:
    void *state
    # Links a block whose last holder left with link_last(); may move others.
    void (*enter)(void *state, pool_t *pool, int32_t block) noexcept nogil
    # A block is about to be unlinked: it was hit, evicted, or its content is unwanted.
    void (*leave)(void *state, pool_t *pool, int32_t block) noexcept nogil
    # A prefix match took a reference to the block, which is used now.
    void (*hit)(void *state, int32_t block) noexcept nogil
    # The block's content is gone, and with it all that is known of its use.
    void (*lose)(void *state, int32_t block) noexcept nogil


cdef struct pool_t:
    int32_t num_blocks
    int32_t num_free
    int32_t num_evictable
    int32_t head
    int32_t *ref
    int32_t *ring
    int32_t *next
    int32_t *previous
    int32_t num_levels
    int32_t lowest  # no level below it has a block
    eviction_t eviction
    # The prefix index, to be told when a block that it knows is to be reused.
    void *index
    void (*lose)(void *index, int32_t block) noexcept nogil
    # A hint that it will be told of a block soon, or very soon.
    void (*expect_loss)(void *index, int32_t block, bint soon) noexcept nogil


cdef class BlockPool


cdef class EvictionPolicy:
    cdef eviction_t functions
    cdef int32_t num_levels
    cdef object pool  # a weak reference, since the pool has the policy; None before attach

    cdef BlockPool attached_to(self)
    cdef int attach(self, BlockPool pool) except -1
    cdef int check(self) except -1


cdef class BlockPool:
    cdef pool_t state
    cdef int32_t *pin_counts
    cdef cnp.ndarray ref_array, ring_array, pin_array
    cdef tuple link_arrays
    cdef list holders  # weak references to the managers on this pool
    cdef readonly EvictionPolicy eviction
    cdef object prefix_index
    cdef object __weakref__

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


cdef inline void link_last(pool_t *pool, int32_t block, int32_t level) noexcept nogil:
    """Put a block at the end of a level. Needs: it is in no list."""
    cdef int32_t sentinel = pool.num_blocks + level
    cdef int32_t last = pool.previous[sentinel]
    pool.next[last] = block
    pool.previous[block] = last
    pool.next[block] = sentinel
    pool.previous[sentinel] = block
    if level < pool.lowest:
        pool.lowest = level


cdef inline void unlink(pool_t *pool, int32_t block) noexcept nogil:
    """Take a block out of its level. Needs: it is evictable; its link is stale after."""
    cdef int32_t after = pool.next[block]
    cdef int32_t before = pool.previous[block]
    pool.next[before] = after
    pool.previous[after] = before


cdef inline int32_t first_of(const pool_t *pool, int32_t level) noexcept nogil:
    """The block that a level gives up first, or a number from num_blocks on."""
    return pool.next[pool.num_blocks + level]


cdef inline int32_t next_victim(pool_t *pool) noexcept nogil:
    """The evictable block that goes first. Needs: there is one.

    Amortised O(1): ``lowest`` only falls when a block enters below it.
    """
    while first_of(pool, pool.lowest) >= pool.num_blocks:
        pool.lowest += 1
    return first_of(pool, pool.lowest)


cdef inline void push_evictable(pool_t *pool, int32_t block) noexcept nogil:
    """Needs: ref[block] == 0, next[block] == KEPT."""
    pool.num_evictable += 1
    if pool.eviction.enter == NULL:
        link_last(pool, block, 0)
    else:
        pool.eviction.enter(pool.eviction.state, pool, block)


cdef inline void unlink_evictable(pool_t *pool, int32_t block, Link mark) noexcept nogil:
    """Needs: block is evictable. Leaves it in neither list, with the mark given."""
    if pool.eviction.leave != NULL:
        pool.eviction.leave(pool.eviction.state, pool, block)
    unlink(pool, block)
    pool.next[block] = mark
    pool.num_evictable -= 1


cdef inline void lose_content(pool_t *pool, int32_t block) noexcept nogil:
    """The block's content goes: nobody may find it any more. Needs: it is in no list."""
    pool.next[block] = UNMARKED
    if pool.lose != NULL:
        pool.lose(pool.index, block)
    if pool.eviction.lose != NULL:
        pool.eviction.lose(pool.eviction.state, block)


cdef inline int32_t evict_block(pool_t *pool) noexcept nogil:
    """Take the next victim out, its content lost. Needs: num_evictable > 0."""
    cdef int32_t block = next_victim(pool)
    unlink_evictable(pool, block, UNMARKED)
    lose_content(pool, block)
    return block


cdef inline void evict_blocks(pool_t *pool, int32_t count, int32_t *out) noexcept nogil:
    """``count`` times evict_block. Needs: 0 <= count <= num_evictable.

    The victims are a linked list, each a cache miss after the one before. So they are
    found some places ahead, and what else belongs to them comes while others are evicted.
    """
    cdef int32_t[AHEAD] coming
    cdef int32_t num_coming = 0
    cdef int32_t victim, i
    if count == 0:
        return
    victim = next_victim(pool)
    for i in range(count):
        while num_coming < min(i + AHEAD, count) and victim < pool.num_blocks:
            coming[num_coming % AHEAD] = victim
            num_coming += 1
            prefetch(&pool.previous[victim])
            prefetch(&pool.ref[victim])
            if pool.expect_loss != NULL:
                pool.expect_loss(pool.index, victim, False)
            victim = pool.next[victim]
        if pool.expect_loss != NULL and i + AHEAD // 2 < num_coming:
            pool.expect_loss(pool.index, coming[(i + AHEAD // 2) % AHEAD], True)
        out[i] = evict_block(pool)


cdef inline bint is_evictable(const pool_t *pool, int32_t block) noexcept nogil:
    return pool.next != NULL and pool.next[block] >= 0


cdef inline int32_t take_block(pool_t *pool) noexcept nogil:
    """The oldest free block, else the next victim; ref 1.

    Needs: available_blocks(pool) > 0.
    """
    cdef int32_t block
    if pool.num_free > 0:
        block = pool.ring[pool.head]
        pool.head = ring_index(pool, 1)
        pool.num_free -= 1
    else:
        block = evict_block(pool)
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
    if count > from_ring:
        evict_blocks(pool, count - from_ring, out + from_ring)
        for i in range(from_ring, count):
            ref[out[i]] = 1


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
