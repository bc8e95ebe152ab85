from __future__ import annotations

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
