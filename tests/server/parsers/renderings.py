"""How each model writes a message, after its chat template: the other direction of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.server.parsers.choice import build_grammar
from pellucid.server.parsers.grammar import Grammar
from pellucid.server.parsers.request import ParserRequest

Call = tuple[str, str]
"""Name, and arguments as JSON text."""


@dataclass(frozen=True)
class Format:
    """`write(content, calls)` gives a model's text; `arguments` what a client should get for a call's arguments."""

    tool_parser: str
    write: Callable[[str, Sequence[Call]], str]
    markers: tuple[str, ...]
    id_of: Callable[[str, int], str] = lambda name, index: f"call_{index}"
    arguments: Callable[[str], str] = lambda text: text
    has_content: bool = True
    newlines_are_layout: bool = False

    def grammar(self, reasoning_parser: str | None = None, **request: Any) -> Grammar:
        return build_grammar(self.tool_parser, reasoning_parser, ParserRequest(**request))


def write_kimi(content: str, calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return content + (f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>" if calls else "")


def write_deepseek_v3(content: str, calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return content + (f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>" if calls else "")


def write_deepseek_v31(content: str, calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return content + (f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>" if calls else "")


def write_dsml(content: str, calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        return f'<｜DSML｜parameter name="{key}" string="{str(is_string).lower()}">{text}</｜DSML｜parameter>'

    written = "\n".join(
        "\n".join(
            [
                f'<｜DSML｜invoke name="{name}">',
                *(parameter(key, value) for key, value in json.loads(arguments).items()),
                "</｜DSML｜invoke>",
            ]
        )
        for name, arguments in calls
    )
    return content + (f"\n\n<｜DSML｜function_calls>\n{written}\n</｜DSML｜function_calls>" if calls else "")


def write_hermes(content: str, calls: Sequence[Call]) -> str:
    written = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )
    return f"{content}\n{written}" if content and calls else content + written


def write_llama3(content: str, calls: Sequence[Call]) -> str:
    assert not content or not calls
    return content + "; ".join(
        f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in calls
    )


KIMI_MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)

FORMATS = {
    format.tool_parser: format
    for format in (
        Format("kimi_k2", write_kimi, KIMI_MARKERS, id_of=lambda name, index: f"functions.{name}:{index}"),
        Format("deepseek_v3", write_deepseek_v3, DEEPSEEK_MARKERS),
        Format("deepseek_v31", write_deepseek_v31, DEEPSEEK_MARKERS),
        Format(
            "deepseek_v32",
            write_dsml,
            ("<｜DSML｜", "</｜DSML｜"),
            arguments=lambda text: json.dumps(json.loads(text), ensure_ascii=False),
            newlines_are_layout=True,
        ),
        Format("hermes", write_hermes, ("<tool_call>",), newlines_are_layout=True),
        Format("llama3_json", write_llama3, ("<|python_tag|>",), has_content=False, newlines_are_layout=True),
    )
}
