"""Metrics: what is counted is what is shown, under vLLM's names and types, at a price the hot path can pay."""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pellucid.core import PellucidError, RequestMetrics
from pellucid.server.telemetry.metrics import MAX_HTTP_SERIES, STEP_BOUNDS, Histogram, ServerMetrics, token_bounds
from pellucid.step_plan import SchedulerStats

STATS = SchedulerStats(
    running=3, waiting=2, free_pages=10, cached_pages=20, held_pages=10, total_pages=40, steps=100, preemptions=4,
    prefix_cache_queries=6, prefix_cache_query_tokens=600, prefix_cache_hit_tokens=150,
)  # fmt: skip

PLAN: dict[str, Any] = {
    "decisions": [
        {"op": "attention.decode", "bucket": 8, "value": "cpu_native", "how": "measured"},
        {"op": "moe", "bucket": 8, "value": None, "how": "forced by traits"},
        {"op": "kv.page_size", "bucket": None, "value": 16, "how": "default"},
        {"op": "kv.pages", "bucket": None, "value": 40, "how": "default"},
        {"op": "kv.dtype", "bucket": None, "value": "bf16", "how": "default"},
        {"op": "enable_prefix_caching", "bucket": None, "value": True, "how": "default"},
    ],
    "memory": {"utilization": 0.9},
}

# Names and types as vLLM 0.32 sends them.
VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "request_success_total": "counter",
    "num_preemptions_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "admission_rejections_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
}
VLLM_LABELS = {
    ("request_success_total", "finished_reason"): {"stop", "length", "abort", "error"},
    ("admission_rejections_total", "reason"): {"max_num_queued_reqs"},
}
VLLM_BOUNDS = {
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 "
    "640 2560",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    "request_time_per_output_token_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 "
    "80",
    "e2e_request_latency_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "request_queue_time_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}


def full_metrics(prefix: str = "pellucid") -> ServerMetrics:
    metrics = ServerMetrics(prefix, "tiny")
    metrics.watch(engine_up=lambda: True, step_age_s=lambda: 0.25, log_lines_dropped=lambda: 7)
    metrics.engine_stats(STATS, 100)
    metrics.set_plan(PLAN)
    metrics.http_request("/v1/models", "GET", 200, 0.004)
    return metrics


def scrape(metrics: ServerMetrics) -> dict[str, float]:
    """Sample with its labels, as `name{a=b}` without model_name, to its value."""
    values = {}
    for family in parse_text(metrics.render("")[0].decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            values[sample.name.partition(":")[2] + (f"{{{labels}}}" if labels else "")] = sample.value
    return values


def types_on_the_wire(text: str) -> dict[str, str]:
    return {
        line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE ") and ":" in line
    }


@pytest.mark.parametrize("prefix", ["pellucid", "vllm", "vllm:"])
def test_shared_names_and_types_are_those_of_vllm(prefix: str) -> None:
    text = full_metrics(prefix).render("")[0].decode()
    types = types_on_the_wire(text)
    assert {name: types.get(f"{prefix.rstrip(':')}:{name}") for name in VLLM} == VLLM
    assert all(name.startswith(f"{prefix.rstrip(':')}:") for name in types)


def test_labels_of_shared_metrics_are_there_before_the_first_event() -> None:
    samples = [s for family in parse_text(full_metrics().render("")[0].decode()) for s in family.samples]
    for (name, label), expected in VLLM_LABELS.items():
        found = {s.labels[label]: s.value for s in samples if s.name == f"pellucid:{name}"}
        assert expected <= set(found)
        assert set(found.values()) == {0.0}


@pytest.mark.parametrize("name", VLLM_BOUNDS)
def test_every_bound_of_vllm_is_a_bound(name: str) -> None:
    family = next(f for f in parse_text(full_metrics().render("")[0].decode()) if f.name == f"pellucid:{name}")
    bounds = {float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")}
    assert {float(bound) for bound in VLLM_BOUNDS[name].split()} | {float("inf")} <= bounds


def test_every_sample_names_the_model_and_any_model_name_can_be_sent() -> None:
    name = 'a"b\\c\nd \udcff é'
    metrics = ServerMetrics("pellucid", name)
    samples = [s for f in parse_text(metrics.render("")[0].decode()) for s in f.samples if ":" in s.name]
    assert {s.labels["model_name"] for s in samples} == {'a"b\\c\nd ? é'}


@pytest.mark.parametrize("prefix", ["", "9x", "a-b", "a b", "a:b", "é"])
def test_a_prefix_that_no_metric_may_have_is_refused(prefix: str) -> None:
    with pytest.raises(PellucidError, match="--metrics-prefix"):
        ServerMetrics(prefix, "tiny")


@pytest.mark.parametrize(
    "accept",
    ["", "*/*", "text/plain;version=0.0.4;q=0.2,*/*;q=0.1", "text/plain;version=abc", "garbage;;;==,,,", "\x00"],
)
def test_plain_text_for_whoever_does_not_ask_for_more(accept: str) -> None:
    body, content_type = full_metrics().render(accept)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert len(list(parse_text(body.decode()))) > 25


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;q=0.2",
        "application/openmetrics-text; version=abc; escaping=none",
    ],
)
def test_openmetrics_has_the_same_names_and_values(accept: str) -> None:
    metrics = full_metrics()
    body, content_type = metrics.render(accept)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"# EOF\n")
    as_openmetrics = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in parse_openmetrics(body.decode())
        for s in family.samples
        if ":" in s.name
    }
    as_text = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in parse_text(metrics.render("")[0].decode())
        for s in family.samples
        if ":" in s.name
    }
    assert as_openmetrics == as_text


