"""The kernel that copies blocks: run as loops on the CPU, and compiled for a device."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copy_cases import KINDS, PAIRS, Pool, check_between_two_pools, check_every_layout
from emulated_kernel import EmulatedCopier, load_kernel
from numpy.typing import NDArray

from kvcore.copier import plan_copies
from kvcore.copy_kernel import (
    PLANE,
    THREADS,
    TILE_BYTES,
    kernel_source,
    plane_table,
    tiles,
)
from kvcore.numpy_copier import NumpyCopier
from kvcore.planes import NHD, Planes, planes_of

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="the kernel is run as loops with the flags of gcc and clang"
)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def launch(library: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """The kernel. What it did must be defined by the language."""
    yield load_kernel(library)
    assert "runtime error" not in capfd.readouterr().err


# Thread blocks, threads in each, bytes of a tile: as on a device, and such that one piece has
# many tiles and a tile more words than there are threads.
LAUNCHES = [(3, THREADS, TILE_BYTES), (1, 3, 48), (7, 1, 16), (100, 5, 208)]


@every_kind
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(("grid", "threads", "tile_bytes"), LAUNCHES)
def test_the_kernel_copies_what_the_obvious_copy_does(
    launch: Any, kind: str, block_size: int, grid: int, threads: int, tile_bytes: int
) -> None:
    def copy(
        source: Planes,
        destination: Planes,
        pairs: NDArray[np.int32],
        n_tokens: NDArray[np.int32] | None,
    ) -> None:
        EmulatedCopier(
            launch, source, destination, grid=grid, threads=threads, tile_bytes=tile_bytes
        ).copy(pairs, n_tokens)

    check_every_layout(copy, kind, block_size)


@every_kind
def test_between_two_pools(launch: Any, kind: str) -> None:
    def copy(source: Planes, destination: Planes, *batch: Any) -> None:
        EmulatedCopier(launch, source, destination, tile_bytes=64).copy(*batch)

    check_between_two_pools(copy, kind)


@every_kind
def test_the_kernel_agrees_with_the_numpy_copier_on_random_batches(launch: Any, kind: str) -> None:
    random = np.random.default_rng(7)
    for _ in range(20):
        block_size, pad = int(random.choice([1, 4, 16])), int(random.choice([0, 2, 16]))
        shift, seed = int(random.choice([0, 2, 16])), int(random.integers(1000))
        pools = [
            Pool(kind, num_blocks=40, block_size=block_size, shift=shift, pad=pad, seed=seed)
            for _ in range(2)
        ]
        blocks = random.permutation(40).astype(np.int32)
        sources = random.choice(blocks[:20], 15)
        pairs = np.stack([sources, blocks[20:35]], axis=1)
        pairs[random.random(pairs.shape) < 0.1] = -1
        n_tokens = random.integers(0, block_size + 1, 15, np.int32)
        for pool, copier in zip(pools, (NumpyCopier, None), strict=True):
            planes = pool.planes()
            one = EmulatedCopier(launch, planes, planes) if copier is None else copier(planes)
            one.copy(pairs, n_tokens if seed % 2 else None)
        np.testing.assert_array_equal(pools[0].arena, pools[1].arena)


@pytest.mark.parametrize("tile_bytes", [16, 64, 112, TILE_BYTES])
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_each_vector_of_16_bytes_is_moved_once(launch: Any, threads: int, tile_bytes: int) -> None:
    for kind, size, n_tokens, rows_bytes in (
        ("NHD, a layer", 16, None, 4 * 2 * 32),
        ("NHD, a layer", 16, 3, 3 * 2 * 32),
        ("block-major HND", 16, None, 12 * 4 * 32),
        ("block-major HND", 16, 1, 12 * 32),
        ("block-major HND", 8, 1, 12 * 16),
        ("NHD, a layer", 4, None, 4 * 2 * 8),
        ("NHD, a layer", 4, 2, 2 * 2 * 8),
        ("NHD, a layer", 2, 1, 0),  # 8 bytes: no vector
    ):
        pool = Pool(kind, size=size)
        planes = pool.planes()
        copier = EmulatedCopier(launch, planes, planes, threads=threads, tile_bytes=tile_bytes)
        counts = None if n_tokens is None else np.array([n_tokens], np.int32)
        copier.copy(np.array([[1, 5]], np.int32), counts)
        assert copier.moves == 2 * rows_bytes / 16


def test_pools_larger_than_4_gib(launch: Any) -> None:
    """Addresses are 64 bits wide all along: blocks and rows lie beyond 2^31 and 2^32 bytes."""
    try:
        # Of memory that is never touched the system gives none.
        arena = np.empty(8 << 30, np.uint8)
    except MemoryError:
        pytest.skip("no 8 GiB of address space")
    stride, pitch = 2**31 + 2**30, 2**31 + 16
    array = np.ndarray((2, 3, 4, 1, 16), np.uint8, arena, 0, (stride, pitch, 16, 16, 1))
    array[1] = np.arange(3 * 4 * 16, dtype=np.uint8).reshape(3, 4, 1, 16)
    planes = planes_of(array, NHD._replace(blocks=0))
    assert [(p.block_stride, p.rows, p.pitch) for p in planes.planes] == [(stride, 3, pitch)]
    EmulatedCopier(launch, planes, planes).copy(np.array([[1, 0]], np.int32))
    np.testing.assert_array_equal(array[0], array[1])


def test_nothing_outside_the_pieces_is_read(library: Path) -> None:
    """The last block ends where readable memory does, in a process of its own: reading on
    would end it."""
    code = f"""
