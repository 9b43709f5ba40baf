from typing import NamedTuple, SupportsFloat, SupportsIndex

from kvcore.pool import EvictionPolicy

__all__ = ["LRU", "Retention", "RetentionPriority", "SegmentedLRU"]

class LRU(EvictionPolicy): ...

class SegmentedLRU(EvictionPolicy):
    def __new__(cls, protected: float = 0.25) -> SegmentedLRU: ...
    @property
    def protected(self) -> float: ...

class Retention(NamedTuple):
    start: int
    stop: int | None
    priority: int
    duration: float | None = None

class RetentionPriority(EvictionPolicy):
    def __new__(cls, default: SupportsIndex = 35) -> RetentionPriority: ...
    @property
    def default(self) -> int: ...
    @property
    def now(self) -> float: ...
    def advance(self, now: SupportsFloat, /) -> int: ...
