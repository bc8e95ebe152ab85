"""Calls between reserved tokens: head, separator, JSON arguments, end. The DeepSeek V3 and V3.1 formats, and Kimi's.

Reserved tokens never reach content. What is malformed degrades: a head that names no call, and text between calls,
become content; a call whose JSON never closes ends at the next marker, or is left incomplete at the end of the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pellucid.server.parsers.grammar import WHITESPACE, CallFormat, Mode, Point, Source
from pellucid.server.parsers.json_text import Outcome, ValueScanner
from pellucid.server.parsers.markers import Markers
from pellucid.server.parsers.message import PieceKind
from pellucid.server.parsers.request import ParserRequest

MAX_HEAD = 512
"""A longer head, in characters, is not one."""

_FENCE = "```"


@dataclass(frozen=True, slots=True)
class CallMarkers:
    """The reserved tokens of a format.

    `head` matches from after `call_begin` to where the arguments begin; its group 1 names the call.
    `whole_head` matches a head that has no arguments. `fenced` arguments stand in a Markdown block.
    """

    section_begin: tuple[str, ...]
    section_end: tuple[str, ...]
    call_begin: str
    separator: str
    call_end: str
    head: re.Pattern[str]
    whole_head: re.Pattern[str]
    fenced: bool = False


def _deepseek(head: str, whole_head: str, fenced: bool) -> CallMarkers:
    return CallMarkers(
        section_begin=("<｜tool▁calls▁begin｜>",),
        section_end=("<｜tool▁calls▁end｜>",),
        call_begin="<｜tool▁call▁begin｜>",
        separator="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        head=re.compile(head),
        whole_head=re.compile(whole_head),
        fenced=fenced,
    )


DEEPSEEK_V3 = _deepseek(
    head=r"[^<]*<｜tool▁sep｜>\s*([^\s`{<]+)(?=[\s`{])",
    whole_head=r"[^<]*<｜tool▁sep｜>\s*([\w.\-]+)\s*",
    fenced=True,
)
"""`function<｜tool▁sep｜>NAME`, then the arguments in a fenced block. A missing fence is accepted."""

DEEPSEEK_V31 = _deepseek(head=r"\s*([^<]*[^<\s])\s*<｜tool▁sep｜>", whole_head=r"\s*([\w.\-]+)\s*", fenced=False)
"""`NAME<｜tool▁sep｜>`, then the arguments."""


class MarkedCalls(CallFormat):
    """Reads `CallMarkers`. Section markers, and end markers after JSON that has closed, may be missing."""

    def __init__(self, markers: CallMarkers, request: ParserRequest) -> None:
        self.openers = (*markers.section_begin, markers.call_begin)
        enders = (*self.openers, *markers.section_end, markers.call_end)
        self._markers = markers
        self._enders = Markers(enders)
        self._all = Markers((*enders, markers.separator))
        self._scanner = ValueScanner(self._all)
        self._call_id_prefix = request.call_id_prefix
        # Around the JSON: white space, the fence's end, and braces too many.
        self._leftovers = WHITESPACE + "`}]" if markers.fenced else WHITESPACE + "}]"
        self._padding = WHITESPACE + "`" if markers.fenced else WHITESPACE
        self.steps = {
            Mode.TEXT: self._read_text,
            Mode.BETWEEN_CALLS: self._read_between,
            Mode.HEAD: self._read_head,
            Mode.ARGUMENTS_BEGINNING: self._begin_arguments,
            Mode.ARGUMENTS: self._read_arguments,
            Mode.BARE_ARGUMENTS: self._read_bare_arguments,
            Mode.AFTER_CALL: self._read_after_call,
        }

    def start_call(self, point: Point, head: str, source: Source) -> Point | None:
        """The point after a head, or None if it names no call."""
        call_id = f"{self._call_id_prefix}{point.calls}"
        return source.start_call(point, call_id, head, Mode.ARGUMENTS_BEGINNING)

    def _read_text(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        end, marker = self._all.split(source.text, pos, source.finished)
        source.emit(PieceKind.CONTENT, source.text[pos:end])
        if marker is None:
            return point, end
        if marker[0] == self._markers.call_begin:
            mode = Mode.HEAD
        elif marker[0] in self._markers.section_end:
            mode = Mode.TEXT
        else:
            mode = Mode.BETWEEN_CALLS
        return point._replace(mode=mode), marker.end()

    def _read_between(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        pos = source.skip(pos, WHITESPACE)
        return (point if source.lacks(pos) else point._replace(mode=Mode.TEXT)), pos

    def _read_head(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        text, limit = source.text, pos + MAX_HEAD
        head = self._markers.head.match(text, pos, limit)
        stop = None if head else self._enders.find(text, pos, limit)
        if head is None and stop is None and not source.finished and len(text) < limit:
            return point, pos
        # A head that is cut off names nothing for sure; one that a marker ends is a call without arguments.
        if head is None and stop is not None:
            head = self._markers.whole_head.fullmatch(text, pos, stop.start())
        after = self.start_call(point, head[1], source) if head else None
        if head is None or after is None:
            return point._replace(mode=Mode.TEXT), pos
        return after, head.end()

    def _begin_arguments(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        pos = start = source.skip(pos, WHITESPACE)
        if self._markers.fenced:
            if source.lacks(pos, _FENCE):
                return point, pos
            if source.text.startswith(_FENCE, pos):
                start += len(_FENCE)
                if source.lacks(start, "json"):
                    return point, pos
                start = source.skip(start + len("json") * source.text.startswith("json", start), WHITESPACE)
        if source.lacks(start, self._first_marker_at(start, source)) or start == len(source.text):
            return point, pos
        if source.text[start] in "{[":
            return point._replace(mode=Mode.ARGUMENTS), start
        if source.text.startswith(self._all.literals, start):
            source.emit(PieceKind.ARGUMENTS, "{}")
            return source.end_call(point, Mode.AFTER_CALL), start
        return point._replace(mode=Mode.BARE_ARGUMENTS), start

    def _first_marker_at(self, pos: int, source: Source) -> str:
        """A marker that the text at `pos` may become."""
        rest = source.text[pos:]
        return next((literal for literal in self._all.literals if literal.startswith(rest)), "")

    def _read_arguments(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        scan = self._scanner.scan(source.text, pos, point.nesting, source.finished)
        source.emit(PieceKind.ARGUMENTS, source.text[pos : scan.end])
        if scan.outcome is Outcome.MORE:
            return point._replace(nesting=scan.nesting), scan.end
        return source.end_call(point, Mode.AFTER_CALL), scan.end

    def _read_bare_arguments(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        """Arguments that are not JSON go to the client as they are."""
        end, marker = self._all.split(source.text, pos, source.finished)
        shown = source.text[pos:end].rstrip(self._padding)
        if shown:
            source.emit(PieceKind.ARGUMENTS, shown)
        if marker is None:
            return point, end if source.finished else pos + len(shown)
        return source.end_call(point, Mode.AFTER_CALL), marker.start()

    def _read_after_call(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        pos = source.skip(pos, self._leftovers)
        return (point if source.lacks(pos) else point._replace(mode=Mode.TEXT)), pos
