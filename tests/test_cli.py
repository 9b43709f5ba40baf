"""The command: what it prints, writes and returns."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcore
from kvcore.cli import main
from kvcore.progress import ProgressBar

MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5}\n'
    '{"timestamp": 27, "input_length": 30, "output_length": 7}\n'
)
SHARING = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    '{"timestamp": 9000, "input_length": 600, "output_length": 5, "hash_ids": [1, 3]}\n'
)
LENGTHS = "num_prefill_tokens,num_decode_tokens\n74,9\n100,20\n50,5\n"
SMALL = ["replay", "--limit", "40", "--blocks", "1200"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    return str(path)


@pytest.fixture
def sharing(tmp_path: Path) -> str:
    path = tmp_path / "sharing"
    path.write_text(SHARING)
    return str(path)


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths"
    path.write_text(LENGTHS)
    return str(path)


@pytest.fixture
def numbers(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a replay and return its JSON."""

    def numbers(*arguments: str) -> Any:
        assert main(["replay", "--json", "-", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return numbers


def fails(capsys: pytest.CaptureFixture[str], code: int, message: str, *arguments: str) -> None:
    """It ends with that code and says so on stderr, with nothing on stdout."""
    try:
        returned = main(["replay", *arguments])
    except SystemExit as exit:
        returned = exit.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert returned == code, err
    assert message in err
    assert "Traceback" not in err
    assert not out


# ------------------------------------------------------------------ output


def test_the_table_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out, err = capsys.readouterr()
    assert out.startswith("synthetic workload, seed 0: 40 requests")
    assert "pool of 1,200 blocks of 16 tokens, watermark 12\n" in out
    assert "time to first token" in out
    assert not err


def test_json_to_a_file_leaves_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--json", str(tmp_path / "out.json")]) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["trace"]["requests"] == 40
    assert "synthetic workload" in capsys.readouterr().out


def test_json_is_the_same_for_a_seed_and_another_for_another(numbers: Any) -> None:
    first, same, other = (numbers("--limit", "40", "--seed", seed) for seed in ("3", "3", "4"))
    for document in (first, same, other):
        assert document.pop("measured")["wall_seconds"] > 0
    assert first == same != other


def test_the_built_in_workload_preempts_in_its_default_pool(numbers: Any) -> None:
    document = numbers()
    assert document["requests"]["finished"] == document["trace"]["requests"] == 10_000
    assert document["work"]["preemptions"] > 20
    assert document["memory"]["peak_usage"] == 1.0


def test_a_plot_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main([*SMALL, "--plot", str(tmp_path / "pool.png")]) == 0
    assert (tmp_path / "pool.png").read_bytes().startswith(b"\x89PNG")
    assert "Blocks in use" not in capsys.readouterr().out


def test_a_terminal_gets_a_text_plot_and_a_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(SMALL)
    assert "Blocks in use" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(SMALL)
    assert "Blocks in use" in capsys.readouterr().out


def test_prompts_with_ids_share_unless_told_not_to(numbers: Any, sharing: str) -> None:
    cache = numbers(sharing)["prefix_cache"]
    assert (cache["cached_tokens"], cache["cached_blocks"]) == (512, 32)
    assert (cache["prompt_tokens"], cache["prompt_blocks"]) == (1_200, 74)
    assert cache["eviction"] == "LRU"
    assert numbers(sharing)["work"]["prefill_tokens"] == 1_200 - 512
    alone = numbers(sharing, "--no-prefix-caching")
    assert alone["prefix_cache"] is None
    assert alone["work"]["prefill_tokens"] == 1_200


def test_the_eviction_can_be_chosen(numbers: Any, sharing: str) -> None:
    for option, name in (("lru", "LRU"), ("segmented-lru", "SegmentedLRU")):
        assert numbers(sharing, "--eviction", option)["prefix_cache"]["eviction"] == name


def test_an_eviction_without_anything_cached_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], trace: str, sharing: str
) -> None:
    fails(capsys, 2, "a trace without block ids has none", trace, "--eviction", "lru")
    options = ("--eviction", "lru", "--no-prefix-caching")
    fails(capsys, 2, "and --no-prefix-caching has none", sharing, *options)
    fails(capsys, 2, "invalid choice: 'fifo'", sharing, "--eviction", "fifo")


