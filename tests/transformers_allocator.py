"""The cache of transformers' continuous batching, with a BlockManager that decides on its blocks.

Written for transformers 5.24; docs/other-engines.md says what fits and what does not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
)

from kvcore import BlockManager


class ShiftedTables(Mapping[str, list[int]]):
    """Block tables of a manager as lists, with the blocks in front of its own counted in."""

    def __init__(self, manager: BlockManager, shift: int) -> None:
        self.manager = manager
        self.shift = shift

    def __getitem__(self, request: str) -> list[int]:
        return [block + self.shift for block in self.manager.table(request)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.manager)

    def __len__(self) -> int:
        return len(self.manager)


class BlockManagerAllocator(FullAttentionCacheAllocator):
    """Full attention whose blocks a BlockManager hands out; what to read and write is inherited."""

    def _after_cache_tensor_init(
        self,
        non_trash_bytes: int,
        bytes_per_sector: int,
        cache_tensor: torch.Tensor,
        pool: CachePool,
    ) -> None:
        if pool.num_allocators != 1:
            raise ValueError(f"one allocator must have all the memory, not {pool.num_allocators}")
        super()._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.manager = BlockManager(
            self.num_blocks,
            self.tokens_per_page,
            prefix_caching=self.use_block_sharing,
            merge_duplicates=self.use_block_sharing,
        )
        # Padding reads the first sector and writes the second one; the manager's blocks follow.
        self.shift = 2 * self.blocks_per_sector
        self.block_table = ShiftedTables(self.manager, self.shift)
        # The cache asks the pool what is free, and the ledger to evict. No sector is left to hand
        # out. The ledger stays empty: the manager evicts when it has to, one block at a time.
        pool.free_sectors.clear()
        pool.count_free_blocks = lambda index: self.manager.num_available
        pool.reset = lambda: None
        self.ledger.reset = self.manager.reset

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        length = past_length + query_length
        if request_id not in self.manager:
            return self.manager.plan_allocate(length).needed
        count = length - self.manager.length(request_id)
        rows = self.manager.rows([request_id])
        return self.manager.plan_append(rows, np.array([count], np.int32)).needed

    def allocate_cache_to_request(
        self, request_id: str, past_length: int, query_length: int
    ) -> None:
        length = past_length + query_length
        if request_id not in self.manager:
            self.manager.allocate(request_id, length)
            return
        count = length - self.manager.length(request_id)
        _, copy = self.manager.append_slots(request_id, count)
        if copy is not None:
            source, destination = copy
            self.copy_blocks([source + self.shift], [destination + self.shift])

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        # What stays cached is as available as what is free, so no_cache has nothing to add.
        if request_id in self.manager:
            self.manager.free_seq(request_id)

    def count_non_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        return 0

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        # The source may have the slot of its last token already, which waits for the fork.
        self.manager.truncate(source_request_id, past_length)
        self.manager.fork(source_request_id, dest_request_id)
        return [], []  # a partial block is copied by whoever appends to it first

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[list[int]]:
        # The cache hands what it gets here to acquire_prefix_blocks, which needs the tokens.
        cached = self.manager.match(prompt_ids)
        prefix = prompt_ids[: cached + 1]
        if not self.manager.can_allocate(tokens=prefix):
            return []
        return [prefix] * (cached // self.tokens_per_page)

    def acquire_prefix_blocks(
        self, request_id: str, prefix_len: int, block_ids: list[list[int]]
    ) -> None:
        self.manager.allocate(request_id, tokens=block_ids[0])
        self.manager.truncate(request_id, prefix_len)

    def mark_complete_blocks(
        self, request_id: str, token_ids: list[int], new_new_blocks: int
    ) -> None:
        start = self.manager.known(request_id)
        stop = start + new_new_blocks * self.tokens_per_page
        self.manager.commit(request_id, token_ids[start:stop])
