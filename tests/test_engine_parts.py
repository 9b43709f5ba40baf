"""The parts of the reference engine by themselves, what it refuses, and its command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_support import subject

import kvcore
from kvcore import BlockManager, Reason
from kvcore.engine import (
    BeamSearch,
    ByteTokenizer,
    Engine,
    Greedy,
    PagedCache,
    PromptLookup,
    Temperature,
    load_model,
    random_llama,
)
from kvcore.engine.__main__ import main
from kvcore.engine.random_model import SMALL
from kvcore.engine.text_lines import TextLines
from kvcore.numpy_copier import NumpyCopier


def small_engine(blocks: int = 16, **options: Any) -> Engine:
    return Engine(random_llama(), BlockManager(blocks, 4), **options)


def test_nothing_in_kvcore_imports_the_engine() -> None:
    package = Path(kvcore.__file__).parent
    modules = [path for path in package.glob("*.py*") if path.suffix in {".py", ".pyx", ".pxd"}]
    assert len(modules) > 40
    for path in modules:
        assert not re.search(r"kvcore(\.| import )engine\b", path.read_text()), path.name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sink_tokens": -1}, "sink_tokens must be at least 0"),
        ({"draft_tokens": 2}, "draft_tokens and drafter .* 2 and None"),
        ({"drafter": PromptLookup()}, "draft_tokens and drafter .* 0 and"),
    ],
)
def test_an_engine_refuses_what_it_cannot_do(options: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        small_engine(**options)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"tokens": [1] * 500, "max_tokens": 13}, "max_tokens is 13: after 500 .* room for 12"),
        ({"tokens": [5, 257], "max_tokens": 1}, "tokens: 257 is not from 0 to 256"),
        ({"tokens": [-1], "max_tokens": 1}, "tokens: -1 is not from 0 to 256"),
        ({"tokens": [1], "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"tokens": [1] * 100, "max_tokens": 1}, "n_tokens is 100"),
        ({"tokens": [1], "max_tokens": 1, "siblings": ["A"]}, "siblings: 'A' comes twice"),
    ],
)
def test_a_request_that_is_refused_leaves_nothing(request_: Any, named: str) -> None:
    engine = small_engine()
    with pytest.raises(ValueError, match=named):
        engine.add("A", **request_)
    assert engine.is_idle
    assert engine.texts == {}


def test_beams_do_not_go_with_results_that_come_late() -> None:
    engine = small_engine(in_flight=1)
    with pytest.raises(ValueError, match="sampling: with in_flight 1 beams cannot"):
        engine.add("A", [1], max_tokens=3, sampling=BeamSearch())
    assert engine.is_idle


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_who_outgrows_the_pool_ends_with_a_reason_and_keeps_its_text(
    in_flight: int,
) -> None:
    engine = small_engine(blocks=6, in_flight=in_flight)
    engine.add("A", [1] * 17, max_tokens=50)
    engine.run()
    assert engine.rejected["A"].reason is Reason.OUTGREW_POOL
    assert len(engine.texts["A"]) == 25, "six blocks of four, and the token that did not fit"


def test_blocks_that_others_hold_are_not_waited_for_in_vain() -> None:
    engine = small_engine()
    engine.bm.pool.take_many(16)
    engine.add("A", [1], max_tokens=3)
    with pytest.raises(RuntimeError, match="step 2 has nothing to do"):
        engine.run()


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_an_end_token_ends_a_text(in_flight: int) -> None:
    engine = small_engine(in_flight=in_flight)
    engine.add("A", [1, 2, 3], max_tokens=20)
    engine.run()
    end = engine.texts["A"][8]
    first = engine.texts["A"].index(end, 3)
    engine.add("B", [1, 2, 3], max_tokens=20, end_token=end)
    engine.run()
    assert engine.texts["B"] == engine.texts["A"][: first + 1]
    assert engine.bm.pool.num_used == 0


def test_an_end_that_is_told_too_late_is_told_again() -> None:
    """The preemption comes after the end token was sampled and before it is known."""
    alone = small_engine()
    alone.add("A", [1, 2, 3], max_tokens=20)
    alone.run()
    text = alone.texts["A"]
    # The token after it needs a block.
    end = next(place for place in (8, 12, 16) if text[place] not in text[3:place])

    engine = small_engine(in_flight=1)
    engine.add("older", [4], max_tokens=40)
    engine.add("A", [1, 2, 3], max_tokens=200, end_token=text[end])
    for _ in range(end - 2):
        engine.step()
    assert engine.texts["A"] == text[: end + 1]
    held = engine.bm.pool.take_many(engine.bm.pool.num_free)
    assert engine.step().preempted == ["A"]
    engine.bm.pool.release_many(held)
    engine.run()
    assert engine.texts["A"] == text[: end + 1]
    assert engine.scheduler.counters.sampled_tokens < 40 + 20


def test_a_late_abort_changes_nothing() -> None:
    engine = small_engine()
    engine.add("A", [1, 2, 3], max_tokens=9)
    engine.step()
    assert engine.abort("A")
    assert not engine.abort("A")
    assert engine.is_idle
    assert len(engine.texts["A"]) == 4


def test_a_cache_reads_what_was_written_through_slots_and_tables() -> None:
    cache = PagedCache(SMALL, num_blocks=5, block_size=2)
    tokens = np.arange(3 * 2 * 8, dtype=np.float32).reshape(3, 2, 8)
    cache.write(1, np.array([6, 7, 2]), tokens, -tokens)
    table, positions = np.array([3, 1, 0], np.int32), np.arange(3)
    assert cache.slots(table, positions).tolist() == [6, 7, 2]
    keys, values = cache.read(1, cache.slots(table, positions))
    assert np.array_equal(keys, tokens)
    assert np.array_equal(values, -tokens)
    assert np.isnan(cache.read(0, np.array([6, 7]))[0]).all(), "of another layer"

    cache.begin_copies(np.array([0, 4], np.int32))
    NumpyCopier(cache.planes).copy(np.array([[3, 0], [1, 4]], np.int32))
    assert np.array_equal(cache.read(1, np.array([0, 1, 8]))[0], tokens)
    cache.write(1, np.array([8]), tokens[:1], tokens[:1])
    assert np.isnan(cache.blocks[1, :, 4, 1]).all(), "it begins with its first slot"
    cache.erase(np.array([0, 2, 3], np.int32))
    assert np.isnan(cache.blocks[:, :, [0, 3]]).all()
    cache.erase_slots(np.array([8]))
    assert np.isnan(cache.blocks[:, :, 4]).all()
    assert not np.isnan(cache.blocks[1, :, 1, 0]).any()


def test_a_sample_is_as_likely_as_the_softmax_says() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    draws = [Temperature(1.0, seed=4).choose(logits, 0, place) for place in range(4_000)]
    assert np.bincount(draws) / 4_000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    cold = [Temperature(0.5, seed=4).choose(logits, 1, place) for place in range(4_000)]
    squares = np.array([0.25, 0.09, 0.0225, 0.0025])
    assert np.bincount(cold) / 4_000 == pytest.approx(squares / squares.sum(), abs=0.03)
    assert Greedy().choose(logits[::-1], 0, 0) == 3
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        Temperature(0)


def test_a_beam_keeps_its_best_continuation_and_others_take_the_rest() -> None:
    logits = np.log(np.array([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    scores = np.log([0.7, 0.1, 0.2])
    chosen = BeamSearch().advance(scores, logits)
    assert [(one.parent, one.token) for one in chosen] == [(0, 1), (0, 2), (2, 1)]
    assert [one.score for one in chosen] == pytest.approx(np.log([0.42, 0.21, 0.16]))
    first = BeamSearch().advance(np.array([0, -np.inf]), np.stack([logits[0]] * 2))
    assert [(one.parent, one.token) for one in first] == [(0, 1), (0, 2)], "they all begin alike"


def test_bytes_are_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("né") == [256, 110, 195, 169]
    assert tokenizer.decode(tokenizer.encode("né")) == "né".encode()


def test_the_same_seed_gives_the_same_model() -> None:
    one, same, other = random_llama(seed=1), random_llama(seed=1), random_llama(seed=2)
    assert np.array_equal(one.weights.query, same.weights.query)
    assert not np.array_equal(one.weights.query, other.weights.query)


def test_a_model_that_is_not_there_or_not_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stories260K" / "stories260K.bin"
    with pytest.raises(FileNotFoundError, match=r"there is no model .*stories260K\.bin"):
        load_model(tmp_path)
    file.parent.mkdir()
    file.write_bytes(b"\0" * 27)
    with pytest.raises(ValueError, match="expected a header of 28 bytes, found 27"):
        load_model(file)
    shape = np.array([8, 16, 1, 2, 1, 10, 4], "<i4")
    # Norms 8 + 8 + 8, attention 64 + 32 + 32 + 64, feed forward 3 * 128, both tables 16.
    floats = 80 + 24 + 192 + 384 + 16
    file.write_bytes(shape.tobytes() + bytes(4 * floats - 4))
    expected = 28 + 4 * floats
    with pytest.raises(ValueError, match=f"expected {expected} bytes .* found {expected - 4}"):
        load_model(tmp_path)
    file.write_bytes(shape.tobytes() + bytes(4 * floats))
    with pytest.raises(FileNotFoundError, match="expected one tok"):
        load_model(tmp_path)
    monkeypatch.setenv("KVCORE_MODEL", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_model()
    monkeypatch.delenv("KVCORE_MODEL")
    assert isinstance(load_model()[1], ByteTokenizer)


def test_lines_break_at_spaces_and_keep_half_a_character() -> None:
    lines = TextLines(10)
    assert lines.feed(b"one two th") == []
    assert lines.feed(b"ree\n four \xc3") == ["one two", "three"]
    assert lines.feed(b"\xa9\x07 abcdefghijklmno") == ["four \xe9?", "abcdefghij"]
    assert lines.end() == "klmno"
    assert TextLines(7).feed(b"one two three") == ["one two"], "the space that ends it is no part"


def test_the_command_shows_texts_and_the_pool(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVCORE_MODEL", raising=False)
    arguments = ["Once upon a time", "Two", "--n", "3", "--max-tokens", "80", "--blocks", "20"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == set("123456")
    for line in lines[:-1]:
        used, cached, free = map(int, re.findall(r"(\d+) (?:used|cached|free)", line))
        assert used + cached + free == 20
    assert re.match(r"480 tokens in \d+ steps; \d+ blocks copied, [1-9]", lines[-1])
    assert "Random weights" in shown.err
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown.out


def test_the_command_says_what_the_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    model = subject("stories260K")
    assert main(["Once upon a time", "--temperature", "0", "--max-tokens", "60"]) == 0
    said = model.tokenizer.decode(model.greedy(model.prompts[1], 60)).decode()
    lines = capsys.readouterr().out.splitlines()[:-1]
    shown = " ".join(line[4:].partition("[")[0].strip() for line in lines)
    assert shown.split() == said.split()


def test_the_command_fails_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["Once", "--model", "/nowhere"])
    assert "there is no model /nowhere" in capsys.readouterr().err
    assert main(["Once upon a time", "--blocks", "3"]) == 1
    assert "was given up: its next token does not fit" in capsys.readouterr().err
    process = subprocess.run(
        [sys.executable, "-P", "-m", "kvcore.engine", "--help"],
        env=os.environ | {"PYTHONPATH": str(Path(kvcore.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "--max-tokens" in process.stdout


def test_the_example_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCORE_MODEL", raising=False)
    page = Path(__file__).parents[1] / "docs" / "reference-engine.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    assert names["text"].startswith(b"Once upon a time")
    assert {len(text) for text in names["engine"].texts.values()} == {17 + 40}
    assert names["bm"].pool.num_used == 0
