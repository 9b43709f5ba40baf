"""Compile the bench's own extensions on first use, into a cache outside the package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["UnavailableError", "load", "project_build"]

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent


class UnavailableError(Exception):
    """What a row needs cannot be had here; the message says why."""


def project_build() -> tuple[type[Any], Any]:
    """How kvcore itself is compiled: its ``build_ext`` command and one of its extensions.

    Read from ``setup.py`` without running a command, so that what kvcore is compared with
    always has its compiler flags and its Cython directives.
    """
    try:
        # Only setuptools brings distutils to Python 3.12, so it comes first.
        importlib.import_module("setuptools")
        core = importlib.import_module("distutils.core")
    except ImportError as error:
        raise UnavailableError(f"setuptools is needed to compile the no-ops: {error}") from error
    with contextlib.chdir(ROOT):
        distribution = core.run_setup("setup.py", stop_after="init")
    return distribution.cmdclass["build_ext"], distribution.ext_modules[0]


def load(name: str, package: Path | None = None) -> ModuleType:
    """The module of ``bench/{name}.pyx``, compiled unless the cache has it.

    ``package`` is the directory of a package that it cimports from. Raises
    ``UnavailableError`` without Cython or a C compiler.
    """
    source = BENCH / f"{name}.pyx"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcore-bench"
    directory = cache / f"{name}-{fingerprint(source, package)}"
    module_path = directory / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not module_path.exists():
        compile_into(directory, source, package)
    spec = importlib.util.spec_from_file_location(name, module_path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fingerprint(source: Path, package: Path | None) -> str:
    """Differs whenever the compiled module could."""
    try:
        cython = version("Cython")
    except PackageNotFoundError as error:
        raise UnavailableError(f"Cython is needed to compile {source.name}") from error
    digest = hashlib.sha256()
    declarations = sorted(package.glob("*.pxd")) if package else []
    for path in (source, ROOT / "setup.py", *declarations):
        digest.update(path.read_bytes())
    build = os.environ.get("KVCORE_BUILD", "")
    digest.update(repr((cython, np.__version__, sys.version, build)).encode())
    return digest.hexdigest()[:16]


def compile_into(directory: Path, source: Path, package: Path | None) -> None:
    """Cythonize and compile one file with kvcore's own build command."""
    build_ext, template = project_build()
    from Cython.Compiler.Errors import CompileError
    from setuptools import Distribution, Extension
    from setuptools.errors import BaseError

    print(f"compiling {source.name} …", file=sys.stderr)
    directory.mkdir(parents=True, exist_ok=True)
    # Beside its place in the cache, so that another process sees the module whole or not.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        pyx = Path(scratch) / source.name
        pyx.write_bytes(source.read_bytes())
        extension = Extension(
            source.stem,
            sources=[source.name],
            include_dirs=template.include_dirs,
            define_macros=template.define_macros,
        )
        command = build_ext(Distribution({"name": source.stem, "ext_modules": [extension]}))
        command.build_lib = command.build_temp = scratch
        if package:
            command.cython_include_dirs = [str(package.parent)]
        logging.disable(logging.INFO)
        try:
            # What a build says belongs on stderr: the table goes to stdout.
            with contextlib.chdir(scratch), contextlib.redirect_stdout(sys.stderr):
                command.ensure_finalized()
                command.run()
        except (BaseError, CompileError) as error:
            raise UnavailableError(f"{source.name} does not compile: {error}") from error
        finally:
            logging.disable(logging.NOTSET)
        built = Path(scratch) / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"
        built.replace(directory / built.name)
