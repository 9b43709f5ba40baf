"""Where the results of a command go: JSON, a picture, standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore.cli_options import UsageError

__all__ = ["add_json", "add_plot", "check_outputs", "is_drawn", "write_json"]


def add_json(output: argparse._ArgumentGroup) -> None:
    """Add ``--json``."""
    output.add_argument(
        "--json", metavar="FILE", help="write the numbers as JSON; - for standard output"
    )


def add_plot(output: argparse._ArgumentGroup, what: str) -> None:
    """Add ``--plot``, which draws ``what``."""
    output.add_argument("--plot", type=_plot_path, metavar="FILE", help=f"{what}: .png, .svg, .pdf")


def check_outputs(*paths: str | None) -> None:
    """Find out before the work whether its results can be written. ``UsageError``."""
    for path in paths:
        if path not in (None, "-") and not Path(path).parent.is_dir():
            raise UsageError(f"{path}: there is no such directory")


def write_json(document: Any, path: str | None) -> None:
    """Write it where ``--json`` says, if it says so."""
    if path is None:
        return
    text = json.dumps(document, indent=2)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")


def is_drawn(draw: Callable[[], None], path: str) -> bool:
    """Draw a picture into ``path``; False, and a line that says why, without matplotlib."""
    try:
        draw()
    except ImportError as error:
        print(f"kvcore: {path} was not drawn: {error}", file=sys.stderr)
        return False
    return True


def _plot_path(text: str) -> str:
    suffixes = (".png", ".svg", ".pdf")
    if text.endswith(suffixes):
        return text
    raise argparse.ArgumentTypeError(
        f"expected a name that ends in {', '.join(suffixes)}, found {text!r}"
    )
