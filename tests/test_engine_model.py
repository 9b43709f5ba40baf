"""A real model served through kvcore says what it says with contiguous keys and values.

Each row of the matrix is another way through the manager and the scheduler. Compared are
the logits of everything that was sampled, what each slot that was read held, and the
tokens. ``stories260K`` needs ``KVCORE_MODEL``; the random model is always there.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from model_support import (
    TOLERANCE,
    Subject,
    WatchedEngine,
    largest_difference,
    subject,
)

from kvcore import BlockManager
from kvcore.engine import Chunk, PagedCache, StoriesTokenizer

GOLDEN = [
    ("", 200, "09f6ad7e7958090c34fc781b3910b0a94bee92c52410a1c917333f44501606d9"),
    ("Once upon a time", 150, "626e44ac55b1331f7a12fc7d6a2292acba5842304ee4e977c5fa848fe0fb93a2"),
    (
        "Lily and Ben were playing in the park",
        150,
        "be54baee6ce4be9d20b24101739bd94fb046a0a831d73ecb22ccc321079ae00e",
    ),
    ("One day, a big dog", 150, "df3281eb6cd80aa9f09b0d44da7b4cc503a0537c9b136438a188a84af9a47f7c"),
    ("Tom had a red car", 150, "91fe609c7717adf6594c6706babb85ea3dce908b5858cc1eca212e87acdea47d"),
]
"""Greedy continuations by numpy and torch, which agree: the hash of the comma-joined ids."""
GOLDEN_TEXT = "beeb5cb46785efee81a8545300b31e396b595e5ce6f3b77db201545501981d14"
"""Of the text of the first: what karpathy/llama2.c expects in its own test."""

OUTPUT = 50
"""Tokens that the requests of a row generate."""


@pytest.fixture(params=["stories260K", "random"])
def model(request: pytest.FixtureRequest) -> Subject:
    return subject(request.param)


@pytest.fixture(params=[1, 4, 16])
def size(request: pytest.FixtureRequest) -> int:
    block_size: int = request.param
    return block_size


def engine_over(model: Subject, size: int, tokens: int = 2_000, **options: Any) -> WatchedEngine:
    """An engine whose pool has room for so many tokens."""
    caching = options.pop("prefix_caching", False)
    bm = BlockManager(-(-tokens // size), size, prefix_caching=caching)
    return WatchedEngine(model.model, bm, **options)


def serve_all(model: Subject, engine: WatchedEngine) -> None:
    """All prompts at once, each continued as the plain forward pass continues it."""
    for place, prompt in enumerate(model.prompts):
        engine.add(place, prompt, max_tokens=OUTPUT)
    engine.run()
    for place, prompt in enumerate(model.prompts):
        assert engine.texts[place] == model.greedy(prompt, OUTPUT), f"prompt {place}"
    assert_right(engine)


def assert_right(engine: WatchedEngine) -> None:
    assert engine.seen, "nothing was computed"
    assert largest_difference(engine) < TOLERANCE
    assert engine.bm.pool.num_used == 0
    assert engine.rejected == {}


def test_the_golden_ids(size: int) -> None:
    model = subject("stories260K")
    engine = engine_over(model, size)
    for text, count, _ in GOLDEN:
        engine.add(text, model.tokenizer.encode(text), max_tokens=count)
    engine.run()
    for text, count, digest in GOLDEN:
        ids = engine.texts[text][-count:]
        assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest() == digest
    said = model.tokenizer.decode(engine.texts[""])
    assert hashlib.sha256(said).hexdigest() == GOLDEN_TEXT
    assert_right(engine)


def test_the_tokenizer_merges_as_the_model_was_trained() -> None:
    tokenizer = subject("stories260K").tokenizer
    assert isinstance(tokenizer, StoriesTokenizer)
    lily = [1, 317, 269, 368, 302, 382, 276, 337, 299, 322, 265, 282, 295, 433]
    assert tokenizer.encode("Lily and Ben were playing in the park") == lily
    assert tokenizer.decode(lily) == b"Lily and Ben were playing in the park"
    assert tokenizer.decode(tokenizer.encode("Zoë")) == "Zoë".encode()


def test_all_at_once(model: Subject, size: int) -> None:
    engine = engine_over(model, size)
    serve_all(model, engine)
    assert max(len(step) for step in engine.steps) == len(model.prompts)


def test_alone_every_bit_is_as_with_contiguous_keys(model: Subject, size: int) -> None:
    """Where the operands have the same shapes: one sequence, prompt whole, in odd blocks."""
    prompt = model.prompts[2]
    engine = engine_over(model, size)
    others = engine.bm.pool.take_many(7)
    engine.bm.pool.release_many(others[::-1])  # so that no table is 0, 1, 2, ...
    engine.add("A", prompt, max_tokens=OUTPUT)
    engine.run()
    found = np.stack([logits for _, logits in engine.seen])

    contiguous = PagedCache(model.model.shape, 1, model.model.shape.context)
    table = np.zeros(1, np.int32)
    text, start = list(prompt), 0
    for place in range(OUTPUT):
        slots = np.arange(start, len(text))
        chunk = Chunk(text[start:], start, slots, table, 1)
        logits = model.model.forward([chunk], contiguous)[0]
        assert (logits == found[place]).all(), f"token {place}"
        start = len(text)
        text.append(int(logits.argmax()))


def short_pool(model: Subject, size: int, prompt: list[int], **options: Any) -> WatchedEngine:
    """Two requests, of which the newer one has to yield when its output is half done."""
    older = model.prompts[1]
    blocks = -(-(len(older) + OUTPUT) // size) + -(-(len(prompt) + OUTPUT // 2) // size)
    engine = engine_over(model, size, blocks * size, **options)
    engine.add("older", older, max_tokens=OUTPUT)
    engine.add("A", prompt, max_tokens=OUTPUT)
    engine.run()
    assert engine.texts["older"] == model.greedy(older, OUTPUT)
    assert engine.texts["A"] == model.greedy(prompt, OUTPUT)
    assert_right(engine)
    return engine


def test_everyone_is_preempted_and_computed_again(model: Subject, size: int) -> None:
    for prompt in model.prompts:
        engine = short_pool(model, size, prompt)
        assert ["A"] in [step.preempted for step in engine.steps]
        assert engine.scheduler.counters.recomputed_tokens > len(prompt)


def test_everyone_is_swapped_out_and_in(model: Subject, size: int) -> None:
    for prompt in model.prompts:
        host = BlockManager(-(-(len(prompt) + OUTPUT) // size), size)
        engine = short_pool(model, size, prompt, host=host)
        assert ["A"] in [step.swapped_out for step in engine.steps]
        counters = engine.scheduler.counters
        assert counters.recomputed_tokens == 0
        assert counters.swap_in_blocks == counters.swap_out_blocks > 0
        assert host.pool.num_used == 0
