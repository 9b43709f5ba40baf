# Which blocks hold which content: a hash table over the blocks of a pool.
#
#   records   one for each block: a record_t and then its tokens, as far as they are known,
#             padded to whole cache lines: a candidate costs one page and two lines
#   buckets   int32[2**k], the first block of each bucket; a bucket is a list through the
#             records, linked both ways, NOWHERE at its ends
#
# A block has an identity <=> the uid of its record is above 0. Then it is full, stands in
# its bucket, carries the pool's mark KEPT and is never written. Its identity is (parent,
# key, tokens): the uid of the identity before it, what else it depends on, and its own
# tokens. Equal identities have equal uids, and a uid is never given out twice; so by
# induction a uid stands for one content from the root on. The hash only finds candidates.
#
# Copies of one content stand next to each other in their bucket. A match finds the first.
#
# A block without identity may have a record too: of the tokens that its sequence will
# publish once they are settled.

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kvcore._index_hash cimport hash_key_t
from kvcore.pool cimport BlockPool, pool_t

cdef enum:
    CACHE_LINE = 64
    NOWHERE = -1
    BARRED = -1       # parent of a block that lost its identity and may not get one again
    UNKNOWN_KEY = -1  # a key that no block has


cdef struct record_t:
    uint64_t hash    # of the chain up to this block; 0 while it is not computed
    int64_t uid      # 0: no identity
    int64_t parent   # uid of the block before, 0 at the root; or BARRED
    int32_t key      # number of its key; 0: it has none
    int32_t chain    # next block in the bucket
    int32_t before   # the one before it
    int32_t filled   # tokens of the block that are known


# The changes that nobody has drained yet. An entry is a content that was stored
# (parent >= 0), one that was removed (parent == -1), or a clear (uid == 0).
cdef struct log_t:
    bint on
    bint lost        # it overflowed, or has just begun: the next drain tells everything
    int64_t capacity
    int64_t count
    int64_t *uids
    int64_t *parents
    int32_t *keys
    int32_t *tokens


# Finds blocks by their parent and first token, for hits inside a block.
cdef struct siblings_t:
    int32_t *buckets
    int32_t *after
    int32_t *before


cdef struct index_t:
    pool_t *blocks
    int32_t num_blocks
    int32_t block_size
    int64_t stride   # bytes from one record to the next
    char *records
    int32_t *buckets
    uint64_t bucket_mask
    hash_key_t hash_key
    int64_t next_uid
    int32_t num_identities
    int32_t era             # how often everything was forgotten
    int64_t verify_rejects
    int64_t collisions
    int64_t duplicates
    # Keys by number: references from records, rows and log entries, their hashes, and
    # those that lost their last reference since the last new key.
    int32_t *key_references
    uint64_t *key_tweaks
    uint8_t *key_is_idle
    int32_t *idle_keys
    int32_t num_idle_keys
    log_t log
    siblings_t siblings


cdef class PrefixIndex:
    cdef object pool_reference  # weak, since the pool has the index
    cdef readonly int64_t epoch
    cdef index_t state
    cdef tuple arrays, key_arrays, log_arrays, sibling_arrays
    cdef int32_t key_capacity
    cdef dict numbers_by_key
    cdef list keys_by_number
    cdef list free_numbers
    cdef void *spare_memory
    cdef int64_t num_spare_bytes

    cdef void *take_memory(self, int64_t *num_bytes) noexcept
    cdef void give_memory(self, void *memory, int64_t num_bytes) noexcept
    cdef BlockPool alive_pool(self)
    cdef int check_hashes(self) except -1
    cdef int reserve_keys(self, cnp.npy_intp count) except -1
    cdef int drop_idle_keys(self) except -1
    cdef int32_t intern(self, bytes key) except -1
    cdef int resolve_keys(self, Prompt prompt) except -1
    cdef int intern_keys(self, Prompt prompt) except -1
    cdef int allocate_siblings(self) except -1
    cdef int32_t walk(self, Prompt prompt, int32_t limit) noexcept
    cdef void forget_block(self, int32_t block) noexcept
    cdef int64_t forget_path(self, Prompt prompt) except -1
    cdef void forget_all(self) noexcept


