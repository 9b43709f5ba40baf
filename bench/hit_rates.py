"""``python -m bench.hit_rates [TRACES]``: how often recorded prompts are found cached.

Prints ``docs/hit-rates.md``. TRACES is the directory of the trace files, by default what
``KVCORE_TRACES`` names. Nothing here is timed, so it prints the same everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcore import BlockManager, EvictionPolicy, SegmentedLRU
from kvcore.hash_id_tokens import tokens_of_hash_ids
from kvcore.hit_rate_curve import hit_rate_curve
from kvcore.trace import Trace, read_trace

# Cache size in tokens -> hit rate, read off the curves of Figure 9 to .0005.
PUBLISHED = {
    "mooncake/conversation_trace.jsonl": {
        10_000: 0.0449, 100_000: 0.0731, 1_000_000: 0.0866, 2_000_000: 0.1202, 3_000_000: None,
        4_000_000: 0.2149, 5_000_000: 0.2471, 8_000_000: 0.2997, 10_000_000: 0.3263,
        50_000_000: 0.3983, None: 0.4006,
    },
    "mooncake/synthetic_trace.jsonl": {
        10_000: 0.0003, 100_000: 0.0117, 1_000_000: 0.1461, 2_000_000: 0.2345, 3_000_000: None,
        4_000_000: 0.3805, 5_000_000: 0.4352, 8_000_000: 0.5447, 10_000_000: 0.5886,
        50_000_000: 0.6582, None: 0.6582,
    },
}  # fmt: skip
AGENTIC = "agentic_claude_code"
AGENTIC_BLOCKS = (512, 2_048, 8_192, 16_384, 32_768, None)

HEAD = """\
# Hit rates on recorded traffic

Made by `python -m bench.hit_rates`. `tests/test_hit_rates.py` holds kvcore to the LRU column
of every table, to the last block.

## What is counted

One request at a time: its prompt is looked up, computed, published, and freed. A *hit* is a
block in the unbroken run of blocks, from the first one on, that is found cached. Blocks are
those of the trace: 512 tokens in the Mooncake files, 64 in the agentic sessions. Nothing that
was generated is cached. The cache holds *size* blocks when a request has ended.

- **rate**: hits over all blocks of all prompts, the last and partial one of each included.
- **full**: the same without the partial last block of each prompt, on both sides.
- **LRU**: `BlockManager(..., prefix_caching=True)`. Of a prompt the last block goes first.
- **SLRU**: `eviction=SegmentedLRU()`. Blocks that were never hit go first; a quarter of the idle
  blocks is kept from those that were. One bit a block and constant time, as LRU.
- **MIN**: Belady's rule, which knows the future. No rule that evicts block by block can do
  better; the room between the columns is what a cleverer one could gain.
