# The loops that turn a manager's tables into what attention kernels read.
#
# They check nothing: each states what must hold. They read the manager's arrays, so they
# need the GIL, or whatever else keeps other threads away from the manager.

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from kvcore._kernel_arrays cimport cell_t
from kvcore.block_manager cimport BlockManager, blocks_for, full_blocks, slab_t, table_of

# The rows that a call is about, and how many tokens of each.
cdef struct batch_t:
    slab_t slab
    cnp.npy_intp count
    const int32_t *rows
    const int32_t *lengths  # NULL: all that the rows have
    bint has_holes


# How a block id becomes page ids: b is the pages (b * expand + j) * scale, 0 <= j < expand.
cdef struct pages_t:
    int32_t page_size
    int64_t expand
    int64_t scale
    int64_t pad  # what stands for a page of a block that a window has given back


# Needs the critical section of the manager's pool until the batch is done with.
# TypeError or ValueError.
cdef int open_batch(
    BlockManager manager, cnp.ndarray rows, cnp.ndarray lengths, batch_t *batch
) except -1

# TypeError or ValueError; ``out`` is the array that the ids must fit in.
cdef int open_pages(
    BlockManager manager, expand, scale, pad, cnp.ndarray out, pages_t *pages
) except -1

# ValueError: a row has more pages than ``width``.
cdef int check_width(
    const batch_t *batch, const pages_t *pages, int64_t width, str name
) except -1

# ValueError unless each row has its tokens ``start:start + count`` and their blocks. Needs: int32
# arrays with an entry for each row. How many tokens that is in all.
cdef int64_t check_spans(const batch_t *batch, cnp.ndarray starts, cnp.ndarray counts) except -1

# ValueError: a slot of the pool may not fit into int32.
cdef int check_narrow_slots(BlockManager manager, str name) except -1


cdef inline int32_t tokens_in(const batch_t *batch, cnp.npy_intp entry) noexcept nogil:
    if batch.lengths != NULL:
        return batch.lengths[entry]
    return batch.slab.lengths[batch.rows[entry]]


cdef inline int32_t tokens_held(const batch_t *batch, cnp.npy_intp entry) noexcept nogil:
    """The tokens of a row whose blocks no window has given back; those that it has were full."""
    cdef int32_t n_tokens = tokens_in(batch, entry)
    cdef const int32_t *cells = table_of(&batch.slab, batch.rows[entry])
    cdef int32_t column, holes = 0
    if batch.has_holes:
        for column in range(blocks_for(&batch.slab, n_tokens)):
            holes += cells[column] < 0
    return n_tokens - holes * batch.slab.block_size


cdef inline int64_t pages_for(const pages_t *pages, int32_t n_tokens) noexcept nogil:
    return (<int64_t>n_tokens + pages.page_size - 1) // pages.page_size


cdef inline void write_pages(
    const int32_t *cells, int64_t count, bint has_holes, const pages_t *pages, cell_t *out
) noexcept nogil:
    """The first ``count`` pages of these blocks. Needs: there are that many."""
    cdef int64_t written = 0, of_block, value, step
    if pages.expand == 1:
        if cell_t is int32_t:
            if pages.scale == 1 and not has_holes:
                memcpy(out, cells, count * sizeof(int32_t))
                return
        for written in range(count):
            value = cells[written] * pages.scale
            out[written] = <cell_t>(value if value >= 0 else pages.pad)
        return
    while written < count:
        step = pages.scale if cells[0] >= 0 else 0
        value = cells[0] * pages.expand * step if step else pages.pad
        of_block = min(pages.expand, count - written)
        while of_block > 0:
            out[written] = <cell_t>value
            value += step
            written += 1
            of_block -= 1
        cells += 1


cdef inline void fill(cell_t *out, int64_t start, int64_t stop, cell_t value) noexcept nogil:
    cdef int64_t i
    for i in range(start, stop):
        out[i] = value


cdef inline int64_t write_tables(
    const batch_t *batch, const pages_t *pages, cell_t *out, int64_t height, int64_t width,
    int64_t stride,
) noexcept nogil:
    """A table in each of ``height`` rows that are ``stride`` cells apart; how long they are.

    Needs: count <= height, and no row has more pages than ``width``.
    """
    cdef int64_t written = 0, count = 0
    cdef cnp.npy_intp i
    for i in range(height):
        count = 0
        if i < batch.count:
            count = blocks_for(&batch.slab, tokens_in(batch, i)) * pages.expand
            write_pages(table_of(&batch.slab, batch.rows[i]), count, batch.has_holes, pages, out)
        fill(out, count, width, <cell_t>pages.pad)
        written += count
        out += stride
    return written


cdef inline int32_t next_run(
    const slab_t *slab, int32_t row, int32_t token, int32_t stop, int64_t *slot
) noexcept nogil:
    """The slot of a token, and how many before ``stop`` follow it in its block.

    Needs: token < stop, and the row has the block of the token.
    """
    cdef int32_t column = full_blocks(slab, token)
    cdef int32_t offset = token - column * slab.block_size
    slot[0] = <int64_t>table_of(slab, row)[column] * slab.block_size + offset
    return min(slab.block_size - offset, stop - token)
