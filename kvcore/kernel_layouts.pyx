"""What single attention kernels read in a layout of their own.

The conventions are those of ``kvcore.kernel_metadata``: the caller owns the arrays, they
are checked before anything is written, lengths include the tokens of this step, and the rest
of a padded batch is written as empty sequences.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcore._arguments cimport integer
from kvcore._arrays cimport int32_data, int64_data
from kvcore._kernel_arrays cimport (
    LARGEST_INT32, check_apart, check_output, check_parallel, check_room, is_wide,
)
from kvcore.block_manager cimport BlockManager, blocks_for, full_blocks, table_of
from kvcore.kernel_metadata cimport (
    batch_t, check_narrow_slots, check_spans, check_width, fill, next_run, open_batch, open_pages,
    pages_t, tokens_held, tokens_in, write_tables,
)

cnp.import_array()

__all__ = ["flex_tables", "ragged", "slices", "trtllm_offsets", "window_info"]

cdef enum:
    SECONDARY = -2147483648  # bit 31


def slices(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray starts not None,
    cnp.ndarray counts not None, cnp.ndarray out not None, /,
):
    """``slot_mapping`` as runs of slots, none of which crosses a block. O(runs).

    Read by the KV cache update of vLLM on TPUs (``slices``), which copies a run at a time
    from the new keys and values of the step, those of one row after the other.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous.
    starts, counts : ndarray
        int32 ``(n,)``: the tokens ``start`` to ``start + count`` of each row.
    out : ndarray
        int32 ``(3, at least as many as there are runs)``: the first slot of each run, the
        place of its first token among those of the step, and its length. What follows the
        runs becomes 0.

    Returns
    -------
    int
        Runs, the kernel's ``num_slices``.

    Raises
    ------
    TypeError, ValueError
        As ``slot_mapping``; also if the slots of the pool do not fit into int32.
    """
    cdef batch_t batch
    cdef const int32_t *start = int32_data(starts)
    cdef const int32_t *number_of = int32_data(counts)
    cdef int32_t *slots
    cdef int32_t token, stop, run
    cdef int64_t total = 0, width, slot, placed = 0
    cdef cnp.npy_intp i
    check_output(out, "out", 2)
    if cnp.PyArray_DIM(out, 0) != 3:
        raise ValueError(f"out must have 3 rows, got {cnp.PyArray_DIM(out, 0)}")
    check_apart((out, rows, starts, counts), ("out", "rows", "starts", "counts"), 1)
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, None, &batch)
        check_parallel(starts, "starts", rows)
        check_parallel(counts, "counts", rows)
        check_narrow_slots(manager, "out")
        placed = check_spans(&batch, starts, counts)
        if placed > LARGEST_INT32:
            raise ValueError(f"counts: {placed} tokens are more than int32 can count")
        for i in range(batch.count):
            if number_of[i]:
                total += blocks_for(&batch.slab, start[i] + number_of[i])
                total -= full_blocks(&batch.slab, start[i])
        check_room(out, "out", total, "runs", axis=1)
        width = cnp.PyArray_DIM(out, 1)
        slots = int32_data(out)
        placed = 0
        for i in range(batch.count):
            token = start[i]
            stop = token + number_of[i]
            while token < stop:
                run = next_run(&batch.slab, batch.rows[i], token, stop, &slot)
                slots[0] = <int32_t>slot
                slots[width] = <int32_t>placed
                slots[2 * width] = run
                slots += 1
                placed += run
                token += run
        for i in range(3):
            fill(int32_data(out) + i * width, total, width, <int32_t>0)
        return total


def trtllm_offsets(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray out not None, /, *,
    layers, cnp.ndarray lengths=None, bint secondary=False,
):
    """The pool offsets of TensorRT-LLM: ``kv_cache_block_offsets``, of one pool. O(out).

    A block holds keys and values of several layers; an offset counts fields, of which a block
    has ``2 * layers``: the keys of its first layer are at ``block * 2 * layers``, the
    values behind them.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous. TensorRT-LLM wants context requests first.
    out : ndarray
        int32 ``(at least n, 2, width)``, contiguous: keys, values. What is no block, past a
        table's end or given back by a window, becomes all ones, which is null.
    layers : int
        Layers in this pool.
    lengths : ndarray, optional
        int32 ``(n,)``: tokens of each row, this step's included. Default: all it has.
    secondary : bool
        Whether the blocks of ``manager`` are the pool in host memory, marked by bit 31.

    Returns
    -------
    int
        Offsets written, nulls after the tables not counted.

    Raises
    ------
    TypeError, ValueError
        Not such arrays or numbers, a row that no live sequence has, a table longer than the
        width, an offset of 2**31 - 1 or more.
    """
    cdef batch_t batch
    cdef pages_t pages
    cdef int64_t fields = 2 * integer(layers, "layers", 1, LARGEST_INT32), width, written
    cdef int32_t mark = SECONDARY if secondary else 0
    cdef int32_t *keys = int32_data(out)
    cdef int64_t column
    check_output(out, "out", 3)
    if cnp.PyArray_DIM(out, 1) != 2:
        raise ValueError(f"out must be 2 along axis 1, got {cnp.PyArray_DIM(out, 1)}")
    if manager.blocks.num_blocks > LARGEST_INT32 // fields:
        raise ValueError(
            f"layers is {layers}: the offsets of {manager.blocks.num_blocks} blocks do not fit "
            f"into 31 bits"
        )
    open_pages(manager, 1, fields, -1, out, &pages)
    check_apart((out, rows, lengths), ("out", "rows", "lengths"), 1)
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, lengths, &batch)
        check_room(out, "out", batch.count, "rows")
        width = cnp.PyArray_DIM(out, 2)
        check_width(&batch, &pages, width, "out")
        # The keys, in every second row; then the values beside them.
        written = write_tables(&batch, &pages, keys, cnp.PyArray_DIM(out, 0), width, 2 * width)
        for _ in range(cnp.PyArray_DIM(out, 0)):
            for column in range(width):
                if keys[column] >= 0:
                    keys[width + column] = (keys[column] + 1) | mark
                    keys[column] |= mark
                else:
                    keys[width + column] = -1
            keys += 2 * width
        return 2 * written


def ragged(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray counts not None,
    cnp.ndarray kv_lens not None, cnp.ndarray page_indices not None,
    cnp.ndarray cu_q_lens not None, /, *, cnp.ndarray num_seqs=None,
    cnp.ndarray distribution=None, chunk_prefill_size=None, cnp.ndarray lengths=None,
):
    """What ragged paged attention reads on TPUs, versions 2 and 3. O(page_indices).

    Version 2 reads ``num_seqs``, version 3 ``distribution``. Both read lengths that include
    this step's tokens, of which each row has at least one.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous.
    counts : ndarray
        int32 ``(n,)``: tokens of each row in this step, the last of its ``kv_lens``.
    kv_lens : ndarray
        int32 ``(most sequences,)``, at least n. Past the batch it becomes 0.
    page_indices : ndarray
        int32 ``(most sequences, width)``, or flat with as many entries. What is no block
        becomes 0, an id in range.
    cu_q_lens : ndarray
        int32 ``(most sequences + 1,)``: ``query_start_loc`` of the counts.
    num_seqs : ndarray, optional
        int32 ``(1,)``: becomes n.
    distribution : ndarray, optional
        int32 ``(3,)``: where the rows of one token end, where those of
        ``chunk_prefill_size`` tokens end, and n. The rows must be in that order, those of any
        other count last.
    chunk_prefill_size : int, optional
        At least 2. Default: the second kind has no rows.
    lengths : ndarray, optional
        int32 ``(n,)``: tokens of each row, this step's included. Default: all it has.

    Returns
    -------
    int
        Blocks of all rows.

    Raises
    ------
    TypeError, ValueError
        Not such arrays or numbers, a row that no live sequence has or without a token in this
        step, rows in another order, a table longer than the width.
    """
    cdef batch_t batch
    cdef pages_t pages
    cdef const int32_t *number_of = int32_data(counts)
    cdef int64_t chunk = -1, width = 0, total = 0, written, height = cnp.PyArray_SIZE(kv_lens)
    cdef int32_t[3] ends
    cdef int kind = 0, before
    cdef cnp.npy_intp i
    if chunk_prefill_size is not None:
        chunk = integer(chunk_prefill_size, "chunk_prefill_size", 2, LARGEST_INT32)
    check_output(kv_lens, "kv_lens", 1)
    check_output(page_indices, "page_indices", 2 if cnp.PyArray_NDIM(page_indices) == 2 else 1)
    check_output(cu_q_lens, "cu_q_lens", 1)
    if height:
        width = cnp.PyArray_SIZE(page_indices) // height
    if (
        cnp.PyArray_SIZE(page_indices) != height * width
        or cnp.PyArray_NDIM(page_indices) == 2 and cnp.PyArray_DIM(page_indices, 0) != height
    ):
        raise ValueError(
            f"page_indices of shape {(<object>page_indices).shape} is not for the "
            f"{height} sequences of kv_lens"
        )
    if cnp.PyArray_SIZE(cu_q_lens) != height + 1:
        raise ValueError(
            f"cu_q_lens has {cnp.PyArray_SIZE(cu_q_lens)} entries for {height} sequences"
        )
    for array, name, size in ((num_seqs, "num_seqs", 1), (distribution, "distribution", 3)):
        if array is not None:
            check_output(array, name, 1)
            if cnp.PyArray_SIZE(array) != size:
                raise ValueError(f"{name} must have {size} entries, got {len(array)}")
    check_apart(
        (kv_lens, page_indices, cu_q_lens, num_seqs, distribution, rows, counts, lengths),
        (
            "kv_lens", "page_indices", "cu_q_lens", "num_seqs", "distribution", "rows",
            "counts", "lengths",
        ), 5,
    )
    open_pages(manager, 1, 1, 0, page_indices, &pages)
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, lengths, &batch)
        check_parallel(counts, "counts", rows)
        check_room(kv_lens, "kv_lens", batch.count, "rows")
        check_width(&batch, &pages, width, "page_indices")
        ends[0] = ends[1] = 0
        for i in range(batch.count):
            if not 0 < number_of[i] <= tokens_in(&batch, i):
                raise ValueError(
                    f"counts: entry {i} is {number_of[i]}, but must be between 1 and the "
                    f"{tokens_in(&batch, i)} tokens of its row"
                )
            total += number_of[i]
            before = kind
            kind = 0 if number_of[i] == 1 else 1 if number_of[i] == chunk else 2
            if kind < before and distribution is not None:
                raise ValueError(
                    f"rows: entry {i} has {number_of[i]} tokens in this step and must come "
                    f"before entry {i - 1}, which has {number_of[i - 1]}"
                )
            if kind == 0:
                ends[0] += 1
            if kind < 2:
                ends[1] += 1
        if total > LARGEST_INT32:
            raise ValueError(f"counts: {total} tokens are more than int32 can count")
        ends[2] = <int32_t>batch.count
        written = write_tables(
            &batch, &pages, int32_data(page_indices), height, width, width
        )
        total = 0
        for i in range(batch.count):
            int32_data(kv_lens)[i] = tokens_in(&batch, i)
            int32_data(cu_q_lens)[i] = <int32_t>total
            total += number_of[i]
        fill(int32_data(kv_lens), batch.count, height, <int32_t>0)
        fill(int32_data(cu_q_lens), batch.count, height + 1, <int32_t>total)
        if num_seqs is not None:
            int32_data(num_seqs)[0] = ends[2]
        if distribution is not None:
            for i in range(3):
                int32_data(distribution)[i] = ends[i]
        return written


def flex_tables(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray page_table not None,
    cnp.ndarray physical_to_logical not None, /, *, cnp.ndarray lengths=None,
):
    """The tables of FlexAttention's ``PagedAttention``, there and back. O(both arrays).

    Its pages are the manager's blocks, and the blocks of its masks. Capacities are the
    blocks times their size; lengths are ``sequence_lengths``.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous.
    page_table : ndarray
        int64 ``(at least n, width)``: the block of each column, -1 where there is none.
    physical_to_logical : ndarray
        int64 ``(as many, at least num_blocks)``: the column of each block in the row's table,
        -1 for a block that is not there.
    lengths : ndarray, optional
        int32 ``(n,)``: tokens of each row, this step's included. Default: all it has.

    Returns
    -------
    int
        Blocks of all rows.

    Raises
    ------
    TypeError, ValueError
        Not such arrays, a row that no live sequence has, a table longer than the width.
    """
    cdef batch_t batch
    cdef pages_t pages
    cdef int64_t width, height, num_columns, written
    cdef int64_t *column_of
    cdef const int32_t *cells
    cdef int32_t column
    cdef cnp.npy_intp i
    for array, name in (
        (page_table, "page_table"), (physical_to_logical, "physical_to_logical"),
    ):
        check_output(array, name, 2, wide=True)
        if not is_wide(array):
            raise TypeError(f"{name} must be an array of int64, got {array.dtype}")
    height, width = cnp.PyArray_DIM(page_table, 0), cnp.PyArray_DIM(page_table, 1)
    num_columns = cnp.PyArray_DIM(physical_to_logical, 1)
    if cnp.PyArray_DIM(physical_to_logical, 0) != height:
        raise ValueError(
            f"physical_to_logical has {cnp.PyArray_DIM(physical_to_logical, 0)} rows and "
            f"page_table {height}"
        )
    check_room(
        physical_to_logical, "physical_to_logical", manager.blocks.num_blocks, "blocks", axis=1
    )
    check_apart(
        (page_table, physical_to_logical, rows, lengths),
        ("page_table", "physical_to_logical", "rows", "lengths"), 2,
    )
    open_pages(manager, 1, 1, -1, page_table, &pages)
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, lengths, &batch)
        check_room(page_table, "page_table", batch.count, "rows")
        check_width(&batch, &pages, width, "page_table")
        written = write_tables(&batch, &pages, int64_data(page_table), height, width, width)
        fill(int64_data(physical_to_logical), 0, height * num_columns, <int64_t>-1)
        column_of = int64_data(physical_to_logical)
        for i in range(batch.count):
            cells = table_of(&batch.slab, batch.rows[i])
            for column in range(blocks_for(&batch.slab, tokens_in(&batch, i))):
                if cells[column] >= 0:
                    column_of[cells[column]] = column
            column_of += num_columns
        return written


def window_info(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray out not None, window,
    sinks=0, /, *, cnp.ndarray lengths=None,
):
    """What the newest token of each row sees in the pages of ``csr``: TVM and MLC. O(blocks).

    It sees the first ``sinks`` tokens and the last ``window``, itself among them. In the
    pages that ``csr`` lists, where what a window has given back is left out, those are the tokens
    before ``sink`` and those from ``window_offset`` on: ``length_info`` of TVM.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous.
    out : ndarray
        int32 ``(3, at least n)``: ``last_page_len``, ``window_offset``, ``sink``. Both are 0
        for a row that sees all its tokens. Past the batch it becomes 0.
    window : int
        At least 1.
    sinks : int
    lengths : ndarray, optional
        int32 ``(n,)``: tokens of each row, this step's included. Default: all it has.

    Returns
    -------
    int
        Rows written, those past the batch not counted.

    Raises
    ------
    TypeError, ValueError
        Not such arrays or numbers, a row that no live sequence has, a token that is seen but
        whose block a window has given back.
    """
    cdef batch_t batch
    cdef int64_t seen = integer(window, "window", 1, LARGEST_INT32)
    cdef int64_t first = integer(sinks, "sinks", 0, LARGEST_INT32)
    cdef int64_t width, hidden
    cdef int32_t *info = int32_data(out)
    cdef int32_t n_tokens, size
    cdef cnp.npy_intp i
    check_output(out, "out", 2)
    if cnp.PyArray_DIM(out, 0) != 3:
        raise ValueError(f"out must have 3 rows, got {cnp.PyArray_DIM(out, 0)}")
    check_apart((out, rows, lengths), ("out", "rows", "lengths"), 1)
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, lengths, &batch)
        check_room(out, "out", batch.count, "rows", axis=1)
        width = cnp.PyArray_DIM(out, 1)
        size = batch.slab.block_size
        for i in range(batch.count):
            n_tokens = tokens_in(&batch, i)
            check_seen(&batch, i, first, n_tokens - seen)
        for i in range(batch.count):
            n_tokens = tokens_in(&batch, i)
            hidden = n_tokens - seen
            info[i] = (n_tokens - 1) % size + 1 if n_tokens else 0
            info[width + i] = info[2 * width + i] = 0
            if hidden > first:
                info[width + i] = <int32_t>(hidden - (n_tokens - tokens_held(&batch, i)))
                info[2 * width + i] = <int32_t>first
        for i in range(3):
            fill(info + i * width, batch.count, width, <int32_t>0)
        return batch.count


cdef int check_seen(
    const batch_t *batch, cnp.npy_intp entry, int64_t sinks, int64_t start
) except -1:
    """The row has the blocks of its first ``sinks`` tokens and of those from ``start`` on."""
    cdef int32_t n_tokens = tokens_in(batch, entry), column, token
    cdef const int32_t *cells = table_of(&batch.slab, batch.rows[entry])
    if not batch.has_holes:
        return 0
    for column in range(blocks_for(&batch.slab, n_tokens)):
        token = column * batch.slab.block_size
        if cells[column] < 0 and (token < sinks or token + batch.slab.block_size > start):
            raise ValueError(
                f"window, sinks: the window of entry {entry} has given back the block of "
                f"token {token}, which it sees"
            )
    return 0
