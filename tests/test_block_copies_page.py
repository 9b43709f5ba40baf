"""The example of docs/block-copies.md runs as it stands there."""

import re
from pathlib import Path
from typing import Any

from kvcore import planes

PAGE = Path(__file__).parent.parent / "docs" / "block-copies.md"


def test_the_example_carries_every_token_through_forks_and_swaps() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["copied"] == 6  # one for each prompt that is sampled twice
    assert names["swapped"] > 6
    assert names["bm"].pool.num_used == 0
    assert names["host_bm"].pool.num_used == 0


def test_the_page_names_every_layout() -> None:
    layouts = {name for name, value in vars(planes).items() if isinstance(value, planes.Layout)}
    assert layouts
    assert layouts <= set(re.findall(r"`(\w+)`", PAGE.read_text()))
