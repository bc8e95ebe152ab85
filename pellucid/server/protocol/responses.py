"""/v1/responses: `ResponseRequest` and what it means for a chat. Read by `server.endpoints.responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from pellucid.core import MAX_INT
from pellucid.server.protocol.chat import MAX_TOP_LOGPROBS, ReasoningEffort, effort_arguments
from pellucid.server.protocol.chat_messages import Name
from pellucid.server.protocol.generation_fields import GenerationFields
from pellucid.server.protocol.metadata import Metadata
from pellucid.server.protocol.response_format import JsonObjectFormat, TextFormat
from pellucid.server.protocol.response_items import InputItem, check_items, template_messages
from pellucid.server.protocol.sampling_fields import REMOVED_FIELDS, StopString, StopStrings
from pellucid.server.protocol.tool_choice import select_tool

LOGPROBS = "message.output_text.logprobs"

Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]

_STORES_NOTHING = "nothing is stored here; send the whole conversation in input"
_FORMAT = "use text: {format: ...}"


class FunctionTool(Struct, frozen=True):
    """`parameters` is a JSON schema of the arguments; without it the function takes none."""

    type: Literal["function"]
    name: Name
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class NamedFunction(Struct, frozen=True):
    """The model must call this function."""

    type: Literal["function"]
    name: Name


class NamedSchemaFormat(Struct, tag_field="type", tag="json_schema", frozen=True, forbid_unknown_fields=True):
    """JSON that fits a schema. `strict` may be false: the schema is enforced in any case."""

    json_schema: dict[str, Any] | bool = msgspec.field(name="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True):
    """`verbosity` is accepted and has no effect."""

    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, frozen=True):
    """`effort` goes to the chat template, and "none" turns thinking off. Reasoning comes in full, not as a summary."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, frozen=True):
    """`include_obfuscation` has no effect: nothing is padded."""

    include_obfuscation: bool | None = None


class ResponseRequest(GenerationFields, kw_only=True, frozen=True):
    """A request for one response. Nothing is stored, whatever `store` says.

    `stop` is an extension. `truncation` "auto" cuts nothing: an input that is too long is refused. Reasoning comes in
    clear, so that `include` need not ask for it encrypted. `max_tool_calls`, `metadata`, `user`, `service_tier`,
    `prompt_cache_key`, `prompt_cache_retention`, `safety_identifier` and `stream_options` have no effect.

    Raises (in construction):
        ApiError: 400 where fields contradict each other, or an item is not whole.
    """

    REFUSED: ClassVar[Mapping[str, str]] = {
        **REMOVED_FIELDS,
        "previous_response_id": _STORES_NOTHING,
        "conversation": _STORES_NOTHING,
        "prompt": "no prompt templates are stored here; send instructions and input",
        "background": "nothing is stored here to come back for; stream the response instead",
        "context_management": "this server does not compact conversations",
        "moderation": "this server does not moderate",
        "messages": "use input",
        "max_tokens": "use max_output_tokens",
        "max_completion_tokens": "use max_output_tokens",
        "n": "there is one answer to a request; send several requests",
        "logprobs": f"use include: [{LOGPROBS}], and top_logprobs",
        "response_format": _FORMAT,
        "structured_outputs": f"{_FORMAT}, or /v1/chat/completions",
        "json_schema": _FORMAT,
        "regex": "use structured_outputs in /v1/chat/completions",
        "ebnf": "use structured_outputs in /v1/chat/completions",
        "reasoning_effort": "use reasoning: {effort: ...}",
        "functions": "use tools",
        "function_call": "use tool_choice",
    }

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Include] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stop: StopString | StopStrings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None

    metadata: Metadata | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    stream_options: ResponseStreamOptions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.input, str):
            check_items(self.input)
        _ = self.tool_selection

    @property
    def tool_selection(self) -> tuple[str, bool]:
        """See `tool_choice.select_tool`."""
        offered = [tool.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedFunction):
            return select_tool(None, self.tool_choice.name, offered)
        return select_tool(self.tool_choice, None, offered)

    @property
    def logprobs_limit(self) -> int | None:
        """How many alternatives per generated token, None for no logprobs. A `top_logprobs` above 0 asks for them."""
        asked = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        return self.top_logprobs or 0 if asked else None

    @property
    def format(self) -> TextFormat | JsonObjectFormat | NamedSchemaFormat:
        """The form of the answer's text; plain text unless asked."""
        return (self.text and self.text.format) or TextFormat()

    def template_messages(self) -> list[dict[str, Any]]:
        """See `response_items.template_messages`."""
        return template_messages(self.instructions, self.input)

    def template_tools(self) -> list[dict[str, Any]]:
        """The tools in the form of a chat request, members in the order that models were trained on."""
        tools = []
        for tool in self.tools or ():
            members = {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            function = {name: value for name, value in members.items() if value is not None}
            tools.append({"type": "function", "function": function})
        return tools

    def template_arguments(self) -> dict[str, Any]:
        """Variables for the chat template; what `chat_template_kwargs` says wins over `reasoning`."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return {**effort_arguments(effort), **(self.chat_template_kwargs or {})}
