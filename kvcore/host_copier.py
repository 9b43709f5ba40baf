"""Block copies between a CUDA device and pinned host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.arguments import at_least
from kvcore.batch_memcpy import BatchMemcpy
from kvcore.copier import BlockCopier, CopyPlan
from kvcore.copy_kernel import plane_table
from kvcore.cupy_copier import CupyCopier
from kvcore.fragments import FragmentCutter, Fragments
from kvcore.gpu import as_stream, load_cupy

if TYPE_CHECKING:
    from kvcore.planes import Planes

__all__ = ["CROSSOVER_BYTES", "FEWEST_FOR_KERNEL", "HostCopier"]

CROSSOVER_BYTES = 28 * 1024
"""Bytes of a contiguous fragment from which the copy engines are faster than a kernel.

Measured by others on an H100 over PCIe 5 (https://github.com/vllm-project/vllm/pull/42212):
copy engines brought fragments of 24 KiB to the device at 7 GB/s and such of 28 KiB at 40 GB/s,
50,000 at a time.
"""

FEWEST_FOR_KERNEL = 16
"""Fragments below which the copy engines are faster, of 1 to 28 KiB at least.

Measured by others on an A30 (https://github.com/vllm-project/vllm/issues/57555).
"""

# As many as vLLM's kernel for this takes; the rest is left to what runs beside it. Not measured.
MAX_CTAS = 12

# 0, and cudaStreamLegacy.
LEGACY_STREAMS = (0, 1)


class HostCopier(BlockCopier):
    """Copies blocks from a device to pinned host memory, or back.

    Large contiguous fragments go through the copy engines, in one call of the driver, and
    leave the multiprocessors alone; many small ones, and parts of blocks, through a kernel
    that reads or writes host memory itself. Adjacent blocks that stay adjacent are one
    fragment. As with ``CupyCopier``, keep it until its copies are done.

    Parameters
    ----------
    source, destination : Planes
        One on a device, one in pinned host memory.
    crossover_bytes : int
        Mean bytes of a batch's fragments from which the copy engines do it.
        ``kvcore.copy_crossover.measure`` finds the number for a machine.

    Raises
    ------
    ImportError, RuntimeError
        There is no CuPy, or no device; see ``load_cupy``.
    ValueError
        Not one is on a device and one in host memory; host memory is not pinned; the two do
        not have the same rows; ``crossover_bytes`` is negative.
    """

    def __init__(
        self, source: Planes, destination: Planes, *, crossover_bytes: int = CROSSOVER_BYTES
    ) -> None:
        self._cupy = load_cupy()
        self.source, self.destination = source, destination
        self.crossover_bytes = at_least(crossover_bytes, 0, "crossover_bytes")
        if (source.device is None) == (destination.device is None):
            raise ValueError(
                "one of source and destination must be on a CUDA device and one in host memory, "
                f"got {source.device} and {destination.device}"
            )
        self._kernel = CupyCopier(source, destination, max_ctas=MAX_CTAS)
        self._cutter = FragmentCutter(plane_table(source, destination))
        number = source.device if destination.device is None else destination.device
        self._device = self._cupy.cuda.Device(number)
        self._batch: BatchMemcpy | None
        try:
            self._batch = BatchMemcpy()
        except (OSError, RuntimeError):
            self._batch = None  # an older driver copies them one by one

    def run(self, plan: CopyPlan, *, stream: Any = None) -> None:
        """Do what was planned for these pools. Needs: it came from ``plan_copies``."""
        if plan.n_tokens is None:
            found = self._cutter.cut(plan.pairs)
            if len(found.sizes) < FEWEST_FOR_KERNEL or found.mean_bytes >= self.crossover_bytes:
                with self._device:
                    self._by_copy_engines(found, as_stream(self._cupy, stream).ptr)
                return
        self._kernel.run(plan, stream=stream)

    def _by_copy_engines(self, found: Fragments, stream: int) -> None:
        if not len(found.sizes):
            return
        # The driver takes no batches on the legacy default stream.
        if self._batch is not None and stream not in LEGACY_STREAMS:
            self._batch(found, stream)
            return
        runtime = self._cupy.cuda.runtime
        for source, destination, size in zip(*(part.tolist() for part in found), strict=True):
            runtime.memcpyAsync(destination, source, size, runtime.memcpyDefault, stream)
