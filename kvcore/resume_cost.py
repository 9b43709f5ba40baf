"""What it takes to bring a preempted request back, and whether to swap it or compute it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvcore.request import Request

__all__ = ["ResumeCost", "SwapCandidate", "SwapRule"]


class SwapCandidate(NamedTuple):
    """A request that has to yield, while there is room for it in host memory."""

    request: Request
    n_tokens: int
    """Tokens to compute again if it is not swapped."""
    private_blocks: int
    """Blocks to copy if it is: those that nobody else holds."""


SwapRule = Callable[[SwapCandidate], bool]
"""Whether a request that yields goes to host memory instead of being computed again."""

_SMALL_COPY = 28 * 1024
_BYTES_PER_SECOND = {False: 6e9, True: 40e9}


class ResumeCost:
    """Seconds to compute tokens again, or to copy blocks to the host and back.

    It is a swap rule as well: a request is swapped if that takes less time.

    Parameters
    ----------
    seconds_per_token : float
        Of a prompt. The default is that of ``LinearStepTime``: a model of 8 billion
        parameters at 320 TFLOP/s.
    bytes_per_block : int
        Keys and values of a block over all layers. The default is 2 MiB: 16 tokens of
        Llama-3-8B in 16 bits (32 layers, 8 heads of 128).
    fragment_bytes : int
        Contiguous bytes of a block, which are copied as one. The default is 32 KiB, a
        block's keys, or values, of one layer. Equal to ``bytes_per_block`` if the cache
        has all layers of a block together.
    bytes_per_second : float, optional
        Over the link, one way, with fragments of that size. Measure it; by default it is
        6e9 below 28 KiB and 40e9 from there on.
    seconds_per_copy : float
        To start the copies of one step. The default is 20 us, a guess.

    Notes
    -----
    The step in the bandwidth was measured on an H100 behind PCIe 5 with
    ``cuMemcpyBatchAsync``, host to device (vLLM pull request 42212): 4 to 7 GB/s for
    50,000 fragments of up to 24 KiB, 40 GB/s at 28 KiB, 51 GB/s at 64 KiB. Where it lies
    depends on the device (vLLM issue 57555). Attention within the prompt is left out, so
    very long requests are cheaper to swap than this says.
    """

    def __init__(
        self,
        seconds_per_token: float = 50e-6,
        bytes_per_block: int = 2 << 20,
        fragment_bytes: int = 32 << 10,
        bytes_per_second: float | None = None,
        seconds_per_copy: float = 20e-6,
    ) -> None:
        self.seconds_per_token = _positive(seconds_per_token, "seconds_per_token")
        self.bytes_per_block = _positive(bytes_per_block, "bytes_per_block")
        _positive(fragment_bytes, "fragment_bytes")
        if bytes_per_second is None:
            bytes_per_second = _BYTES_PER_SECOND[fragment_bytes >= _SMALL_COPY]
        self.bytes_per_second = _positive(bytes_per_second, "bytes_per_second")
        if not seconds_per_copy >= 0:
            raise ValueError(f"seconds_per_copy must be at least 0, got {seconds_per_copy}")
        self.seconds_per_copy = seconds_per_copy

    def recompute(self, n_tokens: int) -> float:
        """Seconds to compute ``n_tokens`` again."""
        return n_tokens * self.seconds_per_token

    def swap(self, n_blocks: int) -> float:
        """Seconds to copy ``n_blocks`` out and back in."""
        n_bytes = n_blocks * self.bytes_per_block
        return 2 * (self.seconds_per_copy + n_bytes / self.bytes_per_second)

    def __call__(self, candidate: SwapCandidate) -> bool:
        """Whether to swap."""
        return self.swap(candidate.private_blocks) < self.recompute(candidate.n_tokens)


def _positive(value: float, name: str) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return value
