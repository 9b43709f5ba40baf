# Eviction policies over the levels of a pool. The protocol is eviction_t in pool.pxd.

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t

from kvcore.pool cimport EvictionPolicy, pool_t

cdef struct segments_t:
    uint8_t *was_hit
    uint8_t *is_protected  # while the block is idle
    int64_t num_protected
    double share


cdef class SegmentedLRU(EvictionPolicy):
    cdef segments_t state
    cdef readonly double protected
    cdef tuple arrays


cdef struct retention_t:
    double now
    uint8_t default_priority
    uint8_t *priorities
    double *durations     # how long the priority lasts once nobody holds the block
    # The idle blocks whose priority ends, as a binary heap by the time when it does.
    double *ends
    int64_t *entries      # the order in which they became idle
    int64_t num_entries
    int32_t *heap
    int32_t *places       # of each block in the heap, or -1
    int32_t num_timed


cdef class RetentionPriority(EvictionPolicy):
    cdef retention_t state
    cdef tuple arrays

    cdef void retain(self, int32_t block, uint8_t priority, double duration) noexcept
