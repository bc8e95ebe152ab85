"""Server-sent events: `EventStreamResponse` for the streaming endpoints, and what to do on a disconnect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from pellucid.server.errors import ApiError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect the stream before it passes any of it on.
    (b"x-accel-buffering", b"no"),
)


def event(data: Any) -> bytes:
    """One event whose data is JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """One event with a type, as Responses and Anthropic streams have them."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def error_events(error: ApiError) -> bytes:
    """How a stream that has begun ends in OpenAI's protocol when it can't go on."""
    return event(error.body()) + DONE


class EventStreamResponse:
    """Sends blobs of whole events as they come.

    The response begins with the first blob, so that an error before it is still an HTTP error with its right code; on
    a stream that has begun, `on_error` makes the last events of an `ApiError`. `close` is called at the end whatever
    ended it: the last blob, a client that went away, an error. A stream without news gets a comment every
    `keep_alive_s` seconds, so that proxies keep it open; 0 is off.
    """

    def __init__(
        self,
        blobs: AsyncIterator[bytes],
        *,
        close: Callable[[], None],
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
        on_error: Callable[[ApiError], bytes] = error_events,
    ) -> None:
        self._blobs, self._close, self._on_error = blobs, close, on_error
        self._keep_alive_s = keep_alive_s
        extra = tuple((name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items())
        self._headers = (*HEADERS, *extra)
        self._started = False
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send_all(send))
        others = [asyncio.create_task(_wait_for_disconnect(receive))]
        if self._keep_alive_s > 0:
            others.append(asyncio.create_task(self._keep_alive(send)))
        try:
            await asyncio.wait({sender, others[0]}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            else:
                raise ClientDisconnect
        finally:
            self._close()
            for task in (sender, *others):
                task.cancel()
            await asyncio.gather(sender, *others, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        try:
            async for blob in self._blobs:
                await self._send(send, blob)
        except ApiError as error:
            if not self._started:
                raise
            await self._send(send, self._on_error(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, blob: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": blob, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            idle = time.monotonic() - self._last_sent
            if idle >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)
                idle = 0.0
            await asyncio.sleep(self._keep_alive_s - idle)


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
