"""What the server counts, and how Prometheus reads it. Endpoints and the engine client call it; `/metrics` renders it.

Everything is counted in plain integers by the event loop (a token costs one bisection) and becomes Prometheus
families only when scraped. Names are vLLM's suffixes behind `pellucid:`, so dashboards port by their prefix.

A *request* here is one sequence of the engine: a completion with `n=4` is four. For each one that the engine took,
`request_started` and `request_finished` are called exactly once, and `request_first_token` at most once.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from platform import python_version
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from pellucid import __version__
from pellucid.core import PellucidError, RequestMetrics
from pellucid.step_plan import SchedulerStats

# Every list holds vLLM's bounds; where those start too late to see a fast engine, finer ones come first.
TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HTTP_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("max_num_queued_reqs", "loading", "draining", "unresponsive", "dead")
ABORTS = ("client_disconnected", "request_timeout", "shutdown", "dead", "error")
"""Labels that are there from the start, at zero: a rate over a series that appears with its first event misses it."""

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
MAX_HTTP_SERIES = 500
"""Label sets of the HTTP counters; what comes after counts as path `other`. Clients must not fill the memory."""


class Histogram:
    """Observations counted per bucket; a value equal to a bound belongs to it, as Prometheus has it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        counts, bounds = self.counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        # One copy, so that the buckets of a scrape agree with each other whatever is counted meanwhile.
        counts, cumulated, buckets = list(self.counts), 0, []
        for bound, count in zip((*self.bounds, None), counts, strict=True):
            cumulated += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), float(cumulated)))
        family.add_metric(labels, buckets=buckets, sum_value=self.total)


