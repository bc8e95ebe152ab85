"""/v1/chat/completions: `ChatCompletionRequest`, and what it means for a template. Read by `server.endpoints.chat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from pellucid.server.errors import bad_request, quote
from pellucid.server.protocol.chat_messages import (
    AssistantMessage,
    Messages,
    NamedToolChoice,
    Tool,
    ToolChoice,
    template_messages,
    template_tools,
)
from pellucid.server.protocol.sampling_fields import REMOVED_FIELDS, Count, SamplingFields
from pellucid.server.protocol.tool_choice import select_tool

MAX_TOP_LOGPROBS = 20

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# What a template argument of a request must not replace: arguments of the tokenizer's chat methods, and names that
# every template is given. Names of special tokens (`bos_token`) are refused by their ending.
RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "self", "messages", "tools", "add_generation_prompt", "continue_final_message", "allow_special_in_content",
        "chat_template", "conversation", "tokenize", "return_dict", "return_tensors", "raise_exception",
        "strftime_now", "additional_special_tokens",
    }
)  # fmt: skip


class ChatCompletionRequest(SamplingFields, kw_only=True, frozen=True):
    """A chat request.

    `max_tokens` and `max_completion_tokens` may both be given if they agree. Without tools, `tool_choice` "auto" and
    "none" have no effect. `reasoning_effort` "none" turns thinking off.

    Raises (in construction):
        ApiError: 400 where fields contradict each other.
    """

    REFUSED: ClassVar[Mapping[str, str]] = {
        **REMOVED_FIELDS,
        "functions": "it was replaced by tools",
        "function_call": "it was replaced by tool_choice",
    }

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.max_tokens, self.max_completion_tokens)
        if None not in given and given[0] != given[1]:
            raise bad_request("max_tokens and max_completion_tokens disagree; give one of them", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        _ = self.tool_selection
        check_template_arguments(self.chat_template_kwargs)
        check_continuation(self.messages, self.add_generation_prompt, self.continue_final_message)

    @property
    def token_limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    @property
    def logprobs_limit(self) -> tuple[int | None, str]:
        return (self.top_logprobs or 0 if self.logprobs else None), "top_logprobs"

    @property
    def tool_selection(self) -> tuple[str, bool]:
        """See `tool_choice.select_tool`."""
        offered = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedToolChoice):
            return select_tool(None, self.tool_choice.function.name, offered)
        return select_tool(self.tool_choice, None, offered)

    @property
    def adds_generation_prompt(self) -> bool:
        """See `adds_generation_prompt`."""
        return adds_generation_prompt(self.add_generation_prompt, self.continue_final_message)

    def template_messages(self) -> list[dict[str, Any]]:
        """See `chat_messages.template_messages`."""
        return template_messages(self.messages)

    def template_tools(self) -> list[dict[str, Any]] | None:
        """See `chat_messages.template_tools`."""
        return template_tools(self.tools)

    def template_arguments(self) -> dict[str, Any]:
        """Variables for the chat template; what `chat_template_kwargs` says wins over `reasoning_effort`."""
        return {**effort_arguments(self.reasoning_effort), **(self.chat_template_kwargs or {})}


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """Template variables of a reasoning effort. "none" is also said with the two names that templates ask for."""
    if effort is None:
        return {}
    off = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off}


def check_template_arguments(arguments: Mapping[str, Any] | None) -> None:
    """Raises ApiError 400 for a name that is the server's own to give."""
    for name in arguments or ():
        if name in RESERVED_TEMPLATE_ARGUMENTS or name.endswith("_token"):
            raise bad_request(f"chat_template_kwargs must not set {quote(name)}", "chat_template_kwargs")


def adds_generation_prompt(asked: bool | None, continues: bool | None) -> bool:
    """Does the prompt open a new answer? Unless that is refused, or the last message is to be continued."""
    return not continues if asked is None else asked


def check_continuation(messages: Messages, add_generation_prompt: bool | None, continues: bool | None) -> None:
    """Raises ApiError 400 where there is no message to continue, or a new one is asked for as well."""
    if not continues:
        return
    if add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    last = messages[-1] if messages else None
    if not isinstance(last, AssistantMessage) or last.tool_calls:
        raise bad_request(
            "continue_final_message needs an assistant message without tool calls at the end", "continue_final_message"
        )
