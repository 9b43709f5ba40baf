from typing import NamedTuple


class SwapCandidate(NamedTuple):
    request: object
    n_tokens: int
    private_blocks: int
