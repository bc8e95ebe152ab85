"""What goes into a chat generation and what comes out: `ChatInput`, `ChatEvent`, `CollectedMessage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pellucid.core import RequestMetrics, SamplingParams, TokenLogprobs
from pellucid.server.parsers.message import MessageDelta, ToolCall


@dataclass(frozen=True, slots=True)
class ChatInput:
    """One chat request, whichever endpoint it came by. Messages and tools are in OpenAI's form.

    `tool_choice` is "auto", "none", "required", or with `named_tool` a tool's name. Without `separate_reasoning` the
    reasoning stays in the content, tags and all. `default_max_tokens`: `params.max_tokens` was not asked for.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    named_tool: bool = False
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    cache_salt: str = ""
    default_max_tokens: bool = False

    @property
    def offered_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model may call: all, none, or the one that is named."""
        if self.tool_choice == "none":
            return ()
        if self.named_tool:
            return [tool for tool in self.tools if tool["function"]["name"] == self.tool_choice]
        return self.tools

    @property
    def must_call(self) -> bool:
        return self.named_tool or self.tool_choice == "required"


class ChatEvent(msgspec.Struct, frozen=True):
    """What became certain of one sample after a step. `delta` is falsy when nothing did.

    `finish_reason` ("stop", "length", "tool_calls", "abort") is on the last event of a sample, with its `metrics`.
    """

    index: int
    delta: MessageDelta
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    metrics: RequestMetrics | None


@dataclass(frozen=True, slots=True)
class CollectedMessage:
    """One whole sample."""

    index: int
    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    stop_reason: str | int | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
