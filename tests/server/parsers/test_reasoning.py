"""Where reasoning begins and ends, with and without tags, for every chunking."""

from __future__ import annotations

import pytest

from pellucid.server.parsers.choice import build_grammar
from pellucid.server.parsers.message import ParsedMessage
from pellucid.server.parsers.request import ParserRequest
from tests.server.parsers.renderings import FORMATS, write_hermes, write_kimi
from tests.server.parsers.streams import assert_same_for_every_width

NAMES = ["deepseek_r1", "deepseek_v3", "kimi_k2", "qwen3"]
CALL = [("f", '{"a": 1}')]


def parse(name: str, text: str, prompt: str = "", tool_parser: str | None = None) -> ParsedMessage:
    return assert_same_for_every_width(build_grammar(tool_parser, name, ParserRequest(prompt=prompt)), text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
        ("\n <think></think>\n\nYes.", "", "Yes."),
        ("<think>a < b </thin </think>", "a < b </thin ", ""),
        ("<think>Hm.</think>Of <think> and </think>.", "Hm.", "Of <think> and </think>."),
        ("<think>cut", "cut", ""),
        ("<think>cut\n</thi", "cut\n</thi", ""),
    ],
)
def test_reasoning_stands_between_its_tags(name: str, text: str, reasoning: str, content: str) -> None:
    assert parse(name, text) == ParsedMessage(reasoning, content)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_ends_with_the_tag_has_begun_the_reasoning(name: str) -> None:
    for prompt in ("<|im_assistant|>assistant<|im_middle|><think>", "<|im_start|>assistant\n<think>\n"):
        assert parse(name, "Hm.</think>Yes.", prompt) == ParsedMessage("Hm.", "Yes.")
        assert parse(name, "<think>Hm.</think>Yes.", prompt) == ParsedMessage("Hm.", "Yes.")
        assert parse(name, "Hm", prompt) == ParsedMessage("Hm", "")


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_has_closed_the_tag_leaves_content_only(name: str) -> None:
    """Thinking turned off: not everything is reasoning."""
    for prompt in ("<think></think>", "<think>\n\n</think>\n\n", "<｜Assistant｜></think>"):
        assert parse(name, "Yes.", prompt) == ParsedMessage("", "Yes.")


def test_only_r1_reasons_without_a_tag_of_its_own() -> None:
    assert parse("deepseek_r1", "Hm.\n</think>\n\nYes.") == ParsedMessage("Hm.", "Yes.")
    assert parse("deepseek_r1", "Hm.") == ParsedMessage("Hm.", "")
    for name in ("deepseek_v3", "kimi_k2", "qwen3"):
        assert parse(name, " Yes.") == ParsedMessage("", " Yes.")


def test_no_parser_leaves_the_tags() -> None:
    grammar = build_grammar(None, None, ParserRequest(prompt="<think>"))
    assert assert_same_for_every_width(grammar, "a</think>b").content == "a</think>b"


@pytest.mark.parametrize("opening", ["<think>", ""])
@pytest.mark.parametrize("closing", ["</think>", "\n</think>\n", "\n", ""])
def test_a_kimi_tool_marker_ends_reasoning_without_the_tag(opening: str, closing: str) -> None:
    section = write_kimi("", CALL)
    variants = [
        section,
        section.replace("tool_calls_section", "tool_call_section"),
        section.removeprefix("<|tool_calls_section_begin|>"),
    ]
    for variant in variants:
        prompt = "" if opening else "<think>"
        message = parse("kimi_k2", f"{opening}Hm.{closing}{variant}", prompt, "kimi_k2")
        assert (message.reasoning, message.content) == ("Hm.", "")
        assert [call.id for call in message.tool_calls] == ["functions.f:0"]


def test_others_do_not_call_tools_while_they_reason() -> None:
    tagged = write_hermes("", CALL)
    message = parse("qwen3", f"<think>Like {tagged}?</think>\n\n{tagged}", tool_parser="hermes")
    assert message.reasoning == f"Like {tagged}?"
    assert [call.name for call in message.tool_calls] == ["f"]


@pytest.mark.parametrize("tool_parser", FORMATS)
def test_reasoning_goes_before_the_calls_of_every_format(tool_parser: str) -> None:
    format = FORMATS[tool_parser]
    content = "Now." if format.has_content else ""
    message = parse("deepseek_r1", "Hm.</think>\n\n" + format.write(content, CALL), tool_parser=tool_parser)
    assert (message.reasoning, message.content) == ("Hm.", content)
    assert [(call.name, call.arguments) for call in message.tool_calls] == CALL
