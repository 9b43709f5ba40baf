"""What attention kernels read, written into the caller's arrays in one call a batch.

Every function takes a manager, an int32 array of rows (``BlockManager.rows``, ``Step.rows``) and
arrays that the caller owns: pinned, kept for a CUDA graph, or new. They are checked before
anything is written, so that an error leaves them as they were; afterwards nothing but the
next call changes them. An array with room for more rows than there are belongs to a padded
batch: the rest of it is written as empty sequences, which no kernel reads. Cells that a
call does not write are named in its docstring.

Lengths are those of the manager and so include the tokens of this step: slots are given out
before a step runs. A prompt that is computed in parts has the blocks of all its tokens from
the start, so its part of a step ends earlier: ``lengths`` says where, and is what the kernel
reads as lengths too. Kernels that append keys and values themselves want the length before:
``sequence_lengths`` with ``counts``.

Every call is one step to other threads, for which it keeps the GIL: without it a row could end
halfway, and its blocks be another's. Layouts that one kernel alone reads are in
``kvcore.kernel_layouts``.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcore._arguments cimport integer
from kvcore._arrays cimport int32_data, int64_data
from kvcore._kernel_arrays cimport (
    LARGEST_INT32, cell_t, check_apart, check_integers, check_output, check_parallel, check_room,
    is_wide,
)
from kvcore.block_manager cimport BlockManager, blocks_for, table_of

cnp.import_array()

__all__ = [
    "block_table", "csr", "query_start_loc", "sequence_lengths", "slot_mapping", "table_width",
]


# ---------------------------------------------------------------- checks


cdef int open_batch(
    BlockManager manager, cnp.ndarray rows, cnp.ndarray lengths, batch_t *batch
) except -1:
    cdef cnp.npy_intp i
    check_integers(rows, "rows", 1)
    batch.slab = manager.slab
    batch.has_holes = manager.has_holes
    batch.count = cnp.PyArray_SIZE(rows)
    batch.rows = int32_data(rows)
    batch.lengths = NULL
    manager.check_rows(batch.rows, batch.count, "rows")
    if lengths is None:
        return 0
    check_parallel(lengths, "lengths", rows)
    batch.lengths = int32_data(lengths)
    for i in range(batch.count):
        if not 0 <= batch.lengths[i] <= batch.slab.lengths[batch.rows[i]]:
            raise ValueError(
                f"lengths: entry {i} is {batch.lengths[i]}, but its row has "
                f"{batch.slab.lengths[batch.rows[i]]} tokens"
            )
        if batch.has_holes:
            manager.check_cut(batch.rows[i], batch.lengths[i], f"lengths: entry {i}")
    return 0


cdef int32_t page_size(BlockManager manager, expand) except -1:
    """Tokens of a kernel's page, ``expand`` of which are a block."""
    cdef int64_t pages = integer(expand, "expand", 1, manager.slab.block_size)
    if manager.slab.block_size % pages:
        raise ValueError(
            f"expand is {pages}, which does not divide the block_size of "
            f"{manager.slab.block_size}"
        )
    return <int32_t>(manager.slab.block_size // pages)


cdef int open_pages(
    BlockManager manager, expand, scale, pad, cnp.ndarray out, pages_t *pages
) except -1:
    cdef int64_t most = LARGEST_INT32
    if is_wide(out):
        most = 2**63 - 1
    pages.page_size = page_size(manager, expand)
    pages.expand = manager.slab.block_size // pages.page_size
    pages.scale = integer(scale, "scale", 1, LARGEST_INT32)
    pages.pad = integer(pad, "pad", -most - 1, most)
    # num_blocks * expand < 2**62, so that only the scale can take it out of range.
    if manager.blocks.num_blocks * pages.expand - 1 > most // pages.scale:
        raise ValueError(
            f"scale is {pages.scale}: the largest id, "
            f"{(int(manager.blocks.num_blocks) * pages.expand - 1) * pages.scale}, "
            f"does not fit into {out.dtype}"
        )
    return 0


cdef int64_t check_spans(const batch_t *batch, cnp.ndarray starts, cnp.ndarray counts) except -1:
    """The tokens ``start:start + count`` of each row are there; how many they are in all."""
    cdef const int32_t *start = int32_data(starts)
    cdef const int32_t *number_of = int32_data(counts)
    cdef int64_t total = 0, stop
    cdef cnp.npy_intp i
    cdef int32_t column
    for i in range(batch.count):
        stop = <int64_t>start[i] + number_of[i]
        if start[i] < 0:
            raise ValueError(f"starts: entry {i} is {start[i]}, which is negative")
        if number_of[i] < 0:
            raise ValueError(f"counts: entry {i} is {number_of[i]}, which is negative")
        if stop > tokens_in(batch, i):
            raise ValueError(
                f"starts, counts: entry {i} is {start[i]}, {number_of[i]}, but its row has "
                f"{tokens_in(batch, i)} tokens"
            )
        total += number_of[i]
        if batch.has_holes and number_of[i]:
            for column in range(
                full_blocks(&batch.slab, start[i]), blocks_for(&batch.slab, <int32_t>stop)
            ):
                if table_of(&batch.slab, batch.rows[i])[column] < 0:
                    raise ValueError(
                        f"starts: entry {i} is {start[i]}, but the window has given back the "
                        f"block of token {max(start[i], column * batch.slab.block_size)}"
                    )
    return total


cdef int check_narrow_slots(BlockManager manager, str name) except -1:
    cdef int64_t slots = <int64_t>manager.blocks.num_blocks * manager.slab.block_size
    if slots - 1 > LARGEST_INT32:
        raise ValueError(f"{name} must be int64: the pool has {slots} slots")
    return 0


# ---------------------------------------------------------------- block tables


cdef int check_width(
    const batch_t *batch, const pages_t *pages, int64_t width, str name
) except -1:
    """No row has more pages than ``width``."""
    cdef int64_t needed
    cdef cnp.npy_intp i
    for i in range(batch.count):
        needed = blocks_for(&batch.slab, tokens_in(batch, i)) * pages.expand
        if needed > width:
            raise ValueError(
                f"{name} has {width} columns, but row {batch.rows[i]} has {needed} pages"
            )
    return 0


def block_table(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray out not None, /, *,
    cnp.ndarray lengths=None, pad=0, scale=1, expand=1,
):
    """The block tables of a batch: ``out[i, j]`` is the block of page j of ``rows[i]``. O(out).

    Read by vLLM (``block_table``), FlashAttention 2, 3 and 4, ``torch`` ``varlen_attn``,
    trtllm-gen, XQA, cuDNN, FlashMLA, xformers, LMDeploy, TGI, mistral.rs, transformers; with
    blocks of 1 by SGLang, whose rows hold a slot a token.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous.
    out : ndarray
        int32 or int64 ``(at least n, width)``, contiguous, no overlap with the others:
        ``table_width`` has the width. All of it is written.
    lengths : ndarray, optional
        int32 ``(n,)``: tokens of each row, this step's included. Default: all it has.
    pad : int
        Written past a table's end, and for a block that a window has given back. A kernel
        may load what it then ignores, so it must be an id; -1 only where the kernel says so.
    scale : int
        Every id is multiplied by it. For ids that count something smaller than a block.
    expand : int
        Pages of the kernel in a block, for a kernel whose pages are smaller: block b is its
        pages ``b * expand`` and up, all of which are written. Divides the block size.

    Returns
    -------
    int
        Entries of tables, what is padding after them not counted.

    Raises
    ------
    TypeError, ValueError
        Not such arrays or numbers, a row that no live sequence has, a table longer than the
        width, an id that does not fit.
    """
    cdef batch_t batch
    cdef pages_t pages
    cdef int64_t height, width
    check_output(out, "out", 2, wide=True)
    height, width = cnp.PyArray_DIM(out, 0), cnp.PyArray_DIM(out, 1)
    open_pages(manager, expand, scale, pad, out, &pages)
    check_apart((out, rows, lengths), ("out", "rows", "lengths"), 1)
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, lengths, &batch)
        check_room(out, "out", batch.count, "rows")
        check_width(&batch, &pages, width, "out")
        if is_wide(out):
            return write_tables(&batch, &pages, int64_data(out), height, width, width)
        return write_tables(&batch, &pages, int32_data(out), height, width, width)


