"""`BlockReader`: chat events to blocks of reasoning, text and calls, in the order in which the model writes them.

Responses calls them output items, messages content blocks. Streamed or whole, an answer is made from the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from pellucid.core import TokenLogprobs
from pellucid.server.errors import internal
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.parsers.message import ToolCallDelta


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """A stretch of output of one kind; of a call, `text` is the arguments, and `name` and `call_id` are set.

    `complete` becomes true at its end, and stays false where the output was cut off in it. `logprobs` are those of a
    text's tokens, where they were asked for.
    """

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    complete: bool = False
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(Enum):
    OPENED = auto()
    ADDED = auto()
    CLOSED = auto()


class BlockChange(NamedTuple):
    """What happened to a block. `text` and `logprobs` are what was added."""

    change: Change
    block: Block
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class BlockReader:
    """One answer's blocks. At any time at most one is open, the last; an ended answer has at least one.

    Attributes:
        blocks: all so far.
        finish_reason: that of the last event: "stop", "length" or "tool_calls"; None until then.
        stop_reason: the stop string or token id that ended it.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._open: Block | None = None
        self._held: list[TokenLogprobs] = []

    def read(self, event: ChatEvent) -> list[BlockChange]:
        """What `event` changes, in order.

        Raises:
            ApiError: 500; the generation was given up.
        """
        if event.finish_reason == "abort":
            raise internal("the generation was aborted before its end")
        return list(self._changes(event))

    def _changes(self, event: ChatEvent) -> Iterator[BlockChange]:
        delta = event.delta
        self._held += event.logprobs
        # The rest of an open call comes before whatever follows it.
        for call in delta.tool_calls:
            if call.name is None:
                yield from self._continue_call(call)
        if delta.reasoning:
            yield from self._write(BlockKind.REASONING, delta.reasoning)
        if delta.content:
            yield from self._write(BlockKind.TEXT, delta.content)
        for call in delta.tool_calls:
            if call.name is not None:
                yield from self._start(BlockKind.CALL, call.name, call.id or "")
                yield from self._continue_call(call)
        if delta:
            # Tokens whose text is held back are told with the text; those of other blocks are not told at all.
            self._held.clear()
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
            if not self.blocks:
                yield from self._start(BlockKind.TEXT)
            yield from self._close(cut=event.finish_reason == "length")

    def _write(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        if self._open is None or self._open.kind is not kind:
            yield from self._start(kind)
        yield self._add(text)

    def _start(self, kind: BlockKind, name: str = "", call_id: str = "") -> Iterator[BlockChange]:
        yield from self._close(cut=False)
        self._open = Block(len(self.blocks), kind, name, call_id)
        self.blocks.append(self._open)
        yield BlockChange(Change.OPENED, self._open)

    def _continue_call(self, call: ToolCallDelta) -> Iterator[BlockChange]:
        if call.arguments:
            yield self._add(call.arguments)
        if call.complete:
            assert self._open is not None
            self._open.complete = True
            yield from self._close(cut=False)

    def _add(self, text: str) -> BlockChange:
        block = self._open
        assert block is not None
        logprobs = tuple(self._held) if block.kind is BlockKind.TEXT else ()
        block.pieces.append(text)
        block.logprobs += logprobs
        return BlockChange(Change.ADDED, block, text, logprobs)

    def _close(self, cut: bool) -> Iterator[BlockChange]:
        block, self._open = self._open, None
        if block is None:
            return
        # Only the parser knows whether a call was whole.
        if block.kind is not BlockKind.CALL:
            block.complete = not cut
        yield BlockChange(Change.CLOSED, block)
