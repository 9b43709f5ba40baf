"""The three forms of a report: JSON, table, plots."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcore import SegmentedLRU
from kvcore.hit_rate_curve import HitRateCurve, hit_rate_curve
from kvcore.plot import save_plot
from kvcore.replay import ReplayResult, Series, replay
from kvcore.report import as_json, as_table, as_text_plot, by_column
from kvcore.trace import Trace
from kvcore.workload import synthetic_trace


@pytest.fixture(scope="module")
def load() -> Trace:
    trace = synthetic_trace(250, rate=8.0)
    trace.prompt_tokens[7] = 20_000
    return replace(trace, samples=np.full(250, 2))


@pytest.fixture(scope="module")
def result(load: Trace) -> ReplayResult:
    """Everything that a report can show: samples, preemptions, a rejected request."""
    result = replay(load, num_blocks=700, watermark_blocks=1, max_running=100)
    assert result.preemptions
    assert result.rejected
    assert result.series.shared.any()
    return result


@pytest.fixture(scope="module")
def sharing_load() -> Trace:
    """Forty prompts that begin in one of five ways."""
    trace = synthetic_trace(40, rate=2.0)
    ids = (
        np.array([request % 5, *range(10 * request, 10 * request + (prompt - 1) // 64)])
        for request, prompt in enumerate(trace.prompt_tokens.tolist())
    )
    return replace(trace, hash_ids=tuple(ids), hash_block_size=64)


@pytest.fixture(scope="module")
def sharing(sharing_load: Trace) -> ReplayResult:
    result = replay(sharing_load, num_blocks=1_500, watermark_blocks=1, eviction=SegmentedLRU())
    assert result.prefix_hits is not None
    assert result.prefix_hits.cached_tokens
    assert result.prefix_hits.evictions
    return result


@pytest.fixture(scope="module")
def curve(sharing_load: Trace) -> HitRateCurve:
    return hit_rate_curve(sharing_load)


def leaves(document: object, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    if not isinstance(document, dict):
        return {path: document}
    return {
        leaf: value
        for key, below in document.items()
        for leaf, value in leaves(below, (*path, key)).items()
    }


def test_the_keys_of_the_json_stay(
    sharing_load: Trace, sharing: ReplayResult, curve: HitRateCurve
) -> None:
    """Scripts read them: rename or drop one only on purpose, and say so in the changelog."""
    distribution = ("mean", "p50", "p90", "p99", "max")
    expected = {
        "trace": ("source", "requests", "prompt_tokens", "output_tokens"),
        "pool": ("num_blocks", "block_size", "watermark_blocks", "max_running"),
        "requests": ("finished", "rejected", "rejected_by_reason"),
        "work": (
            "steps", "prefill_tokens", "generated_tokens", "appends", "blocks_taken", "forks",
            "cow_copies", "preemptions", "recomputed_tokens",
        ),
        "goodput": ("tokens_per_second", "finished_tokens", "definition"),
        "memory": (
            "peak_used_blocks", "mean_used_blocks", "peak_usage", "mean_usage",
            "internal_fragmentation", "sharing_ratio",
        ),
        "prefix_cache": (
            "eviction", "prompts", "prompt_tokens", "cached_tokens", "token_hit_rate",
            "prompt_blocks", "cached_blocks", "block_hit_rate", "resumed_tokens",
            "resumed_cached_tokens", "evictions", "definitions",
        ),
        "hit_rate_curve": (
            "block_size", "unique_blocks", "prompt_blocks", "prompt_tokens", "lru", "belady_min",
            "definition",
        ),
        "simulated_seconds": (
            "total", "waiting", "time_to_first_token", "time_per_output_token",
        ),
        "measured": (
            "wall_seconds", "cpu_seconds", "manager_cpu_seconds",
            "manager_cpu_seconds_per_generated_token", "manager_share_of_cpu",
            "manager_share_of_simulated",
        ),
    }  # fmt: skip
    document = as_json(sharing_load, sharing, curve)
    assert document.pop("engine") is None
    assert {key: tuple(value) for key, value in document.items()} == expected
    for name in expected["simulated_seconds"][1:]:
        assert tuple(document["simulated_seconds"][name]) == distribution
    for name in ("lru", "belady_min"):
        points = document["hit_rate_curve"][name]
        assert tuple(points) == ("cache_tokens", "token_hit_rate", "block_hit_rate")
        assert len({len(values) for values in points.values()}) == 1


def test_the_json_names_the_reasons_of_what_was_rejected(load: Trace, result: ReplayResult) -> None:
    document = as_json(load, result)
    assert document["requests"]["rejected_by_reason"] == {
        reason.name.lower(): count for reason, count in result.rejected.items()
    }


def test_the_json_is_plain_and_the_same_every_time_but_for_what_is_measured(load: Trace) -> None:
    documents = [as_json(load, replay(load, num_blocks=700, watermark_blocks=1)) for _ in range(2)]
    for document in documents:
        assert json.loads(json.dumps(document, allow_nan=False)) == document
        del document["measured"]
    assert documents[0] == documents[1]


def test_the_json_has_the_numbers_of_the_replay(load: Trace, result: ReplayResult) -> None:
    document = as_json(load, result)
    assert document["requests"]["finished"] + document["requests"]["rejected"] == len(load)
    assert document["work"]["appends"] == document["work"]["generated_tokens"]
    assert document["work"]["preemptions"] == result.preemptions
    assert document["memory"]["peak_usage"] == 1.0
    waiting = document["simulated_seconds"]["waiting"]
    assert waiting["max"] == round(float(result.waiting_seconds.max()), 6)
    assert waiting["p50"] == round(float(np.median(result.waiting_seconds)), 6)


def test_the_json_has_the_hits_and_says_what_they_are(
    sharing_load: Trace, sharing: ReplayResult, curve: HitRateCurve
) -> None:
    document = as_json(sharing_load, sharing, curve)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    cache, hits = document["prefix_cache"], sharing.prefix_hits
    assert hits is not None
    for name in ("eviction", "prompts", "cached_tokens", "resumed_tokens", "evictions"):
        assert cache[name] == getattr(hits, name)
    assert cache["eviction"] == "SegmentedLRU"
    assert cache["token_hit_rate"] == round(hits.cached_tokens / hits.prompt_tokens, 6) > 0
    assert cache["block_hit_rate"] == round(hits.cached_blocks / hits.prompt_blocks, 6) > 0
    assert set(cache["definitions"]) == {"token_hit_rate", "block_hit_rate"}
    for name, sizes, tokens, blocks in (
        ("lru", curve.lru_sizes, curve.lru_hit_tokens, curve.lru_hit_blocks),
        ("belady_min", curve.min_sizes, curve.min_hit_tokens, curve.min_hit_blocks),
    ):
        points = document["hit_rate_curve"][name]
        assert points["cache_tokens"] == (64 * sizes).tolist()
        assert points["token_hit_rate"][-1] == round(tokens[-1] / curve.prompt_tokens, 6) > 0
        assert points["block_hit_rate"][-1] == round(blocks[-1] / curve.prompt_blocks, 6) > 0


def test_without_sharing_there_are_no_hits_to_report(load: Trace, result: ReplayResult) -> None:
    document = as_json(load, result)
    assert document["prefix_cache"] is document["hit_rate_curve"] is None
    assert "Prefix cache" not in as_table(load, result)


def test_the_table_shows_the_hits(sharing_load: Trace, sharing: ReplayResult) -> None:
    table = as_table(sharing_load, sharing)
    cache = as_json(sharing_load, sharing)["prefix_cache"]
    for name, value in cache.items():
        if isinstance(value, int):
            assert f"{value:,}" in table, name
    assert f"{cache['token_hit_rate']:.2%}" in table
    assert f"{cache['block_hit_rate']:.2%}" in table
    assert "Prefix cache, SegmentedLRU" in table
    assert max(map(len, table.splitlines())) <= 110


def test_a_replay_without_one_admission_has_no_times(load: Trace) -> None:
    nothing = replay(load.head(3), num_blocks=2)
    assert nothing.finished == 0
    document = as_json(load.head(3), nothing)
    assert set(document["simulated_seconds"]["waiting"].values()) == {None}
    assert "none" in as_table(load.head(3), nothing)
    assert as_text_plot(nothing)


def test_the_table_shows_every_number_of_the_json(load: Trace, result: ReplayResult) -> None:
    table = as_table(load, result)
    document = as_json(load, result)
    for group in ("trace", "pool", "requests", "work", "simulated_seconds"):
        for path, value in leaves(document[group]).items():
            if path == ("blocks_taken",):
                continue
            if isinstance(value, float):
                value = f"{value:,.0f}" if path == ("total",) else f"{value:,.3f}"
            elif isinstance(value, int):
                value = f"{value:,}"
            assert str(value) in table, path
    memory = document["memory"]
    for shown in (
        f"{memory['peak_usage']:.1%}",
        f"{memory['mean_usage']:.1%}",
        f"{memory['internal_fragmentation']:.2%}",
        f"{memory['sharing_ratio']:.3f}",
    ):
        assert shown in table
    assert "simulated" in table.lower()
    assert all(reason.value in table for reason in result.rejected)
    assert max(map(len, table.splitlines())) <= 110


# ------------------------------------------------------------------ plots


def test_columns_show_the_most_of_their_stretch_and_hold_the_last_point() -> None:
    seconds = np.array([0.0, 1.0, 2.0, 9.0, 10.0])
    values = np.array([1, 5, 3, 7, 0])
    series = Series(seconds, *[values] * 7)
    assert by_column(values, series, 5, 10.0).tolist() == [5, 3, 3, 3, 7]
    assert by_column(values, series, 1, 10.0).tolist() == [7]
    assert by_column(values[:1], Series(seconds[:1], *[values[:1]] * 7), 2, 0.0).tolist() == [1, 1]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_text_plot_fits_its_width_and_its_characters(
    result: ReplayResult, width: int, ascii_only: bool
) -> None:
    plot = as_text_plot(result, width=width, ascii_only=ascii_only)
    assert plot.isascii() is ascii_only
    assert max(map(len, plot.splitlines()[1:])) <= width
    assert "shared" in plot
    assert f"{result.preemptions:,}" in plot
    assert f"peak {result.series.waiting.max():,}" in plot


def test_the_text_plot_draws_the_height_of_the_use_and_what_was_preempted() -> None:
    """Half the pool in the first half of the time, all of it, a quarter shared, then on."""
    used, shared, preemptions = np.array([[40, 80, 0], [0, 20, 0], [0, 3, 3]])
    zero = np.zeros(3, np.int64)
    result = replace(
        replay(synthetic_trace(1), num_blocks=1_000),
        num_blocks=80,
        preemptions=3,
        simulated_seconds=100.0,
        series=Series(
            np.array([0.0, 50.0, 100.0]), used, shared, zero, zero, zero, zero, preemptions
        ),
    )
    lines = as_text_plot(result, width=28, ascii_only=True).splitlines()
    rows = [line.partition("|")[2] for line in lines[1:]]
    assert rows[:8] == ["     @@@@@"] * 4 + ["@@@@@@@@@@"] * 2 + ["@@@@@ooooo"] * 2
    assert rows[8:] == ["", "", "     @"]
    assert lines[-1].startswith("   preemptions 3 |")


def test_the_picture_is_a_png_of_its_size(
    tmp_path: Path, load: Trace, result: ReplayResult
) -> None:
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    save_plot(load, result, tmp_path / "pool.png")
    pixels = image.imread(tmp_path / "pool.png")
    assert pixels.shape[:2] == (1_125, 1_650)
    red, green, blue = (pixels[..., :3] * 255).round().astype(int).reshape(-1, 3).T
    colours = red << 16 | green << 8 | blue
    for name, colour, least in (
        ("used", 0x7FB2E5, 20_000),
        ("shared", 0x1D4E89, 20_000),
        ("free", 0xF1F3F5, 20_000),
        ("running", 0x2A9D8F, 500),
        ("waiting", 0xE9A13B, 500),
        ("preempted", 0xC8443C, 5_000),
    ):
        assert np.count_nonzero(colours == colour) > least, name


def test_the_picture_has_a_panel_for_the_hit_rates_if_it_is_given_them(
    tmp_path: Path, sharing_load: Trace, sharing: ReplayResult, curve: HitRateCurve
) -> None:
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    save_plot(sharing_load, sharing, tmp_path / "pool.png", curve)
    pixels = image.imread(tmp_path / "pool.png")
    assert pixels.shape[:2] == (1_650, 1_650)
    panel = (pixels[1_130:, :, :3] * 255).round().astype(int).reshape(-1, 3).T
    colours = panel[0] << 16 | panel[1] << 8 | panel[2]
    for name, colour, least in (
        ("least recently used", 0x1D4E89, 1_000),
        ("Belady", 0x30343B, 500),
        ("this replay", 0x8E44AD, 100),
    ):
        assert np.count_nonzero(colours == colour) > least, name


def test_a_replay_of_nothing_can_be_drawn(tmp_path: Path, load: Trace) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    save_plot(load, replay(load.head(3), num_blocks=2), tmp_path / "pool.svg")
    assert (tmp_path / "pool.svg").read_text().startswith("<?xml")


def test_without_matplotlib_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: Trace, result: ReplayResult
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install kvcore\[plot\]"):
        save_plot(load, result, tmp_path / "pool.png")
