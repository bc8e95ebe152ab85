"""Grammars of outputs: what conforms may be written and may end, nothing else, and no grammar can hurt the process."""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import InvalidRequestError, PellucidError, SamplingParams, StructuredOutputs
from pellucid.tokenizer import grammar_guard, structured_output
from pellucid.tokenizer.grammar_guard import GrammarGuard
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


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each grammar that llguidance compiles from here on."""
    made: list[int] = []

    def run_deep(build: Callable[[], Any], timeout_s: float | None) -> Any:
        made.append(1)
        return grammar_guard.run_deep(build, timeout_s)

    monkeypatch.setattr(structured_output, "run_deep", run_deep)
    return made


def test_equal_forms_are_compiled_once_and_each_output_goes_its_own_way(compilations: list[int]) -> None:
    compiler = GrammarCompiler(TOKENIZER, (1,))
    a, b = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in "ab")
    outputs = [compiler.compile(StructuredOutputs(regex="(a|b){2}|ac")) for _ in range(64)]
    assert len(compilations) == 1
    begin = allowed_ids(outputs[0])
    outputs[0].accept(a)
    outputs[1].accept(b)
    outputs[1].accept(b)
    outputs[1].accept(1)
    assert allowed_ids(outputs[1]) == [1]
    assert set(allowed_ids(outputs[0])) > {a, b}
    assert 1 not in allowed_ids(outputs[0])
    assert [one.finished for one in outputs[:3]] == [False, True, False]
    later = compiler.compile(StructuredOutputs(regex="(a|b){2}|ac"))
    assert allowed_ids(later) == allowed_ids(outputs[2]) == begin
    compiler.compile(StructuredOutputs(regex="(a|b){3}|ac"))
    assert len(compilations) == 2


def test_the_forms_asked_for_last_stay_compiled_and_no_more(
    compilations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "MAX_COMPILED", 2)
    compiler = GrammarCompiler(TOKENIZER, (1,))
    counts = []
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(StructuredOutputs(choice=(text,)))
        counts.append(len(compilations))
    assert counts == [1, 2, 2, 3, 3, 4]


def test_a_copy_of_a_constraint_begins_where_it_is() -> None:
    constraint = COMPILER.compile(StructuredOutputs(regex="ab?"))
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    constraint.accept(a)
    copy = constraint.copy()
    constraint.accept(1)
    assert 1 in allowed_ids(copy)
    assert (constraint.finished, copy.finished, constraint.copy().finished) == (True, False, True)


def test_any_of_several_end_tokens_ends_an_output() -> None:
    compiler = GrammarCompiler(TOKENIZER, (1, 0, 10**9))
    for end in (0, 1):
        constraint = compiler.compile(StructuredOutputs(choice=("a",)))
        constraint.accept(TOKENIZER.encode("a", add_special_tokens=False)[0])
        assert allowed_ids(constraint) == [0, 1]
        constraint.accept(end)
        assert constraint.finished


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        GrammarCompiler(TOKENIZER, ())


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


@pytest.mark.parametrize(("outputs", "reason"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_a_bad_grammar_is_refused_in_a_line_with_its_reason(outputs: StructuredOutputs, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.compile(outputs)
    message = str(caught.value)
    assert caught.value.param == "structured_outputs"
    assert message.startswith("structured_outputs: ")
    assert reason in message
    assert "\n" not in message
    assert len(message) < 400


def wide(count: int) -> dict[str, Any]:
    return {f"p{index}": {"type": "string"} for index in range(count)}


HOSTILE: dict[str, StructuredOutputs] = {
    "repetition": StructuredOutputs(regex="a{1000000000}"),
    "nested repetition": StructuredOutputs(regex="(((a{1,9999}){1,9999}){1,9999}){1,9999}"),
    "groups": StructuredOutputs(regex="(" * 100_000 + ")" * 100_000),
    "many states": StructuredOutputs(regex="(a|b)*a(a|b){5000}"),
    "doubling": grammar("start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "a"'),
    "intersections": grammar("start: T\nT: " + " & ".join(f"/.*[ab].{{{i}}}c.*/" for i in range(12))),
    "parentheses": grammar("start: " + "(" * 500_000),
    "complements": grammar("start: T\nT: " + "~" * 100_000 + '"a"'),
    "chain of rules": grammar("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(16_000)) + 'r16000: "a"'),
    "chain of terminals": grammar("start: T0\n" + "".join(f'T{i}: T{i + 1} "b"\n' for i in range(9000)) + 'T9000: "a"'),
    "long chain": grammar("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(40_000)) + 'r40000: "a"'),
    "ambiguity": grammar('start: s\ns: s s | s s s | "a" | ""'),
    "right recursion": grammar("start: s\ns: " + " | ".join(f'"w{i}" s' for i in range(3000)) + ' | "z"'),
    "quotes": grammar("start: " + '\\"' * 400_000),
    "slashes": grammar("start: " + "\\/" * 400_000),
    "brackets": grammar('start: "' + "<" * 900_000 + '"'),
    "newlines": grammar("\n" * 900_000 + "."),
    "gbnf": grammar("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} [a-z]\n" for i in range(390)) + 'r390 ::= "a"'),
    "long text": grammar("x" * (MAX_CHARS + 1)),
    "gbnf rules": grammar("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000)) + 'r3000 ::= "a"'),
    "references": schema(
        {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(3000)}}
        | {"$defs": {"a0": {"type": "string"}}}
    ),
    "chain of references": schema(
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(900)}
            | {"a900": {}},
        }
    ),
    "pattern properties": schema({"patternProperties": {f"^p{i}$": {} for i in range(1000)}}),
    "properties": schema({"type": "object", "properties": wide(5000)}),
    "optional properties": schema({"type": "object", "properties": wide(900)}),
    "objects in enum": schema({"enum": [{"a": i} for i in range(1000)]}),
    "values": schema({"enum": list(range(60_000))}),
    "intersection of alternatives": schema(
        {"allOf": [{"anyOf": [{"properties": wide(i)}, {"required": [f"b{i}"]}]} for i in range(25)]}
    ),
    "minLength": schema({"type": "string", "minLength": 10**9}),
    "maxItems": schema({"type": "array", "minItems": 10**9, "maxItems": 10**12}),
    "multiples": schema({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}),
    "multiple": schema({"type": "integer", "multipleOf": 999_983}),
    "digits": StructuredOutputs(json='{"minimum": 1' + "0" * 4000 + "}"),
    "exponent": StructuredOutputs(json='{"type": "number", "multipleOf": 1e-300}'),
}


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    COMPILER.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_neither_hangs_nor_crashes_and_costs_itself_alone(name: str) -> None:
    begin = time.monotonic()
    try:
        COMPILER.check(HOSTILE[name])
        walk(COMPILER.compile(HOSTILE[name]), TOKENIZER, seed=0, patience=10)
    except InvalidRequestError as error:
        assert error.param == "structured_outputs"
    assert time.monotonic() - begin < 5
    COMPILER.check(StructuredOutputs(choice=("a",)))


ENDLESS = grammar(
    r"start: T" + "\n" + r"T: ~/(((abc){1000}){1000}|((b)*.)*(\p{L}|a))/ & /((([^x]|b))*.*abc.*b|((.|b))*.*[ab].*é)/"
    r" & ~/((\w)*b){1,50}([^x]){1000}/ & ~/.*([ab]){50}.*([^x]){9}/"
)
"""Takes minutes and gigabytes before it reaches a limit of llguidance's."""