@given(st.lists(st.floats(0, 1e5) | st.sampled_from(STEP_BOUNDS)), st.lists(st.floats(0, 1e5)))
@settings(max_examples=50, deadline=None)
def test_buckets_are_what_counting_by_hand_gives(one_by_one: list[float], at_once: list[float]) -> None:
    from prometheus_client.core import HistogramMetricFamily

    histogram = Histogram(STEP_BOUNDS)
    for value in one_by_one:
        histogram.observe(value)
    histogram.observe_all(at_once)
    family = HistogramMetricFamily("x", "x")
    histogram.add_to(family, ())
    seen = {s.labels.get("le", s.name): s.value for s in family.samples}
    values = one_by_one + at_once
    for bound in (*map(float, STEP_BOUNDS), float("inf")):
        key = "+Inf" if bound == float("inf") else str(bound)
        assert seen[key] == sum(value <= bound for value in values)
    assert seen["x_count"] == len(values)
    assert seen["x_sum"] == pytest.approx(sum(values))


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, (1,)), (9, (1, 2, 5)), (10, (1, 2, 5, 10)), (99, (1, 2, 5, 10, 20, 50))]
)
def test_length_buckets_end_at_the_context_length(limit: int, expected: tuple[int, ...]) -> None:
    assert token_bounds(limit) == expected


@dataclass
class Sequence:
    """A request of the model server below, as the metrics should have seen it."""

    prompt: int
    arrival: float
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    finish: float | None = None
    reason: str | None = None


def play(metrics: ServerMetrics, seed: int, steps: int) -> list[Sequence]:
    """A random server: requests come, are scheduled, get tokens, end, are aborted at any point."""
    rng, now, everyone, running = random.Random(seed), 0.0, [], []
    for _ in range(steps):
        now += rng.choice([0.001, 0.01, 0.3])
        if rng.random() < 0.4:
            sequence = Sequence(rng.randint(1, 50), now)
            everyone.append(sequence)
            running.append(sequence)
            metrics.request_started(sequence.prompt)
        gaps, tokens = [], 0
        for sequence in list(running):
            if rng.random() < 0.2:
                continue
            if rng.random() < 0.1:
                sequence.reason = "abort"
                metrics.request_aborted("client_disconnected")
            elif sequence.scheduled is None:
                sequence.scheduled = now
            else:
                tokens += 1
                if sequence.token_times:
                    gaps.append(now - sequence.token_times[-1])
                else:
                    metrics.request_first_token(now - sequence.arrival)
                sequence.token_times.append(now)
                sequence.reason = rng.choice([None, None, None, "stop", "length", "tool_calls"])
            if sequence.reason is not None:
                sequence.finish = now
                running.remove(sequence)
                first = sequence.token_times[0] if sequence.token_times else None
                times = RequestMetrics(sequence.arrival, sequence.scheduled, first, now)
                metrics.request_finished(sequence.reason, times, sequence.prompt, len(sequence.token_times))
        metrics.observe_tokens(gaps)
        metrics.engine_stats(None, tokens)
    return everyone


