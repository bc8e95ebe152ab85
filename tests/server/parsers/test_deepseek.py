"""DeepSeek V3 and V3.1 calls, and V3.2's DSML."""

from __future__ import annotations

import json

import pytest

from pellucid.server.parsers.message import ParsedMessage, ToolCall
from tests.server.parsers.renderings import FORMATS, write_deepseek_v3, write_deepseek_v31, write_dsml
from tests.server.parsers.streams import assert_same_for_every_width, split, stream

CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def parse(tool_parser: str, text: str) -> ParsedMessage:
    return assert_same_for_every_width(FORMATS[tool_parser].grammar(), text)


def calls(*found: tuple[str, str, bool], content: str = "") -> ParsedMessage:
    """With the ids that formats without ids get."""
    tool_calls = (ToolCall(i, f"call_{i}", name, arguments, done) for i, (name, arguments, done) in enumerate(found))
    return ParsedMessage(content=content, tool_calls=tuple(tool_calls))


def test_two_calls_in_one_delta_are_two_calls() -> None:
    """What other servers turned into one call with the second one's markers in its name."""
    text = write_deepseek_v31("Sure. ", [("get_weather", '{"city": "Paris"}'), ("write_file", '{"path": "a"}')])
    assert parse("deepseek_v31", text) == calls(
        ("get_weather", '{"city": "Paris"}', True), ("write_file", '{"path": "a"}', True), content="Sure. "
    )


def test_the_published_v3_template_forgets_the_sections_end() -> None:
    text = write_deepseek_v3("", [("f", '{"a": 1}')]).removesuffix("<｜tool▁calls▁end｜>")
    assert parse("deepseek_v3", text) == calls(("f", '{"a": 1}', True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{CALL}function{SEP}f{{}}{END}", calls(("f", "{}", True))),
        (f"{CALL}function{SEP}f\n{{}}{END}", calls(("f", "{}", True))),
        (f"{CALL}function{SEP}f\n```{{}}\n```{END}", calls(("f", "{}", True))),
        (f"{CALL}function{SEP}f\n```json\n{{}}\n```", calls(("f", "{}", True))),
        (f"{CALL}function{SEP}f\n```json\n```{END}", calls(("f", "", True))),
        (f"{CALL}function{SEP}f{END}", calls(("f", "{}", True))),
        (f"{CALL}function{SEP}f\n```json\nnot json\n```{END}", calls(("f", "not json", True))),
        (f'{CALL}function{SEP}f\n```json\n{{"a": "``', calls(("f", '{"a": "``', False))),
        (f"{CALL}function{SEP}f\n``", calls(("f", "", False))),
        (f"{CALL}function{SEP}ge", ParsedMessage(content="functionge")),
        (f"{CALL}function{SEP}{{}}{END}", ParsedMessage(content="function{}")),
    ],
)
def test_v3_without_fence_or_cut_off(text: str, expected: ParsedMessage) -> None:
    assert parse("deepseek_v3", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{CALL}f{SEP}{{}}", calls(("f", "{}", True))),
        (f"{CALL}f{SEP}\n{{}}\n{END}", calls(("f", "{}", True))),
        (f"{CALL}f{END}", calls(("f", "{}", True))),
        (f'{CALL}f{SEP}{{"a": [1, {CALL}g{SEP}{{}}{END}', calls(("f", '{"a": [1, ', True), ("g", "{}", True))),
        (f"{CALL}two words{END}", ParsedMessage(content="two words")),
        (f"{CALL}f{SEP}", calls(("f", "", False))),
    ],
)
def test_v31_malformed_or_cut_off(text: str, expected: ParsedMessage) -> None:
    assert parse("deepseek_v31", text) == expected


def dsml(*parameters: str, name: str = "f") -> str:
    return f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n' + "\n".join(parameters)


def parameter(name: str, value: str, is_string: bool | None) -> str:
    flag = "" if is_string is None else f' string="{str(is_string).lower()}"'
    return f'<｜DSML｜parameter name="{name}"{flag}>{value}</｜DSML｜parameter>'


CLOSE = "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"


