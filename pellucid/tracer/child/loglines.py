"""Collects what the engine's files log while a configuration is made. Used by `engine`."""

from __future__ import annotations

import linecache
import logging
import os
from typing import Any


class LogLines(logging.Handler):
    """Collects what the engine's files log, each line once."""

    def __init__(self, root: str) -> None:
        super().__init__(logging.DEBUG)
        self._root = root
        self._seen: set[tuple[str, int, str]] = set()
        self.lines: list[dict[str, Any]] = []

    def attach(self, name: str) -> None:
        for logger in (logging.getLogger(), logging.getLogger(name)):
            logger.handlers[:] = [self]
            logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            text = str(record.msg)
        key = (record.pathname, record.lineno, text)
        if key in self._seen or not record.pathname.startswith(self._root):
            return
        self._seen.add(key)
        file = os.path.relpath(record.pathname, self._root).replace(os.sep, "/")
        site = {"file": file, "line": record.lineno, "source": _line(record), "function": record.funcName}
        self.lines.append({"level": record.levelname, "text": text[:2000], "site": site})


def _line(record: logging.LogRecord) -> str:
    return linecache.getline(record.pathname, record.lineno).strip()
