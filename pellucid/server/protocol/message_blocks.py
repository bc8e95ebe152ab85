"""Messages of /v1/messages and their content blocks, and how a chat template takes them: `template_messages`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from pellucid.server.errors import bad_request, quote
from pellucid.server.protocol.conversation import Conversation

# Claude Code writes one with another hash into every system prompt: nothing after it would be found in the cache.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


class TextBlock(Struct, tag_field="type", tag="text", frozen=True):
    """`cache_control`, here and in other blocks, is accepted: every prefix is cached without it."""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking", frozen=True):
    """Goes back to the model as its reasoning. `signature` is not checked: this server signs nothing."""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking", frozen=True):
    """Another server's, encrypted: left out."""

    data: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use", frozen=True):
    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control", "caller"})

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag_field="type", tag="tool_result", frozen=True):
    """`is_error` is accepted; that it was one is for the content to say."""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock

System = str | list[TextBlock]


class InputMessage(Struct, frozen=True):
    """Blocks of calls and thinking are an assistant's, those of results a user's."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


_BLOCKS_OF_ROLE = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def check_messages(messages: Sequence[InputMessage]) -> None:
    """Raises ApiError 400 for a block that its role can't have, and a result of a call that was not made."""
    called = set()
    for index, message in enumerate(messages):
        blocks = [] if isinstance(message.content, str) else message.content
        for position, block in enumerate(blocks):
            param = f"messages[{index}].content[{position}]"
            if not isinstance(block, _BLOCKS_OF_ROLE[message.role]):
                kind = block.__struct_config__.tag
                raise bad_request(f"{param}: a {kind} block can't be in a message of role {message.role}", param)
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                wanted = quote(block.tool_use_id)
                raise bad_request(f"{param}: no tool_use before it has the id {wanted}", f"{param}.tool_use_id")


def continues_answer(messages: Sequence[InputMessage]) -> bool:
    """Is the last message an assistant's, which the model is to go on with?

    Raises:
        ApiError: 400; it is, and has no text that could be continued.
    """
    last = messages[-1]
    if last.role != "assistant":
        return False
    blocks = [] if isinstance(last.content, str) else last.content
    if any(isinstance(block, ToolUseBlock) for block in blocks):
        raise bad_request("messages: the last message calls tools; send their tool_result blocks after it", "messages")
    if not "".join(_texts(last.content)).strip():
        raise bad_request("messages: the last message is an assistant's without text to continue", "messages")
    return True


def template_messages(system: System | None, messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """System text and messages as a chat's messages in OpenAI's form.

    A user's tool results are messages of their own, before its text. Assistant messages in a row are one.
    `messages` have passed `check_messages`.
    """
    conversation = Conversation()
    _add_system(conversation, system)
    for message in messages:
        match message.role:
            case "system":
                _add_system(conversation, [TextBlock(text) for text in _texts(message.content)])
            case "assistant":
                _add_assistant(conversation, message.content)
            case "user":
                _add_user(conversation, message.content)
    return conversation.messages()


def _add_system(conversation: Conversation, system: System | None) -> None:
    texts = [_BILLING_LINE.sub("", text) for text in _texts(system)]
    text = "\n\n".join(text for text in texts if text)
    if text:
        conversation.add_system(text)


def _add_assistant(conversation: Conversation, content: str | Sequence[Block]) -> None:
    for block in [TextBlock(content)] if isinstance(content, str) else content:
        match block:
            case ThinkingBlock():
                conversation.add_reasoning(block.thinking)
            case TextBlock():
                conversation.add_answer(block.text)
            case ToolUseBlock():
                conversation.add_call(block.id, block.name, msgspec.json.encode(block.input).decode())


def _add_user(conversation: Conversation, content: str | Sequence[Block]) -> None:
    results = [] if isinstance(content, str) else [block for block in content if isinstance(block, ToolResultBlock)]
    for result in results:
        conversation.add_result(result.tool_use_id, _texts(result.content))
    texts = _texts(content)
    if texts or not results:
        conversation.add_user(texts)


def _texts(content: str | Sequence[Block] | None) -> list[str]:
    if content is None or isinstance(content, str):
        return [content] if content is not None else []
    return [block.text for block in content if isinstance(block, TextBlock)]
