"""Copies between a device and host memory: by copy engines, by the kernel, and which when."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copy_cases import KINDS, Pool, copy_obviously
from emulated_kernel import load_kernel
from fake_cupy import DEFAULT_STREAM, NUM_PROCESSORS, DeviceArray, FakeCupy, FakeDriver
from numpy.typing import NDArray

from kvcore import batch_memcpy, copy_crossover, host_copier
from kvcore.batch_memcpy import BatchMemcpy
from kvcore.copy_kernel import plane_table
from kvcore.cupy_copier import CTAS_PER_PROCESSOR, CupyCopier
from kvcore.fragments import FragmentCutter, Fragments
from kvcore.gpu import load_cupy
from kvcore.host_copier import CROSSOVER_BYTES, FEWEST_FOR_KERNEL, HostCopier
from kvcore.planes import BLOCK_MAJOR_NHD, HND, NHD, Planes, planes_of

every_kind = pytest.mark.parametrize("kind", KINDS)


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeCupy, driver: FakeDriver) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupyx", fake)
    monkeypatch.setattr(host_copier, "BatchMemcpy", lambda: BatchMemcpy(driver))


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy(load_kernel(library))
    fake.driver = FakeDriver(fake)
    install(monkeypatch, fake, fake.driver)
    return fake


def pairs_of(*pairs: tuple[int, int]) -> NDArray[np.int32]:
    return np.array(pairs, np.int32).reshape(-1, 2)


def pool_on_device(array: NDArray[Any]) -> Planes:
    return planes_of(DeviceArray(array), NHD)


# Fragments


def found_in(
    source: NDArray[Any], destination: NDArray[Any], layout: Any, *pairs: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Offsets in both arrays, and bytes."""
    table = plane_table(planes_of(source, layout), planes_of(destination, layout))
    found = FragmentCutter(table).cut(pairs_of(*pairs))
    assert {part.dtype for part in found} == {np.dtype(np.uint64)}
    starts = np.array([source.ctypes.data, destination.ctypes.data], np.uint64)
    return [
        (int(one - starts[0]), int(other - starts[1]), int(size))
        for one, other, size in zip(*found, strict=True)
    ]


def test_adjacent_blocks_that_stay_adjacent_are_one_fragment() -> None:
    source, destination = np.zeros((2, 10, 2, 1, 4), np.uint8), np.zeros((2, 20, 2, 1, 4), np.uint8)
    found = found_in(source, destination, NHD, (4, 11), (3, 10), (-1, 12), (7, 9), (5, 12))
    assert found == [(24, 80, 24), (56, 72, 8), (104, 240, 24), (136, 232, 8)]


@pytest.mark.parametrize(
    ("pairs", "sizes"),
    [
        ([(0, 5), (1, 4)], [8, 8]),  # the second goes before the first
        ([(0, 5), (1, 7)], [8, 8]),
        ([(0, 5), (2, 6)], [8, 8]),
        ([(0, 4), (0, 5)], [8, 8]),
        ([(1, 6), (0, 5)], [16]),
        ([(0, 5), (1, -1), (2, 6)], [8, 8]),
        ([(2, -1)], []),
        ([], []),
    ],
)
def test_only_runs_on_both_sides_join(pairs: list[tuple[int, int]], sizes: list[int]) -> None:
    array = np.zeros((10, 2, 1, 4), np.uint8)
    assert [size for _, _, size in found_in(array, array, NHD, *pairs)] == sizes


def test_gaps_between_blocks_on_either_side_keep_them_apart() -> None:
    tight = np.zeros((10, 2, 1, 4), np.uint8)
    loose = np.zeros((10, 3, 1, 4), np.uint8)[:, :2]
    for source, destination in ((tight, loose), (loose, tight)):
        found = found_in(source, destination, NHD, (0, 5), (1, 6))
        assert [size for _, _, size in found] == [8, 8]
        assert found[1][0] - found[0][0] == source.strides[0]
        assert found[1][1] - found[0][1] == destination.strides[0]


