"""How one chat's output is read and what it is held to: `plan_output`; `SampleReader` then reads each sample."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pellucid.core import StructuredOutputs
from pellucid.engine.output import TextDelta
from pellucid.server.generation.chat_values import ChatEvent, ChatInput
from pellucid.server.parsers.choice import REASONING_PARSERS, Detected, build_grammar, is_reasoning_open
from pellucid.server.parsers.forced_calls import after_reasoning, forced_call_grammar
from pellucid.server.parsers.grammar import Grammar, ReasoningFormat
from pellucid.server.parsers.message import MessageDelta, join
from pellucid.server.parsers.request import ParserRequest
from pellucid.server.parsers.streaming import StreamingParser
from pellucid.tokenizer.structured_output import to_lark

FALLBACK_TOOL_PARSER = "llama3_json"
"""How a call that is asked for is written, and so read, where the model has no form of its own: plain JSON."""

PROMPT_END = 256
"""Characters of the prompt's end that show whether reasoning is open."""


@dataclass(frozen=True, slots=True)
class OutputForm:
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


def plan_output(parsers: Detected, chat: ChatInput, prompt: str) -> OutputForm:
    """Which parsers read this output. A grammar that the output is held to begins after the reasoning."""
    tools = chat.offered_tools
    tool_parser = parsers.tool_parser if tools else None
    if chat.must_call and tool_parser is None:
        tool_parser = FALLBACK_TOOL_PARSER
    reasoning_parser = parsers.reasoning_parser if chat.separate_reasoning else None
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
    return OutputForm(tool_parser, reasoning_parser, request, structured)


class SampleReader:
    """One sample's parser. Without any, text is content as it comes.

    `reasoning_tokens` counts from the first token up to the one that ends the reasoning, tags included. A token that
    spans this end counts whole, and so does all of the delta that shows it.
    """

    def __init__(self, grammar: Grammar | None, one_call: bool) -> None:
        self._parser = None if grammar is None else StreamingParser(grammar)
        self._one_call = one_call
        self._tokens = 0
        self._reasons = self._reasoning_over = self._call_complete = False
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
            message = join(message, self._parser.finish())
        if self._one_call and message.tool_calls:
            message = replace(message, tool_calls=tuple(call for call in message.tool_calls if call.index == 0))
        self._count(message, len(delta.token_ids), self._parser.in_reasoning)
        if message.tool_calls:
            self._call_complete = message.tool_calls[-1].complete
        # A stop string may cut a call off, which nobody should then carry out.
        reason = "tool_calls" if finish == "stop" and self._call_complete else finish
        return ChatEvent(
            delta.index, message, delta.token_ids, delta.logprobs, reason, delta.stop_reason, delta.metrics
        )

    def _count(self, message: MessageDelta, tokens: int, in_reasoning: bool) -> None:
        if self._reasoning_over:
            return
        self._tokens += tokens
        self._reasons = self._reasons or bool(message.reasoning)
        if self._reasons:
            self.reasoning_tokens = self._tokens
        self._reasoning_over = not in_reasoning


def _opens(prompt: str, reasoning: ReasoningFormat) -> bool | None:
    """Does the output begin inside reasoning? None: it may open a block of its own."""
    opened = is_reasoning_open(prompt, reasoning)
    return True if opened is None and reasoning.opened else opened


def _parameters(tool: Mapping[str, Any]) -> list[str]:
    schema = tool["function"].get("parameters") or {}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return list(properties) if isinstance(properties, Mapping) else []
