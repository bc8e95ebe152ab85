"""HTTP connections with limits: uvicorn's protocol, which has none for the head of a request. Used by `launch`."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pellucid.server.errors import ApiError

HEAD_TIMEOUT_S = 30.0
"""A connection that has not sent a whole head by then is closed."""


class LimitedProtocol(HttpToolsProtocol):
    """Refuses heads above `max_head_bytes` with 431 and malformed requests with 400, both as JSON; closes slow ones.

    An offer to change protocols is ignored, as RFC 9110 (7.8) allows: Java's client sends one with every first request.
    """

    max_head_bytes = 65536
    _running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)
        # uvicorn tells the newest request only, which is another one where requests were pipelined.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        refusal = None
        try:
            self._parse(data)
        except httptools.HttpParserError:
            refusal = ApiError(400, "the request is not valid HTTP")
        # Only bytes of an unfinished head are left to count: what belonged to a body was taken off with its head.
        if self._in_head and self._head_bytes > self.max_head_bytes:
            refusal = ApiError(431, f"the request head is over {self.max_head_bytes} bytes; send fewer headers")
        if refusal is not None and not self.transport.is_closing():
            self._refuse(refusal)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._head_bytes > self.max_head_bytes:
            raise ValueError("the head came at once and is too large")
        self._in_head = False
        self._head_bytes = 0
        self._head_timer.cancel()
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError. The parser stops behind a head that offers another protocol: it is read again."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT is for proxies") from None
                data = self._head_without_offer() + data[stop.args[0] :]
            else:
                return

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: ApiError) -> None:
        # What is written into an answer that has begun would look like a part of it.
        cycles = [cycle for cycle in (self._running, self.cycle) if cycle is not None]
        if not any(cycle.response_started and not cycle.response_complete for cycle in cycles):
            body = msgspec.json.encode(error.body())
            head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            self.transport.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def limited_protocol(max_head_bytes: int) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn, with a limit of its own."""
    attributes: dict[str, Any] = {"max_head_bytes": max_head_bytes}
    return type("LimitedProtocol", (LimitedProtocol,), attributes)
