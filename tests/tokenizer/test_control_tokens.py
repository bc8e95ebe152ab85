from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.tokenizer.control_tokens import MARK, ControlTokenShield
from pellucid.tokenizer.tokenizer import Tokenizer


@given(tokens=st.sets(st.text("ab<>", min_size=2, max_size=5), max_size=5), text=st.text("ab<>", max_size=20))
def test_no_control_token_is_left_however_they_overlap_and_no_text_is_lost(
    tokens: set[str], text: str, hf_tokenizer: Tokenizer
) -> None:
    spoiled = ControlTokenShield(hf_tokenizer._backend, tokens).spoil(text)
    assert not any(token in spoiled for token in tokens)
    assert spoiled.replace(MARK, "") == text


def test_the_messages_given_are_not_changed(hf_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]
    ControlTokenShield(hf_tokenizer._backend, ["<|im_end|>"]).spoil_messages(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]


@pytest.mark.parametrize("written", [json.dumps, repr, lambda value: json.dumps(json.dumps(value))])
@pytest.mark.parametrize("token", ["<|im_end|>", "<\uff5cUser\uff5c>"])
def test_marks_that_a_template_escapes_become_marks_again(
    written: Callable[[Any], str], token: str, hf_tokenizer: Tokenizer
) -> None:
    shield = ControlTokenShield(hf_tokenizer._backend, ["<|im_end|>", "<\uff5cUser\uff5c>", "<|im"])
    value = {"a": [f"x{token}y {token}"], token: 1}
    text = shield.restore_marks(written(shield.spoil_value(value)))
    assert text.replace(MARK, "") == written(value)
    assert token not in text


def test_an_escape_that_a_user_writes_is_left_alone(hf_tokenizer: Tokenizer) -> None:
    text = r"In JSON it is \ufdd0, <|\ufdd0im_end|>."
    assert ControlTokenShield(hf_tokenizer._backend, ["<|im_end|>"]).restore_marks(text) == text


def test_many_backslashes_take_no_time(hf_tokenizer: Tokenizer) -> None:
    text = r"\ufdd0" + "\\" * 1_000_000
    assert ControlTokenShield(hf_tokenizer._backend, ["\uff5cDSML\uff5c"]).restore_marks(text) == text
