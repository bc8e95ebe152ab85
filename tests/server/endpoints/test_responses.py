"""/v1/responses from scripted events: the stream has OpenAI's events in order, and is the whole response in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pellucid.core import Logprob, SamplingParams, TokenLogprobs
from pellucid.server.endpoints.renaming import in_words_of
from pellucid.server.endpoints.response_draft import ResponseDraft
from pellucid.server.endpoints.response_events import ResponseWriter
from pellucid.server.endpoints.responses import NAMES, chat_input, opening_response
from pellucid.server.errors import ApiError, internal
from pellucid.server.generation.chat_values import ChatEvent
from pellucid.server.generation.sampling import SamplingDefaults
from pellucid.server.generation.tracked import Usage
from pellucid.server.parsers.message import MessageDelta, ToolCallDelta
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.chat_response import ChatLogprob
from pellucid.server.protocol.responses import ResponseRequest
from tests.server.chat_events import (
    CALL,
    CUT_CALL,
    CUTS,
    FINISHES,
    OTHER_CALL,
    OUTPUTS,
    THOUGHT,
    chat_event,
    chat_events,
    sse,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt_tokens=12, completion_tokens=9, cached_tokens=4, reasoning_tokens=3)


def request(**fields: Any) -> ResponseRequest:
    return decode_body(json.dumps({"input": "hi", **fields}).encode(), ResponseRequest)[0]


def spell(entries: Sequence[TokenLogprobs]) -> list[ChatLogprob]:
    return [ChatLogprob(str(entry.chosen.token_id), entry.chosen.logprob, None, []) for entry in entries]


def draft(**fields: Any) -> ResponseDraft:
    opening = opening_response(request(**fields), SamplingParams(temperature=0.5), "resp_1", "demo", 1700)
    return ResponseDraft(opening, USAGE, spell, lambda: 1800)


def whole(events: Sequence[ChatEvent]) -> dict[str, Any]:
    """The response that is not streamed, as JSON."""
    made = draft()
    for event in events:
        made.read(event)
    return as_json(made.finished())


def as_json(value: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(msgspec.json.encode(value))
    return decoded


def stream(events: Sequence[ChatEvent]) -> list[dict[str, Any]]:
    writer = ResponseWriter(draft())
    return sse(b"".join(writer.write([event]) for event in events))


def test_the_events_of_a_turn_come_in_openais_order() -> None:
    events = stream(chat_events(THOUGHT + "Let me see." + CALL + OTHER_CALL, cuts=range(0, 400, 30)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind, _ in groupby(kinds)] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["type"] for item in added] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert [added[0]["content"], added[1]["content"], added[2]["arguments"]] == [[], [], ""]


def test_a_whole_response_has_reasoning_text_and_calls_as_items() -> None:
    response = Response.model_validate(whole(chat_events(THOUGHT + "Let me see." + CALL)))
    assert (response.status, response.output_text, response.error) == ("completed", "Let me see.", None)
    assert (response.created_at, response.completed_at) == (1700, 1800)
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning" and message.type == "message" and call.type == "function_call"
    assert reasoning.content and reasoning.content[0].text == "He wants the weather."
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Paris"}, "completed")
    assert len({reasoning.id, message.id, call.id}) == 3 and call.call_id.startswith("call_x")
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (12, 9, 21)
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens == 3


@settings(max_examples=150, deadline=None)
@given(output=OUTPUTS, cuts=CUTS, finish=FINISHES)
def test_the_stream_is_the_whole_response_in_pieces(output: str, cuts: list[int], finish: str) -> None:
    given_events = chat_events(output, cuts, finish)
    expected, events = whole(given_events), stream(given_events)
    for event in events:
        EVENT.validate_python(event)
    assert events[-1]["response"] == expected
    assert events[-1]["type"] == f"response.{expected['status']}"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == expected["output"]
    for index, item in enumerate(expected["output"]):
        own = [event for event in events if event.get("output_index") == index]
        told = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert told == text
        [end] = [event for event in own if event["type"].endswith(("_text.done", "_arguments.done"))]
        assert end.get("text", end.get("arguments")) == text
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
    assert len({item["id"] for item in expected["output"]}) == len(expected["output"])


def test_text_after_a_call_is_an_item_of_its_own() -> None:
    output = whole(chat_events(f"Before.{CALL}After.", cuts=[20, len(f"Before.{CALL}")]))["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]


def test_the_rest_of_a_call_comes_before_what_follows_it() -> None:
    start = MessageDelta(tool_calls=(ToolCallDelta(0, "call_1", "f", '{"a": '),))
    rest = MessageDelta(content="Done.", tool_calls=(ToolCallDelta(0, arguments="1}", complete=True),))
    call, message = whole([chat_event(start), chat_event(rest, "tool_calls")])["output"]
    assert (call["arguments"], call["status"]) == ('{"a": 1}', "completed")
    assert message["content"][0]["text"] == "Done."


@pytest.mark.parametrize(
    ("output", "statuses"),
    [
        ("Once upon", ["incomplete"]),
        (THOUGHT[:20], ["incomplete"]),
        ("Yes." + CUT_CALL, ["completed", "incomplete"]),
        ("Yes." + CALL, ["completed", "completed"]),
    ],
)
def test_an_output_that_is_cut_off_is_incomplete_where_it_was_cut(output: str, statuses: list[str]) -> None:
    response = whole(chat_events(output, finish="length"))
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == statuses


def test_an_empty_answer_is_a_message_without_text() -> None:
    [item] = whole(chat_events(""))["output"]
    assert (item["type"], item["content"][0]["text"], item["status"]) == ("message", "", "completed")


def test_logprobs_stand_with_the_text_that_they_made_certain() -> None:
    entries = [TokenLogprobs(Logprob(token_id, -0.5, 1), ()) for token_id in range(6)]
    events = [
        chat_event(MessageDelta(reasoning="hm"), logprobs=entries[:1]),
        chat_event(logprobs=entries[1:2]),
        chat_event(MessageDelta(content="ab"), logprobs=entries[2:3]),
        chat_event(MessageDelta(content="c"), logprobs=entries[3:4]),
        chat_event(MessageDelta(), "stop", logprobs=entries[4:5]),
    ]
    [_, message] = whole(events)["output"]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["1", "2", "3"]
    streamed = [event for event in stream(events) if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in streamed] == [["1", "2"], ["3"]]


def test_a_stream_that_cannot_go_on_says_so_twice_and_keeps_what_there_was() -> None:
    writer = ResponseWriter(draft())
    events = sse(writer.write(chat_events("Once upon", cuts=[4])[:-1]) + writer.failure(internal("out of luck")))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert (events[-2]["message"], events[-2]["code"], events[-2]["param"]) == ("out of luck", "internal_error", None)
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["message"]) == ("failed", "out of luck")
    assert failed["output"][0]["status"] == "incomplete"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)


def test_a_stream_that_fails_before_its_first_token_still_begins_with_created() -> None:
    events = sse(ResponseWriter(draft()).failure(internal()))
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "error", "response.failed",
    ]  # fmt: skip


def test_a_generation_that_was_given_up_is_an_error() -> None:
    with pytest.raises(ApiError) as raised:
        draft().read(chat_event(MessageDelta(), "abort"))
    assert raised.value.status == 500


def test_the_sdk_adds_the_stream_up() -> None:
    writer = ResponseWriter(draft())
    blob = writer.write(chat_events(THOUGHT + "Let me see." + CALL, cuts=range(0, 300, 7)))
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=blob))
    client = OpenAI(base_url="http://server/v1", api_key="none", http_client=httpx2.Client(transport=transport))
    with client.responses.stream(model="demo", input="hi") as events:
        snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
        final = events.get_final_response()
    assert json.loads(snapshots[-1]) == {"city": "Paris"}
    assert final.output_text == "Let me see."


def test_the_response_says_what_was_asked_and_what_was_served() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    choice = {"type": "function", "name": "f"}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    made = as_json(
        draft(
            instructions="Be brief.", tools=[tool], tool_choice=choice, parallel_tool_calls=False, metadata={"a": "b"},
            max_output_tokens=7, text={"format": form}, reasoning={"effort": "low", "summary": "auto"}, user="u",
            store=True, truncation="auto", top_p=0.5, include=["reasoning.encrypted_content"],
        ).opening
    )  # fmt: skip
    Response.model_validate(made)
    assert made["tools"] == [tool] and made["tool_choice"] == choice
    assert made["text"]["format"] == {**form, "description": None}
    assert made["reasoning"] == {"effort": "low", "summary": None}
    assert (made["store"], made["truncation"], made["parallel_tool_calls"]) == (False, "disabled", False)
    assert (made["instructions"], made["metadata"], made["max_output_tokens"]) == ("Be brief.", {"a": "b"}, 7)
    assert made["temperature"] == 0.5


def test_sampling_fields_arrive() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3,
        "presence_penalty": 0.2, "frequency_penalty": -0.2, "stop": ["a"], "stop_token_ids": [7], "min_tokens": 2,
        "ignore_eos": True,
    }  # fmt: skip
    body = request(**fields, max_output_tokens=9, logit_bias={"5": 1.5}, top_logprobs=2)
    params = chat_input(body, SamplingDefaults(), 100).params
    assert params == SamplingParams(**fields, max_tokens=9, logit_bias={5: 1.5}, logprobs=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
    ],
)
def test_logprobs_are_asked_for_by_include_or_by_their_number(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat_input(request(**fields), SamplingDefaults(), 100).params.logprobs == logprobs


@pytest.mark.parametrize(
    ("form", "json_object", "schema"),
    [
        ({"type": "text"}, False, None),
        ({"type": "json_object"}, True, None),
        ({"type": "json_schema", "name": "n", "schema": {"type": "object"}}, False, '{"type":"object"}'),
    ],
)
def test_the_text_format_is_the_constraint(form: dict[str, Any], json_object: bool, schema: str | None) -> None:
    outputs = chat_input(request(text={"format": form}), SamplingDefaults(), 100).params.structured_outputs
    assert (outputs is not None and outputs.json_object) == json_object
    assert (None if outputs is None else outputs.json) == schema


def test_tool_selection_and_template_arguments_arrive() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    chat = chat_input(
        request(
            tools=[tool], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False, cache_salt="s",
            reasoning={"effort": "none"}, chat_template_kwargs={"thinking": True},
        ),
        SamplingDefaults(),
        100,
    )  # fmt: skip
    assert (chat.tool_choice, chat.named_tool, chat.parallel_tool_calls, chat.cache_salt) == ("f", True, False, "s")
    assert list(chat.tools) == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert chat.template_arguments == {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}


def test_refusals_use_the_requests_own_names() -> None:
    with pytest.raises(ApiError) as raised:
        chat_input(request(min_tokens=9, max_output_tokens=3), SamplingDefaults(), 100)
    assert "max_output_tokens (3)" in raised.value.message
    error = in_words_of(ApiError(400, "10 tokens and max_tokens 9 make 19", param="max_tokens"), NAMES)
    assert (error.param, error.message) == ("max_output_tokens", "10 tokens and max_output_tokens 9 make 19")
    assert in_words_of(ApiError(400, "the template refuses these messages", param="messages"), NAMES).param == "input"
