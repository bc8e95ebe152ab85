"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from pellucid.core import InvalidRequestError, PellucidError, check_token_id
from pellucid.server.context import LOADING_RETRY_S, ServerContext, context_of
from pellucid.server.errors import from_pellucid, overloaded
from pellucid.server.http.reading import read_request
from pellucid.server.http.responding import JSONResponse
from pellucid.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


async def tokenize(request: Request) -> JSONResponse:
    """Token ids of a text or of a chat."""
    context = context_of(request)
    body = await read_request(request, context, TokenizeRequest)
    context.check_model(body.model)
    if context.engine.plan is None:
        raise overloaded("the model is not ready yet; see /health/ready", LOADING_RETRY_S, "loading")
    try:
        tokens, strings = await asyncio.to_thread(_encode, context, body)
    except PellucidError as error:
        raise from_pellucid(error) from None
    return JSONResponse(TokenizeResponse(len(tokens), context.max_model_len, tokens, strings))


def _encode(context: ServerContext, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    """Token ids, and with `return_token_strs` their spellings."""
    tokens = _token_ids(context, body)
    if not body.return_token_strs:
        return tokens, None
    return tokens, [context.tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in tokens]


def _token_ids(context: ServerContext, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return context.tokenizer.encode(body.prompt, add_special_tokens=body.adds_special_tokens)
    text, tokens = context.tokenizer.encode_chat(
        body.template_messages(),
        body.template_tools(),
        body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        **(body.chat_template_kwargs or {}),
    )
    return context.tokenizer.encode(text) if body.adds_special_tokens else tokens


async def detokenize(request: Request) -> JSONResponse:
    """The text of token ids, special tokens included."""
    context = context_of(request)
    body = await read_request(request, context, DetokenizeRequest)
    context.check_model(body.model)
    try:
        text = await asyncio.to_thread(_decode, context, body.tokens)
    except InvalidRequestError as error:
        raise from_pellucid(error) from None
    return JSONResponse(DetokenizeResponse(text))


def _decode(context: ServerContext, tokens: list[int]) -> str:
    """Raises InvalidRequestError for an id that is not in the vocabulary."""
    for token_id in tokens:
        check_token_id(token_id, context.encoder.vocab_size, "tokens")
    return context.tokenizer.decode(tokens, skip_special_tokens=False)
