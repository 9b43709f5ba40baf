"""Which physical block holds which token of which sequence. Layout: ``block_manager.pxd``.

How every call that changes something is built:

1. Arguments are checked, ids looked up, rows bound: all that can run foreign code (an
   id's ``__hash__`` or ``__eq__``).
2. The plan: how many blocks are needed. If they are not there, ``OutOfBlocks``.
3. Room: the slab, the fence and the result are allocated. Here a ``MemoryError`` may come.
4. The commit: C code over the arrays that cannot fail.

From 2 to the end no Python code runs, not even by way of a garbage collection, which
arrays do not start. That is what makes a call one step to other threads under the GIL.
Without a GIL the critical section of the pool does it; it is the pool's because managers
share pools.
"""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from operator import index as as_index
from typing import NamedTuple
from weakref import ref as weak_reference

import numpy as np

from kvcore._array_checks cimport check_c_array, check_no_overlap, check_writable
from kvcore._arguments cimport integer, items, number
from kvcore._arrays cimport int32_data, int32_table, int32_zeros, int64_data, int64_zeros
from kvcore.eviction cimport RetentionPriority
from kvcore._token_input cimport (
    bad_token, copy_buffer, copy_list, open_buffer, token_source,
)
from kvcore.pool cimport (
    AHEAD, KEPT, BlockPool, available_blocks, lose_content, prefetch, release_block,
    release_blocks_reversed, ring_index, take_block, take_blocks, unlink_evictable,
)
from kvcore.prefix_index cimport (
    BARRED, NOWHERE, UNKNOWN_KEY, PrefixIndex, Prompt, begin_content, drop_key, find_beginning,
    find_twin, hash_of, hold_key, index_t, make_prompt, publish, record_of, record_t,
    set_key, tokens_of,
)

from kvcore.counters import Counter
from kvcore.errors import InvariantError, OutOfBlocks
from kvcore.eviction import Retention
from kvcore.gauges import Gauges
from kvcore.prefix_pin import PrefixPin
from kvcore.views import FreeBlocks, Lengths, Tables

cnp.import_array()

__all__ = ["AllocationPlan", "AppendPlan", "BlockManager", "BlockTable"]

cdef enum:
    MAX_TOKENS = 2147483647  # 2**31 - 1: lengths are int32

# The entries of kvcore.counters.Counter, as C constants.
cdef enum:
    SEQUENCES_ALLOCATED = 0
    SEQUENCES_FORKED
    SEQUENCES_FREED
    BLOCKS_TAKEN
    BLOCKS_RELEASED
    EVICTIONS
    TOKENS_APPENDED
    COW_COPIES
    OUT_OF_BLOCKS
    PROMPT_TOKENS
    CACHED_TOKENS
    RESUMED_TOKENS
    RESUMED_CACHED_TOKENS
    BLOCKS_PUBLISHED
    DUPLICATES_MERGED
    NUM_COUNTERS

assert NUM_COUNTERS == len(Counter)

# Ids compared by Python code let other threads run in between. Rows looked up together are
# looked up again when one has changed hands meanwhile, this often.
cdef enum:
    ATTEMPTS = 1000

cdef enum:
    SOON = 16  # blocks taken between the moment at which one is fetched and its turn

# What an append answers instead of a block.
cdef enum:
    HOLE = -1  # in a cell: a window has given the block back
    NO_BLOCK = -1
    NO_CELL = -2  # the slab has no column for it yet


cdef cnp.ndarray NO_PAIRS = int32_table(0, 2)


class AppendPlan(NamedTuple):
    """What ``append_batch`` would do now; all rows are served if ``needed <= available``.

    Attributes
    ----------
    needed : int
        Blocks that it would take.
    available : int
        Blocks that it could take now.
    coming : int
        Blocks that nobody holds but steps in flight: available when those are settled.
    """

    needed: int
    available: int
    coming: int


class AllocationPlan(NamedTuple):
    """What ``allocate`` would do now; it succeeds if ``needed <= available``.

    Attributes
    ----------
    cached_tokens : int
        Leading tokens that are in the cache.
    needed : int
        Blocks that it would take.
    available : int
        Blocks that it could take: cached ones that it would share are not among them.
    """

    cached_tokens: int
    needed: int
    available: int


# ---------------------------------------------------------------- one table, in C


cdef inline int32_t take(BlockManager self, int32_t row, int32_t column) noexcept nogil:
    """A block for a cell of a row. Needs: one is available."""
    cdef int32_t block
    self.counts[EVICTIONS] += self.blocks.num_free == 0
    self.counts[BLOCKS_TAKEN] += 1
    block = take_block(self.blocks)
    if self.contents != NULL:
        expect_take(self)
        begin_content(self.contents, block, self.roots[row] if column == 0 else 0)
    return block


cdef void expect_take(BlockManager self) noexcept nogil:
    """What belongs to a block that is soon taken is fetched: it was last used long ago."""
    cdef int32_t block
    if self.blocks.num_free > SOON:
        block = self.blocks.ring[ring_index(self.blocks, SOON)]
        prefetch(&self.blocks.ref[block])
        prefetch(&self.blocks.next[block])
        prefetch(record_of(self.contents, block))
        prefetch(tokens_of(self.contents, block))


cdef inline void take_into(
    BlockManager self, int32_t row, int32_t column, int32_t count
) noexcept nogil:
    """Fill cells of a row with blocks. Needs: that many blocks are available."""
    cdef int32_t *cells = table_of(&self.slab, row) + column
    cdef int32_t i
    self.counts[EVICTIONS] += max(0, count - self.blocks.num_free)
    self.counts[BLOCKS_TAKEN] += count
    take_blocks(self.blocks, count, cells)
    if self.contents != NULL:
        for i in range(count):
            begin_content(
                self.contents, cells[i], self.roots[row] if column + i == 0 else 0
            )


cdef inline void drop(BlockManager self, const int32_t *cells, int32_t count) noexcept nogil:
    """The one way out of a table: its references to ``cells`` go, last first.

    They go to the pool or, while a step is in flight that may still touch the blocks,
    to the fence, which then holds them. Needs: reserve_fence(count).
    """
    cdef int32_t i
    if self.has_holes:
        drop_around_holes(self, cells, count)
        return
    if self.steps_issued == self.steps_settled:
        self.counts[BLOCKS_RELEASED] += release_blocks_reversed(self.blocks, cells, count)
        return
    for i in range(count - 1, -1, -1):
        self.fenced[self.num_fenced] = cells[i]
        self.fenced_until[self.num_fenced] = self.steps_issued
        self.num_fenced += 1


cdef void drop_around_holes(
    BlockManager self, const int32_t *cells, int32_t count
) noexcept nogil:
    """``drop``, where a window may have given some of the blocks back already."""
    cdef int32_t i
    for i in range(count - 1, -1, -1):
        if cells[i] == HOLE:
            continue
        if self.steps_issued == self.steps_settled:
            self.counts[BLOCKS_RELEASED] += release_block(self.blocks, cells[i])
            continue
        self.fenced[self.num_fenced] = cells[i]
        self.fenced_until[self.num_fenced] = self.steps_issued
        self.num_fenced += 1


cdef inline int32_t first_hole(
    const slab_t *slab, int32_t row, int32_t start, int32_t stop
) noexcept nogil:
    """The first of these columns that a window has given back, or ``stop``."""
    cdef int32_t column
    for column in range(start, stop):
        if table_of(slab, row)[column] == HOLE:
            return column
    return stop


cdef inline int32_t first_outside(
    const slab_t *slab, int32_t row, int32_t first, int32_t stop
) noexcept nogil:
    """Where the blocks before column ``stop`` begin that a window has not given back yet.

    Not before ``first``. What is before a hole has been looked at when that was made.
    """
    cdef int32_t column = stop
    while column > first and table_of(slab, row)[column - 1] != HOLE:
        column -= 1
    return column


cdef int32_t num_holes(const slab_t *slab, int32_t row) noexcept nogil:
    """Blocks of a row that a window has given back."""
    cdef int32_t column, holes = 0
    for column in range(blocks_for(slab, slab.lengths[row])):
        holes += table_of(slab, row)[column] == HOLE
    return holes


cdef inline void copy_content(
    index_t *contents, int32_t source, int32_t copy, int32_t n_tokens
) noexcept nogil:
    """What is known of the first ``n_tokens`` of a block is true of its copy."""
    cdef int32_t known = min(record_of(contents, source).filled, n_tokens)
    memcpy(tokens_of(contents, copy), tokens_of(contents, source), known * sizeof(int32_t))
    record_of(contents, copy).filled = known
    set_key(contents, copy, record_of(contents, source).key)


cdef inline void open_tail(BlockManager self, int32_t block) noexcept nogil:
    """Its last holder is about to write into a block: it loses its identity, if it has one."""
    if self.contents != NULL and self.slab.marks[block] != UNMARKED:
        lose_content(self.blocks, block)
        record_of(self.contents, block).parent = 0  # not BARRED: what comes is new


cdef inline int32_t own_tail(BlockManager self, int32_t row, int32_t column) noexcept nogil:
    """Copy on write: a fresh block for the shared one at the row's last ``column``.

    Returns the old block. The new one is taken before the old one is dropped.
    Needs: a block is available, reserve_fence(1).
    """
    cdef int32_t *cell = table_of(&self.slab, row) + column
    cdef int32_t shared = cell[0]
    cell[0] = take(self, row, column)
    if self.contents != NULL:
        copy_content(
            self.contents, shared, cell[0],
            self.slab.lengths[row] - column * self.slab.block_size,
        )
    drop(self, &shared, 1)
    self.counts[COW_COPIES] += 1
    self.mirrored[row] = min(self.mirrored[row], column)
    return shared


cdef int32_t append_with_block(
    BlockManager self, int32_t row, int32_t *offset, int32_t *copy_source
) noexcept nogil:
    """The token that append_in_place has no place for: its block, or NO_BLOCK or NO_CELL.

    ``*copy_source`` is the shared block that was replaced, or -1.
    Needs: append_in_place said no; reserve_fence(1).
    """
    cdef int32_t length = self.slab.lengths[row]
    cdef int32_t column = full_blocks(&self.slab, length)
    cdef int32_t last
    offset[0] = length - column * self.slab.block_size
    copy_source[0] = -1
    if offset[0] > 0:
        last = table_of(&self.slab, row)[column]
        if self.blocks.ref[last] == 1:
            open_tail(self, last)
            self.slab.lengths[row] = length + 1
            return last
    if available_blocks(self.blocks) == 0:
        return NO_BLOCK
    if offset[0] > 0:
        copy_source[0] = own_tail(self, row, column)
    elif column == self.slab.num_columns:
        return NO_CELL
    else:
        table_of(&self.slab, row)[column] = take(self, row, column)
    self.slab.lengths[row] = length + 1
    return table_of(&self.slab, row)[column]


cdef inline int32_t append_one(
    BlockManager self, int32_t row, int32_t *offset, int32_t *copy_source
) noexcept nogil:
    """Needs: what append_in_place and append_with_block need."""
    cdef int32_t block
    copy_source[0] = -1
    if append_in_place(&self.slab, self.slab.marks != NULL, row, &block, offset):
        return block
    return append_with_block(self, row, offset, copy_source)


cdef int32_t append_elsewhere(
    BlockManager self, int32_t row, int64_t *slot, int32_t *pairs, cnp.npy_intp *num_copies
) noexcept nogil:
    """append_with_block for a batch: the slot and the pair go where they are wanted."""
    cdef int32_t offset, source
    cdef int32_t block = append_with_block(self, row, &offset, &source)
    if block < 0:
        return block
    slot[0] = <int64_t>block * self.slab.block_size + offset
    if source >= 0:
        pairs[2 * num_copies[0]] = source
        pairs[2 * num_copies[0] + 1] = block
        num_copies[0] += 1
    return block


cdef cnp.npy_intp append_rows(
    BlockManager self,
    const int32_t *rows,
    cnp.npy_intp count,
    int64_t *slots,
    int32_t *pairs,
    cnp.npy_intp *num_copies,
    int32_t *stopped_by,
) noexcept nogil:
    """One token for each row. Returns how many were served, and what stopped the next.

    What append_one does, in loops that keep the slab in registers, one with and one
    without the look at the marks: a row in steady decode costs three dependent loads, or
    four, three multiplications, and no call.
    Needs: live rows; room for ``count`` slots and pairs; reserve_fence(count).
    """
    cdef slab_t slab = self.slab
    cdef cnp.npy_intp i
    cdef int32_t block, offset
    if slab.marks == NULL:
        for i in range(count):
            if append_in_place(&slab, False, rows[i], &block, &offset):
                slots[i] = <int64_t>block * slab.block_size + offset
                continue
            stopped_by[0] = append_elsewhere(self, rows[i], slots + i, pairs, num_copies)
            if stopped_by[0] < 0:
                return i
        return count
    for i in range(count):
        if append_in_place(&slab, True, rows[i], &block, &offset):
            slots[i] = <int64_t>block * slab.block_size + offset
            continue
        stopped_by[0] = append_elsewhere(self, rows[i], slots + i, pairs, num_copies)
        if stopped_by[0] < 0:
            return i
    return count


cdef inline void write_slots(
    const slab_t *slab, int32_t row, int32_t start, int32_t stop, int64_t *out
) noexcept nogil:
    """Slots of the tokens ``start:stop`` of a row. Needs: it has them."""
    cdef const int32_t *cell = table_of(slab, row) + full_blocks(slab, start)
    cdef int32_t offset = start - full_blocks(slab, start) * slab.block_size
    cdef int32_t i
    for i in range(stop - start):
        out[i] = <int64_t>cell[0] * slab.block_size + offset
        offset += 1
        if offset == slab.block_size:
            offset = 0
            cell += 1


cdef inline bint tail_is_shared(BlockManager self, int32_t row) noexcept nogil:
    """Whether appending to the row must copy its partial last block first."""
    cdef int32_t length = self.slab.lengths[row]
    cdef int32_t column = full_blocks(&self.slab, length)
    return (
        length > column * self.slab.block_size
        and self.blocks.ref[table_of(&self.slab, row)[column]] > 1
    )


cdef inline int32_t blocks_to_append(
    BlockManager self, int32_t row, int32_t n_tokens
) noexcept nogil:
    """Blocks that appending ``n_tokens`` takes. Needs: the new length fits int32."""
    cdef int32_t length = self.slab.lengths[row]
    cdef int32_t growth = (
        blocks_for(&self.slab, length + n_tokens) - blocks_for(&self.slab, length)
    )
    return growth + (n_tokens > 0 and tail_is_shared(self, row))


cdef inline int64_t columns_to_append(
    BlockManager self, int32_t length, int32_t n_tokens
) noexcept nogil:
    """Columns of a table after as many of ``n_tokens`` as the pool could ever give blocks for.

    A table with holes spans more columns than the pool has blocks. Needs: the new length
    fits int32.
    """
    cdef int64_t most = self.blocks.num_blocks
    if self.has_holes:
        most += blocks_for(&self.slab, length)
    return min(blocks_for(&self.slab, length + n_tokens), most)


cdef int64_t let_go(BlockManager self, const int32_t *rows, cnp.npy_intp count) noexcept nogil:
    """Count the references of rows down, for a look. Returns the blocks that nobody holds then.

    Needs: hold_again with the same rows, before anything else.
    """
    cdef int32_t *cells
    cdef int64_t nobodys = 0
    cdef cnp.npy_intp i
    cdef int32_t column
    for i in range(count):
        cells = table_of(&self.slab, rows[i])
        for column in range(blocks_for(&self.slab, self.slab.lengths[rows[i]])):
            if cells[column] == HOLE:
                continue
            self.blocks.ref[cells[column]] -= 1
            nobodys += self.blocks.ref[cells[column]] == 0
    return nobodys


cdef void hold_again(BlockManager self, const int32_t *rows, cnp.npy_intp count) noexcept nogil:
    """Undo let_go."""
    cdef int32_t *cells
    cdef cnp.npy_intp i
    cdef int32_t column
    for i in range(count):
        cells = table_of(&self.slab, rows[i])
        for column in range(blocks_for(&self.slab, self.slab.lengths[rows[i]])):
            if cells[column] == HOLE:
                continue
            self.blocks.ref[cells[column]] += 1


