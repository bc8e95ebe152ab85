"""The items of a response's `input`, and how a chat template takes them: `template_messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from msgspec import Struct

from pellucid.server.errors import bad_request, quote
from pellucid.server.protocol.conversation import Conversation


class InputText(Struct, tag_field="type", tag="input_text", frozen=True):
    text: str


class OutputTextPart(Struct, tag_field="type", tag="output_text", frozen=True):
    """Text of an answer that is sent back; its annotations and logprobs are of no use here."""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", frozen=True):
    refusal: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text", frozen=True):
    """The content of a reasoning item."""

    text: str


Part = InputText | OutputTextPart | RefusalPart | ReasoningText


class InputItem(Struct, frozen=True):
    """An item of any kind; without a `type` it is a message.

    A message has `role` and `content`, a function_call `call_id`, `name` and `arguments` (JSON text), its
    function_call_output `call_id` and `output`, a reasoning item `content`. Ids and statuses are accepted,
    and of a reasoning item what other servers write.
    """

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"id", "status", "summary", "encrypted_content"})

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputText] | None = None


_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def check_items(items: Sequence[InputItem]) -> None:
    """Raises ApiError 400 for an item that lacks what its kind has, or that answers a call which was not made."""
    called = set()
    for index, item in enumerate(items):
        for name in _NEEDS[item.type]:
            if getattr(item, name) is None:
                raise bad_request(f"input[{index}].{name} is required in a {item.type}", f"input[{index}].{name}")
        if item.type == "function_call":
            called.add(item.call_id)
        elif item.type == "function_call_output" and item.call_id not in called:
            param = f"input[{index}].call_id"
            raise bad_request(f"{param}: no function_call before it has the call_id {quote(item.call_id)}", param)


def template_messages(instructions: str | None, given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Instructions and input as a chat's messages in OpenAI's form.

    Reasoning, text and calls in a row are one assistant message. Developer messages are system messages, which every
    template knows. `given` has passed `check_items`.
    """
    conversation = Conversation()
    if instructions is not None:
        conversation.add_system(instructions)
    for item in [InputItem(role="user", content=given)] if isinstance(given, str) else given:
        _add_item(conversation, item)
    return conversation.messages()


def _add_item(conversation: Conversation, item: InputItem) -> None:
    texts = _texts(item.content)
    match item.type:
        case "function_call":
            assert item.call_id is not None and item.name is not None and item.arguments is not None
            conversation.add_call(item.call_id, item.name, item.arguments)
        case "function_call_output":
            assert item.call_id is not None
            conversation.add_result(item.call_id, _texts(item.output))
        case "reasoning":
            # An item without text is another server's, encrypted: nothing can be made of it here.
            if texts:
                conversation.add_reasoning("".join(texts))
        case "message":
            match item.role:
                case "assistant":
                    if conversation.has_answer:
                        conversation.end_turn()
                    conversation.add_answer("".join(texts))
                case "user":
                    conversation.add_user(texts)
                case _:
                    conversation.add_system("\n".join(texts))


def _texts(content: str | Sequence[Part] | None) -> list[str]:
    if content is None or isinstance(content, str):
        return [content] if content is not None else []
    return [part.refusal if isinstance(part, RefusalPart) else part.text for part in content]
