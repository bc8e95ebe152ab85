"""Bodies of errors, as `server.openapi` shows them. `ApiError` writes them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ErrorObject(Struct, frozen=True):
    """`param` is the path of the field at fault, as in "messages[0].role"."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorResponse(Struct, frozen=True):
    """An error of every endpoint but /v1/messages."""

    error: ErrorObject


class AnthropicErrorObject(Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorResponse(Struct, frozen=True):
    """An error of /v1/messages."""

    error: AnthropicErrorObject
    type: Literal["error"]