def test_a_plot_of_prompts_that_share_has_their_hit_rates(
    numbers: Any, tmp_path: Path, sharing: str
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    pictures = tmp_path / "with.svg", tmp_path / "without.svg"
    curve = numbers(sharing, "--plot", str(pictures[0]))["hit_rate_curve"]
    assert curve["lru"]["cache_tokens"][-1] == 3 * 512
    assert curve["lru"]["token_hit_rate"][-1] == round(512 / 1_200, 6)
    alone = numbers(sharing, "--no-prefix-caching", "--plot", str(pictures[1]))
    assert alone["hit_rate_curve"] is None
    with_panel, without = (path.read_text().count('id="axes_') for path in pictures)
    assert (with_panel, without) == (4, 3)


def test_without_matplotlib_a_text_plot_is_shown_and_the_exit_code_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SMALL, "--plot", str(tmp_path / "pool.png")]) == 1
    out, err = capsys.readouterr()
    assert "Blocks in use" in out
    assert "pool.png was not drawn: plots need matplotlib: pip install kvcore[plot]" in err
    assert not (tmp_path / "pool.png").exists()


# ------------------------------------------------------------------ the pool and the load


def test_memory_and_model_size_the_pool(numbers: Any, tmp_path: Path, trace: str) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # 2 layers of 2 x 64 values of 2 bytes: 512 bytes a token.
    for block_size, blocks in (("16", 128), ("32", 64)):
        arguments = ("--memory", "1MiB", "--model", str(tmp_path), "--block-size", block_size)
        pool = numbers(trace, *arguments)["pool"]
        assert (pool["num_blocks"], pool["block_size"]) == (blocks, int(block_size))
    assert numbers(trace, "--memory", "24GiB", "--model", "llama-3.1-8b")["pool"] == {
        "num_blocks": 12_288, "block_size": 16, "watermark_blocks": 122, "max_running": None,
    }  # fmt: skip


def test_the_options_of_the_scheduler_reach_it(numbers: Any, trace: str) -> None:
    pool = numbers(trace, "--blocks", "90", "--watermark", "0", "--max-running", "1")["pool"]
    assert pool == {
        "num_blocks": 90, "block_size": 16, "watermark_blocks": 0, "max_running": 1,
    }  # fmt: skip


def test_n_samples_fork_from_every_prompt(numbers: Any, trace: str) -> None:
    work = numbers(trace, "--n", "3")["work"]
    assert (work["forks"], work["appends"]) == (4, 3 * 12)
    assert work["cow_copies"] == 2 * 2


