"""Planes of every layout, the batches that are refused, and the copier of the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from copy_cases import KINDS, Pool, check_between_two_pools, check_every_layout, copy_obviously
from numpy.typing import NDArray

from kvcore import BlockManager, Scheduler, Step, array_memory
from kvcore.array_memory import memory_of
from kvcore.copier import BlockCopier, CopyPlan, plan_copies, run_copies, tokens_to_copy
from kvcore.numpy_copier import NumpyCopier
from kvcore.planes import (
    BLOCK_MAJOR_NHD,
    FLASHINFER_HND,
    FLASHINFER_NHD,
    HND,
    MLA,
    NHD,
    Layout,
    Plane,
    Planes,
    planes_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


def pairs_of(*pairs: tuple[int, int]) -> NDArray[np.int32]:
    return np.array(pairs, np.int32).reshape(-1, 2)


def copy_with_numpy(
    source: Planes,
    destination: Planes,
    pairs: NDArray[np.int32],
    n_tokens: NDArray[np.int32] | None,
) -> None:
    NumpyCopier(source, destination).copy(pairs, n_tokens)


# Planes


def test_planes_of_the_usual_layouts_worked_out_by_hand() -> None:
    # 2 layers, 10 blocks, 4 tokens, 3 heads of 8 values of 2 bytes.
    nhd = np.zeros((2, 2, 10, 4, 3, 8), np.uint16)
    start = nhd.ctypes.data
    plane_bytes = 10 * 4 * 3 * 16
    assert planes_of(nhd, NHD).planes == tuple(
        Plane(start + place * plane_bytes, 192, 1, 192, 192, 48) for place in range(4)
    )
    hnd = np.zeros((10, 3, 4, 8), np.uint16)
    assert planes_of(hnd, HND).planes == (Plane(hnd.ctypes.data, 192, 3, 64, 64, 16),)
    flashinfer = np.zeros((10, 2, 3, 4, 8), np.uint16)
    assert planes_of(flashinfer, FLASHINFER_HND).planes == (
        Plane(flashinfer.ctypes.data, 384, 6, 64, 64, 16),
    )
    latent = np.zeros((2, 10, 4, 36), np.uint16)
    assert planes_of(latent, MLA).planes == tuple(
        Plane(latent.ctypes.data + layer * 10 * 4 * 72, 288, 1, 288, 288, 72) for layer in range(2)
    )
    by_block = np.zeros((10, 2, 2, 4, 3, 8), np.uint16)
    assert planes_of(by_block, BLOCK_MAJOR_NHD).planes == (
        Plane(by_block.ctypes.data, 768, 4, 192, 192, 48),
    )


def test_planes_know_their_pool() -> None:
    array = np.zeros((2, 10, 4, 3, 8), np.uint16)
    planes = planes_of(array, NHD)
    assert (planes.num_blocks, planes.block_size, planes.device) == (10, 4, None)
    assert planes.block_bytes == 2 * 4 * 3 * 8 * 2
    scales = planes_of(np.zeros((10, 3), np.float32), Layout(-2, None))
    assert scales.block_size is None
    assert scales.planes[0].token_bytes == 0
    both = scales + planes
    assert (both.num_blocks, both.block_size) == (10, 4)
    assert both.block_bytes == planes.block_bytes + 12
    assert both.planes == scales.planes + planes.planes


@pytest.mark.parametrize("block_size", [1, 2])
def test_blocks_of_one_token_have_the_rows_of_longer_ones(block_size: int) -> None:
    """So that pools of either layout can be copied into each other with any block size."""
    stacked = planes_of(np.zeros((3, 2, 5, block_size, 4, 8), np.uint8), NHD)
    by_block = planes_of(np.zeros((5, 3, 2, block_size, 4, 8), np.uint8), BLOCK_MAJOR_NHD)
    by_head = planes_of(np.zeros((5, 4, block_size, 8), np.uint8), HND)
    assert {(p.rows, p.token_bytes) for p in stacked.planes} == {(1, 32)}
    assert {(p.rows, p.token_bytes) for p in by_block.planes} == {(6, 32)}
    assert {(p.rows, p.token_bytes) for p in by_head.planes} == {(4, 8)}


def test_planes_keep_their_arrays_alive_and_a_copier_its_planes() -> None:
    arrays = [np.zeros((10, 4, 3, 8), np.uint8) for _ in range(3)]
    gone = [weakref.ref(array) for array in arrays]
    copier = NumpyCopier(planes_of(arrays, NHD))
    del arrays
    gc.collect()
    assert all(array() is not None for array in gone)
    copier.copy(pairs_of((0, 1)))
    del copier
    gc.collect()
    assert all(array() is None for array in gone)


def test_the_stride_of_an_axis_of_one_element_means_nothing() -> None:
    array = np.zeros((10, 1, 4, 3, 8), np.uint8)
    odd = np.lib.stride_tricks.as_strided(array, strides=(96, 0, 24, 8, 1))
    assert planes_of(odd, FLASHINFER_NHD).planes == planes_of(array, FLASHINFER_NHD).planes


def refused_arrays() -> dict[str, tuple[Any, Layout, type[Exception], str]]:
    fine = np.zeros((10, 4, 3, 8), np.uint8)
    read_only = fine.copy()
    read_only.flags.writeable = False
    pairs_of_heads = np.zeros((10, 4, 2, 3, 8), np.uint8)
    return {
        "no arrays": ([], NHD, ValueError, "arrays must not be empty"),
        "a list of numbers": ([1, 2], NHD, TypeError, "got int"),
        "none": (None, NHD, TypeError, "got NoneType"),
        "read-only": (read_only, NHD, ValueError, "writable"),
        "empty": (np.zeros((0, 4, 3, 8)), NHD, ValueError, r"shape \(0, 4, 3, 8\)"),
        "too few axes": (fine, FLASHINFER_HND, ValueError, "axis that shape"),
        "one axis twice": (fine, Layout(1, -3), ValueError, "twice"),
        "reversed": (fine[::-1], NHD, ValueError, "strides must be positive"),
        "broadcast": (
            np.lib.stride_tricks.as_strided(fine, strides=(96, 24, 8, 0)),
            NHD,
            ValueError,
            "strides must be positive",
        ),
        "keys beside values": (pairs_of_heads[:, :, 0], NHD, ValueError, "side by side"),
        "gaps between values": (fine[..., ::2], NHD, ValueError, "side by side"),
        "other blocks": ([fine, np.zeros((9, 4, 3, 8))], NHD, ValueError, "num_blocks .* 10 and 9"),
        "other tokens": ([fine, np.zeros((10, 5, 3, 8))], NHD, ValueError, "block_size .* 4 and 5"),
    }


@pytest.mark.parametrize("name", refused_arrays())
def test_an_array_that_cannot_be_described_is_refused(name: str) -> None:
    arrays, layout, error, message = refused_arrays()[name]
    with pytest.raises(error, match=message):
        planes_of(arrays, layout)


def test_a_block_of_2_gib_in_one_plane_is_refused() -> None:
    class Huge:
        def __init__(self, size: int) -> None:
            self.__cuda_array_interface__ = {
                "data": (4096, False),
                "shape": (2, 1, 1, size),
                "typestr": "|u1",
                "version": 3,
            }

    assert planes_of(Huge(2**31 - 1), NHD).block_bytes == 2**31 - 1
    with pytest.raises(ValueError, match=f"less than 2 GiB in a plane, got {2**31}"):
        planes_of(Huge(2**31), NHD)


# Arrays of other libraries


class OnlyDLPack:
    """An array of another library: all that is known of it is DLPack."""

    def __init__(self, array: NDArray[Any], device_type: int = 1) -> None:
        self.array = array
        self.device_type = device_type
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device_type, 3 if self.device_type in (2, 13) else 0)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()


@pytest.mark.parametrize(("device_type", "device"), [(1, None), (3, None), (2, 3), (13, 3)])
def test_dlpack_gives_the_memory_wherever_it_is(device_type: int, device: int | None) -> None:
    array = np.zeros((10, 6, 3, 8), np.uint16)[:, 1:5]
    foreign = OnlyDLPack(array, device_type)
    memory = memory_of(foreign)
    assert memory == (array.ctypes.data, array.shape, array.strides, 2, device)
    # On a device nothing is waited for, since nothing is read.
    assert foreign.streams == [None if device is None else -1]


def test_describing_through_dlpack_gives_back_what_it_took() -> None:
    array = np.zeros((10, 4, 3, 8), np.uint16)
    gone = weakref.ref(array)
    planes_of(OnlyDLPack(array), NHD)
    del array
    gc.collect()
    assert gone() is None


def test_dlpack_memory_of_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="DLPack type 10"):
        memory_of(OnlyDLPack(np.zeros(4), device_type=10))


class Described(OnlyDLPack):
    """One whose description says something else than numpy would."""

    def __init__(self, array: NDArray[Any], **fields: int) -> None:
        super().__init__(array)
        self.fields = fields

    def __dlpack__(self, *, stream: Any = None) -> Any:
        capsule = self.array.__dlpack__()
        tensor = array_memory._DLTensor.from_address(array_memory._pointer_of(capsule, b"dltensor"))
        for name, value in self.fields.items():
            setattr(tensor, name, value)
        return capsule


def test_dlpack_counts_from_its_byte_offset_and_strides_in_elements() -> None:
    array = np.zeros((4, 6), np.uint32)
    described = Described(array, byte_offset=48, strides=None)
    assert memory_of(described) == (array.ctypes.data + 48, (4, 6), (24, 4), 4, None)


def test_elements_smaller_than_a_byte_are_refused() -> None:
    with pytest.raises(ValueError, match="whole bytes, got 4 bits"):
        memory_of(Described(np.zeros(4, np.uint8), bits=4))


@pytest.mark.parametrize("strides", [None, (192, 48, 16, 2)])
def test_the_cuda_array_interface_gives_a_device(strides: tuple[int, ...] | None) -> None:
    class OnDevice:
        __cuda_array_interface__ = {  # noqa: RUF012
            "data": (4096, False),
            "shape": (10, 4, 3, 8),
            "typestr": "<f2",
            "strides": strides,
            "version": 3,
        }

    array = OnDevice()
    planes = planes_of(array, NHD)
    assert planes.planes == (Plane(4096, 192, 1, 192, 192, 48),)
    assert planes.device == 0
    assert planes.arrays == (array,)


def test_a_read_only_cuda_array_is_refused() -> None:
    class OnDevice:
        __cuda_array_interface__ = {  # noqa: RUF012
            "data": (4096, True),
            "shape": (1,),
            "typestr": "<f2",
            "version": 3,
        }

    with pytest.raises(ValueError, match="writable"):
        memory_of(OnDevice())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_torch_tensors_of_types_that_numpy_does_not_know(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    cache = torch.arange(2 * 10 * 4 * 3 * 8).reshape(2, 10, 4, 3, 8).to(getattr(torch, dtype))
    before = cache.clone()
    NumpyCopier(planes_of(cache, NHD)).copy(pairs_of((1, 5)), np.array([3], np.int32))
    before[:, 5, :3] = before[:, 1, :3]
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


# The copier of the CPU


@every_kind
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_numpy_copier_copies_what_the_obvious_one_does(kind: str, block_size: int) -> None:
    check_every_layout(copy_with_numpy, kind, block_size)


@every_kind
def test_between_two_pools(kind: str) -> None:
    check_between_two_pools(copy_with_numpy, kind)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(
    ("near", "far"),
    [
        ("NHD stacked", "block-major NHD"),
        ("HND stacked", "block-major HND"),
        ("NHD, an array a layer", "block-major NHD"),
        ("FlashInfer NHD", "block-major NHD"),
    ],
)
def test_pools_that_group_their_rows_differently(near: str, far: str, block_size: int) -> None:
    """A block-major pool in host memory, whatever the device has."""
    here = Pool(near, block_size=block_size, pad=2)
    there = Pool(far, block_size=block_size, pad=6, seed=1)
    NumpyCopier(here.planes(), there.planes()).copy(pairs_of((2, 5)))
    rows = [array.reshape(-1, *array.shape[-4:]) for array in here.arrays]
    if near.startswith("FlashInfer"):
        rows = [array.transpose(1, 0, 2, 3, 4) for array in here.arrays]
    expected = np.concatenate(rows)[:, 2]
    np.testing.assert_array_equal(there.arrays[0][5].reshape(expected.shape), expected)


def test_a_wider_element_is_only_more_bytes() -> None:
    """A bfloat16 pool and the same memory as bytes are one pool."""
    array = np.arange(10 * 4 * 3 * 8, dtype=np.uint16).reshape(10, 4, 3, 8)
    NumpyCopier(planes_of(array.view(np.uint8), NHD)).copy(pairs_of((9, 0)))
    np.testing.assert_array_equal(array[0], array[9])


@pytest.mark.parametrize("n_tokens", [None, 2])
def test_an_empty_batch_and_one_of_padding_copy_nothing(n_tokens: int | None) -> None:
    pool = Pool("HND stacked")
    before = pool.arena.copy()
    copier = NumpyCopier(pool.planes())
    for pairs in (pairs_of(), pairs_of((-1, -1), (-1, 2), (2, -7), (-1, 2))):
        counts = None if n_tokens is None else np.full(len(pairs), n_tokens, np.int32)
        copier.copy(pairs, counts)
    np.testing.assert_array_equal(pool.arena, before)


def test_pairs_of_any_strides_are_read() -> None:
    pool, expected = Pool("NHD, a layer"), Pool("NHD, a layer")
    pairs = pairs_of((0, 0), (0, 3), (0, 0), (2, 4))[1::2]
    assert not pairs.flags.c_contiguous
    pairs.flags.writeable = False
    planes = pool.planes()
    assert plan_copies(planes, planes, pairs).pairs.flags.c_contiguous
    NumpyCopier(planes).copy(pairs)
    copy_obviously(expected, expected, [(0, 3), (2, 4)], None)
    np.testing.assert_array_equal(pool.arena, expected.arena)


def test_planes_on_a_device_are_not_for_the_numpy_copier() -> None:
    host = planes_of(np.zeros((10, 4, 3, 8), np.uint8), NHD)
    device = host._replace(device=1)
    with pytest.raises(ValueError, match="source must be in host memory, got CUDA device 1"):
        NumpyCopier(device)
    with pytest.raises(ValueError, match="destination must be in host memory"):
        NumpyCopier(host, device)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (np.zeros((10, 3, 4, 8), np.uint8), r"got 1 and 3 a block"),
        (np.zeros((10, 4, 3, 16), np.uint8), r"96 bytes \(24 a token\) and 192 bytes \(48 a"),
        (np.zeros((10, 2, 6, 8), np.uint8), r"96 bytes \(24 a token\) and 96 bytes \(48 a"),
    ],
)
def test_pools_of_other_rows_are_refused(other: NDArray[Any], message: str) -> None:
    planes = planes_of(np.zeros((10, 4, 3, 8), np.uint8), NHD)
    with pytest.raises(ValueError, match=message):
        NumpyCopier(planes, planes_of(other, HND if other.shape[1] == 3 else NHD))


def test_joining_planes_of_a_device_and_of_host_memory_is_refused() -> None:
    planes = planes_of(np.zeros((10, 4, 3, 8), np.uint8), NHD)
    with pytest.raises(ValueError, match="device must be the same"):
        planes + planes._replace(device=0)
    with pytest.raises(TypeError):
        planes + 1


# Refused batches


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, -1), (1, 2), (2, 3)], r"pairs\[1\] \(1, 2\) has a destination that is also"),
        # K8-01: copied at the same time, block 3 would get the old or the new block 2.
        ([(1, 2), (2, 3)], r"pairs\[0\] \(1, 2\) has a destination that is also a source"),
        ([(2, 3), (1, 2)], r"pairs\[1\] \(1, 2\) has a destination that is also a source"),
        ([(4, 4)], r"pairs\[0\] \(4, 4\) has a destination that is also a source"),
        ([(1, 2), (0, 5), (3, 2)], r"pairs\[2\] \(3, 2\) has the destination of pairs\[0\]"),
        ([(0, 5), (1, 2), (3, 2)], r"pairs\[2\] \(3, 2\) has the destination of pairs\[1\]"),
        ([(1, 2), (1, 2)], r"pairs\[1\] \(1, 2\) has the destination of pairs\[0\]"),
        ([(0, 1), (-1, 9), (7, 2)], r"pairs\[2\] \(7, 2\) has a source that is not below 7"),
        ([(0, 7)], r"pairs\[0\] \(0, 7\) has a destination that is not below 7"),
        ([(0, 2**31 - 1)], r"pairs\[0\] \(0, 2147483647\) has a destination"),
    ],
)
def test_a_batch_that_depends_on_its_order_is_refused(
    pairs: list[tuple[int, int]], message: str
) -> None:
    pool = Pool("NHD stacked")
    before = pool.arena.copy()
    with pytest.raises(ValueError, match=message):
        NumpyCopier(pool.planes()).copy(pairs_of(*pairs))
    np.testing.assert_array_equal(pool.arena, before)


@pytest.mark.parametrize(
    ("pairs", "n_tokens", "error", "message"),
    [
        ([[0, 1]], None, TypeError, "pairs must be an int32 array, got list"),
        (np.zeros((1, 2), np.int64), None, TypeError, "pairs .* got int64"),
        (np.zeros((1, 3), np.int32), None, ValueError, r"shape \(n, 2\), got \(1, 3\)"),
        (np.zeros(2, np.int32), None, ValueError, r"shape \(n, 2\), got \(2,\)"),
        (pairs_of((0, 1)), [1], TypeError, "n_tokens must be an int32 array, got list"),
        (pairs_of((0, 1)), np.ones(2, np.int32), ValueError, r"shape \(1,\), got \(2,\)"),
        (pairs_of((0, 1)), np.full(1, 5, np.int32), ValueError, r"n_tokens\[0\] .* 4, got 5"),
        (pairs_of((0, 1)), np.full(1, -1, np.int32), ValueError, r"n_tokens\[0\] .* got -1"),
    ],
)
def test_arrays_that_are_no_batch_are_refused(
    pairs: Any, n_tokens: Any, error: type[Exception], message: str
) -> None:
    copier = NumpyCopier(Pool("NHD stacked").planes())
    with pytest.raises(error, match=message):
        copier.copy(pairs, n_tokens)


def test_what_is_skipped_is_no_hazard() -> None:
    pool, expected = Pool("NHD stacked"), Pool("NHD stacked")
    pairs = pairs_of((2, -1), (0, 2), (-1, 2), (-1, 0), (9, -1), (-1, 9))
    NumpyCopier(pool.planes()).copy(pairs)
    copy_obviously(expected, expected, [(0, 2)], None)
    np.testing.assert_array_equal(pool.arena, expected.arena)


def test_one_address_on_two_devices_is_not_one_memory() -> None:
    planes = Pool("NHD stacked").planes()
    assert planes.shares_memory(planes)
    assert not planes.shares_memory(planes._replace(device=0))


def test_two_descriptions_of_one_pool_are_one_pool() -> None:
    """The hazard is in the memory, not in the objects that describe it."""
    pool = Pool("NHD stacked")
    with pytest.raises(ValueError, match="also a source"):
        NumpyCopier(pool.planes(), pool.planes()).copy(pairs_of((1, 2), (2, 3)))


# The copies of a step


class Recorder(BlockCopier):
    """Copies on the CPU, and writes down when."""

    def __init__(self, name: str, source: Planes, destination: Planes, log: list[Any]) -> None:
        self.name, self.source, self.destination, self.log = name, source, destination, log
        self.copier = NumpyCopier(source, destination)

    def run(self, plan: CopyPlan, *, stream: Any = None) -> None:
        self.log.append((self.name, stream))
        self.copier.run(plan)


class TwoPools:
    """A pool on the "device" and one in host memory, with three recording copiers."""

    def __init__(self) -> None:
        self.near, self.far = Pool("HND stacked"), Pool("HND stacked", num_blocks=9, seed=1)
        self.log: list[Any] = []
        near, far = self.near.planes(), self.far.planes()
        self.copiers = (
            Recorder("copies", near, near, self.log),
            Recorder("out", near, far, self.log),
            Recorder("in", far, near, self.log),
        )

    def block(self, pool: Pool, block: int) -> NDArray[Any]:
        (array,) = pool.arrays
        return array[:, :, block].copy()


def a_step(**copies: list[tuple[int, int]]) -> Step:
    """Of blocks of 4 tokens; each copy on write is for the fourth token of its block."""
    step = Step()
    step.number = 5
    step.bm = BlockManager(7, 4)
    step.slots = np.array([4 * dst + 3 for _, dst in copies.get("copies", [])], np.int64)
    for name, pairs in copies.items():
        setattr(step, name, pairs_of(*pairs))
    return step


def test_a_block_is_read_before_another_takes_its_place_and_written_before_it_is_copied() -> None:
    """Block 3 leaves, another comes to its place, and is then the source of a copy on write."""
    pools = TwoPools()
    leaving, coming = pools.block(pools.near, 3), pools.block(pools.far, 8)
    step = a_step(swap_out=[(3, 0)], swap_in=[(8, 3)], copies=[(3, 5)])
    run_copies(step, *pools.copiers, stream=77)
    assert pools.log == [("out", 77), ("in", 77), ("copies", 77)]
    np.testing.assert_array_equal(pools.block(pools.far, 0), leaving)
    np.testing.assert_array_equal(pools.block(pools.near, 3), coming)
    is_same = pools.block(pools.near, 5) == coming
    assert is_same[:, :, :, :3].all()
    assert not is_same[:, :, :, 3].all()  # the fourth token is the step's own


@pytest.mark.parametrize("draft_tokens", [0, 1, 5])
def test_only_tokens_before_the_next_are_copied(draft_tokens: int) -> None:
    """Three prompts of 6, 7 and 9 tokens, each sampled twice, in blocks of 4: the first of each
    two that decode copies 2, 3 and 1 tokens. Blocks are handed out from the last to the first."""
    bm = BlockManager(30, 4)
    for block in range(30):
        bm.allocate(block, 4)
    for block in reversed(range(30)):
        bm.free_seq(block)
    scheduler = Scheduler(bm, watermark_blocks=0, token_budget=64, draft_tokens=draft_tokens)
    scheduler.add("alone", 5, max_tokens=20)
    for seq, n_tokens in (("A", 6), ("B", 7), ("C", 9)):
        scheduler.add(seq, n_tokens, max_tokens=20, siblings=[f"{seq}'"])
    scheduler.update(scheduler.step(), [0] * 7)

    step = scheduler.step()

    assert step == ["alone", "A", "B", "C", "A'", "B'", "C'"]
    last_blocks = [bm.table(seq)[column] for seq, column in (("A", 1), ("B", 1), ("C", 2))]
    assert step.copies[:, 1].tolist() == last_blocks
    assert last_blocks == sorted(last_blocks, reverse=True)
    assert tokens_to_copy(step).tolist() == [2, 3, 1]


def test_the_last_holder_may_write_elsewhere_than_the_copy_ends() -> None:
    """Block 2 had 3 tokens of a sequence and 2 of its fork, which writes there in place."""
    step = a_step(copies=[(2, 5)])
    step.slots = np.array([4 * 5 + 3, 4 * 2 + 2, 4 * 6 + 1], np.int64)
    assert tokens_to_copy(step).tolist() == [3]


def test_slots_beyond_32_bits() -> None:
    assert tokens_to_copy(a_step(copies=[(2, 1), (3, 2**30)])).tolist() == [3, 3]


def test_a_step_without_copies_calls_no_copier() -> None:
    pools = TwoPools()
    run_copies(a_step(), *pools.copiers)
    run_copies(a_step(copies=[(0, 1)]), pools.copiers[0])
    assert pools.log == [("copies", None)]


@pytest.mark.parametrize(
    ("step", "copiers", "message"),
    [
        (a_step(swap_out=[(3, 0)]), 1, "swap_out must be a copier, got None: step 5"),
        (a_step(swap_out=[(3, 0)], swap_in=[(1, 1)]), 2, "swap_in must be a copier"),
        (a_step(swap_out=[(3, 0)], copies=[(1, 2), (2, 3)]), 3, "also a source"),
        (a_step(swap_out=[(3, 0)], swap_in=[(9, 1)]), 3, "source that is not below 9"),
    ],
)
def test_a_step_with_a_wrong_batch_copies_nothing(step: Step, copiers: int, message: str) -> None:
    pools = TwoPools()
    with pytest.raises(ValueError, match=message):
        run_copies(step, *pools.copiers[:copiers])
    assert pools.log == []


def test_the_copies_of_a_scheduler_carry_every_token_along() -> None:
    """Each token's slot holds a number of its own, through forks, swaps and returns."""
    size, near_blocks, far_blocks = 4, 12, 12
    bm, host = BlockManager(near_blocks, size), BlockManager(far_blocks, size)
    scheduler = Scheduler(bm, watermark_blocks=0, token_budget=64, host=host)
    near = np.zeros((near_blocks, size, 1, 1), np.int64)
    far = np.zeros((far_blocks, size, 1, 1), np.int64)
    planes, host_planes = planes_of(near, NHD), planes_of(far, NHD)
    copiers = (
        NumpyCopier(planes),
        NumpyCopier(planes, host_planes),
        NumpyCopier(host_planes, planes),
    )
    written: dict[Any, list[int]] = {}
    numbers = iter(range(1, 10_000))
    steps: list[Step] = []

    def write(seq: Any, slots: NDArray[np.int64]) -> None:
        values = [next(numbers) for _ in slots]
        near.reshape(-1)[slots] = values
        written.setdefault(seq, []).extend(values)

    for group in range(4):
        siblings = [(group, 1), (group, 2)] if group % 2 else []
        scheduler.add((group, 0), 6, max_tokens=14, siblings=siblings)
    while scheduler.running or scheduler.waiting or scheduler.swapped:
        step = scheduler.step()
        steps.append(step)
        run_copies(step, *copiers)
        for seq in step.preempted:
            written.pop(seq, None)
        for seq, start, count in step.prefills:
            if start > len(written.get(seq, [])):  # the beginning is another member's
                (first, *_) = bm.table(seq)
                giver = next(other for other in written if bm.table(other)[0] == first)
                written[seq] = written[giver][:start]
            write(seq, bm.slots(seq, start, start + count))
        for seq, slot in zip(step, step.slots, strict=True):
            write(seq, slot[None])
        for parent, child in step.forks:
            written[child] = list(written[parent])
        for seq in (*step, *step.completed):
            assert near.reshape(-1)[bm.slots(seq)].tolist() == written[seq]
        scheduler.update(step, [0] * len(step.sampled))
        for seq in [seq for seq in written if seq not in bm and seq not in host]:
            del written[seq]
    assert sum(len(step.copies) for step in steps) > 0
    assert sum(len(step.swap_out) for step in steps) > 0
    assert sum(len(step.swap_in) for step in steps) > 0


def test_planning_does_not_touch_what_it_was_given() -> None:
    planes = Pool("NHD stacked").planes()
    pairs, n_tokens = pairs_of((0, 1), (-1, -1)), np.array([2, 0], np.int32)
    for array in (pairs, n_tokens):
        array.flags.writeable = False
    plan = plan_copies(planes, planes, pairs, n_tokens)
    assert plan.pairs is pairs
    assert plan.n_tokens is n_tokens


def test_every_copier_derives_its_checks() -> None:
    """A copier of one's own writes ``run`` and nothing else."""
    pools = TwoPools()
    own: Callable[..., None] = pools.copiers[0].copy
    own(pairs_of((0, 1)), stream="mine")
    with pytest.raises(ValueError, match="also a source"):
        own(pairs_of((0, 1), (1, 2)))
    assert pools.log == [("copies", "mine")]