def table_width(
    BlockManager manager not None, max_tokens, /, *, lookahead=0, expand=1, multiple_of=1
):
    """Columns of a ``block_table`` for sequences of up to ``max_tokens``. O(1).

    The one place to compute it: arrays of one engine that differ in width have caused reads
    past a row.

    Parameters
    ----------
    manager : BlockManager
    max_tokens : int
        Tokens of the longest sequence.
    lookahead : int
        Tokens more that it may have slots for: drafts, steps in flight.
    expand : int
        As for ``block_table``.
    multiple_of : int
        Rounded up to a multiple of it. trtllm-gen reads 128 tokens at a time: 128 over the
        tokens of a page.
    """
    cdef int64_t tokens = integer(max_tokens, "max_tokens", 0, LARGEST_INT32)
    cdef int64_t size = page_size(manager, expand)
    cdef int64_t multiple = integer(multiple_of, "multiple_of", 1, LARGEST_INT32)
    cdef int64_t per_block = manager.slab.block_size // size
    cdef int64_t columns
    tokens += integer(lookahead, "lookahead", 0, LARGEST_INT32)
    # Whole blocks, because a block's pages are written together.
    columns = (tokens + manager.slab.block_size - 1) // manager.slab.block_size * per_block
    return (columns + multiple - 1) // multiple * multiple


