"""/v1/completions, the tokenizer's endpoints, and what operators ask, on a real model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pellucid import __version__
from pellucid.selection.plan import ExecutionPlan
from tests.server.running import RunningServer


def complete(server: RunningServer, **fields: Any) -> Any:
    answer = server.post("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 6, **fields})
    assert answer.status == 200, answer.body
    return answer.json if not fields.get("stream") else answer.events


def tokens_of(server: RunningServer, prompt: str) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"prompt": prompt}).json["tokens"]
    return tokens


def test_a_prompt_is_a_text_texts_ids_or_lists_of_ids(demo_server: RunningServer) -> None:
    first, second = "Once upon a time", "The capital of France is"
    ids = [tokens_of(demo_server, first), tokens_of(demo_server, second)]
    texts = [complete(demo_server, prompt=prompt)["choices"][0]["text"] for prompt in (first, second)]
    assert complete(demo_server, prompt=ids[0])["choices"][0]["text"] == texts[0]
    for prompts in ([first, second], ids):
        answer = complete(demo_server, prompt=prompts)
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
        assert answer["usage"]["completion_tokens"] == 12


def test_many_prompts_with_many_samples_stream_as_they_are(demo_server: RunningServer) -> None:
    fields = {"prompt": ["One", "Two", "Three"], "n": 2, "temperature": 1.0, "seed": 5, "echo": True}
    whole = [choice["text"] for choice in complete(demo_server, **fields)["choices"]]
    texts = [""] * 6
    for event in complete(demo_server, **fields, stream=True)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == whole
    prompts = ["One", "One", "Two", "Two", "Three", "Three"]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(demo_server: RunningServer, stream: bool) -> None:
    fields = {"prompt": "hi there", "max_tokens": 1, "echo": True, "logprobs": 2}
    if stream:
        pieces = [c["logprobs"] for e in complete(demo_server, **fields, stream=True)[:-1] for c in e["choices"]]
        logprobs = {name: [x for piece in pieces if piece for x in piece[name]] for name in pieces[0]}
    else:
        choice = complete(demo_server, **fields)["choices"][0]
        assert choice["text"] == "hi there" + choice["logprobs"]["tokens"][-1]
        logprobs = choice["logprobs"]
    assert logprobs["tokens"][:2] == ["hi", " there"]
    assert logprobs["text_offset"] == [0, 2, 8]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(math.isfinite(value) and value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])


def test_echo_without_new_tokens_scores_only(demo_server: RunningServer) -> None:
    choice = complete(demo_server, prompt="hi there", max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == "hi there"
    assert len(choice["logprobs"]["tokens"]) == 2
    assert choice["finish_reason"] == "length"


def test_a_limit_that_nobody_asked_for_gives_way_to_a_long_prompt(demo_server: RunningServer) -> None:
    longest = demo_server.get("/v1/models").json["data"][0]["max_model_len"]
    body = {"prompt": [5] * (longest - 3), "temperature": 0, "ignore_eos": True}
    choice = demo_server.post("/v1/completions", body, timeout_s=120).json
    assert choice["usage"]["completion_tokens"] == 3
    asked = demo_server.post("/v1/completions", {**body, "max_tokens": 16})
    assert asked.status == 400


def test_prompt_logprobs_have_vllms_form(demo_server: RunningServer) -> None:
    choice = complete(demo_server, prompt="hi there", prompt_logprobs=1, max_tokens=1)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert {entry["rank"] for entry in second.values()} >= {1}
    assert str(tokens_of(demo_server, "hi there")[1]) in second


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2, 49152]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt[1]"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"allowed_token_ids": [49151, 49152]}, "allowed_token_ids"),
        ({"prompt": [5] * 9000}, None),
        ({"logprobs": 100}, "logprobs"),
        ({"prompt": ["x"] * 1000, "n": 3}, "n"),
        ({"stop": [""]}, "stop[0]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_completions_are_refused_with_their_field(
    demo_server: RunningServer, fields: dict[str, Any], param: str | None
) -> None:
    answer = demo_server.post("/v1/completions", {"prompt": "x", "max_tokens": 4, **fields})
    assert answer.status == 400, answer.body
    if param is not None:
        assert answer.json["error"]["param"] == param


def test_tokenize_and_detokenize_undo_each_other(demo_server: RunningServer) -> None:
    text = "naïve 🦄 <|im_start|>"
    answer = demo_server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == demo_server.get("/v1/models").json["data"][0]["max_model_len"]
    assert demo_server.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": text}
    chat = demo_server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    usage = demo_server.chat("hi", max_tokens=1).json["usage"]
    assert chat["count"] == usage["prompt_tokens"]


def test_the_plan_is_the_object_that_the_engine_runs_on(demo_server: RunningServer) -> None:
    answer = demo_server.get("/plan").json
    plan = ExecutionPlan.from_json(answer["plan"])
    assert plan.decision("attention.decode", 1).value in ("cpu_native", "reference")
    assert plan.to_json() == answer["plan"] or ExecutionPlan.from_json(plan.to_json()) == plan


def test_operators_endpoints_answer(demo_server: RunningServer) -> None:
    assert demo_server.get("/version").json == {"version": __version__}
    for path in ("/health", "/health/live"):
        assert demo_server.get(path).json == {"status": "live"}
    for path in ("/ready", "/health/ready"):
        ready = demo_server.get(path)
        assert ready.status == 200
        assert {"status", "last_step", "last_step_age_s", "running", "waiting"} <= set(ready.json)
    (card,) = demo_server.get("/v1/models").json["data"]
    assert card["id"] == "demo"
    assert demo_server.get("/v1/models/demo").json == card
    assert demo_server.get("/v1/models/other").status == 404
    info = demo_server.get("/server_info").json
    assert info["served_model_name"] == "demo"
    assert info["server_args"]["port"] == {"value": demo_server.port, "source": "asked"}
    assert info["server_args"]["drain_timeout"]["source"] == "default"
    assert info["decisions"]["kv.page_size"]["source"] in ("default", "asked", "forced", "measured")
    head = demo_server.request("HEAD", "/metrics")
    assert head.status == 200
    assert head.body == b""
    assert demo_server.get("/openapi.json").json["openapi"].startswith("3.1")


def test_both_names_reset_the_prefix_cache(demo_server: RunningServer) -> None:
    for path in ("/reset_prefix_cache", "/flush_cache"):
        demo_server.chat("Some prompt that is long enough to fill a whole page of the cache, twice or so. " * 4)
        pages = demo_server.post(path, None).json["pages"]
        assert pages["free"] == pages["total"]
        assert pages["cached"] == pages["held"] == 0


def test_paths_and_methods_that_are_not_here_get_the_apis_errors(demo_server: RunningServer) -> None:
    missing = demo_server.get("/v1/nothing")
    assert (missing.status, missing.json["error"]["type"]) == (404, "not_found_error")
    wrong = demo_server.get("/v1/chat/completions")
    assert wrong.status == 405
    assert wrong.headers["Allow"] == "POST"
    assert wrong.json["error"]["message"]
    form = demo_server.request("POST", "/v1/completions", b"prompt=hi", {"Content-Type": "text/plain"})
    assert form.status == 415
    assert "application/json" in form.json["error"]["message"]


def test_request_ids_come_back(demo_server: RunningServer) -> None:
    named = demo_server.get("/version", headers={"X-Request-Id": "abc-123"})
    assert named.headers["X-Request-Id"] == "abc-123"
    odd = demo_server.get("/version", headers={"X-Request-Id": "a b\x85"})
    assert odd.headers["X-Request-Id"] not in ("", "a b\x85")


def test_samples_after_the_first_do_not_count_its_prompt_as_cached(demo_server: RunningServer) -> None:
    question = "Tell me, if you can, how a lighthouse is built, and who kept its light in the old days. " * 8
    usage = demo_server.chat(question, n=3, max_tokens=2, cache_salt="n samples").json["usage"]
    assert usage["prompt_tokens"] > 128
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_more_sequences_than_the_server_ever_takes_are_a_400_and_start_nothing(demo_server: RunningServer) -> None:
    before = demo_server.metric("pellucid:request_success_total")
    answer = demo_server.post("/v1/completions", {"prompt": ["x"] * 600, "n": 3, "max_tokens": 1})
    assert (answer.status, answer.json["error"]["param"]) == (400, "n")
    assert "1040" in answer.json["error"]["message"]
    assert demo_server.metric("pellucid:request_success_total") == before


def test_a_prompt_that_does_not_fit_refuses_its_siblings_as_well_and_not_as_disconnects(
    demo_server: RunningServer,
) -> None:
    gone = demo_server.metric("pellucid:request_aborted_total", reason="client_disconnected")
    answer = demo_server.post("/v1/completions", {"prompt": ["hi", "x " * 3000], "max_tokens": 4})
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert answer.json["error"]["param"] == "prompt"
    assert "maximum context length is" in answer.json["error"]["message"]
    assert demo_server.metric("pellucid:request_aborted_total", reason="client_disconnected") == gone
    assert demo_server.metric("pellucid:num_requests_running") == 0
    chat = demo_server.chat("x " * 3000)
    assert (chat.json["error"]["param"], chat.json["error"]["code"]) == ("messages", "context_length_exceeded")


def test_a_base_url_without_v1_is_pointed_out(demo_server: RunningServer) -> None:
    answer = demo_server.post("/chat/completions", {"messages": []})
    assert answer.status == 404
    assert "/v1/chat/completions" in answer.json["error"]["message"]


def test_a_browser_gets_the_plan_as_a_page_and_everyone_else_as_json(demo_server: RunningServer) -> None:
    accept = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    page = demo_server.get("/plan", headers=accept)
    assert page.headers["content-type"].startswith("text/html")
    assert b"attention.decode@" in page.body and b"<script" not in page.body
    for other in ({}, {"Accept": "*/*"}, {"Accept": "application/json, text/html"}):
        assert "decisions" in demo_server.get("/plan", headers=other).json["plan"]
