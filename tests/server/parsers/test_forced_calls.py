"""Grammars of forced calls: whatever they let a model write, the model's parser reads as calls with valid arguments."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from pellucid.core import InvalidRequestError, PlanError, StructuredOutputs
from pellucid.server.parsers.choice import REASONING_PARSERS, TOOL_PARSERS, build_grammar
from pellucid.server.parsers.forced_calls import after_reasoning, forced_call_grammar
from pellucid.server.parsers.message import ParsedMessage
from pellucid.server.parsers.request import ParserRequest
from pellucid.tokenizer.structured_output import GrammarCompiler, check_grammar, to_lark
from pellucid.tokenizer.tokenizer import Tokenizer
from tests.server.parsers.renderings import DEEPSEEK_MARKERS, FORMATS, KIMI_MARKERS
from tests.tokenizer.grammars import EOS, conforms, make_tokenizer, walk

MARKERS = (*KIMI_MARKERS, *DEEPSEEK_MARKERS, "｜DSML｜", "<tool_call>", "</tool_call>", "<think>", "</think>")

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where"},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "integer"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "search-2.x": {
        "properties": {
            "query": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "filters": {"type": "array", "items": {"$ref": "#/$defs/Filter"}, "maxItems": 2},
            "limit": {"type": "integer", "minimum": 1, "maximum": 50},
            "score": {"type": ["number", "string"], "title": "Score"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        },
        "required": ["filters", "code"],
        "additionalProperties": False,
        "$defs": {
            "Filter": {
                "type": "object",
                "properties": {"key": {"const": "k"}, "exact": {"type": "boolean"}},
                "required": ["exact"],
                "additionalProperties": False,
            }
        },
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "either": {
        "type": "object",
        "anyOf": [
            {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
            {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"], "additionalProperties": False},
        ],
    },
    "free": None,
}


def tools_of(*names: str) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMAS[name]}}
        for name in names
    ]


TOOLS = tools_of(*SCHEMAS)


@cache
def tokenizer(has_markers: bool) -> Tokenizer:
    """Models have the markers of their format as tokens; a model that has not must write them out."""
    return make_tokenizer(added=MARKERS if has_markers else ())


@cache
def compiler(has_markers: bool) -> GrammarCompiler:
    return GrammarCompiler(tokenizer(has_markers), (1,))


def write(lark: str, has_markers: bool, seeds: range) -> list[str]:
    outputs = StructuredOutputs(grammar=lark)
    texts = [walk(compiler(has_markers).compile(outputs), tokenizer(has_markers), seed) for seed in seeds]
    finished = [text for text in texts if text is not None]
    assert len(finished) > len(texts) / 2
    return finished


def read(tool_parser: str, text: str, reasoning_parser: str | None = None, prompt: str = "") -> ParsedMessage:
    offered = {name: list((schema or {}).get("properties", ())) for name, schema in SCHEMAS.items()}
    return build_grammar(tool_parser, reasoning_parser, ParserRequest(prompt=prompt, tools=offered)).parse(text)


def assert_valid_calls(message: ParsedMessage, text: str, parallel: bool = True) -> None:
    assert message.tool_calls, text
    assert len(message.tool_calls) == 1 or parallel, text
    assert not message.content.strip(), text
    for call in message.tool_calls:
        assert call.complete and call.name in SCHEMAS, text
        schema = SCHEMAS[call.name] or {}
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict), text
        assert is_valid(arguments, schema, schema), (call, text)


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    """JSON Schema, as far as `SCHEMAS` uses it."""
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
        "number": (int, float),
    }  # fmt: skip
    types = schema.get("type", list(kinds))
    named = [types] if isinstance(types, str) else types
    if not any(isinstance(value, kinds[name]) and (name == "boolean" or value is not True) for name in named):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "pattern" in schema and not (value.isupper() and value.isascii() and len(value) == 2):
        return False
    if not schema.get("minimum", value) <= value <= schema.get("maximum", value) if isinstance(value, int) else False:
        return False
    if "anyOf" in schema and not any(is_valid(value, option, root) for option in schema["anyOf"]):
        return False
    if isinstance(value, list):
        return len(value) <= schema.get("maxItems", len(value)) and all(
            is_valid(item, schema.get("items", {}), root) for item in value
        )
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        closed = schema.get("additionalProperties") is False
        return set(schema.get("required", ())) <= value.keys() and all(
            is_valid(inner, properties[key], root) if key in properties else not closed for key, inner in value.items()
        )
    return True


@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "letters"])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one"])
@pytest.mark.parametrize("tool_parser", FORMATS)
def test_whatever_is_written_parses_as_valid_calls(tool_parser: str, parallel: bool, has_markers: bool) -> None:
    for text in write(forced_call_grammar(tool_parser, TOOLS, parallel), has_markers, range(12)):
        assert_valid_calls(read(tool_parser, text), text, parallel)


@pytest.mark.parametrize("tool_parser", FORMATS)
def test_every_tool_can_be_called_and_a_named_one_must(tool_parser: str) -> None:
    for name in SCHEMAS:
        for text in write(forced_call_grammar(tool_parser, tools_of(name), parallel=False), True, range(3)):
            message = read(tool_parser, text)
            assert_valid_calls(message, text)
            assert message.tool_calls[0].name == name


@pytest.mark.parametrize("tool_parser", FORMATS)
def test_what_the_models_templates_write_is_allowed(tool_parser: str) -> None:
    calls = [("weather", '{"city": "Par\\"is <b>", "unit": "c"}'), ("weather", '{"city": "", "unit": "f", "days": 3}')]
    text = FORMATS[tool_parser].write("", calls)
    outputs = StructuredOutputs(grammar=forced_call_grammar(tool_parser, TOOLS, parallel=True))
    for has_markers in (True, False):
        assert conforms(compiler(has_markers), tokenizer(has_markers), outputs, text)


@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "letters"])
@pytest.mark.parametrize(("opened", "prompt"), [(True, "<think>\n"), (None, ""), (False, "<think></think>")])
@pytest.mark.parametrize("tool_parser", ["kimi_k2", "deepseek_v32", "hermes"])
def test_calls_come_after_the_reasoning(tool_parser: str, opened: bool | None, prompt: str, has_markers: bool) -> None:
    reasoning = REASONING_PARSERS["kimi_k2" if tool_parser == "kimi_k2" else "qwen3"]
    calls = forced_call_grammar(tool_parser, tools_of("now", "weather"), parallel=False)
    lark = after_reasoning(calls, reasoning.opening, reasoning.closing, opened)
    messages = []
    for text in write(lark, has_markers, range(10)):
        messages.append(read(tool_parser, text, "kimi_k2" if tool_parser == "kimi_k2" else "qwen3", prompt))
        assert_valid_calls(messages[-1], text)
        assert opened is not False or not messages[-1].reasoning
    assert opened is False or any(message.reasoning for message in messages)


@pytest.mark.parametrize("opened", [True, None, False])
def test_any_structured_output_may_come_after_reasoning(opened: bool | None) -> None:
    lark = after_reasoning(to_lark(StructuredOutputs(json='{"type": "boolean"}')), "<think>", "</think>", opened)
    outputs = StructuredOutputs(grammar=lark)
    block = {True: "so </thin</think>\n\n", None: "<think>so\n</think>", False: ""}[opened]
    for has_markers in (True, False):
        assert conforms(compiler(has_markers), tokenizer(has_markers), outputs, f"{block}true")
        assert conforms(compiler(has_markers), tokenizer(has_markers), outputs, "true") == (opened is not True)
        assert not conforms(compiler(has_markers), tokenizer(has_markers), outputs, f"{block}maybe")
        assert not conforms(compiler(has_markers), tokenizer(has_markers), outputs, block)
        # Where the block is open already, some models open it again.
        assert conforms(compiler(has_markers), tokenizer(has_markers), outputs, "<think>so</think>true") == (
            opened is not False
        )


def test_reasoning_keeps_out_what_its_parser_takes_for_the_end() -> None:
    lark = after_reasoning('start: "yes"', "<think>", "</think>", True, enders=["<|call|>"])
    outputs = StructuredOutputs(grammar=lark)
    assert conforms(compiler(False), tokenizer(False), outputs, "a <|call</think>yes")
    assert not conforms(compiler(False), tokenizer(False), outputs, "a <|call|></think>yes")


def test_reasoning_leaves_the_names_of_a_users_grammar_alone() -> None:
    lark = after_reasoning(
        'start: answer reasoning\nanswer: "y"\nreasoning: REASONING\nREASONING: "z"', "<t>", "</t>", True
    )
    assert conforms(compiler(False), tokenizer(False), StructuredOutputs(grammar=lark), "a</t>yz")


def test_every_format_has_a_grammar_of_forced_calls() -> None:
    for tool_parser in TOOL_PARSERS:
        check_grammar(forced_call_grammar(tool_parser, TOOLS, parallel=True))
    with pytest.raises(PlanError, match="nonsense"):
        forced_call_grammar("nonsense", TOOLS, parallel=True)


@pytest.mark.parametrize("tool_parser", FORMATS)
@pytest.mark.parametrize(
    "function",
    [
        {"name": 'a"\n'},
        {"name": ""},
        {"name": "<|im_start|>"},
        {"name": "f", "parameters": {"type": "string"}},
        {"name": "f", "parameters": "{}"},
        {"name": "f", "parameters": {"type": 5}},
    ],
)
def test_a_tool_that_can_not_be_written_is_refused(tool_parser: str, function: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        forced_call_grammar(tool_parser, [{"type": "function", "function": function}], parallel=False)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("tool_parser", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"uniqueItems": True}}},
        {"properties": {"a": {"type": ["nonsense"]}}},
        {"properties": {"a": {"anyOf": 5}}},
        {"properties": {"a": 5}},
        {"properties": [1]},
        {"properties": {}, "required": 3},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"enum": []}}, "required": ["a"]},
    ],
)
def test_a_schema_that_can_not_be_followed_is_refused(tool_parser: str, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(InvalidRequestError):
        compiler(True).compile(StructuredOutputs(grammar=forced_call_grammar(tool_parser, [tool], parallel=False)))


def test_a_text_that_looks_like_a_marker_stays_in_its_argument() -> None:
    """In a JSON string a marker is never one token: its letters are text."""
    schema = {"type": "object", "properties": {"s": {"const": "</tool_call>" + EOS}}, "required": ["s"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    constraint = compiler(True).compile(
        StructuredOutputs(grammar=forced_call_grammar("hermes", [tool], parallel=False))
    )
    text = walk(constraint, tokenizer(True), seed=0)
    assert text is not None
    (call,) = build_grammar("hermes", None, ParserRequest()).parse(text).tool_calls
    assert json.loads(call.arguments)["s"] == "</tool_call>" + EOS