cdef int64_t blocks_to_append_all(
    BlockManager self, const int32_t *rows, const int32_t *counts, cnp.npy_intp count,
    int32_t *copied,
) noexcept nogil:
    """Blocks that appending to every row takes, one after the other.

    Of several rows that share a partial block and are its only holders, the last writes
    in place; not so while a step is in flight, whose fence holds what the others drop.
    Needs: distinct rows, room for ``count`` entries at ``copied``.
    """
    cdef bint is_dropped = self.steps_issued == self.steps_settled
    cdef int64_t needed = 0
    cdef int32_t length, column, block
    cdef cnp.npy_intp i
    for i in range(count):
        length = self.slab.lengths[rows[i]]
        column = full_blocks(&self.slab, length)
        needed += blocks_for(&self.slab, length + (1 if counts == NULL else counts[i]))
        needed -= blocks_for(&self.slab, length)
        copied[i] = NO_BLOCK
        if length > column * self.slab.block_size:
            block = table_of(&self.slab, rows[i])[column]
            if self.blocks.ref[block] > 1:
                needed += 1
                if is_dropped:
                    self.blocks.ref[block] -= 1
                    copied[i] = block
    for i in range(count):
        if copied[i] != NO_BLOCK:
            self.blocks.ref[copied[i]] += 1
    return needed


cdef int32_t append_several(
    BlockManager self, int32_t row, int32_t count, int64_t *slots, int32_t *pairs,
    cnp.npy_intp *num_copies,
) noexcept nogil:
    """``count`` tokens for a row, or NO_BLOCK or NO_CELL and nothing changed.

    Needs: count > 0, the new length fits int32, room for a pair, reserve_fence(1).
    """
    cdef int32_t length = self.slab.lengths[row]
    cdef int32_t held = blocks_for(&self.slab, length)
    cdef int32_t growth = blocks_for(&self.slab, length + count) - held
    if growth + tail_is_shared(self, row) > available_blocks(self.blocks):
        return NO_BLOCK
    if held + growth > self.slab.num_columns:
        return NO_CELL
    if tail_is_shared(self, row):
        pairs[2 * num_copies[0]] = own_tail(self, row, held - 1)
        pairs[2 * num_copies[0] + 1] = table_of(&self.slab, row)[held - 1]
        num_copies[0] += 1
    elif length < held * <int64_t>self.slab.block_size:
        open_tail(self, table_of(&self.slab, row)[held - 1])
    take_into(self, row, held, growth)
    self.slab.lengths[row] = length + count
    write_slots(&self.slab, row, length, length + count, slots)
    return 0


cdef int32_t common_columns(
    const slab_t *slab, int32_t row, int32_t other, int32_t limit
) noexcept nogil:
    """How many leading cells of two rows are equal, at most ``limit``."""
    cdef int32_t column = 0
    while column < limit and table_of(slab, row)[column] == table_of(slab, other)[column]:
        column += 1
    return column


cdef void know_less(
    BlockManager self, int32_t row, int32_t n_tokens, int32_t length
) noexcept nogil:
    """A row that knew up to ``length`` tokens has the first ``n_tokens`` only.

    Where that leaves a part of a block that media touch, the block's key says more than
    is there: whatever is appended, it and what follows are never published.
    """
    cdef int32_t column = full_blocks(&self.slab, n_tokens)
    cdef int32_t block
    self.known_tokens[row] = min(self.known_tokens[row], n_tokens)
    self.published_blocks[row] = min(self.published_blocks[row], column)
    if self.cut_columns[row] >= blocks_for(&self.slab, n_tokens):
        self.cut_columns[row] = UNCUT
    if n_tokens < length and n_tokens > column * self.slab.block_size:
        block = table_of(&self.slab, row)[column]
        if record_of(self.contents, block).key != (self.roots[row] if column == 0 else 0):
            self.cut_columns[row] = column


cdef inline void shorten(BlockManager self, int32_t row, int32_t n_tokens) noexcept nogil:
    """Needs: 0 <= n_tokens <= length, reserve_fence for the blocks that go."""
    cdef int32_t kept = blocks_for(&self.slab, n_tokens)
    cdef int32_t held = blocks_for(&self.slab, self.slab.lengths[row])
    if self.contents != NULL:
        know_less(self, row, n_tokens, self.slab.lengths[row])
    drop(self, table_of(&self.slab, row) + kept, held - kept)
    self.slab.lengths[row] = n_tokens
    self.mirrored[row] = min(self.mirrored[row], kept)


# ---------------------------------------------------------------- prefixes, in C


cdef inline void claim(BlockManager self, int32_t block, bint is_hit) noexcept nogil:
    """One more holder of a block that a prefix match found.

    ``is_hit``: for a new request, which tells the eviction policy that it was worth keeping.
    """
    if self.blocks.ref[block] == 0:
        unlink_evictable(self.blocks, block, KEPT)
    self.blocks.ref[block] += 1
    if is_hit and self.blocks.eviction.hit != NULL:
        self.blocks.eviction.hit(self.blocks.eviction.state, block)


cdef int32_t find_prefix(
    BlockManager self, Prompt prompt, int32_t length, int32_t *idle
) noexcept:
    """Leading blocks that an allocation of ``length`` tokens shares; ``*idle``: of them, idle.

    One token at least is left to compute. Needs: the keys of the prompt are resolved.
    """
    cdef int32_t limit = 0
    cdef int32_t found, i
    idle[0] = 0
    if length > 0:
        limit = min(prompt.num_full, full_blocks(&self.slab, length - 1))
        limit = min(limit, prompt.cut_column)
    found = self.prefix.walk(prompt, limit)
    for i in range(found):
        idle[0] += self.blocks.ref[prompt.blocks[i]] == 0
    return found


# What an allocation takes: the one computation behind "can it" and "do it".
cdef struct plan_t:
    int32_t found      # leading blocks that it shares
    int32_t needed     # blocks that it takes
    int32_t available  # blocks that it can take; idle ones among the shared do not count


cdef plan_t plan_allocation(BlockManager self, Prompt prompt, int32_t length) noexcept:
    """Needs: the keys of the prompt, if there is one, are resolved."""
    cdef plan_t plan
    cdef int32_t idle = 0
    plan.found = 0
    if prompt is not None:
        plan.found = find_prefix(self, prompt, length, &idle)
    plan.needed = blocks_for(&self.slab, length) - plan.found
    plan.available = available_blocks(self.blocks) - idle
    return plan


cdef int32_t find_tail(
    BlockManager self, Prompt prompt, int32_t length, int32_t found, int32_t *alike
) noexcept:
    """A block to copy the next tokens from, after ``found`` blocks; or NOWHERE.

    Needs: allocate_siblings; find_prefix in this call.
    """
    cdef int32_t start = found * self.slab.block_size
    cdef int32_t count = min(min(prompt.num_tokens, length - 1) - start, self.slab.block_size)
    cdef int32_t key = 0, i
    alike[0] = 0
    for i in range(prompt.num_keys):
        if prompt.key_columns[i] == found:
            key = prompt.key_numbers[i]
            # Media tokens are placeholders: what they stand for is all or nothing.
            if key == UNKNOWN_KEY or prompt.keys[i] != prompt.namespace_key:
                return NOWHERE
    if count <= 0 or found >= prompt.cut_column:
        return NOWHERE
    return find_beginning(
        self.contents, prompt.uids[found - 1] if found else 0, key,
        prompt.tokens + start, count, alike,
    )


cdef void write_prompt(
    BlockManager self, int32_t row, Prompt prompt, int32_t found
) noexcept nogil:
    """Note the tokens of a prompt that its row was just given blocks for, after ``found``."""
    cdef index_t *contents = self.contents
    cdef int32_t size = self.slab.block_size
    cdef const int32_t *cells = table_of(&self.slab, row)
    cdef int32_t column, block, count, i
    for column in range(found, blocks_for(&self.slab, prompt.num_tokens)):
        block = cells[column]
        count = min(size, prompt.num_tokens - column * size)
        memcpy(
            tokens_of(contents, block), prompt.tokens + <int64_t>column * size,
            count * sizeof(int32_t),
        )
        record_of(contents, block).filled = count
        if count == size:
            record_of(contents, block).hash = prompt.hashes[column]
    for i in range(prompt.num_keys):
        column = prompt.key_columns[i]
        if found <= column < blocks_for(&self.slab, self.slab.lengths[row]):
            set_key(contents, cells[column], prompt.key_numbers[i])
    self.known_tokens[row] = prompt.num_tokens
    self.published_blocks[row] = found
    self.cut_columns[row] = prompt.cut_column


cdef inline void write_tokens(
    BlockManager self, int32_t row, const int32_t *tokens, int32_t count
) noexcept nogil:
    """Note the ids of a row's next tokens, a run for each block. Needs: check_tokens."""
    cdef index_t *contents = self.contents
    cdef int32_t size = self.slab.block_size
    cdef int32_t column, offset, block, run
    while count > 0:
        column = full_blocks(&self.slab, self.known_tokens[row])
        offset = self.known_tokens[row] - column * size
        block = table_of(&self.slab, row)[column]
        run = min(count, size - offset)
        if record_of(contents, block).filled == offset:
            memcpy(tokens_of(contents, block) + offset, tokens, run * sizeof(int32_t))
            record_of(contents, block).filled = offset + run
        elif not holds(contents, block, offset, tokens, run):
            # What stood here was dropped by truncate, and no other row knows it.
            memcpy(tokens_of(contents, block) + offset, tokens, run * sizeof(int32_t))
            record_of(contents, block).filled = offset + run
            record_of(contents, block).hash = 0
        self.known_tokens[row] += run
        tokens += run
        count -= run


cdef cnp.npy_intp write_next_of(
    BlockManager self, const int32_t *rows, const int32_t *tokens, cnp.npy_intp count
) noexcept nogil:
    """write_tokens for one token of each row, or none where it is -1; how many were served.

    Stops at a row of whose next place something is noted already, or which has no such
    place; else nobody can know another token for it, and check_tokens is not needed. In a
    decode that is every row. Each has that place somewhere else in memory, so it is fetched
    while others are served.
    """
    cdef slab_t slab = self.slab
    cdef index_t contents = self.contents[0]
    cdef int32_t *known_tokens = self.known_tokens
    cdef cnp.npy_intp i
    cdef int32_t known, offset, column, block
    for i in range(count):
        if i + AHEAD < count:
            known = known_tokens[rows[i + AHEAD]]
            column = full_blocks(&slab, known)
            if column < slab.num_columns:
                prefetch(record_of(&contents, table_of(&slab, rows[i + AHEAD])[column]))
        if tokens[i] < 0:
            continue
        known = known_tokens[rows[i]]
        if known >= slab.lengths[rows[i]]:
            return i
        column = full_blocks(&slab, known)
        offset = known - column * slab.block_size
        block = table_of(&slab, rows[i])[column]
        if block == HOLE or record_of(&contents, block).filled != offset:
            return i
        tokens_of(&contents, block)[offset] = tokens[i]
        record_of(&contents, block).filled = offset + 1
        known_tokens[rows[i]] = known + 1
    return count


cdef inline bint holds(
    const index_t *contents, int32_t block, int32_t offset, const int32_t *tokens, int32_t count
) noexcept nogil:
    """Whether these tokens are noted in a block already."""
    return record_of(contents, block).filled >= offset + count and (
        memcmp(tokens_of(contents, block) + offset, tokens, count * sizeof(int32_t)) == 0
    )


cdef int32_t publish_settled(BlockManager self, int32_t row, int32_t n_settled) noexcept nogil:
    """Publish the row's full blocks up to ``n_settled`` tokens; how many were.

    Each block is hashed here if its prompt was not, and looked for once. Needs:
    n_settled <= known; reserve_fence for as many, if duplicates are merged.
    """
    cdef index_t *contents = self.contents
    cdef int32_t *cells = table_of(&self.slab, row)
    cdef int32_t column = self.published_blocks[row]
    cdef int32_t stop = min(full_blocks(&self.slab, n_settled), self.cut_columns[row])
    cdef int32_t count = 0
    cdef int32_t block, twin
    cdef uint64_t previous
    cdef int64_t parent
    if column == CLOSED or self.eras[row] != contents.era:
        return 0
    for column in range(column, stop):
        if self.has_holes and (
            cells[column] == HOLE or (column > 0 and cells[column - 1] == HOLE)
        ):
            # Nothing says any more what it follows.
            self.published_blocks[row] = CLOSED
            break
        if column + AHEAD < stop and cells[column + AHEAD] != HOLE:
            block = cells[column + AHEAD]
            prefetch(&contents.buckets[record_of(contents, block).hash & contents.bucket_mask])
            prefetch(&self.blocks.next[block])
        block = cells[column]
        parent = 0
        previous = 0
        if column > 0:
            parent = record_of(contents, cells[column - 1]).uid
            previous = record_of(contents, cells[column - 1]).hash
        if (
            (column > 0 and parent == 0)
            or record_of(contents, block).parent == BARRED
            or (record_of(contents, block).uid > 0 and record_of(contents, block).parent != parent)
        ):
            self.published_blocks[row] = CLOSED
            break
        if record_of(contents, block).uid == 0:
            if record_of(contents, block).hash == 0:
                record_of(contents, block).hash = hash_of(
                    contents, previous, tokens_of(contents, block), record_of(contents, block).key
                )
            twin = find_twin(contents, block, parent)
            if twin != NOWHERE and self.merge_duplicates:
                claim(self, twin, False)
                cells[column] = twin
                self.mirrored[row] = min(self.mirrored[row], column)
                drop(self, &block, 1)
                contents.duplicates += 1
                self.counts[DUPLICATES_MERGED] += 1
            else:
                publish(contents, block, parent, twin)
            count += 1
        self.published_blocks[row] = column + 1
    self.counts[BLOCKS_PUBLISHED] += count
    return count


cdef inline void expect_publish(BlockManager self, int32_t row) noexcept nogil:
    """Fetch what ``hash_next`` reads. Needs: the row has a full block to publish."""
    cdef int32_t column = self.published_blocks[row]
    cdef const int32_t *cells = table_of(&self.slab, row)
    if cells[column] == HOLE:
        return
    prefetch(&self.blocks.next[cells[column]])
    if column > 0 and cells[column - 1] != HOLE:
        prefetch(record_of(self.contents, cells[column - 1]))


cdef inline void hash_next(BlockManager self, int32_t row) noexcept nogil:
    """Hash the block that a row publishes next, if it can, and fetch its bucket.

    Needs: the row has a full block to publish.
    """
    cdef int32_t column = self.published_blocks[row]
    cdef const int32_t *cells = table_of(&self.slab, row)
    cdef record_t *record
    cdef uint64_t previous = 0
    if cells[column] == HOLE or (column > 0 and cells[column - 1] == HOLE):
        return
    if column > 0:
        record = record_of(self.contents, cells[column - 1])
        if record.uid == 0:
            return
        previous = record.hash
    record = record_of(self.contents, cells[column])
    if record.hash == 0:
        record.hash = hash_of(
            self.contents, previous, tokens_of(self.contents, cells[column]), record.key
        )
    prefetch(&self.contents.buckets[record.hash & self.contents.bucket_mask])


# ---------------------------------------------------------------- the C interface


cdef int32_t available(BlockManager manager) noexcept nogil:
    return available_blocks(manager.blocks)


cdef int32_t row_of(BlockManager manager, seq) except -1:
    return manager.find(seq)


cdef int reserve(BlockManager manager, int32_t row, int64_t n_tokens) except -1:
    manager.prepare_append(row, n_tokens)
    return manager.grow(
        manager.num_rows,
        columns_to_append(manager, manager.slab.lengths[row], <int32_t>n_tokens),
    )


cdef int64_t append_row(
    BlockManager manager, int32_t row, int32_t *copy_source
) noexcept nogil:
    cdef int32_t offset
    cdef int32_t block = append_one(manager, row, &offset, copy_source)
    if block < 0:
        return -1
    manager.counts[TOKENS_APPENDED] += 1
    return <int64_t>block * manager.slab.block_size + offset


# ---------------------------------------------------------------- the manager


