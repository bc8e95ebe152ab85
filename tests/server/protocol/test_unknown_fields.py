from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.chat import ChatCompletionRequest
from pellucid.server.protocol.completions import CompletionRequest
from pellucid.server.protocol.messages import MessageRequest
from pellucid.server.protocol.responses import ResponseRequest
from pellucid.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from pellucid.server.protocol.unknown_fields import MAX_UNKNOWN, has_only_known_fields

USER = {"role": "user", "content": "hi"}
CALL = {"function": {"name": "f", "arguments": {"a": 1}, "args": 1}, "index": 0, "kind": 1}
TOOL = {"type": "function", "function": {"name": "f", "parametres": {}}}


def named(type: type[msgspec.Struct], **fields: Any) -> tuple[str, ...]:
    return decode_body(json.dumps(fields).encode(), type)[1]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stream": True, "stream_options": {"include_usag": True}}, ["stream_options.include_usag"]),
        ({"messages": [USER, {**USER, "contnt": 1}]}, ["messages[1].contnt"]),
        ({"messages": [USER, {**USER, "tool_call_id": "x"}]}, ["messages[1].tool_call_id"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "txt": 1}]}]},
         ["messages[0].content[0].txt"]),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
         ["messages[0].tool_calls[0].kind", "messages[0].tool_calls[0].function.args"]),
        ({"tools": [TOOL]}, ["tools[0].function.parametres"]),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}},
         ["tools[0].function.parametres", "tool_choice.x"]),
        ({"response_format": {"type": "text", "x": 1}, "zeta": 1}, ["zeta", "response_format.x"]),
    ],
)  # fmt: skip
def test_a_nested_field_without_effect_is_named_with_its_path(fields: dict[str, Any], expected: list[str]) -> None:
    assert set(named(ChatCompletionRequest, **{"messages": [USER], **fields})) == set(expected)


def test_every_protocol_names_them() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "", "x": 1}]}
    assert named(ResponseRequest, input=[item], text={"format": {"type": "text"}, "verbsity": 1}) == (
        "input[0].content[0].x",
        "text.verbsity",
    )
    blocks = [{"type": "text", "text": "", "x": 1, "cache_control": {"type": "ephemeral"}}]
    message = {"role": "user", "content": blocks}
    assert named(MessageRequest, max_tokens=1, messages=[message]) == ("messages[0].content[0].x",)
    assert named(TokenizeRequest, messages=[{**USER, "x": 1}]) == ("messages[0].x",)


def test_what_says_nothing_or_has_no_fixed_shape_is_not_named() -> None:
    anything = {"x": {"y": 1}, "items": [{"z": 1}]}
    call = {"function": {"name": "f", "arguments": anything}}
    fields = {
        "messages": [{**USER, "audio": None}, {"role": "assistant", "tool_calls": [call], "annotations": []}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": anything}}],
        "chat_template_kwargs": anything,
        "response_format": {"type": "json_schema", "json_schema": {"schema": anything}},
        "logit_bias": {"1": 1},
        "nothing": None,
    }
    assert named(ChatCompletionRequest, **fields) == ()


def test_the_answer_of_an_sdk_may_be_sent_back_without_a_word() -> None:
    text = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]},
    ]
    assert named(ResponseRequest, input=items) == ()


def test_of_many_alike_the_first_is_named_and_names_are_safe_for_a_header() -> None:
    messages = [USER, *({**USER, "x": 1} for _ in range(50)), {**USER, "a\r\nSet-Cookie: b": 1, "y" * 500: 1}]
    assert set(named(ChatCompletionRequest, messages=messages)) == {
        "messages[1].x",
        "messages[51].a??Set-Cookie??b",
        "messages[51]." + "y" * 64,
    }


def test_there_are_not_too_many_names() -> None:
    many = {**USER, **{f"x{i}": 1 for i in range(100)}}
    assert len(named(ChatCompletionRequest, messages=[many], y=1)) == MAX_UNKNOWN


def test_a_list_beyond_measure_holds_nobody_up() -> None:
    body = json.dumps({"messages": [{**USER, "x": 1}] * 100_000, "y": 1}).encode()
    msgspec.json.decode(body, type=ChatCompletionRequest)
    start = time.process_time()
    msgspec.json.decode(body, type=ChatCompletionRequest)
    decoding = time.process_time() - start
    start = time.process_time()
    assert decode_body(body, ChatCompletionRequest)[1] == ("y",)
    assert time.process_time() - start < 5 * decoding + 0.1


@pytest.mark.parametrize(
    ("type", "fields"),
    [
        (ChatCompletionRequest, {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
                                 "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}],
                                 "tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True}}),
        (CompletionRequest, {"prompt": ["a"], "logit_bias": {"1": 1}, "response_format": {"type": "text"}}),
        (ResponseRequest, {"input": [{"role": "user", "content": "a", "id": "x"}], "reasoning": {"effort": "low"}}),
        (MessageRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 1,
                          "system": "a", "tool_choice": {"type": "none"}}),
        (TokenizeRequest, {"messages": [USER]}),
        (DetokenizeRequest, {"tokens": [1]}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_usual_request_needs_no_search(type: type[msgspec.Struct], fields: dict[str, Any]) -> None:
    assert has_only_known_fields(json.dumps(fields).encode(), type)
    assert not has_only_known_fields(json.dumps({**fields, "x": 1}).encode(), type)
