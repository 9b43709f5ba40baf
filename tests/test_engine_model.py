"""A real model served through kvcore says what it says with contiguous keys and values.

Each row of the matrix is another way through the manager and the scheduler. Compared are
the logits of everything that was sampled, what each slot that was read held, and the
tokens. ``stories260K`` needs ``KVCORE_MODEL``; the random model is always there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from model_support import (
    TOLERANCE,
    Contiguous,
    Subject,
    WatchedEngine,
    largest_difference,
    subject,
)

from kvcore import BlockManager, Counter, LowestPriority, Priority
from kvcore.engine import (
    BeamSearch,
    Chunk,
    Drafter,
    PagedCache,
    PromptLookup,
    StoriesTokenizer,
    Temperature,
)

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

OUTPUT = 40
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


HOST = pytest.mark.parametrize("has_host", [False, True], ids=["recomputed", "swapped"])
"""What becomes of those that are preempted."""


def engine_with_older(model: Subject, size: int, has_host: bool, **options: Any) -> WatchedEngine:
    """An engine with a request that stays when the next one has to yield."""
    host = BlockManager(-(-400 // size), size) if has_host else None
    engine = engine_over(model, size, host=host, **options)
    engine.add("older", model.prompts[1], max_tokens=OUTPUT)
    return engine


def run_with_a_shortage(
    model: Subject, engine: WatchedEngine, newer: list[str], after: int = 10
) -> None:
    """After some steps all blocks are held outside, until those that are newer have yielded."""
    pool = engine.bm.pool
    for _ in range(after):
        engine.step()
    held = pool.take_many(pool.num_free + pool.num_evictable)
    yielded: list[Hashable] = []
    while not yielded:
        step = engine.step()
        yielded = step.swapped_out if engine.host else step.preempted
    assert sorted(yielded) == newer
    pool.release_many(held)
    engine.run()
    counters = engine.scheduler.counters
    assert (counters.recomputed_tokens == 0) == (engine.host is not None)
    assert counters.swap_in_blocks == counters.swap_out_blocks
    assert engine.texts["older"] == model.greedy(model.prompts[1], OUTPUT)
    assert_right(engine)
    if engine.host is not None:
        assert engine.host.pool.num_used == 0


@HOST
def test_preempted_requests_go_on_as_they_would_have(
    model: Subject, size: int, has_host: bool
) -> None:
    for prompt in model.prompts[::2]:
        engine = engine_with_older(model, size, has_host)
        engine.add("A", prompt, max_tokens=OUTPUT)
        run_with_a_shortage(model, engine, ["A"])
        assert engine.texts["A"] == model.greedy(prompt, OUTPUT)


def test_a_prompt_in_chunks(model: Subject, size: int) -> None:
    """Prompts that are texts already begun, seven tokens a step among all of them."""
    engine = engine_over(model, size, token_budget=7, max_running=7)
    begun = [model.greedy(prompt, 25) for prompt in model.prompts]
    for place, prompt in enumerate(begun):
        engine.add(place, prompt, max_tokens=OUTPUT - 25)
    engine.run()
    for place, prompt in enumerate(model.prompts):
        assert engine.texts[place] == model.greedy(prompt, OUTPUT)
        starts = [start for step in engine.steps for seq, start, _ in step.prefills if seq == place]
        assert len(starts) > 2
    assert_right(engine)


def test_a_second_turn_finds_the_first_one_cached(model: Subject, size: int) -> None:
    engine = engine_over(model, size, prefix_caching=True)
    serve_all(model, engine)
    for place, prompt in enumerate(model.prompts):
        engine.add(f"again {place}", model.greedy(prompt, OUTPUT - 10), max_tokens=10)
    engine.run()
    cached = engine.cached_tokens()
    for place, prompt in enumerate(model.prompts):
        again = f"again {place}"
        assert engine.texts[again] == model.greedy(prompt, OUTPUT)
        assert cached[again] == (len(prompt) + OUTPUT - 11) // size * size > 0
    assert_right(engine)


def test_a_cached_text_that_is_evicted_is_computed_again(model: Subject, size: int) -> None:
    """In a pool of three texts each new one takes blocks that an older one has left cached."""
    longest = max(len(prompt) for prompt in model.prompts) + OUTPUT
    engine = engine_over(model, size, 3 * longest, prefix_caching=True, max_running=2)
    for _ in range(2):
        serve_all(model, engine)
    assert engine.bm.counters[Counter.EVICTIONS] > 0


def test_two_namespaces_share_nothing(model: Subject, size: int) -> None:
    engine = engine_over(model, size, prefix_caching=True)
    prompt = model.greedy(model.prompts[1], 40)
    for turn, namespace in enumerate(["A", "B", None, "A", "B", None]):
        engine.add(turn, prompt, max_tokens=10, namespace=namespace)
        engine.run()
        assert engine.texts[turn] == model.greedy(model.prompts[1], 50)
    cached = engine.cached_tokens()
    assert [cached[turn] for turn in range(3)] == [0, 0, 0]
    assert [cached[turn] for turn in range(3, 6)] == [(len(prompt) - 1) // size * size] * 3
    for turn, namespace in enumerate(["A", "B"]):  # at the same time as well
        engine.add(f"both {turn}", [*prompt, 3, 4, 5], max_tokens=10, namespace=namespace)
    engine.run()
    assert_right(engine)


def assert_sampled(model: Subject, seq: Hashable, engine: WatchedEngine, **how: Any) -> None:
    """Each token is the one that its sampling chooses from the plain forward pass's logits.

    They may be off by the tolerance, so the token that was chosen is given that ahead.
    """
    text, prompt, sampling, sample = (
        engine.texts[seq],
        how["prompt"],
        how["sampling"],
        how["sample"],
    )
    assert text[: len(prompt)] == prompt
    logits = Contiguous(model.model).extend(text)
    for place in range(len(prompt), len(text)):
        row = logits[place - 1].copy()
        row[text[place]] += 2 * TOLERANCE
        assert sampling.choose(row, sample, place) == text[place], f"token {place} of {seq!r}"


SAMPLES = ["A", "A1", "A2", "A3"]


def add_samples(model: Subject, engine: WatchedEngine, prompt: list[int], **request: Any) -> None:
    engine.add(SAMPLES[0], prompt, max_tokens=OUTPUT, siblings=SAMPLES[1:], **request)


def assert_samples(
    model: Subject, engine: WatchedEngine, prompt: list[int], sampling: Temperature
) -> None:
    for sample, seq in enumerate(SAMPLES):
        assert len(engine.texts[seq]) == len(prompt) + OUTPUT
        assert_sampled(model, seq, engine, prompt=prompt, sampling=sampling, sample=sample)
    assert len({tuple(engine.texts[seq]) for seq in SAMPLES}) == len(SAMPLES)


def test_four_samples_share_their_prompt(model: Subject, size: int) -> None:
    """The first token of each goes into a block that all of them have, unless it is full."""
    sampling = Temperature(0.9, seed=5)
    for prompt in model.prompts[2:4]:
        engine = engine_over(model, size, token_budget=64)
        add_samples(model, engine, prompt, sampling=sampling)
        engine.run()
        assert_samples(model, engine, prompt, sampling)
        copies = [len(step.copies) for step in engine.steps if len(step.copies)]
        assert copies == ([3] if len(prompt) % size else [])
        assert_right(engine)


@HOST
def test_four_samples_are_preempted_as_one(model: Subject, size: int, has_host: bool) -> None:
    prompt, sampling = model.prompts[3], Temperature(0.9, seed=6)
    engine = engine_with_older(model, size, has_host)
    add_samples(model, engine, prompt, sampling=sampling)
    run_with_a_shortage(model, engine, SAMPLES)
    assert_samples(model, engine, prompt, sampling)


@cache
def plain_beam_search(
    model: Subject, prompt: tuple[int, ...], width: int, count: int
) -> list[list[int]]:
    """The textbook's: each beam computed from its text alone."""
    beams = [(0.0, list(prompt))]
    for _ in range(count):
        candidates = []
        for score, text in beams:
            logits = Contiguous(model.model).extend(text, 1)[0].astype(np.float64)
            chances = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            for token in np.argsort(-chances)[:width].tolist():
                candidates.append((score + chances[token], [*text, token]))
        beams = sorted(candidates, key=lambda beam: -beam[0])[:width]
    return sorted(text for _, text in beams)


