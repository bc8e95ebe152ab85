"""Reading JSON while it arrives: where a value ends, and the members of an object. Used by the call formats.

The text comes from a model, so it may be anything: nothing here raises, and nothing is repaired.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import NamedTuple

from pellucid.server.parsers.markers import Markers

# Possessive, so that an unfinished string is given up in linear time.
_REST_OF_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_WHITESPACE = re.compile(r"\s*")


class Nesting(NamedTuple):
    """How deep in a value a position is."""

    depth: int = 0
    in_string: bool = False


class Outcome(Enum):
    MORE = auto()
    CLOSED = auto()
    STOPPED = auto()


class Scan(NamedTuple):
    """`end` is after the value (CLOSED), at the marker (STOPPED), or as far as the text is the value's (MORE)."""

    outcome: Outcome
    end: int
    nesting: Nesting


class ValueScanner:
    """Finds the end of an object, array or string, or a marker that ends it early.

    A marker inside a string is text, if the string is one. An unfinished string would swallow what follows, so the
    text from the marker on waits until the string ends: a quote that no `,` `:` `}` or `]` follows was not its end,
    and then the marker was meant.
    """

    def __init__(self, stops: Markers) -> None:
        self._stops = stops
        self._outside = re.compile(rf'["{{}}\[\]]|{stops.pattern}')
        self._inside = re.compile(rf'"|\\.|\\\Z|{stops.pattern}', re.DOTALL)

    def scan(self, text: str, pos: int, nesting: Nesting, finished: bool) -> Scan:
        """Scan on from `pos`, where the value's nesting is `nesting`."""
        depth, in_string = nesting
        while True:
            match = (self._inside if in_string else self._outside).search(text, pos)
            if match is None:
                end = len(text) if finished else self._stops.safe_end(text, pos)
                return Scan(Outcome.MORE, end, Nesting(depth, in_string))
            token, pos = match[0], match.end()
            if token in "}]" or (token == '"' and in_string):
                in_string = False
                depth -= token != '"'
                if depth <= 0:
                    return Scan(Outcome.CLOSED, pos, Nesting())
            elif token == '"':
                in_string = True
            elif token in "{[":
                depth += 1
            elif token[0] == "\\":
                if len(token) == 1:
                    return Scan(Outcome.MORE, pos if finished else match.start(), Nesting(depth, in_string))
            else:
                end_of_string = self._find_end_of_string(text, pos, depth, finished) if in_string else -1
                if end_of_string is None or end_of_string < 0:
                    outcome = Outcome.MORE if end_of_string is None else Outcome.STOPPED
                    return Scan(outcome, match.start(), Nesting(depth, in_string))
                pos = end_of_string

    def _find_end_of_string(self, text: str, pos: int, depth: int, finished: bool) -> int | None:
        """The quote that ends the string, None if it may still come, -1 if it will not."""
        rest = _REST_OF_STRING.match(text, pos)
        quote = rest.end() if rest else len(text)
        if not text.startswith('"', quote):
            return -1 if finished else None
        space = _WHITESPACE.match(text, quote + 1)
        after = space.end() if space else quote + 1
        if after == len(text):
            return quote if finished else None
        # A string that is the whole value is followed by its marker.
        return quote if text[after] in (",:}]" if depth else "<") else -1


class Member(NamedTuple):
    """`value` and `end` are offsets from the object's brace; `end` is None while the value may go on."""

    key: str
    value: int
    end: int | None = None


class Members(NamedTuple):
    """The members of an object, as far as they were read. `found` is in the text's order.

    `closed` and `stopped` say that there are no more: the object ended there, or a marker came first.
    """

    found: tuple[Member, ...] = ()
    scanned: int = 0
    depth: int = 0
    label: str | None = None
    closed: bool = False
    stopped: bool = False

    def get(self, *keys: str) -> Member | None:
        """The first member with one of these keys."""
        return next((member for member in self.found if member.key in keys), None)


class MemberReader:
    """Reads an object's members, going on from what was read before; a marker outside strings ends it."""

    def __init__(self, stops: Markers) -> None:
        self._token = re.compile(rf'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{{}}\[\],:]|{stops.pattern}', re.DOTALL)

    def read(self, text: str, brace: int, members: Members) -> Members:
        """The members of the object that begins at `brace`. Linear over calls with the grown text."""
        if members.closed or members.stopped:
            return members
        found, scanned, depth, label = list(members.found), members.scanned, members.depth, members.label
        closed = stopped = False
        for match in self._token.finditer(text, brace + scanned):
            token, end = match[0], match.end() - brace
            if token == '"':
                break
            if token[0] == '"':
                if depth == 1:
                    label = token
            elif token == ":":
                if depth == 1 and label is not None:
                    found.append(Member(unquote(label), end))
            elif token in ",}]":
                depth -= token != ","
                if depth + (token != ",") == 1 and found and found[-1].end is None:
                    found[-1] = found[-1]._replace(end=end - 1)
                if depth <= 0:
                    closed = True
                label = None
            elif token in "{[":
                depth += 1
            else:
                stopped = True
            if closed or stopped:
                scanned = end if closed else match.start() - brace
                break
            scanned = end
        return Members(tuple(found), scanned, depth, label, closed, stopped)


def unquote(literal: str) -> str:
    """The text of a JSON string with its quotes; as it stands between them where it is not quite JSON."""
    try:
        text: str = json.loads(literal, strict=False)
    except ValueError:
        return literal[1:-1]
    # Half of a surrogate pair could not be sent as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def escape(text: str) -> str:
    """`text` as the inside of a JSON string. Character by character, so pieces may be escaped apart."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
