"""What the server answers when it cannot serve: `ApiError`, its constructors, its two bodies.

Endpoints raise it, `server.http.gate` turns it into a response; a stream that has begun sends its body as the last
event.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pellucid.core import ContextLengthError, InvalidRequestError, PellucidError

MAX_ECHO = 200
"""Most characters of a request's own text that a message repeats."""

MAX_MESSAGE = 600
"""Most characters of a message, whoever wrote it."""

_SPACE = re.compile(r"[\s\x00-\x1f\x7f]+")
# An absolute path of two parts or more, other than a route of the API: the last part alone is kept.
_PATH = re.compile(r"(?<![\w.:/])/(?!v1/)(?:[\w.@+~-]+/)+(?=[\w.@+~-])")

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 2xx: what the OpenAI and Anthropic SDKs read to choose their exception.

    `param` is the dotted path of the offending field. `type` and `code` are OpenAI's words; `code` is None where
    OpenAI has none. Line breaks and control characters in `message` become spaces.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = shorten(_SPACE.sub(" ", message).strip(), MAX_MESSAGE)
        self.type = type
        self.param = None if param is None else shorten(param, MAX_ECHO)
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: nested, because the SDKs read nothing else."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The envelope of /v1/messages. Its `type` follows the status; the field is named in the message."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        named = self.param is None or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message}}


def bad_request(message: str, param: str | None = None, code: str | int | None = None) -> ApiError:
    """400. `code` "context_length_exceeded" is what clients look for to shorten a prompt by themselves."""
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str = "no valid API key: send Authorization: Bearer KEY, or x-api-key") -> ApiError:
    """401."""
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)


def not_found(message: str, param: str | None = None) -> ApiError:
    """404: a path, or with `param` "model" a model that is not served."""
    code = "model_not_found" if param == "model" else None
    return ApiError(404, message, type="not_found_error", param=param, code=code)


def method_not_allowed(method: str, allowed: tuple[str, ...]) -> ApiError:
    """405."""
    names = ", ".join(allowed)
    return ApiError(405, f"{shorten(method, 20)} is not allowed here; use {names}", headers={"Allow": names})


def timed_out(message: str) -> ApiError:
    """408: the request's own time is over, in the queue or in the engine.

    SDKs would send it again, and what was too slow once costs the same again: the header tells them not to.
    """
    return ApiError(408, message, type="timeout_error", code="timeout", headers={"x-should-retry": "false"})


def too_large(limit_bytes: int) -> ApiError:
    """413."""
    message = f"the request body is over {limit_bytes:,} bytes; send less, or raise --max-body-mb"
    return ApiError(413, message, code="request_too_large")


def unsupported_media_type(content_type: str | None) -> ApiError:
    """415."""
    given = quote(content_type) if content_type else "none"
    return ApiError(415, f"the Content-Type must be application/json, got {given}", code="unsupported_media_type")


def overloaded(message: str, retry_after_s: float, code: str = "overloaded") -> ApiError:
    """503 while loading, draining or with a full queue: the same request will work after `retry_after_s`."""
    return ApiError(503, message, type="server_error", code=code, headers=_retry_after(retry_after_s))


def engine_dead(retry_after_s: float = 10) -> ApiError:
    """503: the engine process is gone, and the server goes with it; a supervisor starts another. The log says why."""
    message = "the engine has ended, and this server ends with it; try again in a moment"
    headers = _retry_after(retry_after_s)
    return ApiError(503, hide_paths(message), type="server_error", code="engine_dead", headers=headers)


def internal(message: str = "internal error; the server's log has the details under this request's id") -> ApiError:
    """500. Never give it a caught exception's text: that may hold paths and values of other requests."""
    return ApiError(500, message, type="server_error", code="internal_error")


def from_pellucid(error: PellucidError) -> ApiError:
    """A refusal of a lower layer: 400 with its `param` if the request is at fault, else 500. Local paths are cut."""
    message = hide_paths(str(error))
    if isinstance(error, ContextLengthError):
        return bad_request(message, error.param, "context_length_exceeded")
    if isinstance(error, InvalidRequestError):
        return bad_request(message, error.param)
    return internal(message)


def quote(value: object) -> str:
    """`value` as a message may repeat it: its repr, at most MAX_ECHO characters."""
    text = value[: MAX_ECHO + 1] if isinstance(value, str) else value
    return shorten(repr(text), MAX_ECHO)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, with an ellipsis where the rest was."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def hide_paths(message: str) -> str:
    """`message` with the directories of absolute paths taken out."""
    return _PATH.sub("", message)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
