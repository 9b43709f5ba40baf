"""Loads of a few requests, written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.trace import Trace


def trace(*requests: tuple[float, int, int], n: int | Sequence[int] = 1) -> Trace:
    """Requests of (arrival, prompt, output), each with ``n`` samples."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace(
        "test",
        np.array(prompts, np.int64),
        np.array(outputs, np.int64),
        np.array(arrivals, float),
        np.broadcast_to(np.array(n, np.int64), len(requests)),
    )
