"""The memory that a trace needs, by formula, by published figure and by the real manager.

Without queueing, a request of ``p`` prompt and ``o`` output tokens holds ``p + t`` tokens
after its ``t``-th step, in ``ceil((p + t) / block_size)`` blocks. Summed over all steps of
all requests this says how much of the blocks is filled, and how many blocks ``k`` samples
save that share their prompt.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from real_traces import ARXIV, AZURE_CODE, AZURE_CONV, SHAREGPT, real_trace

from kvcore import BlockManager, Counter
from kvcore.replay import replay
from kvcore.trace import Trace

SHORT = "short conversations of " + SHAREGPT
BLOCK_SIZES = (8, 16, 32, 64, 128, 256, 512)
Column = NDArray[np.int64]

# Sums over all decode steps, and the filled share by block size.
UTILISATION = {
    AZURE_CONV: (19_366, 5_018_750_447, 315_588_086,
                 (0.9972, 0.9939, 0.9875, 0.9750, 0.9506, 0.9078, 0.8363)),
    AZURE_CODE: (8_819, 524_109_173, 32_872_140,
                 (0.9984, 0.9965, 0.9928, 0.9853, 0.9707, 0.9413, 0.8892)),
    SHAREGPT: (30_731, 36_292_427_018, 2_274_596_748,
               (0.9987, 0.9972, 0.9943, 0.9884, 0.9770, 0.9547, 0.9124)),
    ARXIV: (28_257, 19_934_579_463, 1_249_771_171,
            (0.9986, 0.9969, 0.9936, 0.9872, 0.9744, 0.9500, 0.9047)),
    SHORT: (14_568, 4_820_601_215, 303_988_928,
            (0.9958, 0.9911, 0.9818, 0.9637, 0.9295, 0.8670, 0.7614)),
}  # fmt: skip

# Per cent of the blocks that 2, 4 and 6 samples save by sharing their prompt's.
SAVING = {
    AZURE_CONV: (42.56, 63.84, 70.93),
    AZURE_CODE: (47.81, 71.71, 79.68),
    SHAREGPT: (44.16, 66.24, 73.60),
    ARXIV: (36.74, 55.11, 61.23),
    SHORT: (32.31, 48.47, 53.86),
}


def lengths(name: str) -> tuple[Column, Column]:
    trace = real_trace(SHAREGPT if name == SHORT else name)
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    if name == SHORT:
        short = prompts + outputs <= 2_048
        prompts, outputs = prompts[short], outputs[short]
    return prompts, outputs


def token_steps(prompts: Column, outputs: Column) -> Column:
    return prompts * outputs + outputs * (outputs + 1) // 2


def blocks_up_to(tokens: Column, block_size: int) -> Column:
    """The sum of ``ceil(t / block_size)`` over ``t = 1 .. tokens``."""
    full, rest = np.divmod(tokens, block_size)
    total: Column = block_size * full * (full + 1) // 2 + rest * (full + 1)
    return total


def block_steps(prompts: Column, outputs: Column, block_size: int) -> Column:
    return blocks_up_to(prompts + outputs, block_size) - blocks_up_to(prompts, block_size)


def sample(name: str, count: int) -> list[tuple[int, int]]:
    """Some requests of a trace, the longest prompt and the longest output among them."""
    prompts, outputs = lengths(name)
    chosen = np.random.default_rng(0).choice(len(prompts), count, replace=False).tolist()
    chosen += [int(prompts.argmax()), int(outputs.argmax())]
    return [(int(prompts[i]), int(outputs[i])) for i in chosen]


@pytest.mark.parametrize("name", UTILISATION)
def test_the_filled_share_of_the_blocks_is_the_known_one_at_every_block_size(name: str) -> None:
    rows, tokens, blocks_of_16, shares = UTILISATION[name]
    prompts, outputs = lengths(name)
    assert len(prompts) == rows
    assert token_steps(prompts, outputs).sum() == tokens
    assert block_steps(prompts, outputs, 16).sum() == blocks_of_16
    for block_size, share in zip(BLOCK_SIZES, shares, strict=True):
        blocks = int(block_steps(prompts, outputs, block_size).sum())
        assert round(tokens / (block_size * blocks), 4) == share


@pytest.mark.parametrize("name", SAVING)
def test_parallel_samples_save_the_known_share_of_the_blocks(name: str) -> None:
    prompts, outputs = lengths(name)
    for k, per_cent in zip((2, 4, 6), SAVING[name], strict=True):
        saved = ((k - 1) * (prompts // 16) * outputs).sum()
        alone = (k * block_steps(prompts, outputs, 16)).sum()
        assert round(100 * saved / alone, 2) == per_cent


def test_short_conversations_have_the_known_means() -> None:
    prompts, outputs = lengths(SHORT)
    assert (round(prompts.mean()), round(outputs.mean())) == (607, 396)


def test_reserving_ahead_fills_the_known_shares() -> None:
    """Contiguous reservation of the limit, of a power of two of output, and of the need."""
    prompts, outputs = lengths(SHORT)
    tokens = token_steps(prompts, outputs).sum()
    power_of_two = 2 ** np.ceil(np.log2(outputs)).astype(np.int64)
    for reserved, share in (
        (2_048, 40.8),
        (prompts + power_of_two, 63.0),
        (prompts + outputs, 74.8),
    ):
        assert round(100 * tokens / (reserved * outputs).sum(), 1) == share


@pytest.mark.parametrize("name", UTILISATION)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_manager_holds_what_the_formula_says(name: str, block_size: int) -> None:
    for prompt, output in sample(name, 6):
        bm = BlockManager(-(-(prompt + output) // block_size), block_size)
        bm.allocate(0, prompt)
        blocks = tokens = 0
        for _ in range(output):
            bm.append_slot(0)
            blocks += len(bm.tables[0])
            tokens += bm.lens[0]
        bm.check()
        one = np.array([prompt]), np.array([output])
        assert tokens == token_steps(*one)[0]
        assert blocks == block_steps(*one, block_size)[0]
        assert bm.gauges().free == 0


@pytest.mark.parametrize("name", SAVING)
@pytest.mark.parametrize("k", [2, 4, 6])
def test_the_manager_saves_what_the_formula_says(name: str, k: int) -> None:
    """k samples fork after the prefill and decode in step; only the tail is copied."""
    for prompt, output in sample(name, 4):
        bm = BlockManager(k * (-(-(prompt + output) // 16)), 16)
        bm.allocate(0, prompt)
        for child in range(1, k):
            bm.fork(0, child)
        rows = bm.rows(range(k))
        slots = np.empty(k, np.int64)
        saved = alone = 0
        for _ in range(output):
            assert bm.append_batch(rows, slots)[0] == k
            gauges = bm.gauges()
            saved += gauges.logical_blocks - gauges.used
            alone += gauges.logical_blocks
        bm.check()
        assert saved == (k - 1) * (prompt // 16) * output
        assert alone == k * block_steps(np.array([prompt]), np.array([output]), 16)[0]
        assert bm.counters[Counter.COW_COPIES] == (k - 1 if prompt % 16 else 0)


@pytest.mark.parametrize("name", [AZURE_CODE, AZURE_CONV])
def test_a_whole_replay_adds_up_to_the_formula(name: str) -> None:
    """Queueing and preemption move the steps of a request about, but add none."""
    _, tokens, blocks, shares = UTILISATION[name]
    trace = real_trace(name)
    result = replay(trace, num_blocks=2_000, watermark_blocks=1)
    assert result.preemptions > 0
    assert result.finished == len(trace)
    assert result.counters[Counter.TOKENS_APPENDED] == trace.output_tokens.sum()
    assert result.token_steps == tokens
    assert result.logical_block_steps == result.used_block_steps == blocks
    assert round(1 - result.internal_fragmentation, 4) == shares[1]


@pytest.mark.parametrize("name", [AZURE_CODE, AZURE_CONV])
@pytest.mark.parametrize("k", [2, 4, 6])
def test_a_replay_of_parallel_samples_saves_what_the_formula_says(name: str, k: int) -> None:
    """All but one step: the first sample is one ahead of the others, at its end too."""
    whole = real_trace(name).head(300)
    assert whole.arrivals is not None
    trace = Trace(name, whole.prompt_tokens, whole.output_tokens, whole.arrivals, np.full(300, k))
    result = replay(trace, num_blocks=100_000)
    assert result.preemptions == 0
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    assert result.logical_block_steps == k * block_steps(prompts, outputs, 16).sum()
    saved = result.logical_block_steps - result.used_block_steps
    assert saved == (prompts // 16 * ((k - 1) * outputs - 1)).sum()
    assert result.counters[Counter.COW_COPIES] == (k - 1) * np.count_nonzero(prompts % 16)
    assert result.counters[Counter.SEQUENCES_FORKED] == (k - 1) * len(trace)
