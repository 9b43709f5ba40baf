# What the caller's arrays must be, whoever reads or writes them. A module that cimports this
# calls numpy's import_array() itself.

cimport numpy as cnp


cdef inline int check_c_array(cnp.ndarray array, str name, int ndim) except -1:
    """It can be read through a pointer, as so many dimensions in C order."""
    if not (cnp.PyArray_NDIM(array) == ndim and cnp.PyArray_ISCARRAY_RO(array)):
        raise ValueError(
            f"{name} must be a contiguous {ndim}-D array in native byte order, got one of "
            f"shape {(<object>array).shape}"
        )
    return 0


cdef inline int check_writable(cnp.ndarray array, str name) except -1:
    if not cnp.PyArray_ISWRITEABLE(array):
        raise ValueError(f"{name} is read-only")
    return 0


cdef inline int check_no_overlap(
    cnp.ndarray written, str name, cnp.ndarray other, str other_name
) except -1:
    """Writing to one contiguous array does not change another."""
    cdef char *start = cnp.PyArray_BYTES(written)
    cdef char *other_start = cnp.PyArray_BYTES(other)
    if (
        start < other_start + cnp.PyArray_NBYTES(other)
        and other_start < start + cnp.PyArray_NBYTES(written)
    ):
        raise ValueError(f"{name} must not overlap {other_name} in memory")
    return 0
