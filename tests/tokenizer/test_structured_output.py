"""Within a form, what conforms may be written and may end, and nothing else, in the tokens that the model knows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import InvalidRequestError, StructuredOutputs
from pellucid.tokenizer.structured_output import GrammarCompiler
from pellucid.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.forms import CASES, COMPILER, PERSON, TOKENIZER, grammar, schema
from tests.tokenizer.grammars import EOS, allowed_ids, conforms, follow, make_tokenizer, walk

MARKERS = {text: TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("<think>", "</think>", "<tool_call>")}


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


Language = tuple[str, frozenset[str]]
"""A regular expression, and all that it matches."""


def languages() -> st.SearchStrategy[Language]:
    """Finite ones, of which all is known, since they are put together with their expressions."""
    words = st.sampled_from(["a", "e", "th", "he", "in", '"', "brown", "é", "日"]).map(lambda w: (w, frozenset([w])))
    combined = st.recursive(
        words,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda two: (two[0][0] + two[1][0], _joined(two[0][1], two[1][1]))),
            st.tuples(inner, inner).map(lambda two: (f"(?:{two[0][0]}|{two[1][0]})", two[0][1] | two[1][1])),
            inner.map(lambda one: (f"(?:{one[0]})?", one[1] | {""})),
            inner.map(lambda one: (f"(?:{one[0]}){{1,2}}", one[1] | _joined(one[1], one[1]))),
        ),
        max_leaves=5,
    )
    return combined.filter(lambda language: len(language[1]) < 200)


def _joined(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    return frozenset(map("".join, itertools.product(first, second)))


@settings(max_examples=60, deadline=None)
@given(language=languages(), data=st.data())
def test_a_token_is_allowed_if_and_only_if_an_output_goes_on_with_it(language: Language, data: st.DataObject) -> None:
    constraint, outputs = COMPILER.compile(StructuredOutputs(regex=language[0])), {o.encode() for o in language[1]}
    text = b""
    while True:
        rests = {output[len(text) :] for output in outputs if output.startswith(text)}
        expected = {
            token_id
            for token_id in range(2, TOKENIZER.vocab_size)
            if (token := TOKENIZER.token_bytes(token_id)) and any(rest.startswith(token) for rest in rests)
        }
        found = set(allowed_ids(constraint))
        assert (1 in found) == (b"" in rests)
        found.discard(1)
        # Where there is no choice, the text comes in the tokens in which the model knows it.
        is_forced = b"" not in rests and len({rest[0] for rest in rests}) == 1
        assert (found <= expected and found) if is_forced else found == expected
        if not found or data.draw(st.integers(0, 9)) == 0:
            return
        token_id = data.draw(st.sampled_from(sorted(found)))
        constraint.accept(token_id)
        text += TOKENIZER.token_bytes(token_id)


def test_forced_text_comes_as_the_tokenizer_writes_it() -> None:
    text = 'the quick brown fox {"name": "value"}'
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) < len(text)
    constraint = COMPILER.compile(StructuredOutputs(choice=(text,)))
    for token_id in ids:
        assert allowed_ids(constraint) == [token_id]
        constraint.accept(token_id)
    assert allowed_ids(constraint) == [1]


class PrefixingTokenizer(Tokenizer):
    """Puts a space before whatever it encodes, as vocabularies of SentencePiece do."""

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        return super().encode(f" {text}", add_special_tokens, allow_special)


def test_forced_text_is_exact_where_the_tokenizer_adds_a_space() -> None:
    tokenizer = PrefixingTokenizer(TOKENIZER._vocabulary)
    constraint = GrammarCompiler(tokenizer, (1,)).compile(StructuredOutputs(choice=("value",)))
    assert walk(constraint, tokenizer, seed=0) == "value"


@pytest.mark.parametrize("outputs", [StructuredOutputs(json="{}"), schema(PERSON), StructuredOutputs(json_object=True)])
def test_random_choices_make_valid_json(outputs: StructuredOutputs) -> None:
    texts = [walk(COMPILER.compile(outputs), TOKENIZER, seed) for seed in range(20)]
    values = [json.loads(text) for text in texts if text is not None]
    assert len(values) > 15
    if outputs.json == json.dumps(PERSON):
        assert all(isinstance(one["name"], str) and one["age"] >= 0 for one in values)


@pytest.mark.parametrize(
    ("fields", "conforming", "other"),
    [
        ({"type": "number", "multipleOf": 0.01}, "12.34", "0.005"),
        ({"type": "number", "multipleOf": 2.5}, "7.5", "3"),
        ({"anyOf": [{"type": "integer", "multipleOf": 1000}, {"type": "number", "multipleOf": 0.25}]}, "0.75", "0.1"),
        ({"type": "integer", "multipleOf": 15, "minimum": 10, "maximum": 40}, "30", "45"),
    ],
)
def test_multiples_are_what_they_say(fields: dict[str, Any], conforming: str, other: str) -> None:
    assert spells(schema(fields), conforming)
    assert not spells(schema(fields), other)


def test_white_space_in_json_is_bounded() -> None:
    constraint = COMPILER.compile(StructuredOutputs(json_object=True))
    spaces = 0
    constraint.accept(TOKENIZER.encode("{", add_special_tokens=False)[0])
    (space,) = TOKENIZER.encode(" ", add_special_tokens=False)
    while space in allowed_ids(constraint):
        constraint.accept(space)
        spaces += 1
        assert spaces <= 64
    assert allowed_ids(constraint)


def test_added_tokens_are_no_text() -> None:
    everything = [
        StructuredOutputs(regex="(?s:.*)"),
        schema({"type": "string"}),
        grammar("start: TEXT\nTEXT: ~/abc/"),
        grammar('start: TEXT "</think>"\nTEXT: /[a-z]*/'),
    ]
    for outputs in everything:
        constraint = COMPILER.compile(outputs)
        if outputs.json:
            constraint.accept(TOKENIZER.encode('"', add_special_tokens=False)[0])
        found = allowed_ids(constraint)
        assert len(found) > 25
        assert not {0, MARKERS["<think>"], MARKERS["<tool_call>"]} & set(found), outputs
        assert (MARKERS["</think>"] in found) == ("</think>" in str(outputs)), outputs
        assert (1 in found) == (outputs.json is None and "</think>" not in str(outputs)), outputs


def test_what_looks_like_an_added_token_is_spelled_with_ordinary_ones() -> None:
    for outputs in (StructuredOutputs(choice=("<think>",)), StructuredOutputs(regex="<think>"), schema({"const": EOS})):
        text = walk(COMPILER.compile(outputs), TOKENIZER, seed=0)
        assert text in ("<think>", json.dumps(EOS))
        assert not spells_with_tokens(outputs, "<think>")


def spells_with_tokens(outputs: StructuredOutputs, text: str) -> bool:
    return conforms(COMPILER, TOKENIZER, outputs, text)


@pytest.mark.parametrize(
    "text",
    [
        'start: <think> /[a-z]+/ </think> "yes"',
        'start: "<think>" /[a-z]+/ "</think>yes"',
        'start: "<think>" thought "yes"\nthought[suffix="</think>"]: /[a-z]+/  // its end',
        'start: "<think>" (thought) ("yes" | "no")\nthought[capture, suffix="</think>"]: /[a-z]+/\n  | THOUGHT_TEXT\n'
        'THOUGHT_TEXT: "0"',
    ],
)
def test_a_rule_that_names_an_added_token_has_it_as_a_token(text: str) -> None:
    assert spells_with_tokens(grammar(text), "<think>so</think>yes")
    assert not spells(grammar(text), "<think>so</think>yes")
    assert not spells_with_tokens(grammar(text), "<think>so<tool_call></think>yes")


def test_repetitions_apply_to_a_whole_literal() -> None:
    outputs = grammar('start: "a<think>b"{2} "<think>"?')
    assert spells_with_tokens(outputs, "a<think>ba<think>b<think>")
    assert not spells_with_tokens(outputs, "a<think>bb")


def test_the_longest_of_the_added_tokens_counts() -> None:
    tokenizer = make_tokenizer(added=("<a", "<a>", "<ab>", "<b>", "x", "<a>>"))
    compiler = GrammarCompiler(tokenizer, (1,))
    for text in ("<a>>", "<a>", "<ab>", "<a<b>", "<b", "x<ax", "<a>x<"):
        assert conforms(compiler, tokenizer, grammar(f'start: "{text}"'), text), text


def test_a_model_without_the_token_writes_its_letters() -> None:
    plain = make_tokenizer(added=())
    compiler = GrammarCompiler(plain, (1,))
    outputs = grammar('start: "<think>" thought "yes"\nthought[suffix="</think>"]: /(.|\\n)*/')
    assert conforms(compiler, plain, outputs, "<think>so </thin</think>yes")
    assert not conforms(compiler, plain, outputs, "<think>so</think>no")


def test_runs_of_spaces_are_text_though_they_are_added_tokens() -> None:
    (spaces,) = TOKENIZER.encode("    ", add_special_tokens=False)
    assert spaces in allowed_ids(COMPILER.compile(StructuredOutputs(regex=" +x")))


def test_an_output_may_end_exactly_where_it_is_complete() -> None:
    constraint = COMPILER.compile(StructuredOutputs(regex="a{1,2}"))
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    assert 1 not in allowed_ids(constraint)
    constraint.accept(a)
    assert {1, a} <= set(allowed_ids(constraint))
    constraint.accept(a)
    assert allowed_ids(constraint) == [1]
    assert not constraint.finished
    constraint.accept(1)
    assert constraint.finished


def test_any_of_several_end_tokens_ends_an_output() -> None:
    compiler = GrammarCompiler(TOKENIZER, (1, 0, 10**9))
    for end in (0, 1):
        constraint = compiler.compile(StructuredOutputs(choice=("a",)))
        constraint.accept(TOKENIZER.encode("a", add_special_tokens=False)[0])
        assert allowed_ids(constraint) == [0, 1]
        constraint.accept(end)
        assert constraint.finished


def test_a_copy_of_a_constraint_begins_where_it_is() -> None:
    constraint = COMPILER.compile(StructuredOutputs(regex="ab?"))
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    constraint.accept(a)
    copy = constraint.copy()
    constraint.accept(1)
    assert 1 in allowed_ids(copy)
    assert (constraint.finished, copy.finished, constraint.copy().finished) == (True, False, True)


def test_tokens_beyond_the_models_rows_are_never_asked_for() -> None:
    free = StructuredOutputs(regex="(?s:.*)")
    few = GrammarCompiler(TOKENIZER, (1,), vocab_size=270)
    assert max(allowed_ids(few.compile(free))) < 270
    assert walk(few.compile(schema(PERSON)), TOKENIZER, seed=1) is not None
    many = GrammarCompiler(TOKENIZER, (1,), vocab_size=4096)
    assert max(allowed_ids(many.compile(free))) < TOKENIZER.vocab_size


def test_a_token_that_is_not_allowed_is_an_error_and_stays_one() -> None:
    constraint = COMPILER.compile(StructuredOutputs(choice=("a",)))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            constraint.accept(TOKENIZER.encode("b", add_special_tokens=False)[0])
    with pytest.raises(InvalidRequestError):
        constraint.allowed()