@pytest.mark.parametrize("seed", range(8))
def test_counts_add_up_whatever_happens_to_requests(seed: int) -> None:
    metrics = ServerMetrics("pellucid", "tiny")
    everyone = play(metrics, seed, 200)
    seen = scrape(metrics)
    done = [s for s in everyone if s.finish is not None]
    begun = [s for s in everyone if s.token_times]

    assert seen["time_to_first_token_seconds_count"] == len(begun)
    assert seen["time_to_first_token_seconds_sum"] == pytest.approx(sum(s.token_times[0] - s.arrival for s in begun))
    assert seen["generation_tokens_total"] == sum(len(s.token_times) for s in everyone)
    assert seen["generation_tokens_total"] == len(begun) + seen["inter_token_latency_seconds_count"]
    assert seen["prompt_tokens_total"] == sum(s.prompt for s in everyone)
    for reason, merged in (("stop", ("stop", "tool_calls")), ("length", ("length",)), ("abort", ("abort",))):
        assert seen[f"request_success_total{{finished_reason={reason}}}"] == sum(s.reason in merged for s in done)
    assert seen["request_aborted_total{reason=client_disconnected}"] == sum(s.reason == "abort" for s in done)
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert seen[f"{name}_count"] == len(done)
    assert seen["e2e_request_latency_seconds_sum"] == pytest.approx(sum(s.finish - s.arrival for s in done))
    # Every second of a request is in exactly one phase.
    whole = [s for s in done if s.token_times]
    phases = ("queue", "prefill", "decode")
    total = sum(seen[f"request_{phase}_time_seconds_sum"] for phase in phases)
    waited = sum(s.finish - s.arrival for s in done if s.scheduled is None)
    cut = sum(s.scheduled - s.arrival for s in done if s.scheduled is not None and not s.token_times)
    assert total == pytest.approx(sum(s.finish - s.arrival for s in whole) + waited + cut)
    assert seen["request_time_per_output_token_seconds_count"] == sum(len(s.token_times) > 1 for s in done)
    assert seen["iteration_tokens_total_sum"] == seen["generation_tokens_total"]


def test_engine_state_is_asked_at_the_scrape() -> None:
    metrics, state = ServerMetrics("pellucid", "tiny"), {"up": False, "age": None, "lost": 0}
    metrics.watch(
        engine_up=lambda: state["up"], step_age_s=lambda: state["age"], log_lines_dropped=lambda: state["lost"]
    )
    before = scrape(metrics)
    assert before["engine_up"] == 0
    assert "engine_step_age_seconds" not in before
    assert "num_requests_running" not in before
    state.update(up=True, age=11.5, lost=3)
    metrics.engine_stats(STATS, 0)
    after = scrape(metrics)
    assert after["engine_up"] == 1
    assert after["engine_step_age_seconds"] == 11.5
    assert after["log_lines_dropped_total"] == 3
    assert (after["num_requests_running"], after["num_requests_waiting"]) == (3, 2)
    # Cached pages are given up on demand, so they are not in use.
    assert after["kv_cache_usage_perc"] == 0.25
    assert after["num_preemptions_total"] == 4
    assert after["prefix_cache_queries_total"] == 600
    assert after["prefix_cache_hits_total"] == 150
    assert after["iteration_tokens_total_count"] == 0


