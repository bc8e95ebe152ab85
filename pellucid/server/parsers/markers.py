"""`Markers`: the literal texts that structure an output, and how much of an unfinished text may still become one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

_NEVER = re.compile(r"(?!)")


class Markers:
    """A few literals that all begin with the same character, none the beginning of another.

    With `takes_newlines`, newlines right before a marker belong to it: chat templates write them for layout.
    """

    def __init__(self, literals: Iterable[str], takes_newlines: bool = False) -> None:
        self.literals = tuple(dict.fromkeys(literals))
        self._takes_newlines = takes_newlines
        self._longest = max(map(len, self.literals), default=0)
        self._first = self.literals[0][0] if self.literals else ""

    @cached_property
    def pattern(self) -> str:
        """A regular expression without groups; matches nothing if there are no literals."""
        return "|".join(map(re.escape, self.literals)) or r"(?!)"

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern) if self.literals else _NEVER

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(literal[:length] for literal in self.literals for length in range(1, len(literal)))

    def find(self, text: str, pos: int, end: int | None = None) -> re.Match[str] | None:
        """The first marker that lies whole in `text[pos:end]`."""
        return self._compiled.search(text, pos, len(text) if end is None else end)

    def safe_end(self, text: str, pos: int) -> int:
        """Where the longest tail of `text[pos:]` begins that is a proper prefix of a marker; `len(text)` if none is."""
        if not self.literals:
            return len(text)
        start = text.find(self._first, max(pos, len(text) - self._longest + 1))
        while start >= 0:
            if text[start:] in self._prefixes:
                return start
            start = text.find(self._first, start + 1)
        return len(text)

    def split(self, text: str, pos: int, finished: bool) -> tuple[int, re.Match[str] | None]:
        """(end of what comes before a marker for sure, the marker if it is there whole)."""
        marker = self.find(text, pos)
        if marker is not None:
            end = marker.start()
        elif finished:
            return len(text), None
        else:
            end = self.safe_end(text, pos)
        if self._takes_newlines:
            while end > pos and text[end - 1] == "\n":
                end -= 1
        return end, marker
