"""The stubs of the compiled modules say what the modules are."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore

COMPILED = (
    "kvcore.pool",
    "kvcore.eviction",
    "kvcore.prefix_index",
    "kvcore.block_manager",
    "kvcore.peak",
    "kvcore.kernel_metadata",
    "kvcore.kernel_layouts",
    "kvcore.copy_hazards",
)


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_stubs_agree_with_the_compiled_modules(tmp_path: Path) -> None:
    # A copy, because mypy treats a source tree, an editable install and site-packages
    # each in its own way, and a folder that it starts in always the same.
    shutil.copytree(Path(kvcore.__file__).parent, tmp_path / "kvcore")
    process = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", *COMPILED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