BEAM_OUTPUT = 24


def assert_beams(model: Subject, engine: WatchedEngine, prompt: list[int]) -> None:
    expected = plain_beam_search(model, tuple(prompt), len(SAMPLES), BEAM_OUTPUT)
    assert sorted(engine.texts[seq] for seq in SAMPLES) == expected
    assert engine.moved > 0
    assert_right(engine)


def test_four_beams(model: Subject, size: int) -> None:
    for prompt in model.prompts[1:3]:
        engine = engine_over(model, size)
        engine.add("A", prompt, max_tokens=BEAM_OUTPUT, siblings=SAMPLES[1:], sampling=BeamSearch())
        engine.run()
        assert_beams(model, engine, prompt)
        assert (sum(len(step.copies) for step in engine.steps) > 0) == (size > 1)


def test_four_beams_are_swapped_as_one(model: Subject, size: int) -> None:
    prompt = model.prompts[2]
    engine = engine_with_older(model, size, True)
    engine.add("A", prompt, max_tokens=BEAM_OUTPUT, siblings=SAMPLES[1:], sampling=BeamSearch())
    run_with_a_shortage(model, engine, SAMPLES, after=12)
    assert_beams(model, engine, prompt)


def test_four_beams_are_computed_again(model: Subject, size: int) -> None:
    prompt = model.prompts[2]
    engine = engine_with_older(model, size, False)
    engine.add("A", prompt, max_tokens=BEAM_OUTPUT, siblings=SAMPLES[1:], sampling=BeamSearch())
    run_with_a_shortage(model, engine, SAMPLES, after=12)
    assert_beams(model, engine, prompt)
    assert engine.scheduler.counters.recomputed_tokens > 0


