"""CuPy, imported when something on a GPU is made and never before, and streams of any library."""

from __future__ import annotations

from importlib import import_module
from operator import index
from typing import Any

__all__ = ["as_stream", "load_cupy"]


def load_cupy() -> Any:
    """Import CuPy and see that it finds a device.

    Raises
    ------
    ImportError
        CuPy is not installed, or cannot be loaded; says how to get it.
    RuntimeError
        CuPy finds no CUDA device; says why.
    """
    try:
        cupy: Any = import_module("cupy")
    except ImportError as error:
        raise ImportError(
            "copies on a GPU need CuPy: pip install 'kvcore[gpu]' for CUDA 13, or "
            f"'cupy-cuda12x[ctk]!=14.1.0' for CUDA 12 ({error})",
            name=error.name,
        ) from error
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise RuntimeError(f"CuPy finds no CUDA device: {error}") from error
    if devices == 0:
        raise RuntimeError("CuPy finds no CUDA device")
    return cupy


class _Handle:
    """A stream of which only the handle is known."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def as_stream(cupy: Any, stream: Any) -> Any:
    """Make CuPy's stream of a stream of any library.

    Parameters
    ----------
    cupy : module
        From ``load_cupy``.
    stream : None, int, cupy.cuda.Stream, or object with ``__cuda_stream__``
        None is CuPy's current stream, an int the handle of a stream.

    Raises
    ------
    TypeError
        It is none of these; names its type.
    """
    if stream is None:
        return cupy.cuda.get_current_stream()
    if isinstance(stream, cupy.cuda.Stream | cupy.cuda.ExternalStream):
        return stream
    if not hasattr(stream, "__cuda_stream__"):
        try:
            stream = _Handle(index(stream))
        except TypeError:
            raise TypeError(
                "stream must be None, a handle, a CuPy stream or have __cuda_stream__, "
                f"got {type(stream).__name__}"
            ) from None
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    _, handle = stream.__cuda_stream__()  # CuPy 13
    return cupy.cuda.ExternalStream(handle)
