"""A grammar costs one compilation for all who ask for it, and a hostile one costs nobody else anything.

Its size, time and memory are bounded, and a process of its own compiles it first.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pellucid.core import InvalidRequestError, PellucidError, SamplingParams, StructuredOutputs
from pellucid.tokenizer import grammar_guard, structured_output
from pellucid.tokenizer.grammar_guard import GrammarGuard
from pellucid.tokenizer.lark import MAX_CHARS
from pellucid.tokenizer.structured_output import GrammarCompiler
from tests.tokenizer.forms import CASES, COMPILER, REFUSED, TOKENIZER, grammar, schema
from tests.tokenizer.grammars import allowed_ids, conforms, walk


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    COMPILER.close()


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


def test_samples_of_one_prompt_share_the_form() -> None:
    outputs = StructuredOutputs(choice=["a", "b"])  # type: ignore[arg-type]
    assert outputs.choice == ("a", "b")
    assert SamplingParams(n=3, structured_outputs=outputs).single(2).structured_outputs == outputs


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


def test_a_guard_that_can_not_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    guard = GrammarGuard([b"a"], [0])
    with pytest.raises(PellucidError, match="can't be started"):
        guard.compile('start: "a"')


def test_a_check_says_what_compiling_says() -> None:
    for outputs, _, _ in CASES:
        COMPILER.check(outputs)
    for outputs, reason in REFUSED:
        with pytest.raises(InvalidRequestError) as caught:
            COMPILER.check(outputs)
        assert reason in str(caught.value)
