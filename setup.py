"""The compiled modules; everything else about the package is in pyproject.toml.

``KVCORE_BUILD`` chooses how they are compiled:

release (default)
    Optimised, no checks beyond those the code makes itself.
debug
    No optimisation, Cython's own checks of indices and views, asserts on.
sanitize
    The checks of a release and asserts, compiled with ASan and UBSan (gcc). The interpreter
    that loads it needs both runtimes in ``LD_PRELOAD``; ``.ci/run`` shows how.
"""

import os

import numpy as np
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

BUILD = os.environ.get("KVCORE_BUILD") or "release"

DIRECTIVES: dict[str, object] = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "nonecheck": False,
    "cdivision": True,
    # Methods without the binding wrapper cost half as much to call.
    "binding": False,
    # Signatures that inspect and stubtest can read, which binding would have given.
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "autotestdict": False,
    "freethreading_compatible": True,
}

# Only directives that add a check. wraparound and cdivision stay as they are: they change
# what an expression means, and a debug build must compute what a release does. nonecheck
# cannot be on: it forbids an attribute of self where the GIL is not held.
CHECKS: dict[str, object] = {"boundscheck": True, "initializedcheck": True}

# Interpreters bring -g and -DNDEBUG or not as their packager liked; both are said here.
# -fwrapv, which most of them bring, would hide signed overflow from UBSan.
UNIX_FLAGS = {
    "release": ["-O2", "-g0"],
    "debug": ["-O0", "-g", "-UNDEBUG"],
    "sanitize": [
        "-O1",
        "-g",
        "-UNDEBUG",
        "-fno-omit-frame-pointer",
        "-fno-wrapv",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ],
}
UNIX_LINK_FLAGS = {"sanitize": ["-fsanitize=address,undefined"]}
# distutils passes /O2 and /DNDEBUG to MSVC by itself.
MSVC_FLAGS = {"release": [], "debug": ["/Od", "/Z7", "/UNDEBUG"]}
MSVC_LINK_FLAGS = {"debug": ["/DEBUG"]}

if BUILD not in UNIX_FLAGS:
    raise SystemExit(f"KVCORE_BUILD is {BUILD!r}; expected one of {', '.join(UNIX_FLAGS)}")


class BuildExtensions(build_ext):
    """Cythonizes below ``build/``, with compiler flags chosen by the kind of compiler.

    Cython runs here and not when the extensions are declared, so that an sdist lists
    the ``.pyx`` files as sources and never a generated C file.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.cython_c_in_temp = True
        self.cython_directives = DIRECTIVES | (CHECKS if BUILD == "debug" else {})

    def build_extensions(self) -> None:
        if self.compiler.compiler_type == "msvc":
            flags, link_flags = MSVC_FLAGS, MSVC_LINK_FLAGS
        else:
            flags, link_flags = UNIX_FLAGS, UNIX_LINK_FLAGS
        if BUILD not in flags:
            raise SystemExit(f"KVCORE_BUILD={BUILD} needs gcc")
        for extension in self.extensions:
            extension.extra_compile_args = flags[BUILD]
            extension.extra_link_args = link_flags.get(BUILD, [])
        super().build_extensions()


macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if BUILD == "release":
    macros.append(("CYTHON_WITHOUT_ASSERTIONS", "1"))

setup(
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=[
        Extension(
            f"kvcore.{name}",
            sources=[f"kvcore/{name}.pyx"],
            depends=["setup.py"],
            include_dirs=[np.get_include()],
            define_macros=macros,
        )
        for name in (
            "pool",
            "eviction",
            "prefix_index",
            "block_manager",
            "peak",
            "kernel_metadata",
            "kernel_layouts",
            "copy_hazards",
        )
    ],
    # One directory a kind of build: objects of one must never end up in another's wheel.
    options={"build": {"build_base": f"build/{BUILD}"}},
)
