"""Reads the start-up log of a real SGLang or vLLM server: the settings that it states, and its messages.

Called by `verify`. SGLang prints its resolved arguments (`server_args=…`), vLLM its configuration (`… with config: …`);
both as Python writes values, perhaps wrapped by a terminal.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pellucid.core import PellucidError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ?(?P<text>.*)")
_VLLM = re.compile(
    r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"\[?(?:[\w./-]*/)?(?P<file>[\w-]+\.py):(?P<line>\d+)\] ?(?P<text>.*)"
)
_ARGUMENTS = re.compile(r"server_args=(?:ServerArgs\()?")
_CONFIG = re.compile(r"engine \(v(?P<version>[^)]+)\) with config: ")
_NAMED = re.compile(r"[\w.]+\(")
_ENUM = re.compile(r"<[\w.]+?\.(\w+): .*>$", re.DOTALL)
_OPENING, _CLOSING = "([{<", ")]}>"

DEEPEST = 16
"""Records in records that are read; what lies deeper stays text."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the log. `number` counts the log's lines from 1; vLLM also names its own file and line."""

    number: int
    text: str
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that the server stated, under its name; nested records' fields under theirs and as `record.field`."""

    name: str
    value: Any
    number: int


@dataclass(frozen=True, slots=True)
class StartupLog:
    """What a server said of itself. `version` is None where the log does not tell."""

    engine: Literal["sglang", "vllm"]
    version: str | None
    settings: tuple[Setting, ...]
    messages: tuple[Message, ...]

    def setting(self, name: str) -> Setting | None:
        return next((one for one in self.settings if one.name == name), None)


def read_startup_log(text: str) -> StartupLog:
    """The settings and messages of a log. Raises PellucidError where it is no log of SGLang or vLLM."""
    records = list(_records(_COLOUR.sub("", text)))
    for message, whole in records:
        config, arguments = _CONFIG.search(whole), _ARGUMENTS.search(whole)
        if config is not None:
            settings = _settings(whole[config.end() :], message.number)
            return StartupLog("vllm", config["version"], settings, tuple(one for one, _ in records))
        if arguments is not None and message.file is None:
            settings = _settings(whole[arguments.end() :].removeprefix("{"), message.number)
            return StartupLog("sglang", None, settings, tuple(one for one, _ in records))
    if not records:
        raise PellucidError("no line of this log was written by SGLang or vLLM: give the server's whole output")
    return StartupLog("vllm" if records[0][0].file else "sglang", None, (), tuple(one for one, _ in records))


def parse_value(text: str, depth: int = 0) -> Any:
    """A value as Python prints it: literals, enum members by their name, records as dicts, anything else as text."""
    text = text.strip()
    member = _ENUM.match(text)
    if member:
        return member[1]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    named = _NAMED.match(text)
    opening = named.end() - 1 if named else 0
    closing = _closing(text[opening:]) if text[opening : opening + 1] in _OPENING else None
    if closing is None or (named is None and text[0] != "{") or depth == DEEPEST:
        return text
    # What follows the closing bracket was printed by someone else.
    return dict(_pairs(text[opening + 1 : opening + closing], depth + 1)) or text


def _records(text: str) -> Iterator[tuple[Message, str]]:
    """Each message with its whole text: lines that begin nothing new belong to the one before."""
    current: Message | None = None
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        found = _VLLM.search(line) or _SGLANG.search(line)
        if found is None:
            if line.strip():
                parts.append(line)
            continue
        if current is not None:
            yield current, "".join(parts)
        place = found.groupdict()
        source_line = int(place["line"]) if place.get("line") else None
        current, parts = Message(number, found["text"].strip(), place.get("file"), source_line), [found["text"]]
    if current is not None:
        yield current, "".join(parts)


def _settings(text: str, number: int) -> tuple[Setting, ...]:
    found: dict[str, Any] = {}
    for name, value in _flat(dict(_pairs(text))):
        found.setdefault(name, value)
    return tuple(Setting(name, value, number) for name, value in found.items())


def _flat(values: dict[str, Any], record: str = "") -> Iterator[tuple[str, Any]]:
    """The record's own fields first, so that a nested one of the same name does not stand for them.

    Nested fields come under `record.field` too.
    """
    for name, value in values.items():
        yield name, value
        if record:
            yield f"{record}.{name}", value
    for name, value in values.items():
        if isinstance(value, dict) and all(isinstance(inner, str) for inner in value):
            yield from _flat(value, name)


def _pairs(text: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """`a=1, b='x'` or `'a': 1, 'b': 'x'`; ends where the record does."""
    for part in _split(text):
        quoted = re.match(r"""\s*(['"])(\w+)\1\s*:""", part)
        plain = re.match(r"\s*(\w+)\s*=", part)
        match = quoted or plain
        if match is not None:
            yield match[2] if match is quoted else match[1], parse_value(part[match.end() :], depth)


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand in no bracket and no quotes, until a bracket closes that was not opened."""
    begin = 0
    for index, char, depth in _outside_quotes(text):
        if depth < 0:
            yield text[begin:index]
            return
        if char == "," and depth == 0:
            yield text[begin:index]
            begin = index + 1
    yield text[begin:]


def _closing(text: str) -> int | None:
    """Where the bracket closes with which the text begins; None where it does not."""
    return next((index for index, char, depth in _outside_quotes(text) if char in _CLOSING and depth == 0), None)


def _outside_quotes(text: str) -> Iterator[tuple[int, str, int]]:
    """Each character that is in no quotes, with its place and how many brackets are open behind it."""
    depth, quote, escaped = 0, "", False
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
            continue
        if char in "'\"":
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING and text[index - 1 : index] != "-":
            depth -= 1
        yield index, char, depth
