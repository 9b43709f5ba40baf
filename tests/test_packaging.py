"""What the source distribution and the wheel hold."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvcore

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "kvcore"
COMPILED = (
    "pool",
    "eviction",
    "prefix_index",
    "block_manager",
    "peak",
    "kernel_metadata",
    "kernel_layouts",
    "copy_hazards",
)

needs_source_tree = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="not run from a source tree"
)


def is_installed(distribution: str) -> bool:
    """Asked by distribution, because a folder ``build`` would pass for the module."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_build_tools = pytest.mark.skipif(
    not all(map(is_installed, ("build", "setuptools", "Cython")))
    or shutil.which((sysconfig.get_config_var("CC") or "cl").split()[0]) is None,
    reason="no C compiler, or build, setuptools or Cython is not installed",
)


def source_files(*suffixes: str) -> set[str]:
    """Files of the package in the source tree, relative to its root."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES.rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


def build(what: str, source: Path, out: Path) -> Path:
    """The one file that ``python -m build`` makes of ``source``."""
    process = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", f"--{what}", "--outdir", out, source],
        # Contents do not depend on the kind of build, and without optimisation it is quick.
        env=os.environ | {"KVCORE_BUILD": "debug"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tree in which somebody has worked: builds and generated files lie about."""
    tree = tmp_path_factory.mktemp("source") / "kvcore"
    shutil.copytree(
        ROOT,
        tree,
        ignore=shutil.ignore_patterns(
            ".*", "__pycache__", "build", "dist", "wheelhouse", "*.egg-info", "*.so", "*.pyd"
        ),
    )
    leftovers = [
        "kvcore/pool.c",
        "kvcore/pool.html",
        "kvcore/pool.so",
        "kvcore/pool.pyd",
        "kvcore/__pycache__/errors.pyc",
        "tests/__pycache__/conftest.pyc",
        "bench/results/latest.json",
        "build/release/pool.c",
    ]
    for name in leftovers:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("left over from a build")
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone, as an installer would."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@needs_source_tree
@needs_build_tools
def test_sdist_holds_the_sources_and_nothing_generated(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert source_files(".py", ".pyx", ".pxd", ".pyi", ".cu", ".typed") <= names
    assert {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"} <= names
    assert "tests/test_packaging.py" in names
    generated = {
        name
        for name in names
        if name.startswith(("build/", "bench/results"))
        or Path(name).suffix in {".c", ".html", ".so", ".pyd", ".pyc"}
    }
    assert generated == set()


@needs_source_tree
@needs_build_tools
def test_wheel_holds_exactly_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    compiled = {f"kvcore/{name}{suffix}" for name in COMPILED}
    metadata = {
        name for name in names if name.startswith(f"kvcore-{kvcore.__version__}.dist-info/")
    }
    assert names - metadata == source_files(".py", ".pxd", ".pyi", ".cu", ".typed") | compiled
    assert {f"kvcore/{name}{end}" for name in COMPILED for end in (".pxd", ".pyi")} <= names
    assert {"kvcore/py.typed", "kvcore/__init__.pxd", "kvcore/copy_blocks.cu"} <= names


@needs_source_tree
@needs_build_tools
def test_wheel_says_what_the_package_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = f"kvcore-{kvcore.__version__}.dist-info"
        metadata = archive.read(f"{folder}/METADATA").decode()
        entry_points = archive.read(f"{folder}/entry_points.txt").decode()
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert f"\nVersion: {kvcore.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    unconditional = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)
    assert [re.match(r"[\w-]+", requirement)[0] for requirement in unconditional] == ["numpy"]
    assert "kvcore = kvcore.cli:main" in entry_points


@needs_source_tree
@needs_build_tools
def test_wheel_works_where_there_is_no_source(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import kvcore
from kvcore.copy_kernel import kernel_source

manager = kvcore.BlockManager(4, 2)
manager.allocate("a", 3)
print(manager.tables["a"], "copy_blocks" in kernel_source())
"""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "[0, 1]) True" in process.stdout


@needs_source_tree
def test_the_version_is_said_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    saying = [
        path.name
        for path in [ROOT / "setup.py", ROOT / "pyproject.toml", *sorted(SOURCES.rglob("*.py*"))]
        if path.suffix in {".py", ".pyx", ".pyi", ".toml"}
        and f'"{kvcore.__version__}"' in path.read_text()
    ]
    assert saying == ["__init__.py"]


def test_the_installed_version_is_the_one_imported() -> None:
    if not is_installed("kvcore"):
        pytest.skip("kvcore is imported from a source tree, not installed")
    assert importlib.metadata.version("kvcore") == kvcore.__version__
