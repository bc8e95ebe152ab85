"""What /v1/chat/completions answers when it does not stream: `ChatCompletion`, as `server.openapi` shows it.

Members that are UNSET are left out of the JSON; None is written as null.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from pellucid.server.protocol.usage import PromptLogprobs, Usage

ChatFinishReason = Literal["stop", "length", "tool_calls", "abort"]


class TopLogprob(Struct, frozen=True):
    """`bytes` are those of the token, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob] | None
    refusal: None = None


class FunctionCallText(Struct, frozen=True):
    """`arguments` is the model's own text: JSON if the model wrote JSON."""

    name: str
    arguments: str


class CalledTool(Struct, frozen=True):
    id: str
    function: FunctionCallText
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    """`reasoning` repeats `reasoning_content`: clients read one or the other."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """`stop_reason` is the stop string or token id that ended it, null at the model's own end."""

    index: int
    message: ChatMessage
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
