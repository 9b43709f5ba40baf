"""The README's programs run as they stand there, the loop on an engine that records its calls."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcore import BlockManager, Media, Namespace
from kvcore.content_ids import ContentStored

README = Path(__file__).parent.parent / "README.md"
PREFIX_SHARING = README.parent / "docs" / "prefix-sharing.md"


def programs(page: Path = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_engine_loop_runs_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve requests that need more than the pool: preempted, recomputed, all finished."""
    code, _ = programs()
    prefilled: list[tuple[str, int]] = []
    decoded: list[int] = []
    engine = ModuleType("my_engine")
    vars(engine).update(
        copy_block=lambda src, dst: None,
        prefill=lambda seq, slots: prefilled.append((seq, len(set(slots.tolist())))),
        decode=lambda slots, tables, lengths: decoded.append(len(set(slots.tolist()))),
    )
    monkeypatch.setitem(sys.modules, "my_engine", engine)
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)

    assert sum(decoded) == 12 * 60
    assert {seq for seq, _ in prefilled} == set(names["to_generate"])  # type: ignore[call-overload]
    assert any(n_tokens > 100 for _, n_tokens in prefilled), "nobody was preempted"
    assert names["bm"].pool.num_used == 0  # type: ignore[attr-defined]


def test_the_example_of_prefix_sharing_runs_and_leaves_what_it_says() -> None:
    _, code = programs()
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)

    pool = names["bm"].pool
    names["bm"].check()
    assert pool.num_used == 0
    assert pool.num_evictable == 4


def test_the_examples_of_the_page_on_prefix_sharing_run() -> None:
    bm = BlockManager(100, 16, prefix_caching=True)
    index = bm.pool.index
    assert index is not None
    index.start_log()
    names: dict[str, Any] = {
        "bm": bm,
        "seq": "a",
        "tokens": list(range(300)),
        "tenant_secret": b"secret",
        "sha256_of_the_picture": bytes(32),
        "Media": Media,
        "Namespace": Namespace,
    }
    allocate, follow = programs(PREFIX_SHARING)
    exec(compile(allocate, str(PREFIX_SHARING), "exec"), names)
    bm.commit("a")
    exec(compile(follow, str(PREFIX_SHARING), "exec"), names)

    stored = [event for event in names["events"] if isinstance(event, ContentStored)]
    assert len(stored) == 300 // 16
    named = names["ids"].ids_of(names["tokens"], namespace=names["namespace"], media=names["media"])
    assert [event.id for event in stored] == named
