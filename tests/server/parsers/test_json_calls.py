"""Hermes' tagged JSON calls and Llama 3's bare ones."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.server.parsers.message import ParsedMessage, ToolCall
from tests.server.parsers.renderings import FORMATS
from tests.server.parsers.streams import assert_same_for_every_width, split, stream


def parse(tool_parser: str, text: str, **request: Any) -> ParsedMessage:
    return assert_same_for_every_width(FORMATS[tool_parser].grammar(**request), text)


def calls(*found: tuple[str, str, bool], content: str = "") -> ParsedMessage:
    tool_calls = (ToolCall(i, f"call_{i}", name, arguments, done) for i, (name, arguments, done) in enumerate(found))
    return ParsedMessage(content=content, tool_calls=tuple(tool_calls))


OBJECTS = [
    ('{"name": "f", "arguments": {"a": {"b": "}"}}}', ("f", '{"a": {"b": "}"}}', True)),
    ('{"arguments": {"name": "inner"}, "name": "f"}', ("f", '{"name": "inner"}', True)),
    ('{"name": "f", "parameters": {}}', ("f", "{}", True)),
    ('{"type": "function", "name": "f", "arguments": {}, "id": "x}"}', ("f", "{}", True)),
    ('{"name": "f", "arguments": {}, "note": "a key that is too late to matter"}', ("f", "{}", True)),
    ('{"name": "f"}', ("f", "{}", True)),
    ('{"name": "f", "arguments": null}', ("f", "{}", True)),
    ('{"name": "f", "arguments": "{\\"a\\": \\"é\\\\n\\"}"}', ("f", '{"a": "é\\n"}', True)),
    ('{"name": "f", "arguments": 5}', ("f", "5", True)),
    ('{"name":"f","arguments":[1]}', ("f", "[1]", True)),
    ('{\n  "name" : "f\\u002eg",\n  "arguments" : {}\n}', ("f.g", "{}", True)),
    ('{"name": "f", "arguments": {"a": 1}}}', ("f", '{"a": 1}', True)),
]


@pytest.mark.parametrize(("text", "expected"), OBJECTS)
@pytest.mark.parametrize("tool_parser", ["hermes", "llama3_json"])
def test_members_may_come_in_any_order_and_form(tool_parser: str, text: str, expected: tuple[str, str, bool]) -> None:
    written = f"<tool_call>\n{text}\n</tool_call>" if tool_parser == "hermes" else text
    assert parse(tool_parser, written) == calls(expected)


def test_hermes_text_around_calls_loses_only_layout_newlines() -> None:
    text = (
        'One\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\ntwo\n<tool_call>\n{"name": "g"}</tool_call>\n'
    )
    assert parse("hermes", text) == calls(("f", "{}", True), ("g", "{}", True), content="Onetwo")


def test_hermes_several_objects_in_one_tag() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>'
    assert parse("hermes", text) == calls(("f", "{}", True), ("g", "{}", True))


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> and </tool_call> around it.",
        "Use\n<tool_call>\nname\n</tool_call>\n",
        '<tool_call>{"nam": "f"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "f',
        "<tool_call>",
        "<tool_call>\n",
        "<tool_ca",
    ],
)
def test_hermes_tags_without_a_call_are_the_text_that_they_are(text: str) -> None:
    assert parse("hermes", text) == ParsedMessage(content=text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "x', calls(("f", '{"a": "x', False))),
        ('<tool_call>{"name": "f", "arguments": ', calls(("f", "", False))),
        ('<tool_call>{"name": "f", "arguments": tru', calls(("f", "tru", False))),
        ('<tool_call>{"name": "f", "arguments": {}}', calls(("f", "{}", True))),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>', calls(("f", "{}", True))),
        ('<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>x', calls(("f", '{"a": [1', True), content="x")),
        ('<tool_call>{"name": "f", "arguments": oops</tool_call>', calls(("f", "oops", True))),
        ('<tool_call>{"name": "f"</tool_call>', calls(("f", "{}", True))),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            calls(("f", '{"a": "b}}', True), ("g", "{}", True)),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            calls(("f", '{"a": "</tool_call>"}', True)),
        ),
    ],
)
def test_hermes_malformed_or_cut_off_calls_keep_what_is_there(text: str, expected: ParsedMessage) -> None:
    assert parse("hermes", text) == expected


def test_hermes_arguments_stream_from_inside_the_object() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"text": "' + "word " * 20 + '"}}\n</tool_call>'
    deltas = stream(FORMATS["hermes"].grammar(), split(text, 5))
    assert sum(bool(part.arguments) for delta in deltas for part in delta.tool_calls) > 18


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|python_tag|>{"name": "f", "parameters": {}}', calls(("f", "{}", True))),
        ('\n {"name": "f", "parameters": {}}', calls(("f", "{}", True))),
        ('Sure.\n<|python_tag|>{"name": "f", "parameters": {}}', calls(("f", "{}", True), content="Sure.")),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": ";"}}',
            calls(("f", "{}", True), ("g", '{"a": ";"}', True)),
        ),
        ('{"name": "f", "parameters": {}}\nDone.', calls(("f", "{}", True), content="Done.")),
        ('{"name": "f", "parameters": {"a": ', calls(("f", '{"a": ', False))),
    ],
)
def test_llama3_calls_begin_the_output_or_follow_the_python_tag(text: str, expected: ParsedMessage) -> None:
    assert parse("llama3_json", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Ada", "born": 1815}',
        '{"name": "Ada',
        '{"type": "person"}',
        "{",
        "  {}",
        'It is {"name": "f", "parameters": {}}',
        '[{"name": "f"}]',
    ],
)
def test_llama3_json_that_is_no_call_is_the_answer(text: str) -> None:
    assert parse("llama3_json", text, tools={"f": ()}) == ParsedMessage(content=text)


def test_llama3_an_answer_shows_itself_at_the_first_key_that_no_call_has() -> None:
    text = '{"name": "Ada", "born": 18'
    assert FORMATS["llama3_json"].grammar().parse(text, finished=False) == ParsedMessage(content=text)


def test_llama3_an_object_named_after_no_tool_is_the_answer_where_tools_are_known() -> None:
    text = '{"name": "g", "parameters": {}}'
    assert parse("llama3_json", text, tools={"f": ()}) == ParsedMessage(content=text)
    assert parse("llama3_json", text) == calls(("g", "{}", True))


def test_llama3_code_after_the_python_tag_is_content() -> None:
    assert parse("llama3_json", "<|python_tag|>print(1)") == ParsedMessage(content="print(1)")


def test_formats_without_ids_get_the_requests_own() -> None:
    text = '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}'
    message = parse("llama3_json", text, call_id_prefix="call_k3x9_")
    assert [call.id for call in message.tool_calls] == ["call_k3x9_0", "call_k3x9_1"]
