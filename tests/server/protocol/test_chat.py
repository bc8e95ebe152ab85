from __future__ import annotations

import json
from typing import Any

import pytest

from pellucid.server.errors import ApiError
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.chat import ChatCompletionRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> ChatCompletionRequest:
    body = json.dumps({"messages": [USER], **fields}).encode()
    request, unknown = decode_body(body, ChatCompletionRequest)
    assert unknown == ()
    return request


def refused_param(**fields: Any) -> str | None:
    with pytest.raises(ApiError) as raised:
        chat(**fields)
    assert raised.value.status == 400
    return raised.value.param


def test_null_is_the_same_as_absent() -> None:
    names = [name for name in ChatCompletionRequest.__struct_fields__ if name != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()


def test_fields_of_openai_without_an_effect_are_known() -> None:
    chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto", prompt_cache_key="k", safety_identifier="s")


def test_max_completion_tokens_and_max_tokens_may_agree_but_not_differ() -> None:
    assert chat(max_completion_tokens=8).token_limit == (8, "max_completion_tokens")
    assert chat(max_tokens=8).token_limit == (8, "max_tokens")
    assert chat(max_tokens=8, max_completion_tokens=8).token_limit == (8, "max_completion_tokens")
    assert chat().token_limit[0] is None
    assert refused_param(max_tokens=8, max_completion_tokens=9) == "max_tokens"


def test_logprobs_is_a_switch_and_top_logprobs_a_count() -> None:
    assert chat(logprobs=True).logprobs_limit[0] == 0
    assert chat(logprobs=True, top_logprobs=None).logprobs_limit[0] == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs_limit == (20, "top_logprobs")
    assert chat(top_logprobs=0).logprobs_limit[0] is None
    assert chat(logprobs=False).logprobs_limit[0] is None
    assert refused_param(top_logprobs=2) == "top_logprobs"
    assert refused_param(logprobs=2) == "logprobs"


def test_stream_options_need_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage_stats
    assert refused_param(stream_options={"include_usage": True}) == "stream_options"
    assert refused_param(stream=False, stream_options={}) == "stream_options"


def test_prompt_logprobs_are_not_streamed() -> None:
    assert chat(prompt_logprobs=1).prompt_logprobs == 1
    assert refused_param(prompt_logprobs=1, stream=True) == "prompt_logprobs"


def test_tool_choice_is_auto_with_tools_and_none_without() -> None:
    assert chat(tools=[TOOL]).tool_selection == ("auto", False)
    assert chat(tools=[TOOL], tool_choice="none").tool_selection == ("none", False)
    assert chat(tools=[TOOL], tool_choice="required").tool_selection == ("required", False)
    assert chat().tool_selection == ("none", False)
    assert chat(tools=[], tool_choice="auto").tool_selection == ("none", False)


def test_a_named_tool_must_be_offered() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[TOOL], tool_choice=named).tool_selection == ("f", True)
    # A tool may be called "auto".
    auto = {"type": "function", "function": {"name": "auto"}}
    assert chat(tools=[auto], tool_choice=auto).tool_selection == ("auto", True)
    assert refused_param(tools=[auto], tool_choice=named) == "tool_choice"
    assert refused_param(tool_choice=named) == "tool_choice"
    assert refused_param(tool_choice="required") == "tool_choice"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "continue_final_message", "allow_special_in_content", "bos_token",
     "eos_token", "raise_exception", "strftime_now", "self"],
)  # fmt: skip
def test_template_arguments_cannot_shadow_the_servers_own(name: str) -> None:
    assert refused_param(chat_template_kwargs={name: "x"}) == "chat_template_kwargs"


