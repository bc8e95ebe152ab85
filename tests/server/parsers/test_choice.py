"""Parsers are found by vocabulary markers and template text, and taken by name where a flag says so."""

from __future__ import annotations

import inspect
import re

import pytest

from pellucid.core import PlanError
from pellucid.server.parsers.choice import (
    TOOL_PARSERS,
    Detected,
    build_grammar,
    detect_parsers,
    override,
)
from pellucid.server.parsers.request import ParserRequest

KIMI = {"<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"}
DEEPSEEK = {"<｜Assistant｜>", "<｜User｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"}
QWEN = {"<|im_start|>", "<tool_call>", "</tool_call>"}
THINK = {"<think>", "</think>"}
V3_TEMPLATE = (
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n'}}"
)
V31_TEMPLATE = "{% if not thinking %}</think>{% endif %}<｜tool▁call▁begin｜>{{name}}<｜tool▁sep｜>{{arguments}}"
R1_TEMPLATE = V3_TEMPLATE + "{% set content = content.split('</think>')[-1] %}<｜Assistant｜><think>\\n"
KIMI_THINKING_TEMPLATE = "{% if thinking %}<think>{% else %}<think></think>{% endif %}"
QWEN3_TEMPLATE = (
    '<tool_call>\\n{"name": {{name}}, "arguments": {{arguments}}}\\n</tool_call>{{content.split("</think>")}}'
)


@pytest.mark.parametrize(
    ("vocabulary", "template", "tool_parser", "reasoning_parser"),
    [
        (KIMI, "<|im_middle|>{{content}}", "kimi_k2", None),
        (KIMI | THINK, KIMI_THINKING_TEMPLATE, "kimi_k2", "kimi_k2"),
        (DEEPSEEK, V3_TEMPLATE, "deepseek_v3", None),
        (DEEPSEEK | THINK, V3_TEMPLATE, "deepseek_v3", None),
        (DEEPSEEK | THINK, R1_TEMPLATE, "deepseek_v3", "deepseek_r1"),
        (DEEPSEEK | THINK, V31_TEMPLATE, "deepseek_v31", "deepseek_v3"),
        (DEEPSEEK | THINK | {"｜DSML｜"}, None, "deepseek_v32", "deepseek_v3"),
        (DEEPSEEK | THINK, None, "deepseek_v3", "deepseek_r1"),
        # A distilled model: its base's vocabulary, its teacher's template.
        (QWEN | THINK | {"<｜Assistant｜>"}, R1_TEMPLATE, "deepseek_v3", "deepseek_r1"),
        ({"<|python_tag|>", "<｜Assistant｜>"} | THINK, R1_TEMPLATE, "deepseek_v3", "deepseek_r1"),
        (QWEN, "{{tools}}<tool_call>{{name}}", "hermes", None),
        (QWEN | THINK, QWEN3_TEMPLATE, "hermes", "qwen3"),
        (QWEN | THINK, None, "hermes", "qwen3"),
        # The same tag around calls that are not JSON.
        (QWEN, "<tool_call>\\n<function=example>\\n</function>", None, None),
        (QWEN | THINK, "<tool_call>{{name}}<arg_key>{{k}}</arg_key></think>", None, "qwen3"),
        ({"<|python_tag|>", "<|eot_id|>"}, '{"name": function name, "parameters": ...}', "llama3_json", None),
        ({"hello", "world"}, "{{content}}", None, None),
        (set(), None, None, None),
    ],
)
def test_markers_choose_the_parsers(
    vocabulary: set[str], template: str | None, tool_parser: str | None, reasoning_parser: str | None
) -> None:
    detected = detect_parsers(vocabulary, template)
    assert (detected.tool_parser, detected.reasoning_parser) == (tool_parser, reasoning_parser)
    for name in (tool_parser, reasoning_parser):
        assert (name or "no") in detected.because
    message = build_grammar(detected.tool_parser, detected.reasoning_parser, ParserRequest()).parse("Yes.</think>No.")
    assert message.reasoning == ("Yes." if reasoning_parser == "deepseek_r1" else "")


def test_a_model_cannot_be_named_to_the_detection() -> None:
    assert list(inspect.signature(detect_parsers).parameters) == ["vocabulary", "chat_template"]


def test_a_flag_overrides_what_was_detected() -> None:
    found = Detected("hermes", "qwen3", "found")
    assert override(found) == found
    assert override(found, tool_parser="kimi-k2") == Detected("kimi_k2", "qwen3", "--tool-call-parser kimi-k2; found")
    assert override(found, tool_parser="none", reasoning_parser="deepseek_r1") == Detected(
        None, "deepseek_r1", "--reasoning-parser deepseek_r1; --tool-call-parser none; found"
    )


def test_an_unknown_name_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(PlanError, match=re.escape("--tool-call-parser: no parser is called 'gpt9'")) as refused:
        override(Detected(None, None, ""), tool_parser="gpt9")
    assert all(name in str(refused.value) for name in [*TOOL_PARSERS, "none"])
    with pytest.raises(PlanError, match=r"--reasoning-parser: .*choose one of .*qwen3, or none"):
        build_grammar(None, "hermes", ParserRequest())