class Guesses(Drafter):
    """What the model is going to say, with mistakes at random."""

    def __init__(self, model: Subject, mistakes: float, seed: int) -> None:
        self.model, self.mistakes = model, mistakes
        self.random = np.random.default_rng(seed)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        # The first prompt is how all of them begin.
        begun = [one for one in self.model.prompts if list(tokens[: len(one)]) == one]
        text = self.model.greedy(begun[-1], len(tokens) + count - len(begun[-1]))
        wrong = self.random.random(count) < self.mistakes
        vocab = self.model.model.shape.vocab
        return [
            (token + one) % vocab for token, one in zip(text[len(tokens) :], wrong, strict=True)
        ]


@pytest.mark.parametrize("share", [1.2, 0.5], ids=["roomy", "short"])
def test_drafts_of_which_some_are_rejected(model: Subject, size: int, share: float) -> None:
    tokens = sum(len(prompt) + OUTPUT + 16 for prompt in model.prompts)
    drafter = Guesses(model, 0.3, seed=8)
    engine = engine_over(
        model, size, int(tokens * share), draft_tokens=3, drafter=drafter, prefix_caching=True
    )
    serve_all(model, engine)
    counters = engine.scheduler.counters
    assert 0 < counters.rejected_draft_tokens < counters.draft_tokens
    if share > 1:
        assert len(engine.steps) < OUTPUT
    assert (counters.preemptions_recompute > 0) == (share < 1)


def test_drafts_of_samples_change_nothing(model: Subject, size: int) -> None:
    """Where a draft is what would have been sampled it is, so the texts are the same."""
    prompt, sampling = model.prompts[1], Temperature(0.3, seed=2)
    plain = engine_over(model, size)
    add_samples(model, plain, prompt, sampling=sampling)
    plain.run()
    engine = engine_over(model, size, draft_tokens=2, drafter=Recalled(plain.texts))
    add_samples(model, engine, prompt, sampling=sampling)
    engine.run()
    assert engine.texts == plain.texts
    assert_right(engine)
    counters = engine.scheduler.counters
    assert 0 < counters.rejected_draft_tokens < counters.draft_tokens


class Recalled(Drafter):
    """How one of some texts that begin alike goes on, which may be the wrong one."""

    def __init__(self, texts: dict[Hashable, list[int]]) -> None:
        self.texts = list(texts.values())

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        begun = [text for text in self.texts if text[: len(tokens)] == list(tokens)]
        return begun[0][len(tokens) : len(tokens) + count]


def test_prompt_lookup_guesses_what_followed_last_time() -> None:
    lookup = PromptLookup(match=2)
    assert lookup.propose([1, 2, 3, 1, 2, 4, 5, 1, 2], 2) == [4, 5]
    assert lookup.propose([1, 2, 3, 1, 2], 9) == [3, 1, 2]
    assert lookup.propose([1, 2, 3], 2) == lookup.propose([1], 2) == []


