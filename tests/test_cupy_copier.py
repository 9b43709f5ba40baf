"""Copies on a device: on a real one where there is one, and on a stand-in everywhere."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from copy_cases import KINDS, PAIRS, PLACES, Pool, check_every_layout
from emulated_kernel import load_kernel
from fake_cupy import DEFAULT_STREAM, NUM_PROCESSORS, DeviceArray, FakeCupy
from numpy.typing import NDArray

from kvcore import copy_kernel
from kvcore.cupy_copier import CTAS_PER_PROCESSOR, CupyCopier
from kvcore.gpu import as_stream, load_cupy
from kvcore.numpy_copier import NumpyCopier
from kvcore.planes import NHD, Planes, planes_of

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy(load_kernel(library))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupyx", fake)
    return fake


def on_device(planes: Planes) -> Planes:
    """The same memory, said to be a device's."""
    return planes._replace(device=0)


@every_kind
@pytest.mark.parametrize("block_size", [1, 4])
def test_it_copies_what_the_obvious_copy_does(fake: FakeCupy, kind: str, block_size: int) -> None:
    def copy(
        source: Planes,
        destination: Planes,
        pairs: NDArray[np.int32],
        n_tokens: NDArray[np.int32] | None,
    ) -> None:
        copier = CupyCopier(on_device(source), on_device(destination))
        copier.copy(pairs, n_tokens)
        fake.synchronize()

    check_every_layout(copy, kind, block_size)


def pool_of(array: NDArray[Any]) -> Planes:
    return planes_of(DeviceArray(array), NHD)


def test_planes_come_from_device_arrays_and_stay(fake: FakeCupy) -> None:
    array = np.arange(10 * 4 * 16, dtype=np.uint8).reshape(10, 4, 1, 16)
    copier = CupyCopier(pool_of(array))
    assert copier.source.device == 0
    copier.copy(np.array([[3, 4]], np.int32))
    fake.synchronize()
    np.testing.assert_array_equal(array[4], array[3])
    assert fake.devices_entered == []


def test_batches_in_a_row_wait_for_nobody_and_lose_nothing(fake: FakeCupy) -> None:
    """Twenty batches of growing size are queued while the device has done none: the
    caller's arrays are used again at once, and the copier's when it is their turn."""
    blocks = 300
    array = np.zeros((2 * blocks, 1, 1, 16), np.uint8)
    array[:blocks, 0, 0, 0] = np.arange(blocks) % 251
    array[:blocks, 0, 0, 1] = np.arange(blocks) // 251
    copier = CupyCopier(pool_of(array))
    pairs = np.empty((blocks, 2), np.int32)
    stream = fake.cuda.Stream()
    done = 0
    for size in (1, 2, 5, 90, 3, 64, 65, 10, 60):
        pairs[:size, 0] = np.arange(done, done + size)
        pairs[:size, 1] = pairs[:size, 0] + blocks
        copier.copy(pairs[:size], np.ones(size, np.int32), stream=stream)
        pairs.fill(7)
        done += size
    assert done == blocks
    stream.synchronize()
    np.testing.assert_array_equal(array[blocks:], array[:blocks])


def test_it_waits_for_the_copy_before_the_last_and_for_no_later_one(fake: FakeCupy) -> None:
    array = np.zeros((10, 1, 1, 16), np.uint8)
    copier = CupyCopier(pool_of(array))
    stream = fake.cuda.Stream()
    one_copy = 3  # an upload, a launch and the event after them
    for number in range(1, 6):
        copier.copy(np.array([[0, number]], np.int32), stream=stream)
        assert stream.done == max(0, number - 2) * one_copy


