"""`answer`: a chat's blocks as one object or as a stream, for the protocols whose answers are made of blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from starlette.requests import Request
from starlette.types import ASGIApp

from pellucid.server.context import ServerContext
from pellucid.server.errors import ApiError
from pellucid.server.generation.chat import ChatGeneration
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.http.responding import JSONResponse
from pellucid.server.http.sse import EventStreamResponse, until_disconnected


class Draft(Protocol):
    """An answer that grows by events until it is finished."""

    def read(self, event: ChatEvent) -> object: ...
    def finished(self) -> object: ...


class Writer(Protocol):
    """What makes a stream's bytes of events, and of an error that ends it."""

    def write(self, events: list[ChatEvent]) -> bytes: ...
    def failure(self, error: ApiError) -> bytes: ...


async def answer(
    request: Request, context: ServerContext, generation: ChatGeneration, draft: Draft, writer: Writer | None
) -> ASGIApp:
    """The answer of one generation, streamed by `writer` if there is one. Raises ApiError."""
    if writer is not None:
        return EventStreamResponse(
            _write_all(generation, writer),
            close=generation.close,
            keep_alive_s=context.args.sse_keep_alive_interval,
            on_error=writer.failure,
        )
    try:
        await until_disconnected(request.receive, _read_all(generation, draft))
    finally:
        generation.close()
    return JSONResponse(draft.finished())


async def _read_all(generation: ChatGeneration, draft: Draft) -> None:
    async for events in generation.batches():
        for event in events:
            draft.read(event)


async def _write_all(generation: ChatGeneration, writer: Writer) -> AsyncIterator[bytes]:
    async for events in generation.batches():
        blob = writer.write(events)
        if blob:
            yield blob
