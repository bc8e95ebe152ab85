"""The invariant of the server's stream: for every chunking, the deltas add up to what the whole text says."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.server.parsers import dsml, json_calls, marked_calls, streaming
from pellucid.server.parsers.choice import build_grammar
from pellucid.server.parsers.message import ParsedMessage, ToolCall
from pellucid.server.parsers.request import ParserRequest
from tests.server.parsers.renderings import FORMATS, Format
from tests.server.parsers.streams import (
    add_up,
    assert_same_for_every_chunking,
    assert_same_for_every_width,
    cut,
    regroup,
    split,
    stream,
)

# Case C08: two calls, with braces, a piece of a marker, and a fenced block inside their strings.
C08_CALLS = (
    ToolCall(
        0,
        "functions.get_weather:0",
        "get_weather",
        r'{"city": "Paris", "note": "a {brace} and <|pipe"}',
        complete=True,
    ),
    ToolCall(
        1,
        "functions.write_file:1",
        "write_file",
        r'{"path": "/tmp/a.md", "text": "# T\n```json\n{\"x\": {\"y\": 1}}\n```\n"}',
        complete=True,
    ),
)
C08 = ParsedMessage("", "Let me check.", C08_CALLS)
C08_TEXT = (
    "Let me check.<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    r'{"city": "Paris", "note": "a {brace} and <|pipe"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.write_file:1<|tool_call_argument_begin|>"
    r'{"path": "/tmp/a.md", "text": "# T\n```json\n{\"x\": {\"y\": 1}}\n```\n"}<|tool_call_end|>'
    "<|tool_calls_section_end|>"
)
C08_TOKENS = re.findall(r"<\|tool_\w+\|>|\s*\w{1,6}|\s*[^\w\s]|\s+", C08_TEXT)
KIMI = FORMATS["kimi_k2"].grammar()


def test_c08_in_one_delta() -> None:
    assert KIMI.parse(C08_TEXT) == C08
    assert add_up(stream(KIMI, [C08_TEXT])) == C08


def test_c08_for_every_fixed_width() -> None:
    assert assert_same_for_every_width(KIMI, C08_TEXT) == C08


def test_c08_for_token_aligned_groups_as_speculative_decoding_makes_them() -> None:
    assert "".join(C08_TOKENS) == C08_TEXT
    for size in range(1, 13):
        groups = ["".join(C08_TOKENS[start : start + size]) for start in range(0, len(C08_TOKENS), size)]
        assert add_up(stream(KIMI, groups)) == C08
    for seed in range(100):
        assert add_up(stream(KIMI, regroup(C08_TOKENS, seed))) == C08


def test_c08_for_all_chunkings_at_once() -> None:
    assert assert_same_for_every_chunking(KIMI, C08_TEXT) == C08


@pytest.mark.parametrize("width", [1, 4])
def test_c08_arguments_arrive_while_the_call_is_open(width: int) -> None:
    """No silence until the end marker: within the arguments every push shows something, pieces of markers aside."""
    deltas = stream(KIMI, split(C08_TEXT, width))
    for call in C08_CALLS:
        own = [i for i, delta in enumerate(deltas) if any(part.index == call.index for part in delta.tool_calls)]
        closing = next(i for i in own if any(part.complete for part in deltas[i].tool_calls))
        assert own[-1] == closing
        fragments = [i for i in own if any(part.arguments for part in deltas[i].tool_calls)]
        assert fragments[0] <= own[0] + 1
        assert max(later - earlier for earlier, later in pairwise(fragments)) <= 3


SAMPLES = {
    name: [
        format.write("Let me check." if format.has_content else "", [("get_weather", '{"city": "Zürich"}')]),
        format.write("", [("a.b", '{"t": "<{\\"\\\\", "n": [{}]}'), ("ping", "{}")]),
        format.write("No call, only text: <b>, {}, <|, ```json and\n\nmore\n", []),
    ]
    for name, format in FORMATS.items()
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sample", range(3))
def test_every_format_for_all_chunkings_at_once(name: str, sample: int) -> None:
    format, text = FORMATS[name], SAMPLES[name][sample]
    message = assert_same_for_every_chunking(format.grammar(), text)
    assert [call.name for call in message.tool_calls] == [["get_weather"], ["a.b", "ping"], []][sample]
    assert all(call.complete for call in message.tool_calls)
    if sample == 2:
        assert message.content == text


def quoted_json(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Small objects as JSON text, in several layouts, with the given strings in inner keys and values."""
    leaves = st.none() | st.booleans() | st.integers(-99, 99) | st.just(-0.5e-7) | values
    inner = st.lists(leaves, max_size=2) | st.dictionaries(values, leaves, max_size=2)
    objects = st.dictionaries(st.text("abc_", min_size=1, max_size=3), leaves | inner, max_size=3)
    layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
    return st.builds(lambda value, layout: json.dumps(value, **layout), objects, layouts)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_generated_calls_come_back_for_every_width_and_random_splits(name: str, data: st.DataObject) -> None:
    """Names with dots; arguments with braces, quotes, escapes, any Unicode and whole markers in their strings."""
    format = FORMATS[name]
    pieces = st.sampled_from([*format.markers, *format.markers, "</tool_call>", "</think>", "```", '{"', "\\", "\n"])
    texts = st.lists(pieces | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=2).map("".join)
    names = st.from_regex(r"[a-zA-Z_][\w.\-]{0,8}", fullmatch=True, alphabet=st.characters(codec="ascii"))
    if name == "deepseek_v32":
        texts = texts.filter(lambda text: "｜DSML｜" not in text)
    calls = data.draw(st.lists(st.tuples(names, quoted_json(texts)), min_size=1, max_size=2))
    content = data.draw(plain_text(format)) if format.has_content else ""
    text = format.write(content, calls)
    grammar = format.grammar()
    message = assert_same_for_every_width(grammar, text)
    assert message.content == content
    assert [(call.name, call.arguments, call.complete) for call in message.tool_calls] == [
        (called, format.arguments(arguments), True) for called, arguments in calls
    ]
    assert len({call.id for call in message.tool_calls}) == len(calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert add_up(stream(grammar, cut(text, cuts))) == message


def plain_text(format: Format) -> st.SearchStrategy[str]:
    """Text without a marker, though with pieces of them, and without newlines that would be layout."""
    pieces = st.sampled_from([marker[:-1] for marker in format.markers] + ["<", "{}", "\n", "x"])
    texts = st.lists(pieces | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=4).map("".join)
    if format.newlines_are_layout:
        texts = texts.map(lambda text: text.rstrip("\n"))
    return texts.filter(lambda text: not any(marker in text for marker in format.markers))


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3", "deepseek_v31"])
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_text_between_and_after_calls_is_content(name: str, data: st.DataObject) -> None:
    format = FORMATS[name]
    texts = data.draw(st.lists(plain_text(format).map(lambda text: text.strip(" \t\r\n}]`")), min_size=3, max_size=3))
    one, two = (format.write("", [call]) for call in (("a", '{"x": 1}'), ("b", "{}")))
    message = assert_same_for_every_width(format.grammar(), texts[0] + one + texts[1] + two + texts[2])
    assert message.content == "".join(texts)
    assert [call.arguments for call in message.tool_calls] == ['{"x": 1}', "{}"]


SOUP = {
    "kimi_k2": [*FORMATS["kimi_k2"].markers, "functions.", "read:0", "3", "exec"],
    "deepseek_v3": [*FORMATS["deepseek_v3"].markers, "function", "```json", "```", "\n", "read"],
    "deepseek_v31": [*FORMATS["deepseek_v31"].markers, "read", "```"],
    "deepseek_v32": [
        "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="read">',
        '<｜DSML｜parameter name="n" string="true">',
        '<｜DSML｜parameter name="n" string="false">',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "<｜DSML｜",
        "5",
    ],
    "hermes": ["<tool_call>", "</tool_call>", '"name": "read"', '"arguments": ', '"name": 3', '{"name": "a", ', "null"],
    "llama3_json": ["<|python_tag|>", '{"name": "read", "parameters": {', '"name": "x"', '"parameters": ', "; "],
}
COMMON = ["<think>", "</think>", "\n", " ", "{", "}", '"', "\\", "é", "[", "]", ",", ":", '"path": "', "<", "</", "x"]
TOOLS = {"read": ("path", "n"), "exec": ("path",), "write": ("path", "text")}


@pytest.mark.parametrize("limits", ["usual limits", "tiny limits"])
@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_marker_soup_is_never_refused_and_the_same_for_all_chunkings(
    name: str, limits: str, data: st.DataObject
) -> None:
    """Whatever a broken model writes: no error, nothing taken back, nothing left unread, no effect of chunking."""
    parts = data.draw(st.lists(st.sampled_from(SOUP[name]) | st.sampled_from(COMMON), max_size=8))
    reasoning = data.draw(st.sampled_from([None, "kimi_k2", "deepseek_r1", "qwen3"]))
    tools = data.draw(st.sampled_from([{}, TOOLS]))
    grammar = build_grammar(name, reasoning, ParserRequest(tools=tools))
    text = "".join(parts)[:75]
    with pytest.MonkeyPatch.context() as patch:
        if limits == "tiny limits":
            patch.setattr(marked_calls, "MAX_HEAD", 12)
            patch.setattr(json_calls, "MAX_HEAD", 5)
            patch.setattr(dsml, "MAX_TAG", 30)
            patch.setattr(dsml, "MAX_SCALAR", 3)
        assert_same_for_every_chunking(grammar, text)


@pytest.mark.parametrize("length", range(6, 19, 2))
def test_limits_fall_at_the_same_place_for_all_chunkings(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, tags and values just below and just above the length at which they stop being one."""
    monkeypatch.setattr(marked_calls, "MAX_HEAD", 38)
    monkeypatch.setattr(json_calls, "MAX_HEAD", 24)
    monkeypatch.setattr(dsml, "MAX_TAG", 32)
    monkeypatch.setattr(dsml, "MAX_SCALAR", 10)
    name = "x" * length
    for tool_parser, text, shown in [
        ("kimi_k2", f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{}}", length <= 10),
        ("hermes", f'<tool_call>{{"{name}": 1, "name": "f"}}</tool_call>', length <= 9),
        ("deepseek_v32", f'<｜DSML｜invoke name="{name}">\n</｜DSML｜invoke>', length <= 10),
        (
            "deepseek_v32",
            f'<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">{"1" * length}</｜DSML｜parameter>',
            True,
        ),
        ("deepseek_v32", f"<｜DSML｜{name * 3} b", False),
    ]:
        message = assert_same_for_every_chunking(FORMATS[tool_parser].grammar(), text)
        assert bool(message.tool_calls) == shown


def test_long_waits_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule that saves reading long open text again, made to apply always."""
    monkeypatch.setattr(streaming, "LONG_WAIT", 0)
    late_name = '<tool_call>{"arguments": {"text": "' + "x" * 60 + '"}, "name": "write"}</tool_call>done'
    for name, text in [("kimi_k2", C08_TEXT), ("hermes", late_name)]:
        assert_same_for_every_width(FORMATS[name].grammar(), text)
