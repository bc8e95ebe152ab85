"""/v1/chat/completions of a real model: the stream is the product, and says what the whole answer says."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.server.running import Answer, RunningServer

QUESTION = "What is gravity?"


def deltas(answer: Answer, index: int = 0) -> list[dict[str, Any]]:
    choices = [c for event in answer.events[:-1] for c in event["choices"]]
    return [c["delta"] for c in choices if c["index"] == index]


def text(answer: Answer, index: int = 0) -> str:
    return "".join(delta.get("content") or "" for delta in deltas(answer, index))


def test_the_stream_is_openais(demo_server: RunningServer) -> None:
    answer = demo_server.chat(stream=True, stream_options={"include_usage": True}, max_tokens=5)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    opening = {"role": "assistant", "content": "", "reasoning_content": None}
    assert chunks[0]["choices"] == [{"index": 0, "delta": opening, "logprobs": None, "finish_reason": None}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 6 + ["length"]
    assert chunks[-1]["choices"][0]["delta"] == {"reasoning_content": None}
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in (*chunks, usage)} == {
        (usage["id"], "chat.completion.chunk", usage["created"], "demo")
    }
    assert usage["id"].startswith("chatcmpl-")
    # Usage once, on a chunk without choices, after every finish; null before it.
    assert [c["usage"] for c in chunks] == [None] * 7
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 7},
        {"stop": ["force", "energy"], "max_tokens": 60},
        {"stop": [" is"], "include_stop_str_in_output": True, "max_tokens": 30},
        {"logit_bias": {"260": -100.0}, "max_tokens": 12},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.05, "seed": 1, "max_tokens": 20},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "max_tokens": 20},
        {"response_format": {"type": "json_object"}, "max_tokens": 24},
        {"min_tokens": 12, "max_tokens": 16, "stop_token_ids": [28]},
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_streamed_is_what_is_not_streamed(demo_server: RunningServer, fields: dict[str, Any]) -> None:
    whole = demo_server.chat(**fields)
    streamed = demo_server.chat(**fields, stream=True, stream_options={"include_usage": True})
    assert whole.status == streamed.status == 200, whole.body
    for choice in whole.json["choices"]:
        index = choice["index"]
        assert text(streamed, index) == choice["message"]["content"]
        ends = [c for e in streamed.events[:-1] for c in e["choices"] if c["index"] == index and c["finish_reason"]]
        assert [(c["finish_reason"], c["stop_reason"]) for c in ends] == [
            (choice["finish_reason"], choice["stop_reason"])
        ]
    expected = whole.json["usage"] | {"prompt_tokens_details": None}
    assert streamed.events[-2]["usage"] | {"prompt_tokens_details": None} == expected


def test_stop_strings_end_the_text_and_are_named(demo_server: RunningServer) -> None:
    choice = demo_server.chat(stop=["force", "energy", "physics"], max_tokens=60).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] in ("force", "energy", "physics")
    assert choice["stop_reason"] not in choice["message"]["content"]


def test_samples_differ_by_seed_and_repeat_by_seed(demo_server: RunningServer) -> None:
    def sample(seed: int, n: int = 2) -> list[str]:
        answer = demo_server.chat(n=n, temperature=1.0, seed=seed, max_tokens=12).json
        return [choice["message"]["content"] for choice in answer["choices"]]

    assert sample(3) == sample(3)
    assert len({*sample(3), *sample(300)}) > 2
    assert len({*sample(5, n=4)}) > 1


def test_logprobs_are_those_of_the_tokens_with_exact_bytes(demo_server: RunningServer) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 10}
    answer = demo_server.chat("Write an emoji: 🦄", **fields).json
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 10
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled.decode(errors="replace") == answer["choices"][0]["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert all(a["logprob"] >= b["logprob"] for a, b in pairwise(entry["top_logprobs"]))
        # Greedy: the token taken is the likeliest.
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])
    streamed = demo_server.chat("Write an emoji: 🦄", **fields, stream=True)
    pieces = [c["logprobs"]["content"] for e in streamed.events[:-1] for c in e["choices"] if c["logprobs"]]
    assert [entry["token"] for piece in pieces for entry in piece] == [entry["token"] for entry in entries]


def test_usage_counts_cached_tokens(demo_server: RunningServer) -> None:
    question = "Tell me about the history of the bicycle, from the first wooden ones to those of today, please." * 2
    first, second = (demo_server.chat(question, max_tokens=1).json["usage"] for _ in range(2))
    assert second["prompt_tokens_details"]["cached_tokens"] > first["prompt_tokens_details"]["cached_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] <= second["prompt_tokens"]
    salted = demo_server.chat(question, max_tokens=1, cache_salt="mine").json["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_continuous_usage_counts_up(demo_server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        event["usage"]["completion_tokens"]
        for event in demo_server.chat(stream=True, stream_options=options).events[:-1]
    ]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 8


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": {
                "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer",
                "minimum": 0, "maximum": 99}}, "required": ["name", "age"], "additionalProperties": False}}}},
            lambda text: set(json.loads(text)) == {"name", "age"},
        ),
        ({"structured_outputs": {"choice": ["Paris", "Rome"]}}, lambda text: text in ("Paris", "Rome")),
        ({"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}, lambda text: text[4] == "-" and len(text) == 7),
        ({"regex": "(yes|no)"}, lambda text: text in ("yes", "no")),
        ({"ebnf": 'root ::= "x" ("y" | "z")'}, lambda text: text in ("xy", "xz")),
        ({"json_schema": '{"type": "boolean"}'}, lambda text: text in ("true", "false")),
    ],
    ids=["response_format", "choice", "regex", "sglang regex", "ebnf", "sglang json_schema"],
)  # fmt: skip
def test_outputs_have_the_form_that_is_asked_for(
    demo_server: RunningServer, fields: dict[str, Any], check: Any
) -> None:
    choice = demo_server.chat("Who are you?", **fields, max_tokens=60).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert check(choice["message"]["content"]), choice


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_a_call_that_is_asked_for_comes(demo_server: RunningServer, choice: Any) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 60}
    whole = demo_server.chat("Weather in Paris?", **fields).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city"}
    streamed = demo_server.chat("Weather in Paris?", **fields, stream=True)
    pieces = [p for delta in deltas(streamed) for p in delta.get("tool_calls", ())]
    assert [piece["function"].get("name") for piece in pieces] == ["get_weather"] + [None] * (len(pieces) - 1)
    assert pieces[0]["function"]["arguments"] == ""
    assert all(piece["index"] == 0 for piece in pieces)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert len(pieces) > 2, "arguments must stream, not come in one piece"


def test_tools_without_a_call_are_answered_in_words(demo_server: RunningServer) -> None:
    for tool_choice in ("auto", "none"):
        choice = demo_server.chat(tools=[TOOL], tool_choice=tool_choice).json["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"]


def test_unknown_fields_are_named(demo_server: RunningServer) -> None:
    answer = demo_server.chat(temprature=0.5, best_friend=True)
    assert answer.status == 200
    assert answer.headers["X-Ignored-Fields"] == "best_friend, temprature"


def test_a_message_can_be_continued(demo_server: RunningServer) -> None:
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Gravity is a fundamental"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 3, "continue_final_message": True}
    continued = demo_server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    whole = demo_server.chat(max_tokens=12).json["choices"][0]["message"]["content"]
    assert whole.startswith("Gravity is a fundamental" + continued)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, None),
        ({"max_tokens": "x"}, 400, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"max_completion_tokens": 10**6, "max_tokens": None}, 400, None),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"guided_json": {"type": "object"}}, 400, "guided_json"),
        ({"functions": []  , "function_call": "auto"}, 400, "function_call"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, 400, None),
        ({"structured_outputs": {"regex": "("}}, 400, None),
        ({"stop_token_ids": [151645], "min_tokens": 4}, 400, "stop_token_ids"),
        ({"logit_bias": {"191222": -100}}, 400, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, 400, "logit_bias"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_can_not_be_served_is_refused_with_its_field(
    demo_server: RunningServer, fields: dict[str, Any], status: int, param: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8, **fields}
    answer = demo_server.post("/v1/chat/completions", body)
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert demo_server.chat(max_tokens=1).status == 200