def test_rows_apart_are_fragments_of_their_own() -> None:
    loose = np.zeros((10, 3, 5, 4), np.uint8)[:, :, :2]  # 3 heads, 2 of 5 tokens
    tight = np.zeros((10, 3, 2, 4), np.uint8)
    assert found_in(loose, tight, HND, (1, 2)) == [(60, 48, 8), (80, 56, 8), (100, 64, 8)]
    assert found_in(tight, loose, HND, (1, 2)) == [(24, 120, 8), (32, 140, 8), (40, 160, 8)]
    assert found_in(tight, tight, HND, (1, 3), (2, 4)) == [(24, 72, 48)]


def test_block_major_pools_are_one_fragment_a_block_or_a_run() -> None:
    array = np.zeros((10, 4, 2, 2, 1, 4), np.uint8)
    assert found_in(array, array, BLOCK_MAJOR_NHD, (0, 3), (1, 8)) == [(0, 192, 64), (64, 512, 64)]
    assert found_in(array, array, BLOCK_MAJOR_NHD, (0, 3), (1, 4)) == [(0, 192, 128)]


@every_kind
@pytest.mark.parametrize(("near_pad", "far_pad"), [(0, 0), (0, 6), (6, 0), (8, 6)])
def test_fragments_are_the_bytes_of_the_obvious_copy(
    kind: str, near_pad: int, far_pad: int
) -> None:
    near, near2 = (Pool(kind, pad=near_pad) for _ in range(2))
    far, far2 = (Pool(kind, pad=far_pad, num_blocks=11, seed=1) for _ in range(2))
    pairs = pairs_of((2, 5), (3, 6), (0, 9), (-1, 4), (6, 2), (1, 4), (4, 7))
    found = FragmentCutter(plane_table(near.planes(), far.planes())).cut(pairs)
    for source, destination, size in zip(*(part.tolist() for part in found), strict=True):
        ctypes.memmove(destination, source, size)
    copy_obviously(near2, far2, pairs.tolist(), None)
    np.testing.assert_array_equal(far.arena, far2.arena)
    assert found.sizes.sum() == 6 * near.planes().block_bytes


# The call of the driver


def test_a_batch_is_one_call_in_stream_order() -> None:
    fake = FakeCupy(None)
    driver = FakeDriver(fake)
    source, destination = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    starts = np.array([3, 40], np.uint64)
    batch = Fragments(
        np.uint64(source.ctypes.data) + starts,
        np.uint64(destination.ctypes.data) + starts[::-1].copy(),
        np.array([5, 9], np.uint64),
    )
    with fake.cuda.Device(0):
        BatchMemcpy(driver)(batch, 0x77)
    assert not destination.any()
    fake.synchronize()
    assert destination[40:45].tolist() == [3, 4, 5, 6, 7]
    assert destination[3:12].tolist() == list(range(40, 49))
    assert driver.batches == [[5, 9]]


def test_what_the_driver_says_is_raised() -> None:
    fake = FakeCupy(None)
    batch = Fragments(*(np.ones(3, np.uint64) for _ in range(3)))
    with pytest.raises(RuntimeError, match="CUresult 700 at copy 2 of 3"):
        BatchMemcpy(FakeDriver(fake, error=700))(batch, 0x77)


def test_an_old_driver_and_none_at_all() -> None:
    with pytest.raises(RuntimeError, match=r"older than 12\.8"):
        BatchMemcpy(FakeDriver(FakeCupy(None), is_old=True))
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(OSError, match="cuda"):
            BatchMemcpy()


