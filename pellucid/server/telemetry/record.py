"""`RequestRecord`: what one HTTP request turned out to be. Filled by the endpoints, logged by `gate`."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass, field

from pellucid.core import RequestMetrics, SamplingParams
from pellucid.server.errors import ApiError


@dataclass(slots=True)
class RequestRecord:
    """Times are monotonic seconds. Tokens are 0 for requests that generate nothing.

    `deadline` is when the request must have ended, `time_allowed` how many seconds that was. `response_headers` are
    added to the answer. `params` and `metrics` are those of the first sequence. `error` is what the client was told, be
    it as an answer or as a stream's last event.
    """

    request_id: str = ""
    arrival: float = 0.0
    deadline: float = math.inf
    time_allowed: float = math.inf
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    first_token_time: float | None = None
    finish_reason: str | None = None
    params: SamplingParams | None = None
    metrics: RequestMetrics | None = None
    error: ApiError | None = None
    response_headers: dict[str, str] = field(default_factory=dict)


_CURRENT: ContextVar[RequestRecord | None] = ContextVar("pellucid_request_record", default=None)


def current_record() -> RequestRecord:
    """The record of the request that this task serves; a fresh one outside of any."""
    return _CURRENT.get() or RequestRecord()


def set_current_record(record: RequestRecord) -> None:
    """Called by `gate`, in the task of the request."""
    _CURRENT.set(record)
