"""/v1/messages from scripted events: the stream has Anthropic's events in order, and is the whole message in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import httpx2
import msgspec
import pytest
from anthropic import Anthropic, APIStatusError
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from pydantic import TypeAdapter

from pellucid.core import SamplingParams
from pellucid.server.endpoints.message_draft import MessageDraft, read_arguments
from pellucid.server.endpoints.message_events import MessageWriter
from pellucid.server.endpoints.messages import NAMES, chat_input, message_params
from pellucid.server.endpoints.renaming import in_words_of
from pellucid.server.errors import ApiError, overloaded
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.generation.sampling import SamplingDefaults
from pellucid.server.generation.tracked import Usage
from pellucid.server.parsers.message import MessageDelta
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.messages import CountTokensRequest, MessageRequest
from tests.server.chat_events import (
    CALL,
    CUT_CALL,
    CUTS,
    FINISHES,
    OTHER_CALL,
    OUTPUTS,
    THOUGHT,
    WRONG_CALL,
    chat_event,
    chat_events,
    sse,
)

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "hi"}
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}


def request(**fields: Any) -> MessageRequest:
    body = {"messages": [USER], "max_tokens": 9, **fields}
    return decode_body(json.dumps(body).encode(), MessageRequest)[0]


def draft() -> MessageDraft:
    usage = Usage(prompt_tokens=12, completion_tokens=9, cached_tokens=4, reasoning_tokens=3)
    return MessageDraft("msg_1", "demo", usage)


def whole(events: Sequence[ChatEvent]) -> dict[str, Any]:
    """The message that is not streamed, as JSON."""
    made = draft()
    for event in events:
        made.read(event)
    message: dict[str, Any] = json.loads(msgspec.json.encode(made.finished()))
    return message


def stream(events: Sequence[ChatEvent]) -> list[dict[str, Any]]:
    writer = MessageWriter(draft())
    return sse(b"".join(writer.write([event]) for event in events))


def test_the_events_of_a_turn_come_in_anthropics_order() -> None:
    events = stream(chat_events(THOUGHT + "Let me see." + CALL + OTHER_CALL, cuts=range(0, 400, 30)))
    kinds = [event["delta"].get("type", "message_delta") if "delta" in event else event["type"] for event in events]
    assert [kind for kind, _ in groupby(kinds)] == [
        "message_start",
        "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert started[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert started[1] == {"type": "text", "text": ""}
    assert (started[2]["type"], started[2]["name"], started[2]["input"]) == ("tool_use", "weather", {})
    opening = events[0]["message"]
    assert (opening["content"], opening["stop_reason"], opening["usage"]["output_tokens"]) == ([], None, 0)


def test_a_whole_message_has_thinking_text_and_tool_use() -> None:
    message = Message.model_validate(whole(chat_events(THOUGHT + "Let me see." + CALL)))
    thinking, text, use = message.content
    assert thinking.type == "thinking" and text.type == "text" and use.type == "tool_use"
    assert (thinking.thinking, thinking.signature, text.text) == ("He wants the weather.", "", "Let me see.")
    assert (use.name, use.input, message.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")
    assert (message.id, message.role, message.model) == ("msg_1", "assistant", "demo")


def test_input_tokens_leave_out_what_the_cache_held() -> None:
    usage = whole(chat_events("Hi."))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (8, 4, 9)
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}
    events = stream(chat_events("Hi."))
    assert events[0]["message"]["usage"]["input_tokens"] == 12
    assert events[-2]["usage"] == usage


@settings(max_examples=150, deadline=None)
@given(output=OUTPUTS, cuts=CUTS, finish=FINISHES)
def test_the_stream_is_the_whole_message_in_pieces(output: str, cuts: list[int], finish: str) -> None:
    given_events = chat_events(output, cuts, finish)
    expected, events = whole(given_events), stream(given_events)
    for event in events:
        EVENT.validate_python(event)
    content = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "told": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(content) - 1
            delta = event["delta"]
            content[-1]["told"] += delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
    for block in content:
        told = block.pop("told")
        member = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[member] = read_arguments(told) if member == "input" else told
    assert content == expected["content"]
    assert events[-2]["delta"] == {name: expected[name] for name in ("stop_reason", "stop_sequence")}


@pytest.mark.parametrize(
    ("output", "finish", "stop", "reason", "sequence"),
    [
        ("Hi.", "stop", None, "end_turn", None),
        ("Hi.", "stop", 7, "end_turn", None),
        ("Hi.", "stop", "END", "stop_sequence", "END"),
        ("Hi.", "length", None, "max_tokens", None),
        (CALL, "stop", None, "tool_use", None),
        (CALL, "length", None, "max_tokens", None),
        (CUT_CALL, "stop", "END", "stop_sequence", "END"),
    ],
)
def test_stop_reasons(output: str, finish: str, stop: str | int | None, reason: str, sequence: str | None) -> None:
    message = whole(chat_events(output, finish=finish, stop=stop))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("", {}),
        ("  \n", {}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a": Par', {"INVALID_JSON": '{"a": Par'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("null", {"INVALID_JSON": "null"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
    ],
)
def test_arguments_that_are_no_json_object_are_kept_as_text(text: str, value: dict[str, Any]) -> None:
    assert read_arguments(text) == value


def test_arguments_nested_without_end_are_kept_as_text() -> None:
    text = '{"a":' * 100_000
    assert read_arguments(text) == {"INVALID_JSON": text}


def test_what_the_model_wrote_wrong_reaches_the_client_either_way() -> None:
    [use] = whole(chat_events(WRONG_CALL))["content"]
    assert use["input"] == {"INVALID_JSON": '{"city": Paris}'}


def test_an_empty_answer_is_a_block_without_text() -> None:
    assert whole(chat_events(""))["content"] == [{"type": "text", "text": ""}]


def test_the_sdk_adds_the_stream_up() -> None:
    blob = MessageWriter(draft()).write(chat_events(THOUGHT + "Let me see." + CALL, cuts=range(0, 300, 7)))
    with client(blob).messages.stream(model="demo", max_tokens=9, messages=[{"role": "user", "content": "hi"}]) as s:
        final = s.get_final_message()
    thinking, text, use = final.content
    assert thinking.type == "thinking" and thinking.thinking == "He wants the weather."
    assert text.type == "text" and text.text == "Let me see."
    assert use.type == "tool_use" and use.input == {"city": "Paris"}
    assert (final.stop_reason, final.usage.input_tokens, final.usage.cache_read_input_tokens) == ("tool_use", 8, 4)


def test_the_sdk_raises_the_error_that_ends_a_stream() -> None:
    writer = MessageWriter(draft())
    begun = writer.write(chat_events("Once upon", cuts=[4])[:-1])
    blob = begun + writer.failure(overloaded("the server is shutting down", 5))
    assert sse(blob)[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the server is shutting down"},
    }
    with (
        pytest.raises(APIStatusError, match="shutting down"),
        client(blob).messages.stream(model="demo", max_tokens=9, messages=[{"role": "user", "content": "hi"}]) as s,
    ):
        s.get_final_message()


def client(blob: bytes) -> Anthropic:
    """The SDK, given `blob` as the answer to whatever it asks."""
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=blob))
    return Anthropic(base_url="http://server", api_key="none", http_client=httpx2.Client(transport=transport))


def test_a_generation_that_was_given_up_is_an_error() -> None:
    with pytest.raises(ApiError) as raised:
        draft().read(chat_event(MessageDelta(), "abort"))
    assert raised.value.status == 500


def test_sampling_fields_arrive() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3,
        "presence_penalty": 0.2, "frequency_penalty": -0.2, "stop_token_ids": [7], "min_tokens": 2, "ignore_eos": True,
        "max_tokens": 8,
    }  # fmt: skip
    body = request(**fields, stop_sequences=["a", "b"])
    params = message_params(body, SamplingDefaults(max_tokens=77), 100)
    assert params == SamplingParams(**fields, stop=("a", "b"))  # type: ignore[arg-type]


def test_the_output_format_is_the_constraint() -> None:
    body = request(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    outputs = message_params(body, SamplingDefaults(), 100).structured_outputs
    assert outputs is not None and outputs.json == '{"type":"object"}'


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", False, True)),
        ({"type": "auto"}, ("auto", False, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False, False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", False, True)),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, ("weather", True, False)),
        ({"type": "none"}, ("none", False, True)),
    ],
)
def test_tool_choice_arrives(choice: dict[str, Any] | None, expected: tuple[str, bool, bool]) -> None:
    chat = chat_input(request(tools=[WEATHER], tool_choice=choice), SamplingParams())
    assert (chat.tool_choice, chat.named_tool, chat.parallel_tool_calls) == expected
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    assert list(chat.tools) == [{"type": "function", "function": function}]


def test_the_last_assistant_message_is_continued() -> None:
    chat = chat_input(request(messages=[USER, {"role": "assistant", "content": "The answer is"}]), SamplingParams())
    assert (chat.continue_final_message, chat.add_generation_prompt, chat.separate_reasoning) == (True, False, False)
    assert chat.messages[-1]["content"] == "The answer is"
    chat = chat_input(request(), SamplingParams())
    assert (chat.continue_final_message, chat.add_generation_prompt, chat.separate_reasoning) == (False, True, True)


def test_a_count_is_of_the_prompt_that_a_message_would_have() -> None:
    fields = {
        "messages": [USER], "system": "s", "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"},
        "thinking": {"type": "adaptive"},
    }  # fmt: skip
    counted, _ = decode_body(json.dumps(fields).encode(), CountTokensRequest)
    params = SamplingParams()
    assert chat_input(counted, params) == chat_input(request(**fields), params)


def test_refusals_use_the_requests_own_names() -> None:
    with pytest.raises(ApiError) as raised:
        message_params(request(stop_token_ids=[100]), SamplingDefaults(), 100)
    assert raised.value.message.startswith("stop_token_ids: token id 100")
    error = in_words_of(ApiError(400, "structured_outputs: a bad schema", param="structured_outputs"), NAMES)
    assert (error.param, error.message) == ("output_config.format", "output_config.format: a bad schema")
