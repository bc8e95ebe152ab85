"""The ASGI middleware that every request passes once: id, key, deadline, errors, log line, metrics, span."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Router
from starlette.types import Message, Receive, Scope, Send

from pellucid.core import PellucidError, RequestMetrics
from pellucid.server.context import ServerContext
from pellucid.server.errors import (
    ApiError,
    bad_request,
    from_pellucid,
    internal,
    method_not_allowed,
    not_found,
    unauthorized,
)
from pellucid.server.http.responding import error_response
from pellucid.server.telemetry.logs import current_request_id, request_log
from pellucid.server.telemetry.record import RequestRecord, set_current_record
from pellucid.server.telemetry.tracing import RequestTrace

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/ready", "/version", "/metrics"})
"""What needs no key: probes and scrapers seldom have one, and the page asks for it itself."""

QUIET_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ready", "/metrics"})
"""Asked every few seconds for ever: no log lines."""

CLIENT_CLOSED = 499
"""nginx's status for a client that went away before its answer: in logs and metrics only."""

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

logger = logging.getLogger(__name__)


class Gate:
    """Wraps the application. No exception passes it: what a handler raises becomes an answer, or ends the stream."""

    def __init__(self, app: Router, context: ServerContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record = RequestRecord(given if _ID.fullmatch(given) else uuid.uuid4().hex, time.monotonic())
        set_current_record(record)
        current_request_id.set(record.request_id)
        answer = _Answer(send, record)
        scope["pellucid.context"] = self._context
        # With an app in the scope, the router raises its 404 and 405 instead of answering in plain text.
        scope["app"] = self
        try:
            record.time_allowed = self._time_allowed(headers)
            record.deadline = record.arrival + record.time_allowed
            self._check_key(scope["path"], headers)
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            answer.status = CLIENT_CLOSED
        except asyncio.CancelledError:
            # By nothing but the end of the server, after its drain.
            logger.warning("the server ended before the client had read its answer")
        except ApiError as error:
            await answer.fail(error, scope, receive)
        except HTTPException as error:
            await answer.fail(_routing_error(error, scope, self._app.routes), scope, receive)
        except PellucidError as error:
            await answer.fail(from_pellucid(error), scope, receive)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await answer.fail(internal(), scope, receive)
        finally:
            self._close_books(scope, headers, record, answer)

    def _time_allowed(self, headers: Headers) -> float:
        limit = self._context.args.request_timeout
        asked = headers.get("x-request-timeout")
        if asked is None:
            return limit
        try:
            seconds = float(asked)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise bad_request("X-Request-Timeout must be a number of seconds above 0", "X-Request-Timeout")
        return min(seconds, limit)

    def _check_key(self, path: str, headers: Headers) -> None:
        keys = self._context.keys.current()
        if not keys or path in OPEN_PATHS or path.startswith("/page/"):
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", "")] + ([token.strip()] if scheme.lower() == "bearer" else [])
        # All are compared, each in constant time: neither the key nor its place in the list shows in the time taken.
        # Headers are bytes, which `Headers` shows as Latin-1.
        matches = [hmac.compare_digest(one.encode("latin-1"), key) for one in offered for key in keys]
        if not any(matches):
            raise unauthorized()

    def _close_books(self, scope: Scope, headers: Headers, record: RequestRecord, answer: _Answer) -> None:
        now = time.monotonic()
        path = _template(scope)
        status = answer.status or CLIENT_CLOSED
        self._context.metrics.http_request(path, scope["method"], status, now - record.arrival)
        ttft = None if record.first_token_time is None else record.first_token_time - record.arrival
        if path not in QUIET_PATHS:
            request_log(
                request_id=record.request_id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                prompt_tokens=record.prompt_tokens,
                cached_tokens=record.cached_tokens,
                output_tokens=record.output_tokens,
                finish_reason=record.finish_reason,
                error=None if record.error is None else record.error.message,
                param=None if record.error is None else record.error.param,
                ttft_s=ttft,
                e2e_s=now - record.arrival,
                client=scope["client"][0] if scope.get("client") else None,
            )
        if self._context.tracing is not None and record.prompt_tokens:
            times = record.metrics or RequestMetrics(record.arrival, first_token_time=record.first_token_time)
            trace = RequestTrace(
                request_id=record.request_id,
                model=self._context.model_name,
                operation="text_completion" if path == "/v1/completions" else "chat",
                path=path,
                status=status,
                duration_s=now - record.arrival,
                params=record.params,
                prompt_tokens=record.prompt_tokens,
                output_tokens=record.output_tokens,
                cached_tokens=record.cached_tokens,
                finish_reasons=() if record.finish_reason is None else (record.finish_reason,),
                metrics=times,
                error=None if record.error is None else record.error.type,
            )
            self._context.tracing.record(trace, dict(headers))


class _Answer:
    """The response of one request on its way out: adds headers, remembers what was sent."""

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send, self._record = send, record
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._add_headers(message)
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        self._record.error = error
        if self.status:
            # The head is out, and with it the status: all that is left is to end the body short.
            logger.error("a response that had begun was cut off: %s", error.message)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await error_response(error, anthropic=scope["path"].startswith("/v1/messages"))(scope, receive, self.send)

    def _add_headers(self, message: MutableMapping[str, Any]) -> None:
        extra = {"X-Request-Id": self._record.request_id, **self._record.response_headers}
        raw = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in extra.items()]
        message["headers"] = [*message.get("headers", ()), *raw]


def _routing_error(error: HTTPException, scope: Scope, routes: Sequence[BaseRoute]) -> ApiError:
    """The router's own 404 and 405 in the API's envelope."""
    if error.status_code == 405:
        return method_not_allowed(scope["method"], tuple((error.headers or {}).get("Allow", "").split(", ")))
    if error.status_code == 404:
        path = scope["path"][:200]
        if any(route.matches({**scope, "path": "/v1" + path})[0] is not Match.NONE for route in routes):
            return not_found(f"there is no {path} here, but /v1{path}: let the client's base URL end in /v1")
        return not_found(f"there is no {path} here; see /openapi.json")
    return ApiError(error.status_code, str(error.detail))


def _template(scope: Scope) -> str:
    """The route's own path, which has few values; `other` for what no route takes."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    return path if isinstance(path, str) else "other"
