"""Grammars of outputs: what conforms may be written and may end, nothing else, and no grammar can hurt the process."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import InvalidRequestError, PellucidError, SamplingParams, StructuredOutputs
from pellucid.tokenizer import structured_output
from pellucid.tokenizer.lark import MAX_CHARS
from pellucid.tokenizer.structured_output import GrammarCompiler, check_grammar, to_lark
from pellucid.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.grammars import EOS, allowed_ids, conforms, follow, make_tokenizer, walk

TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, (1,))
MARKERS = {text: TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("<think>", "</think>", "<tool_call>")}
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


CASES: list[tuple[StructuredOutputs, Sequence[str], Sequence[str]]] = [
    (StructuredOutputs(json="{}"), ["1", "null", '{"a": [true, "\\u00e9"]}'], ["", "nul", "{a: 1}", "1 "]),
    (StructuredOutputs(json="true"), ["[]", '"é"'], ["["]),
    (StructuredOutputs(json_object=True), ["{}", '{\n  "a": {"b": 1.5e3}\n}'], ["[]", "1", "{", '{"a"}']),
    (
        schema(PERSON),
        ['{"name": "Ann \\"A\\"", "age": 30}', '{"name":"","age":0}'],
        ['{"age": 3, "name": ""}', '{"name": "Ann"}', '{"name": "Ann", "age": -1}', '{"name": "A", "age": 1, "b": 2}'],
    ),
    (schema({"const": "<think> \x7f 日本"}), ['"日本"'[:0] + json.dumps("<think> \x7f 日本", ensure_ascii=False)], ['""']),
    (StructuredOutputs(choice=("yes", "yes, sir", 'a"b\\', "é\n\x7f//#")), ["yes", "yes, sir", 'a"b\\', "é\n\x7f//#"], ["ye", "no", "yes,"]),
    (StructuredOutputs(regex=r"\d{2}/[a-z]+\\|x"), ["12/ab\\", "x"], ["1/a\\", "12/\\", "٣٣/a\\", "12/ab", ""]),
    (StructuredOutputs(regex="^a\n.$"), ["a\nb"], ["a\n", "a\n\n"]),
    (grammar('start: "a"+ b // start: "c"\nb: "b" | "//" | /[#"]/\n  | "start"'), ["ab", "aa//", 'a"', "a#", "astart"], ["a", "b", "ac"]),
    (grammar('start: %json {"enum": [1, "start: {"]} "."'), ["1.", '"start: {".'], ["1", "2."]),
    (grammar('root ::= greeting ("!" | "?")*\ngreeting ::= "hi" | [A-Z] [a-z]+'), ["hi", "Hello!?!"], ["HI", "hi."]),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "texts", "others"), CASES, ids=[str(index) for index in range(len(CASES))])
def test_what_conforms_may_be_written_and_nothing_else(
    outputs: StructuredOutputs, texts: Sequence[str], others: Sequence[str]
) -> None:
    for text in texts:
        assert spells(outputs, text), text
    for text in others:
        assert not spells(outputs, text), text


def spells(outputs: StructuredOutputs, text: str) -> bool:
    """Whether `text` conforms in the tokens that write it without added ones."""
    ids = TOKENIZER.encode(text, add_special_tokens=False, allow_special=False)
    after = follow(COMPILER.compile(outputs), ids)
    return after is not None and 1 in after


def finite_languages() -> st.SearchStrategy[str]:
    """Regular expressions over a few words, with at most a few hundred matches."""
    words = st.sampled_from(["a", "e", "th", "he", "in", '"', "[ab]", "brown", "é"])
    return st.recursive(
        words,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            inner.map(lambda one: f"(?:{one})?"),
            inner.map(lambda one: f"(?:{one}){{1,2}}"),
        ),
        max_leaves=5,
    )


def matches(pattern: str) -> set[bytes]:
    """Every text that `pattern` matches, found by trying all that its characters can make."""
    alphabet = sorted({char for char in pattern if char not in "[]()?:|{},12"})
    found, shorter = set(), [""]
    for _ in range(9):
        found.update(text.encode() for text in shorter if re.fullmatch(pattern, text))
        begins = [text + char for text in shorter for char in alphabet]
        shorter = [text for text in begins if may_go_on(pattern, text)]
        assert len(shorter) < 3000
    return found | {text.encode() for text in shorter if re.fullmatch(pattern, text)}


def may_go_on(pattern: str, text: str) -> bool:
    return _partial(pattern, text)


@settings(max_examples=40, deadline=None)
@given(pattern=finite_languages(), data=st.data())
def test_a_token_is_allowed_if_and_only_if_an_output_goes_on_with_it(pattern: str, data: st.DataObject) -> None:
    constraint, language, text = COMPILER.compile(StructuredOutputs(regex=pattern)), matches(pattern), b""
    while True:
        following = {output[len(text) :] for output in language if output.startswith(text)}
        expected = {
            token_id
            for token_id in range(2, TOKENIZER.vocab_size)
            if (token := TOKENIZER.token_bytes(token_id)) and any(rest.startswith(token) for rest in following)
        }
        found = set(allowed_ids(constraint))
        assert (1 in found) == (b"" in following)
        found.discard(1)
        # Where there is no choice, the text comes in the tokens in which the model knows it.
        forced = b"" not in following and len({rest[0] for rest in following}) == 1
        assert found <= expected if forced else found == expected
        assert found or b"" in following
        if not found or data.draw(st.integers(0, 9)) == 0:
            return
        token_id = data.draw(st.sampled_from(sorted(found)))
        constraint.accept(token_id)
        text += TOKENIZER.token_bytes(token_id)
