"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from pellucid.server.context import ServerContext, context_of, new_id
from pellucid.server.endpoints.logprobs import chat_logprobs, prompt_logprobs
from pellucid.server.generation.chat import ChatGeneration, start_chat
from pellucid.server.generation.chat_values import ChatEvent, ChatInput, CollectedMessage
from pellucid.server.generation.sampling import sampling_params
from pellucid.server.generation.tracked import Usage
from pellucid.server.http.reading import read_request
from pellucid.server.http.responding import JSONResponse
from pellucid.server.http.sse import DONE, EventStreamResponse, until_disconnected
from pellucid.server.parsers.message import MessageDelta, ToolCall
from pellucid.server.protocol.chat import ChatCompletionRequest

encode = msgspec.json.encode


async def create_chat_completion(request: Request) -> ASGIApp:
    """One chat completion, streamed if asked."""
    context = context_of(request)
    body = await read_request(request, context, ChatCompletionRequest)
    context.check_model(body.model)
    response_id = f"chatcmpl-{body.request_id}" if body.request_id else new_id("chatcmpl")
    generation = await start_chat(context, response_id, _chat_input(context, body))
    if body.stream:
        return EventStreamResponse(
            _stream(context, body, response_id, generation),
            close=generation.close,
            keep_alive_s=context.args.sse_keep_alive_interval,
        )
    try:
        messages = await until_disconnected(request.receive, generation.collect())
    finally:
        generation.close()
    return JSONResponse(_completion(context, body, response_id, generation, messages))


def _chat_input(context: ServerContext, body: ChatCompletionRequest) -> ChatInput:
    tool_choice, named = body.tool_selection
    return ChatInput(
        messages=body.template_messages(),
        params=sampling_params(body, context.defaults, context.encoder.vocab_size),
        tools=body.template_tools() or (),
        tool_choice=tool_choice,
        named_tool=named,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        separate_reasoning=body.separate_reasoning is not False,
        template_arguments=body.template_arguments(),
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        cache_salt=body.cache_salt or "",
        default_max_tokens=body.token_limit[0] is None,
    )


def _completion(
    context: ServerContext,
    body: ChatCompletionRequest,
    response_id: str,
    generation: ChatGeneration,
    messages: list[CollectedMessage],
) -> dict[str, Any]:
    completion = {
        "id": response_id,
        "object": "chat.completion",
        "created": context.now(),
        "model": context.model_name,
        "choices": [_choice(context, body, message) for message in messages],
        "usage": generation.usage.openai(),
        "system_fingerprint": context.fingerprint,
    }
    if generation.prompt_logprobs is not None:
        completion["prompt_logprobs"] = prompt_logprobs(context.tokenizer, generation.prompt_logprobs)
    if body.return_token_ids:
        completion["prompt_token_ids"] = generation.prompt_token_ids
    return completion


