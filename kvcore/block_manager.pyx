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
from cpython.buffer cimport PyObject_GetBuffer
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from operator import index as as_index
from weakref import ref as weak_reference

import numpy as np

from kvcore._arguments cimport integer, items
from kvcore._arrays cimport int32_data, int32_table, int32_zeros, int64_data, int64_zeros
from kvcore.pool cimport (
    BlockPool, available_blocks, release_block, release_blocks_reversed, take_block, take_blocks,
)

from kvcore.counters import Counter
from kvcore.errors import InvariantError, OutOfBlocks
from kvcore.gauges import Gauges
from kvcore.views import FreeBlocks, Lengths, Tables

cnp.import_array()

__all__ = ["BlockManager", "BlockTable"]

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
    NUM_COUNTERS

assert NUM_COUNTERS == len(Counter)

# Ids compared by Python code let other threads run in between. Rows looked up together are
# looked up again when one has changed hands meanwhile, this often.
cdef enum:
    ATTEMPTS = 1000

# What an append answers instead of a block.
cdef enum:
    NO_BLOCK = -1
    NO_CELL = -2  # the slab has no column for it yet


# ---------------------------------------------------------------- one table, in C


cdef inline int32_t take(BlockManager self) noexcept nogil:
    """Needs: a block is available."""
    self.counts[EVICTIONS] += self.blocks.num_free == 0
    self.counts[BLOCKS_TAKEN] += 1
    return take_block(self.blocks)


cdef inline void take_many(BlockManager self, int32_t count, int32_t *cells) noexcept nogil:
    """Needs: that many blocks are available."""
    self.counts[EVICTIONS] += max(0, count - self.blocks.num_free)
    self.counts[BLOCKS_TAKEN] += count
    take_blocks(self.blocks, count, cells)


cdef inline void drop(BlockManager self, const int32_t *cells, int32_t count) noexcept nogil:
    """The one way out of a table: its references to ``cells`` go, last first.

    They go to the pool or, while a step is in flight that may still touch the blocks,
    to the fence, which then holds them. Needs: reserve_fence(count).
    """
    cdef int32_t i
    if self.steps_issued == self.steps_settled:
        self.counts[BLOCKS_RELEASED] += release_blocks_reversed(self.blocks, cells, count)
        return
    for i in range(count - 1, -1, -1):
        self.fenced[self.num_fenced] = cells[i]
        self.fenced_until[self.num_fenced] = self.steps_issued
        self.num_fenced += 1


cdef inline int32_t own_tail(BlockManager self, int32_t row, int32_t column) noexcept nogil:
    """Copy on write: a fresh block for the shared one at the row's last ``column``.

    Returns the old block. The new one is taken before the old one is dropped.
    Needs: a block is available, reserve_fence(1).
    """
    cdef int32_t *cell = table_of(&self.slab, row) + column
    cdef int32_t shared = cell[0]
    cell[0] = take(self)
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
    offset[0] = length - column * self.slab.block_size
    copy_source[0] = -1
    if available_blocks(self.blocks) == 0:
        return NO_BLOCK
    if offset[0] > 0:
        copy_source[0] = own_tail(self, row, column)
    elif column == self.slab.num_columns:
        return NO_CELL
    else:
        table_of(&self.slab, row)[column] = take(self)
    self.slab.lengths[row] = length + 1
    return table_of(&self.slab, row)[column]


