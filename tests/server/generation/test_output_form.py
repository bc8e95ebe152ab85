"""What a sample's reader says beside the message: how many tokens were reasoning, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pellucid.engine.output import TextDelta
from pellucid.server.generation.output_form import SampleReader
from pellucid.server.parsers.choice import build_grammar
from pellucid.server.parsers.request import ParserRequest

KIMI_CALL = [
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions",
    ".f",
    ":0",
    "<|tool_call_argument_begin|>",
    "{}",
    "<|tool_call_end|>",
]
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
HERMES_CUT = '<tool_call>\n{"name": "f", "arguments": {"a": "'


def reader(
    tool_parser: str | None, reasoning_parser: str | None, prompt: str = "", one_call: bool = False
) -> SampleReader:
    return SampleReader(build_grammar(tool_parser, reasoning_parser, ParserRequest(prompt=prompt)), one_call)


def reasoning_tokens(sample: SampleReader, tokens: Sequence[str]) -> int:
    for number, text in enumerate(tokens):
        sample.read(TextDelta("r", 0, text, (number,)))
    sample.read(TextDelta("r", 0, "", (len(tokens),), finish_reason="stop"))
    return sample.reasoning_tokens


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        (["<think>", "a", " b", "</think>", "\n\n", "Answer", "."], 4),
        # A token that spans the end counts whole.
        (["<think>", "a", " b", "</think>\n\nAnswer", " is"], 4),
        (["<think>", "a", " b", "</", "think", ">", "\n\n", "Answer"], 6),
        (["<think>", "\n", "\n", "a", "\n", "</think>", "Answer"], 6),
        (["Answer", " <think>", "a", "</think>"], 0),
        (["<think>", "\n\n", "</think>", "Answer"], 0),
    ],
)
def test_reasoning_is_counted_up_to_the_token_that_ends_it(tokens: list[str], count: int) -> None:
    assert reasoning_tokens(reader(None, "qwen3"), tokens) == count


def test_a_call_that_ends_the_reasoning_is_counted_by_its_first_marker_only() -> None:
    assert reasoning_tokens(reader("kimi_k2", "kimi_k2"), ["<think>", "a", *KIMI_CALL]) == 3
    assert reasoning_tokens(reader("kimi_k2", "kimi_k2"), ["<think>", "a", "</think>", *KIMI_CALL]) == 3


def test_reasoning_that_the_prompt_opened_or_that_never_ends_is_counted() -> None:
    assert reasoning_tokens(reader(None, "qwen3", "<think>\n"), ["a", " b", "</think>", "\n\n", "Answer"]) == 3
    # The token of the model's own end is one too.
    assert reasoning_tokens(reader(None, "qwen3"), ["<think>", "a", " b"]) == 4


def finish_reason(
    sample: SampleReader, text: str, reason: str = "stop", stop_reason: str | int | None = None
) -> str | None:
    for char in text:
        assert sample.read(TextDelta("r", 0, char, (1,))).finish_reason is None
    last = TextDelta("r", 0, "", (1,), finish_reason=reason, stop_reason=stop_reason)  # type: ignore[arg-type]
    return sample.read(last).finish_reason


@pytest.mark.parametrize(
    ("text", "reason", "stop_reason", "expected"),
    [
        (HERMES_CALL, "stop", None, "tool_calls"),
        (HERMES_CALL, "stop", 7, "tool_calls"),
        (HERMES_CALL + "\n" + HERMES_CALL, "stop", None, "tool_calls"),
        (HERMES_CALL, "stop", "\n\n", "tool_calls"),
        (HERMES_CUT, "stop", "x", "stop"),
        (HERMES_CUT, "stop", None, "stop"),
        (HERMES_CALL + "\n" + HERMES_CUT, "stop", None, "stop"),
        (HERMES_CALL + "\n" + HERMES_CUT, "length", None, "length"),
        (HERMES_CUT, "length", None, "length"),
        ("No call.", "stop", None, "stop"),
    ],
)
def test_tool_calls_is_the_reason_only_of_an_output_that_ends_after_a_whole_call(
    text: str, reason: str, stop_reason: str | int | None, expected: str
) -> None:
    assert finish_reason(reader("hermes", None), text, reason, stop_reason) == expected


def test_calls_that_are_not_shown_do_not_matter() -> None:
    text = HERMES_CALL + "\n" + HERMES_CUT
    assert finish_reason(reader("hermes", None, one_call=True), text) == "tool_calls"


def test_a_whole_call_in_one_delta_is_whole() -> None:
    delta = TextDelta("r", 0, HERMES_CALL, (1, 2), finish_reason="stop")
    event = reader("hermes", None).read(delta)
    assert event.finish_reason == "tool_calls"
    assert [call.complete for call in event.delta.tool_calls] == [True]
