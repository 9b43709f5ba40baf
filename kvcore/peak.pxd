# The most blocks that sequences are going to hold; kvcore/peak.pyx says how it is found.

from libc.stdint cimport int64_t

# Of sequences given as ``left << 31 | length``, ascending: how many tokens each still gets and
# how many it has, both below 2**31. Needs: ``size`` zeros at ``remainders``.
cdef int64_t peak_of_sorted(
    const int64_t *keys, Py_ssize_t count, int64_t size, int64_t *remainders
) noexcept nogil
