"""The README's engine loop runs as it stands there, on an engine that records its calls."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_engine_loop_runs_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve requests that need more than the pool: preempted, recomputed, all finished."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
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
