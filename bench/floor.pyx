"""Compiled no-ops with kvcore's signatures and return shapes: what a call costs at least.

No state changes here. What a real call must create (tuples, integers past the small-integer
cache, arrays) is created, and the array arguments are looked at as kvcore must look at them.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t
from libc.string cimport memcmp, memcpy

cnp.import_array()


@cython.final
cdef class Floor:
    # Read at run time: constants would let the compiler build the result tuple in advance.
    cdef int block
    cdef int offset
    cdef list running

    def __init__(self, running=()):
        self.block = 12_345
        self.offset = 7
        self.running = list(running)

    # ------------------------------------------------------------ BlockManager
    def append_slot(self, seq, /):
        return self.block, self.offset, None

    def append_slots(self, seq, n_tokens, /):
        cdef cnp.npy_intp n = n_tokens
        return cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT64, 0), None

    def append_batch(self, rows, out, /):
        if not cnp.PyArray_Check(rows) or not cnp.PyArray_Check(out):
            raise TypeError
        cdef cnp.ndarray row_array = <cnp.ndarray> rows
        cdef cnp.ndarray slot_array = <cnp.ndarray> out
        if (
            cnp.PyArray_TYPE(row_array) != cnp.NPY_INT32
            or cnp.PyArray_NDIM(row_array) != 1
            or not cnp.PyArray_ISCARRAY_RO(row_array)
            or cnp.PyArray_TYPE(slot_array) != cnp.NPY_INT64
            or cnp.PyArray_NDIM(slot_array) != 1
            or not cnp.PyArray_ISCARRAY(slot_array)
            or cnp.PyArray_DIM(slot_array, 0) < cnp.PyArray_DIM(row_array, 0)
        ):
            raise ValueError
        return cnp.PyArray_DIM(row_array, 0), None

    def allocate(
        self, seq, n_tokens=None, /, *,
        tokens=None, namespace=None, media=(), retention=(), resumed=False, partial_hit=False,
    ):
        return 0 if tokens is None else self.block

    def match(self, tokens, /, *, namespace=None, media=()):
        return self.block

    def commit(self, seq, tokens=None, /, *, n_settled=None):
        return self.block

    def commit_batch(self, rows, tokens, /):
        if not cnp.PyArray_Check(rows) or not cnp.PyArray_Check(tokens):
            raise TypeError
        cdef cnp.ndarray row_array = <cnp.ndarray> rows
        cdef cnp.ndarray token_array = <cnp.ndarray> tokens
        if (
            cnp.PyArray_TYPE(row_array) != cnp.NPY_INT32
            or cnp.PyArray_NDIM(row_array) != 1
            or not cnp.PyArray_ISCARRAY_RO(row_array)
            or cnp.PyArray_TYPE(token_array) != cnp.NPY_INT32
            or cnp.PyArray_NDIM(token_array) != 1
            or not cnp.PyArray_ISCARRAY_RO(token_array)
            or cnp.PyArray_DIM(token_array, 0) != cnp.PyArray_DIM(row_array, 0)
        ):
            raise ValueError
        return self.block

    def evict(self, count, /):
        return self.block

    def free_seq(self, seq, /):
        return None

    def fork(self, parent, child, /, n_tokens=None):
        return None

    def truncate(self, seq, n_tokens, /):
        return None

    def reorder(self, seqs, parents, /):
        return None

    def drain_changes(self):
        cdef cnp.npy_intp[2] shape = [0, 3]
        return cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT32, 0)

    # ------------------------------------------------------------ BlockPool
    def take(self):
        return self.block

    def retain(self, block, /):
        return None

    def release(self, block, /):
        return None

    # ------------------------------------------------------------ Scheduler
    def step(self):
        """A fresh list of the running sequences: the least that a step must return."""
        return self.running[:]


# ------------------------------------------------------------ kvcore.kernel_metadata
def csr(
    manager, cnp.ndarray rows not None, cnp.ndarray indptr not None,
    cnp.ndarray indices not None, /, *, cnp.ndarray last_page_len=None, cnp.ndarray kv_len=None,
    cnp.ndarray lengths=None, expand=1,
):
    if not (
        cnp.PyArray_ISCARRAY_RO(rows) and cnp.PyArray_ISCARRAY(indptr)
        and cnp.PyArray_ISCARRAY(indices) and cnp.PyArray_ISCARRAY(last_page_len)
    ):
        raise ValueError
    return cnp.PyArray_SIZE(indices)


def slot_mapping(
    manager, cnp.ndarray rows not None, cnp.ndarray starts not None,
    cnp.ndarray counts not None, cnp.ndarray out not None, /,
):
    if not (
        cnp.PyArray_ISCARRAY_RO(rows) and cnp.PyArray_ISCARRAY_RO(starts)
        and cnp.PyArray_ISCARRAY_RO(counts) and cnp.PyArray_ISCARRAY(out)
    ):
        raise ValueError
    return cnp.PyArray_SIZE(out)


# ------------------------------------------------------------ the bytes of a prefix
def compare_blocks(tokens, store, blocks, /):
    """How many leading rows of ``store``, in the order of ``blocks``, equal the tokens.

    What verifying a match costs at least: each block of the prompt against one row of an
    array of blocks, wherever that lies.
    """
    cdef cnp.ndarray token_array = <cnp.ndarray> tokens
    cdef cnp.ndarray store_array = <cnp.ndarray> store
    cdef cnp.ndarray block_array = <cnp.ndarray> blocks
    cdef const char *wanted = <const char *> cnp.PyArray_DATA(token_array)
    cdef const char *rows = <const char *> cnp.PyArray_DATA(store_array)
    cdef const int32_t *ids = <const int32_t *> cnp.PyArray_DATA(block_array)
    cdef cnp.npy_intp size = cnp.PyArray_STRIDE(store_array, 0)
    cdef cnp.npy_intp count = cnp.PyArray_DIM(block_array, 0)
    cdef cnp.npy_intp i = 0
    with nogil:
        while i < count and memcmp(wanted + i * size, rows + ids[i] * size, size) == 0:
            i += 1
    return i


def copy_blocks(tokens, store, blocks, /):
    """Write the tokens into rows of ``store``: what storing a prefix costs at least."""
    cdef cnp.ndarray token_array = <cnp.ndarray> tokens
    cdef cnp.ndarray store_array = <cnp.ndarray> store
    cdef cnp.ndarray block_array = <cnp.ndarray> blocks
    cdef const char *source = <const char *> cnp.PyArray_DATA(token_array)
    cdef char *rows = <char *> cnp.PyArray_DATA(store_array)
    cdef const int32_t *ids = <const int32_t *> cnp.PyArray_DATA(block_array)
    cdef cnp.npy_intp size = cnp.PyArray_STRIDE(store_array, 0)
    cdef cnp.npy_intp count = cnp.PyArray_DIM(block_array, 0)
    cdef cnp.npy_intp i
    with nogil:
        for i in range(count):
            memcpy(rows + ids[i] * size, source + i * size, size)
    return count


# ------------------------------------------------------------ for bench.instructions
cdef public object kvcore_bench_counted(object function):
    """Public, so that the compiler keeps it as a function of exactly this name."""
    return function()


def counted(function, /):
    """Call ``function`` inside the function that Callgrind is told to count."""
    return kvcore_bench_counted(function)