def test_the_plan_is_shown_choice_by_choice() -> None:
    seen = scrape(full_metrics())
    assert seen["choice_info{bucket=8,how=measured,op=attention.decode,value=cpu_native}"] == 1
    assert seen["choice_info{bucket=8,how=forced by traits,op=moe,value=None}"] == 1
    assert seen["choice_info{bucket=any,how=default,op=kv.page_size,value=16}"] == 1
    config = next(key for key in seen if key.startswith("cache_config_info"))
    for pair in ("block_size=16", "num_gpu_blocks=40", "kv_cache_size_tokens=640", "cache_dtype=bf16"):
        assert pair in config


def test_rejections_are_counted_by_reason_known_or_new() -> None:
    metrics = ServerMetrics("pellucid", "tiny")
    for reason in ("draining", "draining", "brand_new"):
        metrics.request_rejected(reason)
    seen = scrape(metrics)
    assert seen["admission_rejections_total{reason=draining}"] == 2
    assert seen["admission_rejections_total{reason=brand_new}"] == 1
    assert seen["admission_rejections_total{reason=max_num_queued_reqs}"] == 0


def test_clients_cannot_make_series_without_end() -> None:
    metrics = ServerMetrics("pellucid", "tiny")
    for number in range(3 * MAX_HTTP_SERIES):
        metrics.http_request(f"/{number}", f"VERB{number}", 404, 0.0)
    series = {key: value for key, value in scrape(metrics).items() if key.startswith("http_requests_total")}
    assert len(series) <= MAX_HTTP_SERIES + 1
    assert sum(series.values()) == 3 * MAX_HTTP_SERIES
    assert not any("VERB" in key for key in series)


def test_two_servers_in_one_process_share_nothing() -> None:
    one, other = full_metrics(), full_metrics()
    one.request_started(5)
    assert scrape(one)["prompt_tokens_total"] == 5
    assert scrape(other)["prompt_tokens_total"] == 0


def test_a_scrape_in_a_thread_sees_whole_and_growing_numbers_while_the_loop_counts() -> None:
    metrics, stop, problems, scrapes = ServerMetrics("pellucid", "tiny"), threading.Event(), [], []

    def scrape_on() -> None:
        last: dict[str, float] = {}
        while not stop.is_set():
            seen = scrape(metrics)
            counts = [v for k, v in seen.items() if k.startswith("inter_token_latency_seconds_bucket")]
            if counts != sorted(counts) or counts[-1] != seen["inter_token_latency_seconds_count"]:
                problems.append(f"buckets disagree: {counts}")
            problems.extend(
                f"{key} fell from {last[key]} to {value}"
                for key, value in seen.items()
                if key.endswith(("_total", "_count")) and value < last.get(key, 0)
            )
            last = seen
            scrapes.append(seen["generation_tokens_total"])

    thread = threading.Thread(target=scrape_on)
    thread.start()
    counted, end = 0, time.monotonic() + 1.0
    while time.monotonic() < end:
        metrics.observe_tokens([0.002, 0.02, 0.2])
        metrics.request_rejected(f"reason {counted % 97}")
        counted += 3
    stop.set()
    thread.join()
    assert not problems, problems[:3]
    assert len(scrapes) > 1
    assert scrapes[-1] > 0
    assert scrape(metrics)["generation_tokens_total"] == counted


def test_a_token_costs_less_than_a_microsecond() -> None:
    metrics, gaps = ServerMetrics("pellucid", "tiny"), [0.0123] * 128
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            metrics.observe_tokens(gaps)
            metrics.engine_stats(STATS, 128)
        best = min(best, (time.perf_counter() - start) / (100 * len(gaps)))
    assert best < 1e-6


def test_the_operators_page_lists_every_metric_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate.md").read_text()
    table = page[page.index("| metric | kind |") : page.index("Beside them `process_*`")]
    names = "\n".join(row.split("|")[1] for row in table.splitlines() if "|" in row)
    listed = set(re.findall(r"`([a-z_0-9]+)(?:\{[^`]*\})?`", names))
    assert listed == {name.partition(":")[2] for name in types_on_the_wire(full_metrics().render("")[0].decode())}