def test_a_launch_that_failed_leaves_its_upload_to_be_waited_for(
    fake: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = CupyCopier(pool_of(np.zeros((10, 1, 1, 16), np.uint8)))
    stream = fake.cuda.Stream()
    pairs = np.array([[0, 1]], np.int32)

    def refuse(*args: object) -> None:
        raise RuntimeError("no more launches")

    with monkeypatch.context() as patch:
        patch.setattr(copier, "_kernel", refuse)
        with pytest.raises(RuntimeError, match="no more launches"):
            copier.copy(pairs, stream=stream)
    assert fake.devices_entered == []
    assert fake.current == [fake.stream(DEFAULT_STREAM)]
    copier.copy(pairs, stream=stream)
    assert stream.done == 0
    copier.copy(pairs, stream=stream)  # in the same memory as the first
    assert stream.done == 2  # its upload, and the event behind it


def test_copies_of_one_copier_may_be_on_different_streams(fake: FakeCupy) -> None:
    array = np.arange(10, dtype=np.uint8).repeat(16).reshape(10, 1, 1, 16).copy()
    copier = CupyCopier(pool_of(array))
    streams = [fake.cuda.Stream() for _ in range(3)]
    for number, stream in enumerate(streams):
        copier.copy(np.array([[number, 9 - number]], np.int32), stream=stream)
    for stream in reversed(streams):
        stream.synchronize()
    assert array[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 1, 0]


class ForeignStream:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@pytest.mark.parametrize("has_from_external", [True, False])
def test_streams_of_any_library(library: Path, has_from_external: bool) -> None:
    fake: Any = FakeCupy(load_kernel(library), has_from_external=has_from_external)
    own = fake.cuda.Stream()
    assert as_stream(fake, None) is fake.current[-1]
    assert as_stream(fake, own) is own
    assert as_stream(fake, own.ptr).ptr == own.ptr
    assert as_stream(fake, np.int64(own.ptr)).ptr == own.ptr
    assert as_stream(fake, ForeignStream(own.ptr)).ptr == own.ptr
    with pytest.raises(TypeError, match=r"stream must be .* got str"):
        as_stream(fake, "0")


def test_work_goes_to_the_stream_that_was_asked_for(fake: FakeCupy) -> None:
    copier = CupyCopier(pool_of(np.zeros((10, 1, 1, 16), np.uint8)))
    pairs = np.array([[0, 1]], np.int32)
    before = len(fake.current[-1].work)
    copier.copy(pairs, stream=0x77)
    assert len(fake.stream(0x77).work) == 3
    assert len(fake.current[-1].work) == before
    copier.copy(pairs)
    assert len(fake.current[-1].work) == before + 3
    copier.copy(pairs[:0])
    assert len(fake.current[-1].work) == before + 3


def test_thread_blocks_are_as_many_as_there_is_work_and_no_more_than_allowed(
    fake: FakeCupy,
) -> None:
    planes = pool_of(np.zeros((3, 50, 1, 1, 16), np.uint8))
    pairs = np.stack([np.arange(25), np.arange(25, 50)], axis=1).astype(np.int32)
    CupyCopier(planes).copy(pairs[:1])
    CupyCopier(planes).copy(pairs)
    CupyCopier(planes, max_ctas=5).copy(pairs)
    assert fake.launches == [3, CTAS_PER_PROCESSOR * NUM_PROCESSORS, 5]
    with pytest.raises(ValueError, match="max_ctas must be at least 1, got 0"):
        CupyCopier(planes, max_ctas=0)


@pytest.mark.parametrize("counts", [False, True])
def test_more_work_than_the_kernel_counts_is_several_launches(
    fake: FakeCupy, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    size = 10_240  # 20 KiB a block in each of 3 planes, which are 2 tiles
    monkeypatch.setattr(copy_kernel, "MOST_ITEMS", 4 * 3 * 2 + 5)
    array = np.arange(3 * 20, dtype=np.uint8).repeat(2 * size).reshape(3, 20, 2, 1, size).copy()
    pairs = np.stack([np.arange(10), np.arange(10, 20)], axis=1).astype(np.int32)
    n_tokens = np.arange(10, dtype=np.int32) % 3
    expected = array.copy()
    for src, dst in pairs:
        end = n_tokens[src] if counts else None
        expected[:, dst, :end] = expected[:, src, :end]
    copier = CupyCopier(pool_of(array))
    copier.copy(pairs, n_tokens if counts else None)
    fake.synchronize()
    assert len(fake.launches) == 3  # of 4, 4 and 2 pairs
    np.testing.assert_array_equal(array, expected)


def test_which_pools_are_refused(fake: FakeCupy) -> None:
    host = planes_of(np.zeros((10, 4, 1, 16), np.uint8), NHD)
    pinned = planes_of(fake.empty_pinned((10, 4, 1, 16), np.uint8), NHD)
    device = pool_of(np.zeros((10, 4, 1, 16), np.uint8))
    with pytest.raises(ValueError, match="one CUDA device, got None and None"):
        CupyCopier(host)
    with pytest.raises(ValueError, match="one CUDA device, got 0 and 1"):
        CupyCopier(device, device._replace(device=1))
    with pytest.raises(ValueError, match=r"source must be .* pinned .* pageable memory at 0x"):
        CupyCopier(host, device)
    with pytest.raises(ValueError, match=r"destination must be .* pinned"):
        CupyCopier(device, host)
    with pytest.raises(ValueError, match="same rows"):
        CupyCopier(device, pool_of(np.zeros((10, 4, 1, 8), np.uint8)))
    for source, destination in ((device, pinned), (pinned, device)):
        CupyCopier(source, destination)


def test_a_batch_with_a_hazard_reaches_no_device(fake: FakeCupy) -> None:
    copier = CupyCopier(pool_of(np.zeros((10, 4, 1, 16), np.uint8)))
    with pytest.raises(ValueError, match="also a source"):
        copier.copy(np.array([[0, 1], [1, 2]], np.int32))
    assert fake.launches == []


# Where there is no CuPy, or no device


def test_without_cupy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    planes = on_device(planes_of(np.zeros((10, 4, 1, 16), np.uint8), NHD))
    with pytest.raises(ImportError, match=r"kvcore\[gpu\].*CUDA 13.*cupy-cuda12x.*14\.1\.0"):
        CupyCopier(planes)


def test_without_a_device_the_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    for count, reason in ((no_driver, ": cudaErrorInsufficientDriver"), (lambda: 0, "")):
        runtime = SimpleNamespace(getDeviceCount=count)
        cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        with pytest.raises(RuntimeError, match=f"^CuPy finds no CUDA device{reason}$"):
            load_cupy()


def test_the_real_cupy_without_a_device_says_so_too() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.is_available():
        pytest.skip("there is a device")
    planes = on_device(planes_of(np.zeros((10, 4, 1, 16), np.uint8), NHD))
    with pytest.raises(RuntimeError, match="CuPy finds no CUDA device: cuda"):
        CupyCopier(planes)


def test_streams_of_the_real_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    for stream in (0x77, ForeignStream(0x77)):
        assert as_stream(cupy, stream).ptr == 0x77
        assert isinstance(as_stream(cupy, stream), cupy.cuda.Stream)
    assert as_stream(cupy, cupy.cuda.Stream.null) is cupy.cuda.Stream.null


def test_cupy_has_what_the_stand_in_has() -> None:
    cupy = pytest.importorskip("cupy")
    cupyx = pytest.importorskip("cupyx")
    stand_in: Any = FakeCupy(None)

    def compare(real: Any, fake: Any) -> None:
        for name, value in vars(fake).items():
            assert hasattr(real, name), name
            if isinstance(value, SimpleNamespace):
                compare(getattr(real, name), value)

    compare(cupy.cuda, stand_in.cuda)
    assert cupy.cuda.runtime.memcpyDefault == stand_in.cuda.runtime.memcpyDefault
    assert cupy.cuda.runtime.memcpyHostToDevice == stand_in.cuda.runtime.memcpyHostToDevice
    assert cupy.cuda.runtime.memoryTypeHost == stand_in.cuda.runtime.memoryTypeHost
    for name in ("asarray", "empty", "RawKernel"):
        assert hasattr(cupy, name)
    assert hasattr(cupyx, "empty_pinned")


# On a device


@pytest.fixture
def cupy() -> Any:
    try:
        return load_cupy()
    except (ImportError, RuntimeError) as reason:
        pytest.skip(str(reason))


class DevicePool:
    """The bytes of a pool on the device, with the same arrays over them."""

    def __init__(self, cupy: Any, pool: Pool) -> None:
        self.arena = cupy.asarray(pool.arena)
        start = pool.arena.ctypes.data
        arrays = [
            cupy.ndarray(
                array.shape,
                array.dtype,
                self.arena.data + (array.ctypes.data - start),
                strides=array.strides,
            )
            for array in pool.arrays
        ]
        described = [
            planes_of(array, spec.layout) for array, spec in zip(arrays, pool.specs, strict=True)
        ]
        self.planes = described[0]
        for one in described[1:]:
            self.planes += one


@pytest.mark.gpu
@every_kind
def test_on_a_device_every_layout(cupy: Any, kind: str) -> None:
    for (shift, pad, itemsize), block_size, counts in product(
        PLACES, (1, 4), (None, [0, 1, 2, 3, 4])
    ):
        counts = None if counts is None else [min(count, block_size) for count in counts]
        pool = Pool(kind, block_size=block_size, shift=shift, pad=pad, itemsize=itemsize)
        device = DevicePool(cupy, pool)
        n_tokens = None if counts is None else np.array(counts, np.int32)
        copier = CupyCopier(device.planes)
        copier.copy(PAIRS, n_tokens)
        NumpyCopier(pool.planes()).copy(PAIRS, n_tokens)
        np.testing.assert_array_equal(cupy.asnumpy(device.arena), pool.arena)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["NHD stacked", "HND stacked", "hybrid with scales"])
def test_on_a_device_to_pinned_memory_and_back(cupy: Any, kind: str) -> None:
    import cupyx

    pool = Pool(kind)
    device = DevicePool(cupy, pool)
    pinned_arena = cupyx.empty_pinned(pool.arena.size, np.uint8)
    start = pool.arena.ctypes.data
    described = [
        planes_of(
            np.ndarray(
                array.shape, array.dtype, pinned_arena, array.ctypes.data - start, array.strides
            ),
            spec.layout,
        )
        for array, spec in zip(pool.arrays, pool.specs, strict=True)
    ]
    pinned = described[0]
    for one in described[1:]:
        pinned += one
    out, back = np.array([[1, 6], [2, 0]], np.int32), np.array([[6, 4], [0, 3]], np.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    copiers = CupyCopier(device.planes, pinned), CupyCopier(pinned, device.planes)
    copiers[0].copy(out, stream=stream)
    copiers[1].copy(back, stream=stream.ptr)
    stream.synchronize()
    NumpyCopier(pool.planes()).copy(np.array([[1, 4], [2, 3]], np.int32))
    np.testing.assert_array_equal(cupy.asnumpy(device.arena), pool.arena)


@pytest.mark.gpu
def test_on_a_device_many_batches_in_a_row(cupy: Any) -> None:
    array = cupy.zeros((2, 4096, 16, 8, 64), np.uint16)
    array[:, :2048] = cupy.arange(2048, dtype=np.uint16)[:, None, None, None]
    copier = CupyCopier(planes_of(array, NHD))
    for first in range(0, 2048, 64):
        blocks = np.arange(first, first + 64, dtype=np.int32)
        copier.copy(np.stack([blocks, blocks + 2048], axis=1))
    assert bool((array[:, 2048:] == array[:, :2048]).all())
