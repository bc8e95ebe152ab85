"""What an Anthropic conversation is to a chat template, and what of a request is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pellucid.server.errors import ApiError
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.messages import CountTokensRequest, MessageRequest

USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
OTHER_USE = {"type": "tool_use", "id": "t2", "name": "g", "input": {}, "caller": None}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "18 degrees"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def text(value: str, **members: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **members}


def request(**fields: Any) -> MessageRequest:
    body = {"messages": [USER], "max_tokens": 9, **fields}
    return decode_body(json.dumps(body).encode(), MessageRequest)[0]


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return request(messages=list(given), **fields).template_messages()


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        request(**fields)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize("content", ["hi", [text("hi", cache_control={"type": "ephemeral"})]])
def test_a_text_block_is_its_text(content: Any) -> None:
    assert messages({"role": "user", "content": content}) == [USER]


@pytest.mark.parametrize("system", ["Be brief.\n\nBe kind.", [text("Be brief."), text("Be kind.")]])
def test_system_text_comes_first_as_one_message(system: Any) -> None:
    assert messages(USER, system=system) == [{"role": "system", "content": "Be brief.\n\nBe kind."}, USER]


def test_a_system_message_within_the_conversation_stays_there() -> None:
    assert messages(USER, {"role": "system", "content": "Late."}, USER)[1] == {"role": "system", "content": "Late."}


@pytest.mark.parametrize(
    "billing", ["x-anthropic-billing-header: cc_version=2.1; cch=71fea;", "x-anthropic-billing-header: cch=0;\n"]
)
def test_a_line_that_changes_with_every_request_is_kept_out_of_the_prompt(billing: str) -> None:
    expected = [{"role": "system", "content": "You are brief."}, USER]
    assert messages(USER, system=[text(billing), text("You are brief.")]) == expected
    assert messages(USER, system=f"{billing.rstrip()}\nYou are brief.") == expected


def test_only_the_systems_own_line_is_kept_out() -> None:
    spelled = "What is x-anthropic-billing-header: for?"
    assert messages({"role": "user", "content": spelled}, system=spelled) == [
        {"role": "system", "content": spelled},
        {"role": "user", "content": spelled},
    ]


def test_an_answer_with_thinking_and_tools_is_one_assistant_message() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    answer = assistant(thinking, redacted, text("Let me "), text("see."), USE, OTHER_USE)
    assert messages(USER, answer, user(RESULT))[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "18 degrees", "tool_call_id": "t1"},
    ]


def test_calls_alone_have_no_content() -> None:
    assert messages(USER, assistant(USE), user(RESULT))[1]["content"] is None


def test_results_are_messages_of_their_own_before_the_users_text() -> None:
    other = {"type": "tool_result", "tool_use_id": "t2", "content": [text("a"), text("b")], "is_error": True}
    found = messages(USER, assistant(USE, OTHER_USE), user(text("And?"), RESULT, other))
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "user"]
    assert found[3]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert found[4]["content"] == "And?"


def test_a_result_may_be_empty() -> None:
    found = messages(USER, assistant(USE), user({"type": "tool_result", "tool_use_id": "t1"}))
    assert found[-1] == {"role": "tool", "content": "", "tool_call_id": "t1"}


def test_assistant_messages_in_a_row_are_one_turn() -> None:
    found = messages(USER, assistant(text("Let me ")), assistant(text("see.")), USER)
    assert [message["content"] for message in found] == ["hi", "Let me see.", "hi"]


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, {}),
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True, "thinking": True}),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True, "thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
    ],
)
def test_thinking_is_said_under_both_names_that_templates_ask_for(thinking: Any, expected: dict[str, bool]) -> None:
    assert request(thinking=thinking).template_arguments() == expected


def test_effort_and_template_arguments_arrive_and_the_latter_win() -> None:
    fields = {
        "output_config": {"effort": "low"},
        "thinking": {"type": "enabled"},
        "chat_template_kwargs": {"thinking": False},
    }
    arguments = request(**fields).template_arguments()
    assert arguments == {"reasoning_effort": "low", "enable_thinking": True, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "length"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].type", "image"),
        ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content[0].type", "document"),
        ({"messages": [user(USE)]}, "messages[0].content[0]", "tool_use"),
        ({"messages": [USER, assistant(RESULT), USER]}, "messages[1].content[0]", "tool_result"),
        ({"messages": [user(text("a"), RESULT)]}, "messages[0].content[1].tool_use_id", "t1"),
        ({"messages": [USER, assistant(USE)]}, "messages", "tool_result"),
        ({"messages": [USER, assistant()]}, "messages", "continue"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages", "continue"),
        (
            {"messages": [USER, assistant(USE), user({**RESULT, "content": [{"type": "image"}]})]},
            "messages[2].content[0].content[0].type",
            "image",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type", "image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice", "g"),
        ({"tool_choice": "auto"}, "tool_choice", "object"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "any"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "between_tools"),
        ({"stop": ["x"]}, "stop", "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "length"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format", "output_config"),
        ({"container": "c"}, "container", "tools"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str, word: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert word in error.message


def test_max_tokens_is_required_for_a_message_and_not_for_a_count() -> None:
    body = json.dumps({"messages": [USER]}).encode()
    decode_body(body, CountTokensRequest)
    with pytest.raises(ApiError) as raised:
        decode_body(body, MessageRequest)
    assert raised.value.param == "max_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}}, {"service_tier": "auto"}, {"cache_control": {"type": "ephemeral"}},
        {"max_tokens": 0}, {"tool_choice": {"type": "auto"}}, {"tools": [{**TOOL, "type": "custom", "strict": True}]},
        {"context_management": {"edits": []}}, {"output_config": {"effort": "max"}},
    ],
)  # fmt: skip
def test_what_changes_no_answer_is_accepted(fields: dict[str, Any]) -> None:
    assert request(**fields).template_messages() == [USER]
