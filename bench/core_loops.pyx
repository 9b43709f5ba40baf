"""Loops of C over the functions that kvcore's ``.pxd`` files offer: no call of Python inside.

Also what an engine written in Cython would do. Array arguments are trusted.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcore.block_manager cimport BlockManager, append_row
from kvcore.pool cimport KEPT, BlockPool, release_block, take_block, unlink_evictable

cnp.import_array()


def take(BlockPool pool, cnp.ndarray blocks, /):
    """Take one block for each entry and write its id there."""
    cdef int32_t *ids = <int32_t *> cnp.PyArray_DATA(blocks)
    cdef cnp.npy_intp count = cnp.PyArray_SIZE(blocks)
    cdef cnp.npy_intp i
    with nogil:
        for i in range(count):
            ids[i] = take_block(&pool.state)


def revive(BlockPool pool, cnp.ndarray blocks, /):
    """Hold each block again; all of them must be evictable."""
    cdef int32_t *ids = <int32_t *> cnp.PyArray_DATA(blocks)
    cdef cnp.npy_intp count = cnp.PyArray_SIZE(blocks)
    cdef cnp.npy_intp i
    with nogil:
        for i in range(count):
            unlink_evictable(&pool.state, ids[i], KEPT)
            pool.state.ref[ids[i]] += 1


def release(BlockPool pool, cnp.ndarray blocks, /):
    """Undo ``take`` and ``revive``."""
    cdef int32_t *ids = <int32_t *> cnp.PyArray_DATA(blocks)
    cdef cnp.npy_intp count = cnp.PyArray_SIZE(blocks)
    cdef cnp.npy_intp i
    with nogil:
        for i in range(count):
            release_block(&pool.state, ids[i])


def append(BlockManager manager, cnp.ndarray rows, cnp.ndarray out, /):
    """``append_row`` for each row; ``reserve_columns`` is the caller's business."""
    cdef int32_t *row = <int32_t *> cnp.PyArray_DATA(rows)
    cdef int64_t *slots = <int64_t *> cnp.PyArray_DATA(out)
    cdef cnp.npy_intp count = cnp.PyArray_SIZE(rows)
    cdef cnp.npy_intp i
    cdef int32_t copy_source
    with nogil:
        for i in range(count):
            slots[i] = append_row(manager, row[i], &copy_source)
