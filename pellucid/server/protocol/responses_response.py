"""What /v1/responses answers: `ResponseObject` and its output items. Made by `server.endpoints.response_draft`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from pellucid.server.protocol.chat import ReasoningEffort
from pellucid.server.protocol.chat_response import ChatLogprob
from pellucid.server.protocol.responses import FunctionTool, NamedFunction, TextConfig

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, tag_field="type", tag="output_text", frozen=True):
    """`logprobs` is empty unless asked for. A token's entry stands with the text that the token made certain."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class OutputReasoning(Struct, tag_field="type", tag="reasoning_text", frozen=True):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message", frozen=True):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, tag_field="type", tag="reasoning", frozen=True):
    """The reasoning in full; `summary` is always empty."""

    id: str
    status: ItemStatus
    content: list[OutputReasoning]
    summary: list[Any] = []
    encrypted_content: None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call", frozen=True):
    """`arguments` is the model's own text: JSON if the model wrote JSON."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class ReasoningEcho(Struct, frozen=True):
    effort: ReasoningEffort | None = None
    summary: None = None


class ResponseObject(Struct, kw_only=True, frozen=True):
    """What was asked, as it was served, and the answer. `temperature` and `top_p` are those that were used."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningEcho
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    max_tool_calls: int | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None
    object: Literal["response"] = "response"
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
