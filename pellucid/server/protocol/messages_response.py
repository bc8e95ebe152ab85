"""What /v1/messages answers: `Message` and its content blocks. Made by `server.endpoints.message_draft`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(Struct, tag_field="type", tag="text", frozen=True):
    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking", frozen=True):
    """`signature` is always empty."""

    thinking: str
    signature: str = ""


class ToolUseContent(Struct, tag_field="type", tag="tool_use", frozen=True):
    """What the model wrote as `input`, unless it is no JSON object: then `{"INVALID_JSON": its text}`."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessageTokensDetails(Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True):
    """`input_tokens` are those that were computed; the prompt has `cache_read_input_tokens` more."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(Struct, kw_only=True, frozen=True):
    id: str
    model: str
    content: list[ContentBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct, frozen=True):
    """Tokens of the prompt that the message request would have, cached or not."""

    input_tokens: int
