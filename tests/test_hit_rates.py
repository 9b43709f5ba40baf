"""Recorded traffic, one request at a time: as many blocks are found as others have measured.

Each id of a trace becomes one full block, and one more token makes every block of a prompt
usable, so an id and a block mean the same here as in the figures. Those were measured with
no part of kvcore: a list in order of last use, from which the end of a prompt goes first,
and ``kvcache-simulator`` 0.1.3, which prints one digit after the point.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from real_traces import AGENTIC, CONVERSATION, SYNTHETIC, real_trace

from kvcore import BlockManager, Counter, EvictionPolicy, SegmentedLRU
from kvcore.hash_id_tokens import tokens_of_hash_ids

Ids = NDArray[np.int64]
Tokens = NDArray[np.int32]

EVERYTHING = 200_000  # blocks; more than any of the files needs

LRU_HITS = {
    CONVERSATION: {
        19: 12_030, 195: 12_084, 1_953: 15_370, 3_906: 24_467, 5_859: 39_258, 7_812: 50_456,
        9_765: 59_742, 15_625: 75_335, 19_531: 82_273, 97_656: 104_870, EVERYTHING: 105_710,
    },
    SYNTHETIC: {
        19: 216, 195: 2_050, 1_953: 17_351, 3_906: 27_850, 5_859: 37_703, 7_812: 44_859,
        9_765: 51_256, 15_625: 64_113, 19_531: 69_059, 97_656: 77_953, EVERYTHING: 77_953,
    },
    AGENTIC: {
        512: 72_025, 2_048: 270_472, 8_192: 644_364, 16_384: 899_504, 32_768: 1_074_012,
        EVERYTHING: 1_102_906,
    },
}  # fmt: skip

# Hit tokens of the last half of the requests, and the rate that the simulator prints.
LAST_HALF = {
    CONVERSATION: {
        45: (3_080_192, "4.5"), 1_450: (3_358_240, "4.9"), 5_801: (9_179_123, "13.5"),
        11_602: (15_981_771, "23.5"), 46_410: (25_470_836, "37.5"),
        EVERYTHING: (27_038_068, "39.8"),
    },
    SYNTHETIC: {
        45: (197_632, "0.5"), 1_450: (6_580_028, "18.0"), 5_801: (16_502_897, "45.1"),
        11_602: (23_445_039, "64.1"), EVERYTHING: (31_535_563, "86.3"),
    },
}  # fmt: skip

SIZES = [(name, size, 1) for name, sizes in LRU_HITS.items() for size in sizes]
SIZES += [
    (CONVERSATION, 195, 16), (CONVERSATION, 5_859, 16), (CONVERSATION, EVERYTHING, 16),
    (SYNTHETIC, 19, 16), (SYNTHETIC, 3_906, 16), (SYNTHETIC, 19_531, 16), (AGENTIC, 8_192, 16),
]  # fmt: skip


def hash_ids(name: str) -> tuple[Ids, ...]:
    ids = real_trace(name).hash_ids
    assert ids is not None
    return ids


def longest(name: str) -> int:
    return max(map(len, hash_ids(name)))


@cache
def prompts(name: str, block_size: int = 1) -> list[Tokens]:
    return [tokens_of_hash_ids(ids, block_size, len(ids) * block_size) for ids in hash_ids(name)]


def serve(bm: BlockManager, prompts: Sequence[Tokens]) -> Iterator[int]:
    """Serve one after the other, alone; yields after each how many blocks were found."""
    for tokens in prompts:
        cached = bm.allocate("it", len(tokens) + 1, tokens=tokens)
        bm.commit("it")
        bm.free_seq("it")
        yield cached // bm.block_size


def in_a_pool_of_its_own(
    name: str, size: int, block_size: int = 1, eviction: EvictionPolicy | None = None
) -> tuple[BlockManager, list[int]]:
    """The size and one block, for the token that no id stands for."""
    bm = BlockManager(size + 1, block_size, prefix_caching=True, eviction=eviction)
    return bm, list(serve(bm, prompts(name, block_size)))


def cut_to_size(name: str, size: int, block_size: int = 1) -> list[int]:
    """A pool with room for the longest request besides; its cache is cut after each one."""
    bm = BlockManager(size + longest(name) + 1, block_size, prefix_caching=True)
    found = []
    for blocks in serve(bm, prompts(name, block_size)):
        bm.evict(max(bm.pool.num_evictable - size, 0))
        assert bm.pool.num_evictable <= size
        found.append(blocks)
    bm.check()
    return found


# ------------------------------------------------------------------ least recently used


@pytest.mark.parametrize(("name", "size", "block_size"), SIZES)
def test_every_size_finds_as_many_blocks_as_was_measured(
    name: str, size: int, block_size: int
) -> None:
    if size < longest(name):
        assert sum(cut_to_size(name, size, block_size)) == LRU_HITS[name][size]
        return
    bm, found = in_a_pool_of_its_own(name, size, block_size)
    assert sum(found) == LRU_HITS[name][size]
    # Nothing was lost but what had to be. Equal ids come after equal ids in these files.
    unique = len(np.unique(np.concatenate(hash_ids(name))))
    assert bm.prefix_index is not None
    assert len(bm.prefix_index) == min(size, unique)
    assert bm.counters[Counter.CACHED_TOKENS] == sum(found) * block_size
    assert bm.counters[Counter.PROMPT_TOKENS] == sum(map(len, prompts(name, block_size)))
    bm.check()


def test_cutting_the_cache_or_having_no_more_room_is_the_same() -> None:
    assert cut_to_size(AGENTIC, 8_192) == in_a_pool_of_its_own(AGENTIC, 8_192)[1]


@pytest.mark.parametrize("name", LAST_HALF)
def test_the_last_half_finds_the_tokens_that_were_measured(name: str) -> None:
    trace = real_trace(name)
    half = len(trace) // 2
    lengths = trace.prompt_tokens
    for size, (expected, printed) in LAST_HALF[name].items():
        fits = size >= longest(name)
        found = in_a_pool_of_its_own(name, size)[1] if fits else cut_to_size(name, size)
        hit_tokens = np.minimum(np.array(found) * trace.hash_block_size, lengths)[half:].sum()
        assert hit_tokens == expected
        assert abs(100 * hit_tokens / lengths[half:].sum() - float(printed)) < 0.06


@pytest.mark.parametrize("name", [CONVERSATION, SYNTHETIC])
def test_sorted_by_prefix_a_cache_of_one_request_finds_everything(name: str) -> None:
    """What a cache-aware order can reach (SGLang, arXiv 2312.07104, theorem 3.1)."""
    in_order = sorted(hash_ids(name), key=list)
    bm = BlockManager(longest(name) + 1, 1, prefix_caching=True)
    found = serve(bm, [tokens_of_hash_ids(ids, 1, len(ids)) for ids in in_order])
    assert sum(found) == LRU_HITS[name][EVERYTHING]


def test_the_page_in_the_docs_has_these_rates() -> None:
    """Made by ``python -m bench.hit_rates``; this is to notice when it must be made again."""
    page = Path(__file__).parents[1] / "docs" / "hit-rates.md"
    if not page.exists():
        pytest.skip("the docs are not beside the tests")
    rows = [[cell.strip(" *") for cell in line.split("|")] for line in page.read_text().split("\n")]
    for name, sizes in LRU_HITS.items():
        n_ids = sum(map(len, hash_ids(name)))
        for size, lru_hits in sizes.items():
            blocks, rate = f"{size:,}", f"{lru_hits / n_ids:.4f}"[1:]
            found = [row[3] for row in rows if len(row) > 4 and row[2] == blocks]
            assert rate in found or size == EVERYTHING, (name, size)


# ------------------------------------------------------------------ segmented


class TwoLists:
    """Segmented LRU in plain Python: blocks never hit go first, a share of the hit ones last."""

    def __init__(self, size: int, protected: float) -> None:
        self.size = size
        self.protected = protected
        # Oldest first, both.
        self.once: OrderedDict[int, None] = OrderedDict()
        self.again: OrderedDict[int, None] = OrderedDict()

    def serve(self, path: list[int]) -> int:
        hits = 0
        while hits < len(path) and (path[hits] in self.once or path[hits] in self.again):
            hits += 1
        for block in path[:hits]:
            self.once.pop(block, None)
            self.again.pop(block, None)
        assert not any(block in self.once or block in self.again for block in path[hits:])
        for _ in range(max(len(self.once) + len(self.again) + len(path) - self.size, 0)):
            (self.once or self.again).popitem(last=False)
        for depth in reversed(range(len(path))):
            (self.again if depth < hits else self.once)[path[depth]] = None
            while len(self.again) > self.protected * (len(self.once) + len(self.again)):
                self.once[self.again.popitem(last=False)[0]] = None
        return hits


@pytest.mark.parametrize(
    ("name", "size", "protected"),
    [
        (CONVERSATION, 5_859, 0.25),
        (CONVERSATION, 9_765, 0.5),
        (SYNTHETIC, 1_953, 0.25),
        (SYNTHETIC, 5_859, 0.75),
        (SYNTHETIC, 5_859, 0.0),
        (AGENTIC, 8_192, 0.25),
    ],
)
def test_a_segmented_cache_finds_in_every_request_what_two_plain_lists_find(
    name: str, size: int, protected: float
) -> None:
    lists = TwoLists(size, protected)
    bm, found = in_a_pool_of_its_own(name, size, eviction=SegmentedLRU(protected))
    assert found == [lists.serve(ids.tolist()) for ids in hash_ids(name)]
    bm.check()


@pytest.mark.parametrize("name", LRU_HITS)
def test_a_segmented_cache_finds_more_than_least_recently_used(name: str) -> None:
    """More in the mean, and nowhere less by more than a twentieth of a point."""
    n_ids = sum(map(len, hash_ids(name)))
    gains = []
    for size, lru_hits in LRU_HITS[name].items():
        if longest(name) <= size < EVERYTHING:
            bm, found = in_a_pool_of_its_own(name, size, eviction=SegmentedLRU())
            gains.append(100 * (sum(found) - lru_hits) / n_ids)
            assert_no_block_is_without_the_one_before_it(bm)
    assert min(gains) > -0.05
    assert sum(gains) / len(gains) > 0.4


def assert_no_block_is_without_the_one_before_it(bm: BlockManager) -> None:
    index = bm.prefix_index
    assert index is not None
    live = {0, *index.uids().tolist()}
    for block in range(bm.num_blocks):
        identity = index.identity(block)
        assert identity is None or identity.parent in live