def test_the_attributes_are_laid_out_as_the_header_of_the_driver_has_them(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    source = tmp_path / "layout.cpp"
    fields = "srcAccessOrder", "srcLocHint", "dstLocHint", "flags"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include <cuda.h>\n#include <cudaTypedefs.h>\n"
        "static PFN_cuMemcpyBatchAsync_v12080 call;\n"
        "int main() {\n"
        "    if (call) call((CUdeviceptr *)0, (CUdeviceptr *)0, (size_t *)0, (size_t)0,\n"
        "                   (CUmemcpyAttributes *)0, (size_t *)0, (size_t)0, (size_t *)0,\n"
        "                   (CUstream)0);\n"
        '    printf("%zu %d", sizeof(CUmemcpyAttributes), CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);\n'
        + "".join(f'    printf(" %zu", offsetof(CUmemcpyAttributes, {name}));\n' for name in fields)
        + "}\n"
    )
    program = tmp_path / "layout"
    # Nothing of CUDA is called, so none of its libraries is needed.
    process = subprocess.run(
        [nvcc, "-cudart=none", source, "-o", program], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    attributes = batch_memcpy._Attributes
    ours = [ctypes.sizeof(attributes), batch_memcpy.IN_STREAM_ORDER]
    ours += [getattr(attributes, name).offset for name, _ in attributes._fields_]
    assert [int(number) for number in printed.split()] == ours


# The copier


@every_kind
@pytest.mark.parametrize("crossover_bytes", [0, 10**9])
def test_both_ways_copy_what_the_obvious_copy_does(
    fake: FakeCupy, monkeypatch: pytest.MonkeyPatch, kind: str, crossover_bytes: int
) -> None:
    monkeypatch.setattr(host_copier, "FEWEST_FOR_KERNEL", 0)
    near, near2 = (Pool(kind, seed=1) for _ in range(2))
    far, far2 = (Pool(kind, num_blocks=11, pad=6, seed=2) for _ in range(2))
    fake.pinned.append(far.arena)
    device = near.planes()._replace(device=0)
    stream = fake.cuda.Stream()
    out = HostCopier(device, far.planes(), crossover_bytes=crossover_bytes)
    back = HostCopier(far.planes(), device, crossover_bytes=crossover_bytes)
    first, second = pairs_of((3, 10), (2, 9), (-1, 4)), pairs_of((10, 6), (0, 1))
    n_tokens = np.array([2, 4], np.int32)
    out.copy(first, stream=stream)
    back.copy(second, n_tokens, stream=stream)
    out.copy(pairs_of((6, 0)), stream=stream)
    stream.synchronize()
    copy_obviously(near2, far2, first.tolist(), None)
    copy_obviously(far2, near2, second.tolist(), n_tokens.tolist())
    copy_obviously(near2, far2, [(6, 0)], None)
    np.testing.assert_array_equal(near.arena, near2.arena)
    np.testing.assert_array_equal(far.arena, far2.arena)
    by_kernel = 1 if crossover_bytes == 0 else 3  # a part of a block always is
    assert len(fake.launches) == by_kernel
    assert len(fake.driver.batches) == 3 - by_kernel


def copier_of(fake: FakeCupy, size: int, **options: Any) -> HostCopier:
    """Of 100 blocks of one fragment of ``size`` bytes each."""
    shape = (100, 1, 1, size)
    pinned = planes_of(fake.empty_pinned(shape, np.uint8), NHD)
    return HostCopier(pool_on_device(np.zeros(shape, np.uint8)), pinned, **options)


def apart(count: int) -> NDArray[np.int32]:
    """Pairs of which no two are neighbours on both sides."""
    return np.stack([np.arange(count), np.arange(count)[::-1]], axis=1).astype(np.int32)


@pytest.mark.parametrize(
    ("size", "pairs", "is_by_kernel"),
    [
        (CROSSOVER_BYTES, apart(50), False),
        (CROSSOVER_BYTES - 4, apart(50), True),
        (16, apart(FEWEST_FOR_KERNEL), True),
        (16, apart(FEWEST_FOR_KERNEL - 1), False),
        # 25 runs of two blocks are fragments of twice the size.
        (CROSSOVER_BYTES // 2, apart(25).repeat(2, axis=0) * 2 + [[0], [1]] * 25, False),
        (CROSSOVER_BYTES // 2, apart(50), True),
    ],
)
def test_many_small_fragments_are_for_the_kernel_others_for_the_copy_engines(
    fake: FakeCupy, size: int, pairs: NDArray[Any], is_by_kernel: bool
) -> None:
    copier = copier_of(fake, size)
    copier.copy(pairs.astype(np.int32), stream=0x77)
    assert (len(fake.launches), len(fake.driver.batches)) == ((1, 0) if is_by_kernel else (0, 1))


def test_the_crossover_is_the_callers(fake: FakeCupy) -> None:
    copier_of(fake, 16, crossover_bytes=16).copy(apart(50), stream=0x77)
    assert len(fake.driver.batches) == 1
    copier_of(fake, 16, crossover_bytes=17).copy(apart(50), stream=0x77)
    assert len(fake.launches) == 1
    with pytest.raises(ValueError, match="crossover_bytes must be at least 0, got -1"):
        copier_of(fake, 16, crossover_bytes=-1)


def test_an_empty_batch_asks_nobody(fake: FakeCupy) -> None:
    copier = copier_of(fake, 16)
    copier.copy(pairs_of(), stream=0x77)
    copier.copy(pairs_of((-1, 3)), stream=0x77)
    assert (fake.launches, fake.driver.batches, fake.memcpys) == ([], [], [])


@pytest.mark.parametrize("stream", [None, DEFAULT_STREAM, 1])
def test_the_legacy_default_stream_takes_no_batch_and_gets_copies_one_by_one(
    fake: FakeCupy, stream: int | None
) -> None:
    copier = copier_of(fake, 16)
    copier.copy(pairs_of((1, 5), (2, 9)), stream=stream)
    assert fake.driver.batches == []
    assert fake.memcpys == [16, 16]


@pytest.mark.parametrize("error", [OSError("no driver"), RuntimeError("old driver")])
def test_without_the_call_of_the_driver_copies_go_one_by_one(
    fake: FakeCupy, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def missing() -> BatchMemcpy:
        raise error

    monkeypatch.setattr(host_copier, "BatchMemcpy", missing)
    source = np.arange(10 * 16, dtype=np.uint8).reshape(10, 1, 1, 16)
    before = source.copy()
    pinned = fake.empty_pinned((10, 1, 1, 16), np.uint8)
    copier = HostCopier(pool_on_device(source), planes_of(pinned, NHD))
    copier.copy(pairs_of((1, 5), (2, 6), (4, 0)), stream=0x77)
    fake.synchronize()
    assert fake.memcpys == [32, 16]
    np.testing.assert_array_equal(pinned[[5, 6, 0]], before[[1, 2, 4]])


def test_the_kernel_leaves_most_of_the_device_to_others(fake: FakeCupy) -> None:
    copier_of(fake, 16).copy(apart(50))
    pairs = np.arange(100, dtype=np.int32).reshape(2, 50).T
    CupyCopier(pool_on_device(np.zeros((100, 1, 1, 16), np.uint8))).copy(pairs)
    assert fake.launches == [host_copier.MAX_CTAS, CTAS_PER_PROCESSOR * NUM_PROCESSORS]


@pytest.mark.parametrize("stream", [0x77, DEFAULT_STREAM])
def test_it_works_on_the_device_of_the_pool(fake: FakeCupy, stream: int) -> None:
    fake.num_devices = 3
    device = pool_on_device(np.zeros((100, 1, 1, 16), np.uint8))._replace(device=2)
    pinned = planes_of(fake.empty_pinned((100, 1, 1, 16), np.uint8), NHD)
    for ends in ((device, pinned), (pinned, device)):
        copier = HostCopier(*ends)
        copier.copy(apart(50), stream=stream)
        copier.copy(apart(2), stream=stream)
    assert set(fake.devices_used) == {2}


def test_one_pool_on_a_device_and_one_in_host_memory(fake: FakeCupy) -> None:
    host = planes_of(np.zeros((10, 1, 1, 16), np.uint8), NHD)
    device = pool_on_device(np.zeros((10, 1, 1, 16), np.uint8))
    for source, destination in ((host, host), (device, device)):
        with pytest.raises(ValueError, match="one in host memory, got"):
            HostCopier(source, destination)
    with pytest.raises(ValueError, match="pinned"):
        HostCopier(device, host)


# The measurement


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # The kernel takes 1 s for any size.
        (lambda size: 0.5 if size >= 28 * 1024 else 2.0, 28 * 1024),
        (lambda size: 1.0 if size >= 64 * 1024 else 1.1, 64 * 1024),
        (lambda size: 0.1, 4 * 1024),
        (lambda size: 3.0, 256 * 1024 + 1),
        # A size that is fast below one that is not does not count.
        (lambda size: 0.5 if size in (8 * 1024, 128 * 1024, 256 * 1024) else 2.0, 128 * 1024),
    ],
)
def test_the_crossover_is_where_the_copy_engines_begin_to_win(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], expected: int
) -> None:
    fake = FakeCupy(lambda *arguments: None)
    fake.kernel_seconds = 1.0
    driver = FakeDriver(fake, seconds=lambda sizes: seconds(sizes[0]))
    install(monkeypatch, fake, driver)
    monkeypatch.setattr(copy_crossover, "TOTAL_BYTES", 16 * 256 * 1024)
    assert copy_crossover.measure() == expected
    assert all(len(set(sizes)) == 1 for sizes in driver.batches)
    # Both ways: out of pinned memory and into it.
    assert {fake.is_pinned(address) for address in driver.sources} == {True, False}


# On a device


@pytest.fixture
def cupy() -> Any:
    try:
        return load_cupy()
    except (ImportError, RuntimeError) as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.parametrize("crossover_bytes", [0, 10**9])
@pytest.mark.parametrize("on_default_stream", [True, False])
def test_on_a_device_out_and_back(cupy: Any, crossover_bytes: int, on_default_stream: bool) -> None:
    import cupyx

    shape = (4, 2, 64, 16, 8, 32)
    device = cupy.arange(np.prod(shape), dtype=np.uint32).astype(np.uint16).reshape(shape)
    pinned = cupyx.empty_pinned((2 * 64, 4, 2, 16, 8, 32), np.uint16)
    planes, host_planes = planes_of(device, NHD), planes_of(pinned, BLOCK_MAJOR_NHD)
    out = HostCopier(planes, host_planes, crossover_bytes=crossover_bytes)
    back = HostCopier(host_planes, planes, crossover_bytes=crossover_bytes)
    before = cupy.asnumpy(device)
    stream = None if on_default_stream else cupy.cuda.Stream(non_blocking=True)
    there = np.stack([np.arange(40), np.arange(40)[::-1] + 50], axis=1).astype(np.int32)
    again = np.stack([there[:20, 1], np.arange(40, 60)], axis=1).astype(np.int32)
    out.copy(there, stream=stream)
    back.copy(again, stream=stream)
    cupy.cuda.Device().synchronize()
    after = cupy.asnumpy(device)
    np.testing.assert_array_equal(after[:, :, 40:60], before[:, :, :20])
    np.testing.assert_array_equal(after[:, :, :40], before[:, :, :40])
    np.testing.assert_array_equal(after[:, :, 60:], before[:, :, 60:])


@pytest.mark.gpu
def test_on_a_device_the_crossover_is_one_of_the_sizes(cupy: Any) -> None:
    assert copy_crossover.measure() in (*copy_crossover.SIZES, copy_crossover.SIZES[-1] + 1)
