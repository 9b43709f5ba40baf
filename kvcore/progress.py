"""A progress bar on a terminal."""

from __future__ import annotations

from time import monotonic
from typing import TextIO

__all__ = ["ProgressBar"]


class ProgressBar:
    """Draws how many requests are done, once the work has lasted half a second.

    Call it with the requests done and the requests in all; ``clear`` removes it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = monotonic()
        self._next = self._start + 0.5
        self._drawn = 0

    def __call__(self, done: int, total: int) -> None:
        """Draw, if the last drawing is a tenth of a second old."""
        now = monotonic()
        if now < self._next:
            return
        self._next = now + 0.1
        filled = 30 * done // total
        line = f"[{'#' * filled:<30}] {done:,} of {total:,} requests, {now - self._start:.0f} s"
        self._stream.write("\r" + line.ljust(self._drawn))
        self._stream.flush()
        self._drawn = len(line)

    def clear(self) -> None:
        """Wipe the bar, so that what is printed next begins on a clean line."""
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()
            self._drawn = 0
