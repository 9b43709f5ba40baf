"""What a copier of blocks does, which batches it refuses, and the order of a step's copies.

The pairs of one batch may be copied in any order and at the same time. Therefore no block is
written twice, and none is both read and written. That holds for every batch that a manager or a
scheduler plans; it is checked here, once, because the batch may have been put together
elsewhere, and what a kernel would make of a wrong one depends on the moment.

Both ends of a copy must stay held until the device has done it. A scheduler does that for the
copies of its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from kvcore.copy_hazards import check_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.planes import Planes
    from kvcore.step import Step

__all__ = ["BlockCopier", "CopyPlan", "plan_copies", "run_copies", "tokens_to_copy"]


class CopyPlan(NamedTuple):
    """A batch of copies that may run in any order."""

    pairs: NDArray[np.int32]
    """``(n, 2)``, C-contiguous: source and destination block; skipped if one is negative."""
    n_tokens: NDArray[np.int32] | None
    """``(n,)``: tokens of each block to copy, from its first; None for whole blocks."""


class BlockCopier(Protocol):
    """Copies blocks from one pool to another, or within one.

    Derive from it and write ``run``; ``copy`` checks and then runs.

    Attributes
    ----------
    source, destination : Planes
        The memory of both pools; the same for copies within one.
    """

    source: Planes
    destination: Planes

    def copy(
        self,
        pairs: NDArray[np.int32],
        n_tokens: NDArray[np.int32] | None = None,
        *,
        stream: Any = None,
    ) -> None:
        """Copy blocks. It may return before a device has done it.

        Parameters
        ----------
        pairs : ndarray
            int32 ``(n, 2)``: source and destination. Pairs with a negative id are skipped,
            so that a batch can be padded. The array may be used again once this returns.
        n_tokens : ndarray, optional
            int32 ``(n,)``: how many tokens of each block are worth copying, from its first;
            by default all.
        stream : optional
            Where a device does it, in order with what else is there; by default the current
            stream. On the CPU there is none, and the copies are done when this returns.

        Raises
        ------
        TypeError
            ``pairs`` or ``n_tokens`` is not an int32 array.
        ValueError
            One has the wrong shape; an id or a number of tokens is out of range; a block is
            a destination twice, or within one pool both a source and a destination. Names
            the pair. Nothing was copied.
        """
        self.run(plan_copies(self.source, self.destination, pairs, n_tokens), stream=stream)

    def run(self, plan: CopyPlan, *, stream: Any = None) -> None:
        """Do what was planned for these pools. Needs: it came from ``plan_copies``."""
        ...


def plan_copies(
    source: Planes,
    destination: Planes,
    pairs: NDArray[np.int32],
    n_tokens: NDArray[np.int32] | None = None,
) -> CopyPlan:
    """Check a batch of copies between two pools. O(n).

    Raises what ``BlockCopier.copy`` does.
    """
    pairs = _int32(pairs, "pairs", (-1, 2))
    check_batch(pairs, source.num_blocks, destination.num_blocks, source.shares_memory(destination))
    if n_tokens is not None:
        n_tokens = _int32(n_tokens, "n_tokens", (len(pairs),))
        most = source.block_size
        wrong = n_tokens < 0 if most is None else (n_tokens < 0) | (n_tokens > most)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise ValueError(
                f"n_tokens[{place}] must be between 0 and the block size {most}, "
                f"got {n_tokens[place]}"
            )
    return CopyPlan(pairs, n_tokens)


def tokens_to_copy(step: Step) -> NDArray[np.int32]:
    """How many tokens of each block of ``step.copies`` there are before the first new one.

    Returns
    -------
    ndarray
        int32 ``(k,)``, parallel to ``step.copies``. What follows them in a block is written by
        this step or later, so it need not be copied. O(slots log slots).
    """
    # A copy is made for the next token of a sequence, whose block is then its alone.
    starts = step.copies[:, 1].astype(np.int64) * step.bm.block_size
    slots = np.sort(step.slots)
    return (slots[np.searchsorted(slots, starts)] - starts).astype(np.int32)


def run_copies(
    step: Step,
    copier: BlockCopier,
    swap_out: BlockCopier | None = None,
    swap_in: BlockCopier | None = None,
    *,
    stream: Any = None,
) -> None:
    """Run the copies of a step: those to host memory, those from there, copies on write.

    In this order on one stream, so that a block which leaves is read before another comes to
    its place, and one that has come back can be copied. Before the step's prefills and
    decodes, on the stream that they use or one that they wait for. Of a block that is copied
    on write, only the tokens in front of the next one are.

    Parameters
    ----------
    copier : BlockCopier
        Within the pool of the device, for ``step.copies``.
    swap_out, swap_in : BlockCopier, optional
        To the host's pool and back, for a scheduler that has one.
    stream : optional
        As for ``BlockCopier.copy``.

    Raises
    ------
    TypeError, ValueError
        As ``BlockCopier.copy``, or the step swaps and a copier for it is missing. Nothing
        was copied.
    """
    planned = []
    for name, one, pairs in (
        ("swap_out", swap_out, step.swap_out),
        ("swap_in", swap_in, step.swap_in),
        ("copier", copier, step.copies),
    ):
        if not len(pairs):
            continue
        if one is None:
            raise ValueError(f"{name} must be a copier, got None: step {step.number} swaps blocks")
        n_tokens = tokens_to_copy(step) if one is copier else None
        planned.append((one, plan_copies(one.source, one.destination, pairs, n_tokens)))
    for one, plan in planned:
        one.run(plan, stream=stream)


def _int32(array: Any, name: str, shape: tuple[int, ...]) -> NDArray[np.int32]:
    if not isinstance(array, np.ndarray) or array.dtype != np.int32:
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be an int32 array, got {got}")
    if array.ndim != len(shape) or array.shape[-1] != shape[-1]:
        expected = str(shape).replace("-1", "n")
        raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
    return np.ascontiguousarray(array)
