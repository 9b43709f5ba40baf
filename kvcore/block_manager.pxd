# One manager's sequences: a row each in the table slab, over a pool of blocks.
#
#   tables    int32[rows, columns]  row r begins with the blocks of its sequence
#   lengths   int32[rows]           its tokens; -1 while no sequence has the row
#   mirrored  int32[rows]           leading cells that drain_changes has reported and
#                                   that have not changed since
#   spare     int32[num_spare]      rows that no sequence has, used last in first out
#
# With prefix caching also, by row:
#
#   known     leading tokens whose ids the index has in the records of their blocks
#   published leading blocks that have been published or were found; CLOSED when the
#             sequence may publish nothing more, for what it builds on was forgotten
#   eras      the index's era in which the sequence began: in another it publishes nothing;
#             NO_ERA if its namespace is not known
#   roots     the key of its namespace, referred to
#   cut_columns
#             from this column on it publishes nothing: an item of media may be cut there
#
# A row holds ceil(length / block_size) cells, so their number is not stored. A cell is -1
# where a window has given the block back; the last one of a row that a token can be
# appended to never is.
# A block stands in the same column of every table that has it, and two tables that
# agree in one column agree in all columns before it: blocks are shared by fork, reorder
# and prefix hits, which share everything from column 0 on, and a cell changes only while
# it is a table's last. With prefix caching they agree in content only: a column before may
# hold another copy of it; and so it is of a table that restore has put together.
#
# The C interface is the functions at the end: cimport them for a loop of your own.
# They check nothing and need the GIL, or whatever else keeps other threads away. It
# is rebuilt with each minor release: compile against the version that you run.

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvcore.pool cimport UNMARKED, BlockPool, pool_t
from kvcore.prefix_index cimport PrefixIndex, Prompt, index_t

cdef enum:
    CLOSED = -1
    NO_ERA = -1
    UNCUT = 2147483647
    NUM_OF_PREFIXES = 5  # quantities of a row that only prefix caching needs


# What a token that takes no block needs to find its slot. A loop works on a copy of it:
# from the fields of the manager the compiler would load all this again after every
# store into an array.
cdef struct slab_t:
    int32_t *tables
    int32_t *lengths
    int32_t *ref
    int32_t *marks  # the pool's, if some blocks may not be written; else NULL
    int64_t num_columns
    int32_t block_size
    int32_t shift
    uint64_t reciprocal


cdef class BlockManager:
    cdef readonly BlockPool pool
    cdef pool_t *blocks
    cdef slab_t slab
    cdef int32_t *mirrored
    cdef int64_t *counts
    cdef int32_t num_rows
    cdef bint has_holes  # a window has given blocks back: some cells are -1
    cdef bint has_restored  # restore has put tables together

    cdef int64_t version  # of the assignment of rows
    cdef int32_t num_spare
    cdef int32_t *spare
    cdef int32_t num_binding  # rows on their way to a sequence, while its id is compared
    cdef dict rows_by_seq

    cdef PrefixIndex prefix  # None without prefix caching
    cdef index_t *contents   # its state, or NULL
    cdef int32_t *known_tokens
    cdef int32_t *published_blocks
    cdef int32_t *eras
    cdef int32_t *roots
    cdef int32_t *cut_columns
    cdef bint merge_duplicates
    cdef int64_t pin_quota
    cdef int64_t num_prefix_pins
    cdef dict retention_by_row

    # References dropped while a step was in flight, oldest first, each with the newest
    # step issued when it was dropped.
    cdef int64_t steps_issued
    cdef int64_t steps_settled
    cdef int64_t num_fenced
    cdef int64_t fence_capacity
    cdef int32_t *fenced
    cdef int64_t *fenced_until

    # To find a row that a call names twice: the number of the look at which each was seen.
    cdef int64_t look
    cdef int64_t *seen

    cdef int64_t generation  # of the arrays below
    cdef cnp.ndarray table_array, length_array, mirrored_array, spare_array
    cdef cnp.ndarray prefix_array  # these quantities, int32[NUM_OF_PREFIXES, rows]
    cdef cnp.ndarray count_array, fenced_array, fenced_until_array, pair_array
    cdef cnp.ndarray seen_array
    cdef object __weakref__

    cdef inline int32_t find(self, seq) except -1
    cdef int unknown(self, seq) except -1
    cdef cnp.ndarray find_all(self, list seqs)
    cdef int32_t bind(self, seq, str name) except -1
    cdef int check_not_live(self, seq, str name) except -1
    cdef int unbind(self, seq) except -1
    cdef int check_cut(self, int32_t row, int32_t length, str name) except -1
    cdef int check_no_hole(self, int32_t row, int32_t start, int32_t stop) except -1
    cdef int check_fork(self, int32_t source, int64_t length, parent) except -1
    cdef int grow(self, int64_t rows, int64_t columns) except -1
    cdef int grow_for_one_more(self, int64_t columns) except -1
    cdef inline int prepare_append(self, int32_t row, int64_t n_tokens) except -1
    cdef int prepare_append_batch(self, const int32_t *rows, cnp.npy_intp count) except -1
    cdef inline int make_room(self, cnp.npy_intp count, int64_t columns) except -1
    cdef int make_room_for_pairs(self, cnp.npy_intp count) except -1
    cdef int64_t longest_after(self, const int32_t *rows, cnp.npy_intp count) except -1
    cdef tuple append_counts(self, cnp.ndarray rows, cnp.ndarray out, cnp.ndarray counts)
    cdef int prepare_append_counts(
        self, const int32_t *rows, const int32_t *counts, cnp.npy_intp count
    ) except -1
    cdef int check_rows(self, const int32_t *rows, cnp.npy_intp count, str name) except -1
    cdef int tell_apart(self) except -1
    cdef inline int check_new(self, int32_t row, str name) except -1
    cdef int named_twice(self, int32_t row, str name) except -1
    cdef int check_restore(
        self, int32_t length, Prompt prompt, const int32_t *columns, const int32_t *blocks,
        cnp.npy_intp count,
    ) except -1
    cdef int check_kept(
        self, Prompt prompt, const int32_t *columns, const int32_t *blocks, cnp.npy_intp count
    ) except -1
    cdef void write_restored(
        self, int32_t row, Prompt prompt, const int32_t *kept, cnp.npy_intp count
    ) noexcept
    cdef int no_such_row(
        self, const int32_t *rows, cnp.npy_intp entry, str name
    ) except -1
    cdef int too_long(self, int32_t row, int64_t n_tokens) except -1
    cdef cnp.ndarray copies(self, cnp.npy_intp count)
    cdef int reserve_fence(self, int64_t references) except -1
    cdef int out_of_blocks(self, int64_t needed, int64_t available) except -1
    cdef Prompt as_prompt(self, tokens, namespace, media, bint is_passing=*)
    cdef int32_t length_of(self, n_tokens, tokens, Prompt prompt) except -1
    cdef int write_rows(
        self, const int32_t *rows, const int32_t *tokens, cnp.npy_intp count
    ) except -1
    cdef int32_t publish_rows(
        self, const int32_t *rows, const int32_t *tokens, cnp.npy_intp count
    ) noexcept
    cdef int32_t publish_ready(self, const int32_t *rows, int32_t count) noexcept
    cdef int64_t num_unpublished(self, const int32_t *rows, cnp.npy_intp count) noexcept
    cdef cnp.ndarray ids_to_commit(self, tokens)
    cdef int check_tokens(
        self, int32_t row, int32_t position, const int32_t *tokens, int32_t count
    ) except -1
    cdef int check_shared(
        self, int32_t row, int32_t column, int32_t offset, const int32_t *tokens, int32_t count
    ) except -1
    cdef list blocks_pinned(self)
    cdef void read_tokens(self, int32_t row, int32_t *out, int64_t count) noexcept
    cdef void retain_blocks(self, int32_t row, int32_t start, int32_t stop) noexcept
    cdef int retain_like(self, int32_t row, int32_t source) except -1
    cdef int check_content(self, int32_t row) except -1
    cdef void inherit(self, int32_t row, int32_t source) noexcept


