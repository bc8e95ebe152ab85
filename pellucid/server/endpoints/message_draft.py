"""`MessageDraft`: a message while it is generated. Used by `messages`; `message_events` makes its stream."""

from __future__ import annotations

from typing import Any

import msgspec

from pellucid.server.endpoints.blocks import Block, BlockChange, BlockKind, BlockReader
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.generation.tracked import Usage
from pellucid.server.protocol.messages_response import (
    ContentBlock,
    Message,
    MessageTokensDetails,
    MessageUsage,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)

INVALID_JSON = "INVALID_JSON"
"""The key that Anthropic's documentation gives arguments which a model wrote wrong, or did not get to the end of."""


class MessageDraft:
    """A message and its content so far. `usage` counts along."""

    def __init__(self, message_id: str, model: str, usage: Usage) -> None:
        self._id, self._model, self._usage = message_id, model, usage
        self._reader = BlockReader()

    def read(self, event: ChatEvent) -> list[BlockChange]:
        """Take an event. Raises ApiError where the generation was given up."""
        return self._reader.read(event)

    def opening(self) -> Message:
        """The message before its first token; what the cache held of the prompt is known at the end only."""
        usage = MessageUsage(self._usage.prompt_tokens, 0, MessageTokensDetails(0))
        return Message(id=self._id, model=self._model, content=[], usage=usage)

    def finished(self) -> Message:
        """The message after its last event."""
        usage, stop = self._usage, self._reader.stop_reason
        reason = self._stop_reason()
        return Message(
            id=self._id,
            model=self._model,
            content=[content_block(block) for block in self._reader.blocks],
            usage=MessageUsage(
                usage.prompt_tokens - usage.cached_tokens,
                usage.completion_tokens,
                MessageTokensDetails(usage.reasoning_tokens),
                cache_read_input_tokens=usage.cached_tokens,
            ),
            stop_reason=reason,
            stop_sequence=stop if reason == "stop_sequence" and isinstance(stop, str) else None,
        )

    def _stop_reason(self) -> StopReason:
        if isinstance(self._reader.stop_reason, str):
            return "stop_sequence"
        match self._reader.finish_reason:
            case "length":
                return "max_tokens"
            case "tool_calls":
                return "tool_use"
        return "end_turn"


def content_block(block: Block) -> ContentBlock:
    """A block as a message has it."""
    match block.kind:
        case BlockKind.REASONING:
            return ThinkingContent(block.text)
        case BlockKind.TEXT:
            return TextContent(block.text)
        case BlockKind.CALL:
            return ToolUseContent(block.call_id, block.name, read_arguments(block.text))


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object: none if there is no text, `{"INVALID_JSON": text}` if it is no JSON object."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}
