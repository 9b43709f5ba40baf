"""Block copies in host memory, and what every other copier is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.copier import BlockCopier, CopyPlan
from kvcore.planes import Plane, Planes, matched

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NumpyCopier"]


class NumpyCopier(BlockCopier):
    """Copies blocks in host memory; done when a call returns.

    Parameters
    ----------
    source : Planes
        In host memory.
    destination : Planes, optional
        By default the source: copies within one pool.

    Raises
    ------
    ValueError
        One is on a device, or the two do not have the same rows.
    """

    def __init__(self, source: Planes, destination: Planes | None = None) -> None:
        self.source = source
        self.destination = source if destination is None else destination
        for name, planes in (("source", source), ("destination", self.destination)):
            if planes.device is not None:
                raise ValueError(f"{name} must be in host memory, got CUDA device {planes.device}")
        self._views = [
            (_view(one, self.source), _view(other, self.destination), one.token_bytes)
            for one, other in matched(self.source, self.destination)
        ]

    def run(self, plan: CopyPlan, *, stream: Any = None) -> None:
        """Do what was planned for these pools. Needs: it came from ``plan_copies``."""
        live = (plan.pairs >= 0).all(axis=1)
        sources, destinations = plan.pairs[live].T
        if plan.n_tokens is None:
            for source, destination, _ in self._views:
                destination[destinations] = source[sources]
            return
        counts = plan.n_tokens[live].tolist()
        for source, destination, token_bytes in self._views:
            for one, other, count in zip(sources, destinations, counts, strict=True):
                end = count * token_bytes if token_bytes or not count else None
                destination[other, :, :end] = source[one, :, :end]


class _HostBytes:
    """Bytes at an address, for numpy to make an array of."""

    def __init__(self, plane: Plane, planes: Planes) -> None:
        self.__array_interface__ = {
            "data": (plane.address, False),
            "shape": (planes.num_blocks, plane.rows, plane.row_bytes),
            "strides": (plane.block_stride, plane.pitch, 1),
            "typestr": "|u1",
            "version": 3,
        }


def _view(plane: Plane, planes: Planes) -> NDArray[np.uint8]:
    """uint8 ``(num_blocks, rows, row_bytes)``: all blocks of the plane.

    It does not keep their memory alive; the planes do.
    """
    return np.asarray(_HostBytes(plane, planes))
