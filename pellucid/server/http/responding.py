"""Responses that are not streams."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from pellucid.server.errors import ApiError


class JSONResponse(Response):
    """JSON by msgspec, which also takes Structs and dataclasses."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: ApiError, *, anthropic: bool = False) -> JSONResponse:
    """An `ApiError` in the envelope of the endpoint's protocol."""
    body = error.anthropic_body() if anthropic else error.body()
    return JSONResponse(body, status_code=error.status, headers=error.headers)
