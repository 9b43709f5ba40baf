"""Block copies on a CUDA device, by one kernel, through CuPy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore import copy_kernel
from kvcore.arguments import at_least
from kvcore.copier import BlockCopier, CopyPlan
from kvcore.copy_kernel import THREADS, kernel_source, plane_table, tiles
from kvcore.gpu import as_stream, load_cupy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.planes import Planes

__all__ = ["CupyCopier"]

# Each has 16 KiB in flight, so a multiprocessor 64 KiB: by calculation enough for the memory of
# an H200, which at 4.8 TB/s and 0.7 us of latency needs 25 KiB of each. Not measured.
CTAS_PER_PROCESSOR = 4


class CupyCopier(BlockCopier):
    """Copies blocks on a CUDA device, or between it and pinned host memory.

    A batch is one upload of its pairs and one launch for all planes, in order with what
    else is on the stream. The host waits for neither; only for the copy before the last, if
    that is still under way. So it cannot run while the stream is captured into a graph. Keep a
    copier until its copies are done; it is for one thread at a time.

    Parameters
    ----------
    source : Planes
    destination : Planes, optional
        By default the source: copies within one pool. At least one of them is on a device.
    max_ctas : int, optional
        Most thread blocks at a time. By default four for each multiprocessor; fewer leave
        room for what runs beside the copies.

    Raises
    ------
    ImportError, RuntimeError
        There is no CuPy, or no device; see ``load_cupy``.
    ValueError
        Both are in host memory, or on two devices; host memory is not pinned; the two do not
        have the same rows; ``max_ctas`` is less than 1.
    """

    def __init__(
        self, source: Planes, destination: Planes | None = None, *, max_ctas: int | None = None
    ) -> None:
        self.source = source
        self.destination = source if destination is None else destination
        self._cupy = cupy = load_cupy()
        devices = {source.device, self.destination.device} - {None}
        if len(devices) != 1:
            raise ValueError(
                "source and destination must be on one CUDA device, "
                f"got {source.device} and {self.destination.device}"
            )
        (number,) = devices
        for name, planes in (("source", source), ("destination", self.destination)):
            if planes.device is None:
                _refuse_unpinned(cupy, name, planes)
        table = plane_table(source, self.destination)
        self._num_planes, self._tiles = len(table), tiles(table)
        self._device = cupy.cuda.Device(number)
        if max_ctas is None:
            max_ctas = CTAS_PER_PROCESSOR * self._device.attributes["MultiProcessorCount"]
        self._max_ctas = at_least(max_ctas, 1, "max_ctas")
        with self._device:
            self._table = cupy.asarray(table.view(np.uint8))
            # Later copies run on any stream, so the upload must have ended.
            cupy.cuda.get_current_stream().synchronize()
            self._kernel = cupy.RawKernel(kernel_source(), "copy_blocks")
            self._kernel.compile()
            self._staging = [_Staging(cupy), _Staging(cupy)]

    def run(self, plan: CopyPlan, *, stream: Any = None) -> None:
        """Do what was planned for these pools. Needs: it came from ``plan_copies``."""
        num_pairs = len(plan.pairs)
        if num_pairs == 0:
            return
        with self._device:
            stream = as_stream(self._cupy, stream)
            staging = self._staging[0]
            self._staging.reverse()
            most_pairs = copy_kernel.MOST_ITEMS // (self._num_planes * self._tiles)
            try:
                pairs, n_tokens = staging.upload(plan, stream)
                with stream:
                    for first in range(0, num_pairs, most_pairs):
                        self._launch(
                            pairs + 8 * first,
                            n_tokens + 4 * first if n_tokens else 0,
                            min(most_pairs, num_pairs - first),
                        )
            finally:
                staging.in_use_until.record(stream)

    def _launch(self, pairs: int, n_tokens: int, num_pairs: int) -> None:
        ctas = min(num_pairs * self._num_planes * self._tiles, self._max_ctas)
        self._kernel(
            (ctas,),
            (THREADS,),
            (
                np.uint64(self._table.data.ptr),
                np.uint64(pairs),
                np.uint64(n_tokens),
                np.uint32(self._num_planes),
                np.uint32(num_pairs),
                np.uint32(copy_kernel.TILE_BYTES),
                np.uint32(self._tiles),
            ),
        )


class _Staging:
    """Pinned host memory and device memory for one batch under way.

    Attributes
    ----------
    in_use_until : cupy.cuda.Event
        After the last work that reads them.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.in_use_until = cupy.cuda.Event(disable_timing=True)
        self._make(3 * 64)

    def _make(self, words: int) -> None:
        pinned = import_module("cupyx").empty_pinned(words, np.int32)
        self._on_host: NDArray[np.int32] = pinned
        self._on_device = self._cupy.empty(words, np.int32)

    def upload(self, plan: CopyPlan, stream: Any) -> tuple[int, int]:
        """Put a batch on the device. Returns the addresses of pairs and counts, or 0."""
        self.in_use_until.synchronize()
        pairs = plan.pairs.size
        words = pairs + (0 if plan.n_tokens is None else plan.n_tokens.size)
        if words > self._on_host.size:
            self._make(max(words, 2 * self._on_host.size))
        self._on_host[:pairs] = plan.pairs.ravel()
        if plan.n_tokens is not None:
            self._on_host[pairs:words] = plan.n_tokens
        address = self._on_device.data.ptr
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            address, self._on_host.ctypes.data, 4 * words, runtime.memcpyHostToDevice, stream.ptr
        )
        return address, 0 if plan.n_tokens is None else address + 4 * pairs


def _refuse_unpinned(cupy: Any, name: str, planes: Planes) -> None:
    runtime = cupy.cuda.runtime
    for plane in planes.planes:
        if runtime.pointerGetAttributes(plane.address).type != runtime.memoryTypeHost:
            raise ValueError(
                f"{name} must be on a device or in pinned host memory, as cupyx.empty_pinned "
                f"makes it, got pageable memory at {plane.address:#x}"
            )
