"""Token ids that stand in for the content of a trace's blocks.

A trace with ``hash_ids`` says which blocks are equal and not what is in them. Any tokens
do that are equal where the ids are and differ where they do not. These are a function of
the id and the position alone, so a request's are made when it arrives and dropped when it
ends, and no other request has to be seen.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["tokens_of_hash_ids"]

TOKEN_MASK = np.uint32(2**31 - 1)
TOKEN_BITS = np.uint64(31)
# Odd, so multiplying by it is a bijection modulo 2**31.
ID_STEP = np.uint32(0x9E3779B1)
POSITION_STEP = np.uint32(0x85EBCA6B)
HIGH_STEP = np.uint64(0x9E3779B97F4A7C15)


def tokens_of_hash_ids(
    hash_ids: NDArray[np.int64], block_size: int, n_tokens: int | None = None
) -> NDArray[np.int32]:
    """Return the tokens of a prompt, from 0 to 2**31 - 1, as far as its ids reach.

    Parameters
    ----------
    hash_ids : ndarray
        int64, one for each ``block_size`` tokens. Two that are from 0 to 2**31 - 1
        differ in every token; larger ones differ in nearly all.
    block_size : int
        Tokens that one id stands for.
    n_tokens : int, optional
        Length of the prompt. It cuts the last id short, and it may be longer than the
        ids reach: what comes after them is not known. Default: as far as they reach.

    Returns
    -------
    ndarray
        int32, at most ``n_tokens`` of ``len(hash_ids) * block_size`` tokens.
    """
    ids = np.asarray(hash_ids, np.int64).view(np.uint64)[:, np.newaxis]
    # Modulo 2**32, of which the low 31 bits are kept.
    tokens = ids.astype(np.uint32) * ID_STEP + _position_steps(block_size)
    high = ids >> TOKEN_BITS
    if np.count_nonzero(high):
        # Of two ids that are equal in their low 31 bits, only this tells.
        positions = np.arange(block_size, dtype=np.uint64)
        mixed = (high * HIGH_STEP) ^ (positions * HIGH_STEP + high)
        mixed ^= mixed >> np.uint64(29)
        mixed *= HIGH_STEP
        tokens += np.where(high > 0, mixed >> np.uint64(32), 0).astype(np.uint32)
    tokens &= TOKEN_MASK
    return tokens.view(np.int32).reshape(-1)[:n_tokens]


@cache
def _position_steps(block_size: int) -> NDArray[np.uint32]:
    """Return what the position in a block adds to its tokens."""
    steps = np.arange(block_size, dtype=np.uint32) * POSITION_STEP
    steps.flags.writeable = False
    return steps
