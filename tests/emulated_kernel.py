"""The kernel's own source, compiled by the C++ compiler of the host and run as loops."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import kvcore
from kvcore.copier import BlockCopier, CopyPlan
from kvcore.copy_kernel import THREADS, TILE_BYTES, plane_table, tiles
from kvcore.planes import Planes

COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
KERNEL = Path(kvcore.__file__).with_name("copy_blocks.cu")

PROGRAM = """
#include "cuda_shim.h"
#include "{kernel}"

// Returns how many vectors of 16 bytes were moved, loads and stores.
extern "C" long long launch_copy_blocks(unsigned grid, unsigned block, const Plane *planes,
                                        const int *pairs, const int *n_tokens,
                                        unsigned num_planes, unsigned num_pairs,
                                        unsigned tile_bytes, unsigned tiles) {{
    uint4::moves = 0;
    launch(copy_blocks, grid, block, planes, pairs, n_tokens, num_planes, num_pairs, tile_bytes,
           tiles);
    return uint4::moves;
}}
"""

FLAGS = (
    "-std=c++17",
    "-O1",
    "-g",
    "-fPIC",
    "-shared",
    # CUDA has no type-based aliasing of memory that is copied in words.
    "-fno-strict-aliasing",
    "-fsanitize=undefined",
)


def compile_kernel(folder: Path) -> Path:
    """Compile the kernel with UBSan, whose reports go to standard error."""
    assert COMPILER is not None
    source, library = folder / "emulated.cpp", folder / "emulated.so"
    source.write_text(PROGRAM.format(kernel=KERNEL.as_posix()))
    process = subprocess.run(
        [COMPILER, *FLAGS, f"-I{Path(__file__).parent}", source, "-o", library],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return library


def load_kernel(library: Path) -> Any:
    """``launch(grid, block, planes, pairs, n_tokens, …)``, with addresses as ints.

    Returns how many vectors of 16 bytes were loaded or stored.
    """
    launch = ctypes.CDLL(str(library)).launch_copy_blocks
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    launch.argtypes = (unsigned, unsigned, pointer, pointer, pointer, *[unsigned] * 4)
    launch.restype = ctypes.c_longlong
    return launch


class EmulatedCopier(BlockCopier):
    """Runs the kernel as loops in host memory."""

    def __init__(
        self,
        launch: Any,
        source: Planes,
        destination: Planes,
        *,
        grid: int = 3,
        threads: int = THREADS,
        tile_bytes: int = TILE_BYTES,
    ) -> None:
        self.launch, self.source, self.destination = launch, source, destination
        self.grid, self.threads, self.tile_bytes = grid, threads, tile_bytes
        self.table = plane_table(source, destination)
        self.moves = 0

    def run(self, plan: CopyPlan, *, stream: Any = None) -> None:
        n_tokens = None if plan.n_tokens is None else np.ascontiguousarray(plan.n_tokens)
        self.moves = self.launch(
            self.grid,
            self.threads,
            self.table.ctypes.data,
            plan.pairs.ctypes.data,
            None if n_tokens is None else n_tokens.ctypes.data,
            len(self.table),
            len(plan.pairs),
            self.tile_bytes,
            tiles(self.table, self.tile_bytes),
        )
