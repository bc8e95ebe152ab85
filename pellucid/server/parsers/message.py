"""What a model's output says: `ParsedMessage` for the whole text, `MessageDelta` for what one push added.

The grammars make `Piece`s; `streaming` turns them into deltas, `grammar` into a whole message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is the model's own text: JSON if the model wrote JSON, never repaired.

    `complete` says that its end was seen; a call cut off by the end of the output has what arrived until then.
    """

    index: int
    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """Reasoning, content and calls, without markers."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What one push added to one call: `id` and `name` in its first delta only, `complete` in its last only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    complete: bool = False


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What one push added. False if that is nothing; at most one entry per call."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class PieceKind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()
    END = auto()


class Piece(NamedTuple):
    """A stretch of reasoning or content, or of the latest call: its start (`text` is the name), arguments, its end."""

    kind: PieceKind
    text: str = ""
    call_id: str = ""


def assemble(pieces: Iterable[Piece]) -> ParsedMessage:
    """The message that a text's pieces, in order, make up."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[Piece, list[str]]] = []
    complete: set[int] = set()
    for piece in pieces:
        match piece.kind:
            case PieceKind.REASONING:
                reasoning.append(piece.text)
            case PieceKind.CONTENT:
                content.append(piece.text)
            case PieceKind.CALL:
                calls.append((piece, []))
            case PieceKind.ARGUMENTS:
                calls[-1][1].append(piece.text)
            case PieceKind.END:
                complete.add(len(calls) - 1)
    tool_calls = (
        ToolCall(index, start.call_id, start.text, "".join(arguments), index in complete)
        for index, (start, arguments) in enumerate(calls)
    )
    return ParsedMessage("".join(reasoning), "".join(content), tuple(tool_calls))


def difference(pieces: Iterable[Piece], calls_before: int) -> MessageDelta:
    """What `pieces` add to a message that has `calls_before` calls already."""
    reasoning = content = ""
    touched: dict[int, ToolCallDelta] = {}
    index = calls_before - 1
    for kind, text, call_id in pieces:
        if kind is PieceKind.CONTENT:
            content += text
        elif kind is PieceKind.REASONING:
            reasoning += text
        elif kind is PieceKind.CALL:
            index += 1
            touched[index] = ToolCallDelta(index, call_id, text)
        else:
            old = touched.get(index) or ToolCallDelta(index)
            complete = kind is PieceKind.END
            touched[index] = ToolCallDelta(index, old.id, old.name, old.arguments + text, complete)
    return MessageDelta(reasoning, content, tuple(touched.values()))


def assemble_deltas(deltas: Iterable[MessageDelta]) -> ParsedMessage:
    """The message that deltas, in order, add up to."""
    deltas = list(deltas)
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        for new in delta.tool_calls:
            old = calls.get(new.index)
            arguments = ("" if old is None else old.arguments) + new.arguments
            name, call_id = (new.name or "", new.id or "") if old is None else (old.name, old.id)
            calls[new.index] = ToolCall(new.index, call_id, name, arguments, new.complete)
    reasoning = "".join(delta.reasoning for delta in deltas)
    return ParsedMessage(reasoning, "".join(delta.content for delta in deltas), tuple(calls.values()))


def join(first: MessageDelta, second: MessageDelta) -> MessageDelta:
    """Two deltas in a row as one."""
    if not second:
        return first
    calls = {call.index: call for call in first.tool_calls}
    for call in second.tool_calls:
        old = calls.get(call.index)
        calls[call.index] = (
            call if old is None else replace(old, arguments=old.arguments + call.arguments, complete=call.complete)
        )
    return MessageDelta(first.reasoning + second.reasoning, first.content + second.content, tuple(calls.values()))
