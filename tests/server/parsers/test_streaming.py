"""How early a stream shows text, and what it costs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.server.parsers.choice import build_grammar
from pellucid.server.parsers.grammar import Grammar
from pellucid.server.parsers.markers import Markers
from pellucid.server.parsers.message import MessageDelta
from pellucid.server.parsers.request import ParserRequest
from pellucid.server.parsers.streaming import LONG_WAIT, StreamingParser
from tests.server.parsers.renderings import FORMATS, write_hermes
from tests.server.parsers.streams import add_up, split, stream


def longest_prefix_at_the_end(text: str, markers: tuple[str, ...]) -> str:
    tails = [text[start:] for start in range(len(text) + 1)]
    return next(tail for tail in tails if any(marker.startswith(tail) and marker != tail for marker in markers))


@given(
    st.sampled_from([["<ab>"], ["<ab>", "<a/b>"], ["<aab", "<<b", "<ab"]]),
    st.text("<ab>/\n", max_size=14),
    st.booleans(),
)
def test_markers_hold_back_just_a_proper_prefix_and_their_newlines(
    literals: list[str], text: str, takes_newlines: bool
) -> None:
    end, marker = Markers(literals, takes_newlines).split(text, 0, finished=False)
    found = [text.index(literal) for literal in literals if literal in text]
    assert (marker is not None) == bool(found)
    before = text[: min(found)] if found else text.removesuffix(longest_prefix_at_the_end(text, tuple(literals)))
    assert text[:end] == (before.rstrip("\n") if takes_newlines else before)
    at_the_end = Markers(literals, takes_newlines).split(text, 0, finished=True)
    assert at_the_end[0] == (end if marker else len(text))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_text_is_shown_at_once_but_for_what_may_become_a_marker(name: str, data: st.DataObject) -> None:
    format = FORMATS[name]
    pieces = [marker[:length] for marker in format.markers for length in range(1, len(marker))]
    text = "x" + "".join(data.draw(st.lists(st.sampled_from([*pieces, "<", "\n", "x"]), max_size=4)))
    if any(marker in text for marker in format.markers):
        return
    shown = format.grammar().parse(text, finished=False).content
    open_text = longest_prefix_at_the_end(text, format.markers)
    expected = text.removesuffix(open_text)
    assert shown == (expected.rstrip("\n") if format.newlines_are_layout else expected)


def test_reasoning_is_shown_at_once_but_for_what_may_become_a_marker() -> None:
    grammar = FORMATS["kimi_k2"].grammar("kimi_k2")
    for text, held in [("Hm", ""), ("Hm\n", "\n"), ("Hm\n</thi", "\n</thi"), ("Hm<|tool_c", "<|tool_c"), ("<|no", "")]:
        assert grammar.parse("<think>" + text, finished=False).reasoning == text.removesuffix(held)


def test_a_push_that_adds_nothing_is_falsy() -> None:
    parser = StreamingParser(FORMATS["kimi_k2"].grammar())
    assert not parser.push("")
    assert not parser.push("<|tool_calls_section_begin|>")
    assert parser.push("<|tool_call_begin|>f:0<|tool_call_argument_begin|>").tool_calls
    assert parser.finish() == MessageDelta()


def test_one_delta_may_carry_reasoning_content_and_calls() -> None:
    text = "<think>a</think>b" + FORMATS["kimi_k2"].write("", [("f", "{}"), ("g", "{}")])
    delta = StreamingParser(FORMATS["kimi_k2"].grammar("kimi_k2")).push(text)
    assert (delta.reasoning, delta.content) == ("a", "b")
    assert [(part.index, part.name, part.arguments, part.complete) for part in delta.tool_calls] == [
        (0, "f", "{}", True),
        (1, "g", "{}", True),
    ]


LONG = json.dumps({"text": 'A "quoted" line,\n with <b> in it.\n' * 1500})
TWO_TOOLS = {"w": ("text", "mode"), "v": ("text", "size")}
LONG_OUTPUTS = {
    "content": ("kimi_k2", "A line of text, with <b> in it.\n" * 1500),
    "newlines": ("hermes", "\n" * 50_000),
    "arguments": ("kimi_k2", FORMATS["kimi_k2"].write("", [("w", LONG)])),
    "name comes last": ("hermes", f'<tool_call>{{"arguments": {LONG}, "name": "w"}}</tool_call>'),
    "quoted arguments": ("hermes", write_hermes("", [("w", json.dumps(LONG))])),
    "tool known at the end": ("kimi_k2", f"<|tool_call_begin|>0<|tool_call_argument_begin|>{LONG}"),
    "marker in a long string": (
        "kimi_k2",
        FORMATS["kimi_k2"].write("", [("w", f'["<|tool_call_end|>{"x" * 50_000}"]')]),
    ),
    "head without end": ("deepseek_v3", "<｜tool▁call▁begin｜>" + "word " * 10_000),
    "scalar without end": ("deepseek_v32", FORMATS["deepseek_v32"].write("", [("w", LONG)]).replace("true", "false")),
    "many members": ("hermes", '<tool_call>{"name": "w"' + ', "x": [1]' * 5_000 + "}</tool_call>"),
}


@pytest.mark.parametrize("case", LONG_OUTPUTS)
def test_reading_is_linear_in_the_text_whatever_the_chunks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters read by all the parses of a stream, per character of the text."""
    tool_parser, text = LONG_OUTPUTS[case]
    grammar = build_grammar(tool_parser, "qwen3", ParserRequest(tools=TWO_TOOLS))
    read, advance = 0, grammar.advance

    def counting(point: object, open_text: str, finished: bool) -> object:
        nonlocal read
        read += len(open_text)
        return advance(point, open_text, finished)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(grammar, "advance", counting)
        deltas = stream(grammar, split(text, 4))
    assert read < 40 * len(text) + 300 * LONG_WAIT
    assert add_up(deltas) == grammar.parse(text)


def test_a_grammar_serves_several_outputs_at_once() -> None:
    """Nothing is kept in it: `n` choices share one."""
    grammar: Grammar = FORMATS["hermes"].grammar()
    text = write_hermes("One.", [("f", '{"a": 1}')])
    first, second = StreamingParser(grammar), StreamingParser(grammar)
    deltas = [(first.push(char), second.push(char)) for char in text]
    ends = (first.finish(), second.finish())
    for parts in zip(*deltas, ends, strict=True):
        assert add_up(parts) == grammar.parse(text)


def test_the_parser_knows_whether_it_is_in_reasoning() -> None:
    parser = StreamingParser(FORMATS["hermes"].grammar("qwen3"))
    inside = []
    for text in ["", "\n", "<thi", "nk>", "a", "\n</thi", "nk>", "\n", "b<think>"]:
        parser.push(text)
        inside.append(parser.in_reasoning)
    assert inside == [True, True, True, True, True, True, False, False, False]
    plain = StreamingParser(FORMATS["hermes"].grammar())
    plain.push("<think>")
    assert not plain.in_reasoning