import ctypes, mmap, sys
import numpy as np
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from emulated_kernel import EmulatedCopier, load_kernel
from kvcore.planes import HND, NHD, planes_of

launch = load_kernel({str(library)!r})
memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
for page in (0, 2):
    assert mprotect(ctypes.c_void_p(start + page * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
page = np.frombuffer(memory, np.uint8, mmap.PAGESIZE, mmap.PAGESIZE)
for layout in (NHD, HND):
    for size in (16, 12, 7):
        used = 2 * 4 * 3 * size
        for part in (page[-used:], page[:used]):
            planes = planes_of(part.reshape(2, 4, 3, size), layout)
            copier = EmulatedCopier(launch, planes, planes, tile_bytes=64)
            for pair in ([[1, 0]], [[0, 1]]):
                copier.copy(np.array(pair, np.int32))
                copier.copy(np.array(pair, np.int32), np.array([2], np.int32))
"""
    process = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""


# The table of planes


def test_the_table_holds_64_bytes_a_plane_in_the_order_of_the_source() -> None:
    assert PLANE.itemsize == 64
    names = [line.split(";")[0].split()[-1].strip("*") for line in _fields_in_source()]
    assert names == list(PLANE.names or ())


def _fields_in_source() -> list[str]:
    _, _, rest = kernel_source().partition("struct Plane {\n")
    body, _, _ = rest.partition("};")
    return [line.strip() for line in body.splitlines()]


def test_tiles_cover_the_largest_piece() -> None:
    array = np.zeros((3, 16, 8, 128), np.uint16)
    planes = planes_of(array, NHD) + planes_of(np.zeros((3, 16, 1, 1), np.uint8), NHD)
    table = plane_table(planes, planes)
    assert table["rows"].tolist() == [1, 1]
    assert tiles(table) == 32768 // TILE_BYTES
    assert tiles(table, 32767 + 1) == 1
    assert tiles(table, 32752) == 2


def test_pieces_of_nearly_2_gib_are_counted() -> None:
    array = np.zeros((1, 1, 1, 1), np.uint8)
    planes = planes_of(array, NHD)
    wide = planes.planes[0]._replace(rows=3, row_bytes=(2**31 - 1) // 3)
    huge = planes._replace(planes=(wide,))
    assert tiles(plane_table(huge, huge), 16) == 2**27


# Compiled for a device


def is_device_code(code: bytes) -> bool:
    """An ELF file for the machine EM_CUDA that has the kernel in it."""
    return code[:4] == b"\x7fELF" and code[18:20] == b"\xbe\x00" and b"copy_blocks" in code


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvcc_compiles_it(tmp_path: Path, arch: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    source, cubin = tmp_path / "copy_blocks.cu", tmp_path / "copy_blocks.cubin"
    source.write_text(kernel_source())
    process = subprocess.run(
        [nvcc, "-std=c++17", f"-arch={arch}", "-cubin", "-Xptxas=-v", source, "-o", cubin],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert is_device_code(cubin.read_bytes())
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in process.stderr


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_compiles_it_through_cupy(arch: str) -> None:
    """As CuPy does at run time; it needs no device."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(kernel_source(), "copy_blocks.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-std=c++17", f"-arch={arch}"))
        assert is_device_code(nvrtc.getCUBIN(program))
    except RuntimeError as error:
        if "nvrtc" in str(error) and "not" in str(error):
            pytest.skip("nvrtc is not installed")
        raise
    finally:
        nvrtc.destroyProgram(program)


def test_the_kernel_refuses_nothing_by_itself(launch: Any) -> None:
    """Hazards are found before a launch; a batch of padding is a launch that does nothing."""
    pool = Pool("HND stacked")
    before = pool.arena.copy()
    planes = pool.planes()
    copier = EmulatedCopier(launch, planes, planes)
    with pytest.raises(ValueError, match="also a source"):
        copier.copy(np.array([[0, 1], [1, 2]], np.int32))
    for batch in (np.full((9, 2), -1, np.int32), PAIRS[:0]):
        copier.run(plan_copies(planes, planes, batch))
    np.testing.assert_array_equal(pool.arena, before)
