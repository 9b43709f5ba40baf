"""The sweep: what it runs, that it is the same in parallel, and how it is shown."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.cli import main
from kvcore.engine_replay import EngineOptions
from kvcore.sweep import (
    Policy,
    SweepResult,
    SweepRow,
    SweepSettings,
    needed_blocks,
    policies_of,
    sweep,
)
from kvcore.sweep_plot import save_sweep_plot
from kvcore.sweep_report import sweep_csv, sweep_json, sweep_table
from kvcore.trace import Trace
from kvcore.workload import synthetic_trace, with_classes

SETTINGS = SweepSettings(EngineOptions(1_024))
POLICIES = policies_of(("watermark", "to-completion"), ("newest", "priority"), ("never", "always"))
SMALL = ["sweep", "--limit", "40", "--rate", "9", "--ratios", "0.5", "1", "--jobs", "1"]


@pytest.fixture(scope="module")
def load() -> Trace:
    return with_classes(synthetic_trace(120, rate=9.0))


@pytest.fixture(scope="module")
def result(load: Trace) -> SweepResult:
    return sweep(load, (1.0, 0.2), POLICIES, SETTINGS)


def by_policy(result: SweepResult, ratio: float) -> dict[str, SweepRow]:
    return {str(row.policy): row for row in result.rows if row.ratio == ratio}


def test_every_combination_comes_once_and_to_completion_without_a_victim() -> None:
    assert [str(policy) for policy in POLICIES] == [
        "watermark, newest",
        "watermark, priority",
        "watermark, newest, swap always",
        "watermark, priority, swap always",
        "to-completion",
    ]


def test_a_trace_needs_what_it_holds_where_there_is_enough() -> None:
    """Two of 20 + 3 and one of 4 + 29 tokens at once, in blocks of 4; the last token is in none."""
    load = Trace(
        "test", np.array([20, 20, 4]), np.array([3, 3, 29]), np.array([0.0, 0.0, 500.0])
    )  # fmt: skip
    settings = replace(SETTINGS, block_size=4)
    assert needed_blocks(load, settings) == 2 * 6
    assert needed_blocks(load, replace(settings, max_running=1)) == 8


def test_every_policy_serves_everybody_at_every_size(load: Trace, result: SweepResult) -> None:
    assert [row.ratio for row in result.rows] == [0.2, 1.0] * len(POLICIES)
    assert {row.finished for row in result.rows} == {len(load)}
    for row in result.rows:
        assert row.num_blocks == round(result.needed_blocks * row.ratio)
        assert row.goodput == pytest.approx(
            load.output_tokens.sum() / row.simulated_seconds, rel=1e-6
        )
        assert 0.0 < row.mean_usage <= 1.0
        assert row.waiting_p50 <= row.waiting_p90 <= row.waiting_p99 <= row.waiting_max


def test_what_policies_are_known_for_shows(result: SweepResult) -> None:
    rows = by_policy(result, 0.2)
    newest, never = rows["watermark, newest"], rows["to-completion"]
    assert newest.preemptions_recompute > 0 < newest.recomputed_tokens
    assert newest.preemptions_swap == newest.swapped_blocks == 0
    assert never.preemptions_recompute == never.preemptions_swap == never.recomputed_tokens == 0
    assert never.waiting_p90 > newest.waiting_p90
    swaps = rows["watermark, newest, swap always"]
    assert swaps.preemptions_swap > 0 < swaps.swapped_blocks
    assert swaps.recomputed_tokens < newest.recomputed_tokens
    for row in by_policy(result, 1.0).values():
        if row.admission == "watermark" and row.victim == "newest":
            assert row.preemptions_recompute <= newest.preemptions_recompute


def test_in_processes_it_is_the_same(load: Trace, result: SweepResult) -> None:
    told: list[tuple[int, int]] = []
    parallel = sweep(
        load, (0.2, 1.0), POLICIES, SETTINGS, jobs=2, progress=lambda *at: told.append(at)
    )
    assert parallel == result
    assert told == [(done, 10) for done in range(1, 11)]


def test_on_a_ray_cluster_it_is_the_same(load: Trace, result: SweepResult) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        assert sweep(load, (0.2, 1.0), POLICIES, SETTINGS, ray=True) == result
    finally:
        ray.shutdown()


def test_without_ray_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as caught:
        main([*SMALL, "--ray"])
    assert caught.value.code == 2
    assert "pip install kvcore[ray]" in capsys.readouterr().err


@pytest.mark.parametrize("ratios", [(), (0.0, 1.0), (-1.0,)])
def test_sizes_must_be_sizes(load: Trace, ratios: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ratios must be numbers above 0"):
        sweep(load, ratios, [Policy("watermark", "newest")], SETTINGS)


# ------------------------------------------------------------------ reports


def test_json_and_csv_have_every_row(load: Trace, result: SweepResult) -> None:
    document = sweep_json(load, result)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["needed_blocks"] == result.needed_blocks
    assert "simulated seconds" in document["definitions"]["goodput"]
    rows = list(csv.DictReader(io.StringIO(sweep_csv(result))))
    assert len(rows) == len(document["rows"]) == len(result.rows)
    for row, line, text in zip(result.rows, document["rows"], rows, strict=True):
        assert line == vars(row)
        assert text == {name: str(value) for name, value in line.items()}


def test_nobody_has_no_quantiles(load: Trace, result: SweepResult) -> None:
    nobody = replace(result.rows[0], waiting_p50=float("nan"))
    document = sweep_json(load, replace(result, rows=(nobody,)))
    assert document["rows"][0]["waiting_p50"] is None


def test_the_table_is_markdown_with_a_line_a_row(load: Trace, result: SweepResult) -> None:
    lines = sweep_table(load, result).splitlines()
    assert "goodput: output tokens of finished requests / simulated seconds" in lines[1]
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(result.rows)
    assert len({len(line) for line in table}) == 1
    for line, row in zip(table[2:], result.rows, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] == [str(row.policy), f"{row.ratio:g}"]
        assert cells[5] == f"{row.recomputed_tokens:,}"


def test_the_picture_has_a_line_a_policy_in_six_panels(
    tmp_path: Path, load: Trace, result: SweepResult
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    save_sweep_plot(load, result, tmp_path / "sweep.svg")
    picture = (tmp_path / "sweep.svg").read_text()
    assert picture.count('id="axes_') == 6
    for policy in POLICIES:
        assert f"<!-- {policy} -->" in picture


def test_without_matplotlib_the_table_comes_and_the_exit_code_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    few = ["--admission", "watermark", "--victim", "newest"]
    assert main([*SMALL, *few, "--plot", str(tmp_path / "sweep.png")]) == 1
    out, err = capsys.readouterr()
    assert "| watermark, newest |" in out
    assert "pip install kvcore[plot]" in err


# ------------------------------------------------------------------ the command


def test_the_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--admission", "watermark", "to-completion", "--victim", "newest", "--swap", "never"]
    assert main([*SMALL, *few, "--json", "-", "--csv", str(tmp_path / "rows.csv")]) == 0
    document: Any = json.loads(capsys.readouterr().out)
    assert [row["ratio"] for row in document["rows"]] == [0.5, 1.0, 0.5, 1.0]
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ratios", "0"), "expected a number above 0, found '0'"),
        (("--admission", "none"), "invalid choice: 'none'"),
        (("--jobs", "0"), "expected a whole number from 1"),
        (("--csv", "/nowhere/rows.csv"), "there is no such directory"),
        (("--draft-tokens", "1", "--in-flight", "1"), "do not go together"),
        (("--token-budget", "4", "--max-running", "8"), "too little for 8 running"),
    ],
)
def test_wrong_usage_exits_with_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*SMALL, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
