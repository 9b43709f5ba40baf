"""Hit rates over cache size, against a cache in plain Python and the known figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_traces import AGENTIC, CONVERSATION, SYNTHETIC, real_trace

from kvcore.hit_rate_curve import hit_rate_curve
from kvcore.trace import Trace

Path = tuple[tuple[int, ...], ...]


def trace(prompts: Sequence[tuple[Sequence[int], int]], block_size: int = 4) -> Trace:
    """Requests of (ids, tokens that the last one lacks)."""
    return Trace(
        "test",
        np.array([max(len(ids) * block_size - cut, 1) for ids, cut in prompts], np.int64),
        np.ones(len(prompts), np.int64),
        hash_ids=tuple(np.array(ids, np.int64) for ids, _ in prompts),
        hash_block_size=block_size,
    )


def blocks(ids: Sequence[int]) -> Path:
    """A block is all ids up to its own."""
    return tuple(tuple(ids[: depth + 1]) for depth in range(len(ids)))


def found(load: Trace, size: int, victim: str) -> tuple[int, int]:
    """Hit blocks and tokens of a cache that is looked through block by block."""
    assert load.hash_ids is not None
    paths = [blocks(ids.tolist()) for ids in load.hash_ids]
    cache: list[tuple[int, ...]] = []  # last used last
    hit_blocks = hit_tokens = 0
    for request, path in enumerate(paths):
        hits = 0
        while hits < len(path) and path[hits] in cache:
            hits += 1
        hit_blocks += hits
        hit_tokens += min(hits * load.hash_block_size, int(load.prompt_tokens[request]))
        for block in reversed(path):
            if block in cache:
                cache.remove(block)
            cache.append(block)
        while len(cache) > size:
            if victim == "oldest":
                del cache[0]
            else:
                cache.remove(max(cache, key=lambda block: next_use(paths, request, block)))
    return hit_blocks, hit_tokens


def next_use(paths: list[Path], now: int, block: tuple[int, ...]) -> tuple[int, int]:
    uses = (request for request in range(now + 1, len(paths)) if block in paths[request])
    return next(uses, len(paths)), len(block)


loads = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 3)), min_size=1, max_size=14
).map(trace)


@given(loads)
def test_every_size_finds_what_a_cache_of_that_size_finds(load: Trace) -> None:
    assert load.hash_ids is not None
    sizes = range(1, 30)
    curve = hit_rate_curve(load, sizes, sizes)
    assert curve.prompt_blocks == sum(map(len, load.hash_ids))
    assert curve.prompt_tokens == load.prompt_tokens.sum()
    assert curve.unique_blocks == len({b for ids in load.hash_ids for b in blocks(ids.tolist())})
    for size in sizes:
        at = size - 1
        lru = (curve.lru_hit_blocks[at], curve.lru_hit_tokens[at])
        assert lru == found(load, size, "oldest"), size
        best = (curve.min_hit_blocks[at], curve.min_hit_tokens[at])
        assert best == found(load, size, "needed last"), size


@given(loads)
def test_nothing_finds_more_than_belady_and_all_find_the_same_without_a_limit(load: Trace) -> None:
    curve = hit_rate_curve(load, range(1, 90), range(1, 90))
    assert (curve.lru_hit_blocks <= curve.min_hit_blocks).all()
    assert (np.diff(curve.lru_hit_blocks) >= 0).all()
    assert (np.diff(curve.min_hit_blocks) >= 0).all()
    assert curve.lru_hit_blocks[-1] == curve.min_hit_blocks[-1]
    assert curve.lru_hit_blocks[-1] == curve.prompt_blocks - curve.unique_blocks


def test_equal_ids_after_different_ids_are_different_blocks() -> None:
    curve = hit_rate_curve(trace([((1, 9), 0), ((2, 9), 0), ((2, 9), 0)]))
    assert (curve.unique_blocks, curve.lru_hit_blocks[-1]) == (4, 2)


def test_a_cut_block_counts_the_tokens_that_are_in_the_prompt() -> None:
    curve = hit_rate_curve(trace([((1, 2), 0), ((1, 2), 3)]), [1, 2])
    assert curve.lru_hit_tokens.tolist() == [4, 5]
    assert curve.prompt_tokens == 8 + 5


def test_by_default_the_sizes_end_where_everything_fits() -> None:
    curve = hit_rate_curve(trace([(range(500), 0)] * 2))
    for sizes in (curve.lru_sizes, curve.min_sizes):
        assert (sizes[0], sizes[-1]) == (1, 500)
        assert (np.diff(sizes) > 0).all()
    assert curve.lru_hit_blocks[-1] == curve.min_hit_blocks[-1] == 500


def test_a_trace_without_ids_has_no_hit_rate() -> None:
    lengths = Trace("lengths", np.ones(2, np.int64), np.ones(2, np.int64))
    with pytest.raises(ValueError, match="'lengths' has no hash_ids"):
        hit_rate_curve(lengths)


# ------------------------------------------------------------------ the real files

# Hit blocks, measured elsewhere: sizes, least recently used with the end of a prompt first
# to go, and Belady's rate where it is known.
KNOWN = {
    CONVERSATION: (
        {19: 12_030, 195: 12_084, 1_953: 15_370, 3_906: 24_467, 5_859: 39_258, 7_812: 50_456,
         9_765: 59_742, 15_625: 75_335, 19_531: 82_273, 97_656: 104_870, 10**6: 105_710},
        {1_000: 0.1907, 5_859: 0.3532, 10_000: 0.3664, 50_000: 0.3664},
    ),
    SYNTHETIC: (
        {19: 216, 195: 2_050, 1_953: 17_351, 3_906: 27_850, 5_859: 37_703, 7_812: 44_859,
         9_765: 51_256, 15_625: 64_113, 19_531: 69_059, 97_656: 77_953, 10**6: 77_953},
        {1_000: 0.2767, 5_859: 0.5500, 10_000: 0.6180, 30_000: 0.6396},
    ),
    AGENTIC: (
        {512: 72_025, 2_048: 270_472, 8_192: 644_364, 16_384: 899_504, 32_768: 1_074_012,
         10**6: 1_102_906},
        {512: 0.1278, 2_048: 0.4200, 8_192: 0.7485, 16_384: 0.8712, 32_768: 0.9353},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_the_real_files_hit_as_often_as_was_measured_elsewhere(name: str) -> None:
    lru, best = KNOWN[name]
    curve = hit_rate_curve(real_trace(name), lru, best)
    assert dict(zip(lru, curve.lru_hit_blocks.tolist(), strict=True)) == lru
    rates = curve.min_hit_blocks / curve.prompt_blocks
    assert rates.round(4).tolist() == list(best.values())
