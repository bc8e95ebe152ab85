from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.server.errors import ApiError
from pellucid.server.protocol.body import MAX_DEPTH, decode_body
from pellucid.server.protocol.chat import ChatCompletionRequest
from pellucid.server.protocol.completions import CompletionRequest
from pellucid.server.protocol.messages import MessageRequest
from pellucid.server.protocol.responses import ResponseRequest
from pellucid.server.protocol.unknown_fields import MAX_UNKNOWN

USER = {"role": "user", "content": "hi"}


def refusal(data: bytes | dict[str, Any]) -> ApiError:
    """The refusal of a chat request's body."""
    encoded = data if isinstance(data, bytes) else json.dumps({"messages": [USER], **data}).encode()
    with pytest.raises(ApiError) as raised:
        decode_body(encoded, ChatCompletionRequest)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": "x"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "function", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": ["a", "é" * 1025]}, "stop[1]"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"allowed_token_ids": [1] * 1_000_001}, "allowed_token_ids"),
        ({"logit_bias": {str(token_id): 1 for token_id in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "ab\n"}, "request_id"),
    ],
)  # fmt: skip
def test_param_is_the_path_of_the_field(body: dict[str, Any], param: str) -> None:
    error = refusal(body)
    assert error.param == param
    assert param in error.message


def test_lists_may_be_as_long_as_their_limits() -> None:
    fields = {
        "stop": [chr(97 + index) * 1024 for index in range(16)],
        "stop_token_ids": list(range(1024)),
        "allowed_token_ids": [1] * 1_000_000,
        "logit_bias": {str(token_id): 1.0 for token_id in range(1024)},
    }
    request, _ = decode_body(json.dumps({"messages": [USER], **fields}).encode(), ChatCompletionRequest)
    for name in ("stop", "stop_token_ids", "allowed_token_ids"):
        assert getattr(request, name) == fields[name]
    assert request.logit_bias == dict.fromkeys(range(1024), 1.0)


def test_a_whole_number_may_be_written_as_a_float() -> None:
    body = b'{"prompt": [[1.0, 2]], "max_tokens": 16.0, "logit_bias": {"5": 1.0}, "top_p": 0.5, "echo": true}'
    request, _ = decode_body(body, CompletionRequest)
    assert (request.prompt, request.max_tokens, request.logit_bias, request.top_p) == ([[1, 2]], 16, {5: 1.0}, 0.5)
    assert isinstance(request.max_tokens, int)
    for value in (16.5, 1e300, -1.0):
        assert refusal({"max_tokens": value}).param == "max_tokens"
    assert refusal({"max_tokens": 16.0, "n": "x"}).param == "n"


def test_a_missing_field_is_named() -> None:
    error = refusal(b"{}")
    assert (error.param, error.message) == ("messages", "messages is required")


def test_a_wrong_type_is_told_in_json_words() -> None:
    assert refusal({"max_tokens": "x"}).message == "max_tokens: expected integer or null, got string"


def test_a_wrong_word_is_answered_with_the_right_ones() -> None:
    assert refusal({"reasoning_effort": "hgih"}).message.endswith(
        "one of: high, low, max, medium, minimal, none, xhigh"
    )
    assert refusal({"tool_choice": "any"}).message.endswith("one of: auto, none, required")
    assert "text, json_object, json_schema" in refusal({"response_format": {"type": "xml"}}).message
    role = refusal({"messages": [{"role": "bot", "content": ""}]}).message
    assert role.endswith("one of: system, developer, user, assistant, tool")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_parts_other_than_text_are_refused_by_name(kind: str) -> None:
    part = {"type": kind, "text": "", kind: {"url": "data:,"}}
    error = refusal({"messages": [{"role": "user", "content": [part]}]})
    assert kind in error.message and "takes text only" in error.message


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b'"x"', "JSON object"),
        (b"null", "JSON object"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"x": Infinity}', "not valid JSON"),
        (b'{"temperature": 1e999}', "range"),
        (b'{"chat_template_kwargs": {"a": 1e999}}', "range"),
        (b'{"chat_template_kwargs": {"a": ' + b"9" * 5000 + b"}}", "range"),
        (b'{"user": "\xff"}', "UTF-8"),
        (b'{"x": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"user": "\\ud800"}', "surrogate"),
        (b'{"user": "\\ud83d\\u0041"}', "surrogate"),
        (b'{"x": {"y": "\\udc00"}}', "surrogate"),
    ],
)
def test_what_is_not_json_is_refused(data: bytes, reason: str) -> None:
    assert reason in refusal(data).message


@pytest.mark.parametrize("opening", [b'{"x": ', b'{"x": [', b'{"chat_template_kwargs": {"a": ', b"["])
def test_a_recursion_bomb_is_refused(opening: bytes) -> None:
    assert refusal(opening + b"[" * 100_000).status == 400
    assert refusal(opening + b'{"a":' * 100_000).status == 400


