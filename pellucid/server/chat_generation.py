"""What chat, responses and messages endpoints share: a conversation in, reasoning, content and tool calls out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pellucid.core import PellucidError, RequestMetrics, SamplingParams, StructuredOutputs, TokenLogprobs
from pellucid.engine.output import TextDelta
from pellucid.server.context import ServerContext
from pellucid.server.errors import bad_request, from_pellucid
from pellucid.server.generation import TrackedGeneration, Usage, begin_generation
from pellucid.server.parsers.choice import REASONING_PARSERS, build_grammar, is_reasoning_open
from pellucid.server.parsers.forced_calls import after_reasoning, forced_call_grammar
from pellucid.server.parsers.grammar import Grammar, ReasoningFormat
from pellucid.server.parsers.history import NUMBERED_IDS, with_numbered_call_ids
from pellucid.server.parsers.message import MessageDelta, ToolCall, assemble_deltas
from pellucid.server.parsers.request import ParserRequest
from pellucid.server.parsers.streaming import StreamingParser
from pellucid.tokenizer.structured_output import to_lark

FALLBACK_TOOL_PARSER = "llama3_json"
"""How a call that is asked for is written, and so read, where the model has no form of its own: plain JSON."""


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


class ChatGeneration:
    """A running chat. Close it, whatever ends it."""

    def __init__(self, tracked: TrackedGeneration, samples: Sequence[_Sample]) -> None:
        self._tracked, self._samples = tracked, samples

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._tracked.generation.prompt_token_ids

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """After the end, where they were asked for."""
        return self._tracked.generation.prompt_logprobs

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._tracked.usage

    async def batches(self) -> AsyncIterator[list[ChatEvent]]:
        """Events as they come, all that are there at once; ends after every sample's last. Raises ApiError."""
        samples, usage = self._samples, self._tracked.usage
        async for deltas in self._tracked.batches():
            events = [samples[delta.index].read(delta) for delta in deltas]
            usage.reasoning_tokens = sum(sample.reasoning_tokens for sample in samples)
            yield events

    async def collect(self) -> list[CollectedMessage]:
        """All samples, whole. Raises ApiError."""
        events: list[list[ChatEvent]] = [[] for _ in self._samples]
        async for batch in self.batches():
            for event in batch:
                events[event.index].append(event)
        return [_collect(index, own) for index, own in enumerate(events)]

    def close(self) -> None:
        self._tracked.close()


class _Sample:
    """One sample's parser. Without any, text is content as it comes."""

    def __init__(self, grammar: Grammar | None, one_call: bool) -> None:
        self._parser = None if grammar is None else StreamingParser(grammar)
        self._one_call = one_call
        self._tokens = 0
        self._reasons = self._answers = False
        self.reasoning_tokens = 0

    def read(self, delta: TextDelta) -> ChatEvent:
        finish = delta.finish_reason
        if self._parser is None:
            message = MessageDelta(content=delta.text)
            return ChatEvent(
                delta.index, message, delta.token_ids, delta.logprobs, finish, delta.stop_reason, delta.metrics
            )
        message = self._parser.push(delta.text)
        if finish is not None:
            message = _join(message, self._parser.finish())
        if self._one_call and message.tool_calls:
            message = replace(message, tool_calls=tuple(call for call in message.tool_calls if call.index == 0))
        self._count(message, len(delta.token_ids))
        reason: str | None = finish
        if finish == "stop" and self._parser.has_tool_calls:
            reason = "tool_calls"
        return ChatEvent(
            delta.index, message, delta.token_ids, delta.logprobs, reason, delta.stop_reason, delta.metrics
        )

    def _count(self, message: MessageDelta, tokens: int) -> None:
        """Tokens up to the end of the reasoning, its tags included."""
        self._tokens += tokens
        self._reasons = self._reasons or bool(message.reasoning)
        if self._reasons and not self._answers:
            self.reasoning_tokens = self._tokens
        self._answers = self._answers or bool(message.content or message.tool_calls)


async def start_chat(context: ServerContext, request_id: str, chat: ChatInput) -> ChatGeneration:
    """Render, encode and begin a chat.

    Raises:
        ApiError: 400 for messages, tools or parameters that can't be served, 503 while nothing is taken.
    """
    context.check_admission()
    _check_tools(chat)
    try:
        text, token_ids = await asyncio.to_thread(_encode, context, chat)
        plan = _plan_parsing(context, chat, text)
        prompt = context.encoder.encode_prompt(token_ids)
    except PellucidError as error:
        raise from_pellucid(error) from None
    await context.check_structured(plan.structured)
    # Markers are special tokens: without them a parser has nothing to go by.
    shows_special = plan.parses or not chat.params.skip_special_tokens
    params = replace(chat.params, structured_outputs=plan.structured, skip_special_tokens=not shows_special)
    tracked = begin_generation(
        context,
        prompt,
        params,
        request_id=request_id,
        cache_salt=chat.cache_salt,
        may_shorten=chat.default_max_tokens,
    )
    samples = [_Sample(plan.grammar(index), not chat.parallel_tool_calls) for index in range(params.n)]
    return ChatGeneration(tracked, samples)


