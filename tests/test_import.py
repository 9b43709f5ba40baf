"""What importing the package costs a program, and which way its modules depend."""

from __future__ import annotations

import importlib.machinery
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcore
import kvcore.block_manager
import kvcore.eviction
import kvcore.kernel_layouts
import kvcore.kernel_metadata
import kvcore.pool
import kvcore.prefix_index

PACKAGE = Path(kvcore.__file__).parent

# Each module may use those before it, never those after it.
ORDER = [
    "errors", "counters", "gauges", "identity", "prefix_log", "pool", "eviction", "prefix_index",
    "prefix_pin", "block_manager", "kernel_metadata", "kernel_layouts", "scheduler",
    "replay", "cli",
]  # fmt: skip


def in_a_fresh_interpreter(code: str, *arguments: str) -> Any:
    """What ``code`` prints as JSON, with the package under test importable."""
    process = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_the_hot_paths_are_the_compiled_ones() -> None:
    compiled = (
        kvcore.pool,
        kvcore.eviction,
        kvcore.prefix_index,
        kvcore.block_manager,
        kvcore.kernel_metadata,
        kvcore.kernel_layouts,
    )
    for module in compiled:
        assert module.__file__ is not None
        assert module.__file__.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))


def test_import_brings_in_numpy_and_nothing_else() -> None:
    code = """
import json, sys
before = set(sys.modules)
import kvcore
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = set(in_a_fresh_interpreter(code))
    # Two entries of Cython's own runtime, which live inside each compiled module.
    foreign = {
        name
        for name in loaded
        if name.partition(".")[0] not in sys.stdlib_module_names | {"kvcore", "numpy"}
        and name != "cython_runtime"
        and not name.startswith("_cython_")
    }
    assert foreign == set()
    assert {"kvcore.pool", "kvcore.block_manager", "kvcore.scheduler"} <= loaded
    unasked = {"kvcore.replay", "kvcore.cli", "kvcore.content_ids", "kvcore.copier"}
    unasked |= {"kvcore.kernel_metadata", "kvcore.kernel_layouts"}
    assert loaded.isdisjoint(unasked | {"argparse", "csv", "dataclasses", "json"})


@pytest.mark.parametrize("name", ORDER[:-1])
def test_modules_depend_one_way_only(name: str) -> None:
    """Importing a module loads none that stand above it."""
    # A stand-in for the package, because kvcore/__init__.py would load all of them.
    code = """
import importlib, json, sys, types
package = types.ModuleType("kvcore")
package.__path__ = [sys.argv[1]]
sys.modules["kvcore"] = package
importlib.import_module(f"kvcore.{sys.argv[2]}")
print(json.dumps([name.split(".")[1] for name in sys.modules if name.startswith("kvcore.")]))
"""
    loaded = set(in_a_fresh_interpreter(code, str(PACKAGE), name))
    assert name in loaded
    above = set(ORDER[ORDER.index(name) + 1 :])
    assert loaded & above == set()
