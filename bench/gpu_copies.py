"""How fast blocks are copied on a GPU, as parts of the speed of its own plain copy.

``python -m bench.gpu_copies`` needs CuPy and a device. A row is one batch: its time on the
device, upload of the pairs included, and the payload per second (each byte counted once),
beside one contiguous copy of as many bytes by the driver in the same process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore import copy_crossover
from kvcore.copier import BlockCopier
from kvcore.cupy_copier import CupyCopier
from kvcore.gpu import load_cupy
from kvcore.host_copier import HostCopier
from kvcore.planes import BLOCK_MAJOR_NHD, HND, NHD, Layout, planes_of

__all__ = ["Shape", "main", "rows"]

ROUNDS = 20
PAIRS = (1, 8, 64, 512)
ENGINES, KERNEL = 0, sys.maxsize


class Shape(NamedTuple):
    """Of the pool; by default that of Llama 3 8B in 16 bits, with 2 MiB a block."""

    num_blocks: int = 1200
    layers: int = 32
    heads: int = 8
    head_bytes: int = 256
    block_size: int = 16

    @property
    def layouts(self) -> dict[str, tuple[tuple[int, ...], Layout]]:
        """Shapes in bytes."""
        blocks, layers, heads, size, tokens = self
        return {
            "NHD": ((layers, 2, blocks, tokens, heads, size), NHD),
            "HND": ((layers, 2, blocks, heads, tokens, size), HND),
            "block-major": ((blocks, layers, 2, tokens, heads, size), BLOCK_MAJOR_NHD),
        }


class Result(NamedTuple):
    """One row."""

    name: str
    pairs: int
    seconds: float
    payload: int
    memcpy_seconds: float

    def line(self) -> str:
        """As printed."""
        speed, plain = (
            self.payload / seconds / 1e9 for seconds in (self.seconds, self.memcpy_seconds)
        )
        return (
            f"{self.name:34} {self.pairs:5} {self.seconds * 1e6:10.1f} {speed:9.1f} {plain:9.1f} "
            f"{speed / plain:6.2f}"
        )


HEAD = f"{'':34} {'pairs':>5} {'us':>10} {'GB/s':>9} {'memcpy':>9} {'ratio':>6}"


def apart(count: int, num_blocks: int) -> NDArray[np.int32]:
    """Pairs between random blocks, each in one pair."""
    blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    return np.stack([blocks[:count], blocks[-count:]], axis=1)


def rows(cupy: Any, shape: Shape) -> Iterator[Result]:
    """Copies within the device's memory, then to pinned host memory and back."""
    size = int(np.prod(shape.layouts["NHD"][0]))
    device = cupy.empty(size, np.uint8)
    host = import_module("cupyx").empty_pinned(size, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    plain_memcpy = Plain(cupy, stream)
    block_bytes = size // shape.num_blocks

    def result(
        name: str,
        copier: BlockCopier,
        count: int,
        to: int,
        source: int,
        tokens: int | None = None,
    ) -> Result:
        pairs = apart(count, shape.num_blocks)
        n_tokens = None if tokens is None else np.full(count, tokens, np.int32)
        payload = count * block_bytes * (tokens or shape.block_size) // shape.block_size
        seconds = best(cupy, stream, lambda: copier.copy(pairs, n_tokens, stream=stream))
        return Result(name, count, seconds, payload, plain_memcpy(to, source, payload))

    on_device, on_host = device.data.ptr, host.ctypes.data
    counts = [count for count in PAIRS if 2 * count <= shape.num_blocks]
    pools = {
        name: (planes_of(device.reshape(axes), layout), planes_of(host.reshape(axes), layout))
        for name, (axes, layout) in shape.layouts.items()
    }
    for name, (pool, _) in pools.items():
        copier = CupyCopier(pool)
        for count in counts:
            yield result(f"{name}, on the device", copier, count, on_device + size // 2, on_device)
        yield result(
            f"{name}, on the device, one token",
            copier,
            counts[-1],
            on_device + size // 2,
            on_device,
            tokens=1,
        )
    for name, ends in pools.items():
        for by, crossover_bytes in (("copy engines", ENGINES), ("kernel", KERNEL)):
            for way, pair, to, source in (
                ("out", ends, on_host, on_device),
                ("in", ends[::-1], on_device, on_host),
            ):
                one = HostCopier(*pair, crossover_bytes=crossover_bytes)
                yield result(f"{name}, {way}, {by}", one, counts[-1], to, source)


class Plain:
    """Seconds of one contiguous copy by the driver; each is measured once."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self.cupy, self.stream = cupy, stream
        self.known: dict[tuple[int, int, int], float] = {}

    def __call__(self, to: int, source: int, size: int) -> float:
        if (to, source, size) not in self.known:
            runtime = self.cupy.cuda.runtime
            self.known[to, source, size] = best(
                self.cupy,
                self.stream,
                lambda: runtime.memcpyAsync(
                    to, source, size, runtime.memcpyDefault, self.stream.ptr
                ),
            )
        return self.known[to, source, size]


def best(cupy: Any, stream: Any, work: Callable[[], object]) -> float:
    """Seconds on the device of the fastest of some rounds, the first not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1000)
    return float(min(times[1:]))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_copies", description=__doc__)
    parser.add_argument("--blocks", type=int, default=Shape().num_blocks, help="blocks of 2 MiB")
    arguments = parser.parse_args()
    try:
        cupy = load_cupy()
    except (ImportError, RuntimeError) as reason:
        print(f"nothing measured: {reason}", file=sys.stderr)
        return 2
    with cupy.cuda.Device(0):
        print(f"CuPy {cupy.__version__}, {arguments.blocks} blocks of 2 MiB\n{HEAD}")
        for result in rows(cupy, Shape(num_blocks=arguments.blocks)):
            print(result.line(), flush=True)
        crossover = copy_crossover.measure()
    print(f"copy engines from fragments of {crossover / 1024:g} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