def _encode(context: ServerContext, chat: ChatInput) -> tuple[str, list[int]]:
    messages = chat.messages
    if context.parsers.tool_parser in NUMBERED_IDS:
        messages = with_numbered_call_ids(messages)
    return context.tokenizer.encode_chat(
        messages,
        chat.offered_tools or None,
        chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **chat.template_arguments,
    )


def _check_tools(chat: ChatInput) -> None:
    if not chat.must_call:
        return
    if not chat.tools:
        raise bad_request("tool_choice asks for a call, but tools is empty", "tool_choice")
    if not chat.offered_tools:
        raise bad_request(f"tool_choice names {chat.tool_choice!r}, which is not in tools", "tool_choice")
    if chat.params.structured_outputs is not None:
        raise bad_request(
            "tool_choice asks for a call, another field for structured output; send one", "tool_choice"
        )


@dataclass(frozen=True, slots=True)
class _Parsing:
    """How one request's output is read, and what it is held to."""

    tool_parser: str | None
    reasoning_parser: str | None
    request: ParserRequest
    structured: StructuredOutputs | None

    @property
    def parses(self) -> bool:
        return self.tool_parser is not None or self.reasoning_parser is not None

    def grammar(self, index: int) -> Grammar | None:
        """The grammar of one sample, which gives its calls ids of their own."""
        if not self.parses:
            return None
        request = replace(self.request, call_id_prefix=f"call_{uuid.uuid4().hex[:24]}")
        return build_grammar(self.tool_parser, self.reasoning_parser, request)


def _plan_parsing(context: ServerContext, chat: ChatInput, prompt: str) -> _Parsing:
    """Which parsers read this output. A grammar that the output is held to begins after the reasoning."""
    tools = chat.offered_tools
    tool_parser = context.parsers.tool_parser if tools else None
    if chat.must_call and tool_parser is None:
        tool_parser = FALLBACK_TOOL_PARSER
    reasoning_parser = context.parsers.reasoning_parser if chat.separate_reasoning else None
    if chat.continue_final_message:
        # What goes on is the answer, whose reasoning is over.
        reasoning_parser = None
    structured = chat.params.structured_outputs
    lark = None
    if chat.must_call:
        assert tool_parser is not None
        lark = forced_call_grammar(tool_parser, tools, chat.parallel_tool_calls and not chat.named_tool)
    elif structured is not None and reasoning_parser is not None:
        lark = to_lark(structured)
    if lark is not None:
        if reasoning_parser is not None:
            reasoning = REASONING_PARSERS[reasoning_parser]
            lark = after_reasoning(lark, reasoning.opening, reasoning.closing, _opens(prompt, reasoning))
        structured = StructuredOutputs(grammar=lark)
    request = ParserRequest(
        prompt=prompt[-PROMPT_END:],
        tools={tool["function"]["name"]: _parameters(tool) for tool in tools},
        earlier_calls=sum(len(message.get("tool_calls") or ()) for message in chat.messages),
    )
    return _Parsing(tool_parser, reasoning_parser, request, structured)


PROMPT_END = 256
"""Characters of the prompt's end that show whether reasoning is open."""


def _opens(prompt: str, reasoning: ReasoningFormat) -> bool | None:
    """Does the output begin inside reasoning? None: it may open a block of its own."""
    opened = is_reasoning_open(prompt, reasoning)
    return True if opened is None and reasoning.opened else opened


def _parameters(tool: Mapping[str, Any]) -> list[str]:
    schema = tool["function"].get("parameters") or {}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return list(properties) if isinstance(properties, Mapping) else []


def _join(first: MessageDelta, second: MessageDelta) -> MessageDelta:
    """Two deltas in a row as one."""
    if not second:
        return first
    calls = {call.index: call for call in first.tool_calls}
    for call in second.tool_calls:
        old = calls.get(call.index)
        calls[call.index] = (
            call if old is None else replace(old, arguments=old.arguments + call.arguments, complete=call.complete)
        )
    return MessageDelta(first.reasoning + second.reasoning, first.content + second.content, tuple(calls.values()))


def _collect(index: int, events: Sequence[ChatEvent]) -> CollectedMessage:
    message = assemble_deltas([event.delta for event in events])
    last = events[-1]
    return CollectedMessage(
        index=index,
        reasoning=message.reasoning,
        content=message.content,
        tool_calls=message.tool_calls,
        finish_reason=last.finish_reason or "abort",
        stop_reason=last.stop_reason,
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        logprobs=tuple(entry for event in events for entry in event.logprobs),
    )
