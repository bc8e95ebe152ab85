"""One status line on a terminal's stderr, or a line every few seconds where there is none. Used by the CLI."""

from __future__ import annotations

import sys
import time
from typing import TextIO

INTERVAL_S = 5.0


class StatusLine:
    """Shows the newest of a run of messages: a load of many minutes must never look hung."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label, self._stream = label, stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._last = time.monotonic()
        self._width = 0

    def update(self, message: object) -> None:
        now = time.monotonic()
        if now - self._last < (0.1 if self._terminal else INTERVAL_S):
            return
        self._last = now
        text = f"{self._label}: {message}"
        if self._terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Wipe the line of a terminal."""
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
