"""Kimi-K2's calls: the ids it writes, also badly, and what becomes of malformed sections."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.server.parsers.message import ParsedMessage, ToolCall
from tests.server.parsers.renderings import FORMATS
from tests.server.parsers.streams import assert_same_for_every_width

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def call(head: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def parse(text: str, **request: Any) -> ParsedMessage:
    return assert_same_for_every_width(FORMATS["kimi_k2"].grammar(**request), text)


def only_call(text: str, **request: Any) -> ToolCall:
    message = parse(text, **request)
    assert message.content == ""
    assert len(message.tool_calls) == 1
    return message.tool_calls[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BEGIN, END),
        ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
        ("", ""),
        ("", END),
        (BEGIN, ""),
        (f"{BEGIN}\n", f"\n{END}"),
    ],
    ids=["plural", "singular", "no wrapper", "no begin", "no end", "newlines"],
)
def test_the_section_may_be_singular_or_missing(before: str, after: str) -> None:
    found = only_call(before + call("functions.f:0", '{"a": 1}') + after)
    assert found == ToolCall(0, "functions.f:0", "f", '{"a": 1}', True)


@pytest.mark.parametrize(
    ("head", "call_id", "name"),
    [
        ("functions.get_weather:0", "functions.get_weather:0", "get_weather"),
        ("functions.get_weather:41", "functions.get_weather:41", "get_weather"),
        ("\nfunctions.get_weather:0\n ", "functions.get_weather:0", "get_weather"),
        ("get_weather:3", "functions.get_weather:3", "get_weather"),
        ("functions.mcp.files.read-all:2", "functions.mcp.files.read-all:2", "mcp.files.read-all"),
        ("functions.a:b:1", "functions.a:b:1", "a:b"),
        ("functions.get_weather", "functions.get_weather:7", "get_weather"),
        ("get_weather", "functions.get_weather:7", "get_weather"),
        ("functions.unknown_tool:0", "functions.unknown_tool:0", "unknown_tool"),
    ],
)
def test_ids_keep_or_get_the_models_own_form(head: str, call_id: str, name: str) -> None:
    """Where the model gives no number, the call is counted in the conversation: seven came before."""
    found = only_call(call(head, "{}"), tools={"get_weather": ("city",)}, earlier_calls=7)
    assert (found.id, found.name) == (call_id, name)


TOOLS = {"exec": ("command",), "read": ("path", "limit"), "write": ("path", "text"), "md5": ("data",), "now": ()}


@pytest.mark.parametrize(
    ("head", "call_id", "name"),
    [
        ("functionsexec5", "functions.exec:5", "exec"),
        ("functions.exec5", "functions.exec:5", "exec"),
        ("functions.md5", "functions.md5:0", "md5"),
        ("functionsmd512", "functions.md5:12", "md5"),
        ("md5", "functions.md5:0", "md5"),
    ],
)
def test_lost_punctuation_is_put_back_for_the_names_of_offered_tools(head: str, call_id: str, name: str) -> None:
    found = only_call(call(head, "{}"), tools=TOOLS)
    assert (found.id, found.name) == (call_id, name)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ('{"command": "ls"}', "exec"),
        ('{"path": "a", "text": "b"}', "write"),
        ('{"limit": {"text": 1}, "path": "a"}', "read"),
        ("{}", "now"),
        ('{"path": "the smaller set wins, then the first"}', "read"),
    ],
)
@pytest.mark.parametrize("head", ["3", "functions.:3", ":3"])
def test_a_bare_counter_means_the_tool_that_has_the_arguments(head: str, arguments: str, name: str) -> None:
    found = only_call(call(head, arguments), tools=TOOLS)
    assert found == ToolCall(0, f"functions.{name}:3", name, arguments, True)


def test_a_bare_counter_streams_as_soon_as_one_tool_is_left() -> None:
    text = call("3", '{"path": "a", "text": "long').removesuffix("<|tool_call_end|>")
    message = FORMATS["kimi_k2"].grammar(tools=TOOLS).parse(text, finished=False)
    assert message.tool_calls == (ToolCall(0, "functions.write:3", "write", '{"path": "a", "text": "long', False),)
    only = FORMATS["kimi_k2"].grammar(tools={"exec": ("command",)})
    assert only.parse("<|tool_call_begin|>3<|tool_call_argument_begin|>{", finished=False).tool_calls[0].name == "exec"


@pytest.mark.parametrize("tools", [{}, TOOLS])
def test_a_bare_counter_that_fits_no_tool_is_content(tools: dict[str, Any]) -> None:
    assert parse(call("3", '{"speed": 1}'), tools=tools) == ParsedMessage(content='{"speed": 1}')


def test_an_id_that_the_model_repeats_is_numbered_on() -> None:
    message = parse(call("functions.f:0", "{}") * 3, earlier_calls=1)
    assert [found.id for found in message.tool_calls] == ["functions.f:0", "functions.f:2", "functions.f:3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Cut off: in the arguments, before them, in the head, in a marker.
        (
            call("functions.f:0", '{"a": "x')[: -len("<|tool_call_end|>")],
            ParsedMessage(tool_calls=(ToolCall(0, "functions.f:0", "f", '{"a": "x', False),)),
        ),
        (
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
            ParsedMessage(tool_calls=(ToolCall(0, "functions.f:0", "f", "", False),)),
        ),
        ("ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0", ParsedMessage(content="okfunctions.f:0")),
        ("ok<|tool_calls_sec", ParsedMessage(content="ok<|tool_calls_sec")),
        # No end marker after JSON that closes; braces too many; no arguments at all.
        (
            "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{} Done.",
            ParsedMessage(content="Done.", tool_calls=(ToolCall(0, "functions.f:0", "f", "{}", True),)),
        ),
        (
            call("f:0", '{"a": {}}}'),
            ParsedMessage(tool_calls=(ToolCall(0, "functions.f:0", "f", '{"a": {}}', True),)),
        ),
        (call("f:0", " \n"), ParsedMessage(tool_calls=(ToolCall(0, "functions.f:0", "f", "{}", True),))),
        (
            "<|tool_call_begin|>functions.f:0<|tool_call_end|>",
            ParsedMessage(tool_calls=(ToolCall(0, "functions.f:0", "f", "{}", True),)),
        ),
        # Arguments that are not JSON stay what they are.
        (
            call("f:0", " city: Paris \n"),
            ParsedMessage(tool_calls=(ToolCall(0, "functions.f:0", "f", "city: Paris", True),)),
        ),
        # A brace that never closes ends at the marker, and the next call is whole.
        (
            call("f:0", '{"a": {"b": 1}') + call("g:1", "{}"),
            ParsedMessage(
                tool_calls=(
                    ToolCall(0, "functions.f:0", "f", '{"a": {"b": 1}', True),
                    ToolCall(1, "functions.g:1", "g", "{}", True),
                )
            ),
        ),
        # So does a string.
        (
            call("f:0", '{"a": "b}') + call("g:1", '{"x": "y"}'),
            ParsedMessage(
                tool_calls=(
                    ToolCall(0, "functions.f:0", "f", '{"a": "b}', True),
                    ToolCall(1, "functions.g:1", "g", '{"x": "y"}', True),
                )
            ),
        ),
        (
            call("f:0", '{"a": "b}') + END,
            ParsedMessage(tool_calls=(ToolCall(0, "functions.f:0", "f", '{"a": "b}', True),)),
        ),
        # Heads that name nothing, an empty section, markers out of place.
        (call("two words", "{}"), ParsedMessage(content="two words{}")),
        ("a" + BEGIN + END + "b", ParsedMessage(content="ab")),
        (BEGIN + "just text" + END, ParsedMessage(content="just text")),
        ("a<|tool_call_end|>b<|tool_call_argument_begin|>c", ParsedMessage(content="abc")),
    ],
)
def test_malformed_output_degrades_to_content_or_to_the_best_partial_call(text: str, expected: ParsedMessage) -> None:
    assert parse(text) == expected


def test_a_marker_inside_a_string_is_text_however_the_string_goes_on() -> None:
    for inner in ("<|tool_call_end|>", f"<|tool_call_end|>{END}", f'\\"<|tool_call_end|>\\", {BEGIN}'):
        arguments = f'{{"a": "{inner}", "b": ["{inner}"]}}'
        assert only_call(call("f:0", arguments)).arguments == arguments


def test_a_head_without_end_becomes_content_after_a_while() -> None:
    text = "<|tool_call_begin|>" + "no call, just words " * 40
    message = FORMATS["kimi_k2"].grammar().parse(text, finished=False)
    assert text.endswith(message.content)
    assert len(message.content) > 500
