"""GET /openapi.json: `openapi_document`, made from the table of routes and the Structs that endpoints decode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pellucid.server.protocol.chat import ChatCompletionRequest
from pellucid.server.protocol.chat_response import ChatCompletion
from pellucid.server.protocol.completions import MAX_PROMPTS, CompletionRequest
from pellucid.server.protocol.completions_response import Completion
from pellucid.server.protocol.error import AnthropicErrorResponse, ErrorResponse
from pellucid.server.protocol.messages import CountTokensRequest, MessageRequest
from pellucid.server.protocol.messages_response import Message, TokenCount
from pellucid.server.protocol.models import ModelCard, ModelList
from pellucid.server.protocol.responses import ResponseRequest
from pellucid.server.protocol.responses_response import ResponseObject
from pellucid.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

JSON = "application/json"
STREAM = "text/event-stream"

DESCRIPTION = (
    "An OpenAI-compatible server. Fields that a request may have beyond these are ignored and named in the response's "
    "X-Ignored-Fields header, but for those whose silence would change the answer: they are refused."
)

_References = Mapping[type[msgspec.Struct], Mapping[str, Any]]

_WORD = re.compile(r"\w+")
_PARAMETER = re.compile(r"\{(\w+)\}")

REASONS: Mapping[int, str] = {
    200: "Done",
    400: "The request cannot be served as asked; `param` names the field",
    401: "No valid API key",
    404: "No such model",
    408: "The request's time is over",
    413: "The body is too large",
    415: "The body is not JSON",
    500: "Internal error; the log has the details",
    503: "Not now: loading, draining, overloaded, or the engine is gone",
}

READS_BODY = (400, 401, 404, 413, 415, 500)
GENERATES: Mapping[str, Any] = {"streams": True, "errors": (*READS_BODY, 408, 503)}


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the document. `answer` is a Struct, or the content type of what has no fixed shape.

    `errors` are the statuses that carry `error`; a status in `same_shape` carries the answer itself, as health
    checks do. `open` routes need no API key.
    """

    method: str
    path: str
    summary: str
    request: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | str = JSON
    streams: bool = False
    errors: tuple[int, ...] = ()
    same_shape: tuple[int, ...] = ()
    error: type[msgspec.Struct] = ErrorResponse
    open: bool = False


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", "Answer a chat", ChatCompletionRequest, ChatCompletion, **GENERATES),
    Route("POST", "/v1/completions", "Continue prompts", CompletionRequest, Completion, **GENERATES),
    Route("POST", "/v1/responses", "Answer items (OpenAI)", ResponseRequest, ResponseObject, **GENERATES),
    Route("GET", "/v1/responses/{response_id}", "Always 404: nothing is stored", errors=(401, 404)),
    Route("DELETE", "/v1/responses/{response_id}", "Always 404: nothing is stored", errors=(401, 404)),
    Route("POST", "/v1/responses/{response_id}/cancel", "Always 404: nothing is stored", errors=(401, 404)),
    Route(
        "POST",
        "/v1/messages",
        "Answer a chat (Anthropic)",
        MessageRequest,
        Message,
        error=AnthropicErrorResponse,
        **GENERATES,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "Size of a prompt (Anthropic)",
        CountTokensRequest,
        TokenCount,
        errors=READS_BODY,
        error=AnthropicErrorResponse,
    ),
    Route("POST", "/tokenize", "Token ids of a text or chat", TokenizeRequest, TokenizeResponse, errors=READS_BODY),
    Route("POST", "/detokenize", "Text of token ids", DetokenizeRequest, DetokenizeResponse, errors=READS_BODY),
    Route("POST", "/reset_prefix_cache", "Forget cached prefixes", errors=(401, 500, 503)),
    Route("POST", "/flush_cache", "Forget cached prefixes", errors=(401, 500, 503)),
    Route("GET", "/flush_cache", "Forget cached prefixes", errors=(401, 500, 503)),
    Route("GET", "/v1/models", "The models served", answer=ModelList, errors=(401,)),
    Route("GET", "/v1/models/{id}", "One model", answer=ModelCard, errors=(401, 404)),
    Route("GET", "/health", "Is the process alive", open=True),
    Route("GET", "/health/live", "Is the process alive", open=True),
    Route("GET", "/ready", "Would a request be served now", same_shape=(503,), open=True),
    Route("GET", "/health/ready", "Would a request be served now", same_shape=(503,), open=True),
    Route("GET", "/server_info", "Every setting with its source", errors=(401,)),
    Route("GET", "/plan", "The execution plan that runs, with its evidence", errors=(401, 503)),
    Route("GET", "/metrics", "Prometheus metrics", answer="text/plain", open=True),
    Route("GET", "/version", "Version of the server", open=True),
    Route("GET", "/openapi.json", "This document", errors=(401,)),
    Route("GET", "/", "A page to chat from", answer="text/html", open=True),
)

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

