from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

__all__ = ["peak_blocks"]

def peak_blocks(
    lengths: NDArray[np.int64], left: NDArray[np.int64], block_size: SupportsIndex, /
) -> int: ...
