"""Calls as JSON objects with a name and arguments: the Hermes and Llama 3 formats. Chosen in `choice`.

The members may come in any order; after the arguments, which arrive last as a rule, nothing of the object matters.
What is malformed degrades: an object that names no call is content as it stands, tags and all (a model may also write
*about* the tags); a call whose arguments never close ends at the end tag, or is left incomplete at the end of the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pellucid.server.parsers.grammar import WHITESPACE, CallFormat, Mode, Point, Source
from pellucid.server.parsers.json_text import Member, MemberReader, Members, Nesting, Outcome, ValueScanner, unquote
from pellucid.server.parsers.markers import Markers
from pellucid.server.parsers.message import PieceKind
from pellucid.server.parsers.request import ParserRequest

MAX_HEAD = 2048
"""An object that has neither a name nor arguments by then, in characters, is not a call."""

_ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_LEFTOVERS = WHITESPACE + "}]"
_STRING = re.compile(r'\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_BESIDE_STRING = re.compile(r'\s*[^"\s]')


class _Head(NamedTuple):
    """What is known of an object: no call for sure (`rejected`), or as much as there is of a name and arguments."""

    rejected: bool = False
    name: str | None = None
    arguments: Member | None = None


class JsonCalls(CallFormat):
    """The steps that both formats share. A subclass says where an object may begin, and what follows it."""

    end_tag = ""

    def __init__(self, request: ParserRequest) -> None:
        self._call_id_prefix = request.call_id_prefix
        self._text_markers = Markers(self.openers, takes_newlines=True)
        stops = Markers((self.end_tag,) if self.end_tag else ())
        self._reader = MemberReader(stops)
        self._scanner = ValueScanner(stops)
        self.steps = {
            Mode.TEXT: self._read_text,
            Mode.HEAD: self._read_head,
            Mode.ARGUMENTS: self._read_arguments,
            Mode.CALL_TAIL: self._read_tail,
            Mode.AFTER_CALL: self._read_after_call,
        }

    def _find_brace(self, pos: int, source: Source) -> int | None:
        """Where the object begins whose call begins at `pos`: -1 if there is none, None if that is not known yet."""
        start, tag = source.skip(pos, WHITESPACE), self.openers[0]
        if source.lacks(start, tag):
            return None
        if source.text.startswith(tag, start):
            start = source.skip(start + len(tag), WHITESPACE)
            if source.lacks(start):
                return None
        return start if source.text.startswith("{", start) else -1

    def _may_name(self, name: str) -> bool:
        """Can an object of that name be a call?"""
        return True

    def _may_have(self, key: str) -> bool:
        """Can a call have that member before its name or arguments?"""
        return True

    def _reject(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        """What begins at `pos` is no call but text."""
        raise NotImplementedError

    def _read_after_call(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        raise NotImplementedError

    def _read_text(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        end, marker = self._text_markers.split(source.text, pos, source.finished)
        source.emit(PieceKind.CONTENT, source.text[pos:end])
        return (point._replace(mode=Mode.HEAD) if marker else point), end

    def _read_head(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        text, brace = source.text, self._find_brace(pos, source)
        if brace is None:
            return point, pos
        members = self._reader.read(text, brace, point.members) if brace >= 0 else Members()
        head = self._judge(text, brace, members) if brace >= 0 else _Head(rejected=True)
        over = members.closed or members.stopped or source.finished
        if head.rejected or (over and head.name is None):
            return self._reject(point, pos, source)
        value = brace + head.arguments.value if head.arguments else len(text)
        value = source.skip(value, WHITESPACE)
        is_object = text.startswith(("{", "["), value)
        ended = head.arguments is not None and head.arguments.end is not None
        if head.name is None or not (over or is_object or ended):
            return point._replace(members=members), pos
        call_id = f"{self._call_id_prefix}{point.calls}"
        after = source.start_call(point, call_id, head.name, Mode.ARGUMENTS)
        if is_object:
            return after, value
        return self._write_other_arguments(after, head.arguments, brace, value, members, source)

    def _judge(self, text: str, brace: int, members: Members) -> _Head:
        """Read the members in the text's order, as they would have arrived, until both parts of a call are there."""
        head = _Head()
        for member in members.found:
            known = head.name is not None or head.arguments is not None
            if not known and member.value > MAX_HEAD:
                return _Head(rejected=True)
            if member.key == "name" and head.name is None:
                name = _STRING.match(text, brace + member.value)
                if name is None:
                    return head._replace(rejected=_BESIDE_STRING.match(text, brace + member.value) is not None)
                head = head._replace(name=unquote(name[1]))
                if not head.name or not self._may_name(head.name):
                    return _Head(rejected=True)
            elif member.key in _ARGUMENTS and head.arguments is None:
                head = head._replace(arguments=member)
            elif not self._may_have(member.key):
                return _Head(rejected=True)
            if head.name is not None and head.arguments is not None:
                return head
        unknown = head.name is None and head.arguments is None
        return head._replace(rejected=unknown and len(text) - brace > MAX_HEAD)

    def _write_other_arguments(
        self, point: Point, arguments: Member | None, brace: int, value: int, members: Members, source: Source
    ) -> tuple[Point, int]:
        """Arguments that are no object: none, or JSON text in a string, which is unwrapped, or anything else."""
        end_of_object = brace + members.scanned
        if arguments is None or arguments.end is None:
            if members.closed or members.stopped:
                given = source.text[value:end_of_object].strip() if arguments else "{}"
                source.emit(PieceKind.ARGUMENTS, given)
                return source.end_call(point, Mode.AFTER_CALL), end_of_object
            source.emit(PieceKind.ARGUMENTS, source.text[value:])
            return point._replace(mode=Mode.AFTER_CALL), len(source.text)
        end = brace + arguments.end
        given = source.text[value:end].strip()
        if _STRING.fullmatch(given):
            given = unquote(given)
        source.emit(PieceKind.ARGUMENTS, "{}" if given == "null" else given)
        return source.end_call(point, Mode.CALL_TAIL), end

    def _read_arguments(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        scan = self._scanner.scan(source.text, pos, point.nesting, source.finished)
        source.emit(PieceKind.ARGUMENTS, source.text[pos : scan.end])
        if scan.outcome is Outcome.MORE:
            return point._replace(nesting=scan.nesting), scan.end
        mode = Mode.CALL_TAIL if scan.outcome is Outcome.CLOSED else Mode.AFTER_CALL
        return source.end_call(point, mode), scan.end

    def _read_tail(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        """The rest of the object; its members no longer matter."""
        if point.nesting.depth == 0:
            pos = source.skip(pos, WHITESPACE)
            if source.text.startswith(",", pos):
                return point._replace(nesting=Nesting(1)), pos + 1
            return (point if source.lacks(pos) else point._replace(mode=Mode.AFTER_CALL)), pos
        scan = self._scanner.scan(source.text, pos, point.nesting, source.finished)
        if scan.outcome is Outcome.MORE:
            return point._replace(nesting=scan.nesting), scan.end
        return point._replace(mode=Mode.AFTER_CALL, nesting=Nesting()), scan.end


class HermesCalls(JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or several objects in it. Newlines are layout."""

    openers = ("<tool_call>",)
    end_tag = "</tool_call>"

    def _reject(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        start = source.skip(pos, WHITESPACE)
        end = start + len(self.openers[0]) if source.text.startswith(self.openers[0], start) else pos
        source.emit(PieceKind.CONTENT, source.text[pos:end])
        return point._replace(mode=Mode.TEXT, members=Members()), end

    def _read_after_call(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        pos = source.skip(pos, _LEFTOVERS)
        if source.text.startswith(self.end_tag, pos):
            return point._replace(mode=Mode.TEXT_BEGINNING), pos + len(self.end_tag)
        if source.lacks(pos, self.end_tag):
            return point, pos
        if source.text.startswith("{", pos):
            return point._replace(mode=Mode.HEAD), pos
        return point._replace(mode=Mode.TEXT), pos


class Llama3Calls(JsonCalls):
    """`{"name": ..., "parameters": {...}}` at the beginning or after `<|python_tag|>`; more of them after `;`.

    Such an object may as well be the answer. It is a call if its name is a tool's (where the request says which there
    are), and if nothing but a name and arguments comes before both are there.
    """

    openers = ("<|python_tag|>",)
    beginning = Mode.HEAD

    def __init__(self, request: ParserRequest) -> None:
        super().__init__(request)
        self._tools = frozenset(request.tools)

    def _may_name(self, name: str) -> bool:
        return not self._tools or name in self._tools

    def _may_have(self, key: str) -> bool:
        return key in _BARE_KEYS

    def _reject(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        start = source.skip(pos, WHITESPACE)
        if source.text.startswith(self.openers[0], start):
            pos = start + len(self.openers[0])
        return point._replace(mode=Mode.TEXT, members=Members()), pos

    def _read_after_call(self, point: Point, pos: int, source: Source) -> tuple[Point, int]:
        pos = source.skip(pos, _LEFTOVERS + ";,")
        if source.lacks(pos):
            return point, pos
        mode = Mode.HEAD if source.text.startswith("{", pos) else Mode.TEXT
        return point._replace(mode=mode), pos
