from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.block_manager import BlockManager

__all__ = [
    "block_table",
    "csr",
    "query_start_loc",
    "sequence_lengths",
    "slot_mapping",
    "table_width",
]

def block_table(
    manager: BlockManager,
    rows: NDArray[np.int32],
    out: NDArray[Any],
    /,
    *,
    lengths: NDArray[np.int32] | None = None,
    pad: SupportsIndex = 0,
    scale: SupportsIndex = 1,
    expand: SupportsIndex = 1,
) -> int: ...
def table_width(
    manager: BlockManager,
    max_tokens: SupportsIndex,
    /,
    *,
    lookahead: SupportsIndex = 0,
    expand: SupportsIndex = 1,
    multiple_of: SupportsIndex = 1,
) -> int: ...
def csr(
    manager: BlockManager,
    rows: NDArray[np.int32],
    indptr: NDArray[np.int32],
    indices: NDArray[np.int32],
    /,
    *,
    last_page_len: NDArray[np.int32] | None = None,
    kv_len: NDArray[np.int32] | None = None,
    lengths: NDArray[np.int32] | None = None,
    expand: SupportsIndex = 1,
) -> int: ...
def slot_mapping(
    manager: BlockManager,
    rows: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    out: NDArray[Any],
    /,
) -> int: ...
def query_start_loc(counts: NDArray[np.int32], out: NDArray[np.int32], /) -> int: ...
def sequence_lengths(
    manager: BlockManager,
    rows: NDArray[np.int32],
    out: NDArray[np.int32],
    /,
    *,
    counts: NDArray[np.int32] | None = None,
) -> int: ...
