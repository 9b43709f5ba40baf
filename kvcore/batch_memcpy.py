"""Many copies in one call of the CUDA driver: ``cuMemcpyBatchAsync``, of CUDA 12.8."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.fragments import Fragments

__all__ = ["BatchMemcpy"]

# CUDA 13 has another signature under the same name; asked for this version, a driver of
# either gives the one of CUDA 12.8.
VERSION = 12_080
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``. The locations are hints for managed memory alone."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("destination_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchMemcpy:
    """The call of the driver.

    Parameters
    ----------
    driver : ctypes.CDLL, optional
        By default the installed one.

    Raises
    ------
    OSError
        No driver is installed.
    RuntimeError
        It is older than CUDA 12.8.
    """

    def __init__(self, driver: Any = None) -> None:
        if driver is None:
            driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        address, status = ctypes.c_void_p(), ctypes.c_int()
        find = driver.cuGetProcAddress_v2
        find.restype = ctypes.c_int
        find.argtypes = (
            *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int),
            *(ctypes.c_uint64, ctypes.c_void_p),
        )
        error = find(b"cuMemcpyBatchAsync", ctypes.byref(address), VERSION, 0, ctypes.byref(status))
        if error or not address.value:
            raise RuntimeError("the CUDA driver has no cuMemcpyBatchAsync: it is older than 12.8")
        words, size = ctypes.c_void_p, ctypes.c_size_t
        self._call = ctypes.CFUNCTYPE(
            ctypes.c_int, words, words, words, size, words, words, size, words, ctypes.c_void_p
        )(address.value)
        # Live blocks may have been written by what is before it on the stream.
        self._attributes = _Attributes(source_access_order=IN_STREAM_ORDER)
        self._first = size(0)

    def __call__(self, batch: Fragments, stream: int) -> None:
        """Copy all fragments, in stream order but in no order among themselves.

        ``stream`` is the handle of a stream that is neither being captured nor the legacy
        default stream; ``RuntimeError`` names what the driver says otherwise.
        """
        failed = ctypes.c_size_t()
        error = self._call(
            batch.destinations.ctypes.data,
            batch.sources.ctypes.data,
            batch.sizes.ctypes.data,
            len(batch.sizes),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if error:
            raise RuntimeError(
                f"cuMemcpyBatchAsync failed with CUresult {error} at copy {failed.value} "
                f"of {len(batch.sizes)}"
            )