# What msgspec's types cannot say: members of a Struct's schema, and of its properties, that replace its own.
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "CompletionRequest": {
        "properties": {
            "prompt": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                    _TOKEN_IDS,
                    {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
                ]
            }
        }
    },
    "TokenizeRequest": {
        "oneOf": [
            {
                "required": ["prompt"],
                "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}},
            },
            {
                "required": ["messages"],
                "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}},
            },
        ]
    },
}


def openapi_document(
    version: str, models: Sequence[str] = (), keys: bool = False, routes: Iterable[Route] = ROUTES
) -> dict[str, Any]:
    """An OpenAPI 3.1 document of `routes`.

    `models` are the names that a request may give (none: not said); `keys` says that the server asks for an API key.
    """
    routes = tuple(routes)
    references, schemas = _schemas(routes, models)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, references, models, keys)
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pellucid", "version": version, "description": DESCRIPTION},
        "paths": paths,
        "components": components,
    }


def _operation(route: Route, references: _References, models: Sequence[str], keys: bool) -> dict[str, Any]:
    def content(shape: type[msgspec.Struct] | str) -> dict[str, Any]:
        return {shape: {}} if isinstance(shape, str) else {JSON: {"schema": references[shape]}}

    answer = {**content(route.answer), **(content(STREAM) if route.streams else {})}
    responses = dict.fromkeys((200, *route.same_shape), answer)
    responses |= {status: content(route.error) for status in route.errors if keys or status != 401}
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *_WORD.findall(route.path)]),
        "summary": route.summary,
        "responses": {
            str(status): {"description": REASONS[status], "content": found}
            for status, found in sorted(responses.items())
        },
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": content(route.request)}
    names = _PARAMETER.findall(route.path)
    if names:
        schema = {"type": "string", "minLength": 1, **({"enum": list(models)} if models else {})}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if keys and not route.open:
        operation["security"] = [{"bearer": []}, {"key": []}]
    return operation


def _schemas(routes: Iterable[Route], models: Sequence[str]) -> tuple[_References, dict[str, Any]]:
    """A reference for each Struct that the routes name, and the schemas of all that those lead to."""
    shapes = dict.fromkeys(shape for route in routes for shape in (route.request, route.answer, route.error))
    structs = [shape for shape in shapes if shape is not None and not isinstance(shape, str)]
    found, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for name, schema in schemas.items():
        if "description" in schema:
            schema["description"] = _for_users(schema["description"])
        own = _SCHEMAS.get(name, {})
        properties = {**schema.get("properties", {}), **own.get("properties", {})}
        if models and "model" in properties and name.endswith("Request"):
            properties["model"] = _only(properties["model"], models)
        schema.update({**own, "properties": properties})
    return dict(zip(structs, found, strict=True)), schemas


def _for_users(docstring: str) -> str:
    """A Struct's docstring without what is Python's affair, a paragraph a line."""
    described, _, _ = docstring.partition("\n\nRaises")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in described.split("\n\n"))


def _only(schema: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """The schema of a model's name with the names that are served; null stays where it was allowed."""
    nullable = any(variant.get("type") == "null" for variant in schema.get("anyOf", ()))
    return {"enum": [*models, None] if nullable else [*models]}