@cython.final
@cython.no_gc_clear  # __dealloc__ gives blocks back to the pool, which must be there
cdef class BlockManager:
    """Which physical block holds which token of which sequence.

    A sequence has a *block table*: the ids of its blocks in token order, exactly
    ``ceil(tokens / block_size)`` of them. Token ``i`` lives in slot
    ``table[i // block_size] * block_size + i % block_size``. ``fork`` shares blocks
    instead of copying them; the first append into a shared partial block moves the
    writer to a block of its own and reports the copy the caller owes (copy-on-write).

    Ids of sequences are any hashable objects. Every call either does all it says or
    raises and leaves everything as it was: tables, lengths, ref counts, the order of
    the free blocks, counters (``OUT_OF_BLOCKS`` alone counts the failures). Every call
    is one step to other threads.

    After a call has reported a copy ``(src, dst)``, ``src`` keeps its data until the
    last sequence that shares it lets go. A caller that runs copies later than the
    next call opens a ``fence`` for the step, which holds it that long.

    Parameters
    ----------
    num_blocks : int
        Size of the pool.
    block_size : int
        Token slots in a block, at least 1.
    pool : BlockPool, optional
        A pool shared with other managers; its size must equal ``num_blocks``.
        By default the manager has a pool of its own.
    rows, columns : int
        Initial capacity of the table slab, in sequences and blocks a sequence.
        Both grow when needed; sized right, they never do.
    prefix_caching : bool
        Whether sequences that begin alike share blocks: ``allocate`` looks for the
        tokens of a prompt, ``commit`` publishes what was computed. Without it the calls
        about tokens only count them. Managers on one pool share what they publish.
    eviction : EvictionPolicy, optional
        In which order the manager's own pool evicts what nobody holds. Default: least
        recently released first.
    merge_duplicates : bool
        Whether ``commit`` swaps a block for an equal one that is cached already, and
        releases it. The table changes then.
    pin_quota : int, optional
        Most blocks that ``pin_prefix`` may hold at a time. Default: no limit.
    """

    def __cinit__(
        self, num_blocks, block_size, *, pool=None, rows=64, columns=64, prefix_caching=False,
        eviction=None, merge_duplicates=False, pin_quota=None,
    ):
        cdef int64_t blocks = integer(num_blocks, "num_blocks", 1, MAX_TOKENS - 1)
        self.slab.block_size = integer(block_size, "block_size", 1, MAX_TOKENS)
        cdef int64_t initial_rows = integer(rows, "rows", 1, MAX_TOKENS)
        cdef int64_t initial_columns = integer(columns, "columns", 1, MAX_TOKENS)
        self.pin_quota = MAX_TOKENS
        if pin_quota is not None:
            self.pin_quota = integer(pin_quota, "pin_quota", 0, MAX_TOKENS)
        if pool is None:
            pool = BlockPool(num_blocks, eviction=eviction)
        elif eviction is not None:
            raise ValueError("eviction is the pool's: give it to the pool that you made")
        elif not isinstance(pool, BlockPool):
            raise TypeError(f"pool must be a BlockPool, got {pool!r}")
        elif (<BlockPool>pool).state.num_blocks != blocks:
            raise ValueError(
                f"num_blocks is {blocks}, but the pool has {(<BlockPool>pool).state.num_blocks}"
            )
        self.pool = pool
        self.blocks = &self.pool.state
        self.slab.ref = self.blocks.ref
        self.slab.shift = 31
        while (<int64_t>1 << (self.slab.shift - 31)) < self.slab.block_size:
            self.slab.shift += 1
        self.slab.reciprocal = (<uint64_t>1 << self.slab.shift) // self.slab.block_size + 1
        self.rows_by_seq = {}
        self.count_array = int64_zeros(NUM_COUNTERS)
        self.counts = int64_data(self.count_array)
        self.pair_array = NO_PAIRS
        self.seen_array = int64_zeros(0)
        self.generation = -1
        self.merge_duplicates = merge_duplicates
        self.retention_by_row = {}
        if prefix_caching:
            if self.pool.prefix_index is None:
                PrefixIndex(self.pool, block_size)
            self.prefix = self.pool.prefix_index
            self.contents = &self.prefix.state
            if self.contents.block_size != self.slab.block_size:
                raise ValueError(
                    f"block_size is {self.slab.block_size}, but the pool's prefix index has "
                    f"blocks of {self.contents.block_size}"
                )
            self.slab.marks = self.blocks.next
        self.grow(initial_rows, initial_columns)
        self.pool.holders.append(weak_reference(self, self.pool.holders.remove))

    def __dealloc__(self):
        # A pool may outlive its managers. What they held must not stay held.
        cdef int32_t row
        if self.table_array is None:
            return
        with cython.critical_section(self.pool):
            self.steps_settled = self.steps_issued
            for row in range(self.num_rows):
                if self.slab.lengths[row] > 0:
                    shorten(self, row, 0)
                if self.contents != NULL and self.slab.lengths[row] >= 0:
                    drop_key(self.contents, self.roots[row])
            if self.num_fenced:
                release_blocks_reversed(self.blocks, self.fenced, <int32_t>self.num_fenced)

    # ------------------------------------------------------------ rows and arrays

    cdef inline int32_t find(self, seq) except -1:
        cdef PyObject *row = PyDict_GetItemWithError(self.rows_by_seq, seq)
        return self.unknown(seq) if row == NULL else <int32_t><object>row

    cdef int unknown(self, seq) except -1:
        raise KeyError(f"no live sequence {seq!r}")

    cdef cnp.ndarray find_all(self, list seqs):
        """The rows of all these sequences, found in one state of the manager."""
        cdef cnp.npy_intp count = len(seqs)
        cdef cnp.ndarray rows = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        cdef int64_t version
        cdef cnp.npy_intp i
        for _ in range(ATTEMPTS):
            version = self.version
            for i in range(count):
                int32_data(rows)[i] = self.find(seqs[i])
            if self.version == version:
                return rows
        raise RuntimeError("comparing the ids of sequences changes the manager every time")

    cdef int32_t bind(self, seq, str name) except -1:
        """Make ``seq`` a live sequence without tokens, or a ValueError if it is live."""
        cdef int32_t row
        if self.num_spare == 0:
            self.check_not_live(seq, name)
            self.grow_for_one_more(self.slab.num_columns)
        self.num_spare -= 1
        row = self.spare[self.num_spare]
        self.num_binding += 1
        try:
            if self.rows_by_seq.setdefault(seq, row) != row:
                raise ValueError(f"{name} {seq!r} is a live sequence already")
        except BaseException:
            self.spare[self.num_spare] = row
            self.num_spare += 1
            raise
        finally:
            self.num_binding -= 1
        self.slab.lengths[row] = 0
        self.mirrored[row] = 0
        if self.contents != NULL:
            self.known_tokens[row] = self.published_blocks[row] = self.roots[row] = 0
            self.eras[row] = self.contents.era
            self.cut_columns[row] = UNCUT
        self.version += 1
        return row

    cdef int check_not_live(self, seq, str name) except -1:
        if seq in self.rows_by_seq:
            raise ValueError(f"{name} {seq!r} is a live sequence already")
        return 0

    cdef int unbind(self, seq) except -1:
        """The one way out of a row: the sequence ends and its blocks are dropped."""
        cdef int32_t row
        if self.steps_issued != self.steps_settled:
            self.reserve_fence(blocks_for(&self.slab, self.slab.lengths[self.find(seq)]))
        bound = self.rows_by_seq.pop(seq, None)
        if bound is None:
            return self.unknown(seq)
        row = bound
        try:
            # Once more: comparing ids may have let others run.
            self.reserve_fence(blocks_for(&self.slab, self.slab.lengths[row]))
        except MemoryError:
            self.rows_by_seq[seq] = bound
            raise
        if self.retention_by_row:
            self.retention_by_row.pop(row, None)
        shorten(self, row, 0)
        if self.contents != NULL:
            drop_key(self.contents, self.roots[row])
        self.slab.lengths[row] = -1
        self.spare[self.num_spare] = row
        self.num_spare += 1
        self.version += 1
        return 0

    cdef int grow(self, int64_t rows, int64_t columns) except -1:
        """Make the slab at least that large; MemoryError, and nothing changed."""
        cdef int32_t row, old_rows = self.num_rows
        cdef int64_t old_columns = self.slab.num_columns
        cdef int64_t most  # columns that doubling may come to
        if rows <= old_rows and columns <= old_columns:
            return 0
        rows = max(rows, old_rows)
        if columns > old_columns:
            most = MAX_TOKENS if self.has_holes else self.blocks.num_blocks
            columns = max(columns, min(2 * old_columns, most))
        # An odd number of cache lines a row: with a power of two, the same column of
        # every row would fall into the same few cache sets, and a batch append reads
        # exactly one column of every row.
        columns = max((columns + 15) // 16 | 1, old_columns // 16) * 16
        cdef cnp.ndarray tables = int32_table(rows, columns)
        cdef cnp.ndarray lengths = int32_zeros(rows)
        cdef cnp.ndarray mirrored = int32_zeros(rows)
        cdef cnp.ndarray spare = int32_zeros(rows)
        cdef cnp.ndarray of_prefixes = None
        cdef int32_t *quantity
        if self.contents != NULL:
            of_prefixes = int32_table(NUM_OF_PREFIXES, rows)
            quantity = int32_data(of_prefixes)
            for row in range(NUM_OF_PREFIXES if old_rows else 0):
                memcpy(
                    quantity + row * rows, self.known_tokens + row * <int64_t>old_rows,
                    old_rows * sizeof(int32_t),
                )
            self.prefix_array = of_prefixes
            self.known_tokens = quantity
            self.published_blocks = quantity + rows
            self.eras = quantity + 2 * rows
            self.roots = quantity + 3 * rows
            self.cut_columns = quantity + 4 * rows
        for row in range(old_rows):
            int32_data(lengths)[row] = self.slab.lengths[row]
            int32_data(mirrored)[row] = self.mirrored[row]
            if self.slab.lengths[row] > 0:
                memcpy(
                    int32_data(tables) + row * columns,
                    table_of(&self.slab, row),
                    blocks_for(&self.slab, self.slab.lengths[row]) * sizeof(int32_t),
                )
        # The new rows go under the old spare ones, lowest on top of them.
        for row in range(old_rows, <int32_t>rows):
            int32_data(lengths)[row] = -1
            int32_data(spare)[rows - 1 - row] = row
        for row in range(self.num_spare):
            int32_data(spare)[rows - old_rows + row] = self.spare[row]
        self.num_spare += <int32_t>(rows - old_rows)
        self.num_rows = <int32_t>rows
        self.slab.num_columns = columns
        self.table_array, self.slab.tables = tables, int32_data(tables)
        self.length_array, self.slab.lengths = lengths, int32_data(lengths)
        self.mirrored_array, self.mirrored = mirrored, int32_data(mirrored)
        self.spare_array, self.spare = spare, int32_data(spare)
        self.generation += 1
        return 0

    cdef int grow_for_one_more(self, int64_t columns) except -1:
        """Room for one more sequence of that many columns; MemoryError, and nothing changed."""
        return self.grow(
            self.num_rows if self.num_spare else 2 * <int64_t>self.num_rows, columns
        )

    cdef int reserve_fence(self, int64_t references) except -1:
        """Room in the fence for that many dropped references, if a step is in flight."""
        cdef int64_t needed = self.num_fenced + references
        cdef cnp.ndarray blocks, until
        cdef int64_t i
        if self.steps_issued == self.steps_settled or needed <= self.fence_capacity:
            return 0
        needed = max(needed, 2 * self.fence_capacity)
        blocks = int32_zeros(needed)
        until = int64_zeros(needed)
        for i in range(self.num_fenced):
            int32_data(blocks)[i] = self.fenced[i]
            int64_data(until)[i] = self.fenced_until[i]
        self.fenced_array, self.fenced = blocks, int32_data(blocks)
        self.fenced_until_array, self.fenced_until = until, int64_data(until)
        self.fence_capacity = needed
        return 0

    cdef int out_of_blocks(self, int64_t needed, int64_t available) except -1:
        self.counts[OUT_OF_BLOCKS] += 1
        raise OutOfBlocks(needed, available)

    # ------------------------------------------------------------ sequences

    def allocate(
        self, seq, n_tokens=None, /, *, tokens=None, namespace=None, media=(), retention=(),
        resumed=False, partial_hit=False,
    ):
        """New sequence with a table of ``ceil(n_tokens / block_size)`` blocks. O(blocks).

        With the ``tokens`` of its prompt, and prefix caching on, it shares the longest
        cached prefix of full blocks, of which at least one token is left to compute, and
        takes blocks for the rest only. Cached blocks that nobody holds are claimed before
        anything is evicted.

        Parameters
        ----------
        seq : hashable
        n_tokens : int, optional
            Default ``len(tokens)``; it may be more, when the last ids are not known yet.
        tokens : buffer or sequence of int, or Prompt, optional
            int32, uint32 or int64, each from 0 to 2**31 - 1.
        namespace : Namespace or str or bytes, optional
            Only sequences of equal namespaces share.
        media : sequence of Media, optional
            Items whose tokens are placeholders: what they show is part of the identity.
        retention : sequence of Retention, optional
            How long the blocks of which tokens are worth keeping; the pool's eviction
            policy must be ``RetentionPriority``.
        resumed : bool
            The sequence ran before and was preempted: it is counted apart.
        partial_hit : bool
            Where the whole blocks end, reuse the beginning of one more cached block by
            copying it.

        Returns
        -------
        int
            Leading tokens that are cached already: 0 without ``tokens``.
        (int, copy)
            With ``partial_hit``; ``copy`` is ``(src, dst, n_tokens)``, owed before
            anything is computed, or None. ``src`` is held like the source of any copy.

        Raises
        ------
        OutOfBlocks
            The pool has fewer blocks available.
        ValueError, TypeError
            ``seq`` is live, or an argument is not what it should be.
        """
        cdef Prompt prompt = self.as_prompt(tokens, namespace, media)
        cdef int32_t length = self.length_of(n_tokens, tokens, prompt)
        cdef int32_t total = blocks_for(&self.slab, length)
        cdef int32_t row, found, alike = 0, source = NOWHERE
        cdef plan_t plan
        cdef int64_t cached = 0
        cdef int32_t i
        cdef bint is_hit = not resumed
        cdef cnp.ndarray ranges = as_retention(self, retention) if retention else None
        copy = None
        with cython.critical_section(self.pool):
            if seq not in self.rows_by_seq:
                if prompt is not None:
                    self.prefix.resolve_keys(prompt)
                plan = plan_allocation(self, prompt, length)
                if plan.needed > plan.available:
                    self.out_of_blocks(plan.needed, plan.available)
                self.grow_for_one_more(total)
            row = self.bind(seq, "seq")
            try:
                # Once more: comparing ids may have let others run.
                if prompt is not None:
                    self.prefix.intern_keys(prompt)
                    if partial_hit:
                        self.prefix.allocate_siblings()
                plan = plan_allocation(self, prompt, length)
                if plan.needed > plan.available:
                    self.out_of_blocks(plan.needed, plan.available)
                found = plan.found
                self.grow(self.num_rows, total)
                if prompt is not None and partial_hit:
                    source = find_tail(self, prompt, length, found, &alike)
                    if source != NOWHERE and (
                        plan.needed > plan.available - (self.blocks.ref[source] == 0)
                    ):
                        source = NOWHERE  # it would have to be evicted for the copy
                    self.reserve_fence(1)
                if ranges is not None:
                    self.retention_by_row[row] = ranges
            except BaseException:
                self.unbind(seq)
                raise
            for i in range(found):
                if i + AHEAD < found:
                    prefetch(&self.blocks.next[prompt.blocks[i + AHEAD]])
                    prefetch(&self.blocks.previous[prompt.blocks[i + AHEAD]])
                claim(self, prompt.blocks[i], is_hit)
                table_of(&self.slab, row)[i] = prompt.blocks[i]
            if source != NOWHERE:
                claim(self, source, is_hit)
            if prompt is not None:
                self.roots[row] = prompt.namespace_number
                hold_key(self.contents, prompt.namespace_number)
            take_into(self, row, found, plan.needed)
            self.slab.lengths[row] = length
            if prompt is not None:
                write_prompt(self, row, prompt, found)
                cached = <int64_t>found * self.slab.block_size
                if source != NOWHERE:
                    cached += alike
                    drop(self, &source, 1)
                self.counts[RESUMED_TOKENS if resumed else PROMPT_TOKENS] += prompt.num_tokens
                self.counts[RESUMED_CACHED_TOKENS if resumed else CACHED_TOKENS] += cached
            self.counts[SEQUENCES_ALLOCATED] += 1
            if source != NOWHERE:
                copy = (source, table_of(&self.slab, row)[found], alike)
            if ranges is not None:
                self.retain_blocks(row, 0, found)
        return (cached, copy) if partial_hit else cached

    cdef Prompt as_prompt(self, tokens, namespace, media, bint is_passing=True):
        """The prompt that a call names, or None if no content is asked for."""
        if self.contents == NULL or (tokens is None and namespace is None and not media):
            return None
        if isinstance(tokens, Prompt):
            if (<Prompt>tokens).index is not self.prefix:
                raise ValueError(f"tokens: {tokens!r} was made for another prefix index")
            if namespace is not None or media:
                raise ValueError("namespace and media are those of the Prompt: give none beside it")
            return tokens
        return make_prompt(
            self.prefix, () if tokens is None else tokens, namespace, media, is_passing
        )

    cdef int32_t length_of(self, n_tokens, tokens, Prompt prompt) except -1:
        """The length that a call means by ``n_tokens`` and ``tokens``."""
        cdef int64_t given = 0
        if tokens is not None:
            try:
                given = prompt.num_tokens if prompt is not None else len(tokens)
            except TypeError:
                raise TypeError(f"tokens must be a sequence, got {tokens!r}") from None
            if n_tokens is None:
                return integer(given, "tokens: their number", 0, MAX_TOKENS)
        elif n_tokens is None:
            raise TypeError("n_tokens must be an integer, or tokens be given; got None")
        cdef int64_t length = integer(n_tokens, "n_tokens", 0, MAX_TOKENS)
        if length < given:
            raise ValueError(f"n_tokens is {length}, but {given} tokens are given")
        return <int32_t>length

    def prompt(self, tokens, /, *, namespace=None, media=()):
        """``tokens`` hashed once, for calls that take tokens. O(tokens).

        ``ValueError`` without prefix caching.
        """
        if self.contents == NULL:
            raise ValueError("prefix_caching is off: there is nothing to match a prompt with")
        return self.as_prompt(given(tokens), namespace, media, False)

    def match(self, tokens, /, *, namespace=None, media=()):
        """Leading tokens that ``allocate`` would find cached now. Changes nothing.

        O(tokens); 0 without prefix caching. Arguments as in ``allocate``.
        """
        cdef Prompt prompt = self.as_prompt(given(tokens), namespace, media)
        cdef int32_t idle, found
        if prompt is None:
            return 0
        with cython.critical_section(self.pool):
            self.prefix.resolve_keys(prompt)
            found = find_prefix(self, prompt, prompt.num_tokens, &idle)
            return <int64_t>found * self.slab.block_size

    def plan_allocate(
        self, n_tokens=None, /, *, tokens=None, namespace=None, media=(), retention=()
    ):
        """The ``AllocationPlan`` of the ``allocate`` with these arguments. Changes nothing.

        O(tokens); O(1) without tokens. Only copies inside a block are not planned.
        """
        cdef Prompt prompt = self.as_prompt(tokens, namespace, media)
        cdef int32_t length = self.length_of(n_tokens, tokens, prompt)
        cdef plan_t plan
        if retention:
            as_retention(self, retention)
        with cython.critical_section(self.pool):
            if prompt is not None:
                self.prefix.resolve_keys(prompt)
            plan = plan_allocation(self, prompt, length)
        return AllocationPlan(
            plan.found * <int64_t>self.slab.block_size, plan.needed, plan.available
        )

    def can_allocate(
        self, n_tokens=None, /, watermark=0, *, tokens=None, namespace=None, media=()
    ):
        """Whether ``allocate`` would succeed and leave ``watermark`` blocks.

        O(1), or O(tokens) if they are given.
        """
        cdef Prompt prompt = self.as_prompt(tokens, namespace, media)
        cdef int32_t length = self.length_of(n_tokens, tokens, prompt)
        cdef int64_t reserve = integer(watermark, "watermark", 0, MAX_TOKENS)
        cdef plan_t plan
        with cython.critical_section(self.pool):
            if prompt is not None:
                self.prefix.resolve_keys(prompt)
            plan = plan_allocation(self, prompt, length)
            return plan.available - plan.needed >= reserve

    def append_slot(self, seq, /):
        """The slot for one new token: ``(block, offset, cow_src)``. O(1).

        A block is taken when the last one is full. A shared partial block is replaced
        by a fresh one first: then ``cow_src`` is the old block, whose data the caller
        copies to ``block``, else it is None. The last holder writes in place.

        Raises
        ------
        OutOfBlocks
            A block was needed and none is available: preempt somebody and retry.
        KeyError
            ``seq`` is not live.
        """
        cdef int32_t row, block, offset, source
        with cython.critical_section(self.pool):
            row = self.find(seq)
            self.prepare_append(row, 1)
            block = append_one(self, row, &offset, &source)
            if block < 0:
                if block == NO_BLOCK:
                    self.out_of_blocks(1, 0)
                self.grow(self.num_rows, self.slab.num_columns + 1)
                block = append_with_block(self, row, &offset, &source)
            self.counts[TOKENS_APPENDED] += 1
            return block, offset, None if source < 0 else source

    def append_slots(self, seq, n_tokens, /):
        """Slots for ``n_tokens`` new tokens, all or nothing: ``(slots, copy)``. O(n_tokens).

        The same as that many ``append_slot``, in one call: for a chunk of a prompt, or
        for drafts, of which ``truncate`` drops the rejected ones.

        Returns
        -------
        slots : ndarray
            Fresh int64 ``(n_tokens,)``.
        copy : (src, dst) or None
            The copy owed, if the partial last block was shared.

        Raises
        ------
        OutOfBlocks, KeyError, ValueError, TypeError
            As ``append_slot``; ``n_tokens`` is negative or no integer.
        """
        cdef cnp.npy_intp count = integer(n_tokens, "n_tokens", 0, MAX_TOKENS)
        cdef cnp.ndarray slots
        cdef int32_t row, length, held, needed, growth
        cdef int32_t source = -1
        with cython.critical_section(self.pool):
            row = self.find(seq)
            self.prepare_append(row, count)
            length = self.slab.lengths[row]
            held = blocks_for(&self.slab, length)
            needed = blocks_to_append(self, row, <int32_t>count)
            if needed > available_blocks(self.blocks):
                self.out_of_blocks(needed, available_blocks(self.blocks))
            growth = blocks_for(&self.slab, length + <int32_t>count) - held
            slots = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
            self.grow(self.num_rows, held + growth)
            if needed > growth:
                source = own_tail(self, row, held - 1)
            elif count and length < held * <int64_t>self.slab.block_size:
                open_tail(self, table_of(&self.slab, row)[held - 1])
            take_into(self, row, held, growth)
            self.slab.lengths[row] += <int32_t>count
            self.counts[TOKENS_APPENDED] += count
            write_slots(
                &self.slab, row, length, length + <int32_t>count, int64_data(slots)
            )
            return slots, None if source < 0 else (source, table_of(&self.slab, row)[held - 1])

    def append_batch(
        self, cnp.ndarray rows not None, cnp.ndarray out not None, cnp.ndarray counts=None, /
    ):
        """One token for each row, in order: ``(served, copies)``. O(len(rows)).

        The decode step of an engine in one call. Stops at the first row that needs a
        block when none is available; preempt somebody and call again with the rest.

        Parameters
        ----------
        rows : ndarray
            int32 ``(n,)``, contiguous: rows as ``rows()`` gives them. A row listed
            twice gets two tokens.
        out : ndarray
            int64, contiguous, writable, at least n entries, not overlapping ``rows``:
            ``out[i]`` becomes the slot of ``rows[i]`` for ``i < served``; the rest is
            untouched.
        counts : ndarray, optional
            int32 ``(n,)``: how many tokens each row gets instead of one, all or none of
            them; at least 1. The slots of a row then follow those of the rows before it.

        Returns
        -------
        served : int
        copies : ndarray or None
            Fresh int32 ``(k, 2)`` of ``(src, dst)``, the copies owed. No block is both
            a source and a destination, and destinations are unique.

        Raises
        ------
        TypeError, ValueError
            Not such arrays, or a row that no live sequence has.
        """
        cdef cnp.npy_intp count, served = 0
        cdef cnp.npy_intp num_copies = 0
        cdef int32_t stopped_by
        cdef const int32_t *row = int32_data(rows)
        cdef int64_t *slots = int64_data(out)
        check_array(rows, "rows", sizeof(int32_t), writable=False)
        check_array(out, "out", sizeof(int64_t), writable=True)
        if counts is not None:
            return self.append_counts(rows, out, counts)
        count = cnp.PyArray_SIZE(rows)
        if cnp.PyArray_SIZE(out) < count:
            raise ValueError(f"out has {cnp.PyArray_SIZE(out)} entries for {count} rows")
        if <int64_t *>row < slots + count and slots < <int64_t *>(row + count):
            raise ValueError("out must not overlap rows in memory")
        with cython.critical_section(self.pool):
            self.prepare_append_batch(row, count)
            while True:
                stopped_by = 0
                served += append_rows(
                    self, row + served, count - served, slots + served,
                    int32_data(self.pair_array), &num_copies, &stopped_by,
                )
                if stopped_by != NO_CELL:
                    break
                # A row that is listed often needs more room than was made. If it
                # cannot be had, the next call says so, with nothing changed.
                try:
                    self.grow(self.num_rows, self.slab.num_columns + 1)
                except MemoryError:
                    break
            self.counts[OUT_OF_BLOCKS] += stopped_by == NO_BLOCK
            self.counts[TOKENS_APPENDED] += served
            return served, self.copies(num_copies) if num_copies else None

    cdef tuple append_counts(self, cnp.ndarray rows, cnp.ndarray out, cnp.ndarray counts):
        """append_batch with a number of tokens for each row."""
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(rows)
        cdef cnp.npy_intp served = 0, num_copies = 0
        cdef const int32_t *row = int32_data(rows)
        cdef const int32_t *number_of = int32_data(counts)
        cdef int64_t *slots = int64_data(out)
        cdef int64_t filled = 0
        cdef int32_t stopped_by = 0
        cdef int64_t total = check_counts(rows, counts)
        if cnp.PyArray_SIZE(out) < total:
            raise ValueError(f"out has {cnp.PyArray_SIZE(out)} entries for {total} tokens")
        check_no_overlap(out, "out", rows, "rows")
        check_no_overlap(out, "out", counts, "counts")
        with cython.critical_section(self.pool):
            self.prepare_append_counts(row, number_of, count)
            while served < count:
                stopped_by = append_several(
                    self, row[served], number_of[served], slots + filled,
                    int32_data(self.pair_array), &num_copies,
                )
                if stopped_by == NO_CELL:
                    try:
                        self.grow(self.num_rows, self.slab.num_columns + 1)
                    except MemoryError:
                        break
                    continue
                if stopped_by == NO_BLOCK:
                    break
                filled += number_of[served]
                served += 1
            self.counts[OUT_OF_BLOCKS] += stopped_by == NO_BLOCK
            self.counts[TOKENS_APPENDED] += filled
            return served, self.copies(num_copies) if num_copies else None

    cdef int prepare_append_counts(
        self, const int32_t *rows, const int32_t *counts, cnp.npy_intp count
    ) except -1:
        """prepare_append_batch with a number of tokens for each row."""
        cdef cnp.ndarray after = int64_zeros(self.num_rows)
        cdef int64_t columns = 0
        cdef cnp.npy_intp i
        self.check_rows(rows, count, "rows")
        for i in range(count):
            int64_data(after)[rows[i]] += counts[i]
            if self.slab.lengths[rows[i]] + int64_data(after)[rows[i]] > MAX_TOKENS:
                raise ValueError(f"counts: a sequence cannot grow past {MAX_TOKENS} tokens")
            columns = max(
                columns,
                columns_to_append(
                    self, self.slab.lengths[rows[i]], <int32_t>int64_data(after)[rows[i]]
                ),
            )
        return self.make_room(count, columns)

    cdef int check_rows(self, const int32_t *rows, cnp.npy_intp count, str name) except -1:
        cdef cnp.npy_intp i
        for i in range(count):
            if <uint32_t>rows[i] >= <uint32_t>self.num_rows or self.slab.lengths[rows[i]] < 0:
                self.no_such_row(rows, i, name)
        return 0

    cdef int tell_apart(self) except -1:
        """From now on no row is new that check_new has seen."""
        if cnp.PyArray_SIZE(self.seen_array) < self.num_rows:
            self.seen_array = int64_zeros(self.num_rows)
            self.seen = int64_data(self.seen_array)
        self.look += 1
        return 0

    cdef inline int check_new(self, int32_t row, str name) except -1:
        """A ValueError if the row has been here since tell_apart."""
        if self.seen[row] == self.look:
            return self.named_twice(row, name)
        self.seen[row] = self.look
        return 0

    cdef int named_twice(self, int32_t row, str name) except -1:
        raise ValueError(f"{name}: row {row} is named twice")

    def plan_append(
        self, cnp.ndarray rows not None, /, cnp.ndarray counts=None, cnp.ndarray without=None
    ):
        """The ``AppendPlan`` of the ``append_batch`` with these arguments. Changes nothing.

        For deciding who yields before anybody does: as if the rows in ``without`` had
        been freed first. O(len(rows) + blocks of ``without`` + blocks in the fence).

        Parameters
        ----------
        rows, counts
            As for ``append_batch``, but no row twice.
        without : ndarray, optional
            int32: other rows.

        Raises
        ------
        TypeError, ValueError
            Not such arrays, a row that no live sequence has, or a row named twice.
        """
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(rows)
        cdef cnp.npy_intp num_without = 0
        cdef const int32_t *row = int32_data(rows)
        cdef const int32_t *number_of = NULL
        cdef const int32_t *gone = NULL
        cdef int64_t needed, available, length, coming = 0, i
        check_array(rows, "rows", sizeof(int32_t), writable=False)
        if counts is not None:
            check_counts(rows, counts)
            number_of = int32_data(counts)
        if without is not None:
            check_array(without, "without", sizeof(int32_t), writable=False)
            gone = int32_data(without)
            num_without = cnp.PyArray_SIZE(without)
        with cython.critical_section(self.pool):
            self.check_rows(row, count, "rows")
            self.check_rows(gone, num_without, "without")
            self.tell_apart()
            for i in range(count):
                self.check_new(row[i], "rows")
            for i in range(num_without):
                self.check_new(gone[i], "without")
            for i in range(count):
                length = self.slab.lengths[row[i]]
                if length + (1 if number_of == NULL else number_of[i]) > MAX_TOKENS:
                    raise ValueError(
                        f"{'rows' if counts is None else 'counts'}: a sequence cannot grow past "
                        f"{MAX_TOKENS} tokens"
                    )
            self.make_room_for_pairs(count)
            available = available_blocks(self.blocks)
            if self.steps_issued == self.steps_settled:
                available += let_go(self, gone, num_without)
                needed = blocks_to_append_all(
                    self, row, number_of, count, int32_data(self.pair_array)
                )
                hold_again(self, gone, num_without)
            else:
                # What is dropped goes to the fence: it is held, and shared, until then.
                needed = blocks_to_append_all(
                    self, row, number_of, count, int32_data(self.pair_array)
                )
                coming = let_go(self, gone, num_without)
                for i in range(self.num_fenced):
                    self.blocks.ref[self.fenced[i]] -= 1
                    coming += self.blocks.ref[self.fenced[i]] == 0
                for i in range(self.num_fenced):
                    self.blocks.ref[self.fenced[i]] += 1
                hold_again(self, gone, num_without)
        return AppendPlan(needed, available, coming)

    cdef cnp.ndarray copies(self, cnp.npy_intp count):
        """The pairs that a batch has written, for its caller to keep.

        The array itself, cut short: there is no more room to be had for another.
        """
        cdef cnp.ndarray pairs = self.pair_array
        self.pair_array = NO_PAIRS
        cnp.PyArray_DIMS(pairs)[0] = count
        cnp.PyArray_ENABLEFLAGS(pairs, cnp.NPY_ARRAY_WRITEABLE)
        cnp.PyArray_UpdateFlags(pairs, cnp.NPY_ARRAY_UPDATE_ALL)
        return pairs

    cdef inline int prepare_append(self, int32_t row, int64_t n_tokens) except -1:
        if self.slab.lengths[row] + n_tokens > MAX_TOKENS:
            return self.too_long(row, n_tokens)
        if self.steps_issued != self.steps_settled:
            return self.reserve_fence(1)
        return 0

    cdef int too_long(self, int32_t row, int64_t n_tokens) except -1:
        raise ValueError(
            f"n_tokens is {n_tokens}: a sequence of {self.slab.lengths[row]} tokens "
            f"cannot grow past {MAX_TOKENS}"
        )

    cdef int prepare_append_batch(self, const int32_t *rows, cnp.npy_intp count) except -1:
        """Check the rows, in one pass before anything changes, and make room for them."""
        cdef const int32_t *lengths = self.slab.lengths
        cdef uint32_t num_rows = self.num_rows
        cdef int32_t length, longest = 0
        cdef cnp.npy_intp i
        for i in range(count):
            # A negative row is a large unsigned one.
            if <uint32_t>rows[i] >= num_rows or lengths[rows[i]] < 0:
                self.no_such_row(rows, i, "rows")
            length = lengths[rows[i]]
            longest = max(longest, length)
        if longest + <int64_t>count > MAX_TOKENS and self.longest_after(rows, count) > MAX_TOKENS:
            raise ValueError(f"rows: a sequence cannot grow past {MAX_TOKENS} tokens")
        return self.make_room(count, columns_to_append(self, longest, 1))

    cdef inline int make_room(self, cnp.npy_intp count, int64_t columns) except -1:
        """For a batch of that many rows, the longest of that many columns afterwards.

        The slab comes last: that it has grown can be seen.
        """
        if cnp.PyArray_DIM(self.pair_array, 0) < count:
            self.make_room_for_pairs(count)
        self.reserve_fence(count)
        return self.grow(self.num_rows, columns)

    cdef int make_room_for_pairs(self, cnp.npy_intp count) except -1:
        if cnp.PyArray_DIM(self.pair_array, 0) < count:
            self.pair_array = int32_table(count, 2)
        return 0

    cdef int no_such_row(
        self, const int32_t *rows, cnp.npy_intp entry, str name
    ) except -1:
        raise ValueError(
            f"{name}: entry {entry} is {rows[entry]}, which no live sequence has"
        )

    cdef int64_t longest_after(self, const int32_t *rows, cnp.npy_intp count) except -1:
        """The longest of these rows once each has got a token for each time it is listed."""
        cdef cnp.ndarray added = int64_zeros(self.num_rows)
        cdef int64_t longest = 0
        cdef cnp.npy_intp i
        for i in range(count):
            int64_data(added)[rows[i]] += 1
            longest = max(longest, self.slab.lengths[rows[i]] + int64_data(added)[rows[i]])
        return longest

    def can_append(self, seq, n_tokens=1, /):
        """Whether ``append_slots(seq, n_tokens)`` would be served now. O(1)."""
        cdef int64_t count = integer(n_tokens, "n_tokens", 0, MAX_TOKENS)
        cdef int32_t row
        with cython.critical_section(self.pool):
            row = self.find(seq)
            if self.slab.lengths[row] + count > MAX_TOKENS:
                return False
            return blocks_to_append(self, row, <int32_t>count) <= available_blocks(self.blocks)

    def truncate(self, seq, n_tokens, /):
        """Keep the first ``n_tokens``; blocks past them are released, last first.

        For rejected drafts and beam rollback. No data is touched. O(blocks dropped).

        Raises
        ------
        ValueError, TypeError
            ``n_tokens`` is negative, more than the sequence has, or no integer.
        KeyError
            ``seq`` is not live.
        """
        cdef int64_t length = integer(n_tokens, "n_tokens", 0, MAX_TOKENS)
        cdef int32_t row
        with cython.critical_section(self.pool):
            row = self.find(seq)
            if length > self.slab.lengths[row]:
                raise ValueError(
                    f"n_tokens is {length}, but {seq!r} has {self.slab.lengths[row]} tokens"
                )
            self.check_cut(row, <int32_t>length, "n_tokens")
            self.reserve_fence(
                blocks_for(&self.slab, self.slab.lengths[row])
                - blocks_for(&self.slab, <int32_t>length)
            )
            shorten(self, row, <int32_t>length)

    def truncate_batch(self, cnp.ndarray rows not None, cnp.ndarray lengths not None, /):
        """``truncate`` each row to its length: all, or an error and none.

        Parameters
        ----------
        rows, lengths : ndarray
            int32 ``(n,)``, contiguous; no row twice.
        """
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(rows), i
        cdef const int32_t *row = int32_data(rows)
        cdef const int32_t *length = int32_data(lengths)
        cdef int64_t dropped = 0
        check_array(rows, "rows", sizeof(int32_t), writable=False)
        check_array(lengths, "lengths", sizeof(int32_t), writable=False)
        if cnp.PyArray_SIZE(lengths) != count:
            raise ValueError(f"lengths has {cnp.PyArray_SIZE(lengths)} entries for {count} rows")
        with cython.critical_section(self.pool):
            self.check_rows(row, count, "rows")
            self.tell_apart()
            for i in range(count):
                self.check_new(row[i], "rows")
                if not 0 <= length[i] <= self.slab.lengths[row[i]]:
                    raise ValueError(
                        f"lengths: entry {i} is {length[i]}, but its row has "
                        f"{self.slab.lengths[row[i]]} tokens"
                    )
                self.check_cut(row[i], length[i], "lengths: one")
                dropped += blocks_for(&self.slab, self.slab.lengths[row[i]])
                dropped -= blocks_for(&self.slab, length[i])
            self.reserve_fence(dropped)
            for i in range(count):
                shorten(self, row[i], length[i])

    def release_outside_window(
        self, cnp.ndarray rows not None, cnp.ndarray lengths not None, window, sinks=0, /
    ):
        """Give back the blocks that no later token of a row can attend to.

        A token attends to itself, to the ``window - 1`` tokens before it, and to the
        first ``sinks``. Their cells become -1; the lengths stay. O(len(rows) + blocks
        given back).

        Parameters
        ----------
        rows, lengths : ndarray
            int32 ``(n,)``, contiguous: rows, and how many tokens of each are settled.
            Blocks that a step in flight still writes are none of those.
        window : int
            At least 1.
        sinks : int

        Returns
        -------
        int
            References given back.

        Raises
        ------
        TypeError, ValueError
            Not such arrays, a row that no live sequence has, or more tokens than it has.
        """
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(rows), i
        cdef const int32_t *row = int32_data(rows)
        cdef const int32_t *settled = int32_data(lengths)
        cdef int64_t seen = integer(window, "window", 1, MAX_TOKENS)
        cdef int32_t first = blocks_for(
            &self.slab, <int32_t>integer(sinks, "sinks", 0, MAX_TOKENS)
        )
        cdef int64_t total = 0
        cdef int32_t start, stop
        cdef int32_t *cells
        check_array(rows, "rows", sizeof(int32_t), writable=False)
        check_array(lengths, "lengths", sizeof(int32_t), writable=False)
        if cnp.PyArray_SIZE(lengths) != count:
            raise ValueError(f"lengths has {cnp.PyArray_SIZE(lengths)} entries for {count} rows")
        with cython.critical_section(self.pool):
            self.check_rows(row, count, "rows")
            for i in range(count):
                if not 0 <= settled[i] <= self.slab.lengths[row[i]]:
                    raise ValueError(
                        f"lengths: entry {i} is {settled[i]}, but its row has "
                        f"{self.slab.lengths[row[i]]} tokens"
                    )
                stop = full_blocks(&self.slab, <int32_t>max(settled[i] - seen + 1, 0))
                total += stop - first_outside(&self.slab, row[i], first, stop)
            self.reserve_fence(total)
            total = 0
            for i in range(count):
                stop = full_blocks(&self.slab, <int32_t>max(settled[i] - seen + 1, 0))
                start = first_outside(&self.slab, row[i], first, stop)
                if start == stop:
                    continue
                cells = table_of(&self.slab, row[i])
                drop(self, cells + start, stop - start)
                total += stop - start
                self.has_holes = True
                self.mirrored[row[i]] = min(self.mirrored[row[i]], start)
                while start < stop:
                    cells[start] = HOLE
                    start += 1
            return total

    def exclusive_blocks(self, seq, /):
        """The columns of a table whose blocks nobody else holds: a new int32 array, ascending.

        What swapping the sequence out could free. O(blocks). ``KeyError`` if it is not live.
        """
        cdef int32_t row, column
        cdef cnp.npy_intp count, found = 0
        cdef cnp.ndarray columns
        cdef int32_t *cells
        with cython.critical_section(self.pool):
            row = self.find(seq)
            count = blocks_for(&self.slab, self.slab.lengths[row])
            columns = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
            cells = table_of(&self.slab, row)
            for column in range(count):
                if cells[column] != HOLE and self.blocks.ref[cells[column]] == 1:
                    int32_data(columns)[found] = column
                    found += 1
        return columns[:found]

    def restore(self, seq, n_tokens, /, columns, blocks, *, tokens=None):
        """New sequence that holds given blocks where they belong, and new ones elsewhere.

        For one that comes back after ``free_seq``, when some of its blocks stayed and
        the others' data are written anew. O(blocks).

        Parameters
        ----------
        seq : hashable
        n_tokens : int
        columns : sequence of int
            Ascending columns of the table.
        blocks : sequence of int
            Their blocks: in use, each gets a holder more. -1 for one that a window has
            given back.
        tokens : Prompt, optional
            Its known tokens, as ``prompt_of`` gave them before: they are known again, but
            nothing is matched, and nothing published before ``commit`` says that it is
            settled. Without them it never publishes anything: nothing says in which
            namespace its data was computed.

        Returns
        -------
        ndarray
            int32: the new blocks, in order of their columns.

        Raises
        ------
        OutOfBlocks
            The pool has fewer blocks available.
        ValueError, TypeError
            ``seq`` is live, or an argument is not what it should be.
        """
        cdef int32_t length = <int32_t>integer(n_tokens, "n_tokens", 0, MAX_TOKENS)
        cdef int32_t total = blocks_for(&self.slab, length)
        cdef Prompt prompt = None
        cdef cnp.ndarray kept_columns = as_int32(columns, "columns")
        cdef cnp.ndarray kept_blocks = as_int32(blocks, "blocks")
        cdef const int32_t *column = int32_data(kept_columns)
        cdef const int32_t *block = int32_data(kept_blocks)
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(kept_columns)
        cdef cnp.npy_intp num_fresh = total - count
        cdef cnp.npy_intp i
        cdef int32_t row, start
        cdef cnp.ndarray fresh
        cdef int32_t *cells
        if cnp.PyArray_SIZE(kept_blocks) != count:
            raise ValueError(
                f"blocks has {cnp.PyArray_SIZE(kept_blocks)} entries for {count} columns"
            )
        held = [number for number in kept_blocks.tolist() if number != HOLE]
        if len(set(held)) != len(held):
            raise ValueError(f"blocks must be distinct, got {kept_blocks.tolist()}")
        for i in range(count):
            if not (column[i - 1] + 1 if i else 0) <= column[i] < total:
                raise ValueError(
                    f"columns: entry {i} is {column[i]}, in a table of {total} blocks; they "
                    "must ascend"
                )
        if tokens is not None and self.contents != NULL:
            if not isinstance(tokens, Prompt):
                raise TypeError(f"tokens must be a Prompt, got {tokens!r}")
            prompt = self.as_prompt(tokens, None, ())
            if prompt.num_tokens > length:
                raise ValueError(
                    f"n_tokens is {length}, but {prompt.num_tokens} tokens are given"
                )
        with cython.critical_section(self.pool):
            self.check_not_live(seq, "seq")
            if prompt is not None:
                self.prefix.resolve_keys(prompt)
            self.check_restore(length, prompt, column, block, count)
            fresh = cnp.PyArray_EMPTY(1, &num_fresh, cnp.NPY_INT32, 0)
            self.grow_for_one_more(total)
            row = self.bind(seq, "seq")
            try:
                # Once more: comparing ids may have let others run.
                if prompt is not None:
                    self.prefix.intern_keys(prompt)
                self.check_restore(length, prompt, column, block, count)
                self.grow(self.num_rows, total)
            except BaseException:
                self.unbind(seq)
                raise
            if prompt is not None:
                self.roots[row] = prompt.namespace_number
                hold_key(self.contents, prompt.namespace_number)
            cells = table_of(&self.slab, row)
            num_fresh = 0
            start = 0
            for i in range(count + 1):
                total = column[i] if i < count else blocks_for(&self.slab, length)
                take_into(self, row, start, total - start)
                memcpy(
                    int32_data(fresh) + num_fresh, cells + start,
                    (total - start) * sizeof(int32_t),
                )
                num_fresh += total - start
                if i < count:
                    cells[total] = block[i]
                    if block[i] == HOLE:
                        self.has_holes = True
                    else:
                        self.blocks.ref[block[i]] += 1
                start = total + 1
            self.slab.lengths[row] = length
            self.has_restored |= count > 0
            if prompt is not None:
                self.write_restored(row, prompt, column, count)
            elif self.contents != NULL:
                self.eras[row] = NO_ERA
            self.counts[SEQUENCES_ALLOCATED] += 1
            return fresh

    cdef int check_restore(
        self, int32_t length, Prompt prompt, const int32_t *columns, const int32_t *blocks,
        cnp.npy_intp count,
    ) except -1:
        """Whether a table of that length can be made around these blocks now.

        Needs: the keys of the prompt, if there is one, are resolved.
        """
        cdef int64_t needed = blocks_for(&self.slab, length) - count
        cdef cnp.npy_intp i
        for i in range(count):
            if blocks[i] == HOLE and columns[i] < full_blocks(&self.slab, length):
                continue
            if not 0 <= blocks[i] < self.blocks.num_blocks or self.blocks.ref[blocks[i]] == 0:
                raise ValueError(f"blocks: entry {i} is {blocks[i]}, which nobody holds")
        if needed > available_blocks(self.blocks):
            self.out_of_blocks(needed, available_blocks(self.blocks))
        return 0 if prompt is None else self.check_kept(prompt, columns, blocks, count)

    cdef int check_kept(
        self, Prompt prompt, const int32_t *columns, const int32_t *blocks, cnp.npy_intp count
    ) except -1:
        """A ValueError unless these blocks hold what the prompt has in their columns."""
        cdef int32_t size = self.slab.block_size
        cdef int32_t key, held
        cdef cnp.npy_intp i, j = 0
        for i in range(count):
            if blocks[i] == HOLE or columns[i] >= blocks_for(&self.slab, prompt.num_tokens):
                continue
            key = prompt.namespace_number if columns[i] == 0 else 0
            while j < prompt.num_keys and prompt.key_columns[j] < columns[i]:
                j += 1
            if j < prompt.num_keys and prompt.key_columns[j] == columns[i]:
                key = prompt.key_numbers[j]
            held = min(size, prompt.num_tokens - columns[i] * size)
            if record_of(self.contents, blocks[i]).key != key or not holds(
                self.contents, blocks[i], 0, prompt.tokens + <int64_t>columns[i] * size, held
            ):
                raise ValueError(
                    f"blocks: entry {i} is {blocks[i]}, which does not hold the tokens of "
                    f"column {columns[i]}"
                )
        return 0

    cdef void write_restored(
        self, int32_t row, Prompt prompt, const int32_t *kept, cnp.npy_intp count
    ) noexcept:
        """Note the tokens of a row that came back, in its new blocks; the kept ones have them.

        What it wrote before the index was reset, it may not publish now.
        """
        cdef int32_t *cells = table_of(&self.slab, row)
        cdef int32_t size = self.slab.block_size
        cdef int32_t column, held
        cdef cnp.npy_intp i = 0
        for column in range(blocks_for(&self.slab, prompt.num_tokens)):
            if i < count and kept[i] == column:
                i += 1
                continue
            held = min(size, prompt.num_tokens - column * size)
            memcpy(
                tokens_of(self.contents, cells[column]),
                prompt.tokens + <int64_t>column * size, held * sizeof(int32_t),
            )
            record_of(self.contents, cells[column]).filled = held
            if held == size:
                record_of(self.contents, cells[column]).hash = prompt.hashes[column]
        for i in range(prompt.num_keys):
            column = prompt.key_columns[i]
            if column < blocks_for(&self.slab, self.slab.lengths[row]) and cells[column] != HOLE:
                set_key(self.contents, cells[column], prompt.key_numbers[i])
        self.known_tokens[row] = prompt.num_tokens
        self.cut_columns[row] = prompt.cut_column
        self.published_blocks[row] = 0
        if prompt.written_in != 1 + self.contents.era:
            self.published_blocks[row] = CLOSED

    def fork(self, parent, child, /, n_tokens=None):
        """New sequence that shares the blocks of the parent's first ``n_tokens``.

        Default: all of them. Takes no block and copies nothing; a partial last block is
        shared too, and copied by whoever appends to it first. O(blocks shared).

        Raises
        ------
        KeyError
            ``parent`` is not live.
        ValueError, TypeError
            ``child`` is live, or ``n_tokens`` is not within the parent's length.
        """
        cdef int64_t length = -1
        cdef int64_t version
        cdef int32_t source, row, shared, i
        cdef int32_t *cells
        if n_tokens is not None:
            length = integer(n_tokens, "n_tokens", 0, MAX_TOKENS)
        with cython.critical_section(self.pool):
            for _ in range(ATTEMPTS):
                source = self.find(parent)
                version = self.version
                self.check_fork(source, length, parent)
                row = self.bind(child, "child")
                if self.version == version + 1:
                    break
                # Comparing ids let others run: the parent's row may be another's now.
                self.unbind(child)
            else:
                raise RuntimeError("comparing the ids of sequences changes the manager every time")
            try:
                self.check_fork(source, length, parent)
            except ValueError:
                self.unbind(child)
                raise
            if length < 0:
                length = self.slab.lengths[source]
            if self.retention_by_row:
                try:
                    self.retain_like(row, source)
                except BaseException:
                    self.unbind(child)
                    raise
            shared = blocks_for(&self.slab, <int32_t>length)
            cells = table_of(&self.slab, row)
            memcpy(cells, table_of(&self.slab, source), shared * sizeof(int32_t))
            for i in range(shared):
                if cells[i] != HOLE:
                    self.blocks.ref[cells[i]] += 1
            self.slab.lengths[row] = <int32_t>length
            if self.contents != NULL:
                self.inherit(row, source)
                know_less(self, row, <int32_t>length, self.slab.lengths[source])
            self.counts[SEQUENCES_FORKED] += 1

    cdef int retain_like(self, int32_t row, int32_t source) except -1:
        ranges = self.retention_by_row.get(source)
        if ranges is not None:
            self.retention_by_row[row] = ranges
        return 0

    cdef void inherit(self, int32_t row, int32_t source) noexcept:
        """What is known of one row is true of another that has its blocks now."""
        hold_key(self.contents, self.roots[source])
        drop_key(self.contents, self.roots[row])
        self.roots[row] = self.roots[source]
        self.eras[row] = self.eras[source]
        self.known_tokens[row] = self.known_tokens[source]
        self.published_blocks[row] = self.published_blocks[source]
        self.cut_columns[row] = self.cut_columns[source]

    cdef int check_cut(self, int32_t row, int32_t length, str name) except -1:
        """A ValueError if the row cut to that length ended inside a hole."""
        cdef int32_t column = full_blocks(&self.slab, length)
        if length > column * self.slab.block_size and table_of(&self.slab, row)[column] == HOLE:
            raise ValueError(
                f"{name} is {length}: the window has given back the block of that token"
            )
        return 0

    cdef int check_no_hole(self, int32_t row, int32_t start, int32_t stop) except -1:
        """A ValueError if some of these tokens' blocks have been given back."""
        cdef int32_t hole, last = blocks_for(&self.slab, stop)
        if not self.has_holes or start >= stop:
            return 0
        hole = first_hole(&self.slab, row, full_blocks(&self.slab, start), last)
        if hole < last:
            raise ValueError(
                f"the window has given back the block of token {hole * self.slab.block_size}"
            )
        return 0

    cdef int check_fork(self, int32_t source, int64_t length, parent) except -1:
        if length > self.slab.lengths[source]:
            raise ValueError(
                f"n_tokens is {length}, but {parent!r} has {self.slab.lengths[source]} tokens"
            )
        if length >= 0:
            self.check_cut(source, <int32_t>length, "n_tokens")
        return 0

    def reorder(self, seqs, parents, /):
        """One beam step: ``seqs[i]`` becomes what ``parents[i]`` was before the call.

        Takes no block and owes no copy: beams that come from one parent share its
        partial last block, and the appends that follow report the copies, one fewer
        than there are holders. O(len(seqs) + blocks in which child and parent differ). All
        blocks are compared where equal ones do not tell that all before them are equal too:
        with prefix caching, whose tables may hold copies of one content, and once a window
        or ``restore`` has put a table together.

        Parameters
        ----------
        seqs : sequence of ids
            Distinct live sequences.
        parents : sequence of ids
            As many live sequences, in ``seqs`` or not, repeated at will.

        Raises
        ------
        KeyError, ValueError
            An id is not live; ``seqs`` repeats one; the lengths differ.
        """
        cdef list children = items(seqs, "seqs")
        cdef list ancestors = items(parents, "parents")
        cdef cnp.npy_intp count = len(children)
        cdef cnp.npy_intp i, total = 0, dropped = 0
        cdef cnp.ndarray found, plan, tails
        cdef bint from_front
        cdef int32_t *row
        cdef int32_t *source
        cdef int32_t *first
        cdef int32_t *length
        cdef int32_t *tail
        cdef int32_t *known
        cdef int32_t column, held
        if count != len(ancestors):
            raise ValueError(f"parents has {len(ancestors)} entries for {count} seqs")
        if len(set(children)) != count:
            raise ValueError(f"seqs lists a sequence twice: {children!r}")
        with cython.critical_section(self.pool):
            found = self.find_all(children + ancestors)
            row = int32_data(found)
            source = row + count
            # Plan: by child, the first column in which it differs from its parent and
            # its new length, and what is known of the parent; then the parents' cells
            # from there on, copied because a parent may be overwritten before its
            # children are written. Going back from the end may stop at the first common
            # block: all before it agree. With prefix caching they only agree in content.
            plan = int32_zeros(7 * count)
            first = int32_data(plan)
            length = first + count
            known = length + count
            for i in range(count):
                length[i] = self.slab.lengths[source[i]]
                held = blocks_for(&self.slab, self.slab.lengths[row[i]])
                column = min(held, blocks_for(&self.slab, length[i]))
                from_front = self.contents != NULL or self.has_holes or self.has_restored
                if from_front:
                    column = common_columns(&self.slab, row[i], source[i], column)
                while (
                    not from_front
                    and column > 0
                    and table_of(&self.slab, row[i])[column - 1]
                    != table_of(&self.slab, source[i])[column - 1]
                ):
                    column -= 1
                first[i] = column
                if self.contents != NULL:
                    known[i] = self.known_tokens[source[i]]
                    known[count + i] = self.published_blocks[source[i]]
                    known[2 * count + i] = self.eras[source[i]]
                    known[3 * count + i] = self.roots[source[i]]
                    known[4 * count + i] = self.cut_columns[source[i]]
                total += blocks_for(&self.slab, length[i]) - column
                dropped += held - column
            tails = int32_zeros(total)
            tail = int32_data(tails)
            for i in range(count):
                held = blocks_for(&self.slab, length[i]) - first[i]
                memcpy(tail, table_of(&self.slab, source[i]) + first[i], held * sizeof(int32_t))
                tail += held
            self.reserve_fence(dropped)
            # Commit: retain everything before anything is dropped.
            tail = int32_data(tails)
            for i in range(total):
                if tail[i] != HOLE:
                    self.blocks.ref[tail[i]] += 1
            if self.contents != NULL:
                for i in range(count):
                    hold_key(self.contents, known[3 * count + i])
                for i in range(count):
                    drop_key(self.contents, self.roots[row[i]])
                    self.known_tokens[row[i]] = known[i]
                    self.published_blocks[row[i]] = known[count + i]
                    self.eras[row[i]] = known[2 * count + i]
                    self.roots[row[i]] = known[3 * count + i]
                    self.cut_columns[row[i]] = known[4 * count + i]
            for i in range(count):
                held = blocks_for(&self.slab, self.slab.lengths[row[i]])
                drop(self, table_of(&self.slab, row[i]) + first[i], held - first[i])
                held = blocks_for(&self.slab, length[i]) - first[i]
                memcpy(table_of(&self.slab, row[i]) + first[i], tail, held * sizeof(int32_t))
                tail += held
                self.slab.lengths[row[i]] = length[i]
                self.mirrored[row[i]] = min(self.mirrored[row[i]], first[i])

    def free_seq(self, seq, /):
        """End the sequence. Its blocks are released last first. O(blocks).

        In that order a prefix stays longer than what follows it. ``KeyError`` when
        ``seq`` is not live.
        """
        with cython.critical_section(self.pool):
            self.unbind(seq)
            self.counts[SEQUENCES_FREED] += 1

    # ------------------------------------------------------------ prefixes

    def commit(self, seq, tokens=None, /, *, n_settled=None):
        """Publish the full blocks of a sequence whose data has been written.

        After a prefill: ``commit(seq)``, or ``commit(seq, n_settled=...)`` for a chunk of
        it. After a decode: ``commit(seq, [token])``, or ``commit_batch``. From then on
        ``allocate`` finds the blocks. Each token is hashed at most once; without prefix
        caching this does nothing. O(len(tokens) + blocks published).

        Parameters
        ----------
        seq : hashable
        tokens : buffer or sequence of int, optional
            Ids of the tokens after those that are known.
        n_settled : int, optional
            Leading tokens whose data has been written. Default: all that are known.

        Returns
        -------
        int
            Blocks published now; one whose content was cached already counts too.

        Raises
        ------
        KeyError
            ``seq`` is not live.
        ValueError, TypeError
            More tokens than the sequence has slots for; a token that a sharer of the
            block knows otherwise; ``n_settled`` beyond the known tokens.
        """
        cdef int32_t row, settled, count, i
        cdef cnp.ndarray ids = self.ids_to_commit(tokens)
        cdef int64_t wanted = -1
        if n_settled is not None:
            wanted = integer(n_settled, "n_settled", 0, MAX_TOKENS)
        with cython.critical_section(self.pool):
            row = self.find(seq)
            if self.contents == NULL:
                return 0
            count = cnp.PyArray_SIZE(ids)
            settled = self.known_tokens[row] + count
            if settled > self.slab.lengths[row]:
                raise ValueError(
                    f"tokens: {count} more than the {self.known_tokens[row]} known ones exceed the "
                    f"{self.slab.lengths[row]} tokens of {seq!r}"
                )
            if wanted > settled:
                raise ValueError(f"n_settled is {wanted}, but {settled} tokens are known")
            if wanted >= 0:
                settled = <int32_t>wanted
            self.check_no_hole(row, self.known_tokens[row], self.known_tokens[row] + count)
            self.check_tokens(row, self.known_tokens[row], int32_data(ids), count)
            if self.merge_duplicates:
                self.reserve_fence(full_blocks(&self.slab, settled))
            write_tokens(self, row, int32_data(ids), count)
            i = self.published_blocks[row]
            count = publish_settled(self, row, settled)
            if self.retention_by_row:
                self.retain_blocks(row, max(i, 0), self.published_blocks[row])
            return count

    def commit_batch(self, cnp.ndarray rows not None, tokens, /):
        """One more token for each row, its data written: publishes what that fills.

        What ``commit(seq, [token])`` does for each, in one call; a row that is listed
        twice gets two. O(len(rows)).

        Parameters
        ----------
        rows : ndarray
            int32 ``(n,)``, contiguous: rows as ``rows()`` gives them.
        tokens : buffer or sequence of int
            One for each row.

        Returns
        -------
        int
            Blocks published now.

        Raises
        ------
        TypeError, ValueError
            Not such arrays, a row that no live sequence has or whose tokens are all
            known, or a token that a sharer of the block knows otherwise.
        """
        check_array(rows, "rows", sizeof(int32_t), writable=False)
        cdef cnp.ndarray ids = self.ids_to_commit(given(tokens))
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(rows)
        if self.contents == NULL:
            return 0
        if cnp.PyArray_SIZE(ids) != count:
            raise ValueError(f"tokens has {cnp.PyArray_SIZE(ids)} entries for {count} rows")
        with cython.critical_section(self.pool):
            self.check_rows(int32_data(rows), count, "rows")
            self.write_rows(int32_data(rows), int32_data(ids), count)
            return self.publish_rows(int32_data(rows), int32_data(ids), count)

    cdef int write_rows(
        self, const int32_t *rows, const int32_t *tokens, cnp.npy_intp count
    ) except -1:
        """Note one more token for each row, unless it is -1; all or nothing.

        Needs: live rows, tokens from -1.
        """
        cdef cnp.npy_intp i = 0, j
        # Tokens beyond those that a row knows are anybody's to overwrite: if a later
        # entry is refused, taking back what was counted up undoes it all.
        try:
            while True:
                i += write_next_of(self, rows + i, tokens + i, count - i)
                if i == count:
                    break
                if self.known_tokens[rows[i]] >= self.slab.lengths[rows[i]]:
                    raise ValueError(
                        f"rows: entry {i} is {rows[i]}, all of whose "
                        f"{self.known_tokens[rows[i]]} tokens are known"
                    )
                self.check_no_hole(
                    rows[i], self.known_tokens[rows[i]], self.known_tokens[rows[i]] + 1
                )
                self.check_tokens(rows[i], self.known_tokens[rows[i]], tokens + i, 1)
                write_tokens(self, rows[i], tokens + i, 1)
                i += 1
            if self.merge_duplicates:
                self.reserve_fence(self.num_unpublished(rows, count))
        except BaseException:
            for j in range(i):
                self.known_tokens[rows[j]] -= tokens[j] >= 0
            raise
        return 0

    def commit_pending(
        self, cnp.ndarray rows not None, cnp.ndarray pending not None, sampled=None, /
    ):
        """Each row's pending token is written now, and the sampled one is pending instead.

        ``commit_batch`` for an engine that samples a token in one step and writes it in
        the next. A row whose pending token is -1 is passed over, and stays so: what is
        written after a token that is not known cannot be published. Without prefix caching
        nothing is done. O(len(rows)).

        Parameters
        ----------
        rows : ndarray
            int32 ``(n,)``, contiguous; no row twice.
        pending : ndarray
            int32, contiguous, writable, by row number, not overlapping the others: tokens
            from 0, or below 0 for one that is not known.
        sampled : ndarray, optional
            int32 ``(n,)``: the new ones, from 0; by default none is known, -1.

        Returns
        -------
        int
            Blocks published now.

        Raises
        ------
        TypeError, ValueError
            As ``commit_batch``, or a row named twice, whose one pending token cannot be
            written twice. Nothing is pending instead of anything.
        """
        cdef const int32_t *row = int32_data(rows)
        cdef int32_t *last = int32_data(pending)
        cdef const int32_t *new = NULL
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(rows), i
        check_array(rows, "rows", sizeof(int32_t), writable=False)
        check_array(pending, "pending", sizeof(int32_t), writable=True)
        check_no_overlap(pending, "pending", rows, "rows")
        if sampled is not None:
            if not isinstance(sampled, np.ndarray):
                raise TypeError(f"sampled must be an array of int32, got {sampled!r}")
            check_array(sampled, "sampled", sizeof(int32_t), writable=False)
            check_no_overlap(pending, "pending", sampled, "sampled")
            if cnp.PyArray_SIZE(sampled) != count:
                raise ValueError(
                    f"sampled has {cnp.PyArray_SIZE(sampled)} entries for {count} rows"
                )
            new = int32_data(sampled)
            for i in range(count):
                if new[i] < 0:
                    raise ValueError(f"sampled: entry {i} must be at least 0, got {new[i]}")
        if self.contents == NULL:
            return 0
        cdef cnp.ndarray written = int32_zeros(count)
        with cython.critical_section(self.pool):
            self.check_rows(row, count, "rows")
            self.tell_apart()
            for i in range(count):
                self.check_new(row[i], "rows")
                if row[i] >= cnp.PyArray_SIZE(pending):
                    raise ValueError(
                        f"pending has {cnp.PyArray_SIZE(pending)} entries, but there is a "
                        f"row {row[i]}"
                    )
                int32_data(written)[i] = last[row[i]]
            self.write_rows(row, int32_data(written), count)
            for i in range(count):
                if int32_data(written)[i] >= 0:
                    last[row[i]] = -1 if new == NULL else new[i]
            return self.publish_rows(row, int32_data(written), count)

    cdef int32_t publish_rows(
        self, const int32_t *rows, const int32_t *tokens, cnp.npy_intp count
    ) noexcept:
        """Publish what is known of these rows after write_rows; how many blocks were.

        But not of those that got no token: what is known of them need not be settled.

        A block meets its bucket and its predecessor for the first time in a while. So
        rows with a full block are gathered, and served when what they need was fetched.
        Needs: reserve_fence for what they publish, if duplicates are merged.
        """
        cdef int32_t[AHEAD] ready
        cdef int32_t num_ready = 0, published = 0, before
        cdef cnp.npy_intp i
        for i in range(count):
            if tokens[i] < 0:
                continue
            before = self.published_blocks[rows[i]]
            if before != CLOSED and full_blocks(&self.slab, self.known_tokens[rows[i]]) > before:
                expect_publish(self, rows[i])
                ready[num_ready] = rows[i]
                num_ready += 1
                if num_ready == AHEAD:
                    published += self.publish_ready(ready, num_ready)
                    num_ready = 0
        return published + self.publish_ready(ready, num_ready)

    cdef int32_t publish_ready(self, const int32_t *rows, int32_t count) noexcept:
        cdef int32_t published = 0, before, i
        for i in range(count):
            hash_next(self, rows[i])
        for i in range(count):
            before = self.published_blocks[rows[i]]
            published += publish_settled(self, rows[i], self.known_tokens[rows[i]])
            if self.retention_by_row:
                self.retain_blocks(rows[i], max(before, 0), self.published_blocks[rows[i]])
        return published

    cdef int64_t num_unpublished(self, const int32_t *rows, cnp.npy_intp count) noexcept:
        """Full known blocks that the rows have not published, some counted more than once."""
        cdef int64_t total = 0
        cdef cnp.npy_intp i
        for i in range(count):
            total += max(
                0, full_blocks(&self.slab, self.known_tokens[rows[i]])
                - max(self.published_blocks[rows[i]], 0),
            )
        return total

    def token_ids(self, tokens, /):
        """Tokens as a fresh int32 array, checked as ``commit`` does. O(len(tokens)).

        Raises
        ------
        TypeError, ValueError
            Not a buffer or sequence of integers from 0 to 2**31 - 1.
        """
        return self.ids_to_commit(given(tokens))

    cdef cnp.ndarray ids_to_commit(self, tokens):
        """``tokens`` as an int32 array, checked."""
        cdef Py_buffer view
        cdef cnp.npy_intp count = 0
        cdef cnp.ndarray ids
        cdef int64_t bad
        if tokens is None:
            return cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        source = token_source(tokens)
        if isinstance(source, list):
            count = len(source)
            ids = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
            copy_list(source, int32_data(ids), count)
            return ids
        open_buffer(source, &view)
        try:
            count = view.shape[0]
            ids = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
            bad = copy_buffer(&view, int32_data(ids))
            if bad >= 0:
                bad_token(&view, bad)
        finally:
            PyBuffer_Release(&view)
        return ids

    cdef int check_tokens(
        self, int32_t row, int32_t position, const int32_t *tokens, int32_t count
    ) except -1:
        """ValueError if others know other tokens from that position of the row on."""
        cdef index_t *contents = self.contents
        cdef int32_t size = self.slab.block_size
        cdef int32_t column, offset, block, run
        while count > 0:
            column = full_blocks(&self.slab, position)
            offset = position - column * size
            block = table_of(&self.slab, row)[column]
            run = min(count, size - offset)
            # Nobody else knows what stands in a block that this row alone holds.
            if record_of(contents, block).filled > offset and (
                self.blocks.ref[block] > 1 or record_of(contents, block).uid > 0
            ):
                self.check_shared(
                    row, column, offset, tokens,
                    min(run, record_of(contents, block).filled - offset),
                )
            position += run
            tokens += run
            count -= run
        return 0

    cdef int check_shared(
        self, int32_t row, int32_t column, int32_t offset, const int32_t *tokens, int32_t count
    ) except -1:
        cdef int32_t block = table_of(&self.slab, row)[column]
        cdef int32_t position = column * self.slab.block_size + offset
        cdef int32_t noted, other, i
        for i in range(count):
            noted = tokens_of(self.contents, block)[offset + i]
            if noted == tokens[i]:
                continue
            for other in range(self.num_rows):
                if record_of(self.contents, block).uid > 0 or (
                    other != row
                    and self.known_tokens[other] > position + i
                    and blocks_for(&self.slab, self.slab.lengths[other]) > column
                    and table_of(&self.slab, other)[column] == block
                ):
                    raise ValueError(
                        f"tokens: token {position + i} of the sequence is {tokens[i]}, but its "
                        f"block is known to hold {noted} there"
                    )
        return 0

    def known(self, seq, /):
        """Leading tokens of a sequence whose ids are known."""
        cdef int32_t row
        with cython.critical_section(self.pool):
            row = self.find(seq)
            return 0 if self.contents == NULL else self.known_tokens[row]

    def published(self, seq, /):
        """Leading blocks of a sequence that were published or found in the cache.

        0 once the sequence cannot publish any more, because something it builds on was
        forgotten.
        """
        cdef int32_t row
        with cython.critical_section(self.pool):
            row = self.find(seq)
            if self.contents == NULL or self.eras[row] != self.contents.era:
                return 0
            return max(self.published_blocks[row], 0)

    def tokens(self, seq, /):
        """The ids of a sequence's known tokens: a fresh int32 array."""
        cdef int32_t row
        cdef cnp.npy_intp count = 0
        cdef cnp.ndarray ids
        with cython.critical_section(self.pool):
            row = self.find(seq)
            if self.contents != NULL:
                count = self.known_tokens[row]
                self.check_no_hole(row, 0, <int32_t>count)
            ids = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
            self.read_tokens(row, int32_data(ids), count)
            return ids

    cdef void read_tokens(self, int32_t row, int32_t *out, int64_t count) noexcept:
        cdef int32_t size = self.slab.block_size
        cdef const int32_t *cell = table_of(&self.slab, row)
        cdef int64_t start = 0
        while start < count:
            memcpy(
                out + start, tokens_of(self.contents, cell[0]),
                min(size, count - start) * sizeof(int32_t),
            )
            start += size
            cell += 1

    def prompt_of(self, seq, /):
        """The known tokens of a live sequence as a ``Prompt``, in its namespace.

        For a sequence that will be freed and come back: what was hashed is not hashed
        again. O(tokens). ``ValueError`` without prefix caching, where a window has given
        some of them back, and if ``restore`` was not told them.
        """
        cdef Prompt prompt = Prompt.__new__(Prompt)
        cdef dict keys = {}
        cdef int32_t row, column, block
        cdef uint64_t previous = 0
        cdef bytes root
        if self.contents == NULL:
            raise ValueError("prefix_caching is off: no tokens are known")
        with cython.critical_section(self.pool):
            row = self.find(seq)
            if self.eras[row] == NO_ERA:
                raise ValueError(f"{seq!r} was restored without its tokens")
            self.check_no_hole(row, 0, self.known_tokens[row])
            prompt.index = self.prefix
            prompt.allocate(self.known_tokens[row])
            self.read_tokens(row, prompt.tokens, prompt.num_tokens)
            root = self.prefix.keys_by_number[self.roots[row]]
            if root:
                keys[0] = root
            for column in range(blocks_for(&self.slab, prompt.num_tokens)):
                block = table_of(&self.slab, row)[column]
                if record_of(self.contents, block).key:
                    keys[column] = self.prefix.keys_by_number[record_of(self.contents, block).key]
                if column < prompt.num_full:
                    if record_of(self.contents, block).hash == 0:
                        record_of(self.contents, block).hash = hash_of(
                            self.contents, previous, tokens_of(self.contents, block),
                            record_of(self.contents, block).key,
                        )
                    previous = prompt.hashes[column] = record_of(self.contents, block).hash
            prompt.cut_column = self.cut_columns[row]
            if self.published_blocks[row] != CLOSED:
                prompt.written_in = 1 + self.eras[row]
        prompt.set_keys(root, keys)
        return prompt

    def reset(self):
        """Forget every cached content at once; sequences go on but publish nothing more.

        Evictable blocks become free. Returns the blocks that had an identity and that
        pins hold on to: what they hold is what it was. O(num_blocks); nothing without
        prefix caching.
        """
        with cython.critical_section(self.pool):
            pinned = self.blocks_pinned()
            if self.contents != NULL:
                self.prefix.forget_all()
            return pinned

    cdef list blocks_pinned(self):
        cdef list pinned = []
        cdef int32_t block
        if self.contents == NULL or self.pool.pin_counts == NULL:
            return pinned
        for block in range(self.blocks.num_blocks):
            if record_of(self.contents, block).uid > 0 and self.pool.pin_counts[block] > 0:
                pinned.append(block)
        return pinned

    @property
    def epoch(self):
        """The number that ``set_epoch`` set last; 0 at first."""
        return 0 if self.prefix is None else self.prefix.epoch

    def set_epoch(self, epoch, /):
        """Start an epoch, as when the weights of the model were changed.

        Nothing that was computed before is found again: the same as ``reset``, unless
        ``epoch`` is the present one. Returns what ``reset`` returns.
        """
        cdef int64_t wanted = integer(epoch, "epoch", 0, 2**62)
        with cython.critical_section(self.pool):
            if self.prefix is None or wanted == self.prefix.epoch:
                return []
            pinned = self.blocks_pinned()
            self.prefix.forget_all()
            self.prefix.epoch = wanted
            return pinned

    def forget(self, tokens, /, *, namespace=None, media=()):
        """Forget the contents of these tokens, every copy, and all that builds on them.

        Evictable blocks among them become free; sequences that hold some go on but
        publish nothing more. Returns how many blocks lost their identity.
        O(tokens + num_blocks log num_blocks).
        """
        cdef Prompt prompt = self.as_prompt(given(tokens), namespace, media)
        if prompt is None:
            return 0
        with cython.critical_section(self.pool):
            self.prefix.resolve_keys(prompt)
            return self.prefix.forget_path(prompt)

    def evict(self, count, /):
        """Let up to ``count`` evictable blocks become free: ``BlockPool.evict``."""
        return self.pool.evict(count)

    def pin_prefix(self, tokens, /, *, namespace=None, media=()):
        """Hold the cached full blocks that these tokens begin with: a ``PrefixPin``.

        As long as it is held they cannot be evicted. O(tokens).

        ``ValueError`` if more blocks than ``pin_quota`` would be held then.
        """
        cdef Prompt prompt = self.as_prompt(given(tokens), namespace, media)
        cdef int32_t found = 0, i
        cdef tuple blocks
        pin = PrefixPin(self, ())
        if prompt is None:
            return pin
        with cython.critical_section(self.pool):
            while True:
                self.prefix.resolve_keys(prompt)
                found = self.prefix.walk(prompt, prompt.num_full)
                blocks = tuple([prompt.blocks[i] for i in range(found)])
                # New containers may start a garbage collection, and that change the pool.
                if self.prefix.walk(prompt, prompt.num_full) == found and all_equal(prompt, blocks):
                    break
            if self.num_prefix_pins + found > self.pin_quota:
                raise ValueError(
                    f"pin_quota is {self.pin_quota} blocks, {self.num_prefix_pins} are held "
                    f"and {found} more were asked for"
                )
            if self.pool.pin_counts == NULL:
                self.pool.allocate_pins()
            pin.blocks = blocks
            pin.n_tokens = <int64_t>found * self.slab.block_size
            for i in range(found):
                claim(self, prompt.blocks[i], False)
                self.pool.pin_counts[prompt.blocks[i]] += 1
            self.num_prefix_pins += found
        return pin

    def _release_prefix(self, tuple blocks not None, /):
        """For ``PrefixPin``."""
        with cython.critical_section(self.pool):
            # Last first, as in every release.
            self.pool.release_many(blocks[::-1])
            self.num_prefix_pins -= len(blocks)

    @property
    def prefix_caching(self):
        return self.contents != NULL

    @property
    def prefix_index(self):
        """The ``PrefixIndex`` that the manager publishes in, or None."""
        return self.prefix

    def retention(self, seq, /):
        """The ``Retention`` ranges that ``allocate`` was given for a sequence."""
        with cython.critical_section(self.pool):
            ranges = self.retention_by_row.get(self.find(seq))
        return from_retention(ranges)

    cdef void retain_blocks(self, int32_t row, int32_t start, int32_t stop) noexcept:
        """Apply a row's ranges to its blocks in some columns."""
        cdef PyObject *found = PyDict_GetItemWithError(self.retention_by_row, row)
        cdef double *entry
        cdef double token
        cdef cnp.npy_intp i
        cdef int32_t column
        if found == NULL:
            return
        ranges = <cnp.ndarray>found
        entry = <double *>cnp.PyArray_DATA(ranges)
        for column in range(start, stop):
            if table_of(&self.slab, row)[column] == HOLE:
                continue
            token = <double>column * self.slab.block_size
            for i in range(cnp.PyArray_DIM(ranges, 0)):
                if entry[4 * i] <= token < entry[4 * i + 1]:
                    (<RetentionPriority>self.pool.eviction).retain(
                        table_of(&self.slab, row)[column], <uint8_t>entry[4 * i + 2],
                        entry[4 * i + 3],
                    )

    # ------------------------------------------------------------ holders

    def pin(self, block, /):
        """Hold a used or evictable block beyond its tables: ``BlockPool.retain``."""
        self.pool.retain(block)

    def unpin(self, block, /):
        """Give one pin of a block back: ``BlockPool.release``."""
        self.pool.release(block)

    def fence(self):
        """A step that may read or write blocks begins. Returns its number: 1, 2, 3, …

        References that tables drop from now on are held by the fence, counted in the
        ref counts, until the newest step begun by then is settled. An engine that runs
        ahead of its device opens one a step, before it plans the step; one that never
        does pays nothing. A block that a fence holds counts as shared, so that its last
        sharer copies it too instead of writing where that step may still read.
        """
        with cython.critical_section(self.pool):
            self.steps_issued += 1
            return self.steps_issued

    def settle(self, step, /):
        """A step and all before it are done: drop what was held for them.

        Returns how many references were dropped: 0 for a step settled before, since
        reports may come twice or out of order. ``ValueError`` for a step never begun.
        """
        cdef int64_t done = integer(step, "step", 1, 2**62)
        cdef int64_t count = 0, i
        with cython.critical_section(self.pool):
            if done > self.steps_issued:
                raise ValueError(f"step {done} was never issued; the last was {self.steps_issued}")
            if done <= self.steps_settled:
                return 0
            self.steps_settled = done
            while count < self.num_fenced and self.fenced_until[count] <= done:
                self.counts[BLOCKS_RELEASED] += release_block(self.blocks, self.fenced[count])
                count += 1
            self.num_fenced -= count
            for i in range(self.num_fenced):
                self.fenced[i] = self.fenced[count + i]
                self.fenced_until[i] = self.fenced_until[count + i]
            return count

    # ------------------------------------------------------------ reading

    @property
    def num_blocks(self):
        return self.blocks.num_blocks

    @property
    def num_available(self):
        """Blocks that can be taken now: free ones and evictable ones."""
        with cython.critical_section(self.pool):
            return available_blocks(self.blocks)

    @property
    def block_size(self):
        return self.slab.block_size

    def __contains__(self, seq, /):
        return seq in self.rows_by_seq

    def __len__(self):
        """Live sequences."""
        return len(self.rows_by_seq)

    def __iter__(self):
        return iter(self.rows_by_seq)

    def __repr__(self):
        return (
            f"BlockManager(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"sequences={len(self)}, used={self.pool.num_used})"
        )

    def length(self, seq, /):
        """Tokens of a sequence. ``KeyError``."""
        with cython.critical_section(self.pool):
            return self.slab.lengths[self.find(seq)]

    def table(self, seq, /):
        with cython.critical_section(self.pool):
            self.find(seq)
        return BlockTable.__new__(BlockTable, self, seq)

    def row(self, seq, /):
        """The row of a sequence in ``block_tables`` and ``lengths``, its own for life."""
        with cython.critical_section(self.pool):
            return self.find(seq)

    def rows(self, seqs, /):
        """The rows of many sequences, as a fresh int32 array."""
        cdef list ids = items(seqs, "seqs")
        with cython.critical_section(self.pool):
            return self.find_all(ids)

    def lengths_of(self, cnp.ndarray rows not None, /):
        """The tokens of many rows, as a fresh int32 array: ``lengths[rows]``, only faster.

        ``ValueError`` for a row that no live sequence has.
        """
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(rows), i
        cdef const int32_t *row = int32_data(rows)
        cdef cnp.ndarray lengths
        check_array(rows, "rows", sizeof(int32_t), writable=False)
        with cython.critical_section(self.pool):
            self.check_rows(row, count, "rows")
            lengths = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
            for i in range(count):
                int32_data(lengths)[i] = self.slab.lengths[row[i]]
            return lengths

    def slots(self, seq, /, start=0, stop=None):
        """Slots of the tokens ``start:stop`` (default: all), int64.

        ``ValueError`` unless ``0 <= start <= stop <= length``.
        """
        cdef int64_t first = integer(start, "start", 0, MAX_TOKENS)
        cdef int64_t last = -1
        cdef int32_t row
        cdef cnp.npy_intp count
        cdef cnp.ndarray slots
        if stop is not None:
            last = integer(stop, "stop", 0, MAX_TOKENS)
        with cython.critical_section(self.pool):
            row = self.find(seq)
            if last < 0:
                last = self.slab.lengths[row]
            if not first <= last <= self.slab.lengths[row]:
                raise ValueError(
                    f"start {first} and stop {last} must be in order within the "
                    f"{self.slab.lengths[row]} tokens of {seq!r}"
                )
            self.check_no_hole(row, <int32_t>first, <int32_t>last)
            count = last - first
            slots = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
            write_slots(&self.slab, row, <int32_t>first, <int32_t>last, int64_data(slots))
            return slots

    @property
    def tables(self):
        """Mapping of live sequences to their ``BlockTable``."""
        return Tables(self)

    @property
    def lens(self):
        """Mapping of live sequences to their number of tokens."""
        return Lengths(self)

    @property
    def free(self):
        """The free blocks: ``len``, iteration in hand-out order, ``in``."""
        return FreeBlocks(self)

    @property
    def ref(self):
        """Ref counts, int32 ``(num_blocks,)``, live and read-only."""
        return self.pool.ref_array

    @property
    def block_tables(self):
        """The table slab, int32 ``(rows, columns)``, live and read-only.

        Row ``row(seq)`` begins with the blocks of ``seq``; cells past them are
        unspecified. The view is live until ``table_generation`` changes; from then
        on it keeps the cells of that moment and a new view must be taken.
        """
        return self.table_array

    @property
    def lengths(self):
        """Tokens by row, int32 ``(rows,)``, live and read-only like ``block_tables``.

        -1 marks a row that no sequence has.
        """
        return self.length_array

    @property
    def table_generation(self):
        """Grows by one whenever ``block_tables`` and ``lengths`` were reallocated."""
        return self.generation

    @property
    def rows_version(self):
        """Changes whenever a sequence gets its row or gives it back."""
        return self.version

    @property
    def counters(self):
        """int64 ``(len(Counter),)``, live and read-only; indices: ``kvcore.Counter``."""
        return self.count_array

    def drain_changes(self):
        """The table cells that changed since the last call: int32 ``(k, 3)``.

        Each ``(row, column, block)``, at most one entry a cell, in row then column
        order, so that a mirror of the slab which applies them equals it on all live
        cells. O(rows + changed cells); memory does not grow when nobody drains.
        """
        cdef cnp.npy_intp[2] shape
        cdef cnp.ndarray changes
        cdef int32_t *out
        cdef int32_t row, column
        shape[0] = 0
        shape[1] = 3
        with cython.critical_section(self.pool):
            for row in range(self.num_rows):
                if self.slab.lengths[row] >= 0:
                    shape[0] += blocks_for(&self.slab, self.slab.lengths[row]) - self.mirrored[row]
            changes = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT32, 0)
            out = int32_data(changes)
            for row in range(self.num_rows):
                if self.slab.lengths[row] < 0:
                    continue
                for column in range(
                    self.mirrored[row], blocks_for(&self.slab, self.slab.lengths[row])
                ):
                    out[0] = row
                    out[1] = column
                    out[2] = table_of(&self.slab, row)[column]
                    out += 3
                self.mirrored[row] = blocks_for(&self.slab, self.slab.lengths[row])
            return changes

    def gauges(self):
        """One consistent snapshot of how full the pool is. O(num_blocks + sequences)."""
        cdef int32_t shared = 0, pinned = 0, block, row
        cdef int64_t tokens = 0, logical = 0, fenced = 0, free, evictable, sequences
        cdef int64_t cached = 0
        with cython.critical_section(self.pool):
            free, evictable = self.blocks.num_free, self.blocks.num_evictable
            if self.pool.prefix_index is not None:
                cached = (<PrefixIndex>self.pool.prefix_index).state.num_identities
            sequences, fenced = len(self.rows_by_seq), self.num_fenced
            for block in range(self.blocks.num_blocks):
                shared += self.blocks.ref[block] > 1
            if self.pool.pin_counts != NULL:
                for block in range(self.blocks.num_blocks):
                    pinned += self.pool.pin_counts[block] > 0
            for row in range(self.num_rows):
                if self.slab.lengths[row] > 0:
                    tokens += self.slab.lengths[row]
                    logical += blocks_for(&self.slab, self.slab.lengths[row])
                    if self.has_holes:
                        logical -= num_holes(&self.slab, row)
        return Gauges(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free=free,
            evictable=evictable,
            used=self.num_blocks - free - evictable,
            shared=shared,
            pinned=pinned,
            fenced=fenced,
            sequences=sequences,
            tokens=tokens,
            logical_blocks=logical,
            cached=cached,
        )

    def check(self):
        """Verify every invariant, or raise ``InvariantError``. O(num_blocks + cells)."""
        self.pool.check()

    def _count_references(self, cnp.ndarray held_array not None, /):
        """For ``BlockPool.check``: verify the rows and add what they and the fence hold."""
        cdef int64_t *held = int64_data(held_array)
        cdef int32_t num_blocks = self.blocks.num_blocks
        cdef int32_t row, column, block, length
        cdef int64_t i, live = 0, binding = 0
        cdef cnp.ndarray owned = int32_zeros(self.num_rows)
        cdef cnp.ndarray last_row = int32_zeros(num_blocks)  # and one, that each block stands in
        for seq, number in self.rows_by_seq.items():
            row = number
            if not 0 <= row < self.num_rows or int32_data(owned)[row]:
                raise InvariantError("I2", None, f"row {row} of {seq!r} is not its own")
            int32_data(owned)[row] = True
            if self.slab.lengths[row] < 0:
                raise InvariantError("I2", None, f"{seq!r} has {self.slab.lengths[row]} tokens")
        for i in range(self.num_spare):
            row = self.spare[i]
            if not 0 <= row < self.num_rows or int32_data(owned)[row]:
                raise InvariantError("I2", None, f"spare row {row} is in use")
            int32_data(owned)[row] = True
            if self.slab.lengths[row] != -1:
                raise InvariantError("I2", None, f"spare row {row} has a length")
            live -= 1
        for row in range(self.num_rows):
            length = self.slab.lengths[row]
            if not int32_data(owned)[row] and length == -1:
                binding += 1
            elif not int32_data(owned)[row] or length < -1:
                raise InvariantError("I2", None, f"row {row} is lost, its length {length}")
            live += 1
            if length < 0:
                continue
            if blocks_for(&self.slab, length) > self.slab.num_columns:
                raise InvariantError("I2", None, f"row {row} cannot hold {length} tokens")
            if not 0 <= self.mirrored[row] <= blocks_for(&self.slab, length):
                raise InvariantError("I2", None, f"row {row} mirrors cells it does not have")
            for column in range(blocks_for(&self.slab, length)):
                block = table_of(&self.slab, row)[column]
                if block == HOLE and self.has_holes and (
                    (column + 1) * <int64_t>self.slab.block_size <= length
                ):
                    continue
                if not 0 <= block < num_blocks:
                    raise InvariantError("I2", block, f"no block, in row {row} column {column}")
                if int32_data(last_row)[block] == row + 1:
                    raise InvariantError("I3", block, f"stands twice in row {row}")
                int32_data(last_row)[block] = row + 1
                held[block] += 1
            if self.contents != NULL:
                self.check_content(row)
        if binding != self.num_binding or live - binding != len(self.rows_by_seq):
            raise InvariantError(
                "I2", None, f"{live} rows in use by {len(self.rows_by_seq)} sequences"
            )
        for i in range(self.num_fenced):
            block = self.fenced[i]
            if not 0 <= block < num_blocks:
                raise InvariantError("I1", block, "no block, in the fence")
            held[block] += 1

    cdef int check_content(self, int32_t row) except -1:
        """I6: what a row published is what it holds, each block after the one before."""
        cdef index_t *contents = self.contents
        cdef const int32_t *cells = table_of(&self.slab, row)
        cdef int32_t known = self.known_tokens[row], published = self.published_blocks[row]
        cdef int32_t column, block
        if not (0 <= known <= self.slab.lengths[row] and CLOSED <= published) or (
            published > full_blocks(&self.slab, known)
        ):
            raise InvariantError(
                "I6", None, f"row {row} of {self.slab.lengths[row]} tokens knows {known} and "
                f"published {published} blocks"
            )
        for column in range(blocks_for(&self.slab, known)):
            block = cells[column]
            if block == HOLE:
                continue
            if record_of(contents, block).filled < min(
                self.slab.block_size, known - column * self.slab.block_size
            ):
                raise InvariantError("I6", block, f"lacks tokens that row {row} knows")
        if self.eras[row] != contents.era:
            return 0
        for column in range(max(published, 0)):
            block = cells[column]
            if block == HOLE:
                continue
            if record_of(contents, block).uid == 0:
                if record_of(contents, block).parent != BARRED:
                    raise InvariantError("I6", block, f"was published by row {row} and is not now")
                return 0
            if column and cells[column - 1] == HOLE:
                continue
            if record_of(contents, block).parent != (
                record_of(contents, cells[column - 1]).uid if column else 0
            ):
                raise InvariantError("I6", block, f"does not follow what is before it in row {row}")
        return 0

    def _count_keys(self, cnp.ndarray references_array not None, /):
        """For ``PrefixIndex``: add the references that rows have to keys."""
        cdef int32_t row
        if self.contents == NULL:
            return
        for row in range(self.num_rows):
            if self.slab.lengths[row] >= 0:
                int32_data(references_array)[self.roots[row]] += 1


