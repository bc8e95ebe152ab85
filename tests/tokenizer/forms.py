"""Forms of output that tests ask for, with what conforms to each or why it is refused, and a compiler of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pellucid.core import StructuredOutputs
from pellucid.tokenizer.structured_output import GrammarCompiler
from tests.tokenizer.grammars import make_tokenizer

TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, (1,))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def grammar(text: str) -> StructuredOutputs:
    return StructuredOutputs(grammar=text)


def schema(value: Any) -> StructuredOutputs:
    return StructuredOutputs(json=json.dumps(value))


CHOICES = ("yes", "yes, sir", 'a"b\\', "é\n\x7f//#")
COMMENTED = 'start: "a"+ b // start: "c"\nb: "b" | "//" | /[#"]/\n  | "start"'
CASES: list[tuple[StructuredOutputs, Sequence[str], Sequence[str]]] = [
    (StructuredOutputs(json="{}"), ["1", "null", '{"a": [true, "\\n"]}'], ["", "nul", "{a: 1}", "1 "]),
    (StructuredOutputs(json="true"), ["[]", '"é"'], ["["]),
    (StructuredOutputs(json_object=True), ["{}", '{\n  "a": {"b": 1.5e3}\n}'], ["[]", "1", "{", '{"a"}']),
    (
        schema(PERSON),
        ['{"name": "Ann \\"A\\"", "age": 30}', '{"name":"","age":0}'],
        ['{"age": 3, "name": ""}', '{"name": "Ann"}', '{"name": "Ann", "age": -1}', '{"name": "A", "age": 1, "b": 2}'],
    ),
    (schema({"const": "<think> 日本"}), ['"<think> 日本"'], ['""']),
    (StructuredOutputs(choice=CHOICES), CHOICES, ["ye", "no", "yes,"]),
    (StructuredOutputs(regex=r"\d{2}/[a-z]+\\|x"), ["12/ab\\", "x"], ["1/a\\", "12/\\", "٣٣/a\\", "12/ab", ""]),
    (StructuredOutputs(regex="^a\n.$"), ["a\nb"], ["a\n", "a\n\n"]),
    (grammar(COMMENTED), ["ab", "aa//", 'a"', "a#", "astart"], ["a", "b", "ac"]),
    (grammar('start: %json {"enum": [1, "start: {"]} "."'), ["1.", '"start: {".'], ["1", "2."]),
    (grammar('root ::= hello ("!" | "?")*\nhello ::= "hi" | [A-Z] [a-z]+'), ["hi", "Hello!?!"], ["HI", "hi."]),
]
REFUSED: list[tuple[StructuredOutputs, str]] = [
    (StructuredOutputs(json="{"), "not a JSON schema"),
    (StructuredOutputs(json="[" * 100_000), "not a JSON schema"),
    (StructuredOutputs(json='{"items":' * 500 + "{}" + "}" * 500), "recursion limit"),
    (StructuredOutputs(json="false"), "Unsatisfiable"),
    (StructuredOutputs(json='{"minimum": NaN}'), "expected value"),
    (StructuredOutputs(json='{"const": "\\ud800"}'), "hex escape"),
    (StructuredOutputs(json='{"properties": {"\\udc00": {}}}'), "hex escape"),
    (schema(5), "schema"),
    (schema({"type": 5}), "type must be"),
    (schema({"type": "strin"}), "strin"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"not": {"type": "string"}}), "not"),
    (schema({"type": "string", "format": "nonsense"}), "nonsense"),
    (schema({"type": "string", "pattern": "("}), "unclosed"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "oneOf"),
    (schema({"$ref": "#/nowhere"}), "nowhere"),
    (schema({"$ref": "http://127.0.0.1/x"}), "127.0.0.1"),
    (schema({"$ref": "file:///etc/passwd"}), "passwd"),
    (schema({"$ref": "#"}), "no output"),
    (schema({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
    (StructuredOutputs(regex="("), "unclosed"),
    (StructuredOutputs(regex="(?<=a)b"), "look-around"),
    (StructuredOutputs(regex=r"(a)\1"), "backreference"),
    (StructuredOutputs(regex=r"\bword\b"), "lookaround"),
    (StructuredOutputs(regex="a\\"), "backslash"),
    (StructuredOutputs(regex=r"[^\s\S]"), "no output"),
    (StructuredOutputs(regex="\ud800"), "surrogate"),
    (StructuredOutputs(choice=("\ud800",)), "surrogate"),
    (grammar("nothing"), "structured_outputs"),
    (grammar('begin: "a"'), "start"),
    (grammar("start: start"), "no output"),
    (grammar("start: missing"), "missing"),
    (grammar('start: "a'), "has no end"),
    (grammar('start: <|nonsense|> "a"'), "nonsense"),
    (grammar("start: <[99999999]>"), "99999999"),
    (grammar('start: %json {"a": "b"'), "JSON"),
    (grammar('start: %json {"type": "nonsense"}'), "nonsense"),
    (grammar('{"grammars": [{"json_schema": {}}]}'), "expecting rule"),
    (grammar('start: a "x"\na[stop="b"]: /.*/'), "suffix"),
    (grammar('start: a "x"\na[temperature=0.3]: /.*/'), "temperature"),
    (grammar('start: %lark {\nstart: "a"\n}'), "%lark"),
    (grammar('%llguidance {"allow_invalid_utf8": true}\nstart: /(?s-u:.)*/'), "allow_invalid_utf8"),
    (grammar("root ::= missing"), "missing"),
    (grammar('root ::= "a'), "end of input"),
    (grammar("root ::= " + "(" * 5000), "GBNF"),
]
