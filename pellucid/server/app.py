"""`create_app`: the routes and what wraps them. Everything HTTP of the server can be found from here."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from pellucid import __version__
from pellucid.server.context import ServerContext
from pellucid.server.endpoints import operations
from pellucid.server.endpoints.chat import create_chat_completion
from pellucid.server.endpoints.completions import create_completion
from pellucid.server.endpoints.messages import count_tokens, create_message
from pellucid.server.endpoints.responses import create_response, stored_response
from pellucid.server.endpoints.tokenize import detokenize, tokenize
from pellucid.server.http.gate import Gate
from pellucid.server.http.responding import JSONResponse
from pellucid.server.openapi import openapi_document
from pellucid.server.page import page_routes

ROUTES = (
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/{response_id}", stored_response, methods=["GET", "DELETE"]),
    Route("/v1/responses/{response_id}/cancel", stored_response, methods=["POST"]),
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/models", operations.list_models),
    Route("/v1/models/{model:path}", operations.get_model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", operations.health_live),
    Route("/health/live", operations.health_live),
    Route("/ready", operations.health_ready),
    Route("/health/ready", operations.health_ready),
    Route("/metrics", operations.metrics),
    Route("/plan", operations.plan),
    Route("/server_info", operations.server_info),
    Route("/version", operations.version),
    Route("/reset_prefix_cache", operations.reset_prefix_cache, methods=["POST"]),
    Route("/flush_cache", operations.reset_prefix_cache, methods=["GET", "POST"]),
)


def create_app(context: ServerContext) -> ASGIApp:
    """The whole application; `context` stays the same for its life."""

    async def openapi(request: Request) -> JSONResponse:
        return JSONResponse(openapi_document(__version__, (context.model_name,), bool(context.keys.current())))

    routes = [
        *ROUTES,
        Route("/openapi.json", openapi),
        *page_routes(),
    ]
    # A bare router: errors go up to the gate, the one place that answers them.
    gate: ASGIApp = Gate(Router(routes, redirect_slashes=False), context)
    origins = list(context.args.cors_origin)
    if origins:
        exposed = ["X-Request-Id", "X-Ignored-Fields", "Retry-After"]
        gate = CORSMiddleware(
            gate, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    return gate
