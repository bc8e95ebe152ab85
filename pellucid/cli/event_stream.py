"""Reads server-sent events off an HTTP response, however its bytes were cut. Used by `ChatServer`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# A CR at the end of what has come may be the first half of a CRLF: it waits for the next bytes.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class Event(NamedTuple):
    """One event. `name` is "message" unless the server named it; several data lines are joined by newlines."""

    name: str
    data: str


def parse_events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """The events in `chunks` as they become whole; comments and the fields `id` and `retry` are passed over.

    An event without the blank line that ends it counts too when the stream ends: some servers stop right there.
    """
    name, data = "", list[str]()
    for line in _lines(chunks):
        if not line:
            if data:
                yield Event(name or "message", "\n".join(data))
            name, data = "", []
            continue
        # Lines are whole here, so no character is cut; a broken one must not end the answer.
        field, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    if data:
        yield Event(name or "message", "\n".join(data))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = _LINE_END.split(rest + chunk)
        yield from lines
    if rest:
        yield rest.removesuffix(b"\r")