cdef class Prompt:
    cdef readonly PrefixIndex index
    cdef void *memory             # what the pointers show
    cdef int64_t num_bytes
    cdef bint is_passing          # made for one call: its memory goes from one to the next
    cdef int32_t num_tokens
    cdef int32_t num_full         # full blocks
    cdef int32_t *tokens
    cdef uint64_t *hashes         # of the chain up to each full block
    cdef int32_t *blocks          # what the last walk found, as far as num_found
    cdef int64_t *uids
    cdef int32_t num_found
    cdef int32_t cut_column       # from here on nothing is matched or published
    cdef int32_t written_in       # 1 + the era in which a row wrote it, or 0
    cdef bytes namespace_key
    cdef int32_t namespace_number
    # Keys of columns, ascending; and their numbers in the index, true from
    # resolve_keys or intern_keys until the end of the call.
    cdef list keys
    cdef int32_t num_keys
    cdef int32_t *key_columns
    cdef int32_t *key_numbers
    cdef uint64_t *key_tweaks
    cdef tuple key_arrays

    cdef int allocate(self, int64_t num_tokens) except -1
    cdef int set_keys(self, bytes root, dict keys) except -1
    cdef void hash_blocks(self) noexcept nogil


cdef Prompt make_prompt(PrefixIndex index, tokens, namespace, media, bint is_passing)


cdef inline record_t *record_of(const index_t *index, int32_t block) noexcept nogil:
    return <record_t *>(index.records + block * index.stride)


cdef inline int32_t *tokens_of(const index_t *index, int32_t block) noexcept nogil:
    return <int32_t *>(record_of(index, block) + 1)


cdef inline void hold_key(index_t *index, int32_t key) noexcept nogil:
    if key:
        index.key_references[key] += 1


cdef inline void drop_key(index_t *index, int32_t key) noexcept nogil:
    if key:
        index.key_references[key] -= 1
        if index.key_references[key] == 0 and not index.key_is_idle[key]:
            index.key_is_idle[key] = True
            index.idle_keys[index.num_idle_keys] = key
            index.num_idle_keys += 1


cdef inline void set_key(index_t *index, int32_t block, int32_t key) noexcept nogil:
    hold_key(index, key)
    drop_key(index, record_of(index, block).key)
    record_of(index, block).key = key


cdef inline void begin_content(index_t *index, int32_t block, int32_t key) noexcept nogil:
    """Nothing is known yet of a block that was just taken. Needs: it has no identity."""
    record_of(index, block).hash = 0
    record_of(index, block).parent = 0
    record_of(index, block).filled = 0
    set_key(index, block, key)


cdef uint64_t hash_of(
    const index_t *index, uint64_t previous, const int32_t *tokens, int32_t key
) noexcept nogil

# The first block that has the content of ``block`` after ``parent``, or NOWHERE. Needs:
# ``block`` is full, its hash computed; it has no identity.
cdef int32_t find_twin(index_t *index, int32_t block, int64_t parent) noexcept nogil

# Gives a block its identity: a new one, or that of ``twin``. Needs: find_twin's, and it
# is used.
cdef void publish(index_t *index, int32_t block, int64_t parent, int32_t twin) noexcept nogil

# Among the children of a content, a block whose tokens begin most like ``tokens``, the
# newest content of such; or NOWHERE. ``*alike`` is set to how many tokens are alike.
# Needs: allocate_siblings.
cdef int32_t find_beginning(
    const index_t *index, int64_t parent, int32_t key, const int32_t *tokens, int32_t count,
    int32_t *alike,
) noexcept nogil