# ---------------------------------------------------------------- compressed rows


cdef inline void write_held(
    const batch_t *batch, cnp.npy_intp entry, int64_t count, const pages_t *pages, int32_t *out
) noexcept nogil:
    """The ``count`` pages of a row that are there, one after the other."""
    cdef const int32_t *cells = table_of(&batch.slab, batch.rows[entry])
    cdef int64_t written = 0, of_run
    cdef int64_t blocks = (count + pages.expand - 1) // pages.expand
    cdef int64_t start = 0, stop
    if not batch.has_holes:
        write_pages(cells, count, False, pages, out)
        return
    while blocks > 0:
        while cells[start] < 0:
            start += 1
        stop = start + 1
        while stop < start + blocks and cells[stop] >= 0:
            stop += 1
        of_run = min((stop - start) * pages.expand, count - written)
        write_pages(cells + start, of_run, False, pages, out + written)
        written += of_run
        blocks -= stop - start
        start = stop


def csr(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray indptr not None,
    cnp.ndarray indices not None, /, *, cnp.ndarray last_page_len=None, cnp.ndarray kv_len=None,
    cnp.ndarray lengths=None, expand=1,
):
    """The pages of a batch as compressed rows: FlashInfer. O(pages).

    The pages of ``rows[i]`` are ``indices[indptr[i]:indptr[i + 1]]``. An empty sequence has
    none, and a last page of length 0. Blocks that a sliding window has given back are left
    out: the pages are those of the sinks, then those of the window, and positions count
    from the first page that is there. Distances to the newest token are right behind the
    hole; ``kvcore.kernel_layouts.window_info`` has what a kernel needs that reads sinks too.

    FlashInfer's ``plan`` reads ``indptr`` and ``last_page_len`` on the host: give it these
    arrays as they are, not copies on the device.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous.
    indptr : ndarray
        int32 ``(at least n + 1,)``: past the batch it repeats the number of pages.
    indices : ndarray
        int32, at least as many entries as there are pages; what follows them is untouched.
    last_page_len : ndarray, optional
        int32 ``(at least n,)``: tokens in each last page, 1 to the page size, 0 without one
        and past the batch.
    kv_len : ndarray, optional
        int32 ``(at least n,)``: tokens in the pages listed, 0 past the batch. FlashInfer's
        MLA reads it instead of ``last_page_len``.
    lengths : ndarray, optional
        int32 ``(n,)``: tokens of each row, this step's included. Default: all it has.
    expand : int
        Pages of the kernel in a block; ``block_table`` says more.

    Returns
    -------
    int
        Pages written.

    Raises
    ------
    TypeError, ValueError
        Not such arrays or numbers, arrays that overlap, a row that no live sequence has,
        more pages than ``indices`` has room for.
    """
    cdef batch_t batch
    cdef pages_t pages
    cdef int64_t total = 0, count
    cdef int32_t *last = NULL
    cdef int32_t *tokens = NULL
    cdef cnp.ndarray held
    cdef cnp.npy_intp i
    check_output(indptr, "indptr", 1)
    check_output(indices, "indices", 1)
    open_pages(manager, expand, 1, 0, indices, &pages)
    check_apart(
        (indptr, indices, last_page_len, kv_len, rows, lengths),
        ("indptr", "indices", "last_page_len", "kv_len", "rows", "lengths"), 4,
    )
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, lengths, &batch)
        check_room(indptr, "indptr", batch.count + 1, "bounds")
        if last_page_len is not None:
            check_output(last_page_len, "last_page_len", 1)
            check_room(last_page_len, "last_page_len", batch.count, "rows")
            last = int32_data(last_page_len)
        if kv_len is not None:
            check_output(kv_len, "kv_len", 1)
            check_room(kv_len, "kv_len", batch.count, "rows")
            tokens = int32_data(kv_len)
        held = cnp.PyArray_EMPTY(1, &batch.count, cnp.NPY_INT32, 0)
        for i in range(batch.count):
            int32_data(held)[i] = tokens_held(&batch, i)
            total += pages_for(&pages, int32_data(held)[i])
        check_room(indices, "indices", total, "pages")
        if total > LARGEST_INT32:
            raise ValueError(f"rows: {total} pages are more than indptr can count")
        total = 0
        for i in range(batch.count):
            count = pages_for(&pages, int32_data(held)[i])
            write_held(&batch, i, count, &pages, int32_data(indices) + total)
            int32_data(indptr)[i] = <int32_t>total
            total += count
            if last != NULL:
                last[i] = <int32_t>(
                    int32_data(held)[i] - (count - 1) * pages.page_size if count else 0
                )
            if tokens != NULL:
                tokens[i] = int32_data(held)[i]
        fill(int32_data(indptr), batch.count, cnp.PyArray_SIZE(indptr), <int32_t>total)
        if last != NULL:
            fill(last, batch.count, cnp.PyArray_SIZE(last_page_len), <int32_t>0)
        if tokens != NULL:
            fill(tokens, batch.count, cnp.PyArray_SIZE(kv_len), <int32_t>0)
        return total