cdef bint all_equal(Prompt prompt, tuple blocks) noexcept:
    """Whether a walk found these blocks."""
    cdef int32_t i
    for i in range(len(blocks)):
        if prompt.blocks[i] != <int32_t>blocks[i]:
            return False
    return True


cdef object given(tokens):
    """``tokens``, which this call cannot do without."""
    if tokens is None:
        raise TypeError("tokens must be a buffer or a sequence, got None")
    return tokens


cdef cnp.ndarray as_int32(values, str name):
    """``values`` as a new array of int32, or an error naming both."""
    cdef list listed = items(
        values.tolist() if isinstance(values, np.ndarray) else values, name
    )
    cdef cnp.npy_intp count = len(listed), i
    cdef cnp.ndarray numbers = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
    entry = f"{name}: an entry"
    for i in range(count):
        int32_data(numbers)[i] = <int32_t>integer(listed[i], entry, -MAX_TOKENS, MAX_TOKENS)
    return numbers


cdef int64_t check_counts(cnp.ndarray rows, cnp.ndarray counts) except -1:
    """``counts`` beside ``rows``: positive numbers, as many; their sum."""
    cdef const int32_t *number_of = int32_data(counts)
    cdef int64_t total = 0
    cdef cnp.npy_intp i
    check_array(counts, "counts", sizeof(int32_t), writable=False)
    if cnp.PyArray_SIZE(counts) != cnp.PyArray_SIZE(rows):
        raise ValueError(
            f"counts has {cnp.PyArray_SIZE(counts)} entries for {cnp.PyArray_SIZE(rows)} rows"
        )
    for i in range(cnp.PyArray_SIZE(counts)):
        if number_of[i] < 1:
            raise ValueError(f"counts: entry {i} must be at least 1, got {number_of[i]}")
        total += number_of[i]
    return total


