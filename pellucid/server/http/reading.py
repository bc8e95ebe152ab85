"""A request's body, within its limits, as a Struct. The first thing every POST endpoint calls."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from pellucid.server.context import ServerContext
from pellucid.server.errors import timed_out, too_large, unsupported_media_type
from pellucid.server.protocol.body import decode_body

T = TypeVar("T", bound=msgspec.Struct)

BODY_TIMEOUT_S = 60


async def read_request(request: Request, context: ServerContext, type: type[T]) -> T:
    """The body as `type`. Names of fields that it does not have go into a response header, and once into the log.

    Raises:
        ApiError: 400 (not such an object), 413 (too large), 415 (not JSON by its own word).
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise unsupported_media_type(content_type or None)
    body, ignored = decode_body(await read_body(request, int(context.args.max_body_mb * 1e6)), type)
    if ignored:
        context.tell_ignored(ignored, "this server does not know them")
    return body


async def read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError 413 as soon as more than `limit` bytes are announced or sent."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise timed_out(f"the request body did not arrive within {BODY_TIMEOUT_S} s") from None
    return b"".join(parts)