def token_bounds(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len`, as vLLM."""
    decades = (digit * 10**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return tuple(bound for bound in decades if bound <= max_model_len)


class ServerMetrics(Collector):
    """All metrics of one server, in a registry of their own.

    `prefix` is `pellucid`, or `vllm` for dashboards that can't be changed. `max_model_len` (tokens) bounds the
    buckets of prompt and output lengths. Raises PellucidError when `prefix` can't begin a metric's name.
    """

    def __init__(self, prefix: str, model_name: str, max_model_len: int = 131_072) -> None:
        prefix = prefix.removesuffix(":")
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
            raise PellucidError(f"--metrics-prefix {prefix!r}: use letters, digits and underscores, such as vllm")
        self._prefix, self._model = f"{prefix}:", _label(model_name)
        self._stats: SchedulerStats | None = None
        self._choices: list[tuple[str, ...]] = []
        self._cache_config: dict[str, str] = {}
        self._engine_up: Callable[[], bool] = lambda: False
        self._step_age_s: Callable[[], float | None] = lambda: None
        self._dropped_lines: Callable[[], int] = lambda: 0
        self._tasks: Callable[[], int] = lambda: 0
        self._prompt_tokens = self._generation_tokens = 0
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        self._aborted = dict.fromkeys(ABORTS, 0)
        self._http: dict[tuple[str, ...], int] = {}
        self._http_seconds: dict[tuple[str, ...], Histogram] = {}
        lengths = token_bounds(max_model_len)
        self._ttft, self._gaps, self._tpot = Histogram(TTFT_BOUNDS), Histogram(TOKEN_BOUNDS), Histogram(TOKEN_BOUNDS)
        self._e2e, self._queue = Histogram(REQUEST_BOUNDS), Histogram(REQUEST_BOUNDS)
        self._prefill, self._decode = Histogram(REQUEST_BOUNDS), Histogram(REQUEST_BOUNDS)
        self._inference = Histogram(REQUEST_BOUNDS)
        self._request_prompt, self._request_output = Histogram(lengths), Histogram(lengths)
        self._step_tokens = Histogram(STEP_BOUNDS)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # What happened, told by the server --------------------------------------------------------------------------

    def watch(
        self,
        *,
        engine_up: Callable[[], bool] | None = None,
        step_age_s: Callable[[], float | None] | None = None,
        log_lines_dropped: Callable[[], int] | None = None,
        tasks: Callable[[], int] | None = None,
    ) -> None:
        """Functions to ask at a scrape: the same that `/health/ready` asks, so that both say the same."""
        self._engine_up = engine_up or self._engine_up
        self._step_age_s = step_age_s or self._step_age_s
        self._dropped_lines = log_lines_dropped or self._dropped_lines
        self._tasks = tasks or self._tasks

    def request_started(self, prompt_tokens: int) -> None:
        """The engine took a request."""
        self._prompt_tokens += prompt_tokens

    def request_first_token(self, ttft_s: float) -> None:
        """A request's first token came out, this long after it arrived."""
        self._ttft.observe(max(ttft_s, 0.0))
        self._generation_tokens += 1

    def observe_tokens(self, latencies_s: Sequence[float]) -> None:
        """One step's tokens other than first ones: for each, the seconds since the one before it."""
        self._gaps.observe_all(latencies_s)
        self._generation_tokens += len(latencies_s)

    def request_finished(self, reason: str, metrics: RequestMetrics, prompt_tokens: int, output_tokens: int) -> None:
        """A started request ended, in whatever way: `stop` (or `tool_calls`), `length`, `abort` or `error`.

        Only phases whose both ends are known are observed, except that a request of which nothing is known but its
        arrival and its end has spent all its time in the queue. One token has no time per output token.
        """
        reason = "stop" if reason == "tool_calls" else reason
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self._request_prompt.observe(prompt_tokens)
        self._request_output.observe(output_tokens)
        arrival, scheduled = metrics.arrival_time, metrics.scheduled_time
        first, finish = metrics.first_token_time, metrics.finish_time
        _observe_span(self._e2e, arrival, finish)
        _observe_span(self._queue, arrival, finish if scheduled is first is None else scheduled)
        _observe_span(self._prefill, scheduled, first)
        _observe_span(self._decode, first, finish)
        _observe_span(self._inference, scheduled, finish)
        if first is not None and finish is not None and output_tokens > 1:
            self._tpot.observe(max(finish - first, 0.0) / (output_tokens - 1))

    def request_rejected(self, reason: str) -> None:
        """A request was answered 503 without being taken: one of `REJECTIONS`."""
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def request_aborted(self, reason: str) -> None:
        """Why a request is ended early: one of `ABORTS`. It comes on top of `request_finished("abort", ...)`."""
        self._aborted[reason] = self._aborted.get(reason, 0) + 1

    def engine_stats(self, stats: SchedulerStats | None, iteration_tokens: int) -> None:
        """The engine took a step of so many tokens (0: a heartbeat); `stats` is None where the step sent none."""
        if stats is not None:
            self._stats = stats
        if iteration_tokens > 0:
            self._step_tokens.observe(iteration_tokens)

    def set_plan(self, plan: Mapping[str, Any]) -> None:
        """Take `ExecutionPlan.to_json()`: its choices become `choice_info`, its KV cache `cache_config_info`."""
        self._choices = [
            (d["op"], "any" if d["bucket"] is None else str(d["bucket"]), _label(d["value"]), d["how"])
            for d in plan["decisions"]
        ]
        value = {d["op"]: d["value"] for d in plan["decisions"]}
        self._cache_config = {
            "block_size": _label(value["kv.page_size"]),
            "cache_dtype": _label(value["kv.dtype"]),
            "enable_prefix_caching": _label(value["enable_prefix_caching"]),
            "gpu_memory_utilization": _label(plan["memory"]["utilization"]),
            "kv_cache_size_tokens": _label(value["kv.pages"] * value["kv.page_size"]),
            "num_gpu_blocks": _label(value["kv.pages"]),
        }

    def http_request(self, path_template: str, method: str, status: int, seconds: float) -> None:
        """An answer was sent whole. `path_template` is the route's, never the path that the client wrote."""
        method = method if method in METHODS else "other"
        series = (path_template, method, str(status))
        if series not in self._http and len(self._http) >= MAX_HTTP_SERIES:
            series = ("other", method, str(status))
        self._http[series] = self._http.get(series, 0) + 1
        self._http_seconds.setdefault(series[:2], Histogram(HTTP_BOUNDS)).observe(seconds)

    # What Prometheus reads ---------------------------------------------------------------------------------------

    def render(self, accept: str) -> tuple[bytes, str]:
        """The answer to a scrape and its content type: OpenMetrics where the `Accept` header names it, else plain text.

        Takes some milliseconds, and may be called in another thread than the one that counts.
        """
        # Of the header only this much is used: the library trusts the rest of it too far to pass on what clients send.
        if "application/openmetrics-text" in accept:
            # Its default escaping would turn the colon of every name into an underscore.
            body = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
                self._registry, escaping=openmetrics.ALLOWUTF8
            )
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """Every family of the moment."""
        yield from self._engine_families()
        yield self._counter("prompt_tokens", "Prompt tokens of the requests taken.", self._prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self._generation_tokens)
        by_reason = (
            ("request_success", "Requests ended, by reason.", "finished_reason", self._finished),
            ("admission_rejections", "Requests answered 503 instead of being queued.", "reason", self._rejected),
            ("request_aborted", "Requests ended early, by cause.", "reason", self._aborted),
        )
        for name, text, label, counts in by_reason:
            yield self._counters(name, text, (label,), {(reason,): count for reason, count in list(counts.items())})
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self._ttft),
            ("inter_token_latency_seconds", "Token to token, each.", self._gaps),
            ("request_time_per_output_token_seconds", "Token to token, mean of a request.", self._tpot),
            ("e2e_request_latency_seconds", "Arrival to end.", self._e2e),
            ("request_queue_time_seconds", "Arrival to first computed.", self._queue),
            ("request_prefill_time_seconds", "First computed to first token.", self._prefill),
            ("request_decode_time_seconds", "First token to end.", self._decode),
            ("request_inference_time_seconds", "First computed to end.", self._inference),
            ("request_prompt_tokens", "Prompt tokens of a request.", self._request_prompt),
            ("request_generation_tokens", "Tokens generated for a request.", self._request_output),
            ("iteration_tokens_total", "Tokens computed in a step of the engine.", self._step_tokens),
        ):
            yield self._histograms(name, text, (), {(): histogram})
        yield self._counters("http_requests", "HTTP answers.", ("path", "method", "status"), self._http)
        yield self._histograms(
            "http_request_duration_seconds", "Request to end of answer.", ("path", "method"), self._http_seconds
        )
        yield self._counter("log_lines_dropped", "Log lines that could not be written.", self._dropped_lines())
        yield self._gauge("api_tasks", "Tasks of the API process's event loop.", self._tasks())
        yield from self._info_families()

    def _engine_families(self) -> Iterator[Metric]:
        yield self._gauge("engine_up", "1 while the engine is loaded and answers.", float(self._engine_up()))
        age = self._step_age_s()
        if age is not None:
            yield self._gauge("engine_step_age_seconds", "Since the engine's last step or heartbeat.", age)
        stats = self._stats
        if stats is None:
            return
        usage = stats.held_pages / stats.total_pages if stats.total_pages else 0.0
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use by requests; 1 is all.", usage)
        for name, text, total in (
            ("num_preemptions", "Requests that lost their pages and started over.", stats.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found, not computed.", stats.prefix_cache_hit_tokens),
        ):
            yield self._counter(name, text, total)

    def _info_families(self) -> Iterator[Metric]:
        build = {"version": __version__, "python": python_version()}
        yield self._info("build_info", "The version that runs.", tuple(build), [tuple(build.values())])
        if self._choices:
            config = self._cache_config
            yield self._info("cache_config_info", "The KV cache.", tuple(config), [tuple(config.values())])
            labels = ("op", "bucket", "value", "how")
            yield self._info("choice_info", "What the plan chose, and how it came.", labels, self._choices)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _info(self, name: str, text: str, labels: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=("model_name", *labels))
        for row in rows:
            family.add_metric((self._model, *row), 1)
        return family

    def _counter(self, name: str, text: str, value: int) -> Metric:
        return self._counters(name, text, (), {(): value})

    def _counters(self, name: str, text: str, labels: tuple[str, ...], counts: Mapping[tuple[str, ...], int]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=("model_name", *labels))
        for row, count in list(counts.items()):
            family.add_metric((self._model, *row), count)
        return family

    def _histograms(
        self, name: str, text: str, labels: tuple[str, ...], histograms: Mapping[tuple[str, ...], Histogram]
    ) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=("model_name", *labels))
        for row, histogram in list(histograms.items()):
            histogram.add_to(family, (self._model, *row))
        return family


def _observe_span(histogram: Histogram, start: float | None, end: float | None) -> None:
    if start is not None and end is not None:
        histogram.observe(max(end - start, 0.0))


def _label(value: object) -> str:
    """Text that can be encoded: a path given on the command line need not be UTF-8."""
    return str(value).encode(errors="replace").decode()
