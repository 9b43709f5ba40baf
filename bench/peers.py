"""Other block managers, if they happen to be installed, as contenders in our rows."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from bench.harness import Contender

__all__ = ["absent", "allocate_or_free"]


def absent() -> list[str]:
    """Peers that are known here but not installed."""
    return [name for name in ("vllm",) if importlib.util.find_spec(name) is None]


def allocate_or_free(blocks: int, sequences: int, freeing: bool) -> Mapping[str, Contender]:
    """Take ``blocks`` from the peer's pool, or give them back, for each sequence.

    vLLM: its ``BlockPool`` without prefix caching, which is less than what it does for a
    request. A request's blocks are freed last first, as its manager does.
    """
    if absent():
        return {}
    pool_class = importlib.import_module("vllm.v1.core.block_pool").BlockPool
    arguments: dict[str, Any] = {
        "num_gpu_blocks": (sequences + 1) * blocks,
        "enable_caching": False,
        "hash_block_size": 16,
    }
    # hash_block_size came later; whatever the installed version does not know is left out.
    known = inspect.signature(pool_class).parameters
    pool = pool_class(**{name: value for name, value in arguments.items() if name in known})
    held: list[list[Any]] = []

    def prepare() -> None:
        while held:
            pool.free_blocks(reversed(held.pop()))
        if freeing:
            held.extend(pool.get_new_blocks(blocks) for _ in range(sequences))

    names = {"pool": pool, "held": held, "turns": range(sequences), "count": blocks}
    statement = (
        "pool.free_blocks(reversed(held.pop()))"
        if freeing
        else "held.append(pool.get_new_blocks(count))"
    )
    return {
        "vllm": Contender(statement, "_ in turns", names, operations=sequences, prepare=prepare)
    }