def _choice(context: ServerContext, body: ChatCompletionRequest, message: CollectedMessage) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "role": "assistant",
        # A turn that is nothing but calls has no content, rather than an empty one.
        "content": message.content or (None if message.tool_calls else ""),
        "refusal": None,
    }
    shown = message.reasoning if body.include_reasoning is not False else ""
    # Two names of one thing: clients of vLLM read the one, all others the other.
    answer["reasoning_content"] = answer["reasoning"] = shown or None
    if message.tool_calls:
        answer["tool_calls"] = [tool_call(call) for call in message.tool_calls]
    choice = {
        "index": message.index,
        "message": answer,
        "logprobs": chat_logprobs(context.tokenizer, message.logprobs) if body.logprobs else None,
        "finish_reason": message.finish_reason,
        "stop_reason": message.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = message.token_ids
    return choice


def tool_call(call: ToolCall) -> dict[str, Any]:
    """A whole call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _stream(
    context: ServerContext, body: ChatCompletionRequest, response_id: str, generation: ChatGeneration
) -> AsyncIterator[bytes]:
    writer = ChunkWriter(context, body, response_id, generation.usage)
    opening = b"".join(writer.opening())
    async for events in generation.batches():
        blob = opening + b"".join([chunk for event in events for chunk in writer.chunks(event)])
        opening = b""
        if blob:
            yield blob
    yield (writer.usage() if body.include_usage else b"") + DONE


class ChunkWriter:
    """Chat events to SSE chunks. What is the same in all of a response's chunks is encoded once."""

    def __init__(self, context: ServerContext, body: ChatCompletionRequest, response_id: str, usage: Usage) -> None:
        head = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": context.now(),
            "model": context.model_name,
            "system_fingerprint": context.fingerprint,
        }
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._context, self._body, self._usage = context, body, usage
        self._continuous = body.continuous_usage_stats
        # OpenAI: with include_usage, the chunks before the last one have a usage that is null.
        self._tail = b'],"usage":null}\n\n' if body.include_usage else b"]}\n\n"
        self._plain = not (body.logprobs or body.return_token_ids or self._continuous)

    def opening(self) -> Iterator[bytes]:
        """The role chunk of each sample."""
        for index in range(self._body.n or 1):
            delta = {"role": "assistant", "content": "", "reasoning_content": None}
            yield self._chunk({"index": index, "delta": delta, **_UNFINISHED})

    def chunks(self, event: ChatEvent) -> Iterator[bytes]:
        """The chunks of one event: its text, its calls, its end."""
        index, message = event.index, event.delta
        if self._plain and event.finish_reason is None and not message.tool_calls and not message.reasoning:
            if message.content:
                # The usual token: no object is built for it.
                yield (
                    b'%b{"index":%d,"delta":{"content":%b,"reasoning_content":null},"logprobs":null,"finish_reason":null}%b'
                    % (self._head, index, encode(message.content), self._tail)
                )
            return
        deltas = list(_deltas(message, self._body.include_reasoning is not False))
        if not deltas and not self._plain and event.token_ids:
            # The token is news though its text is held back.
            deltas = [{"reasoning_content": None}]
        for position, delta in enumerate(deltas):
            choice = {"index": index, "delta": delta, **_UNFINISHED}
            if position == 0:
                self._add_tokens(choice, event)
            yield self._chunk(choice)
        if event.finish_reason is not None:
            end = {"finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
            yield self._chunk({"index": index, "delta": {"reasoning_content": None}, "logprobs": None, **end})

    def usage(self) -> bytes:
        """The last chunk with `include_usage`: no choices, the whole usage."""
        return self._head + b'],"usage":' + encode(self._usage.openai()) + b"}\n\n"

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        tail = self._tail
        if self._continuous:
            tail = b'],"usage":' + encode(self._usage.openai()) + b"}\n\n"
        return self._head + encode(choice) + tail

    def _add_tokens(self, choice: dict[str, Any], event: ChatEvent) -> None:
        if self._body.logprobs and event.logprobs:
            choice["logprobs"] = chat_logprobs(self._context.tokenizer, event.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = event.token_ids


_UNFINISHED = {"logprobs": None, "finish_reason": None}


def _deltas(message: MessageDelta, with_reasoning: bool) -> Iterator[dict[str, Any]]:
    """OpenAI's deltas for what one step added, in the order in which a model writes.

    All have `reasoning_content`: code written for servers of reasoning models reads it without asking.
    """
    if message.reasoning and with_reasoning:
        yield {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if message.content:
        yield {"content": message.content, "reasoning_content": None}
    for call in message.tool_calls:
        if call.name is not None:
            function = {"name": call.name, "arguments": ""}
            entry = {"index": call.index, "id": call.id, "type": "function", "function": function}
            yield {"tool_calls": [entry], "reasoning_content": None}
        if call.arguments:
            entry = {"index": call.index, "function": {"arguments": call.arguments}}
            yield {"tool_calls": [entry], "reasoning_content": None}
