"""`MessageWriter`: a message as a stream of events. Used by `messages`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pellucid.server.endpoints.blocks import Block, BlockKind, Change
from pellucid.server.endpoints.message_draft import MessageDraft
from pellucid.server.errors import ApiError
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.http.sse import named_event
from pellucid.server.protocol.messages_response import ContentBlock, TextContent, ThinkingContent, ToolUseContent

encode = msgspec.json.encode

# The type of a block's deltas, and the member that holds what is added.
_DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageWriter:
    """Chat events to bytes: whole events of Anthropic's protocol.

        message_start, (content_block_start, content_block_delta*, content_block_stop)*, message_delta, message_stop

    A call's arguments are passed on as the model writes them, valid or not: see `message_draft.read_arguments`.
    """

    def __init__(self, draft: MessageDraft) -> None:
        self._draft = draft
        self._started = False
        self._delta_head = b""

    def write(self, events: Sequence[ChatEvent]) -> bytes:
        """What some chat events in a row give; with the first, also the beginning of the message."""
        return b"".join([*self._opening(), *(blob for event in events for blob in self._write(event))])

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that cannot go on."""
        return named_event("error", error.anthropic_body())

    def _opening(self) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            yield _event("message_start", message=self._draft.opening())

    def _write(self, event: ChatEvent) -> Iterator[bytes]:
        for change in self._draft.read(event):
            match change.change:
                case Change.ADDED:
                    yield self._delta_head + encode(change.text) + b"}}\n\n"
                case Change.OPENED:
                    yield self._open(change.block)
                case Change.CLOSED:
                    yield from self._close(change.block)
        if event.finish_reason is not None:
            message = self._draft.finished()
            delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
            yield _event("message_delta", delta=delta, usage=message.usage)
            yield _event("message_stop")

    def _open(self, block: Block) -> bytes:
        kind, member = _DELTAS[block.kind]
        # What is the same in all of a block's deltas is encoded once.
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (block.index, kind.encode(), member.encode())
        )
        return _event("content_block_start", index=block.index, content_block=_empty(block))

    def _close(self, block: Block) -> Iterator[bytes]:
        if block.kind is BlockKind.REASONING:
            delta = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=block.index, delta=delta)
        yield _event("content_block_stop", index=block.index)


def _empty(block: Block) -> ContentBlock:
    """A block as it is when it begins."""
    match block.kind:
        case BlockKind.REASONING:
            return ThinkingContent("")
        case BlockKind.TEXT:
            return TextContent("")
        case BlockKind.CALL:
            return ToolUseContent(block.call_id, block.name, {})


def _event(name: str, /, **members: Any) -> bytes:
    return named_event(name, {"type": name, **members})
