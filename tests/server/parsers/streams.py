"""Streams for the parser tests: deltas added up as a client does, and a parse resumed at every point of a text."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pellucid.server.parsers.grammar import Grammar
from pellucid.server.parsers.message import MessageDelta, ParsedMessage, Piece, PieceKind, ToolCall
from pellucid.server.parsers.streaming import StreamingParser


def split(text: str, width: int) -> list[str]:
    return [text[start : start + width] for start in range(0, len(text), width)]


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(bounds)]


def regroup(tokens: Sequence[str], seed: int, largest: int = 12) -> list[str]:
    """Random groups of 1 to `largest` whole tokens."""
    chance, groups, start = random.Random(seed), [], 0
    while start < len(tokens):
        size = chance.randint(1, largest)
        groups.append("".join(tokens[start : start + size]))
        start += size
    return groups


def stream(grammar: Grammar, chunks: Iterable[str]) -> list[MessageDelta]:
    parser = StreamingParser(grammar)
    return [*(parser.push(chunk) for chunk in chunks), parser.finish()]


def add_up(deltas: Iterable[MessageDelta]) -> ParsedMessage:
    """What a client ends up with. Asserts that ids and names come once, in order, and nothing after a call's end."""
    reasoning = content = ""
    calls: list[ToolCall] = []
    for delta in deltas:
        reasoning += delta.reasoning
        content += delta.content
        for part in delta.tool_calls:
            if part.index == len(calls):
                assert part.id and part.name
                calls.append(ToolCall(part.index, part.id, part.name, part.arguments, part.complete))
            else:
                call = calls[part.index]
                assert part.id is None and part.name is None and not call.complete
                calls[part.index] = ToolCall(
                    call.index, call.id, call.name, call.arguments + part.arguments, part.complete
                )
    return ParsedMessage(reasoning, content, tuple(calls))


def assert_same_for_every_width(grammar: Grammar, text: str) -> ParsedMessage:
    """Also asserts that no longer prefix takes back what a shorter one showed."""
    whole = grammar.parse(text)
    for width in range(1, len(text) + 1):
        assert add_up(stream(grammar, split(text, width))) == whole, f"width {width} of {text!r}"
    assert_nothing_is_taken_back(grammar, text, whole)
    return whole


def assert_same_for_every_chunking(grammar: Grammar, text: str) -> ParsedMessage:
    """For all 2^(n-1) chunkings: going on from any prefix gives what the longer prefix gives from the beginning.

    Also asserts that no longer prefix takes back what a shorter one showed, and that the end leaves nothing unread.
    """
    states = [grammar.advance(grammar.start, text[:end], False) for end in range(len(text) + 1)]
    shown = [record(pieces) for _, _, pieces in states]
    for start, (point, left, pieces) in enumerate(states):
        last = pieces[-1].kind if pieces else None
        for end in range(start + 1, len(text) + 1):
            reached, rest, more = grammar.advance(point, left + text[start:end], False)
            same = (reached, rest) == states[end][:2] and record(more, shown[start], last) == shown[end]
            assert same, (text[:start], text[start:end])
        assert grammar.advance(point, left + text[start:], True)[1] == ""
    whole = grammar.parse(text)
    assert_nothing_is_taken_back(grammar, text, whole)
    return whole


def record(pieces: Sequence[Piece], before: str = "", last: PieceKind | None = None) -> str:
    """Pieces as one string in which neighbours of one kind are joined. `last` is the kind of the piece before them."""
    for kind, text, call_id in pieces:
        if kind is not last or kind in (PieceKind.CALL, PieceKind.END):
            before += f"\n{kind.name} {call_id} "
        before += text
        last = kind
    return before


def assert_nothing_is_taken_back(grammar: Grammar, text: str, whole: ParsedMessage) -> None:
    earlier = ParsedMessage()
    for end in range(len(text) + 1):
        later = grammar.parse(text[:end], False)
        assert_begins(earlier, later)
        earlier = later
    assert_begins(earlier, whole)


def assert_begins(earlier: ParsedMessage, later: ParsedMessage) -> None:
    assert later.reasoning.startswith(earlier.reasoning)
    assert later.content.startswith(earlier.content)
    assert len(later.tool_calls) >= len(earlier.tool_calls)
    for before, after in zip(earlier.tool_calls, later.tool_calls, strict=False):
        assert (before.index, before.id, before.name) == (after.index, after.id, after.name)
        assert after.arguments.startswith(before.arguments)
        assert not before.complete or before == after