# ---------------------------------------------------------------- tokens


cdef void write_slots(
    const batch_t *batch, const int32_t *starts, const int32_t *counts, cell_t *out
) noexcept nogil:
    """Needs: the rows have these tokens, and out has room."""
    cdef int32_t token, stop, run, j
    cdef int64_t slot
    cdef cnp.npy_intp i
    for i in range(batch.count):
        token = starts[i]
        stop = token + counts[i]
        while token < stop:
            run = next_run(&batch.slab, batch.rows[i], token, stop, &slot)
            for j in range(run):
                out[j] = <cell_t>(slot + j)
            out += run
            token += run


def slot_mapping(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray starts not None,
    cnp.ndarray counts not None, cnp.ndarray out not None, /,
):
    """The slots of the tokens of a step, one row after the other. O(tokens).

    Read by vLLM (``slot_mapping``), TGI (``slots``), transformers (``write_index``) and
    mistral.rs: where the keys and values of this step go.
    ``append_batch`` writes the same for tokens that it appends; this is for those that have
    their blocks already, such as a part of a prompt.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous. The same row may be there more than once.
    starts, counts : ndarray
        int32 ``(n,)``: the tokens ``start`` to ``start + count`` of each row. All of them
        are tokens that the row has.
    out : ndarray
        int64 ``(at least sum of counts,)``, or int32 in a pool whose slots fit. What follows
        the slots becomes -1, for which kernels write nothing.

    Returns
    -------
    int
        Slots written.

    Raises
    ------
    TypeError, ValueError
        Not such arrays, arrays that overlap, a row that no live sequence has, a token that
        it has not or whose block a window has given back, slots too large for int32.
    """
    cdef batch_t batch
    cdef int64_t total
    check_output(out, "out", 1, wide=True)
    check_apart((out, rows, starts, counts), ("out", "rows", "starts", "counts"), 1)
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, None, &batch)
        check_parallel(starts, "starts", rows)
        check_parallel(counts, "counts", rows)
        total = check_spans(&batch, starts, counts)
        check_room(out, "out", total, "tokens")
        if is_wide(out):
            write_slots(&batch, int32_data(starts), int32_data(counts), int64_data(out))
            fill(int64_data(out), total, cnp.PyArray_SIZE(out), <int64_t>-1)
            return total
        check_narrow_slots(manager, "out")
        write_slots(&batch, int32_data(starts), int32_data(counts), int32_data(out))
        fill(int32_data(out), total, cnp.PyArray_SIZE(out), <int32_t>-1)
        return total


