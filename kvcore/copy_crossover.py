"""From which size of a fragment the copy engines of this machine are faster than a kernel."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from kvcore.gpu import load_cupy
from kvcore.host_copier import HostCopier
from kvcore.planes import NHD, planes_of

__all__ = ["SIZES", "measure"]

SIZES = tuple(kib * 1024 for kib in (4, 8, 16, 24, 28, 32, 48, 64, 128, 256))
"""Bytes of a fragment that are tried."""

TOTAL_BYTES = 64 * 2**20
ROUNDS = 5


def measure(device: int = 0) -> int:
    """Time copies of 64 MiB to and from pinned host memory, 240 at most.

    Returns
    -------
    int
        The smallest of ``SIZES`` from which on the copy engines are at least as fast, both
        ways together; one more than the largest if they never are. For ``HostCopier``.

    Raises
    ------
    ImportError, RuntimeError
        There is no CuPy, or no device; see ``load_cupy``.
    """
    cupy = load_cupy()
    with cupy.cuda.Device(device):
        on_device = cupy.empty(TOTAL_BYTES, np.uint8)
        on_host = import_module("cupyx").empty_pinned(TOTAL_BYTES, np.uint8)
        stream = cupy.cuda.Stream(non_blocking=True)
        crossover = SIZES[-1] + 1
        for size in reversed(SIZES):
            blocks = TOTAL_BYTES // size
            shape = (blocks, 1, 1, size)
            pools = [
                planes_of(array[: blocks * size].reshape(shape), NHD)
                for array in (on_device, on_host)
            ]
            # No two neighbours stay neighbours, so each block is a fragment.
            pairs = np.stack([np.arange(blocks), np.arange(blocks)[::-1]], axis=1)
            batch = pairs.astype(np.int32)
            by_kernel, by_engines = (
                sum(
                    _seconds(cupy, HostCopier(*ends, crossover_bytes=bytes_), batch, stream)
                    for ends in (pools, pools[::-1])
                )
                for bytes_ in (size + 1, 0)
            )
            if by_engines > by_kernel:
                break
            crossover = size
    return crossover


def _seconds(cupy: Any, copier: HostCopier, batch: Any, stream: Any) -> float:
    """Of the fastest round; the first is not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        copier.copy(batch, stream=stream)
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1000)
    return float(min(times[1:]))