cdef inline int32_t full_blocks(const slab_t *slab, int32_t n_tokens) noexcept nogil:
    """``n_tokens // block_size`` for 0 <= n_tokens < 2**31, without a division.

    The divisor is fixed for the manager's life, so multiplying by its rounded-up
    reciprocal is exact for 31-bit numbers (Granlund and Montgomery, PLDI 1994).
    """
    return <int32_t>((<uint64_t>n_tokens * slab.reciprocal) >> slab.shift)


cdef inline int32_t blocks_for(const slab_t *slab, int32_t n_tokens) noexcept nogil:
    """``ceil(n_tokens / block_size)``: the blocks of a table of that many tokens."""
    cdef int32_t full = full_blocks(slab, n_tokens)
    return full + (n_tokens - full * slab.block_size > 0)


cdef inline int32_t *table_of(const slab_t *slab, int32_t row) noexcept nogil:
    return slab.tables + row * slab.num_columns


cdef inline bint append_in_place(
    const slab_t *slab, bint sealed, int32_t row, int32_t *block, int32_t *offset
) noexcept nogil:
    """One more token in the row's last block, if that has room, no other holder and no
    identity.

    Else nothing changes. ``sealed`` is whether blocks may have an identity, marks != NULL:
    an argument, so that a loop without prefix caching does not ask each time.
    Needs: a live row of fewer than 2**31 - 1 tokens.
    """
    # Unsigned and wide from the start, so that the loop holds no sign extensions.
    cdef uint64_t length = <uint32_t>slab.lengths[row]
    cdef uint64_t column = (length * slab.reciprocal) >> slab.shift
    cdef uint64_t within = length - column * <uint32_t>slab.block_size
    cdef uint32_t last
    if within == 0:
        return False
    last = <uint32_t>slab.tables[<uint32_t>row * <uint64_t>slab.num_columns + column]
    if slab.ref[last] > 1 or (sealed and slab.marks[last] != UNMARKED):
        return False
    slab.lengths[row] = <int32_t>length + 1
    block[0] = <int32_t>last
    offset[0] = <int32_t>within
    return True


# Blocks that can be taken now.
cdef int32_t available(BlockManager manager) noexcept nogil

# Row of a live sequence; KeyError otherwise.
cdef int32_t row_of(BlockManager manager, seq) except -1

# Make room for n_tokens more tokens of a row, or for as many as the pool could have blocks
# for: call it before their append_row, and again when a window has given blocks back.
# MemoryError or ValueError, and nothing changed.
cdef int reserve(BlockManager manager, int32_t row, int64_t n_tokens) except -1

# The slot of one new token, or -1 if that takes a block and none is available.
# *copy_source is set to the block to copy from, or -1; the destination is the slot's
# block. Needs: a live row, reserve.
cdef int64_t append_row(
    BlockManager manager, int32_t row, int32_t *copy_source
) noexcept nogil
