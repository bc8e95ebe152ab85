"""POST /v1/responses, the part of it that needs no memory: a conversation in, text and function calls out."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from pellucid.core import SamplingParams, StructuredOutputs, TokenLogprobs
from pellucid.server.context import ServerContext, context_of
from pellucid.server.endpoints.block_answers import answer
from pellucid.server.endpoints.logprobs import chat_logprobs
from pellucid.server.endpoints.renaming import in_words_of
from pellucid.server.endpoints.response_draft import ResponseDraft
from pellucid.server.endpoints.response_events import ResponseWriter
from pellucid.server.errors import ApiError, not_found, quote
from pellucid.server.generation.chat import start_chat
from pellucid.server.generation.chat_values import ChatInput
from pellucid.server.generation.sampling import SamplingDefaults, json_schema_text, make_sampling_params
from pellucid.server.http.reading import read_request
from pellucid.server.protocol.chat_response import ChatLogprob
from pellucid.server.protocol.response_format import JsonObjectFormat, TextFormat
from pellucid.server.protocol.responses import ResponseRequest, TextConfig
from pellucid.server.protocol.responses_response import ReasoningEcho, ResponseObject

NAMES = {
    "max_tokens": "max_output_tokens",
    "structured_outputs": "text.format",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
}
"""This endpoint's names of what chat and `SamplingParams` call otherwise."""


async def create_response(request: Request) -> ASGIApp:
    """One response, streamed if asked. Nothing of it is kept."""
    context = context_of(request)
    body = await read_request(request, context, ResponseRequest)
    context.check_model(body.model)
    response_id = f"resp_{body.request_id or uuid.uuid4().hex}"
    chat = chat_input(body, context.defaults, context.encoder.vocab_size)
    try:
        generation = await start_chat(context, response_id, chat)
    except ApiError as error:
        raise in_words_of(error, NAMES) from None
    opening = opening_response(body, chat.params, response_id, context.model_name, context.now())
    draft = ResponseDraft(opening, generation.usage, _speller(context), context.now)
    return await answer(request, context, generation, draft, ResponseWriter(draft) if body.stream else None)


async def stored_response(request: Request) -> ASGIApp:
    """What asks for an earlier response, or for its end: there is none."""
    name = quote(request.path_params["response_id"])
    raise not_found(f"there is no response {name}: nothing is stored here, a response is given once, where it is made")


def chat_input(body: ResponseRequest, defaults: SamplingDefaults, vocab_size: int) -> ChatInput:
    """The request as a chat. Raises ApiError 400."""
    asked = {
        **body.sampling(),
        "stop": body.stop,
        "max_tokens": body.max_output_tokens,
        "logprobs": body.logprobs_limit,
        "structured_outputs": _structured_outputs(body),
    }
    tool_choice, named = body.tool_selection
    return ChatInput(
        messages=body.template_messages(),
        params=make_sampling_params(asked, defaults, vocab_size, NAMES),
        tools=body.template_tools(),
        tool_choice=tool_choice,
        named_tool=named,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_arguments=body.template_arguments(),
        cache_salt=body.cache_salt or "",
        default_max_tokens=body.max_output_tokens is None,
    )


def opening_response(
    body: ResponseRequest, params: SamplingParams, response_id: str, model: str, now: int
) -> ResponseObject:
    """The response before its first token: what was asked, as it is served."""
    return ResponseObject(
        id=response_id,
        created_at=now,
        model=model,
        status="in_progress",
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ReasoningEcho(None if body.reasoning is None else body.reasoning.effort),
        temperature=params.temperature,
        text=TextConfig(body.format, None if body.text is None else body.text.verbosity),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        max_tool_calls=body.max_tool_calls,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        user=body.user,
    )


def _structured_outputs(body: ResponseRequest) -> StructuredOutputs | None:
    wanted = body.format
    if isinstance(wanted, TextFormat):
        return None
    schema = wanted.schema if isinstance(wanted, JsonObjectFormat) else wanted.json_schema
    if schema is None:
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=json_schema_text(schema, "text.format.schema"))


def _speller(context: ServerContext) -> Callable[[Sequence[TokenLogprobs]], list[ChatLogprob]]:
    """Log-probabilities as a response has them."""

    def spell(entries: Sequence[TokenLogprobs]) -> list[ChatLogprob]:
        if not entries:
            return []
        return msgspec.convert(chat_logprobs(context.tokenizer, entries)["content"], list[ChatLogprob])

    return spell
