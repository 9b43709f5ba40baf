"""The examples of docs/kernel-metadata.md run as they stand there."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from kvcore import BlockManager

PAGE = Path(__file__).parent.parent / "docs" / "kernel-metadata.md"


def codes() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_step_of_the_page_reads_back_every_token() -> None:
    names: dict[str, Any] = {}
    exec(compile(codes()[1], str(PAGE), "exec"), names)
    assert names["steps"] > 40
    assert {len(text) for text in names["texts"].values()} == {90}
    assert names["bm"].pool.num_used == 0


def test_the_runs_of_the_page_say_what_the_cells_say() -> None:
    bm = BlockManager(100, 4)
    bm.allocate("a", 20)
    bm.allocate("b", 9)
    bm.drain_changes()
    bm.append_slots("b", 1)
    bm.allocate("c", 7)
    bm.append_slots("a", 8)
    bm.release_outside_window(bm.rows(["a"]), np.array([20], np.int32), 9)
    bm.fork("a", "d")
    names: dict[str, Any] = {"bm": bm, "np": np}
    exec(compile(codes()[0], str(PAGE), "exec"), names)
    unrolled = [
        (row, start + i) for row, start, count in names["runs"].tolist() for i in range(count)
    ]
    cells = [(row, column) for row, column, _ in names["changes"].tolist()]
    assert unrolled == cells
    assert [run[2] for run in names["runs"].tolist()] == [7, 2, 7]