- **published**: Figure 9 of *Mooncake: Trading More Storage for Less Computation* (FAST '25),
  read off its curves to .0005. Which blocks it counts is not said.

With requests that run at once the rates are lower, because what they hold cannot be evicted and
leaves less room for the rest: `kvcore replay TRACE --plot FILE` shows by how much.
"""

MOONCAKE_NOTES = """\
At sizes below the longest prompt (*) the pool has room for that prompt besides, and the cache is
cut to its size after each request.
"""

AFTER = """\
## Beside the published curve

The synthetic file agrees with Figure 9 in the **full** column: to .0022 from 10^6 tokens on, but
for .0043 at 10^7. Below, the figure is what a cache finds whose prompts lose their *first* block
first, .0003 and .0117: with less room than a prompt needs, the end of the prompt pushes its own
beginning out, and nothing of it can be found. Freeing the last block first, as here, finds six
and one and a half times as much there.

The conversation file does not agree. From 10^5 tokens on the figure is 1.9 to 3.3 points higher
than ours, also without a limit, where no rule of eviction plays a part: 105,710 of the ids have
been seen before, .3664 of all and .3819 of the full ones, and the figure says .4006. A cache that
was warm at the start would explain that (over the last half of the requests alone, .3981 of the
tokens can be found), as would a finer grain than the 512 tokens of the published file.

## Beside another simulator

`kvcache-simulator` 0.1.3 prints the share of prompt *tokens* found over the last half of the
requests. kvcore finds, in the same terms:

"""


def main() -> None:
    directory = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KVCORE_TRACES")
    if not directory:
        raise SystemExit("give the directory of the traces, or set KVCORE_TRACES")
    print(HEAD)
    for name, published in PUBLISHED.items():
        trace = read_trace(Path(directory) / name)
        mooncake_table(trace, published)
    print(MOONCAKE_NOTES)
    agentic_table(read_trace(Path(directory) / AGENTIC))
    print(AFTER, end="")
    simulator_table([read_trace(Path(directory) / name) for name in PUBLISHED])


def mooncake_table(trace: Trace, published: dict[int | None, float | None]) -> None:
    block_size, n_tokens = trace.hash_block_size, trace.prompt_tokens
    unlimited = hit_rate_curve(trace, [], []).unique_blocks
    blocks = [unlimited if n is None else n // block_size for n in published]
    curve = hit_rate_curve(trace, [], blocks)
    print(f"## {trace.source}: {len(trace):,} requests, {curve.prompt_blocks:,} blocks\n")
    print("| size in tokens | in blocks | LRU | SLRU | MIN | LRU full | published |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    rows = zip(published.items(), blocks, curve.min_hit_blocks, strict=True)
    for (tokens, figure), size, best in rows:
        lru = found(trace, size, None)
        segmented = found(trace, size, SegmentedLRU())
        full = np.minimum(lru, n_tokens // block_size).sum() / (n_tokens // block_size).sum()
        cells = [
            "no limit" if tokens is None else f"{tokens:,}",
            f"{size:,}{'' if size >= longest(trace) else ' *'}",
            *(rate(hits / curve.prompt_blocks) for hits in (lru.sum(), segmented.sum(), best)),
            rate(full),
            "" if figure is None else rate(figure),
        ]
        print(f"| {' | '.join(cells)} |")
    print()


def agentic_table(trace: Trace) -> None:
    unlimited = hit_rate_curve(trace, [], []).unique_blocks
    blocks = [unlimited if size is None else size for size in AGENTIC_BLOCKS]
    curve = hit_rate_curve(trace, [], blocks)
    print(
        f"## 40 agentic sessions, merged by time: {len(trace):,} requests, "
        f"{curve.prompt_blocks:,} blocks\n"
    )
    print("| size in tokens | in blocks | LRU | SLRU | MIN |")
    print("|---:|---:|---:|---:|---:|")
    for size, best in zip(blocks, curve.min_hit_blocks, strict=True):
        lru = found(trace, size, None).sum()
        segmented = found(trace, size, SegmentedLRU()).sum()
        cells = [
            "no limit" if size == unlimited else f"{size * trace.hash_block_size:,}",
            f"{size:,}{'' if size >= longest(trace) else ' *'}",
            *(rate(hits / curve.prompt_blocks) for hits in (lru, segmented, best)),
        ]
        print(f"| {' | '.join(cells)} |")
    print()


def simulator_table(traces: Sequence[Trace]) -> None:
    # What it prints for LRU, in per cent.
    printed = (
        {45: "4.5", 1_450: "4.9", 5_801: "13.5", 11_602: "23.5", 46_410: "37.5", None: "39.8"},
        {45: "0.5", 1_450: "18.0", 5_801: "45.1", 11_602: "64.1", None: "86.3"},
    )
    print("| trace | blocks of 512 | hit tokens | kvcore % | its LRU % |")
    print("|---|---:|---:|---:|---:|")
    for trace, sizes in zip(traces, printed, strict=True):
        half = len(trace) // 2
        n_tokens = trace.prompt_tokens
        unlimited = hit_rate_curve(trace, [], []).unique_blocks
        for size, theirs in sizes.items():
            hits = found(trace, unlimited if size is None else size, None)
            hit_tokens = int(np.minimum(hits * trace.hash_block_size, n_tokens)[half:].sum())
            share = 100 * hit_tokens / int(n_tokens[half:].sum())
            blocks = "no limit" if size is None else f"{size:,}"
            print(f"| {trace.source} | {blocks} | {hit_tokens:,} | {share:.2f} | {theirs} |")


def found(trace: Trace, size: int, eviction: EvictionPolicy | None) -> NDArray[np.int64]:
    """How many leading blocks of each prompt the manager finds, one request at a time."""
    assert trace.hash_ids is not None
    # An id is a block of one token. One more token makes the last one usable.
    room = size if size >= longest(trace) else size + longest(trace)
    manager = BlockManager(room + 1, 1, prefix_caching=True, eviction=eviction)
    hits = []
    for ids in trace.hash_ids:
        cached = manager.allocate(0, len(ids) + 1, tokens=tokens_of_hash_ids(ids, 1, len(ids)))
        manager.commit(0)
        manager.free_seq(0)
        manager.evict(max(manager.pool.num_evictable - size, 0))
        hits.append(cached)
    return np.array(hits)


def longest(trace: Trace) -> int:
    assert trace.hash_ids is not None
    return max(map(len, trace.hash_ids))


def rate(value: float) -> str:
    return f"{value:.4f}"[1:]


if __name__ == "__main__":
    main()
