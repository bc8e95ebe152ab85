"""One streamed answer over a connection of its own, read event by event, or killed in the middle. For tests."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.server.running import RunningServer

LONG = {"prompt": [5, 6, 7], "max_tokens": 2500, "ignore_eos": True, "temperature": 0}
"""Runs for seconds, on the tiny model too: whatever ends sooner was ended."""

BULKY = {
    "messages": [{"role": "user", "content": "a"}],
    "n": 8,
    "max_tokens": 300,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
    "stream": True,
}
"""A chat whose answer is twice what sockets hold: a client that does not read holds it up, but not the engine."""


class Stream:
    """A streamed completion whose head has come."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, response
        self.status = response.status

    def next(self) -> Any:
        """The next event's data, "[DONE]" as text; None at the end of the body."""
        while line := self._response.readline():
            if line.startswith(b"data: "):
                data = line[len(b"data: ") :].strip()
                return "[DONE]" if data == b"[DONE]" else json.loads(data)
        return None

    def rest(self) -> list[Any]:
        """All events to come."""
        return list(iter(self.next, None))

    def kill(self) -> None:
        """Close the connection hard, as a client does that is killed."""
        # The response shares the socket, and a reset goes out only when nobody holds it any more.
        kill_socket(self._connection.sock)
        self._response.close()


def kill_socket(connection: socket.socket) -> None:
    """Close it with a reset instead of an orderly end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def open_stream(
    server: RunningServer, body: Mapping[str, Any] = LONG, headers: Mapping[str, str] | None = None
) -> Iterator[Stream]:
    """A streamed /v1/completions."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    sent = {"Content-Type": "application/json", **(headers or {})}
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), sent)
    response = connection.getresponse()
    try:
        yield Stream(connection, response)
    finally:
        response.close()
        connection.close()


def request_bytes(path: str, body: Any, *headers: str, method: str = "POST") -> bytes:
    """A whole HTTP/1.1 request with a JSON body."""
    data = json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: test", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + data
