from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_batch"]

def check_batch(
    pairs: NDArray[np.int32],
    num_sources: SupportsIndex,
    num_destinations: SupportsIndex,
    is_one_pool: bool,
    /,
) -> None: ...
