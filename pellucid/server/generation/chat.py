"""Starts chats, for the chat, responses and messages endpoints alike: messages in, reasoning, content and calls out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from pellucid.core import PellucidError, TokenLogprobs
from pellucid.server.context import ServerContext
from pellucid.server.errors import bad_request, from_pellucid
from pellucid.server.generation.chat_values import ChatEvent, ChatInput, CollectedMessage
from pellucid.server.generation.output_form import SampleReader, plan_output
from pellucid.server.generation.tracked import TrackedGeneration, Usage, begin_generation, preparation
from pellucid.server.parsers.history import NUMBERED_IDS, with_numbered_call_ids
from pellucid.server.parsers.message import assemble_deltas


async def start_chat(context: ServerContext, request_id: str, chat: ChatInput) -> ChatGeneration:
    """Render, encode and begin a chat.

    Raises:
        ApiError: 400 for messages, tools or parameters that can't be served, 503 while nothing is taken.
    """
    async with preparation(context, chat.params.n):
        _check_tools(chat)
        if chat.offered_tools and not context.tokenizer.shows_tools:
            # The model will not know of them: no error, for agents offer tools with every request, but not in silence.
            context.tell_ignored(("tools",), "the model's chat template has no place for tools")
        try:
            text, token_ids = await asyncio.to_thread(_encode, context, chat)
            plan = plan_output(context.parsers, chat, text)
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
            prompt_field="messages",
        )
    samples = [SampleReader(plan.grammar(index), not chat.parallel_tool_calls) for index in range(params.n)]
    return ChatGeneration(tracked, samples)


class ChatGeneration:
    """A running chat. Close it, whatever ends it."""

    def __init__(self, tracked: TrackedGeneration, samples: Sequence[SampleReader]) -> None:
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
        raise bad_request("tool_choice asks for a call, another field for structured output; send one", "tool_choice")


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