def query_start_loc(cnp.ndarray counts not None, cnp.ndarray out not None, /):
    """Where the tokens of each row begin in a batch without padding: cumulative sums. O(out).

    Read by FlashAttention (``cu_seqlens_q``), vLLM (``query_start_loc``), FlashInfer
    (``qo_indptr``), ragged paged attention (``cu_q_lens``), ``torch`` ``varlen_attn``
    (``cu_seq_q``).

    Parameters
    ----------
    counts : ndarray
        int32 ``(n,)``: tokens of each row in this step, none negative.
    out : ndarray
        int32 ``(at least n + 1,)``: 0, then the sums. Past the batch it repeats the last:
        rows without tokens.

    Returns
    -------
    int
        The tokens of all rows, which is the last entry.

    Raises
    ------
    TypeError, ValueError
        Not such arrays, arrays that overlap, a negative count, 2**31 tokens or more.
    """
    cdef cnp.npy_intp i, count = cnp.PyArray_SIZE(counts)
    cdef const int32_t *number_of = int32_data(counts)
    cdef int64_t total = 0
    check_integers(counts, "counts", 1)
    check_output(out, "out", 1)
    check_room(out, "out", count + 1, "bounds")
    check_apart((out, counts), ("out", "counts"), 1)
    for i in range(count):
        if number_of[i] < 0:
            raise ValueError(f"counts: entry {i} is {number_of[i]}, which is negative")
        total += number_of[i]
    if total > LARGEST_INT32:
        raise ValueError(f"counts: {total} tokens are more than int32 can count")
    total = 0
    for i in range(count):
        int32_data(out)[i] = <int32_t>total
        total += number_of[i]
    fill(int32_data(out), count, cnp.PyArray_SIZE(out), <int32_t>total)
    return total


def sequence_lengths(
    BlockManager manager not None, cnp.ndarray rows not None, cnp.ndarray out not None, /, *,
    cnp.ndarray counts=None,
):
    """The tokens of each row, this step's included, or with ``counts`` before them. O(out).

    Included: vLLM (``seq_lens``), FlashAttention (``seqused_k``, and ``cache_seqlens`` if the
    keys and values are in the cache already), ``torch`` ``varlen_attn``, FlashMLA, cuDNN,
    ragged paged attention (``kv_lens``); trtllm-gen and XQA read the same bits as uint32:
    give ``out.view(np.int32)``. Before: FlashAttention's ``cache_seqlens`` when the kernel
    appends them.

    Parameters
    ----------
    manager : BlockManager
    rows : ndarray
        int32 ``(n,)``, contiguous.
    out : ndarray
        int32 ``(at least n,)``: past the batch it becomes 0.
    counts : ndarray, optional
        int32 ``(n,)``: tokens of each row in this step, taken off its length.

    Returns
    -------
    int
        Lengths written, those past the batch not counted.

    Raises
    ------
    TypeError, ValueError
        Not such arrays, arrays that overlap, a row that no live sequence has, more tokens
        in this step than it has.
    """
    cdef batch_t batch
    cdef const int32_t *number_of = NULL
    cdef cnp.npy_intp i
    check_output(out, "out", 1)
    check_apart((out, rows, counts), ("out", "rows", "counts"), 1)
    with cython.critical_section(manager.pool):
        open_batch(manager, rows, None, &batch)
        check_room(out, "out", batch.count, "rows")
        if counts is not None:
            check_parallel(counts, "counts", rows)
            number_of = int32_data(counts)
            for i in range(batch.count):
                if not 0 <= number_of[i] <= tokens_in(&batch, i):
                    raise ValueError(
                        f"counts: entry {i} is {number_of[i]}, but its row has "
                        f"{tokens_in(&batch, i)} tokens"
                    )
        for i in range(batch.count):
            int32_data(out)[i] = tokens_in(&batch, i) - (number_of[i] if number_of else 0)
        fill(int32_data(out), batch.count, cnp.PyArray_SIZE(out), <int32_t>0)
        return batch.count
