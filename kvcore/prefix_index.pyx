"""Which blocks hold which content, found by hash and compared in full.

Layout and what an identity is: ``prefix_index.pxd``.
"""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport Py_buffer, PyBuffer_Release
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memcmp, memcpy

from os import urandom
from typing import NamedTuple
from weakref import ref as weak_reference

from kvcore._arguments cimport integer
from kvcore._arrays cimport (
    aligned_zeros, int32_data, int32_zeros, int64_data, int64_zeros, prefer_large_pages,
)
from kvcore._index_hash cimport COMPUTED, HASH_BITS, LOW_61_BITS, hash_block, hash_key_t
from kvcore._token_input cimport bad_token, copy_buffer, copy_list, open_buffer, token_source
from kvcore.pool cimport (
    KEPT, UNMARKED, BlockPool, first_of, is_evictable, lose_content, prefetch, push_free,
    unlink_evictable,
)

from kvcore.errors import InvariantError
from kvcore.identity import block_keys, namespace_key
from kvcore.prefix_log import Cleared, Removed, Stored

cnp.import_array()

__all__ = ["Identity", "PrefixIndex", "Prompt"]

cdef enum:
    MAX_TOKENS = 2147483647
    MAX_BLOCK_SIZE = 1048576
    GROUP = 16           # blocks between finding a candidate and comparing it
    MAX_SPARE = 1048576  # bytes kept for the next prompt: 190,000 tokens in blocks of 16
    LONG_PROMPT = 4096   # tokens that are worth giving up the GIL for
    MOST_SIBLINGS = 256  # that a search for a hit inside a block looks at


class Identity(NamedTuple):
    """What a block holds, as ``PrefixIndex.identity`` tells it.

    Attributes
    ----------
    uid : int
        Number of the content: all its copies have it, and no other content ever will.
    parent : int
        ``uid`` of the content before it; 0 at the root.
    tokens : list of int
    key : bytes
        What else it depends on: ``kvcore.identity.decode_key``.
    """

    uid: int
    parent: int
    tokens: list
    key: bytes


# ---------------------------------------------------------------- contents, in C


cdef inline bint same_tokens(
    const int32_t *one, const int32_t *other, int32_t count
) noexcept nogil:
    cdef int32_t difference = 0
    cdef int32_t i
    if count != 16:
        return memcmp(one, other, count * sizeof(int32_t)) == 0
    for i in range(16):  # of constant length: four vectors and no call
        difference |= one[i] ^ other[i]
    return difference == 0


cdef uint64_t hash_of(
    const index_t *index, uint64_t previous, const int32_t *tokens, int32_t key
) noexcept nogil:
    return hash_block(&index.hash_key, previous, tokens, index.key_tweaks[key])


cdef inline int32_t find_from(
    index_t *index, int32_t block, uint64_t hash, const int32_t *tokens, int32_t key,
    int64_t parent,
) noexcept nogil:
    """The first block with that identity, from a block of its bucket on, or NOWHERE."""
    cdef const record_t *record
    while block != NOWHERE:
        record = record_of(index, block)
        if record.hash == hash:
            if (
                record.parent == parent
                and record.key == key
                and same_tokens(tokens, tokens_of(index, block), index.block_size)
            ):
                return block
            index.verify_rejects += 1
        block = record.chain
    return NOWHERE


cdef int32_t find_twin(index_t *index, int32_t block, int64_t parent) noexcept nogil:
    cdef const record_t *record = record_of(index, block)
    cdef int64_t rejected = index.verify_rejects
    cdef int32_t twin = find_from(
        index, index.buckets[record.hash & index.bucket_mask], record.hash,
        tokens_of(index, block), record.key, parent,
    )
    if twin == NOWHERE and index.verify_rejects > rejected:
        index.collisions += 1
    return twin


cdef inline void link_after(index_t *index, int32_t block, int32_t before) noexcept nogil:
    """Into the bucket of its hash: after a block of it, or first after NOWHERE."""
    cdef int32_t *place
    if before == NOWHERE:
        place = &index.buckets[record_of(index, block).hash & index.bucket_mask]
    else:
        place = &record_of(index, before).chain
    record_of(index, block).chain = place[0]
    record_of(index, block).before = before
    if place[0] != NOWHERE:
        record_of(index, place[0]).before = block
    place[0] = block


cdef inline uint64_t sibling_bucket(
    const index_t *index, int64_t parent, int32_t token
) noexcept nogil:
    cdef uint64_t mixed = (<uint64_t>parent * 0x9E3779B97F4A7C15u) ^ <uint32_t>token
    mixed *= index.hash_key.point | 1
    return (mixed >> 20) & index.bucket_mask


cdef void link_sibling(index_t *index, int32_t block) noexcept nogil:
    cdef siblings_t *siblings = &index.siblings
    cdef int32_t *place = &siblings.buckets[
        sibling_bucket(index, record_of(index, block).parent, tokens_of(index, block)[0])
    ]
    siblings.after[block] = place[0]
    siblings.before[block] = NOWHERE
    if place[0] != NOWHERE:
        siblings.before[place[0]] = block
    place[0] = block


cdef void unlink_sibling(index_t *index, int32_t block) noexcept nogil:
    cdef siblings_t *siblings = &index.siblings
    cdef int32_t after = siblings.after[block]
    cdef int32_t before = siblings.before[block]
    if after != NOWHERE:
        siblings.before[after] = before
    if before != NOWHERE:
        siblings.after[before] = after
    else:
        siblings.buckets[
            sibling_bucket(index, record_of(index, block).parent, tokens_of(index, block)[0])
        ] = after


