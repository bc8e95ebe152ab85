"""Tracing: one span per request with the field's attributes, off without a trace of it, and never in the way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pellucid.core import PellucidError, RequestMetrics, SamplingParams
from pellucid.server.telemetry.tracing import RequestTrace, Tracing, create_tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

DONE = RequestTrace(
    request_id="chatcmpl-1", model="tiny", operation="chat", path="/v1/chat/completions", status=200, duration_s=2.5,
    params=SamplingParams(temperature=0.5, top_p=0.9, max_tokens=64), prompt_tokens=12, output_tokens=5,
    cached_tokens=8, finish_reasons=("stop",), metrics=RequestMetrics(100.0, 100.25, 100.5, 102.0),
)  # fmt: skip


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    made = Tracing(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


def span_of(exporter: InMemorySpanExporter) -> Any:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_is_one_span_with_its_numbers(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.record(DONE, {})
    span = span_of(exporter)
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    assert span.resource.attributes["service.name"] == "pellucid"
    assert span.end_time - span.start_time == 2_500_000_000
    assert abs(span.end_time - time.time_ns()) < 5e9
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pellucid",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 1,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.prompt_tokens": 12,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 1.75,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }


def test_the_callers_trace_goes_on(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.record(DONE, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=x"})
    span = span_of(exporter)
    assert span.context.trace_id == int(TRACE_ID, 16)
    assert span.parent.span_id == int(PARENT_ID, 16)
    assert span.context.trace_state["vendor"] == "x"


def test_a_caller_that_does_not_sample_gets_no_span(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.record(DONE, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("header", ["", "junk", f"00-{'0' * 32}-{PARENT_ID}-01", "ff" * 40, "é", "x" * 100_000])
def test_a_broken_traceparent_begins_a_trace(header: str, tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.record(DONE, {"traceparent": header, "tracestate": "=,=,\x00"})
    assert span_of(exporter).parent is None


def test_a_failed_request_is_an_error_with_only_what_is_known(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    queued = RequestMetrics(arrival_time=10.0, finish_time=11.0)
    tracing.record(
        RequestTrace("r", "tiny", "chat", "/v1/chat/completions", 503, 0.1, metrics=queued, error="engine_dead"), {}
    )
    span = span_of(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "engine_dead"
    assert [name for name in span.attributes if "latency" in name] == ["gen_ai.latency.e2e"]
    assert "gen_ai.request.max_tokens" not in span.attributes


def test_off_means_that_nothing_is_imported() -> None:
    code = (
        "import sys; from pellucid.server.telemetry.tracing import create_tracing; assert create_tracing(None) is None;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'requests', 'google'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_asked_for_without_the_packages_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(PellucidError, match=r"--otlp-traces-endpoint.*pip install 'pellucid\[otel\]'") as caught:
        create_tracing("http://localhost:4318")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "grpc://localhost:4317", "http://", "ftp://x"])
def test_an_endpoint_that_cannot_work_is_refused(endpoint: str) -> None:
    with pytest.raises(PellucidError, match="--otlp-traces-endpoint"):
        create_tracing(endpoint)


class Collector:
    """A collector's HTTP side; `hang` accepts connections and never answers."""

    def __init__(self, hang: bool) -> None:
        self.paths: list[str] = []
        self.got = threading.Event()
        paths, got = self.paths, self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                paths.append(self.path)
                assert b"llm_request" in body or self.headers.get("Content-Encoding")
                self.send_response(200)
                self.end_headers()
                got.set()

            def log_message(self, *args: Any) -> None:
                pass

        if hang:
            self._socket = socket.create_server(("127.0.0.1", 0))
            self.port = self._socket.getsockname()[1]
        else:
            self._server = HTTPServer(("127.0.0.1", 0), Handler)
            self.port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self._hang = hang

    def close(self) -> None:
        if self._hang:
            self._socket.close()
        else:
            self._server.shutdown()
            self._server.server_close()


@pytest.mark.parametrize(("path", "expected"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/my/otlp", "/my/otlp")])
def test_spans_reach_a_collector_at_shutdown(path: str, expected: str) -> None:
    collector = Collector(hang=False)
    tracing = create_tracing(f"http://127.0.0.1:{collector.port}{path}")
    assert tracing is not None
    tracing.record(DONE, {})
    tracing.shutdown()
    assert collector.got.wait(2.0)
    assert collector.paths == [expected]
    collector.close()


@pytest.mark.parametrize("kind", ["hangs", "refuses"])
def test_a_collector_that_does_not_work_holds_up_nothing(kind: str) -> None:
    collector = Collector(hang=True)
    port = collector.port
    if kind == "refuses":
        collector.close()
    tracing = create_tracing(f"http://127.0.0.1:{port}")
    assert tracing is not None
    start = time.perf_counter()
    for _ in range(3000):
        tracing.record(DONE, {})
    assert (time.perf_counter() - start) / 3000 < 1e-3
    start = time.perf_counter()
    tracing.shutdown(timeout_s=0.2)
    assert time.perf_counter() - start < 1.5
    if kind == "hangs":
        collector.close()


def test_text_that_no_encoding_takes_loses_no_batch(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    tracing.record(RequestTrace("r\ud800", "m\udcff", "chat", "/", 200, 0.0), {})
    assert encode_spans(exporter.get_finished_spans()).SerializeToString()


def test_the_service_name_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OTEL_SERVICE_NAME", "my-llm")
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    tracing.record(DONE, {})
    assert span_of(exporter).resource.attributes["service.name"] == "my-llm"
    tracing.shutdown()
