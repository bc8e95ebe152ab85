"""One OpenTelemetry span per request, when `--otlp-traces-endpoint` is given. Endpoints call `Tracing.record`.

The extra `otel` brings the packages; nothing of them is imported when tracing is off. A span is made after its
request has ended and sent by a thread of the library: an exporter that hangs or fails costs spans, never a request.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pellucid import __version__
from pellucid.core import PellucidError, PlanError, RequestMetrics, SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

SPAN_NAME = "llm_request"
"""vLLM's name, which tools that read its traces look for."""

SHUTDOWN_S = 1.0
EXPORT_TIMEOUT_S = 5.0
TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What is worth knowing of one request that has ended. Never its text.

    `operation` is `chat` or `text_completion`, `path` the route's template, `duration_s` counts until the last byte
    was handed over. `metrics` is the first sample's; token counts are sums over samples. `error` is the type of the
    error that the client got.
    """

    request_id: str
    model: str
    operation: str
    path: str
    status: int
    duration_s: float
    params: SamplingParams | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    metrics: RequestMetrics | None = None
    error: str | None = None


class Tracing:
    """Makes spans of requests and hands them to `processor`. `create_tracing` makes the one that exports."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "pellucid"}
        resource = Resource.create({**named, "service.version": __version__})
        # A provider of our own: the library's global one belongs to whoever embeds us.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pellucid", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server_kind, self._error = SpanKind.SERVER, Status(StatusCode.ERROR)

    def record(self, trace: RequestTrace, headers: Mapping[str, str]) -> None:
        """One span that ends now. `headers` may hold `traceparent` and `tracestate`; their sampling flag is obeyed."""
        end_ns = time.time_ns()
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier),
            kind=self._server_kind,
            attributes=_attributes(trace),
            start_time=end_ns - int(trace.duration_s * 1e9),
        )
        if trace.error is not None or trace.status >= 500:
            span.set_status(self._error)
        span.end(end_ns)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Send what is left, waiting at most so long."""
        # The library's own timeout is half a minute for a collector that does not answer.
        ending = threading.Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        ending.start()
        ending.join(timeout_s)


def create_tracing(endpoint: str | None) -> Tracing | None:
    """The tracing of `--otlp-traces-endpoint`; None when it was not given.

    `endpoint` is an OTLP/HTTP URL; `/v1/traces` is added where it has no path. The library's `OTEL_*` environment
    variables (headers, certificates, sampler, batch sizes) hold as they are.

    Raises:
        PellucidError: the packages are not installed, or the endpoint is no such URL.
    """
    if endpoint is None:
        return None
    scheme, separator, rest = endpoint.partition("://")
    if not separator or not rest or scheme not in ("http", "https"):
        raise PlanError(
            f"--otlp-traces-endpoint {endpoint!r}: use the collector's OTLP/HTTP URL, such as http://localhost:4318"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise PellucidError(f"--otlp-traces-endpoint: {error}; pip install 'pellucid[otel]'") from None
    url = endpoint if "/" in rest.strip("/") else endpoint.rstrip("/") + TRACES_PATH
    timeout = None if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT") else EXPORT_TIMEOUT_S
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=timeout)))


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    """OpenTelemetry's names for generative AI, vLLM's where those have none, and vLLM's older ones for token counts."""
    values: dict[str, Any] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": "pellucid",
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.request.id": trace.request_id,
        "gen_ai.response.id": trace.request_id,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "gen_ai.usage.prompt_tokens": trace.prompt_tokens,
        "gen_ai.usage.completion_tokens": trace.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": trace.cached_tokens,
        "gen_ai.latency.e2e": trace.duration_s,
        "http.route": trace.path,
        "http.response.status_code": trace.status,
        "error.type": trace.error,
    }
    if trace.finish_reasons:
        values["gen_ai.response.finish_reasons"] = trace.finish_reasons
    if trace.params is not None:
        values |= {
            "gen_ai.request.max_tokens": trace.params.max_tokens,
            "gen_ai.request.temperature": trace.params.temperature,
            "gen_ai.request.top_p": trace.params.top_p,
            "gen_ai.request.n": trace.params.n,
        }
    if trace.metrics is not None:
        values |= _latencies(trace.metrics)
    return {name: _text(value) for name, value in values.items() if value is not None}


def _latencies(metrics: RequestMetrics) -> dict[str, float | None]:
    """Seconds; None for a phase that the request did not reach."""
    arrival, scheduled = metrics.arrival_time, metrics.scheduled_time
    first, finish = metrics.first_token_time, metrics.finish_time
    return {
        "gen_ai.latency.time_in_queue": _difference(arrival, scheduled),
        "gen_ai.latency.time_to_first_token": _difference(arrival, first),
        "gen_ai.latency.time_in_model_prefill": _difference(scheduled, first),
        "gen_ai.latency.time_in_model_decode": _difference(first, finish),
        "gen_ai.latency.time_in_model_inference": _difference(scheduled, finish),
    }


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _text(value: Any) -> Any:
    """What can't be encoded would lose the whole batch that it is sent with."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