cdef int check_array(
    cnp.ndarray array, str name, cnp.npy_intp itemsize, bint writable
) except -1:
    """A 1-D C array of signed integers of that size, whatever numpy calls its type."""
    if not (
        cnp.PyTypeNum_ISSIGNED(cnp.PyArray_TYPE(array))
        and cnp.PyArray_ITEMSIZE(array) == itemsize
    ):
        raise TypeError(f"{name} must be an array of int{8 * itemsize}, got {array.dtype}")
    check_c_array(array, name, 1)
    return check_writable(array, name) if writable else 0


# ---------------------------------------------------------------- a table as Python sees it


@cython.final
cdef class BlockTable:
    """One sequence's block ids, in token order: a live, read-only sequence of int.

    Compares equal to the list of its ids. Exports the buffer protocol without a
    copy (``np.asarray(table)``: int32 ``(blocks,)``); such a buffer shows the cells
    as they are now, and stays current only until the sequence appends past it, is
    freed, or the manager's ``table_generation`` changes. The object itself follows
    the sequence by its id and raises ``KeyError`` once that is freed.
    """

    cdef BlockManager manager
    cdef object seq

    def __cinit__(self, BlockManager manager not None, seq, /):
        self.manager = manager
        self.seq = seq

    cdef cnp.ndarray array(self):
        cdef BlockManager manager = self.manager
        with cython.critical_section(manager.pool):
            row = manager.find(self.seq)
            blocks = blocks_for(&manager.slab, manager.slab.lengths[<int32_t>row])
            return manager.table_array[row, :blocks]

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyObject_GetBuffer(self.array(), buffer, flags)

    def __array__(self, dtype=None, copy=None):
        # numpy asks for the buffer first, and comes here when that fails: with the
        # KeyError of a freed sequence, which it would otherwise swallow.
        return np.array(self.array(), dtype=dtype, copy=copy)

    def tolist(self):
        return self.array().tolist()

    def __len__(self):
        return cnp.PyArray_SIZE(self.array())

    def __getitem__(self, index):
        if not isinstance(index, slice):
            index = as_index(index)
        return self.array()[index].tolist()

    def __iter__(self):
        return iter(self.tolist())

    def __contains__(self, block):
        return block in self.tolist()

    def __eq__(self, other):
        if isinstance(other, (BlockTable, np.ndarray)):
            other = other.tolist()
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        return self.tolist() == list(other)

    __hash__ = None

    def __repr__(self):
        return f"BlockTable({self.tolist() if self.seq in self.manager else 'freed'})"