@pytest.mark.parametrize(("sink_tokens", "has_host"), [(0, False), (3, True)])
def test_a_window_keeps_what_is_seen(
    model: Subject, size: int, sink_tokens: int, has_host: bool
) -> None:
    """What it gives back is NaN at once, and may belong to others in the next step."""
    windowed = model.seeing(11, sink_tokens)
    prompt = windowed.greedy(model.prompts[2], 30)
    engine = engine_with_older(
        windowed, size, has_host, tokens=200, token_budget=24, window=11, sink_tokens=sink_tokens
    )
    engine.add("A", prompt, max_tokens=OUTPUT)
    run_with_a_shortage(windowed, engine, ["A"])
    assert engine.texts["A"] == windowed.greedy(model.prompts[2], 30 + OUTPUT)
    assert engine.texts["A"] != model.greedy(model.prompts[2], 30 + OUTPUT)
    alone = [step.stats.used for step in engine.steps if list(step) == ["A"]]
    assert alone[-1] <= -(-sink_tokens // size) + -(-11 // size) + 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_results_that_the_scheduler_learns_late(model: Subject, size: int, in_flight: int) -> None:
    """In a short pool, so that some are preempted before it knows what they have sampled."""
    longest = max(len(prompt) for prompt in model.prompts) + OUTPUT
    engine = engine_over(
        model,
        size,
        2 * longest,
        prefix_caching=True,
        in_flight=in_flight,
        host=BlockManager(-(-40 // size), size),
    )
    ends = {}
    for place, prompt in enumerate(model.prompts):
        text = model.greedy(prompt, OUTPUT)
        end = text[len(prompt) + OUTPUT // 2]
        ends[place] = text[: text.index(end, len(prompt)) + 1]
        engine.add(place, prompt, max_tokens=OUTPUT)
        engine.add(f"ends {place}", prompt, max_tokens=OUTPUT, end_token=end)
    engine.add("aborted", model.prompts[2], max_tokens=OUTPUT)
    while "aborted" not in engine.scheduler.running:
        engine.step()
    assert engine.abort("aborted")
    engine.run()
    for place, prompt in enumerate(model.prompts):
        assert engine.texts[place] == model.greedy(prompt, OUTPUT)
        assert engine.texts[f"ends {place}"] == ends[place]
    assert_right(engine)
    counters = engine.scheduler.counters
    assert counters.preemptions_recompute > 0
    assert counters.ignored_results > 0


@pytest.mark.parametrize("seed", range(2))
def test_all_of_it_under_load_with_aborts(model: Subject, size: int, seed: int) -> None:
    """Samples, beams, drafts, chunks, shared prefixes, namespaces, swaps, aborts at any moment."""
    random = np.random.default_rng([seed, size])
    longest = max(len(prompt) for prompt in model.prompts) + OUTPUT
    engine = engine_over(
        model,
        size,
        3 * longest,
        prefix_caching=True,
        token_budget=60,
        max_running=20,
        host=BlockManager(-(-100 // size), size),
        draft_tokens=2,
        drafter=PromptLookup(),
        order=Priority(),
        victim=LowestPriority(),
    )
    greedy: dict[Hashable, list[int]] = {}
    for place in range(20):
        prompt = model.prompts[random.integers(len(model.prompts))]
        text = model.greedy(prompt, OUTPUT)
        given = text[: random.integers(len(prompt), len(text) - 5)]
        text = text[: random.integers(len(given) + 1, len(text))]
        sampling = [None, None, Temperature(0.8, seed), BeamSearch()][random.integers(4)]
        siblings = [(place, sample) for sample in range(random.integers(1, 4))]
        engine.add(
            place,
            given,
            max_tokens=len(text) - len(given),
            sampling=sampling,
            siblings=() if sampling is None else siblings,
            namespace="AB"[random.integers(2)],
            priority=int(random.integers(3)),
        )
        if sampling is None:
            greedy[place] = text
        for _ in range(random.integers(4)):
            engine.step()
        if place % 5 == 4:
            running = engine.scheduler.running
            aborted = running[random.integers(len(running))]
            assert engine.abort(aborted)
            greedy.pop(aborted, None)
    engine.run()
    assert_right(engine)
    for seq, text in greedy.items():
        assert engine.texts[seq] == text, f"{seq!r}"
    counters, core = engine.scheduler.counters, engine.bm.counters
    assert counters.preemptions_recompute + counters.preemptions_swap > 0
    assert counters.rejected_draft_tokens > 0
    assert core[Counter.CACHED_TOKENS] > 0
    assert core[Counter.COW_COPIES] > 0 or size == 1
