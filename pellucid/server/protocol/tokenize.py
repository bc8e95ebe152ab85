"""/tokenize and /detokenize, in vLLM's shape. Read and made by `server.endpoints.tokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from pellucid.core import MAX_INT
from pellucid.server.errors import bad_request
from pellucid.server.protocol.chat import adds_generation_prompt, check_continuation, check_template_arguments
from pellucid.server.protocol.chat_messages import Messages, Tool, template_messages, template_tools

MAX_TOKENS = 2**20
"""Most ids that are turned into text at once: no model's context is longer."""


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """A text (`prompt`) or a chat (`messages`): exactly one.

    `add_special_tokens` is on for a text and off for a chat, whose template writes them, unless given.

    Raises (in construction):
        ApiError: 400 where fields contradict each other.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        check_template_arguments(self.chat_template_kwargs)
        check_continuation(self.messages or [], self.add_generation_prompt, self.continue_final_message)

    @property
    def adds_special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    @property
    def adds_generation_prompt(self) -> bool:
        """See `chat.adds_generation_prompt`."""
        return adds_generation_prompt(self.add_generation_prompt, self.continue_final_message)

    def template_messages(self) -> list[dict[str, Any]]:
        """See `chat_messages.template_messages`."""
        return template_messages(self.messages or [])

    def template_tools(self) -> list[dict[str, Any]] | None:
        """See `chat_messages.template_tools`."""
        return template_tools(self.tools)


class TokenizeResponse(Struct, frozen=True):
    """`token_strs` are the vocabulary's own spellings, with `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=MAX_INT)]], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


class DetokenizeResponse(Struct, frozen=True):
    prompt: str