cdef inline int32_t append_one(
    BlockManager self, int32_t row, int32_t *offset, int32_t *copy_source
) noexcept nogil:
    """Needs: what append_in_place and append_with_block need."""
    cdef int32_t block
    copy_source[0] = -1
    if append_in_place(&self.slab, row, &block, offset):
        return block
    return append_with_block(self, row, offset, copy_source)


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

    What append_one does, in a loop that keeps the slab in registers: a row in steady
    decode costs three dependent loads and three multiplications, and no call.
    Needs: live rows; room for ``count`` slots and pairs; reserve_fence(count).
    """
    cdef slab_t slab = self.slab
    cdef cnp.npy_intp i
    cdef int32_t block, offset, taken, position, source
    for i in range(count):
        if append_in_place(&slab, rows[i], &block, &offset):
            slots[i] = <int64_t>block * slab.block_size + offset
            continue
        taken = append_with_block(self, rows[i], &position, &source)
        if taken < 0:
            stopped_by[0] = taken
            return i
        slots[i] = <int64_t>taken * slab.block_size + position
        if source >= 0:
            pairs[2 * num_copies[0]] = source
            pairs[2 * num_copies[0] + 1] = taken
            num_copies[0] += 1
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


cdef inline void shorten(BlockManager self, int32_t row, int32_t n_tokens) noexcept nogil:
    """Needs: 0 <= n_tokens <= length, reserve_fence for the blocks that go."""
    cdef int32_t kept = blocks_for(&self.slab, n_tokens)
    cdef int32_t held = blocks_for(&self.slab, self.slab.lengths[row])
    drop(self, table_of(&self.slab, row) + kept, held - kept)
    self.slab.lengths[row] = n_tokens
    self.mirrored[row] = min(self.mirrored[row], kept)


# ---------------------------------------------------------------- the C interface


cdef int32_t available(BlockManager manager) noexcept nogil:
    return available_blocks(manager.blocks)


cdef int32_t row_of(BlockManager manager, seq) except -1:
    return manager.find(seq)


cdef int reserve(BlockManager manager, int32_t row, int64_t n_tokens) except -1:
    cdef int32_t blocks
    manager.prepare_append(row, n_tokens)
    blocks = blocks_for(&manager.slab, manager.slab.lengths[row] + <int32_t>n_tokens)
    return manager.grow(manager.num_rows, min(blocks, manager.blocks.num_blocks))


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
    """

    def __cinit__(self, num_blocks, block_size, *, pool=None, rows=64, columns=64):
        cdef int64_t blocks = integer(num_blocks, "num_blocks", 1, MAX_TOKENS - 1)
        self.slab.block_size = integer(block_size, "block_size", 1, MAX_TOKENS)
        cdef int64_t initial_rows = integer(rows, "rows", 1, MAX_TOKENS)
        cdef int64_t initial_columns = integer(columns, "columns", 1, MAX_TOKENS)
        if pool is None:
            pool = BlockPool(num_blocks)
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
        self.pair_array = int32_table(0, 2)
        self.generation = -1
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
            self.grow(2 * <int64_t>self.num_rows, self.slab.num_columns)
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
        self.version += 1
        return row

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
        shorten(self, row, 0)
        self.slab.lengths[row] = -1
        self.spare[self.num_spare] = row
        self.num_spare += 1
        self.version += 1
        return 0

    cdef int grow(self, int64_t rows, int64_t columns) except -1:
        """Make the slab at least that large; MemoryError, and nothing changed."""
        cdef int32_t row, old_rows = self.num_rows
        cdef int64_t old_columns = self.slab.num_columns
        if rows <= old_rows and columns <= old_columns:
            return 0
        rows = max(rows, old_rows)
        if columns > old_columns:
            columns = max(columns, min(2 * old_columns, self.blocks.num_blocks))
        # An odd number of cache lines a row: with a power of two, the same column of
        # every row would fall into the same few cache sets, and a batch append reads
        # exactly one column of every row.
        columns = max((columns + 15) // 16 | 1, old_columns // 16) * 16
        cdef cnp.ndarray tables = int32_table(rows, columns)
        cdef cnp.ndarray lengths = int32_zeros(rows)
        cdef cnp.ndarray mirrored = int32_zeros(rows)
        cdef cnp.ndarray spare = int32_zeros(rows)
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

    cdef int out_of_blocks(self, int64_t needed) except -1:
        self.counts[OUT_OF_BLOCKS] += 1
        raise OutOfBlocks(needed, available_blocks(self.blocks))

    # ------------------------------------------------------------ sequences

    def allocate(self, seq, n_tokens, /):
        """New sequence with a table of ``ceil(n_tokens / block_size)`` blocks. O(blocks).

        Raises
        ------
        OutOfBlocks
            The pool has fewer blocks available.
        ValueError, TypeError
            ``seq`` is live, or ``n_tokens`` negative or no integer.
        """
        cdef int32_t length = integer(n_tokens, "n_tokens", 0, MAX_TOKENS)
        cdef int32_t needed = blocks_for(&self.slab, length)
        cdef int32_t row
        with cython.critical_section(self.pool):
            if seq not in self.rows_by_seq:
                if needed > available_blocks(self.blocks):
                    self.out_of_blocks(needed)
                self.grow(self.num_rows, needed)
            row = self.bind(seq, "seq")
            try:
                # Once more: comparing ids may have let others run.
                if needed > available_blocks(self.blocks):
                    self.out_of_blocks(needed)
                self.grow(self.num_rows, needed)
            except BaseException:
                self.unbind(seq)
                raise
            take_many(self, needed, table_of(&self.slab, row))
            self.slab.lengths[row] = length
            self.counts[SEQUENCES_ALLOCATED] += 1

    def can_allocate(self, n_tokens, /, watermark=0):
        """Whether ``allocate`` of that many tokens would leave ``watermark`` blocks. O(1)."""
        cdef int32_t length = integer(n_tokens, "n_tokens", 0, MAX_TOKENS)
        cdef int64_t reserve = integer(watermark, "watermark", 0, MAX_TOKENS)
        with cython.critical_section(self.pool):
            return available_blocks(self.blocks) - blocks_for(&self.slab, length) >= reserve

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
                    self.out_of_blocks(1)
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
                self.out_of_blocks(needed)
            growth = blocks_for(&self.slab, length + <int32_t>count) - held
            self.grow(self.num_rows, held + growth)
            slots = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
            if needed > growth:
                source = own_tail(self, row, held - 1)
            take_many(self, growth, table_of(&self.slab, row) + held)
            self.slab.lengths[row] += <int32_t>count
            self.counts[TOKENS_APPENDED] += count
            write_slots(
                &self.slab, row, length, length + <int32_t>count, int64_data(slots)
            )
            return slots, None if source < 0 else (source, table_of(&self.slab, row)[held - 1])

    def append_batch(self, cnp.ndarray rows not None, cnp.ndarray out not None, /):
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

    cdef cnp.ndarray copies(self, cnp.npy_intp count):
        cdef cnp.npy_intp[2] shape
        cdef cnp.ndarray pairs
        shape[0] = count
        shape[1] = 2
        pairs = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT32, 0)
        memcpy(int32_data(pairs), int32_data(self.pair_array), 2 * count * sizeof(int32_t))
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
                self.no_such_row(rows, i)
            length = lengths[rows[i]]
            longest = max(longest, length)
        if longest + <int64_t>count > MAX_TOKENS and self.longest_after(rows, count) > MAX_TOKENS:
            raise ValueError(f"rows: a sequence cannot grow past {MAX_TOKENS} tokens")
        self.grow(
            self.num_rows,
            min(full_blocks(&self.slab, longest) + 1, self.blocks.num_blocks),
        )
        if cnp.PyArray_DIM(self.pair_array, 0) < count:
            self.pair_array = int32_table(count, 2)
        return self.reserve_fence(count)

    cdef int no_such_row(self, const int32_t *rows, cnp.npy_intp entry) except -1:
        raise ValueError(
            f"rows: entry {entry} is {rows[entry]}, which no live sequence has"
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
            self.reserve_fence(blocks_for(&self.slab, self.slab.lengths[row]))
            shorten(self, row, <int32_t>length)

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
            shared = blocks_for(&self.slab, <int32_t>length)
            cells = table_of(&self.slab, row)
            memcpy(cells, table_of(&self.slab, source), shared * sizeof(int32_t))
            for i in range(shared):
                self.blocks.ref[cells[i]] += 1
            self.slab.lengths[row] = <int32_t>length
            self.counts[SEQUENCES_FORKED] += 1

    cdef int check_fork(self, int32_t source, int64_t length, parent) except -1:
        if length > self.slab.lengths[source]:
            raise ValueError(
                f"n_tokens is {length}, but {parent!r} has {self.slab.lengths[source]} tokens"
            )
        return 0

    def reorder(self, seqs, parents, /):
        """One beam step: ``seqs[i]`` becomes what ``parents[i]`` was before the call.

        Takes no block and owes no copy: beams that come from one parent share its
        partial last block, and the appends that follow report the copies, one fewer
        than there are holders. O(len(seqs) + blocks in which child and parent differ).

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
        cdef int32_t *row
        cdef int32_t *source
        cdef int32_t *first
        cdef int32_t *length
        cdef int32_t *tail
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
            # its new length; then the parents' cells from there on, copied because a
            # parent may be overwritten before its children are written. Going back
            # from the end may stop at the first common block: all before it agree.
            plan = int32_zeros(2 * count)
            first = int32_data(plan)
            length = first + count
            for i in range(count):
                length[i] = self.slab.lengths[source[i]]
                held = blocks_for(&self.slab, self.slab.lengths[row[i]])
                column = min(held, blocks_for(&self.slab, length[i]))
                while (
                    column > 0
                    and table_of(&self.slab, row[i])[column - 1]
                    != table_of(&self.slab, source[i])[column - 1]
                ):
                    column -= 1
                first[i] = column
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
                self.blocks.ref[tail[i]] += 1
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
        with cython.critical_section(self.pool):
            free, evictable = self.blocks.num_free, self.blocks.num_evictable
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
                if not 0 <= block < num_blocks:
                    raise InvariantError("I2", block, f"no block, in row {row} column {column}")
                held[block] += 1
        if binding != self.num_binding or live - binding != len(self.rows_by_seq):
            raise InvariantError(
                "I2", None, f"{live} rows in use by {len(self.rows_by_seq)} sequences"
            )
        for i in range(self.num_fenced):
            block = self.fenced[i]
            if not 0 <= block < num_blocks:
                raise InvariantError("I1", block, "no block, in the fence")
            held[block] += 1


cdef int check_array(
    cnp.ndarray array, str name, cnp.npy_intp itemsize, bint writable
) except -1:
    """A 1-D C array of signed integers of that size, whatever numpy calls its type."""
    if not (
        cnp.PyTypeNum_ISSIGNED(cnp.PyArray_TYPE(array))
        and cnp.PyArray_ITEMSIZE(array) == itemsize
    ):
        raise TypeError(f"{name} must be an array of int{8 * itemsize}, got {array.dtype}")
    if not (cnp.PyArray_NDIM(array) == 1 and cnp.PyArray_ISCARRAY_RO(array)):
        raise ValueError(
            f"{name} must be a contiguous 1-D array in native byte order, got one of "
            f"shape {np.shape(array)}"
        )
    if writable and not cnp.PyArray_ISWRITEABLE(array):
        raise ValueError(f"{name} is read-only")
    return 0


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
