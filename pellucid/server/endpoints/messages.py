"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same chats."""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp

from pellucid.core import PellucidError, SamplingParams, StructuredOutputs
from pellucid.server.context import ServerContext, context_of
from pellucid.server.endpoints.block_answers import answer
from pellucid.server.endpoints.message_draft import MessageDraft
from pellucid.server.endpoints.message_events import MessageWriter
from pellucid.server.endpoints.renaming import in_words_of
from pellucid.server.errors import ApiError, from_pellucid
from pellucid.server.generation.chat import start_chat
from pellucid.server.generation.chat_values import ChatInput
from pellucid.server.generation.sampling import SamplingDefaults, json_schema_text, make_sampling_params
from pellucid.server.http.reading import read_request
from pellucid.server.http.responding import JSONResponse
from pellucid.server.protocol.messages import CountTokensRequest, MessageFields, MessageRequest
from pellucid.server.protocol.messages_response import TokenCount
from pellucid.server.telemetry.record import current_record

NAMES = {
    "structured_outputs": "output_config.format",
    "stop": "stop_sequences",
}
"""This endpoint's names of what chat and `SamplingParams` call otherwise."""


async def create_message(request: Request) -> ASGIApp:
    """One message, streamed if asked."""
    context = context_of(request)
    _name_request()
    body = await read_request(request, context, MessageRequest)
    context.check_model(body.model)
    message_id = f"msg_{body.request_id or uuid.uuid4().hex}"
    params = message_params(body, context.defaults, context.encoder.vocab_size)
    try:
        generation = await start_chat(context, message_id, chat_input(body, params))
    except ApiError as error:
        raise in_words_of(error, NAMES) from None
    draft = MessageDraft(message_id, context.model_name, generation.usage)
    return await answer(request, context, generation, draft, MessageWriter(draft) if body.stream else None)


async def count_tokens(request: Request) -> ASGIApp:
    """The length of the prompt that a message request would have."""
    context = context_of(request)
    _name_request()
    body = await read_request(request, context, CountTokensRequest)
    context.check_model(body.model)
    try:
        count = await asyncio.to_thread(_count, context, chat_input(body, SamplingParams()))
    except PellucidError as error:
        raise in_words_of(from_pellucid(error), NAMES) from None
    return JSONResponse(TokenCount(count))


def message_params(body: MessageRequest, defaults: SamplingDefaults, vocab_size: int) -> SamplingParams:
    """Raises ApiError 400."""
    wanted = None if body.output_config is None else body.output_config.format
    structured = None
    if wanted is not None:
        structured = StructuredOutputs(json=json_schema_text(wanted.schema, "output_config.format.schema"))
    asked = {
        **body.sampling(),
        "stop": body.stop_sequences,
        "max_tokens": body.max_tokens,
        "structured_outputs": structured,
    }
    return make_sampling_params(asked, defaults, vocab_size, NAMES)


def chat_input(body: MessageFields, params: SamplingParams) -> ChatInput:
    """The request as a chat. What goes on with an answer has no reasoning before it."""
    tool_choice, named = body.tool_selection
    return ChatInput(
        messages=body.template_messages(),
        params=params,
        tools=body.template_tools(),
        tool_choice=tool_choice,
        named_tool=named,
        parallel_tool_calls=body.parallel_tool_calls,
        separate_reasoning=not body.continues_answer,
        template_arguments=body.template_arguments(),
        add_generation_prompt=not body.continues_answer,
        continue_final_message=body.continues_answer,
        cache_salt=body.cache_salt or "",
    )


def _name_request() -> None:
    """Anthropic's SDKs look for the request's id under a name of their own."""
    record = current_record()
    record.response_headers["request-id"] = record.request_id


def _count(context: ServerContext, chat: ChatInput) -> int:
    _, token_ids = context.tokenizer.encode_chat(
        chat.messages,
        chat.offered_tools or None,
        chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **chat.template_arguments,
    )
    return len(token_ids)
