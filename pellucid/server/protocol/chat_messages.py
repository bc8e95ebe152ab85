"""Messages and tools of a chat request, and how a chat template takes them: `template_messages`, `template_tools`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class TextPart(Struct, frozen=True):
    """The only kind of part that a model which takes text can read. Every prefix is cached without being asked to."""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    text: str
    type: Literal["text"] = "text"


Content = str | list[TextPart] | None


class FunctionCall(Struct, frozen=True):
    """`arguments` is JSON text; clients that send an object are understood."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(Struct, frozen=True):
    """`index` is left from the chunks of a stream."""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"index"})

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class SystemMessage(Struct, tag_field="role", tag="system", frozen=True):
    content: Content
    name: str | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer", frozen=True):
    content: Content
    name: str | None = None


class UserMessage(Struct, tag_field="role", tag="user", frozen=True):
    content: Content
    name: str | None = None


class AssistantMessage(Struct, tag_field="role", tag="assistant", frozen=True):
    """`reasoning_content` and `reasoning` are two names of one thing; the first wins.

    `refusal` stands in for a `content` that is null. The old `function_call` may only be null.
    SDKs send back the whole of an answer, with its `annotations`.
    """

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"annotations"})

    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    function_call: None = None


class ToolMessage(Struct, tag_field="role", tag="tool", frozen=True):
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[Message], Meta(min_length=1)]


class FunctionDefinition(Struct, frozen=True):
    """`parameters` is a JSON schema of the arguments; without it the function takes none."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(Struct, frozen=True):
    name: Name


class NamedToolChoice(Struct, frozen=True):
    """The model must call this function."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates know them: role, content, tool_calls, tool_call_id, name, reasoning_content.

    Absent members are left out. `content` is text or a list of text parts, and None only beside tool calls; there
    templates tell None from "".
    """
    return [_template_message(message) for message in messages]


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's form, members in the order that models were trained on; None if there are none."""
    if not tools:
        return None
    functions = [msgspec.structs.asdict(tool.function) for tool in tools]
    given = [{name: value for name, value in function.items() if value is not None} for function in functions]
    return [{"type": "function", "function": function} for function in given]


def _template_message(message: Message) -> dict[str, Any]:
    prepared = {"role": message.__struct_config__.tag, "content": _template_content(message)}
    if isinstance(message, AssistantMessage):
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            prepared["reasoning_content"] = reasoning
        if message.tool_calls:
            prepared["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        prepared["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        prepared["name"] = message.name
    return prepared


def _template_content(message: Message) -> str | list[dict[str, Any]] | None:
    content = message.content
    if isinstance(message, AssistantMessage) and content is None:
        content = message.refusal
        if content is None and message.tool_calls:
            return None
    if isinstance(content, list):
        return [{"type": "text", "text": part.text} for part in content] or ""
    return content or ""


def _template_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
