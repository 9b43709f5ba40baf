"""What do kernels' tables and slots cost, written from the manager's into the engine's arrays?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.extensions import load
from bench.harness import Contender, Row, Target
from bench.workload import BLOCK_SIZE, phases, set_free_order, shuffled
from kvcore import BlockManager, kernel_metadata

__all__ = ["rows"]

NUM_SEQS = 256
BLOCKS = 512
"""Blocks of each sequence: 8,192 tokens."""
POOL = 2 * NUM_SEQS * BLOCKS
CALLS = range(4)
CHUNK = 512

ELEMENT_TARGET = Target.ns(must=1)


def batch(window: int = 0) -> tuple[BlockManager, NDArray[np.int32]]:
    """256 sequences of 512 blocks that lie anywhere in the pool, and their rows."""
    manager = BlockManager(POOL, BLOCK_SIZE, rows=NUM_SEQS, columns=BLOCKS)
    set_free_order(manager, shuffled(POOL))
    for seq, tokens in enumerate(phases(NUM_SEQS, (BLOCKS - 1) * BLOCK_SIZE + 1)):
        manager.allocate(seq, min(tokens, BLOCKS * BLOCK_SIZE))
    batch_rows = manager.rows(range(NUM_SEQS))
    if window:
        manager.release_outside_window(
            batch_rows, manager.lengths_of(batch_rows), window, BLOCK_SIZE
        )
    return manager, batch_rows


def same(name: str, written: NDArray[Any], expected: NDArray[Any]) -> None:
    """Fail unless what was timed wrote what it should."""
    if not np.array_equal(written, expected):
        raise AssertionError(f"{name} wrote something else")


def compressed_rows(window: int) -> Mapping[str, Contender]:
    """``csr``, and numpy's concatenation of the rows of the same slab."""
    manager, batch_rows = batch(window)
    tables = [manager.block_tables[row, :BLOCKS] for row in batch_rows]
    joined = np.concatenate([table[table >= 0] for table in tables])
    pages = len(joined)
    names = {
        "csr": kernel_metadata.csr,
        "manager": manager,
        "rows": batch_rows,
        "indptr": np.empty(NUM_SEQS + 1, np.int32),
        "indices": np.empty(pages, np.int32),
        "last": np.empty(NUM_SEQS, np.int32),
    }
    statement = "csr(manager, rows, indptr, indices, last_page_len=last)"
    floor = names | {"csr": load("floor").csr}
    concatenated = np.empty(pages, np.int32)
    parts = "[table[table >= 0] for table in tables]" if window else "tables"
    return {
        "kvcore": Contender(
            statement,
            "call in calls",
            names | {"calls": CALLS},
            operations=len(CALLS) * pages,
            verify=partial(same, "csr", names["indices"], joined),
        ),
        "no-op": Contender(
            statement, "call in calls", floor | {"calls": CALLS}, operations=len(CALLS) * pages
        ),
        "numpy": Contender(
            f"concatenate({parts}, out=indices)",
            "call in calls",
            {
                "concatenate": np.concatenate,
                "tables": tables,
                "indices": concatenated,
                "calls": CALLS,
            },
            operations=len(CALLS) * pages,
            verify=partial(same, "concatenate", concatenated, joined),
        ),
    }


def tables(dtype: Any, options: dict[str, int]) -> Mapping[str, Contender]:
    """``block_table``, and for plain int32 tables ``take`` from the same slab."""
    manager, batch_rows = batch()
    width = kernel_metadata.table_width(
        manager, BLOCKS * BLOCK_SIZE, expand=options.get("expand", 1)
    )
    out = np.empty((NUM_SEQS, width), dtype)
    contenders = {
        "kvcore": Contender(
            "block_table(manager, rows, out, **options)",
            "call in calls",
            {
                "block_table": kernel_metadata.block_table,
                "manager": manager,
                "rows": batch_rows,
                "out": out,
                "options": options,
                "calls": CALLS,
            },
            operations=len(CALLS) * out.size,
        )
    }
    if dtype is np.int32 and not options:
        slab = manager.block_tables[:, :BLOCKS]
        contenders["numpy"] = Contender(
            "take(slab, rows, 0, out)",
            "call in calls",
            {"take": np.take, "slab": slab, "rows": batch_rows, "out": out, "calls": CALLS},
            operations=len(CALLS) * out.size,
        )
    return contenders


def slots(count: int, dtype: Any) -> Mapping[str, Contender]:
    """``slot_mapping`` of the last ``count`` tokens of each row, and the same in numpy."""
    manager, batch_rows = batch()
    starts = manager.lengths_of(batch_rows) - count
    counts = np.full(NUM_SEQS, count, np.int32)
    tokens = NUM_SEQS * count
    names = {
        "slot_mapping": kernel_metadata.slot_mapping,
        "manager": manager,
        "rows": batch_rows,
        "starts": starts,
        "counts": counts,
        "out": np.empty(tokens, dtype),
    }
    statement = "slot_mapping(manager, rows, starts, counts, out)"

    def in_numpy() -> NDArray[Any]:
        positions = starts[:, None] + np.arange(count)
        blocks = manager.block_tables[batch_rows[:, None], positions // BLOCK_SIZE]
        found: NDArray[Any] = (blocks.astype(dtype) * BLOCK_SIZE + positions % BLOCK_SIZE).ravel()
        return found

    return {
        "kvcore": Contender(
            statement,
            "call in calls",
            names | {"calls": CALLS},
            operations=len(CALLS) * tokens,
            verify=partial(same, "slot_mapping", names["out"], in_numpy()),
        ),
        "no-op": Contender(
            statement,
            "call in calls",
            names | {"slot_mapping": load("floor").slot_mapping, "calls": CALLS},
            operations=len(CALLS) * tokens,
        ),
        "numpy": Contender(
            "in_numpy()",
            "call in calls",
            {"in_numpy": in_numpy, "calls": CALLS},
            operations=len(CALLS) * tokens,
        ),
    }


def rows() -> Iterator[Row]:
    """All rows of this file."""
    size = f"{NUM_SEQS} x {BLOCKS}"
    yield Row(f"csr, {size}, a page", partial(compressed_rows, 0), ELEMENT_TARGET)
    yield Row(f"csr, {size} with a window of half, a page", partial(compressed_rows, 4096))
    yield Row(f"block_table, {size}, a cell", partial(tables, np.int32, {}), ELEMENT_TARGET)
    for name, dtype, options in (
        ("int64", np.int64, {}),
        ("scaled", np.int32, {"scale": 64}),
        ("2 pages a block", np.int32, {"expand": 2}),
    ):
        yield Row(f"block_table, {size}, {name}, a cell", partial(tables, dtype, options))
    for name, dtype in (("int64", np.int64), ("int32", np.int32)):
        yield Row(
            f"slot_mapping, {NUM_SEQS} x {CHUNK}, {name}, a token",
            partial(slots, CHUNK, dtype),
            ELEMENT_TARGET,
        )
    yield Row(f"slot_mapping, {NUM_SEQS} x 1, a token", partial(slots, 1, np.int64))
