"""Read-only views of a manager under the names of the problem statement.

``bm.tables[seq]``, ``bm.lens[seq]`` and ``bm.free`` read like the dict, dict and
deque of the textbook listing. They hold no state: each look goes to the manager.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from operator import index
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from kvcore.block_manager import BlockManager, BlockTable

__all__ = ["FreeBlocks", "Lengths", "Tables"]


Value = TypeVar("Value")


class _BySequence(Mapping[Hashable, Value]):
    """The live sequences as keys."""

    __slots__ = ("_manager",)

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._manager)

    def __len__(self) -> int:
        return len(self._manager)

    def __contains__(self, seq: object) -> bool:
        return seq in self._manager


class Tables(_BySequence["BlockTable"]):
    """Live sequences and their block tables."""

    __slots__ = ()

    def __getitem__(self, seq: Hashable) -> BlockTable:
        return self._manager.table(seq)

    def __repr__(self) -> str:
        return repr({seq: table.tolist() for seq, table in self.items()})


class Lengths(_BySequence[int]):
    """Live sequences and their numbers of tokens."""

    __slots__ = ()

    def __getitem__(self, seq: Hashable) -> int:
        return self._manager.length(seq)

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class FreeBlocks(Collection[int]):
    """The free blocks: ``len`` and ``in`` in O(1), iteration in hand-out order."""

    __slots__ = ("_manager",)

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def __iter__(self) -> Iterator[int]:
        return iter(self._manager.pool.free_blocks().tolist())

    def __len__(self) -> int:
        return self._manager.pool.num_free

    def __contains__(self, block: object) -> bool:
        pool = self._manager.pool
        try:
            number = index(block)  # type: ignore[arg-type]
        except TypeError:
            return False
        return 0 <= number < pool.num_blocks and pool.ref[number] == 0 and not pool.is_kept(number)

    def __repr__(self) -> str:
        return repr(list(self))
