# Checks of arguments, done once, at the edge. Everything below them is unchecked.

from cpython.long cimport PyLong_AsLongLongAndOverflow
from libc.float cimport DBL_MAX as MOST
from libc.stdint cimport int64_t


cdef inline int64_t integer(
    object value, str name, int64_t minimum, int64_t maximum
) except? -1:
    """``value`` as an int64 in ``[minimum, maximum]``, or an error naming both."""
    cdef int overflow = 0
    cdef int64_t number
    if type(value) is not int:
        try:
            value = value.__index__()
        except (AttributeError, TypeError):
            raise TypeError(
                f"{name} must be an integer, got {value!r} of type {type(value).__name__}"
            ) from None
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or number < minimum or number > maximum:
        raise ValueError(f"{name} must be between {minimum} and {maximum}, got {value}")
    return number


cdef inline double number(object value, str name) except? -1:
    """``value`` as a finite float, or an error naming both."""
    cdef double result
    try:
        result = value
    except TypeError:
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if not -MOST <= result <= MOST:
        raise ValueError(f"{name} must be finite, got {value!r}")
    return result


cdef inline list items(object values, str name):
    """``values`` as a list, or an error naming both."""
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, got {values!r}") from None