# ---------------------------------------------------------------- retention


cdef cnp.ndarray as_retention(BlockManager manager, retention):
    """Ranges as float64 ``(k, 4)``: start, stop, priority, duration; or None for none.

    An open end is infinite, and a duration without one is -1.
    """
    cdef list listed = items(retention, "retention")
    if not listed:
        return None
    if not isinstance(manager.pool.eviction, RetentionPriority):
        raise ValueError(
            "retention needs a pool with eviction=RetentionPriority(), this one has "
            f"{manager.pool.eviction!r}"
        )
    rows = []
    for entry in listed:
        try:
            start, stop, priority, duration = entry if len(entry) == 4 else (*entry, None)
        except (TypeError, ValueError):
            raise TypeError(f"retention: expected a Retention, got {entry!r}") from None
        first = integer(start, "retention: start", 0, MAX_TOKENS)
        level = integer(priority, "retention: priority", 0, 100)
        if stop is not None and integer(stop, "retention: stop", 0, MAX_TOKENS) <= first:
            raise ValueError(f"retention: stop must be after start, got {entry!r}")
        seconds = -1.0 if duration is None else number(duration, "retention: duration")
        if duration is not None and seconds < 0.0:
            raise ValueError(f"retention: duration must be at least 0, got {duration!r}")
        rows.append((first, float("inf") if stop is None else stop, level, seconds))
    rows.sort()
    for before, after in zip(rows, rows[1:]):
        if before[1] > after[0]:
            raise ValueError(f"retention: ranges overlap at token {after[0]}")
    return np.array(rows, np.float64)


cdef tuple from_retention(ranges):
    if ranges is None:
        return ()
    return tuple([
        Retention(
            int(start), None if stop == float("inf") else int(stop), int(priority),
            None if duration < 0 else duration,
        )
        for start, stop, priority, duration in ranges.tolist()
    ])
