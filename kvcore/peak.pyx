"""How many blocks are held when the most are held."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from kvcore._arguments cimport integer
from kvcore._arrays cimport int64_data, int64_zeros

import numpy as np

cnp.import_array()

__all__ = ["peak_blocks"]

cdef enum:
    MOST = 2147483647  # 2**31 - 1


def peak_blocks(cnp.ndarray lengths not None, cnp.ndarray left not None, block_size, /):
    """Return the most blocks that sequences are going to hold at once.

    A sequence of ``lengths[i]`` tokens that gets ``left[i]`` more, one a step, holds
    ``ceil((lengths[i] + t) / block_size)`` blocks after step ``t``, and none once
    ``t > left[i]``.

    Parameters
    ----------
    lengths, left : ndarray
        int64 ``(n,)``, contiguous, from 0 to 2**31 - 1.
    block_size : int

    Raises
    ------
    TypeError, ValueError
        Not such arrays or numbers.

    Notes
    -----
    The most is held when somebody is about to leave. Sorted by ``left``, those still
    there at such a moment are the last so many; so running sums give the tokens of all of
    them, and with that their blocks up to one for each. Only where that comes near to the
    most, the blocks are counted, from how many of the lengths have which remainder.
    O(n log n), and O(block_size) for each moment that is near, as a rule a few.
    """
    cdef cnp.npy_intp n = cnp.PyArray_SIZE(lengths), i
    cdef int64_t size = integer(block_size, "block_size", 1, MOST)
    cdef cnp.ndarray keys, remainders
    cdef int64_t *key
    check_numbers(lengths, "lengths")
    check_numbers(left, "left")
    if cnp.PyArray_SIZE(left) != n:
        raise ValueError(f"left has {cnp.PyArray_SIZE(left)} entries for {n} lengths")
    keys = np.empty(n, np.int64)
    key = int64_data(keys)
    for i in range(n):
        key[i] = int64_data(left)[i] << 31 | int64_data(lengths)[i]
    keys.sort()
    remainders = int64_zeros(size)
    return peak_of_sorted(key, n, size, int64_data(remainders))


cdef int64_t peak_of_sorted(
    const int64_t *keys, Py_ssize_t count, int64_t size, int64_t *remainders
) noexcept nogil:
    cdef int64_t most = 0, best = 0, alive = 0, tokens = 0, bound, t, length
    cdef Py_ssize_t i
    # Lengths are taken ``size - 1`` larger, so that a division by it rounds up.
    for i in range(count - 1, -1, -1):
        alive += 1
        tokens += (keys[i] & MOST) + size - 1
        bound = tokens + alive * (keys[i] >> 31)
        if bound > most:
            most = bound
            best = max(0, (bound - alive * (size - 1)) // size)  # at least that are held then
    alive = tokens = 0
    for i in range(count - 1, -1, -1):
        length = (keys[i] & MOST) + size - 1
        t = keys[i] >> 31
        alive += 1
        tokens += length
        remainders[length % size] += 1
        bound = tokens + alive * t
        if bound // size > best:
            best = max(best, (bound - unused_slots(remainders, size, t)) // size)
    return best


cdef int check_numbers(cnp.ndarray array, str name) except -1:
    cdef cnp.npy_intp i
    if array.ndim != 1 or array.dtype != np.int64 or not cnp.PyArray_IS_C_CONTIGUOUS(array):
        raise TypeError(
            f"{name} must be a contiguous int64 array of one dimension, got {array.dtype} of "
            f"shape {(<object>array).shape}"
        )
    for i in range(cnp.PyArray_SIZE(array)):
        if <uint64_t>int64_data(array)[i] > MOST:
            raise ValueError(
                f"{name}: entry {i} must be from 0 to {MOST}, got {int64_data(array)[i]}"
            )
    return 0


cdef int64_t unused_slots(const int64_t *remainders, int64_t size, int64_t t) noexcept nogil:
    """What rounding up has added too much, after ``t`` more tokens for each."""
    cdef int64_t first = t % size
    cdef int64_t total = 0
    cdef int64_t r
    for r in range(size - first):
        total += remainders[r] * (r + first)
    for r in range(size - first, size):
        total += remainders[r] * (r + first - size)
    return total
