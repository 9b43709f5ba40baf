"""Where the bytes of an array are: of numpy, CuPy, torch or any other library.

Only addresses are read. No array library is imported, and the type of the elements does not
matter, so those that numpy does not know (bfloat16, float8) are as good as any.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

__all__ = ["ArrayMemory", "memory_of"]


class ArrayMemory(NamedTuple):
    """The memory of an array. It does not keep the array alive."""

    address: int
    """Of the element whose indices are all 0."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    itemsize: int
    device: int | None
    """Number of the CUDA device, None in host memory."""


def memory_of(array: Any) -> ArrayMemory:
    """Describe the memory of ``array``.

    Parameters
    ----------
    array : ndarray, or an object with ``__dlpack__`` or ``__cuda_array_interface__``
        In host memory or on a CUDA device.

    Raises
    ------
    TypeError
        It is no array of these kinds; names its type.
    ValueError
        It is read-only, or in the memory of another kind of device.
    """
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise ValueError("array must be writable, got a read-only one")
        return ArrayMemory(array.ctypes.data, array.shape, array.strides, array.itemsize, None)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _from_cuda_array_interface(array.__cuda_array_interface__)
    raise TypeError(
        "array must be a numpy array or have __dlpack__ or __cuda_array_interface__, "
        f"got {type(array).__name__}"
    )


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= size
    return tuple(reversed(strides))


def _from_cuda_array_interface(interface: dict[str, Any]) -> ArrayMemory:
    # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    address, is_read_only = interface["data"]
    if is_read_only:
        raise ValueError("array must be writable, got a read-only one")
    shape = tuple(interface["shape"])
    itemsize = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    strides = _contiguous(shape, itemsize) if strides is None else tuple(strides)
    # The interface does not say which device it is.
    return ArrayMemory(address, shape, strides, itemsize, device=0)


# https://dmlc.github.io/dlpack/latest/c_api.html
_ON_HOST = (1, 3)  # kDLCPU, kDLCUDAHost
_ON_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _from_dlpack(array: Any) -> ArrayMemory:
    device_type, device_id = array.__dlpack_device__()
    if device_type not in _ON_HOST + _ON_CUDA:
        raise ValueError(
            "array must be in host memory or on a CUDA device, "
            f"got one on a device of DLPack type {int(device_type)}"
        )
    on_cuda = device_type in _ON_CUDA
    # Stream -1: nothing is read, so nothing has to be waited for.
    capsule = array.__dlpack__(stream=-1) if on_cuda else array.__dlpack__()
    # The capsule is not consumed: its own destructor gives the description back.
    tensor = _DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    itemsize, odd_bits = divmod(tensor.bits * tensor.lanes, 8)
    if odd_bits:
        raise ValueError(f"array must have elements of whole bytes, got {tensor.bits} bits")
    if tensor.strides:
        strides = tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])
    else:
        strides = _contiguous(shape, itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    return ArrayMemory(address, shape, strides, itemsize, int(device_id) if on_cuda else None)
