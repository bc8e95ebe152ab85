"""`Grammar`: a pure function from a model's output so far to what it says. Built by `choice`, driven by `streaming`.

One mechanism for every format. The text is read by *steps*; a step looks at the text from its position on, and either
decides something that no further text can change, or waits. What is decided up to some position is a `Point`, a plain
value, so a parse may go on from the last point as well as from the beginning, with the same result: that is what
keeps a long output linear, and what makes a streamed result equal the whole one for any chunking.

    text  = [ decided ............ | still open ]      the open tail is short: at most a piece of a marker,
    point = what the decided part left behind          or a call's head
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from pellucid.server.parsers.json_text import Members, Nesting
from pellucid.server.parsers.markers import Markers
from pellucid.server.parsers.message import ParsedMessage, Piece, PieceKind, assemble

WHITESPACE = " \t\r\n"


class Mode(Enum):
    """What the text at a point is to be read as."""

    BEGINNING = auto()
    REASONING_BEGINNING = auto()
    REASONING = auto()
    TEXT_BEGINNING = auto()
    TEXT = auto()
    BETWEEN_CALLS = auto()
    HEAD = auto()
    NAMELESS = auto()
    ARGUMENTS_BEGINNING = auto()
    ARGUMENTS = auto()
    BARE_ARGUMENTS = auto()
    CALL_TAIL = auto()
    AFTER_CALL = auto()
    PARAMETERS = auto()
    STRING = auto()
    VALUE = auto()
    JSON_VALUE = auto()


REASONING_MODES = frozenset({Mode.BEGINNING, Mode.REASONING_BEGINNING, Mode.REASONING})
"""The text before this point is reasoning, if it is anything."""


class Written(Enum):
    """What of a call's arguments has been written, where the grammar itself writes the braces."""

    NOTHING = auto()
    MEMBERS = auto()
    AS_GIVEN = auto()


class Point(NamedTuple):
    """All that later text needs to know of the text before it."""

    mode: Mode
    calls: int = 0
    call_ids: frozenset[str] = frozenset()
    nesting: Nesting = Nesting()
    members: Members = Members()
    label: str = ""
    written: Written = Written.NOTHING


class Source:
    """The text of one parse, whether more may follow, and the pieces found so far."""

    __slots__ = ("finished", "pieces", "text")

    def __init__(self, text: str, finished: bool) -> None:
        self.text = text
        self.finished = finished
        self.pieces: list[Piece] = []

    def skip(self, pos: int, characters: str) -> int:
        """The first position from `pos` on whose character is none of these."""
        while pos < len(self.text) and self.text[pos] in characters:
            pos += 1
        return pos

    def lacks(self, pos: int, literal: str = "") -> bool:
        """Can text that is still to come decide whether `literal` (or anything at all) stands at `pos`?"""
        if self.finished:
            return False
        rest = len(self.text) - pos
        return rest == 0 or (rest < len(literal) and literal.startswith(self.text[pos:]))

    def emit(self, kind: PieceKind, text: str) -> None:
        if text:
            self.pieces.append(Piece(kind, text))

    def start_call(self, point: Point, call_id: str, name: str, mode: Mode) -> Point:
        self.pieces.append(Piece(PieceKind.CALL, name, call_id))
        return Point(mode, point.calls + 1, point.call_ids)

    def end_call(self, point: Point, mode: Mode) -> Point:
        self.pieces.append(Piece(PieceKind.END))
        return Point(mode, point.calls, point.call_ids)


Step = Callable[[Point, int, Source], tuple[Point, int]]
"""(where the parse stands, position, text) -> (the next point, its position); both unchanged means: wait."""


class CallFormat:
    """How a format writes calls into text: a base class.

    Attributes:
        steps: how to read each mode that the format uses.
        beginning: the mode in which its text begins.
        openers: markers that begin a call or a section of calls.
    """

    steps: dict[Mode, Step]
    beginning = Mode.TEXT
    openers: tuple[str, ...] = ()


class PlainText(CallFormat):
    """No calls: all text is content."""

    def __init__(self) -> None:
        self.steps = {Mode.TEXT: self._read_text}

    def _read_text(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        source.emit(PieceKind.CONTENT, source.text[pos:])
        return point, len(source.text)


class ReasoningFormat(NamedTuple):
    """Reasoning between tags, at the beginning of the output; newlines at a tag belong to it.

    `opened` is for models that begin to reason without `opening`, or whose prompt has it. A later tag is plain text.
    With `ended_by_calls` the beginning of a call ends the reasoning as `closing` does.
    """

    opened: bool = False
    ended_by_calls: bool = False
    opening: str = "<think>"
    closing: str = "</think>"


class Grammar:
    """One output's format: reasoning first, if it has a format, then content and calls."""

    def __init__(self, calls: CallFormat, reasoning: ReasoningFormat | None = None) -> None:
        self._text_mode = calls.beginning
        self._steps = {**calls.steps, Mode.TEXT_BEGINNING: self._begin_text}
        self.start = Point(calls.beginning)
        if reasoning is not None:
            enders = calls.openers if reasoning.ended_by_calls else ()
            self._reasoning = reasoning
            self._reasoning_ends = Markers((reasoning.closing, *enders), takes_newlines=True)
            self._steps[Mode.BEGINNING] = self._begin
            self._steps[Mode.REASONING_BEGINNING] = self._begin_reasoning
            self._steps[Mode.REASONING] = self._read_reasoning
            self.start = Point(Mode.BEGINNING)

    def parse(self, text: str, finished: bool = True) -> ParsedMessage:
        """What `text` says. While it is not `finished`, what might still turn out otherwise is held back.

        For every prefix p of a text t: each string of parse(p, False) begins that of parse(t, True), and
        parse(p, False) has no call that parse(t, True) has not, with the same id and name. Never raises.
        """
        return assemble(self.advance(self.start, text, finished)[2])

    def advance(self, point: Point, text: str, finished: bool) -> tuple[Point, str, list[Piece]]:
        """Parse on from `point`. `text` is the text after it: what was left there, and what came since.

        Returns:
            The new point, the text after it, and the pieces between the two points.
        """
        source, steps, pos = Source(text, finished), self._steps, 0
        while pos < len(text) or finished:
            reached, end = steps[point.mode](point, pos, source)
            if end == pos and (reached is point or reached == point):
                break
            point, pos = reached, end
        return point, text[pos:], source.pieces

    def _begin(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        start, opening = source.skip(pos, WHITESPACE), self._reasoning.opening
        if source.text.startswith(opening, start):
            return Point(Mode.REASONING_BEGINNING), start + len(opening)
        if source.lacks(start, opening):
            return point, pos
        return Point(Mode.REASONING_BEGINNING if self._reasoning.opened else self._text_mode), pos

    def _begin_reasoning(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        pos = source.skip(pos, "\n")
        return (point if source.lacks(pos) else Point(Mode.REASONING)), pos

    def _read_reasoning(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        end, marker = self._reasoning_ends.split(source.text, pos, source.finished)
        source.emit(PieceKind.REASONING, source.text[pos:end])
        if marker is None:
            return point, end
        if marker[0] == self._reasoning.closing:
            return Point(Mode.TEXT_BEGINNING), marker.end()
        return Point(self._text_mode), marker.start()

    def _begin_text(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        """After the end of reasoning or of a call: newlines are layout."""
        pos = source.skip(pos, "\n")
        return (point if source.lacks(pos) else point._replace(mode=self._text_mode)), pos
