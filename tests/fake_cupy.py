"""What the copiers use of CuPy, over host memory, with kernels run as loops.

Streams are as lazy as a device may be: work that was put on one runs only when somebody
waits for it. So a buffer that is used again too early, or read before it was filled, shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

GARBAGE = 0x55
NUM_PROCESSORS = 5
DEFAULT_STREAM = 0


class Stream:
    """Work in order, done when it is waited for."""

    def __init__(self, fake: FakeCupy, ptr: int) -> None:
        self.fake, self.ptr = fake, ptr
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.clock = 0.0

    def put(self, work: Callable[[], None], seconds: float = 0.0) -> None:
        def run() -> None:
            work()
            self.clock += seconds

        self.work.append(run)

    def run_until(self, position: int) -> None:
        while self.done < position:
            self.done += 1
            self.work[self.done - 1]()

    def synchronize(self) -> None:
        self.run_until(len(self.work))

    def __enter__(self) -> Stream:
        self.fake.current.append(self)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self.fake.current.pop() is self


class Event:
    def __init__(self, *, disable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.position = 0

    def record(self, stream: Stream) -> None:
        stream.put(lambda: setattr(self, "time", stream.clock))
        self.stream, self.position = stream, len(stream.work)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.position)


class DeviceArray:
    """An array on the device; garbage before it is written, and after it is freed."""

    def __init__(self, array: NDArray[Any], *, owned: bool = False) -> None:
        self.array, self.owned = array, owned
        self.data = SimpleNamespace(ptr=array.ctypes.data)

    def __getitem__(self, key: Any) -> DeviceArray:
        return DeviceArray(self.array[key])

    def reshape(self, shape: Any) -> DeviceArray:
        return DeviceArray(self.array.reshape(shape))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int) -> Any:
        return self.array.__dlpack__()

    def __del__(self) -> None:
        if self.owned:
            self.array.view(np.uint8)[:] = GARBAGE


class FakeCupy:
    """Stands for the modules ``cupy`` and ``cupyx``.

    Parameters
    ----------
    launch : callable
        From ``emulated_kernel.load_kernel``.
    """

    __version__ = "14.2.0"

    def __init__(self, launch: Any, *, has_from_external: bool = True) -> None:
        self.launch = launch
        self.launches: list[int] = []
        self.memcpys: list[int] = []
        self.pinned: list[NDArray[Any]] = []
        self.streams: dict[int, Stream] = {}
        self.current = [self.stream(DEFAULT_STREAM)]
        self.devices_entered: list[int] = []
        self.devices_used: list[int] = []
        self.num_devices = 1
        self.kernel_seconds = 0.0
        fake = self

        class StreamType(Stream):
            def __init__(self, non_blocking: bool = False) -> None:
                super().__init__(fake, 0x1000 + 16 * len(fake.streams))
                fake.streams[self.ptr] = self

        if has_from_external:
            StreamType.from_external = lambda stream: fake.stream(stream.__cuda_stream__()[1])

        class ExternalStream(Stream):
            def __new__(cls, ptr: int) -> Any:
                return fake.stream(ptr)

        class Device:
            attributes = {"MultiProcessorCount": NUM_PROCESSORS}  # noqa: RUF012

            def __init__(self, number: int) -> None:
                self.number = number

            def __enter__(self) -> None:
                assert self.number < fake.num_devices
                fake.devices_entered.append(self.number)

            def __exit__(self, *error: object) -> None:
                assert fake.devices_entered.pop() == self.number

        class RawKernel:
            def __init__(self, code: str, name: str) -> None:
                assert f"void {name}(" in code

            def compile(self) -> None:
                pass

            def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
                fake.devices_used.append(fake.devices_entered[-1])
                assert [type(arg) for arg in args] == [np.uint64] * 3 + [np.uint32] * 4
                numbers = [int(arg) for arg in args]
                fake.launches.append(grid[0])
                fake.current[-1].put(
                    lambda: fake.launch(grid[0], block[0], *numbers), fake.kernel_seconds
                )

        self.RawKernel = RawKernel
        self.cuda = SimpleNamespace(
            Device=Device,
            Event=Event,
            ExternalStream=ExternalStream,
            Stream=StreamType,
            get_current_stream=lambda: fake.current[-1],
            get_elapsed_time=lambda start, end: 1000 * (end.time - start.time),
            runtime=SimpleNamespace(
                getDeviceCount=lambda: fake.num_devices,
                memcpyAsync=self._memcpy,
                memcpyDefault=4,
                memcpyHostToDevice=1,
                memoryTypeHost=1,
                pointerGetAttributes=self._attributes,
            ),
        )

    def stream(self, ptr: int) -> Stream:
        if ptr not in self.streams:
            self.streams[ptr] = Stream(self, ptr)
        return self.streams[ptr]

    def synchronize(self) -> None:
        for stream in list(self.streams.values()):
            stream.synchronize()

    def empty(self, size: int, dtype: Any) -> DeviceArray:
        assert self.devices_entered
        array = np.empty(size, dtype)
        array.view(np.uint8)[:] = GARBAGE
        return DeviceArray(array, owned=True)

    def asarray(self, array: NDArray[Any]) -> DeviceArray:
        on_device = self.empty(array.size, array.dtype)
        self.current[-1].put(lambda: np.copyto(on_device.array, array.ravel()))
        return on_device

    def empty_pinned(self, shape: Any, dtype: Any) -> NDArray[Any]:
        array = np.empty(shape, dtype)
        self.pinned.append(array)
        return array

    def is_pinned(self, address: int) -> bool:
        return any(
            array.ctypes.data <= address < array.ctypes.data + array.nbytes for array in self.pinned
        )

    def _attributes(self, address: int) -> Any:
        return SimpleNamespace(type=1 if self.is_pinned(address) else 0)

    def _memcpy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind in (1, 4)
        self.devices_used.append(self.devices_entered[-1])
        self.memcpys.append(size)
        self.stream(stream).put(lambda: ctypes.memmove(to, source, size))


class FakeDriver:
    """The CUDA driver's way to ``cuMemcpyBatchAsync``, which it puts on a stream of the fake.

    Parameters
    ----------
    error : int, optional
        What the call returns instead of doing anything.
    is_old : bool
        Whether it has no such call.
    seconds : callable
        How long a batch takes, from its sizes.
    """

    def __init__(
        self,
        fake: FakeCupy,
        *,
        error: int = 0,
        is_old: bool = False,
        seconds: Callable[[list[int]], float] = lambda sizes: 0.0,
    ) -> None:
        self.batches: list[list[int]] = []
        self.sources: list[int] = []
        pointer, size = ctypes.c_void_p, ctypes.c_size_t

        # As declared for version 12080 in cudaTypedefs.h.
        @ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )
        def copy_batch(
            to: int,
            source: int,
            sizes: int,
            count: int,
            attributes: int,
            firsts: int,
            num_attributes: int,
            failed: int,
            stream: int | None,
        ) -> int:
            def read(address: int, kind: Any, number: int) -> list[int]:
                return list((kind * number).from_address(address))

            if error:
                ctypes.c_size_t.from_address(failed).value = 2
                return error
            if stream in (None, 1):
                return 1  # CUDA_ERROR_INVALID_VALUE
            # In stream order, no hints, no flags; and they are for all copies.
            if read(attributes, ctypes.c_int, 6) != [1, 0, 0, 0, 0, 0]:
                return 1
            if num_attributes != 1 or read(firsts, size, 1) != [0]:
                return 1
            every_to = read(to, ctypes.c_uint64, count)
            every_source = read(source, ctypes.c_uint64, count)
            every_size = read(sizes, size, count)
            self.batches.append(every_size)
            self.sources.append(every_source[0])
            fake.devices_used.append(fake.devices_entered[-1])

            def run() -> None:
                for one_to, one_source, bytes_ in zip(
                    every_to, every_source, every_size, strict=True
                ):
                    ctypes.memmove(one_to, one_source, bytes_)

            fake.stream(stream).put(run, seconds(every_size))
            return 0

        self.copy_batch = copy_batch

        class Find:
            restype: Any = None
            argtypes: Any = None

            def __call__(self, name: bytes, out: Any, version: int, flags: int, status: Any) -> int:
                assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12_080, 0)
                address = None if is_old else ctypes.cast(copy_batch, pointer).value
                out._obj.value = address
                return 0

        self.cuGetProcAddress_v2 = Find()