def test_lengths_need_a_rate(
    numbers: Any, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, fast = (numbers(lengths, "--rate", rate) for rate in ("0.01", "100"))
    assert slow["simulated_seconds"]["total"] > 10 > fast["simulated_seconds"]["total"]
    fails(capsys, 2, "has lengths and no arrivals: give a --rate", lengths)


def test_a_limit_takes_the_first_requests(numbers: Any, lengths: str) -> None:
    assert numbers(lengths, "--rate", "1", "--limit", "2")["trace"]["prompt_tokens"] == 174


def test_step_time_is_any_function_in_reach(
    numbers: Any, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_engine.py").write_text(
        "def step(prefill_tokens, decoding_sequences, context_tokens):\n    return 2.0\n"
    )
    monkeypatch.chdir(tmp_path)
    document = numbers(trace, "--step-time", "my_engine:step")
    assert document["simulated_seconds"]["total"] == 2.0 * document["work"]["steps"]


def test_a_token_budget_makes_engine_steps(numbers: Any) -> None:
    document = numbers("--limit", "60", "--blocks", "900", "--token-budget", "512")
    engine = document["engine"]
    assert (engine["order"], engine["victim"], engine["admission"]) == (
        "FCFS", "Newest", "Watermark",
    )  # fmt: skip
    assert document["requests"]["finished"] == 60
    assert engine["counters"]["finished"] == 60
    assert engine["counters"]["admission_blocked_watermark"] > 0
    assert numbers("--limit", "5")["engine"] is None


@pytest.mark.parametrize(
    ("option", "value", "field", "expected"),
    [
        ("--order", "priority", "order", "Priority"),
        ("--order", "shortest", "order", "ShortestJob"),
        ("--order", "fair", "order", "FairShare"),
        ("--victim", "priority", "victim", "LowestPriority"),
        ("--victim", "cheapest", "victim", "CheapestToResume"),
        ("--admission", "to-completion", "admission", "ToCompletion"),
        ("--admission", "predicted-peak", "admission", "PredictedPeak"),
        ("--host-blocks", "500", "swap", "always"),
        ("--max-partial-prefills", "2", "max_partial_prefills", 2),
        ("--in-flight", "1", "in_flight", 1),
        ("--window", "300", "window", 300),
        ("--draft-tokens", "2", "draft_tokens", 2),
    ],
)
def test_every_option_of_engine_steps_reaches_the_scheduler(
    numbers: Any, option: str, value: str, field: str, expected: Any
) -> None:
    small = ("--limit", "30", "--blocks", "400", "--token-budget", "256")
    document = numbers(*small, option, value)
    assert document["engine"][field] == expected
    assert document["requests"]["finished"] == 30


def test_the_victim_by_priority_brings_its_order(numbers: Any) -> None:
    small = ("--limit", "5", "--token-budget", "256", "--victim", "priority")
    assert numbers(*small)["engine"]["order"] == "Priority"
    assert numbers(*small, "--order", "fair")["engine"]["order"] == "FairShare"


def test_swap_rules_and_samples_of_engine_steps(numbers: Any) -> None:
    small = ("--limit", "20", "--blocks", "420", "--token-budget", "256", "--n", "3")
    document = numbers(*small, "--host-blocks", "400", "--swap", "cheapest")
    assert document["engine"]["swap"] == "ResumeCost"
    assert document["work"]["forks"] >= 40


def test_the_table_of_engine_steps_says_what_was_decided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--token-budget", "256", "--host-blocks", "300", "--limit", "30", "--blocks", "400"]
    assert main(["replay", *options]) == 0
    out = capsys.readouterr().out
    assert "Engine steps of 256 tokens: FCFS, Newest, Watermark" in out
    assert "of 300 host blocks, swap always" in out
    assert "goodput" in out


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--blocks", "0"), "argument --blocks: expected a whole number from 1, found '0'"),
        (("--blocks", "many"), "found 'many'"),
        (("--block-size", "1.5"), "argument --block-size"),
        (("--rate", "-3"), "argument --rate: expected a number above 0, found '-3'"),
        (("--rate", "nan"), "argument --rate"),
        (("--plot", "pool.txt"), "expected a name that ends in .png, .svg, .pdf"),
        (("--plot", "/nowhere/pool.png"), "/nowhere/pool.png: there is no such directory"),
        (("--json", "/nowhere/out.json"), "/nowhere/out.json: there is no such directory"),
        (("--memory", "24GiB"), "--memory and --model size the pool together"),
        (("--model", "llama-3.1-8b"), "--memory and --model size the pool together"),
        (
            ("--memory", "24GiB", "--model", "llama-3.1-8b", "--blocks", "5"),
            "give either --blocks, or --memory and --model",
        ),
        (("--memory", "24", "--model", "llama-3.1-8b"), "less than one block"),
        (("--memory", "a lot", "--model", "llama-3.1-8b"), "not 'a lot'"),
        (("--memory", "24GiB", "--model", "gpt-9"), "'gpt-9' is neither"),
        (("--blocks", "5", "--watermark", "5"), "--watermark 5 leaves nothing of 5 blocks"),
        (("--order", "fair"), "--order needs a --token-budget"),
        (("--in-flight", "1"), "--in-flight needs a --token-budget"),
        (("--token-budget", "8", "--max-running", "9"), "--token-budget 8 is too little for 9"),
        (("--token-budget", "8", "--swap", "cheapest"), "--swap cheapest needs --host-blocks"),
        (
            ("--token-budget", "8", "--draft-tokens", "1", "--in-flight", "1"),
            "do not go together",
        ),
        (("--token-budget", "8", "--acceptance", "1.5"), "expected a number from 0 to 1"),
        (("--token-budget", "8", "--victim", "oldest"), "invalid choice: 'oldest'"),
        (("--step-time", "nonsense"), "module:function, not 'nonsense'"),
        (("--step-time", "no_such_module:step"), "No module named 'no_such_module'"),
        (("--step-time", "math:pi"), "'math:pi' is not a callable"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_option(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    fails(capsys, 2, message, *arguments)


def test_a_rate_cannot_stretch_one_moment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "burst").write_text(MOONCAKE.replace("27", "0"))
    fails(capsys, 2, "arrive at once", str(tmp_path / "burst"), "--rate", "1")


def test_a_bad_line_exits_with_1_and_says_where(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    Path(trace).write_text(MOONCAKE + "oops\n")
    fails(
        capsys,
        1,
        f"kvcore: {trace}:3: expected a JSON object; found oops",
        trace,
        "--json",
        str(tmp_path / "out"),
    )
    assert not (tmp_path / "out").exists()


def test_a_missing_file_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, 1, "No such file or directory: 'missing.csv'", "missing.csv")


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcore.cli_replay.replay", interrupted)
    assert main(SMALL) == 130


# ------------------------------------------------------------------ as a process


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The package under test, not a folder of that name where the tests happen to run; and
    # Python buffers what goes to a pipe unless it is told not to.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=buffered | {"PYTHONPATH": str(Path(kvcore.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_module_is_the_command() -> None:
    done = process("-m", "kvcore", "--version")
    assert (done.returncode, done.stdout) == (0, f"kvcore {kvcore.__version__}\n")


def test_a_replay_without_a_plot_needs_numpy_only() -> None:
    script = (
        "import sys; from kvcore.cli import main; main(sys.argv[1:]);"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    done = process("-c", script, *SMALL)
    assert done.returncode == 0
    brought = {name for name in done.stdout.splitlines()[-1].split() if name[0].isalpha()}
    assert {"kvcore", "numpy"} <= brought
    assert not brought & {"matplotlib", "rich", "tqdm", "pandas", "pyarrow", "msgspec", "zmq"}


@pytest.mark.skipif(os.name == "nt", reason="a POSIX pipe")
def test_a_reader_that_leaves_early_gets_no_complaint() -> None:
    done = process(
        "-c",
        "import os, sys; from kvcore.cli import main\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "sys.exit(main(sys.argv[1:]))",
        *SMALL,
    )
    assert done.returncode == 1
    assert not done.stderr


# ------------------------------------------------------------------ the progress bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(10**9))
    monkeypatch.setattr("kvcore.progress.monotonic", lambda: float(next(clock)))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    main(SMALL)
    drawn = terminal.getvalue()
    assert "of 40 requests" in drawn
    # Wiped at the end.
    assert drawn.endswith("\r" + " " * len(drawn.split("\r")[-2]) + "\r")
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    main(SMALL)
    assert not file.getvalue()


def test_the_bar_shows_up_on_long_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("kvcore.progress.monotonic", lambda: now)
    terminal = Terminal()
    bar = ProgressBar(terminal)
    bar(1, 100)
    bar.clear()
    assert not terminal.getvalue()
    now = 0.6
    bar(50, 100)
    first = terminal.getvalue()
    assert first == f"\r[{'#' * 15}{' ' * 15}] 50 of 100 requests, 1 s"
    bar(51, 100)
    assert terminal.getvalue() == first
    now = 0.7
    bar(100, 100)
    assert f"[{'#' * 30}] 100 of 100" in terminal.getvalue()
