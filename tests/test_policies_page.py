"""The policies that docs/policies.md shows run as they stand there."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "policies.md"


def test_the_three_policies_of_the_page_serve_everybody_chat_first() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)

    ended, scheduler = names["ended"], names["scheduler"]
    assert sorted(ended) == list(range(24))
    assert all(seq % 3 == 0 for seq in ended[:4])
    assert scheduler.counters.preemptions_recompute > 0
    assert scheduler.bm.pool.num_used == 0