def test_no_argument_of_the_tokenizers_chat_methods_can_be_set_by_a_request() -> None:
    import inspect

    from pellucid.server.protocol.chat import RESERVED_TEMPLATE_ARGUMENTS
    from pellucid.tokenizer.chat_template import ChatTemplate
    from pellucid.tokenizer.tokenizer import Tokenizer

    methods = (ChatTemplate.render, Tokenizer.render_chat, Tokenizer.apply_chat_template)
    own = {name for method in methods for name in inspect.signature(method).parameters} - {"kwargs"}
    assert own <= RESERVED_TEMPLATE_ARGUMENTS


def test_reasoning_effort_reaches_the_template_below_what_it_was_told_itself() -> None:
    assert chat().template_arguments() == {}
    assert chat(reasoning_effort="high").template_arguments() == {"reasoning_effort": "high"}
    off = chat(reasoning_effort="none", chat_template_kwargs={"thinking": True, "style": "terse"})
    assert off.template_arguments() == {
        "reasoning_effort": "none", "enable_thinking": False, "thinking": True, "style": "terse",
    }  # fmt: skip


def test_a_final_message_is_continued_or_a_new_one_begun() -> None:
    assert chat().adds_generation_prompt
    assert not chat(add_generation_prompt=False).adds_generation_prompt
    open_turn = [USER, {"role": "assistant", "content": "He"}]
    assert not chat(messages=open_turn, continue_final_message=True).adds_generation_prompt
    field = "continue_final_message"
    assert refused_param(messages=open_turn, continue_final_message=True, add_generation_prompt=True) == field
    assert refused_param(continue_final_message=True) == field


def test_tools_reach_the_template_in_the_order_that_models_know() -> None:
    scrambled = {"function": {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "f", "description": "d"}}
    (tool,) = chat(tools=[scrambled]).template_tools() or ()
    expected = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}, "strict": True},
    }
    assert json.dumps(tool) == json.dumps(expected)
    assert chat(tools=[]).template_tools() is None


def template_message(**message: Any) -> dict[str, Any]:
    (prepared,) = chat(messages=[message]).template_messages()
    return prepared


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_messages_reach_the_template_with_what_was_given(role: str) -> None:
    assert template_message(role=role, content="x") == {"role": role, "content": "x"}
    assert template_message(role=role, content=None, name="n") == {"role": role, "content": "", "name": "n"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template_message(role=role, content=parts)["content"] == parts
    assert template_message(role=role, content=[])["content"] == ""


def test_a_tools_answer_keeps_the_id_of_its_call() -> None:
    message = template_message(role="tool", content="42", tool_call_id="functions.f:0")
    assert message == {"role": "tool", "content": "42", "tool_call_id": "functions.f:0"}


def test_reasoning_has_two_names_and_reaches_the_template_under_one() -> None:
    expected = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert template_message(role="assistant", content="4", reasoning="2+2") == expected
    assert template_message(role="assistant", content="4", reasoning_content="2+2") == expected
    assert template_message(role="assistant", content="4", reasoning_content="2+2", reasoning="no") == expected


def test_an_assistants_calls_reach_the_template_as_json_text_beside_no_content() -> None:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = template_message(role="assistant", tool_calls=[call])
    assert message == {"role": "assistant", "content": None, "tool_calls": [call]}
    as_object = {"function": {"name": "f", "arguments": {"a": 1}}}
    (prepared,) = template_message(role="assistant", content="", tool_calls=[as_object])["tool_calls"]
    assert prepared == {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def test_an_assistant_without_calls_has_text() -> None:
    assert template_message(role="assistant")["content"] == ""
    assert template_message(role="assistant", tool_calls=[]) == {"role": "assistant", "content": ""}
    assert template_message(role="assistant", content=None, refusal="No.")["content"] == "No."


def test_what_our_own_answer_says_can_be_sent_back() -> None:
    message = {
        "role": "assistant", "content": None, "reasoning_content": "r", "reasoning": "r", "refusal": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        "annotations": None, "audio": None, "function_call": None,
    }  # fmt: skip
    assert template_message(**message)["tool_calls"][0]["id"] == "c"
