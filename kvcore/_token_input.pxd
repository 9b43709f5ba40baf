# Token ids from whatever holds them, as int32. Checked once, here.

cimport cython
from cpython.buffer cimport (
    Py_buffer, PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t

from kvcore._arguments cimport integer

cdef enum:
    MAX_TOKEN = 2147483647  # 2**31 - 1

cdef extern from "Python.h":
    PyObject *PyList_GET_ITEM(list values, Py_ssize_t place)
    Py_ssize_t PyList_GET_SIZE(list values)
    bint PyLong_CheckExact(PyObject *value)
    int64_t PyLong_AsLongLongAndOverflow(PyObject *value, int *overflow)

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__SSE2__) || defined(_M_X64)
    #include <emmintrin.h>
    #define KVCORE_SSE2 1
    #endif
    /* Buffers of others need not be aligned, hence memcpy: it compiles to one load. */
    static inline int32_t kvcore_load_int32(const char *token)
    {
        int32_t value;
        memcpy(&value, token, sizeof value);
        return value;
    }
    static inline int64_t kvcore_load_int64(const char *token)
    {
        int64_t value;
        memcpy(&value, token, sizeof value);
        return value;
    }
    /* Both copy and return the bits that are set in any token, so that one look at the
       result tells whether all were in range: that is what lets them use vectors. */
    static inline int32_t kvcore_copy_tokens(
        int32_t *out, const char *tokens, Py_ssize_t count)
    {
        int32_t bits = 0;
        Py_ssize_t i = 0;
    #ifdef KVCORE_SSE2
        __m128i all = _mm_setzero_si128();
        int32_t lanes[4];
        for (; i + 4 <= count; i += 4) {
            __m128i four = _mm_loadu_si128((const __m128i *)(tokens + 4 * i));
            _mm_storeu_si128((__m128i *)(out + i), four);
            all = _mm_or_si128(all, four);
        }
        _mm_storeu_si128((__m128i *)lanes, all);
        bits = lanes[0] | lanes[1] | lanes[2] | lanes[3];
    #endif
        for (; i < count; i++) {
            out[i] = kvcore_load_int32(tokens + 4 * i);
            bits |= out[i];
        }
        return bits;
    }
    static inline int64_t kvcore_narrow_tokens(
        int32_t *out, const char *tokens, Py_ssize_t count)
    {
        int64_t bits = 0;
        Py_ssize_t i = 0;
    #ifdef KVCORE_SSE2
        __m128i all = _mm_setzero_si128();
        int64_t lanes[2];
        for (; i + 4 <= count; i += 4) {
            __m128i low = _mm_loadu_si128((const __m128i *)(tokens + 8 * i));
            __m128i high = _mm_loadu_si128((const __m128i *)(tokens + 8 * i + 16));
            _mm_storeu_si128((__m128i *)(out + i), _mm_castps_si128(_mm_shuffle_ps(
                _mm_castsi128_ps(low), _mm_castsi128_ps(high), _MM_SHUFFLE(2, 0, 2, 0))));
            all = _mm_or_si128(all, _mm_or_si128(low, high));
        }
        _mm_storeu_si128((__m128i *)lanes, all);
        bits = lanes[0] | lanes[1];
    #endif
        for (; i < count; i++) {
            int64_t token = kvcore_load_int64(tokens + 8 * i);
            out[i] = (int32_t)token;
            bits |= token;
        }
        return bits;
    }
    """
    int32_t load_int32 "kvcore_load_int32"(const char *token) noexcept nogil
    int64_t load_int64 "kvcore_load_int64"(const char *token) noexcept nogil
    int32_t copy_tokens "kvcore_copy_tokens"(
        int32_t *out, const char *tokens, Py_ssize_t count
    ) noexcept nogil
    int64_t narrow_tokens "kvcore_narrow_tokens"(
        int32_t *out, const char *tokens, Py_ssize_t count
    ) noexcept nogil


cdef inline object token_source(object tokens):
    """``tokens`` as something that can be copied: a buffer, or a list."""
    if type(tokens) is list:
        return tokens
    if PyObject_CheckBuffer(tokens) and not isinstance(tokens, (bytes, bytearray)):
        return tokens
    if hasattr(tokens, "__dlpack__"):
        from numpy import from_dlpack
        return from_dlpack(tokens)
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens must be integers, got {type(tokens).__name__}")
    try:
        return list(tokens)
    except TypeError:
        raise TypeError(f"tokens must be a buffer or a sequence, got {tokens!r}") from None


cdef inline int open_buffer(object source, Py_buffer *view) except -1:
    """A 1-D buffer of int32, uint32 or int64 in native order, or an error."""
    try:
        PyObject_GetBuffer(source, view, PyBUF_FORMAT | PyBUF_STRIDES)
    except ValueError:
        raise TypeError(f"tokens must be int32, uint32 or int64, got {source!r}") from None
    cdef bytes code = b"B" if view.format == NULL else <bytes>view.format
    kind = code.lstrip(b"@=<")
    if not (
        (view.itemsize == 4 and kind in (b"i", b"l", b"I", b"L"))
        or (view.itemsize == 8 and kind in (b"q", b"l"))
    ):
        itemsize = view.itemsize
        PyBuffer_Release(view)
        raise TypeError(
            f"tokens must be int32, uint32 or int64, got format {code.decode()!r} "
            f"of {itemsize} bytes"
        )
    if view.ndim != 1:
        dimensions = view.ndim
        PyBuffer_Release(view)
        raise ValueError(f"tokens must have one dimension, got {dimensions}")
    return 0


cdef inline int64_t copy_buffer(const Py_buffer *view, int32_t *out) noexcept nogil:
    """Copy a buffer that open_buffer took. Returns the place of a bad token, or -1."""
    cdef const char *item = <const char *>view.buf
    cdef Py_ssize_t count = view.shape[0]
    cdef Py_ssize_t stride = view.strides[0]
    cdef int32_t bits = 0
    cdef int64_t wide_bits = 0
    cdef int64_t token
    cdef Py_ssize_t i
    if stride == 4 and view.itemsize == 4:
        bits = copy_tokens(out, item, count)
    elif stride == 8 and view.itemsize == 8:
        wide_bits = narrow_tokens(out, item, count)
    else:
        for i in range(count):
            if view.itemsize == 4:
                out[i] = load_int32(item + i * stride)
                bits |= out[i]
            else:
                token = load_int64(item + i * stride)
                out[i] = <int32_t>token
                wide_bits |= token
    if bits >= 0 and 0 <= wide_bits <= MAX_TOKEN:
        return -1
    for i in range(count):
        if view.itemsize == 4:
            token = load_int32(item + i * stride)
        else:
            token = load_int64(item + i * stride)
        if not 0 <= token <= MAX_TOKEN:
            return i
    return -1


cdef inline int bad_token(const Py_buffer *view, int64_t place) except -1:
    cdef const char *item = <const char *>view.buf + place * view.strides[0]
    if view.itemsize == 8:
        value = load_int64(item)
    elif view.format[0] in b"IL" or (view.format[0] in b"@=<" and view.format[1] in b"IL"):
        value = <uint32_t>load_int32(item)
    else:
        value = load_int32(item)
    raise ValueError(f"tokens: token {place} must be between 0 and {MAX_TOKEN}, got {value}")


cdef inline int copy_list(list tokens, int32_t *out, Py_ssize_t count) except -1:
    """Copy ``count`` tokens. Borrowed references: a new one is a write to each of them.

    Only what is no plain int can run code, so the list is looked at afresh after that.
    """
    cdef Py_ssize_t i
    cdef PyObject *item
    cdef int64_t number
    cdef int overflow = 0
    with cython.critical_section(tokens):
        for i in range(count):
            if i >= PyList_GET_SIZE(tokens):
                raise ValueError("tokens became shorter while they were read")
            item = PyList_GET_ITEM(tokens, i)
            if PyLong_CheckExact(item):
                number = PyLong_AsLongLongAndOverflow(item, &overflow)
                if 0 <= number <= MAX_TOKEN and not overflow:
                    out[i] = <int32_t>number
                    continue
            out[i] = one_token(<object>item, i)
    return 0


cdef inline int32_t one_token(object value, Py_ssize_t place) except -1:
    """A token that is no plain int in range: perhaps one all the same, else an error."""
    try:
        return <int32_t>integer(value, "token", 0, MAX_TOKEN)
    except ValueError:
        raise ValueError(
            f"tokens: token {place} must be between 0 and {MAX_TOKEN}, got {value}"
        ) from None
    except TypeError:
        raise TypeError(f"tokens: token {place} must be an integer, got {value!r}") from None
