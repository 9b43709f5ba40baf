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


class RecordingEngine(ModuleType):
    """A model that writes its tokens into a dict of slots, and samples from what it reads."""

    END = 7

    def __init__(self) -> None:
        super().__init__("my_engine")
        self.memory: dict[int, int] = {}
        self.prefilled: list[int] = []
        self.decoded = 0

    def copy_blocks(self, copies: Any) -> None:
        old = dict(self.memory)
        for src, dst in copies.tolist():
            for offset in range(16):
                if src * 16 + offset in old:
                    self.memory[dst * 16 + offset] = old[src * 16 + offset]

    def read(self, table: Any, length: int) -> int:
        """A next token that depends on every token before it."""
        text = 0
        for i in range(length):
            text = (31 * text + self.memory[int(table[i // 16]) * 16 + i % 16]) % 10_007
        return 1_000 + text

    def forward(
        self, chunks: Any, last_tokens: list[int], slots: Any, tables: Any, lengths: Any
    ) -> list[int]:
        self.memory.update(zip(slots.tolist(), last_tokens, strict=True))
        self.decoded += len(last_tokens)
        ends = []
        for tokens, places, table in chunks:
            assert len(tokens) == len(places)
            self.memory.update(zip(places.tolist(), tokens, strict=True))
            self.prefilled.append(len(tokens))
            ends.append((table, list(places)))
        sampled = [self.read(table, n) for table, n in zip(tables, lengths.tolist(), strict=True)]
        # Which prompts are complete the scheduler says; the loop zips only those.
        for table, places in ends:
            last = places[-1]
            length = 16 * list(table).index(last // 16) + last % 16 + 1
            if length == self.lengths(table):
                sampled.append(self.read(table, length))
        return sampled

    def lengths(self, table: Any) -> int:
        return next(
            int(length)
            for seq, length in self.bm.lens.items()
            if self.bm.tables[seq].tolist() == table.tolist()
        )


def test_the_engine_loop_runs_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve requests that need more than the pool: preempted, recomputed, all finished.

    What each generates depends on all that it reads, so it is what it would be alone.
    """
    code, _ = programs()
    engine = RecordingEngine()
    monkeypatch.setitem(sys.modules, "my_engine", engine)
    names: dict[str, Any] = {}
    before, after = code.split("\nwhile ")
    exec(compile(before, str(README), "exec"), names)
    engine.bm = names["bm"]
    exec(compile("while " + after, str(README), "exec"), names)

    assert names["scheduler"].counters.finished == 12
    assert names["scheduler"].counters.preemptions_recompute > 0, "nobody was preempted"
    assert max(engine.prefilled) <= 256
    assert names["bm"].pool.num_used == 0
    for seq, text in names["texts"].items():
        first = int(seq.split()[1])
        assert text[:100] == list(range(first, first + 100))
        assert len(text) == 160
        alone = RecordingEngine()
        alone.memory.update(enumerate(text))
        table = range(10)
        assert text[100:] == [alone.read(table, length) for length in range(100, 160)]


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
