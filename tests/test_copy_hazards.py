"""Which batches depend on their order: against looking at every pair beside every other."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvcore.copy_hazards import check_batch


def problem(
    pairs: list[tuple[int, int]], sources: int, destinations: int, is_one_pool: bool
) -> str | None:
    """What is wrong with the first pair that must not be there."""
    live = [place for place, pair in enumerate(pairs) if min(pair) >= 0]
    for place in live:
        source, destination = pairs[place]
        before = [one for one in live if one < place and pairs[one][1] == destination]
        what = None
        if source >= sources:
            what = f"a source that is not below {sources}"
        elif destination >= destinations:
            what = f"a destination that is not below {destinations}"
        elif before:
            what = f"the destination of pairs[{before[0]}]; a batch may write a block once"
        elif is_one_pool and any(pairs[one][0] == destination for one in live):
            what = "a destination that is also a source; the copies of a batch have no order"
        if what is not None:
            return f"pairs[{place}] ({source}, {destination}) has {what}"
    return None


def found(pairs: list[tuple[int, int]], *pools: Any) -> str | None:
    try:
        check_batch(np.array(pairs, np.int32).reshape(-1, 2), *pools)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int) -> None:
    chance = random.Random(seed)
    seen = set()
    for _ in range(2_000):
        blocks = chance.choice([3, 20, 500])
        count = chance.choice([0, 1, 2, 7, 30])
        ids = [chance.randrange(-1, blocks) for _ in range(2 * count)]
        if chance.random() < 0.5:  # as a manager plans them: every id once
            ids = chance.sample(range(blocks), min(2 * count, blocks // 2 * 2))
        pairs = list(zip(ids[::2], ids[1::2], strict=True))
        sizes = [chance.choice([blocks, blocks - 1]) for _ in range(2)]
        pools = (*sizes, chance.random() < 0.5)
        expected = problem(pairs, *pools)
        assert found(pairs, *pools) == expected, (pairs, pools)
        seen.add(None if expected is None else expected.split(" has ")[1].split()[1])
    assert seen == {None, "source", "destination"}


def test_ids_that_fall_into_one_place_are_told_apart() -> None:
    """Multiples of 2**20 share the bits that a small table looks at first."""
    ids = [block << 20 for block in range(1, 2_001)]
    pairs = list(zip(ids[::2], ids[1::2], strict=True))
    assert found(pairs, 2**31 - 1, 2**31 - 1, True) is None
    pairs.append((7, ids[1]))
    assert found(pairs, 2**31 - 1, 2**31 - 1, True) == (
        f"pairs[1000] (7, {ids[1]}) has the destination of pairs[0]; a batch may write a block once"
    )


@pytest.mark.parametrize(
    ("pairs", "error", "said"),
    [
        (np.zeros((1, 2)), TypeError, "pairs must be an int32 array, got float64"),
        (np.zeros(2, np.int32), ValueError, "pairs must be a contiguous 2-D array"),
        (np.zeros((2, 2), np.int32)[:, ::-1], ValueError, "pairs must be a contiguous 2-D array"),
        (np.zeros((1, 3), np.int32), ValueError, r"pairs must have shape \(n, 2\), got \(1, 3\)"),
    ],
)
def test_what_is_no_batch_is_refused(pairs: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        check_batch(pairs, 4, 4, True)
