# What every writer of kernel metadata asks of the caller's arrays, before it writes.
# A module that cimports this calls numpy's import_array() itself.

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcore._array_checks cimport check_c_array, check_no_overlap, check_writable

cdef enum:
    LARGEST_INT32 = 2147483647

# What an output may hold.
ctypedef fused cell_t:
    int32_t
    int64_t


cdef inline bint is_wide(cnp.ndarray array) noexcept:
    return cnp.PyArray_ITEMSIZE(array) == sizeof(int64_t)


cdef inline int check_integers(cnp.ndarray array, str name, int ndim, bint wide=False) except -1:
    """A C array of int32, or with ``wide`` also int64, whatever numpy calls its type."""
    if not (
        cnp.PyTypeNum_ISSIGNED(cnp.PyArray_TYPE(array))
        and (cnp.PyArray_ITEMSIZE(array) == sizeof(int32_t) or (wide and is_wide(array)))
    ):
        kinds = "int32 or int64" if wide else "int32"
        raise TypeError(f"{name} must be an array of {kinds}, got {array.dtype}")
    return check_c_array(array, name, ndim)


cdef inline int check_output(cnp.ndarray array, str name, int ndim, bint wide=False) except -1:
    check_integers(array, name, ndim, wide)
    return check_writable(array, name)


cdef inline int check_parallel(cnp.ndarray array, str name, cnp.ndarray rows) except -1:
    """An int32 input with an entry for each row."""
    check_integers(array, name, 1)
    if cnp.PyArray_SIZE(array) != cnp.PyArray_SIZE(rows):
        raise ValueError(
            f"{name} has {cnp.PyArray_SIZE(array)} entries for {cnp.PyArray_SIZE(rows)} rows"
        )
    return 0


cdef inline int check_room(
    cnp.ndarray array, str name, int64_t needed, str what, int axis=0
) except -1:
    if cnp.PyArray_DIM(array, axis) < needed:
        where = "" if cnp.PyArray_NDIM(array) == 1 else f" along axis {axis}"
        raise ValueError(
            f"{name} has {cnp.PyArray_DIM(array, axis)} entries{where} for {needed} {what}"
        )
    return 0


cdef inline int check_apart(tuple arrays, tuple names, Py_ssize_t num_outputs) except -1:
    """No output, which come first, shares memory with another array. None is left out."""
    cdef cnp.ndarray one
    cdef Py_ssize_t i, j
    for i in range(num_outputs):
        if arrays[i] is None:
            continue
        one = arrays[i]
        for j in range(i + 1, len(arrays)):
            if arrays[j] is None:
                continue
            check_no_overlap(one, names[i], arrays[j], names[j])
    return 0
