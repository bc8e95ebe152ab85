"""What no output can be held to is refused in one line that says why, or what is missing and how to get it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pellucid.core import InvalidRequestError, PellucidError, StructuredOutputs
from pellucid.tokenizer.lark import MAX_CHARS
from pellucid.tokenizer.structured_output import GrammarCompiler, check_grammar, to_lark
from tests.tokenizer.forms import CASES, COMPILER, REFUSED, TOKENIZER


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


def test_a_grammar_is_checked_without_a_vocabulary() -> None:
    for outputs, texts, _ in CASES:
        check_grammar(to_lark(outputs))
        assert texts
    check_grammar('start: <|any|> "<|marker|>"')
    for text in ("start: missing", 'start: %json {"type": 5}', "start: /(/", "x" * (MAX_CHARS + 1)):
        with pytest.raises(InvalidRequestError) as caught:
            check_grammar(text)
        assert caught.value.param == "structured_outputs"


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


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        GrammarCompiler(TOKENIZER, ())


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PellucidError, match=r"pip install 'pellucid\[serve\]'"):
        GrammarCompiler(TOKENIZER, (1,))