cdef inline bint is_first_copy(const index_t *index, int32_t block) noexcept nogil:
    cdef int32_t before = record_of(index, block).before
    return before == NOWHERE or record_of(index, before).uid != record_of(index, block).uid


cdef inline int32_t first_copy(const index_t *index, int32_t block) noexcept nogil:
    while not is_first_copy(index, block):
        block = record_of(index, block).before
    return block


cdef int32_t find_beginning(
    const index_t *index, int64_t parent, int32_t key, const int32_t *tokens, int32_t count,
    int32_t *alike,
) noexcept nogil:
    cdef int32_t best = NOWHERE
    cdef int32_t looked_at = 0
    cdef int32_t block, i
    cdef const int32_t *other
    alike[0] = 0
    if count == 0:
        return NOWHERE
    block = index.siblings.buckets[sibling_bucket(index, parent, tokens[0])]
    while block != NOWHERE and looked_at < MOST_SIBLINGS:
        if record_of(index, block).parent == parent and record_of(index, block).key == key:
            other = tokens_of(index, block)
            i = 0
            while i < count and tokens[i] == other[i]:
                i += 1
            if i > alike[0] or (
                i == alike[0] and i and record_of(index, block).uid > record_of(index, best).uid
            ):
                alike[0] = i
                best = block
        looked_at += 1
        block = index.siblings.after[block]
    return best if best == NOWHERE else first_copy(index, best)


cdef void write_log(
    index_t *index, int64_t uid, int64_t parent, int32_t key, const int32_t *tokens
) noexcept nogil:
    cdef log_t *log = &index.log
    if log.lost:
        return
    if log.count == log.capacity:
        # From here on the index itself is the shorter story.
        empty_log(index)
        log.lost = True
        return
    log.uids[log.count] = uid
    log.parents[log.count] = parent
    log.keys[log.count] = key
    hold_key(index, key)
    if tokens != NULL:
        memcpy(
            log.tokens + log.count * index.block_size, tokens, index.block_size * sizeof(int32_t)
        )
    log.count += 1


cdef void empty_log(index_t *index) noexcept nogil:
    cdef int64_t i
    for i in range(index.log.count):
        drop_key(index, index.log.keys[i])
    index.log.count = 0


cdef void publish(index_t *index, int32_t block, int64_t parent, int32_t twin) noexcept nogil:
    cdef record_t *record = record_of(index, block)
    record.parent = parent
    if twin == NOWHERE:
        record.uid = index.next_uid
        index.next_uid += 1
    else:
        record.uid = record_of(index, twin).uid
        index.duplicates += 1
    link_after(index, block, twin)
    index.num_identities += 1
    index.blocks.next[block] = KEPT
    if index.siblings.buckets != NULL:
        link_sibling(index, block)
    if index.log.on and twin == NOWHERE:
        write_log(index, record.uid, parent, record.key, tokens_of(index, block))


cdef void lose_identity(void *state, int32_t block) noexcept nogil:
    """The pool's word that a block's content is unwanted, or about to be overwritten."""
    cdef index_t *index = <index_t *>state
    cdef record_t *record = record_of(index, block)
    cdef int32_t after, before
    cdef int64_t uid = record.uid
    if uid > 0:
        after = record.chain
        before = record_of(index, block).before
        if index.siblings.buckets != NULL:
            unlink_sibling(index, block)
        if after != NOWHERE:
            record_of(index, after).before = before
        if before != NOWHERE:
            record_of(index, before).chain = after
        else:
            index.buckets[record.hash & index.bucket_mask] = after
        record.uid = 0
        record.parent = BARRED
        index.num_identities -= 1
        if index.log.on and not (
            (after != NOWHERE and record_of(index, after).uid == uid)
            or (before != NOWHERE and record_of(index, before).uid == uid)
        ):
            write_log(index, uid, -1, 0, NULL)
    if index.blocks.ref[block] == 0:
        begin_content(index, block, 0)


cdef void expect_loss(void *state, int32_t block, bint soon) noexcept nogil:
    """The pool's word that a block is going to be evicted: its record, then its bucket."""
    cdef index_t *index = <index_t *>state
    if soon:
        prefetch(&index.buckets[record_of(index, block).hash & index.bucket_mask])
    else:
        prefetch(record_of(index, block))


cdef int by_uid(const void *one, const void *other) noexcept nogil:
    cdef int64_t difference = (<const int64_t *>one)[0] - (<const int64_t *>other)[0]
    if difference == 0:  # copies in the order of their blocks
        difference = (<const int64_t *>one)[1] - (<const int64_t *>other)[1]
    return (difference > 0) - (difference < 0)


cdef int64_t list_by_uid(const index_t *index, int64_t *listed) noexcept nogil:
    """The blocks with an identity as pairs of uid and block, ascending; how many."""
    cdef int64_t count = 0
    cdef int32_t block
    for block in range(index.num_blocks):
        if record_of(index, block).uid > 0:
            listed[2 * count] = record_of(index, block).uid
            listed[2 * count + 1] = block
            count += 1
    qsort(listed, count, 2 * sizeof(int64_t), by_uid)
    return count


cdef int64_t place_of(const int64_t *listed, int64_t count, int64_t uid) noexcept nogil:
    """Where a uid first stands in ascending pairs, or -1."""
    cdef int64_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if listed[2 * middle] < uid:
            low = middle + 1
        else:
            high = middle
    return low if low < count and listed[2 * low] == uid else -1