def test_what_would_go_on_for_minutes_is_checked_in_a_process_that_ends() -> None:
    begin = time.monotonic()
    with pytest.raises(InvalidRequestError, match="too long to compile, or too much memory"):
        COMPILER.check(ENDLESS)
    assert time.monotonic() - begin < grammar_guard.TIMEOUT_S + 2
    COMPILER.check(StructuredOutputs(choice=("a",)))


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    guard = GrammarGuard([b"a", b"\xffend"], [1])
    assert guard.compile("start: /a{1,9}/") == ""
    assert guard._process is not None
    resource.prlimit(guard._process.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    assert guard.compile("start: /(a|b)*a(a|b){5000}/") is None
    assert guard.compile("start: /a{1,9}/") == ""
    guard.close()


def test_a_guard_that_was_killed_while_it_was_idle_costs_nobody_a_request() -> None:
    guard = GrammarGuard([b"a", b"\xffend"], [1])
    assert guard.compile('start: "a"') == ""
    assert guard._process is not None
    guard._process.kill()
    guard._process.wait()
    assert guard.compile('start: "a"') == ""
    guard.close()


def test_a_check_says_what_compiling_says() -> None:
    for outputs, _, _ in CASES:
        COMPILER.check(outputs)
    for outputs, reason in REFUSED:
        with pytest.raises(InvalidRequestError) as caught:
            COMPILER.check(outputs)
        assert reason in str(caught.value)


def test_a_guard_that_can_not_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    guard = GrammarGuard([b"a"], [0])
    with pytest.raises(PellucidError, match="can't be started"):
        guard.compile('start: "a"')


def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENIZER, (1,))
    compiler.prepare()
    slow = schema({"type": "object", "properties": wide(900)})
    monkeypatch.setattr(structured_output, "COMPILE_TIMEOUT_S", 0.001)
    with pytest.raises(InvalidRequestError, match="too long"):
        compiler.compile(slow)
    monkeypatch.undo()
    assert any(compiler.compile(slow).allowed())
    assert conforms(compiler, TOKENIZER, StructuredOutputs(choice=("a",)), "a")


def test_a_grammar_is_checked_without_a_vocabulary() -> None:
    for outputs, texts, _ in CASES:
        check_grammar(to_lark(outputs))
        assert texts
    check_grammar('start: <|any|> "<|marker|>"')
    for text in ("start: missing", 'start: %json {"type": 5}', "start: /(/", "x" * (MAX_CHARS + 1)):
        with pytest.raises(InvalidRequestError) as caught:
            check_grammar(text)
        assert caught.value.param == "structured_outputs"


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PellucidError, match=r"pip install 'pellucid\[serve\]'"):
        GrammarCompiler(TOKENIZER, (1,))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": "{}", "regex": "a"},
        {"json_object": True, "choice": ("a",)},
        {"json": ""},
        {"json": {"type": "object"}},
        {"regex": ""},
        {"grammar": " "},
        {"choice": ()},
        {"choice": ("a", "")},
        {"choice": "abc"},
        {"choice": (1, 2)},
        {"json_object": "yes"},
        {"json_object": False},
    ],
)
def test_exactly_one_form_is_asked_for_and_it_is_not_empty(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == "structured_outputs"


def test_samples_of_one_prompt_share_the_form() -> None:
    outputs = StructuredOutputs(choice=["a", "b"])  # type: ignore[arg-type]
    assert outputs.choice == ("a", "b")
    assert SamplingParams(n=3, structured_outputs=outputs).single(2).structured_outputs == outputs
