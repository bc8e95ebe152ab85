"""DeepSeek V3.2's calls (DSML): tags for calls and parameters, whose arguments the grammar writes as JSON.

    <｜DSML｜function_calls><｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">any text</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke></｜DSML｜function_calls>

V4 calls the outer tag `tool_calls`; no outer tag is needed here. A value has no escapes, so any DSML tag ends it, also
where its own end tag is missing or misspelled. What is malformed degrades: an invoke without a name is content; stray
text in a call goes into its arguments as it is, so that no client takes half a call for a whole one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pellucid.server.parsers.grammar import WHITESPACE, CallFormat, Mode, Point, Source, Written
from pellucid.server.parsers.json_text import Nesting, Outcome, ValueScanner, escape
from pellucid.server.parsers.markers import Markers
from pellucid.server.parsers.message import PieceKind
from pellucid.server.parsers.request import ParserRequest

MAX_TAG = 512
"""A longer tag, in characters, is not one."""
MAX_SCALAR = 64
"""Longer values that are no JSON object, array or string are text."""

_DSML = "｜DSML｜"
_OPEN, _CLOSE = f"<{_DSML}", f"</{_DSML}"
_CALL_ENDERS = ("invoke", "function_calls", "tool_calls")
_TAG = re.compile(r'<(/?)｜DSML｜\s*(\w*)((?:[^>"]|"[^"]*")*)>')
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


class _Tag(NamedTuple):
    closing: bool
    kind: str
    attributes: dict[str, str]
    end: int


class DsmlCalls(CallFormat):
    """Reads DSML. Newlines before a tag are layout."""

    openers = (_OPEN,)

    def __init__(self, request: ParserRequest) -> None:
        self._call_id_prefix = request.call_id_prefix
        self._tags = Markers((_OPEN, _CLOSE))
        self._tags_in_text = Markers((_OPEN, _CLOSE), takes_newlines=True)
        self._scanner = ValueScanner(self._tags)
        self.steps = {
            Mode.TEXT: self._read_text,
            Mode.BETWEEN_CALLS: self._read_between,
            Mode.PARAMETERS: self._read_parameters,
            Mode.STRING: self._read_string,
            Mode.VALUE: self._begin_value,
            Mode.JSON_VALUE: self._read_json,
            Mode.ARGUMENTS: self._read_json,
            Mode.BARE_ARGUMENTS: self._read_stray_text,
        }

    def _read_tag(self, pos: int, source: Source) -> _Tag | None:
        """The tag at `pos`; None if its end may still come. Of no kind if it never ends, or was cut off."""
        match = _TAG.match(source.text, pos, pos + MAX_TAG)
        if match:
            return _Tag(bool(match[1]), match[2], dict(_ATTRIBUTE.findall(match[3])), match.end())
        if len(source.text) < pos + MAX_TAG:
            if not source.finished:
                return None
            if "\n" not in source.text[pos:]:
                return _Tag(False, "", {}, len(source.text))
        return _Tag(False, "", {}, source.text.index(_DSML, pos) + len(_DSML))

    def _read_text(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        end, marker = self._tags_in_text.split(source.text, pos, source.finished)
        source.emit(PieceKind.CONTENT, source.text[pos:end])
        tag = self._read_tag(marker.start(), source) if marker else None
        if tag is None:
            return point, end
        name = tag.attributes.get("name")
        if tag.kind == "invoke" and not tag.closing and name:
            return source.start_call(point, f"{self._call_id_prefix}{point.calls}", name, Mode.PARAMETERS), tag.end
        return point._replace(mode=Mode.BETWEEN_CALLS), tag.end

    def _read_between(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        pos = source.skip(pos, WHITESPACE)
        return (point if source.lacks(pos) else point._replace(mode=Mode.TEXT)), pos

    def _read_parameters(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        pos = source.skip(pos, WHITESPACE)
        text = source.text
        if not text.startswith((_OPEN, _CLOSE), pos):
            if pos == len(text) or source.lacks(pos, _OPEN) or source.lacks(pos, _CLOSE):
                return point, pos
            inline = text[pos] == "{" and point.written is Written.NOTHING
            mode = Mode.ARGUMENTS if inline else Mode.BARE_ARGUMENTS
            return point._replace(mode=mode, nesting=Nesting(), written=Written.AS_GIVEN), pos
        tag = self._read_tag(pos, source)
        if tag is None:
            return point, pos
        if tag.kind == "parameter" and not tag.closing:
            return self._begin_parameter(point, tag, source), tag.end
        if tag.kind not in _CALL_ENDERS:
            return point, tag.end
        if point.written is not Written.AS_GIVEN:
            source.emit(PieceKind.ARGUMENTS, "{}" if point.written is Written.NOTHING else "}")
        # A call that the next one ends leaves that one's tag to be read.
        return source.end_call(point, Mode.BETWEEN_CALLS), tag.end if tag.closing else pos

    def _begin_parameter(self, point: Point, tag: _Tag, source: Source) -> Point:
        key = escape(tag.attributes.get("name", ""))
        if tag.attributes.get("string") == "true":
            return self._write_key(point, key, source, Mode.STRING, quote='"')
        return point._replace(mode=Mode.VALUE, label=key)

    def _write_key(self, point: Point, key: str, source: Source, mode: Mode, quote: str = "") -> Point:
        before = "{" if point.written is Written.NOTHING else ", "
        source.emit(PieceKind.ARGUMENTS, f'{before}"{key}": {quote}')
        return point._replace(mode=mode, nesting=Nesting(), written=Written.MEMBERS)

    def _read_string(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        end, marker = self._tags.split(source.text, pos, source.finished)
        source.emit(PieceKind.ARGUMENTS, escape(source.text[pos:end]))
        if marker is None:
            return point, end
        source.emit(PieceKind.ARGUMENTS, '"')
        return point._replace(mode=Mode.PARAMETERS), end

    def _begin_value(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        """A value that should be JSON: passed through if it looks so, else written as a string."""
        text, start = source.text, source.skip(pos, WHITESPACE)
        if start < len(text) and text[start] in '{["':
            return self._write_key(point, point.label, source, Mode.JSON_VALUE), start
        limit = start + MAX_SCALAR + len(_CLOSE)
        marker = self._tags.find(text, start, limit)
        if marker is None and not source.finished and len(text) < limit:
            return point, pos
        scalar = text[start : marker.start() if marker else len(text)].rstrip(WHITESPACE)
        if (marker or source.finished) and _SCALAR.fullmatch(scalar):
            after = self._write_key(point, point.label, source, Mode.PARAMETERS)
            source.emit(PieceKind.ARGUMENTS, scalar)
            return after, marker.start() if marker else len(text)
        return self._write_key(point, point.label, source, Mode.STRING, quote='"'), start

    def _read_json(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        scan = self._scanner.scan(source.text, pos, point.nesting, source.finished)
        source.emit(PieceKind.ARGUMENTS, source.text[pos : scan.end])
        if scan.outcome is Outcome.MORE:
            return point._replace(nesting=scan.nesting), scan.end
        return point._replace(mode=Mode.PARAMETERS, nesting=Nesting()), scan.end

    def _read_stray_text(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        end, marker = self._tags_in_text.split(source.text, pos, source.finished)
        source.emit(PieceKind.ARGUMENTS, source.text[pos:end])
        return (point if marker is None else point._replace(mode=Mode.PARAMETERS)), end