# ---------------------------------------------------------------- the index


@cython.final
@cython.no_gc_clear  # the pool calls into it as long as blocks can be evicted
cdef class PrefixIndex:
    """The published contents of a pool's blocks.

    ``BlockManager(..., prefix_caching=True)`` makes one for its pool and does all that
    changes it. Here it can be read. Managers on one pool share its index.

    Every answer is exact: the hash finds candidates, and a block is an answer only if it
    holds the same tokens, after the same content, under the same key. So no collision,
    by accident or by design, ever gives a block away.

    Costs, once for the pool, a block: 40 bytes and ``4 * block_size`` bytes of tokens,
    rounded up to whole cache lines, and 8 to 16 bytes of buckets.

    Parameters
    ----------
    pool : BlockPool
        It gets this index for good. A pool has at most one.
    block_size : int
        Tokens in a block; at most 2**20.
    hash_bits : int
        For tests: how many bits of the hash are used. 0 makes all hashes equal, and every
        call linear in the size of the pool; no answer depends on it.

    Raises
    ------
    TypeError, ValueError
        Not a pool, it has an index already, or a number out of range.
    """

    def __cinit__(self, BlockPool pool not None, block_size, *, hash_bits=HASH_BITS):
        cdef int32_t size = integer(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        cdef int32_t bits = integer(hash_bits, "hash_bits", 0, HASH_BITS)
        cdef cnp.npy_intp num_blocks = pool.state.num_blocks
        cdef index_t *index = &self.state
        cdef cnp.npy_intp num_buckets = 2
        cdef cnp.npy_intp i
        if pool.prefix_index is not None:
            raise ValueError("pool has a prefix index already")
        while num_buckets < 2 * num_blocks:
            num_buckets *= 2
        index.blocks = &pool.state
        index.num_blocks = pool.state.num_blocks
        index.block_size = size
        index.stride = sizeof(record_t) + size * <int64_t>sizeof(int32_t)
        index.stride = (index.stride + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        cdef cnp.npy_intp record_bytes = num_blocks * index.stride
        cdef cnp.ndarray records = aligned_zeros(1, &record_bytes, cnp.NPY_UINT8, 1)
        cdef cnp.ndarray buckets = int32_zeros(num_buckets)
        cdef cnp.ndarray words = int32_zeros(size + 1)
        prefer_large_pages(records)
        prefer_large_pages(buckets)
        secret = urandom(8 + 4 * (size + 1))
        memcpy(&index.hash_key.point, <const char *>secret, 8)
        memcpy(int32_data(words), <const char *>secret + 8, 4 * (size + 1))
        index.hash_key.point = (index.hash_key.point & (LOW_61_BITS >> 1)) | 1
        index.hash_key.mask = (<uint64_t>1 << bits) - 1
        index.hash_key.block_size = size
        index.hash_key.words = <uint32_t *>int32_data(words)
        index.records = <char *>cnp.PyArray_DATA(records)
        index.buckets = int32_data(buckets)
        index.bucket_mask = num_buckets - 1
        index.next_uid = 1
        for i in range(num_buckets):
            index.buckets[i] = NOWHERE
        self.arrays = (records, buckets, words)
        self.numbers_by_key = {b"": 0}
        self.keys_by_number = [b""]
        self.free_numbers = []
        self.key_capacity = 0
        self.reserve_keys(1)
        pool.allocate_links()
        self.pool_reference = weak_reference(pool)
        # From here on the pool knows it.
        pool.prefix_index = self
        pool.state.index = index
        pool.state.lose = lose_identity
        pool.state.expect_loss = expect_loss

    def __dealloc__(self):
        PyMem_RawFree(self.spare_memory)

    # ------------------------------------------------------------ memory of prompts

    cdef void *take_memory(self, int64_t *num_bytes) noexcept:
        """Memory for a prompt of one call: the spare one if it is large enough, else new.

        Without the spare, the allocator may give pages back to the system after each call
        and fetch them for the next, which costs more than the match.
        """
        cdef void *memory
        with cython.critical_section(self):
            memory = self.spare_memory
            if memory != NULL and self.num_spare_bytes >= num_bytes[0]:
                num_bytes[0] = self.num_spare_bytes
                self.spare_memory = NULL
                return memory
        return PyMem_RawMalloc(num_bytes[0])

    cdef void give_memory(self, void *memory, int64_t num_bytes) noexcept:
        with cython.critical_section(self):
            if num_bytes <= MAX_SPARE and (
                self.spare_memory == NULL or self.num_spare_bytes < num_bytes
            ):
                memory, self.spare_memory = self.spare_memory, memory
                self.num_spare_bytes = num_bytes
        PyMem_RawFree(memory)

    # ------------------------------------------------------------ keys

    cdef int reserve_keys(self, cnp.npy_intp count) except -1:
        """Room for ``count`` keys, the one without a number included."""
        cdef index_t *index = &self.state
        cdef cnp.npy_intp capacity = max(count, 2 * self.key_capacity, 16)
        cdef cnp.npy_intp held
        if count <= self.key_capacity:
            return 0
        cdef cnp.ndarray references = int32_zeros(capacity)
        cdef cnp.ndarray tweaks = int64_zeros(capacity)
        cdef cnp.ndarray is_idle = aligned_zeros(1, &capacity, cnp.NPY_UINT8, 1)
        cdef cnp.ndarray idle = int32_zeros(capacity)
        arrays = (references, tweaks, is_idle, idle)
        # A new tuple may start a garbage collection, and that other calls to this.
        if count <= self.key_capacity:
            return 0
        held = len(self.keys_by_number)
        if self.key_capacity:
            memcpy(int32_data(references), index.key_references, 4 * held)
            memcpy(int64_data(tweaks), index.key_tweaks, 8 * held)
            memcpy(cnp.PyArray_DATA(is_idle), index.key_is_idle, held)
            memcpy(int32_data(idle), index.idle_keys, 4 * index.num_idle_keys)
        index.key_references = int32_data(references)
        index.key_tweaks = <uint64_t *>int64_data(tweaks)
        index.key_is_idle = <uint8_t *>cnp.PyArray_DATA(is_idle)
        index.idle_keys = int32_data(idle)
        self.key_arrays = arrays
        self.key_capacity = <int32_t>capacity
        return 0

    cdef int drop_idle_keys(self) except -1:
        """Forget the keys that nothing refers to any more."""
        cdef index_t *index = &self.state
        cdef int32_t number
        while index.num_idle_keys:
            number = index.idle_keys[index.num_idle_keys - 1]
            if index.key_references[number] == 0:
                self.free_numbers.append(number)
                self.numbers_by_key.pop(self.keys_by_number[number], None)
                self.keys_by_number[number] = None
            index.key_is_idle[number] = False
            index.num_idle_keys -= 1
        return 0

    cdef int32_t intern(self, bytes key) except -1:
        """The number of a key, which counts as idle until something refers to it.

        Needs: reserve_keys.
        """
        cdef index_t *index = &self.state
        cdef int32_t number
        known = self.numbers_by_key.get(key)
        if known is not None:
            return known
        if self.free_numbers:
            number = self.free_numbers.pop()
            self.keys_by_number[number] = key
            self.numbers_by_key[key] = number
        else:
            number = len(self.keys_by_number)
            self.numbers_by_key[key] = number
            self.keys_by_number.append(key)
        index.key_references[number] = 0
        index.key_tweaks[number] = key_tweak(key)
        index.key_is_idle[number] = True
        index.idle_keys[index.num_idle_keys] = number
        index.num_idle_keys += 1
        return number

    cdef int resolve_keys(self, Prompt prompt) except -1:
        """The numbers of a prompt's keys, as far as they are known here."""
        cdef int32_t i
        for i in range(prompt.num_keys):
            number = self.numbers_by_key.get(prompt.keys[i])
            prompt.key_numbers[i] = UNKNOWN_KEY if number is None else <int32_t>number
        return 0

    cdef int intern_keys(self, Prompt prompt) except -1:
        """The numbers of a prompt's keys, new ones made. Nothing refers to them yet.

        Room for all comes first: making it may start a garbage collection, and a call
        from there would drop the new ones again.
        """
        cdef int32_t i
        self.reserve_keys(len(self.keys_by_number) + prompt.num_keys + 1)
        self.drop_idle_keys()
        for i in range(prompt.num_keys):
            prompt.key_numbers[i] = self.intern(prompt.keys[i])
        prompt.namespace_number = self.intern(prompt.namespace_key)
        return 0

    # ------------------------------------------------------------ matching

    cdef int32_t walk(self, Prompt prompt, int32_t limit) noexcept:
        """How many leading full blocks of a prompt are here, at most ``limit``.

        ``prompt.blocks`` and ``prompt.uids`` tell which; of several copies, the first.
        What the last walk found is tried first: a block whose uid is unchanged holds the
        content that it held then. The rest is looked up, candidates one or two groups
        ahead of their comparison, so that cache misses overlap; hash_blocks has asked for
        the buckets. Needs: resolve_keys or intern_keys in this call.
        """
        cdef index_t *index = &self.state
        cdef int32_t[2 * GROUP] candidates
        cdef int32_t known = min(limit, prompt.num_found)
        cdef int32_t found = 0
        cdef int32_t next_key = 0
        cdef int32_t ahead, stop, key, block
        cdef int64_t parent
        while (
            found < known
            and record_of(index, prompt.blocks[found]).uid == prompt.uids[found]
            and is_first_copy(index, prompt.blocks[found])
        ):
            found += 1
        if found == limit:
            return limit
        parent = prompt.uids[found - 1] if found else 0
        while next_key < prompt.num_keys and prompt.key_columns[next_key] < found:
            next_key += 1
        ahead = found
        while found < limit:
            stop = min(limit, found + 2 * GROUP)
            while ahead < stop:
                block = index.buckets[prompt.hashes[ahead] & index.bucket_mask]
                if block == NOWHERE:
                    limit = ahead
                    break
                candidates[ahead % (2 * GROUP)] = block
                prefetch(record_of(index, block))
                prefetch(<char *>record_of(index, block) + CACHE_LINE)
                ahead += 1
            stop = min(limit, found + GROUP)
            while found < stop:
                key = 0
                if next_key < prompt.num_keys and prompt.key_columns[next_key] == found:
                    key = prompt.key_numbers[next_key]
                    next_key += 1
                block = find_from(
                    index, candidates[found % (2 * GROUP)], prompt.hashes[found],
                    prompt.tokens + <int64_t>found * index.block_size, key, parent,
                )
                if block == NOWHERE:
                    prompt.num_found = found
                    return found
                parent = record_of(index, block).uid
                prompt.blocks[found] = block
                prompt.uids[found] = parent
                found += 1
        prompt.num_found = found
        return found

    cdef int allocate_siblings(self) except -1:
        """Find hits inside blocks from now on. O(num_blocks), once."""
        cdef index_t *index = &self.state
        cdef int32_t num_blocks = index.num_blocks
        cdef int64_t i
        if index.siblings.buckets != NULL:
            return 0
        cdef cnp.ndarray buckets = int32_zeros(index.bucket_mask + 1)
        cdef cnp.ndarray after = int32_zeros(num_blocks)
        cdef cnp.ndarray before = int32_zeros(num_blocks)
        arrays = (buckets, after, before)
        if index.siblings.buckets != NULL:  # a new tuple may start a garbage collection
            return 0
        self.sibling_arrays = arrays
        for i in range(<int64_t>index.bucket_mask + 1):
            int32_data(buckets)[i] = NOWHERE
        index.siblings.buckets = int32_data(buckets)
        index.siblings.after = int32_data(after)
        index.siblings.before = int32_data(before)
        for i in range(num_blocks):
            if record_of(index, i).uid > 0:
                link_sibling(index, <int32_t>i)
        return 0

    # ------------------------------------------------------------ forgetting

    cdef void forget_block(self, int32_t block) noexcept:
        """Its identity goes. An evictable block becomes free."""
        cdef index_t *index = &self.state
        if is_evictable(index.blocks, block):
            unlink_evictable(index.blocks, block, UNMARKED)
            lose_content(index.blocks, block)
            push_free(index.blocks, block)
        else:
            lose_content(index.blocks, block)

    cdef int64_t forget_path(self, Prompt prompt) except -1:
        """Every copy of every full block of a prompt that is here, and all after them.

        Children have larger uids than their parents: one pass in the order of uids finds
        all descendants. Needs: resolve_keys.
        """
        cdef index_t *index = &self.state
        cdef cnp.ndarray listed_array = int64_zeros(2 * <cnp.npy_intp>index.num_identities)
        cdef cnp.ndarray doomed_array = int32_zeros(index.num_identities)
        cdef int64_t *listed = int64_data(listed_array)  # pairs: uid, block
        cdef int32_t *doomed = int32_data(doomed_array)
        cdef int32_t found = self.walk(prompt, prompt.num_full)
        cdef int64_t count = 0, forgotten = 0, i, parent
        cdef int32_t column = 0
        if found == 0:
            return 0
        count = list_by_uid(index, listed)
        for i in range(count):
            while column < found and prompt.uids[column] < listed[2 * i]:
                column += 1
            if column < found and prompt.uids[column] == listed[2 * i]:
                doomed[i] = True
            else:
                parent = place_of(listed, count, record_of(index, listed[2 * i + 1]).parent)
                doomed[i] = parent >= 0 and doomed[parent]
        for i in range(count - 1, -1, -1):
            if doomed[i]:
                self.forget_block(<int32_t>listed[2 * i + 1])
                forgotten += 1
        prompt.num_found = 0
        return forgotten

    cdef void forget_all(self) noexcept:
        """No identity is left, and sequences that live now publish nothing more.

        Evictable blocks become free in the order in which they would have been evicted.
        """
        cdef index_t *index = &self.state
        cdef pool_t *pool = index.blocks
        cdef bint logging = index.log.on
        cdef int32_t level, block, after
        index.log.on = False  # one Cleared tells it all
        for level in range(pool.num_levels):
            block = first_of(pool, level)
            while block < pool.num_blocks:
                after = pool.next[block]
                if record_of(index, block).uid > 0:
                    self.forget_block(block)
                block = after
        for block in range(pool.num_blocks):
            if record_of(index, block).uid > 0:
                self.forget_block(block)
        index.era += 1
        index.log.on = logging
        if logging:
            empty_log(index)
            write_log(index, 0, 0, 0, NULL)

    # ------------------------------------------------------------ reading

    cdef BlockPool alive_pool(self):
        pool = self.pool_reference()
        if pool is None:
            raise ReferenceError("the pool of this prefix index is gone")
        return pool

    @property
    def pool(self):
        """The pool whose blocks it knows. ``ReferenceError`` once that is gone."""
        return self.alive_pool()

    @property
    def block_size(self):
        return self.state.block_size

    @property
    def verify_rejects(self):
        """Candidates that had the hash looked for, and another content."""
        return self.state.verify_rejects

    @property
    def collisions(self):
        """Contents published beside another one with the same hash."""
        return self.state.collisions

    @property
    def duplicates(self):
        """Blocks published with a content that another block had already."""
        return self.state.duplicates

    def __len__(self):
        """Blocks that have an identity; each copy counts."""
        return self.state.num_identities

    def __repr__(self):
        return f"PrefixIndex(block_size={self.block_size}, blocks={len(self)})"

    def identity(self, block, /):
        """The ``Identity`` of a block, or None. ``ValueError``: out of range."""
        cdef BlockPool pool = self.alive_pool()
        cdef int32_t b = integer(block, "block", 0, self.state.num_blocks - 1)
        cdef record_t record
        cdef cnp.npy_intp size = self.state.block_size
        cdef cnp.ndarray tokens = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)
        with cython.critical_section(pool):
            record = record_of(&self.state, b)[0]
            if record.uid == 0:
                return None
            key = self.keys_by_number[record.key]
            memcpy(int32_data(tokens), tokens_of(&self.state, b), size * sizeof(int32_t))
        return Identity(record.uid, record.parent, tokens.tolist(), key)

    def uids(self):
        """The uid of each block's content, 0 without identity: a copy, int64."""
        cdef BlockPool pool = self.alive_pool()
        cdef cnp.npy_intp count = self.state.num_blocks
        cdef cnp.ndarray uids = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
        cdef cnp.npy_intp block
        with cython.critical_section(pool):
            for block in range(count):
                int64_data(uids)[block] = record_of(&self.state, <int32_t>block).uid
        return uids

    # ------------------------------------------------------------ the change log

    def start_log(self, capacity=0):
        """Note all changes from now on, for ``drain``. The first drain tells what is here.

        Parameters
        ----------
        capacity : int
            Changes to keep for a reader; 0 for as many as the pool has blocks. When more
            wait, they are dropped, and the next drain tells the whole index instead: so
            a log that nobody reads stays as small as this, and no reader is ever wrong.
        """
        cdef BlockPool pool = self.alive_pool()
        cdef index_t *index = &self.state
        cdef int64_t entries = integer(capacity, "capacity", 0, MAX_TOKENS)
        entries = entries or index.num_blocks
        cdef cnp.ndarray uids = int64_zeros(entries)
        cdef cnp.ndarray parents = int64_zeros(entries)
        cdef cnp.ndarray keys = int32_zeros(entries)
        cdef cnp.ndarray tokens = int32_zeros(entries * index.block_size)
        arrays = (uids, parents, keys, tokens)
        with cython.critical_section(pool):
            empty_log(index)
            self.log_arrays = arrays
            index.log.uids = int64_data(uids)
            index.log.parents = int64_data(parents)
            index.log.keys = int32_data(keys)
            index.log.tokens = int32_data(tokens)
            index.log.capacity = entries
            index.log.on = index.log.lost = True

    def stop_log(self):
        """Note nothing more; what waits is dropped."""
        cdef BlockPool pool = self.alive_pool()
        with cython.critical_section(pool):
            empty_log(&self.state)
            self.state.log.on = False
            self.log_arrays = None

    def drain(self):
        """The changes since the last call, in order: ``Stored``, ``Removed``, ``Cleared``.

        A content is stored when its first copy is published and removed when its last one
        goes. Replayed into an empty mirror they rebuild the index: parents come before
        their children. After ``start_log``, or when too many changes waited, the list is
        ``Cleared`` and then all that is here. O(changes), or O(num_blocks) then.

        ``RuntimeError`` when no log was started.
        """
        cdef BlockPool pool = self.alive_pool()
        cdef index_t *index = &self.state
        cdef cnp.ndarray uids, parents, tokens
        cdef list keys, changes
        cdef cnp.npy_intp count, i, entry
        cdef int32_t block, size = index.block_size
        cdef bint whole
        # No Python code may run between the first read and the last, and new objects may
        # bring the garbage collector: copy first, then tell.
        if not index.log.on:
            raise RuntimeError("no log was started")
        with cython.critical_section(pool):
            count = -1
            while count != (index.num_identities if index.log.lost else index.log.count):
                count = index.num_identities if index.log.lost else index.log.count
                uids = int64_zeros(count)
                parents = int64_zeros(count)
                tokens = int32_zeros(count * size)
                keys = [None] * count
            whole = index.log.lost
            epoch = self.epoch
            if whole:
                entry = 0
                for block in range(index.blocks.num_blocks):
                    if record_of(index, block).uid > 0:
                        int64_data(uids)[entry] = record_of(index, block).uid
                        int64_data(parents)[entry] = record_of(index, block).parent
                        keys[entry] = self.keys_by_number[record_of(index, block).key]
                        memcpy(
                            int32_data(tokens) + entry * size, tokens_of(index, block), 4 * size
                        )
                        entry += 1
            else:
                memcpy(int64_data(uids), index.log.uids, 8 * count)
                memcpy(int64_data(parents), index.log.parents, 8 * count)
                memcpy(int32_data(tokens), index.log.tokens, 4 * count * size)
                for i in range(count):
                    keys[i] = self.keys_by_number[index.log.keys[i]]
            empty_log(index)
            index.log.lost = False
        token_lists = tokens.reshape(count, size).tolist()
        changes = [Cleared(epoch)] if whole else []
        # A content is younger than the one before it. Copies have one uid.
        order = uids.argsort(kind="stable").tolist() if whole else range(count)
        last = -1
        for entry in order:
            uid, parent = int64_data(uids)[entry], int64_data(parents)[entry]
            if whole and uid == last:
                continue
            last = uid
            if uid == 0:
                changes.append(Cleared(epoch))
            elif parent < 0:
                changes.append(Removed(uid))
            else:
                changes.append(Stored(uid, parent, token_lists[entry], keys[entry]))
        return changes

    # ------------------------------------------------------------ check

    def _check(self):
        """For ``BlockPool.check``: I5, the index maps content to the blocks that hold it."""
        cdef index_t *index = &self.state
        cdef int32_t num_blocks = index.blocks.num_blocks
        cdef cnp.ndarray listed_array = int32_zeros(num_blocks)
        cdef cnp.ndarray references_array = int32_zeros(self.key_capacity)
        cdef int32_t *listed = int32_data(listed_array)
        cdef int32_t *references = int32_data(references_array)
        cdef record_t *record
        cdef int32_t block, before, other, count = 0
        cdef uint64_t bucket
        cdef int64_t i
        for bucket in range(index.bucket_mask + 1):
            before = NOWHERE
            block = index.buckets[bucket]
            while block != NOWHERE:
                if not 0 <= block < num_blocks or listed[block]:
                    raise InvariantError("I5", block, "out of range or twice in the prefix index")
                record = record_of(index, block)
                if record.uid <= 0 or record.uid >= index.next_uid:
                    raise InvariantError("I5", block, f"in the prefix index with uid {record.uid}")
                if record.hash & index.bucket_mask != bucket or not record.hash & COMPUTED:
                    raise InvariantError("I5", block, "in the wrong bucket of the prefix index")
                if record.before != before:
                    raise InvariantError("I5", block, "the links of the prefix index disagree")
                if not 0 <= record.parent < record.uid:
                    raise InvariantError("I5", block, f"comes after uid {record.parent}")
                if record.filled != index.block_size:
                    raise InvariantError("I6", block, f"published with {record.filled} tokens")
                if index.blocks.next[block] == UNMARKED:
                    raise InvariantError("I5", block, "has an identity, but is not kept")
                # Equal contents stand together and share a uid; others do not.
                other = before
                while other != NOWHERE:
                    same = (
                        record_of(index, other).hash == record.hash
                        and record_of(index, other).parent == record.parent
                        and record_of(index, other).key == record.key
                        and same_tokens(
                            tokens_of(index, other), tokens_of(index, block), index.block_size
                        )
                    )
                    if same != (record_of(index, other).uid == record.uid):
                        raise InvariantError("I5", block, f"uid {record.uid}: not its content")
                    if same and record_of(index, before).uid != record.uid:
                        raise InvariantError("I5", block, "stands apart from its copies")
                    other = record_of(index, other).before
                listed[block] = True
                count += 1
                before = block
                block = record.chain
        if count != index.num_identities:
            raise InvariantError("I5", None, f"{count} identities, {index.num_identities} counted")
        for block in range(num_blocks):
            record = record_of(index, block)
            if (record.uid > 0) != listed[block]:
                raise InvariantError("I5", block, f"uid {record.uid} is not in the prefix index")
            if not 0 <= record.filled <= index.block_size:
                raise InvariantError("I5", block, f"{record.filled} tokens are known")
            if not 0 <= record.key < self.key_capacity:
                raise InvariantError("I5", block, f"has key {record.key}")
            references[record.key] += 1
        self.check_hashes()
        for i in range(index.log.count):
            references[index.log.keys[i]] += 1
        for reference in self.alive_pool().holders:
            holder = reference()
            if holder is not None:
                holder._count_keys(references_array)
        for i in range(1, len(self.keys_by_number)):
            if references[i] != index.key_references[i]:
                raise InvariantError(
                    "I11", None, f"key {i}: {index.key_references[i]} references, "
                    f"{references[i]} found"
                )
            if references[i] and self.keys_by_number[i] is None:
                raise InvariantError("I11", None, f"key {i} is used but forgotten")

    cdef int check_hashes(self) except -1:
        """Each content has the hash of its tokens after those before it, if they are here."""
        cdef index_t *index = &self.state
        cdef cnp.ndarray listed_array = int64_zeros(2 * <cnp.npy_intp>index.num_identities)
        cdef int64_t *listed = int64_data(listed_array)
        cdef int64_t count = list_by_uid(index, listed)
        cdef int64_t i, before
        cdef const record_t *record
        cdef int32_t block
        for i in range(count):
            block = <int32_t>listed[2 * i + 1]
            record = record_of(index, block)
            before = place_of(listed, count, record.parent)
            if record.parent and before < 0:
                continue
            if record.hash != hash_of(
                index, record_of(index, listed[2 * before + 1]).hash if record.parent else 0,
                tokens_of(index, block), record.key,
            ):
                raise InvariantError("I5", block, f"uid {record.uid}: not its content")
        return 0


# ---------------------------------------------------------------- prompts


cdef inline uint64_t key_tweak(bytes key):
    """A number for a key's part in the hash; keyed by the process like every hash of it."""
    return <uint64_t><int64_t>hash(key) & LOW_61_BITS


@cython.final
cdef class Prompt:
    """Tokens that were hashed, to be matched and allocated as often as need be.

    Made by ``BlockManager.prompt``. A scheduler keeps one for each waiting request, so
    that a request which cannot enter yet costs no hashing in the next step. Matching it
    again compares two numbers a block, as long as what it found is still there.
    """

    def __cinit__(self):
        self.namespace_key = b""
        self.cut_column = MAX_TOKENS

    def __dealloc__(self):
        if self.index is None or not self.is_passing:
            PyMem_RawFree(self.memory)
        else:
            self.index.give_memory(self.memory, self.num_bytes)

    cdef int allocate(self, int64_t num_tokens) except -1:
        cdef int64_t num_full = num_tokens // self.index.state.block_size
        cdef char *memory
        if num_tokens > MAX_TOKENS:
            raise ValueError(f"tokens must be at most {MAX_TOKENS}, got {num_tokens}")
        self.num_bytes = 20 * num_full + 4 * num_tokens + 1
        if self.is_passing:
            memory = <char *>self.index.take_memory(&self.num_bytes)
        else:
            memory = <char *>PyMem_RawMalloc(self.num_bytes)
        if memory == NULL:
            raise MemoryError(f"a prompt of {num_tokens} tokens")
        self.memory = memory
        self.num_tokens = <int32_t>num_tokens
        self.num_full = <int32_t>num_full
        self.hashes = <uint64_t *>memory
        self.uids = <int64_t *>(memory + 8 * num_full)
        self.blocks = <int32_t *>(memory + 16 * num_full)
        self.tokens = <int32_t *>(memory + 20 * num_full)
        return 0

    cdef int set_keys(self, bytes root, dict keys) except -1:
        cdef cnp.npy_intp count = len(keys)
        cdef cnp.ndarray columns, numbers, tweaks
        cdef int32_t i
        self.namespace_key = root
        if count == 0:
            return 0
        columns = int32_zeros(count)
        numbers = int32_zeros(count)
        tweaks = int64_zeros(count)
        self.keys = []
        for i, column in enumerate(sorted(keys)):
            self.keys.append(keys[column])
            int32_data(columns)[i] = column
            int64_data(tweaks)[i] = <int64_t>key_tweak(keys[column])
        self.key_columns = int32_data(columns)
        self.key_numbers = int32_data(numbers)
        self.key_tweaks = <uint64_t *>int64_data(tweaks)
        self.key_arrays = (columns, numbers, tweaks)
        self.num_keys = <int32_t>count
        return 0

    cdef void hash_blocks(self) noexcept nogil:
        cdef hash_key_t key = self.index.state.hash_key  # a copy stays in registers
        cdef const int32_t *tokens = self.tokens
        cdef uint64_t *hashes = self.hashes
        cdef const int32_t *buckets = self.index.state.buckets
        cdef uint64_t bucket_mask = self.index.state.bucket_mask
        cdef uint64_t previous = 0, tweak
        cdef int32_t next_key = 0
        cdef int32_t column, next_column = self.key_columns[0] if self.num_keys else -1
        for column in range(self.num_full):
            tweak = 0
            if column == next_column:
                tweak = self.key_tweaks[next_key]
                next_key += 1
                next_column = self.key_columns[next_key] if next_key < self.num_keys else -1
            previous = hash_block(&key, previous, tokens, tweak)
            hashes[column] = previous
            prefetch(&buckets[previous & bucket_mask])  # for the walk that follows
            tokens += key.block_size

    def __len__(self):
        return self.num_tokens

    def __repr__(self):
        return f"Prompt({self.num_tokens} tokens)"

    @property
    def num_full_blocks(self):
        return self.num_full

    @property
    def tokens(self):
        """int32 ``(len(prompt),)``: a read-only view without a copy."""
        cdef cnp.npy_intp count = self.num_tokens
        cdef cnp.ndarray view = cnp.PyArray_SimpleNewFromData(
            1, &count, cnp.NPY_INT32, self.tokens
        )
        Py_INCREF(self)
        cnp.PyArray_SetBaseObject(view, self)
        cnp.PyArray_CLEARFLAGS(view, cnp.NPY_ARRAY_WRITEABLE)
        return view

    def chain_hash(self, column, /):
        """The index hash of the full blocks up to ``column``.

        Prompts that agree that far have the same; prompts that have the same agree, but
        for chance. It means nothing outside this index. ``ValueError``: no full block.
        """
        return self.hashes[integer(column, "column", 0, self.num_full - 1)]

    def common_blocks(self, Prompt other not None, /):
        """How many leading full blocks two prompts of one index share. O(blocks).

        What they share is what the second can take over from the first once that has
        been computed and published.
        """
        cdef int32_t size = self.index.state.block_size
        cdef int32_t limit = min(self.num_full, other.num_full)
        cdef int32_t alike = 0
        if other.index is not self.index:
            raise ValueError(f"other is a prompt of another index: {other!r}")
        while (
            alike < limit
            and self.hashes[alike] == other.hashes[alike]
            and same_tokens(
                self.tokens + <int64_t>alike * size, other.tokens + <int64_t>alike * size, size
            )
        ):
            alike += 1
        if self.num_keys or other.num_keys:
            mine = self.keys_by_column(alike)
            others = other.keys_by_column(alike)
            for column in sorted(set(mine) | set(others)):
                if mine.get(column) != others.get(column):
                    return column
        return alike

    def keys_by_column(self, stop=None, /):
        """The keys of the columns before ``stop``, default all, that have one."""
        cdef int32_t i
        cdef dict keys = {}
        for i in range(self.num_keys):
            if stop is None or self.key_columns[i] < stop:
                keys[self.key_columns[i]] = self.keys[i]
        return keys


cdef Prompt make_prompt(PrefixIndex index, tokens, namespace, media, bint is_passing):
    """Tokens and keys, checked, copied and hashed; ``is_passing`` if for one call only."""
    cdef Prompt prompt = Prompt.__new__(Prompt)
    cdef Py_buffer view
    cdef int64_t bad
    cdef bytes root
    source = token_source(tokens)
    prompt.index = index
    prompt.is_passing = is_passing
    if isinstance(source, list):
        prompt.allocate(len(source))
        copy_list(source, prompt.tokens, prompt.num_tokens)
    else:
        open_buffer(source, &view)
        try:
            prompt.allocate(view.shape[0])
            bad = copy_buffer(&view, prompt.tokens)
            if bad >= 0:
                bad_token(&view, bad)
        finally:
            PyBuffer_Release(&view)
    if namespace is not None or media:
        root = namespace_key(namespace)
        prompt.set_keys(
            root, block_keys(root, media, prompt.num_tokens, index.state.block_size)
        )
    if prompt.num_tokens < LONG_PROMPT:
        prompt.hash_blocks()
    else:
        with nogil:
            prompt.hash_blocks()
    return prompt
