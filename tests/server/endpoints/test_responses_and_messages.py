"""/v1/responses and /v1/messages of a real model, over HTTP and through the SDKs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import Anthropic, NotFoundError
from openai import OpenAI
from openai.types.responses import Response

from tests.server.running import Answer, RunningServer

QUESTION = "What is gravity?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def respond(server: RunningServer, **fields: Any) -> Answer:
    return server.post("/v1/responses", {"input": QUESTION, "temperature": 0, "max_output_tokens": 8, **fields})


def message(server: RunningServer, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": QUESTION}]
    return server.post("/v1/messages", {"messages": messages, "temperature": 0, "max_tokens": 8, **fields})


def test_all_three_protocols_give_the_same_answer(demo_server: RunningServer) -> None:
    chat = demo_server.chat(QUESTION).json
    response = Response.model_validate(respond(demo_server).json)
    content = message(demo_server).json["content"]
    text = chat["choices"][0]["message"]["content"]
    assert text == response.output_text == content[0]["text"]
    assert response.usage is not None
    assert response.usage.total_tokens == chat["usage"]["total_tokens"]
    assert (response.status, response.model) == ("incomplete", "demo")


def test_a_streamed_response_ends_with_the_whole_one(demo_server: RunningServer) -> None:
    whole = Response.model_validate(respond(demo_server).json)
    answer = respond(demo_server, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.events
    last = Response.model_validate(events[-1]["response"])
    assert (events[-1]["type"], last.output_text) == ("response.incomplete", whole.output_text)
    told = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(told) == whole.output_text
    assert len(told) == 8
    assert last.usage is not None and whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_a_streamed_message_is_the_whole_one_in_pieces(demo_server: RunningServer) -> None:
    whole = message(demo_server).json
    events = message(demo_server, stream=True).events
    told = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(told) == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 8


def test_a_function_that_must_be_called_is_called(demo_server: RunningServer) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    response = respond(demo_server, tools=[tool], tool_choice="required", max_output_tokens=60).json
    [call] = response["output"]
    assert (call["type"], call["name"], response["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Paris", "Oslo")


def test_a_tool_that_must_be_used_is_used(demo_server: RunningServer) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA}
    choice = {"type": "tool", "name": "weather"}
    answer = message(demo_server, tools=[tool], tool_choice=choice, max_tokens=60).json
    [use] = answer["content"]
    assert (use["type"], use["name"], answer["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert use["input"]["city"] in ("Paris", "Oslo")


def test_text_formats_hold_and_logprobs_come_with_them(demo_server: RunningServer) -> None:
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    response = respond(demo_server, text={"format": form}, top_logprobs=2, max_output_tokens=40).json
    [part] = response["output"][0]["content"]
    assert json.loads(part["text"])["city"] in ("Paris", "Oslo")
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    [block] = message(demo_server, output_config=wanted, max_tokens=40).json["content"]
    assert json.loads(block["text"])["city"] in ("Paris", "Oslo")


def test_a_stop_sequence_is_named(demo_server: RunningServer) -> None:
    whole = message(demo_server, max_tokens=20).json["content"][0]["text"]
    word = whole.split()[3]
    answer = message(demo_server, max_tokens=20, stop_sequences=["nowhere", word]).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)
    assert answer["content"][0]["text"] == whole[: whole.index(word)]


def test_an_answer_that_was_begun_is_continued(demo_server: RunningServer) -> None:
    whole = message(demo_server, max_tokens=12).json["content"][0]["text"]
    words = whole.split(" ")
    begun = " ".join(words[:3])
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": begun}]
    rest = message(demo_server, messages=messages, max_tokens=12).json["content"][0]["text"]
    assert (begun + rest).startswith(whole[: len(begun) + 10])


def test_tokens_are_counted_as_a_message_counts_them(demo_server: RunningServer) -> None:
    fields: dict[str, Any] = {
        "system": [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
    }
    counted = demo_server.post("/v1/messages/count_tokens", fields).json
    usage = message(demo_server, **fields).json["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_response_is_kept(demo_server: RunningServer, method: str) -> None:
    response_id = respond(demo_server, max_output_tokens=1, store=True).json["id"]
    answer = demo_server.request(method, f"/v1/responses/{response_id}")
    assert answer.status == 404
    assert "stored" in answer.json["error"]["message"]
    assert demo_server.post(f"/v1/responses/{response_id}/cancel", {}).status == 404


def test_refusals_name_the_field_in_the_protocols_own_envelope(demo_server: RunningServer) -> None:
    answer = respond(demo_server, max_output_tokens=10_000_000)
    assert (answer.status, answer.json["error"]["param"]) == (400, "max_output_tokens")
    answer = respond(demo_server, text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "text.format")
    answer = message(demo_server, max_tokens=10_000_000)
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (400, "error", "invalid_request_error")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    answer = message(demo_server, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    assert (answer.status, "image" in answer.json["error"]["message"]) == (400, True)


def test_the_openai_sdk_holds_a_conversation_about_a_call(demo_server: RunningServer) -> None:
    client = OpenAI(base_url=f"{demo_server.base_url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    with client.responses.stream(
        model="demo", input=QUESTION, tools=[tool], tool_choice="required", temperature=0
    ) as stream:
        [call] = stream.get_final_response().output
    assert call.type == "function_call"
    conversation: Any = [
        {"role": "user", "content": QUESTION},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"},
    ]
    after = client.responses.create(
        model="demo", input=conversation, tools=[tool], tool_choice="none", temperature=0, max_output_tokens=8
    )
    assert after.output_text


def test_the_anthropic_sdk_holds_a_conversation_about_a_tool(demo_server: RunningServer) -> None:
    client = Anthropic(base_url=demo_server.base_url, api_key="none", max_retries=0)
    asked: Any = {"role": "user", "content": QUESTION}
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    with client.messages.stream(
        model="demo", max_tokens=60, messages=[asked], tools=tools, tool_choice={"type": "any"}
    ) as stream:
        answer = stream.get_final_message()
    [use] = answer.content
    assert use.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}
    conversation: Any = [asked, answer.to_param(), {"role": "user", "content": [result]}]
    after = client.messages.create(model="demo", max_tokens=8, messages=conversation, tools=tools)
    assert after.content[0].type == "text" and after._request_id
    with pytest.raises(NotFoundError):
        client.messages.create(model="no-such-model", max_tokens=8, messages=[asked])
