"""What all plots have in common: how they look, and that they need matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FRAME", "INK", "styled_figure"]

INK = "#30343b"
FRAME = "#b8bec7"


@contextmanager
def styled_figure(
    width: float, height: float, style: Mapping[str, Any] | None = None
) -> Iterator[Figure]:
    """Yield an empty figure of so many inches, to be drawn and saved inside.

    ``style`` has further settings of matplotlib.

    Raises
    ------
    ImportError
        matplotlib is not installed; the message says how to get it.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib: pip install kvcore[plot]", name=error.name
        ) from error
    common: dict[Any, Any] = {
        "axes.edgecolor": FRAME, "axes.labelcolor": INK, "axes.spines.right": False,
        "axes.spines.top": False, "font.size": 10, "legend.frameon": False, "text.color": INK,
        "xtick.color": INK, "ytick.color": INK,
    }  # fmt: skip
    with rc_context(common | dict(style or {})):
        yield Figure(figsize=(width, height), layout="constrained")
