"""/v1/messages and its count_tokens: requests, and what they mean for a chat. Read by `server.endpoints.messages`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from pellucid.server.protocol.chat import ReasoningEffort, effort_arguments
from pellucid.server.protocol.chat_messages import Name
from pellucid.server.protocol.generation_fields import GenerationFields
from pellucid.server.protocol.message_blocks import (
    InputMessage,
    System,
    check_messages,
    continues_answer,
    template_messages,
)
from pellucid.server.protocol.metadata import MetadataWithNull
from pellucid.server.protocol.sampling_fields import REMOVED_FIELDS, Count, StopStrings
from pellucid.server.protocol.tool_choice import select_tool

_FORMAT = "use output_config: {format: {type: json_schema, schema: ...}}"


class ToolDefinition(Struct, frozen=True):
    """A tool that the client runs; tools that Anthropic runs have another `type`."""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class AutoChoice(Struct, tag_field="type", tag="auto", frozen=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any", frozen=True):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class ToolChoice(Struct, tag_field="type", tag="tool", frozen=True):
    """The model must call this tool."""

    name: Name
    disable_parallel_tool_use: bool | None = None


class NoneChoice(Struct, tag_field="type", tag="none", frozen=True):
    """The model must not call a tool."""


class Thinking(Struct, frozen=True):
    """On or off, where the chat template has such a switch; "adaptive" is on.

    `budget_tokens` and `display` have no effect: a model thinks as long as it does, and the client has to send back
    what it thought, for nothing is stored here.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema", frozen=True, forbid_unknown_fields=True):
    """JSON that fits a schema."""

    schema: dict[str, Any] | bool


class OutputConfig(Struct, frozen=True):
    """`effort` goes to the chat template."""

    effort: ReasoningEffort | None = None
    format: SchemaFormat | None = None


class MessageFields(GenerationFields, kw_only=True, frozen=True):
    """A conversation. Base of both requests.

    Raises (in construction):
        ApiError: 400 where fields contradict each other, or blocks are where they can't be.
    """

    REFUSED: ClassVar[Mapping[str, str]] = {
        **REMOVED_FIELDS,
        "stop": "use stop_sequences",
        "n": "there is one answer to a request; send several requests",
        "logprobs": "use /v1/chat/completions",
        "top_logprobs": "use /v1/chat/completions",
        "response_format": _FORMAT,
        "structured_outputs": f"{_FORMAT}, or /v1/chat/completions",
        "json_schema": _FORMAT,
        "regex": "use structured_outputs in /v1/chat/completions",
        "ebnf": "use structured_outputs in /v1/chat/completions",
        "output_format": _FORMAT,
        "reasoning_effort": "use output_config: {effort: ...}",
        "parallel_tool_calls": "use tool_choice: {type: auto, disable_parallel_tool_use: ...}",
        "container": "no tools run here",
        "mcp_servers": "no tools run here; give the servers' tools as tools",
    }

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: System | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoneChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_messages(self.messages)
        _ = self.tool_selection
        continues_answer(self.messages)

    @property
    def continues_answer(self) -> bool:
        """See `message_blocks.continues_answer`."""
        return continues_answer(self.messages)

    @property
    def tool_selection(self) -> tuple[str, bool]:
        """See `tool_choice.select_tool`."""
        choice = self.tool_choice
        named = choice.name if isinstance(choice, ToolChoice) else None
        word = "required" if isinstance(choice, AnyChoice) else "none" if isinstance(choice, NoneChoice) else None
        return select_tool(word, named, [tool.name for tool in self.tools or ()], 'of type "any"')

    @property
    def parallel_tool_calls(self) -> bool:
        """May the model call several tools at once?"""
        choice = self.tool_choice
        return choice is None or isinstance(choice, NoneChoice) or not choice.disable_parallel_tool_use

    def template_messages(self) -> list[dict[str, Any]]:
        """See `message_blocks.template_messages`."""
        return template_messages(self.system, self.messages)

    def template_tools(self) -> list[dict[str, Any]]:
        """The tools in the form of a chat request, members in the order that models were trained on."""
        tools = []
        for tool in self.tools or ():
            described = {} if tool.description is None else {"description": tool.description}
            function = {"name": tool.name, **described, "parameters": tool.input_schema}
            tools.append({"type": "function", "function": function})
        return tools

    def template_arguments(self) -> dict[str, Any]:
        """Variables for the chat template, thinking under both names of its switch; `chat_template_kwargs` wins."""
        effort = None if self.output_config is None else self.output_config.effort
        arguments = effort_arguments(effort)
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            arguments |= {"enable_thinking": thinks, "thinking": thinks}
        return {**arguments, **(self.chat_template_kwargs or {})}


class CountTokensRequest(MessageFields, kw_only=True, frozen=True):
    """What a message request says of its prompt; the rest may be there and has no effect."""


class MessageRequest(MessageFields, kw_only=True, frozen=True):
    """A request for one message. `metadata` and `service_tier` have no effect.

    A last message of the assistant's is continued: the answer goes on where it ends.
    """

    max_tokens: Count
    stop_sequences: StopStrings | None = None
    metadata: MetadataWithNull | None = None
    service_tier: str | None = None
