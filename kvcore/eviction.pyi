from typing import NamedTuple, SupportsFloat, SupportsIndex

from typing_extensions import disjoint_base

from kvcore.pool import EvictionPolicy

__all__ = ["LRU", "Retention", "RetentionPriority", "SegmentedLRU"]

class LRU(EvictionPolicy): ...

@disjoint_base
class SegmentedLRU(EvictionPolicy):
    def __new__(cls, protected: float = 0.25) -> SegmentedLRU: ...
    @property
    def protected(self) -> float: ...

class Retention(NamedTuple):
    start: int
    stop: int | None
    priority: int
    duration: float | None = None

@disjoint_base
class RetentionPriority(EvictionPolicy):
    def __new__(cls, default: SupportsIndex = 35) -> RetentionPriority: ...
    @property
    def default(self) -> int: ...
    @property
    def now(self) -> float: ...
    def advance(self, now: SupportsFloat, /) -> int: ...
