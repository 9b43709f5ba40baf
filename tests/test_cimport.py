"""The C interface, as a user's own extension sees it: compiled against what is imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Hashable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import kvcore
from kvcore import BlockManager

pytestmark = [
    pytest.mark.skipif(
        shutil.which((sysconfig.get_config_var("CC") or "cl").split()[0]) is None,
        reason="there is no C compiler",
    ),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("Cython", "setuptools")),
        reason="Cython or setuptools is not installed",
    ),
]

CONSUMER = """
# cython: language_level=3, freethreading_compatible=True
from libc.stdint cimport int32_t, int64_t

from kvcore.block_manager cimport BlockManager, append_row, available, reserve, row_of
from kvcore.pool cimport BlockPool, available_blocks


def append(BlockManager manager, seq, int32_t n_tokens):
    \"\"\"Up to 64 tokens by a loop without the GIL: slots, and pairs to copy.\"\"\"
    cdef int64_t[64] slots
    cdef int32_t[64] sources
    cdef int32_t row = row_of(manager, seq)
    cdef int32_t served = 0
    reserve(manager, row, n_tokens)
    with nogil:
        while served < n_tokens:
            slots[served] = append_row(manager, row, &sources[served])
            if slots[served] < 0:
                break
            served += 1
    return [slots[i] for i in range(served)], [
        (sources[i], slots[i] // manager.block_size) for i in range(served) if sources[i] >= 0
    ]


def available_twice(BlockManager manager):
    cdef BlockPool pool = manager.pool
    return available(manager), available_blocks(&pool.state)
"""

BUILD = """
import sys
import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

extension = Extension("consumer", ["consumer.pyx"], include_dirs=[numpy.get_include()])
setup(name="consumer", ext_modules=cythonize([extension], include_path=[sys.argv.pop()]))
"""


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("consumer")
    (folder / "consumer.pyx").write_text(CONSUMER)
    (folder / "build.py").write_text(BUILD)
    where_kvcore_is = Path(kvcore.__file__).parents[1]
    process = subprocess.run(
        [sys.executable, "build.py", "build_ext", "--inplace", where_kvcore_is],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    path = folder / f"consumer{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location("consumer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def two_managers(num_blocks: int, block_size: int) -> tuple[BlockManager, BlockManager]:
    """Two in the same state: parent and child share a partial block."""
    managers = BlockManager(num_blocks, block_size), BlockManager(num_blocks, block_size)
    for bm in managers:
        bm.allocate("parent", 6)
        bm.fork("parent", "child")
    return managers


def append_in_python(
    bm: BlockManager, seq: Hashable, n_tokens: int
) -> tuple[list[int], list[tuple[int, int]]]:
    slots = []
    copies = []
    for _ in range(n_tokens):
        try:
            block, offset, source = bm.append_slot(seq)
        except kvcore.OutOfBlocks:
            break
        slots.append(block * bm.block_size + offset)
        if source is not None:
            copies.append((source, block))
    return slots, copies


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_blocks", [13, 100])
def test_a_loop_in_c_does_what_the_python_calls_do(
    consumer: ModuleType, num_blocks: int, block_size: int
) -> None:
    """Same slots, copies and tables, also where the blocks run out half way."""
    in_c, in_python = two_managers(num_blocks, block_size)
    for seq in ("child", "parent", "child"):
        assert consumer.append(in_c, seq, 40) == append_in_python(in_python, seq, 40)
        assert in_c.tables[seq] == in_python.tables[seq].tolist()
        assert in_c.lens[seq] == in_python.lens[seq]
        np.testing.assert_array_equal(in_c.ref, in_python.ref)
        in_c.check()


def test_a_copy_in_c_is_held_back_by_the_fence(consumer: ModuleType) -> None:
    """While a step is in flight, the block that a copy left is not given out again."""
    in_c, in_python = two_managers(8, 4)
    for bm in (in_c, in_python):
        assert bm.fence() == 1
    assert consumer.append(in_c, "child", 1) == append_in_python(in_python, "child", 1)
    assert in_c.gauges() == in_python.gauges()
    assert in_c.gauges().fenced == 1
    in_c.check()
    assert in_c.settle(1) == in_python.settle(1) == 1
    in_c.check()


def test_a_loop_in_c_never_writes_into_what_others_can_find(consumer: ModuleType) -> None:
    """Back into a published block and on: copied if it is shared, else its identity goes."""
    in_c, in_python = (BlockManager(20, 4, prefix_caching=True) for _ in range(2))
    tokens = list(range(8))
    for bm in (in_c, in_python):
        bm.allocate("alone", tokens=tokens)
        bm.commit("alone")
    # The last block by its only holder: nobody finds it any more.
    for bm in (in_c, in_python):
        bm.truncate("alone", 6)
        assert bm.match([*tokens, 9]) == 8
    assert consumer.append(in_c, "alone", 1) == append_in_python(in_python, "alone", 1)
    for bm in (in_c, in_python):
        assert bm.match([*tokens, 9]) == 4
        bm.commit("alone", [60])
        bm.check()
    # The first block, which another has hit: it stays, and the writer moves.
    for bm in (in_c, in_python):
        assert bm.allocate("other", tokens=[0, 1, 2, 3, 50]) == 4
        bm.truncate("alone", 2)
    assert consumer.append(in_c, "alone", 6) == append_in_python(in_python, "alone", 6)
    for bm in (in_c, in_python):
        assert bm.tables["alone"][0] != bm.tables["other"][0]
        assert bm.match([*tokens, 9]) == 4
        bm.commit("alone", [80, 81, 82, 83, 84, 85])
        assert bm.match([0, 1, 80, 81, 82, 83, 84, 85, 9]) == 8
        bm.check()
    assert in_c.tables["alone"] == in_python.tables["alone"].tolist()
    assert in_c.gauges() == in_python.gauges()


def test_a_loop_in_c_grows_a_table_with_holes_past_the_blocks_of_the_pool(
    consumer: ModuleType,
) -> None:
    """A window of one token: 1,000 columns, of which it holds at most 5 blocks at a time."""
    bm = BlockManager(5, 1, columns=1)
    bm.allocate("a", 1)
    while bm.lens["a"] < 1_000:
        bm.release_outside_window(bm.rows(["a"]), bm.lengths_of(bm.rows(["a"])), 1)
        slots, copies = consumer.append(bm, "a", 6)
        assert (len(slots), copies) == (5, [])
        assert bm.slots("a", bm.lens["a"] - 5).tolist() == slots
    bm.check()


def test_errors_cross_the_c_interface(consumer: ModuleType) -> None:
    with pytest.raises(KeyError, match="nobody"):
        consumer.append(BlockManager(4, 4), "nobody", 1)


def test_c_sees_the_same_pool(consumer: ModuleType) -> None:
    bm = BlockManager(10, 4)
    bm.allocate("a", 9)
    assert consumer.available_twice(bm) == (7, 7)
    bm.pin(0)
    bm.free_seq("a")
    assert consumer.available_twice(bm) == (9, 9)
