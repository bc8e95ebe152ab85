"""`ChatServer`: answers from any OpenAI-compatible server, by the standard library. Used by `pellucid chat --url`."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pellucid import __version__
from pellucid.cli.event_stream import Event, parse_events
from pellucid.core import InvalidRequestError, PellucidError

CONNECT_TIMEOUT_S = 10.0
MAX_NAMES = 5
"""Most names of models that a message lists."""

REFUSED = (400, 413, 415, 422)
"""Statuses that are about the one request: the conversation can go on without it."""


class ServerError(PellucidError):
    """The server cannot be reached, does not answer this user or model, or broke an answer off."""


class AnswerDelta(NamedTuple):
    """What came next of an answer; either may be empty."""

    reasoning: str = ""
    content: str = ""


class ChatServer:
    """One server. Every request has a connection of its own: closing it tells the server to stop."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises InvalidRequestError for a URL or a key that cannot be sent. `url` may end in /v1."""
        self.url, self._secure, self._host, self._port, self._path = _parse_url(url)
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
            "User-Agent": f"pellucid/{__version__}",
            "Connection": "close",
        }
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise InvalidRequestError("--api-key: the key has characters that no header may have", "api_key")
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def model_names(self) -> tuple[str, ...]:
        """What it serves, in its own order. Raises ServerError, also when it serves nothing."""
        with self._response("GET", "/models", None) as response:
            entries = _object(response.read()).get("data")
        names = [entry.get("id") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        found = tuple(name for name in names if isinstance(name, str))
        if not found:
            raise ServerError(f"{self.url}: the server names no model; give one with --model")
        return found

    def stream_chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> Generator[AnswerDelta]:
        """The answer to `messages` as it comes. Closing the iterator closes the connection.

        Raises:
            InvalidRequestError: the server refused this request (too long, a parameter that it does not take).
            ServerError: anything else, also an answer that ends before its end.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **sampling}
        with self._response("POST", "/chat/completions", body) as response:
            if response.headers.get_content_type() == "application/json":
                yield _delta(self._choice(Event("message", response.read().decode(errors="replace"))), "message")
                return
            complete = False
            for event in parse_events(_chunks(response)):
                if event.data == "[DONE]":
                    return
                choice = self._choice(event)
                complete = complete or choice.get("finish_reason") is not None
                delta = _delta(choice, "delta")
                if delta != AnswerDelta():
                    yield delta
        # Some servers end with the finish reason alone.
        if not complete:
            raise ServerError(f"{self.url}: the answer was cut off: the connection ended before it was complete")

    def _choice(self, event: Event) -> dict[str, Any]:
        """The first choice of a chunk, empty where it has none (usage alone). Raises ServerError for an error event."""
        values = _object(event.data)
        if event.name == "error" or values.get("error"):
            raise ServerError(f"{self.url}: the server broke the answer off: {_error_message(event.data)}")
        if not values:
            raise ServerError(f"{self.url}: the answer was cut off: no whole JSON object: {_one_line(event.data)}")
        choices = values.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else {}
        return first if isinstance(first, dict) else {}

    @contextmanager
    def _response(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """The response, once its status is 200. Whatever goes wrong until then becomes an error of one line."""
        data = None if body is None else json.dumps(body).encode()
        try:
            connection = self._connect()
            with closing(connection):
                if data is not None:
                    _wait_without_limit(connection.sock)
                connection.request(method, self._path + path, data, self._headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        raise self._refusal(response, path)
                    yield response
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: {_reason(error)}") from error

    def _connect(self) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_TIMEOUT_S, context=ssl.create_default_context()
            )
            if self._secure
            else http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        )
        connection.connect()
        return connection

    def _refusal(self, response: http.client.HTTPResponse, path: str) -> PellucidError:
        message = f"HTTP {response.status}: {_error_message(response.read().decode(errors='replace'))}"
        if response.status in REFUSED:
            return InvalidRequestError(message)
        remedy = ""
        if response.status in (401, 403):
            remedy = "; give its key with --api-key or in PELLUCID_API_KEY"
        elif response.status == 404:
            remedy = self._not_found(path)
        elif location := response.getheader("Location"):
            remedy = f"; it has moved: {_one_line(location)}"
        elif response.status in (429, 503):
            after = response.getheader("Retry-After") or ""
            remedy = f"; try again in {after} s" if after.isdecimal() else "; try again later"
        return ServerError(f"{self.url}: {message}{remedy}")

    def _not_found(self, path: str) -> str:
        """What would help: another name, or another URL."""
        if path != "/models":
            try:
                return f"; --model may be: {list_names(self.model_names())}"
            except ServerError:
                pass
        return "; is it an OpenAI-compatible server? --url goes up to /v1"


def list_names(names: Sequence[str]) -> str:
    """The first few of `names`, and how many more there are."""
    more = len(names) - MAX_NAMES
    shown = ", ".join(_one_line(name) for name in names[:MAX_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def _parse_url(url: str) -> tuple[str, bool, str, int | None, str]:
    """(what to show, whether TLS, host, port, path up to and with /v1). Without a scheme it is http."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https"):
        raise InvalidRequestError(f"--url {url}: give it as http://host:port or https://host:port", "url")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequestError(f"--url {host}: no user, query or fragment; --api-key gives a key", "url")
    if not (parts.path.isascii() and parts.path.isprintable() and " " not in parts.path):
        raise InvalidRequestError(f"--url {url}: the path has characters that must be percent-encoded", "url")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}", parts.scheme == "https", host, port, f"{path}/v1"


def _wait_without_limit(connected: socket.socket) -> None:
    """A long prompt may take minutes before its first token; a host that is gone is still noticed, in about two."""
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body as it arrives. A connection that breaks ends it: what is missing tells."""
    try:
        while chunk := response.read1(1 << 16):
            yield chunk
    except (OSError, http.client.HTTPException):
        return


def _delta(choice: Mapping[str, Any], key: str) -> AnswerDelta:
    """Reasoning has two names among servers; null and absent are the same."""
    values = choice.get(key)
    values = values if isinstance(values, dict) else {}
    texts = (values.get(name) for name in ("reasoning_content", "reasoning", "content"))
    first, second, content = (text if isinstance(text, str) else "" for text in texts)
    return AnswerDelta(first or second, content)


def _object(data: str | bytes) -> dict[str, Any]:
    """The JSON object in `data`, empty where there is none."""
    try:
        values = json.loads(data)
    except ValueError:
        values = None
    return values if isinstance(values, dict) else {}


def _error_message(body: str) -> str:
    """The message in an error body of any of the usual shapes, on one line; the body itself where it has none."""
    values: Any = _object(body)
    for key in ("error", "message", "detail"):
        if isinstance(values, dict) and values.get(key):
            values = values[key]
    return _one_line(values if isinstance(values, str) else body) or "no reason given"


def _one_line(text: str, limit: int = 300) -> str:
    shown = "".join(character if character.isprintable() else " " for character in text)
    shown = " ".join(shown.split())
    return shown if len(shown) <= limit else shown[:limit] + "..."


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused; is the server running there?"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    # UnicodeError: a name that no host can have.
    if isinstance(error, socket.gaierror | UnicodeError):
        return "no such host"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate cannot be trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS; try http://"
    if isinstance(error, ConnectionResetError | http.client.BadStatusLine):
        return "the connection closed without an HTTP answer; does it want https://?"
    return _one_line(str(error)) or type(error).__name__
