"""Hypothesis profiles, shared fixtures, and the lines that tests add to the summary.

``HYPOTHESIS_PROFILE`` chooses how hard the property tests look: ``dev`` (seconds),
``ci`` (the default: a minute or two) or ``nightly`` (as long as it takes).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before numpy comes in. On a busy machine a second thread makes small products slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

settings.register_profile(
    "dev",
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "ci",
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=_SLOW_IS_FINE,
    print_blob=True,
)
settings.register_profile(
    "nightly",
    max_examples=5_000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_SUMMARY_LINES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SUMMARY_LINES] = []


@pytest.fixture(autouse=True)
def the_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--step-time`` adds the working directory to the path, as processes inherit it: there
    they would find the sources instead of the installed package."""
    monkeypatch.setattr(sys, "path", sys.path.copy())


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel that copies blocks, compiled for the host."""
    from emulated_kernel import COMPILER, compile_kernel

    if COMPILER is None or sys.platform == "win32":
        pytest.skip("no C++ compiler with the flags of gcc")
    return compile_kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="session")
def summary(pytestconfig: pytest.Config) -> list[str]:
    """Lines appended here are printed at the end of the run, passed or failed."""
    return pytestconfig.stash[_SUMMARY_LINES]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash[_SUMMARY_LINES]
    if lines:
        terminalreporter.section("coverage of the proofs")
        for line in lines:
            terminalreporter.write_line(line)
