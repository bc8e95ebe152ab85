"""Grammars that make a model call a tool, in the format that its parser reads. Used by the chat endpoints for
`tool_choice` "required" or a tool's name, and to let any grammar begin after the model's reasoning.

Markers stand in them as literals: the compiler turns those that are tokens of the model into these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pellucid.core import InvalidRequestError, PlanError
from pellucid.tokenizer.json_schema import close_objects
from pellucid.tokenizer.lark import json_value, names_in, one_of, quote, rename_start, text_without

_NAME = re.compile(r"[\w.\-]{1,256}")
_PARAMETER_NAME = re.compile(r'[^\s"<>&]{1,128}')
_DSML = "｜DSML｜"
_FENCED_END = "\n```<｜tool▁call▁end｜>"
_HERMES_END = "}\n</tool_call>"
_MAX_DIGITS = 15
_PLAIN_NUMBERS = {
    "integer": rf"-?(?:0|[1-9][0-9]{{0,{_MAX_DIGITS}}})",
    "number": rf"-?(?:0|[1-9][0-9]{{0,{_MAX_DIGITS}}})(?:\.[0-9]{{1,{_MAX_DIGITS}}})?(?:[eE][+\-]?[0-9]{{1,2}})?",
}
"""Without bounds: no model means more digits, and the parser reads no more than 64 as a number."""
_NOTHING: Mapping[str, str] = {}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_NESTED_IN_ROOT = ("$defs", "definitions")
_KNOWN_OF_ROOT = {"type", "properties", "required", "additionalProperties", "$schema", "strict", *_NESTED_IN_ROOT}


class _Format(NamedTuple):
    """How calls are written. `call` gives the rules of one tool's call, of which the first is the call itself.

    `begin` and `end` are expressions, `between` and `after` the texts between calls and after each. Neither of the two
    may begin as what else may follow there does: the lexer takes the longest literal.
    """

    call: Callable[[str, str, dict[str, Any]], list[str]]
    begin: str = ""
    end: str = ""
    between: str = ""
    after: str = ""
    rules: tuple[str, ...] = ()


def forced_call_grammar(tool_parser: str, tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    """A Lark grammar for one call of one of `tools`, or for several calls if they may be `parallel`.

    `tools` are OpenAI's: {"type": "function", "function": {"name", "parameters"}}. Arguments are valid under
    `parameters`.

    Raises:
        InvalidRequestError: a tool's name or schema can't be written in this format.
        PlanError: no format has that name.
    """
    if tool_parser not in _FORMATS:
        raise PlanError(f"no grammar of forced calls for the tool parser {tool_parser!r}; choose {', '.join(_FORMATS)}")
    if not tools:
        raise InvalidRequestError("a call is asked for, but there are no tools", "tools")
    form = _FORMATS[tool_parser]
    rules: list[str] = list(form.rules)
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = function["name"]
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"a tool may have letters, digits, _, - and . in its name, not {name!r}", "tools")
        rules += form.call(f"call_{index}", name, _object_schema(name, function.get("parameters")))
    call = f"(call {quote(form.after)})" if form.after else "call"
    more = f"({quote(form.between)} {call})*" if form.between else "+"
    calls = f"{call}{more}" if parallel else call
    start = " ".join(filter(None, (form.begin, calls, form.end)))
    one_call = " | ".join(f"call_{index}" for index in range(len(tools)))
    return "\n".join([f"start: {start}", f"call: {one_call}", *rules, ""])


def after_reasoning(lark: str, opening: str, closing: str, opened: bool | None, enders: Iterable[str] = ()) -> str:
    """`lark` after a block of reasoning, and newlines.

    `opened`: True, the output begins inside the block; False, none comes; None, one may come first. `enders` are other
    texts that the parser takes for the end of the reasoning, so that it must not have them.
    """
    if opened is False:
        return lark
    taken, mark = names_in(lark), ""
    while taken & {f"{name}{mark}" for name in ("answer", "reasoning", "thought", "THOUGHT", "LAYOUT")}:
        mark += "_"
    # A model whose prompt opens no block may open it itself, also where its reasoning may begin without.
    begin = f"{quote(opening)}? reasoning{mark}" if opened else f"({quote(opening)} reasoning{mark})?"
    return (
        f"start: {begin} answer{mark}\n"
        f"reasoning{mark}: thought{mark} LAYOUT{mark}?\n"
        f"thought{mark}[suffix={quote(closing)}]: THOUGHT{mark}\n"
        f"THOUGHT{mark}: {text_without((closing, *enders))}\n"
        f"LAYOUT{mark}: /\\n{{1,2}}/\n"
        f"{rename_start(lark, f'answer{mark}')}"
    )


def _object_schema(tool: str, schema: Any) -> dict[str, Any]:
    """The schema of arguments, which are an object whether it says so or not."""
    if schema is None or schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"tool {tool!r}: parameters must be a JSON schema, got {schema!r}", "tools")
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise InvalidRequestError(f"tool {tool!r}: arguments are an object, but its schema says {types!r}", "tools")
    # Beside a reference, a type would be an intersection, which a schema that refers to itself can't have.
    return dict(schema) if "$ref" in schema else {**schema, "type": "object"}


def _kimi_call(rule: str, name: str, schema: dict[str, Any]) -> list[str]:
    begin, between = f"<|tool_call_begin|>functions.{name}:", "<|tool_call_argument_begin|>"
    return [f"{rule}: {quote(begin)} COUNTER {_between(between, schema, '<|tool_call_end|>')}"]


def _fenced_call(rule: str, name: str, schema: dict[str, Any]) -> list[str]:
    begin = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    return [f"{rule}: {_between(begin, schema, _FENCED_END)}"]


def _bare_call(rule: str, name: str, schema: dict[str, Any]) -> list[str]:
    begin = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
    return [f"{rule}: {_between(begin, schema, '<｜tool▁call▁end｜>')}"]


def _hermes_call(rule: str, name: str, schema: dict[str, Any]) -> list[str]:
    begin = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return [f"{rule}: {_between(begin, schema, _HERMES_END)}"]


def _object_call(rule: str, name: str, schema: dict[str, Any]) -> list[str]:
    begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
    return [f"{rule}: {_between(begin, schema, '}')}"]


def _between(begin: str, schema: dict[str, Any], end: str) -> str:
    """JSON between two literals."""
    return f"{quote(begin)} {json_value(close_objects(schema))} {quote(end)}"


def _dsml_call(rule: str, name: str, schema: dict[str, Any]) -> list[str]:
    """Parameters one by one, in the schema's order; the whole object as JSON where they can't be told apart."""
    begin, end = f'<{_DSML}invoke name="{name}">\n', f"</{_DSML}invoke>"
    parameters = _parameters(schema)
    if parameters is None:
        return [f"{rule}: {_between(begin, schema, end)}"]
    required = schema.get("required", [])
    rules, members = [], []
    for index, (key, part) in enumerate(parameters.items()):
        parameter = f"{rule}_{index}"
        members.append(parameter if key in required else f"{parameter}?")
        rules.append(f"{parameter}: {_dsml_parameter(key, part)}")
    return [f"{rule}: {' '.join([quote(begin), *members, quote(end)])}", *rules]


def _dsml_parameter(key: str, schema: Any) -> str:
    """Text where the schema allows any, JSON for the rest."""
    begin, end = f'<{_DSML}parameter name="{key}" string=', f"</{_DSML}parameter>\n"
    as_text, as_json = quote(f'{begin}"true">'), quote(f'{begin}"false">')
    text, other = f'{as_text} dsml_text "\\n"', _between(f'{begin}"false">', schema, end)
    match schema:
        case {"enum": [*values], **rest} if _only_annotates(rest, {"type": "string"}) and _are_texts(values):
            return f"{as_text} ({one_of(values)}) {quote(end)}"
        case {"type": "string", **rest} if _only_annotates(rest):
            return text
        case {"type": "integer" | "number" as kind, **rest} if _only_annotates(rest):
            return f"{as_json} /{_PLAIN_NUMBERS[kind]}/ {quote(end)}"
    return f"{text} | {other}" if _takes_any_string(schema) else other


def _only_annotates(members: Mapping[Any, Any], beside: Mapping[str, str] = _NOTHING) -> bool:
    return all(key in _ANNOTATIONS or beside.get(key, ()) == value for key, value in members.items())


def _are_texts(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) and _DSML not in value for value in values)


def _takes_any_string(schema: Any) -> bool:
    match schema:
        case True:
            return True
        case {"type": [*types], **rest}:
            return "string" in types and _only_annotates(rest)
        case {"anyOf": [*options], **rest}:
            return _only_annotates(rest) and any(map(_takes_any_string, options))
        case {**rest}:
            return _only_annotates(rest, {"type": "string"})
    return False


def _parameters(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of each parameter on its own; None if the object is more than they."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (
        not schema.keys() <= {*_KNOWN_OF_ROOT, *_ANNOTATIONS}
        or not isinstance(properties, Mapping)
        or not all(map(_PARAMETER_NAME.fullmatch, properties))
        or not isinstance(required, list)
        or not all(key in list(properties) for key in required)
        or not ("properties" in schema or schema.get("additionalProperties") is False)
    ):
        return None
    shared = {key: schema[key] for key in _NESTED_IN_ROOT if key in schema}
    known = tuple(f"#/{key}/" for key in shared)
    if not all(reference.startswith(known) for reference in _references(properties)):
        return None
    return {
        key: {**part, **shared} if isinstance(part, dict) and any(_references(part)) else part
        for key, part in properties.items()
    }


def _references(schema: Any) -> Iterator[str]:
    """Every `$ref` in a schema."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if "$ref" in value:
                yield str(value["$ref"])
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


_FORMATS = {
    "kimi_k2": _Format(
        _kimi_call,
        quote("<|tool_calls_section_begin|>"),
        quote("<|tool_calls_section_end|>"),
        rules=("COUNTER: /0|[1-9][0-9]{0,3}/",),
    ),
    "deepseek_v3": _Format(_fenced_call, quote("<｜tool▁calls▁begin｜>"), quote("<｜tool▁calls▁end｜>"), between="\n"),
    "deepseek_v31": _Format(_bare_call, quote("<｜tool▁calls▁begin｜>"), quote("<｜tool▁calls▁end｜>")),
    "deepseek_v32": _Format(
        _dsml_call,
        '"\\n\\n"? ' + quote(f"<{_DSML}function_calls>\n"),
        quote(f"</{_DSML}function_calls>"),
        after="\n",
        rules=(
            f"dsml_text[suffix={quote(f'</{_DSML}parameter>')}]: DSML_TEXT",
            f"DSML_TEXT: {text_without((f'<{_DSML}', f'</{_DSML}'))}",
        ),
    ),
    "hermes": _Format(_hermes_call, between="\n"),
    "llama3_json": _Format(_object_call, between="; "),
}
