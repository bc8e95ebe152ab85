"""What a response's input is to a chat template, and what of a request is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pellucid.server.errors import ApiError
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.responses import ResponseRequest

USER = {"role": "user", "content": "hi"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OTHER_CALL = {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "18 degrees"}
ANSWER = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "Warm.", "annotations": [], "logprobs": []}],
}  # fmt: skip
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
OTHER_TOOL_CALL = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}}


def request(**fields: Any) -> ResponseRequest:
    return decode_body(json.dumps({"input": "hi", **fields}).encode(), ResponseRequest)[0]


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return request(input=list(items), **fields).template_messages()


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        request(**fields)
    assert raised.value.status == 400
    return raised.value


def test_text_is_one_user_message() -> None:
    assert request().template_messages() == [USER]


@pytest.mark.parametrize("typed", [{}, {"type": "message"}])
@pytest.mark.parametrize("content", ["hi", [{"type": "input_text", "text": "hi"}]])
def test_a_message_needs_no_type_and_one_part_is_its_text(typed: dict[str, str], content: Any) -> None:
    assert messages({"role": "user", "content": content, **typed}) == [USER]


def test_several_parts_stay_parts_for_the_template_to_join() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    [message] = messages({"role": "user", "content": parts})
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_instructions_and_system_messages_at_the_beginning_are_one_message() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]}
    found = messages(developer, USER, {"role": "system", "content": "Late."}, instructions="Be brief.")
    assert found == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        USER,
        {"role": "system", "content": "Late."},
    ]


def test_an_answer_with_reasoning_and_calls_is_one_assistant_message() -> None:
    calls = [TOOL_CALL, OTHER_TOOL_CALL]
    assert messages(USER, REASONING, ANSWER, CALL, OTHER_CALL, RESULT, ANSWER) == [
        USER,
        {"role": "assistant", "content": "Warm.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "18 degrees", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Warm."},
    ]


def test_reasoning_after_a_result_belongs_to_the_next_turn() -> None:
    found = messages(USER, REASONING, CALL, RESULT, REASONING, OTHER_CALL)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert [message.get("reasoning_content") for message in found] == [None, "Hm.", None, "Hm."]
    assert found[1]["content"] is None and found[1]["tool_calls"] == [TOOL_CALL]


def test_reasoning_after_an_answer_begins_another_message() -> None:
    found = messages(ANSWER, REASONING, ANSWER)
    assert [message.get("reasoning_content") for message in found] == [None, "Hm."]


def test_answers_in_a_row_are_messages_of_their_own_but_text_after_a_call_is_not() -> None:
    assert [message["content"] for message in messages(ANSWER, ANSWER)] == ["Warm.", "Warm."]
    [message] = messages(ANSWER, CALL, ANSWER)
    assert (message["content"], message["tool_calls"]) == ("Warm.Warm.", [TOOL_CALL])


def test_reasoning_alone_has_a_text_and_encrypted_reasoning_leaves_nothing() -> None:
    assert messages(REASONING) == [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]
    encrypted = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "content": None}
    assert messages(encrypted, USER) == [USER]


def test_refusals_and_results_in_parts_are_text() -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]}
    found = messages(refused, USER, CALL, result)
    assert (found[0]["content"], found[-1]["content"]) == ("No.", "ok")


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ([{"content": "hi"}], "input[0].role"),
        ([USER, {"role": "user"}], "input[1].content"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "input[0].arguments"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
        ([{"type": "function_call_output", "call_id": "c1"}], "input[0].output"),
        ([CALL, {**RESULT, "call_id": "c9"}], "input[1].call_id"),
        ([RESULT, CALL], "input[0].call_id"),
        ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
        ([CALL, {**RESULT, "output": [{"type": "input_file"}]}], "input[1].output[0].type"),
    ],
)
def test_an_item_that_cannot_be_read_is_refused_with_its_place(items: list[Any], param: str) -> None:
    error = refusal(input=items)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stored"),
        ({"conversation": "conv_1"}, "conversation", "stored"),
        ({"background": True}, "background", "stream"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"messages": [USER]}, "messages", "input"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "one answer"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type", "file_search"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name", "required"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "f"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "web_search_preview"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"include": ["file_search_call.results"]}, "include[0]", "message.output_text.logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "json_schema"),
        ({"reasoning": {"effort": "immense"}}, "reasoning.effort", "high"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"metadata": {"a": 1}}, "metadata", "string"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str, word: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert word in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True}, {"truncation": "auto"}, {"background": False}, {"previous_response_id": None},
        {"include": ["reasoning.encrypted_content"]}, {"stream_options": {"include_obfuscation": False}},
        {"reasoning": {"effort": None, "summary": "auto"}}, {"text": {"verbosity": "low"}}, {"text": None},
        {"service_tier": "auto"}, {"prompt_cache_key": "k"}, {"max_tool_calls": 3},
        {"tools": [], "tool_choice": "auto"},
    ],
)  # fmt: skip
def test_what_changes_no_answer_is_accepted(fields: dict[str, Any]) -> None:
    assert request(**fields).template_messages() == [USER]
