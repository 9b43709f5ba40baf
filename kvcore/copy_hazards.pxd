# Which batches of copies depend on their order; kvcore/copy_hazards.pyx says more.

from libc.stdint cimport int32_t, uint32_t


# The place of an id in an open-addressed table of 2**k cells, each 0 or 1 + the number of a pair
# that has the id in its ``column``; or the empty cell where it belongs. Needs: there is one.
cdef inline uint32_t cell_of(
    const int32_t *table, uint32_t mask, const int32_t *pairs, int column, int32_t block
) noexcept nogil:
    # Fibonacci hashing (Knuth, TAOCP 6.4); the high bits are the mixed ones.
    cdef uint32_t cell = ((<uint32_t>block * 2654435769u) >> 7) & mask
    while table[cell] and pairs[2 * (table[cell] - 1) + column] != block:
        cell = (cell + 1) & mask
    return cell
