"""Several texts that grow at once, shown in lines."""

from __future__ import annotations

import codecs

__all__ = ["TextLines"]


class TextLines:
    """The text of one sequence as it comes, cut into lines at spaces.

    Parameters
    ----------
    width : int
        Most characters of a line.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Take more of the text, and return the lines that are full now."""
        self._rest += self._printable(self._decoder.decode(data))
        lines = []
        while len(self._rest) > self.width or "\n" in self._rest:
            line, newline, rest = self._rest.partition("\n")
            if len(line) > self.width:
                cut = line.rfind(" ", 0, self.width + 1)
                cut = self.width if cut <= 0 else cut
                line, rest = line[:cut], line[cut:] + newline + rest
            lines.append(line)
            self._rest = rest.lstrip(" ")
        return lines

    def end(self) -> str:
        """Return what is left: the last line."""
        return self._rest + self._decoder.decode(b"", final=True)

    @staticmethod
    def _printable(text: str) -> str:
        return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)
