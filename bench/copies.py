"""What do block copies cost the host: a batch checked, cut into fragments, copied by NumPy?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.harness import Contender, Row
from kvcore.copier import plan_copies
from kvcore.copy_kernel import plane_table
from kvcore.fragments import FragmentCutter
from kvcore.numpy_copier import NumpyCopier
from kvcore.planes import NHD, Planes, planes_of

__all__ = ["rows"]

CALLS = range(20)
NUM_BLOCKS = 1_200
LAYERS = 32


def pairs_of(count: int, num_blocks: int) -> NDArray[np.int32]:
    """Pairs of random blocks, each in one pair."""
    blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    return np.stack([blocks[:count], blocks[-count:]], axis=1)


def small_pool() -> Planes:
    """Keys and values of 32 layers, of as few bytes as there can be."""
    return planes_of(np.zeros((LAYERS, 2, NUM_BLOCKS, 16, 1, 1), np.uint8), NHD)


def check(count: int) -> Mapping[str, Contender]:
    """The checks that every batch goes through."""
    names = {"plan": plan_copies, "planes": small_pool(), "pairs": pairs_of(count, NUM_BLOCKS)}
    return {
        "kvcore": Contender(
            "plan(planes, planes, pairs)", "_ in calls", names | {"calls": CALLS}, operations=20
        )
    }


def cut(count: int) -> Mapping[str, Contender]:
    """Fragments of 64 planes."""
    planes = small_pool()
    names = {
        "cut": FragmentCutter(plane_table(planes, planes)).cut,
        "pairs": pairs_of(count, NUM_BLOCKS),
        "calls": CALLS,
    }
    return {"kvcore": Contender("cut(pairs)", "_ in calls", names, operations=20)}


def copy(count: int) -> Mapping[str, Contender]:
    """Blocks of 128 KiB in 8 planes, beside the same bytes copied in one piece."""
    pool = np.zeros((4, 2, 256, 16, 8, 128), np.uint8)
    pairs = pairs_of(count, 256)
    copied = count * pool[:, :, 0].nbytes
    flat = pool.reshape(-1)
    planes = planes_of(pool, NHD)
    return {
        "kvcore": Contender(
            "copy(pairs)",
            "_ in calls",
            {"copy": NumpyCopier(planes).copy, "pairs": pairs, "calls": CALLS},
            operations=20 * count,
        ),
        "memcpy": Contender(
            "copy(to, source)",
            "_ in calls",
            {
                "copy": np.copyto,
                "to": flat[-copied:],
                "source": flat[:copied],
                "calls": CALLS,
            },
            operations=20 * count,
        ),
    }


def rows() -> Iterator[Row]:
    """All rows of this file."""
    for count in (8, 512):
        yield Row(f"check a batch of {count} copies", partial(check, count))
        yield Row(f"cut {count} copies into fragments of 64 planes", partial(cut, count))
    yield Row("copy with NumPy, 32 x 128 KiB, a block", partial(copy, 32))