@pytest.mark.parametrize(
    ("value", "is_string", "json_text"),
    [
        ("Paris", True, '"Paris"'),
        (' two\nlines "quoted" \\ é ', True, '" two\\nlines \\"quoted\\" \\\\ é "'),
        ("", True, '""'),
        ("5", True, '"5"'),
        ("5", False, "5"),
        ("-0.5e-7", False, "-0.5e-7"),
        (" true\n", False, "true"),
        ("null", False, "null"),
        ('[1, {"a": "</x>"}]', False, '[1, {"a": "</x>"}]'),
        ('"quoted"', False, '"quoted"'),
        ('["</｜DSML｜parameter>"]', False, '["</｜DSML｜parameter>"]'),
        ("Paris", False, '"Paris"'),
        ("05", False, '"05"'),
        ("True", False, '"True"'),
        ("", False, '""'),
        ("5", None, "5"),
        ("Paris", None, '"Paris"'),
        ("word " * 20, False, f'"{"word " * 20}"'),
    ],
)
def test_dsml_values_become_json(value: str, is_string: bool | None, json_text: str) -> None:
    message = parse("deepseek_v32", dsml(parameter("k", value, is_string)) + CLOSE)
    assert message == calls(("f", f'{{"k": {json_text}}}', True))
    assert json.loads(message.tool_calls[0].arguments)["k"] == json.loads(json_text)


def test_dsml_string_values_stream_while_they_arrive() -> None:
    text = dsml(parameter("a", "x" * 50, True), parameter("b", "[" + "1," * 20 + "1]", False)) + CLOSE
    deltas = stream(FORMATS["deepseek_v32"].grammar(), split(text, 5))
    assert sum(bool(part.arguments) for delta in deltas for part in delta.tool_calls) > 18


def test_dsml_layout_newlines_are_no_content() -> None:
    assert parse("deepseek_v32", write_dsml("Sure.", [("f", "{}")]) + "\n") == calls(("f", "{}", True), content="Sure.")


def test_dsml_of_the_next_version_has_another_outer_tag_or_none() -> None:
    inner = dsml(parameter("a", "1", False)).removeprefix("<｜DSML｜function_calls>\n") + "\n</｜DSML｜invoke>"
    expected = calls(("f", '{"a": 1}', True))
    assert parse("deepseek_v32", f"<｜DSML｜tool_calls>\n{inner}\n</｜DSML｜tool_calls>") == expected
    assert parse("deepseek_v32", inner) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # An end tag that is missing or misspelled, of a parameter or of a call.
        (
            dsml('<｜DSML｜parameter name="a" string="true">x', parameter("b", "y", True)) + CLOSE,
            calls(("f", '{"a": "x\\n", "b": "y"}', True)),
        ),
        (
            dsml('<｜DSML｜parameter name="a" string="true">x</｜DSML｜param>', parameter("b", "y", True)) + CLOSE,
            calls(("f", '{"a": "x", "b": "y"}', True)),
        ),
        (dsml() + dsml(name="g") + CLOSE, calls(("f", "{}", True), ("g", "{}", True))),
        # Arguments as JSON instead of parameters.
        (dsml('{"a": {"b": 1}}') + CLOSE, calls(("f", '{"a": {"b": 1}}', True))),
        # Stray text makes invalid JSON, so that no client runs the call without it.
        (
            dsml('<parameter name="a">true</｜DSML｜parameter>') + CLOSE,
            calls(("f", '<parameter name="a">true', True)),
        ),
        # Cut off: in a string, in a number, between parameters, in a tag.
        (dsml('<｜DSML｜parameter name="a" string="true">x</｜DS'), calls(("f", '{"a": "x</｜DS', False))),
        (dsml('<｜DSML｜parameter name="a" string="false">12'), calls(("f", '{"a": 12', False))),
        (dsml(parameter("a", "1", False)), calls(("f", '{"a": 1', False))),
        (dsml('<｜DSML｜parameter name="a'), calls(("f", "", False))),
        ("x<｜DSML｜invo", ParsedMessage(content="x")),
        # No name, no tag, an end tag too many.
        ("x<｜DSML｜invoke>y</｜DSML｜invoke>", ParsedMessage(content="xy")),
        ("a <｜DSML｜ b\nc", ParsedMessage(content="a b\nc")),
        ("a</｜DSML｜function_calls>b", ParsedMessage(content="ab")),
    ],
)
def test_dsml_malformed_or_cut_off(text: str, expected: ParsedMessage) -> None:
    assert parse("deepseek_v32", text) == expected
