# Memory for the arrays that kvcore owns and shows without a copy: read-only to Python,
# written through the pointers. A module that cimports this calls numpy's import_array()
# itself.
#
# C calls only, and none that lets another thread run, so a public call that grows an
# array is still one step to every other thread. numpy's own PyArray_ZEROS will not do:
# it gives up the GIL, and with it every critical section, around its calloc.

cimport numpy as cnp
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uintptr_t

cdef enum:
    ALIGNMENT = 64  # bytes: a cache line, and what zero-copy consumers ask for


cdef inline void free_memory(object owner) noexcept:
    PyMem_RawFree(PyCapsule_GetPointer(owner, NULL))


cdef inline cnp.ndarray aligned_zeros(int ndim, cnp.npy_intp *shape, int typenum, int itemsize):
    """Zeros in C order, 64-byte aligned.

    Large arrays cost no memory until they are written: the system gives zero pages.
    """
    cdef cnp.npy_intp size = ALIGNMENT
    cdef cnp.npy_intp cells = itemsize
    cdef int axis
    cdef cnp.ndarray array
    cdef void *raw
    for axis in range(ndim):
        if shape[axis] and cells > <cnp.npy_intp>(2**62) // shape[axis]:
            raise MemoryError(f"an array of shape {[shape[i] for i in range(ndim)]}")
        cells *= shape[axis]
    size += cells
    raw = PyMem_RawCalloc(1, size)
    if raw == NULL:
        raise MemoryError(f"an array of shape {[shape[i] for i in range(ndim)]}")
    cdef uintptr_t start = <uintptr_t>raw
    start += -start % ALIGNMENT
    owner = PyCapsule_New(raw, NULL, free_memory)
    array = cnp.PyArray_SimpleNewFromData(ndim, shape, typenum, <void *>start)
    Py_INCREF(owner)  # PyArray_SetBaseObject takes the reference over
    cnp.PyArray_SetBaseObject(array, owner)
    cnp.PyArray_CLEARFLAGS(array, cnp.NPY_ARRAY_WRITEABLE)
    return array


cdef inline cnp.ndarray int32_zeros(cnp.npy_intp count):
    return aligned_zeros(1, &count, cnp.NPY_INT32, sizeof(int32_t))


cdef inline cnp.ndarray int64_zeros(cnp.npy_intp count):
    return aligned_zeros(1, &count, cnp.NPY_INT64, sizeof(int64_t))


cdef inline cnp.ndarray int32_table(cnp.npy_intp rows, cnp.npy_intp columns):
    cdef cnp.npy_intp[2] shape
    shape[0] = rows
    shape[1] = columns
    return aligned_zeros(2, shape, cnp.NPY_INT32, sizeof(int32_t))


cdef inline int32_t *int32_data(cnp.ndarray array) noexcept:
    return <int32_t *>cnp.PyArray_DATA(array)


cdef inline int64_t *int64_data(cnp.ndarray array) noexcept:
    return <int64_t *>cnp.PyArray_DATA(array)


cdef extern from *:
    """
    #if defined(__linux__)
    #include <stdint.h>
    #include <sys/mman.h>
    static inline void kvcore_large_pages(void *start, size_t size)
    {
        const uintptr_t page = 4096;
        uintptr_t from = ((uintptr_t)start + page - 1) & ~(page - 1);
        uintptr_t to = ((uintptr_t)start + size) & ~(page - 1);
        /* A wish: refused or unknown, the array works as before. */
        if (size >= ((size_t)1 << 22) && to > from)
            (void)madvise((void *)from, to - from, MADV_HUGEPAGE);
    }
    #else
    #define kvcore_large_pages(start, size) ((void)0)
    #endif
    """
    void large_pages "kvcore_large_pages"(void *start, size_t size) noexcept


cdef inline void prefer_large_pages(cnp.ndarray array) noexcept:
    """For a large array that is read at random all over: fewer address translations.

    Call it before the first write.
    """
    large_pages(cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))