def nested(depth: int) -> bytes:
    """A body of exactly that depth."""
    inner = b'{"a":' * (depth - 1) + b"1" + b"}" * (depth - 1)
    return b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": ' + inner + b"}"


def test_nesting_is_bounded_below_what_recursion_can_bear() -> None:
    decode_body(nested(MAX_DEPTH), ChatCompletionRequest)
    assert "nests deeper" in refusal(nested(MAX_DEPTH + 1)).message


def test_brackets_in_text_are_no_nesting() -> None:
    body = json.dumps({"prompt": "[{" * 1000, "stop": ["[" * 200]}).encode()
    request, _ = decode_body(body, CompletionRequest)
    assert request.prompt == "[{" * 1000


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        st.text(alphabet='[]{}"\\\n', max_size=6) | st.integers(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner),
        max_leaves=30,
    ),
    levels=st.integers(MAX_DEPTH - 4, MAX_DEPTH),
)
def test_nesting_is_what_a_walk_finds(value: Any, levels: int) -> None:
    def depth(part: Any) -> int:
        if not isinstance(part, list | dict):
            return 0
        return 1 + max(map(depth, part.values() if isinstance(part, dict) else part), default=0)

    for _ in range(levels):
        value = [value]
    body = json.dumps({"prompt": "", "chat_template_kwargs": {}, "x": value}).encode()
    if depth(value) + 1 > MAX_DEPTH:
        assert "nests deeper" in refusal(body).message
    else:
        decode_body(body, CompletionRequest)


@pytest.mark.parametrize("inner", [b"[]", b"[" * 60 + b"]" * 60, b'"[",[{}]', b'{"\\"":[]}'])
def test_a_body_of_millions_of_values_is_refused_at_once(inner: bytes) -> None:
    values = b"[" + (inner + b",") * (8_000_000 // len(inner)) + b"[]]"
    data = b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": ' + values + b"}}"
    start = time.process_time()
    assert "lists and objects" in refusal(data).message
    assert time.process_time() - start < 1


def test_of_a_field_given_twice_the_last_counts() -> None:
    request, unknown = decode_body(
        b'{"prompt": "", "max_tokens": 1, "max_tokens": 2, "x": 1, "x": 2}', CompletionRequest
    )
    assert request.max_tokens == 2
    assert unknown == ("x",)


def test_unknown_fields_are_named_sorted_and_safe_for_a_header() -> None:
    _, unknown = decode_body(b'{"prompt": "", "zeta": 1, "a\\r\\nSet-Cookie: b": 2, "\\u00e9": 3}', CompletionRequest)
    assert unknown == ("a??Set-Cookie??b", "zeta", "?")
    many = json.dumps({"prompt": "", **{f"{i:03}" + "x" * 500: 0 for i in range(100)}}).encode()
    _, unknown = decode_body(many, CompletionRequest)
    assert len(unknown) == MAX_UNKNOWN and all(len(name) <= 64 for name in unknown)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("guided_json", "structured_outputs"),
        ("guided_regex", "structured_outputs"),
        ("guided_choice", "structured_outputs"),
        ("guided_grammar", "structured_outputs"),
        ("guided_decoding_backend", "structured_outputs"),
        ("functions", "tools"),
        ("function_call", "tool_choice"),
    ],
)
def test_removed_fields_are_refused_with_the_remedy(name: str, remedy: str) -> None:
    error = refusal({name: {"type": "object"}})
    assert error.param == name
    assert remedy in error.message
    # An empty schema is a constraint too.
    assert refusal({name: {}}).param == name


@pytest.mark.parametrize(("value", "named"), [(None, ()), *((value, ("guided_json",)) for value in (False, [], ""))])
def test_a_removed_field_that_says_nothing_is_ignored(value: object, named: tuple[str, ...]) -> None:
    body = json.dumps({"messages": [USER], "guided_json": value}).encode()
    assert decode_body(body, ChatCompletionRequest)[1] == named


def test_a_long_value_is_not_echoed_whole() -> None:
    error = refusal({"reasoning_effort": "x" * 10_000})
    assert error.param == "reasoning_effort"
    assert len(error.message) < 400 and "one of: high" in error.message


@pytest.mark.parametrize("type", [ResponseRequest, MessageRequest, ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize(
    "metadata", [{"a": {}}, {"a": [1]}, {"a": "x" * 513}, {"x" * 65: ""}, {str(i): "" for i in range(17)}]
)
def test_metadata_is_small_and_flat(type: type[msgspec.Struct], metadata: dict[str, Any]) -> None:
    bases: dict[Any, dict[str, Any]] = {ResponseRequest: {"input": "hi"}, CompletionRequest: {"prompt": "hi"}}
    base = bases.get(type, {"messages": [USER], "max_tokens": 1})
    decode_body(json.dumps({**base, "metadata": {"x" * 64: "x" * 512}}).encode(), type)
    with pytest.raises(ApiError) as raised:
        decode_body(json.dumps({**base, "metadata": metadata}).encode(), type)
    assert str(raised.value.param).startswith("metadata")
