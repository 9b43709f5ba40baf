from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self, SupportsIndex, final, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcore.eviction import Retention
from kvcore.gauges import Gauges
from kvcore.identity import Media, Namespace
from kvcore.pool import BlockPool, EvictionPolicy
from kvcore.prefix_index import PrefixIndex, Prompt
from kvcore.prefix_pin import PrefixPin
from kvcore.views import FreeBlocks, Lengths, Tables

__all__ = ["AllocationPlan", "AppendPlan", "BlockManager", "BlockTable"]

class AppendPlan(NamedTuple):
    needed: int
    available: int
    coming: int

class AllocationPlan(NamedTuple):
    cached_tokens: int
    needed: int
    available: int

@final
class BlockTable:
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[int]: ...
    def __contains__(self, block: object, /) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]: ...
    def tolist(self) -> list[int]: ...

@final
class BlockManager:
    def __new__(
        cls,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex,
        *,
        pool: BlockPool | None = None,
        rows: SupportsIndex = 64,
        columns: SupportsIndex = 64,
        prefix_caching: bool = False,
        eviction: EvictionPolicy | None = None,
        merge_duplicates: bool = False,
        pin_quota: SupportsIndex | None = None,
    ) -> Self: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_available(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def pool(self) -> BlockPool: ...

    # ------------------------------------------------------------ sequences
    @overload
    def allocate(
        self,
        seq: Hashable,
        n_tokens: SupportsIndex | None = None,
        /,
        *,
        tokens: Any = None,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
        retention: Iterable[Retention] = (),
        resumed: bool = False,
        partial_hit: Literal[False] = False,
    ) -> int: ...
    @overload
    def allocate(
        self,
        seq: Hashable,
        n_tokens: SupportsIndex | None = None,
        /,
        *,
        tokens: Any = None,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
        retention: Iterable[Retention] = (),
        resumed: bool = False,
        partial_hit: Literal[True],
    ) -> tuple[int, tuple[int, int, int] | None]: ...
    def plan_allocate(
        self,
        n_tokens: SupportsIndex | None = None,
        /,
        *,
        tokens: Any = None,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
        retention: Iterable[Retention] = (),
    ) -> AllocationPlan: ...
    def can_allocate(
        self,
        n_tokens: SupportsIndex | None = None,
        /,
        watermark: SupportsIndex = 0,
        *,
        tokens: Any = None,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
    ) -> bool: ...
    def append_slot(self, seq: Hashable, /) -> tuple[int, int, int | None]: ...
    def append_slots(
        self, seq: Hashable, n_tokens: SupportsIndex, /
    ) -> tuple[NDArray[np.int64], tuple[int, int] | None]: ...
    def append_batch(
        self,
        rows: NDArray[np.int32],
        out: NDArray[np.int64],
        counts: NDArray[np.int32] | None = None,
        /,
    ) -> tuple[int, NDArray[np.int32] | None]: ...
    def plan_append(
        self,
        rows: NDArray[np.int32],
        /,
        counts: NDArray[np.int32] | None = None,
        without: NDArray[np.int32] | None = None,
    ) -> AppendPlan: ...
    def can_append(self, seq: Hashable, n_tokens: SupportsIndex = 1, /) -> bool: ...
    def truncate(self, seq: Hashable, n_tokens: SupportsIndex, /) -> None: ...
    def truncate_batch(self, rows: NDArray[np.int32], lengths: NDArray[np.int32], /) -> None: ...
    def release_outside_window(
        self,
        rows: NDArray[np.int32],
        lengths: NDArray[np.int32],
        window: SupportsIndex,
        sinks: SupportsIndex = 0,
        /,
    ) -> int: ...
    def exclusive_blocks(self, seq: Hashable, /) -> NDArray[np.int32]: ...
    def restore(
        self,
        seq: Hashable,
        n_tokens: SupportsIndex,
        /,
        columns: ArrayLike,
        blocks: ArrayLike,
        *,
        tokens: Prompt | None = None,
    ) -> NDArray[np.int32]: ...
    def fork(
        self, parent: Hashable, child: Hashable, /, n_tokens: SupportsIndex | None = None
    ) -> None: ...
    def reorder(self, seqs: Sequence[Hashable], parents: Sequence[Hashable], /) -> None: ...
    def free_seq(self, seq: Hashable, /) -> None: ...

    # ------------------------------------------------------------ prefixes
    def prompt(
        self,
        tokens: Any,
        /,
        *,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
    ) -> Prompt: ...
    def prompt_of(self, seq: Hashable, /) -> Prompt: ...
    def match(
        self,
        tokens: Any,
        /,
        *,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
    ) -> int: ...
    def commit(
        self, seq: Hashable, tokens: Any = None, /, *, n_settled: SupportsIndex | None = None
    ) -> int: ...
    def token_ids(self, tokens: Any, /) -> NDArray[np.int32]: ...
    def commit_batch(self, rows: NDArray[np.int32], tokens: Any, /) -> int: ...
    def commit_pending(
        self,
        rows: NDArray[np.int32],
        pending: NDArray[np.int32],
        sampled: NDArray[np.int32] | None = None,
        /,
    ) -> int: ...
    def known(self, seq: Hashable, /) -> int: ...
    def published(self, seq: Hashable, /) -> int: ...
    def tokens(self, seq: Hashable, /) -> NDArray[np.int32]: ...
    def retention(self, seq: Hashable, /) -> tuple[Retention, ...]: ...
    def reset(self) -> list[int]: ...
    @property
    def epoch(self) -> int: ...
    def set_epoch(self, epoch: SupportsIndex, /) -> list[int]: ...
    def forget(
        self,
        tokens: Any,
        /,
        *,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
    ) -> int: ...
    def evict(self, count: SupportsIndex, /) -> int: ...
    def pin_prefix(
        self,
        tokens: Any,
        /,
        *,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
    ) -> PrefixPin: ...
    def _release_prefix(self, blocks: tuple[int, ...], /) -> None: ...
    @property
    def prefix_caching(self) -> bool: ...
    @property
    def prefix_index(self) -> PrefixIndex | None: ...

    # ------------------------------------------------------------ holders
    def pin(self, block: SupportsIndex, /) -> None: ...
    def unpin(self, block: SupportsIndex, /) -> None: ...
    def fence(self) -> int: ...
    def settle(self, step: SupportsIndex, /) -> int: ...

    # ------------------------------------------------------------ reading
    def __contains__(self, seq: object, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Hashable]: ...
    def length(self, seq: Hashable, /) -> int: ...
    def table(self, seq: Hashable, /) -> BlockTable: ...
    def row(self, seq: Hashable, /) -> int: ...
    def rows(self, seqs: Sequence[Hashable], /) -> NDArray[np.int32]: ...
    def lengths_of(self, rows: NDArray[np.int32], /) -> NDArray[np.int32]: ...
    def slots(
        self, seq: Hashable, /, start: SupportsIndex = 0, stop: SupportsIndex | None = None
    ) -> NDArray[np.int64]: ...
    @property
    def tables(self) -> Tables: ...
    @property
    def lens(self) -> Lengths: ...
    @property
    def free(self) -> FreeBlocks: ...
    @property
    def ref(self) -> NDArray[np.int32]: ...
    @property
    def block_tables(self) -> NDArray[np.int32]: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def table_generation(self) -> int: ...
    @property
    def rows_version(self) -> int: ...
    @property
    def counters(self) -> NDArray[np.int64]: ...
    def drain_changes(self) -> NDArray[np.int32]: ...
    def gauges(self) -> Gauges: ...
    def check(self) -> None: ...
