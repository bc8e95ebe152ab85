"""Cuts the lines that decided out of an engine's source and colours them as Python. Used by `html`."""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

CONTEXT = 2
"""Lines shown above and below each line of interest."""

_CLASSES = {tokenize.STRING: "s", tokenize.COMMENT: "c", tokenize.NUMBER: "n"}
# Python 3.12 gives f-strings in parts.
_CLASSES |= {
    getattr(tokenize, name): "s"
    for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
    if hasattr(tokenize, name)
}


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source as HTML. `number` is None for a gap."""

    number: int | None
    html: str


class Excerpts:
    """The engine's files below `root`, each read once; without a root, or where a file is not there, nothing."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._files: dict[str, tuple[str, ...]] = {}

    def excerpt(self, file: str, lines: Iterable[int], *, context: int = CONTEXT) -> Iterator[SourceLine]:
        """The lines with their surroundings, in order, with a gap where lines are left out."""
        coloured = self._coloured(file)
        around = {near for line in lines for near in range(line - context, line + context + 1)}
        wanted = sorted(line for line in around if 1 <= line <= len(coloured))
        for index, line in enumerate(wanted):
            if index and wanted[index - 1] + 1 < line:
                yield SourceLine(None, "")
            yield SourceLine(line, coloured[line - 1])

    def _coloured(self, file: str) -> tuple[str, ...]:
        if file not in self._files:
            self._files[file] = self._read(file)
        return self._files[file]

    def _read(self, file: str) -> tuple[str, ...]:
        if self._root is None:
            return ()
        path = (self._root / file).resolve()
        # A trace may come from a file that someone else wrote: it must not name a file outside of the tree.
        if not path.is_relative_to(self._root.resolve()) or path.suffix != ".py" or not path.is_file():
            return ()
        return colour(path.read_text(encoding="utf-8", errors="replace"))


def colour(source: str) -> tuple[str, ...]:
    """Each line as HTML with keywords, text, numbers and comments in spans; plain where it is no Python."""
    lines = source.split("\n")
    marks: dict[int, list[tuple[int, int, str]]] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            kind = "k" if token.type == tokenize.NAME and keyword.iskeyword(token.string) else _CLASSES.get(token.type)
            if kind is None:
                continue
            for number in range(token.start[0], token.end[0] + 1):
                begin = token.start[1] if number == token.start[0] else 0
                end = token.end[1] if number == token.end[0] else len(lines[number - 1])
                marks.setdefault(number, []).append((begin, end, kind))
    except (tokenize.TokenError, SyntaxError, IndexError):
        return tuple(escape(line) for line in lines)
    return tuple(_marked(line, marks.get(number, ())) for number, line in enumerate(lines, start=1))


def _marked(line: str, marks: Iterable[tuple[int, int, str]]) -> str:
    parts, at = [], 0
    for begin, end, kind in marks:
        if begin < at or end <= begin:
            continue
        parts += [escape(line[at:begin]), f'<i class="{kind}">{escape(line[begin:end])}</i>']
        at = end
    return "".join([*parts, escape(line[at:])])
