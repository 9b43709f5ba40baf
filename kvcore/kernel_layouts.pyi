from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.block_manager import BlockManager

__all__ = ["flex_tables", "ragged", "slices", "trtllm_offsets", "window_info"]

def slices(
    manager: BlockManager,
    rows: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    out: NDArray[np.int32],
    /,
) -> int: ...
def trtllm_offsets(
    manager: BlockManager,
    rows: NDArray[np.int32],
    out: NDArray[np.int32],
    /,
    *,
    layers: SupportsIndex,
    lengths: NDArray[np.int32] | None = None,
    secondary: bool = False,
) -> int: ...
def ragged(
    manager: BlockManager,
    rows: NDArray[np.int32],
    counts: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    page_indices: NDArray[np.int32],
    cu_q_lens: NDArray[np.int32],
    /,
    *,
    num_seqs: NDArray[np.int32] | None = None,
    distribution: NDArray[np.int32] | None = None,
    chunk_prefill_size: SupportsIndex | None = None,
    lengths: NDArray[np.int32] | None = None,
) -> int: ...
def flex_tables(
    manager: BlockManager,
    rows: NDArray[np.int32],
    page_table: NDArray[np.int64],
    physical_to_logical: NDArray[np.int64],
    /,
    *,
    lengths: NDArray[np.int32] | None = None,
) -> int: ...
def window_info(
    manager: BlockManager,
    rows: NDArray[np.int32],
    out: NDArray[np.int32],
    window: SupportsIndex,
    sinks: SupportsIndex = 0,
    /,
    *,
    lengths: NDArray[np.int32] | None = None,
) -> int: ...
