"""Whether the copies of a batch may run in any order."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t

from kvcore._array_checks cimport check_c_array
from kvcore._arguments cimport integer
from kvcore._arrays cimport int32_data, int32_zeros

import numpy as np

cnp.import_array()

__all__ = ["check_batch"]

cdef enum:
    MOST = 2147483647  # 2**31 - 1


def check_batch(cnp.ndarray pairs not None, num_sources, num_destinations, is_one_pool, /):
    """Refuse a batch that writes a block twice, or reads one that it writes. O(n).

    Parameters
    ----------
    pairs : ndarray
        int32 ``(n, 2)``, contiguous: source and destination. Pairs with a negative id are
        passed over.
    num_sources, num_destinations : int
        Blocks of the two pools.
    is_one_pool : bool
        Whether the ids of both columns name the same blocks.

    Raises
    ------
    TypeError, ValueError
        Not such an array; or what is wrong with the first pair that must not be there.
    """
    cdef int64_t sources = integer(num_sources, "num_sources", 0, MOST)
    cdef int64_t destinations = integer(num_destinations, "num_destinations", 0, MOST)
    cdef bint one_pool = bool(is_one_pool)
    cdef cnp.npy_intp count, i
    cdef uint32_t size = 2, cell
    cdef const int32_t *pair = int32_data(pairs)
    cdef int32_t source, destination
    cdef int32_t *read
    cdef int32_t *written
    cdef cnp.ndarray tables
    cdef str problem
    if (<object>pairs).dtype != np.int32:
        raise TypeError(f"pairs must be an int32 array, got {pairs.dtype}")
    check_c_array(pairs, "pairs", 2)
    if cnp.PyArray_DIM(pairs, 1) != 2:
        raise ValueError(f"pairs must have shape (n, 2), got {(<object>pairs).shape}")
    count = cnp.PyArray_DIM(pairs, 0)
    if count > 2**29:
        raise ValueError(f"pairs has {count} entries, more than a batch can have")
    while size < 2 * count:
        size *= 2
    tables = int32_zeros(2 * <cnp.npy_intp>size)
    read, written = int32_data(tables), int32_data(tables) + size
    for i in range(count if one_pool else 0):
        if pair[2 * i] >= 0 and pair[2 * i + 1] >= 0:
            read[cell_of(read, size - 1, pair, 0, pair[2 * i])] = <int32_t>(i + 1)
    for i in range(count):
        source, destination = pair[2 * i], pair[2 * i + 1]
        if source < 0 or destination < 0:
            continue
        cell = cell_of(written, size - 1, pair, 1, destination)
        if source >= sources:
            problem = f"a source that is not below {sources}"
        elif destination >= destinations:
            problem = f"a destination that is not below {destinations}"
        elif written[cell]:
            problem = (
                f"the destination of pairs[{written[cell] - 1}]; a batch may write a block once"
            )
        elif one_pool and read[cell_of(read, size - 1, pair, 0, destination)]:
            problem = "a destination that is also a source; the copies of a batch have no order"
        else:
            written[cell] = <int32_t>(i + 1)
            continue
        raise ValueError(f"pairs[{i}] ({source}, {destination}) has {problem}")
