from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.tokenizer.detokenizer import IncrementalDetokenizer
from pellucid.tokenizer.tokenizer import Tokenizer

KINDS = ["byte-level", "sentencepiece", "tiktoken"]
TEXTS = [
    "the hen's 12 hens",
    " leading and  double  spaces ",
    "日本語と中文, 世界你好",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷",
    "e\u0301 a\u0308 \u0915\u094d\u0937",
    "tail\n\n",
]


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(bounds)]


def stream(tokenizer: Tokenizer, groups: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_deltas_join_to_decode_for_any_ids_and_grouping(
    kind: str, data: st.DataObject, every_tokenizer: dict[str, Tokenizer]
) -> None:
    """Any ids: bytes that are not UTF-8, special tokens, padding rows past the vocabulary."""
    tokenizer = every_tokenizer[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=8))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, split(ids, cuts), skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_real_text_comes_back_with_no_broken_character_in_any_delta(
    kind: str, data: st.DataObject, every_tokenizer: dict[str, Tokenizer]
) -> None:
    tokenizer = every_tokenizer[kind]
    text = data.draw(st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8", exclude_characters="\ufffd\ufdd0▁")))
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    deltas = stream(tokenizer, split(ids, data.draw(st.lists(st.integers(0, 60), max_size=10))), skip=False)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_half_a_character_waits_and_is_replaced_only_at_the_end(every_tokenizer: dict[str, Tokenizer]) -> None:
    tokenizer = every_tokenizer["tiktoken"]
    first, second, third, fourth = "👍".encode()  # In this vocabulary, byte value = id.
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([byte]) for byte in (first, second, third, fourth)] == ["", "", "", "👍"]
    assert detokenizer.push([first, second]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_the_sentencepiece_space_is_dropped_only_at_the_start_of_a_text(every_tokenizer: dict[str, Tokenizer]) -> None:
    tokenizer = every_tokenizer["sentencepiece"]
    prompt, ids = tokenizer.encode("hello", add_special_tokens=False), tokenizer.encode("the", add_special_tokens=False)
    assert "".join(stream(tokenizer, [ids])) == "the"
    continued = IncrementalDetokenizer(tokenizer, continues_text=True)
    assert tokenizer.decode(prompt) + continued.push(ids) + continued.flush() == tokenizer.decode(prompt + ids)
    assert tokenizer.decode(prompt + ids) == "hello the"


def test_special_tokens_are_shown_when_asked(hf_tokenizer: Tokenizer) -> None:
    ids = hf_tokenizer.encode("<|im_start|>the<|im_end|>", add_special_tokens=False)
    assert "".join(stream(hf_tokenizer, [ids])) == "the"
    assert "".join(stream(hf_tokenizer, [ids], skip=False)) == "<|im_start|>the<|im_end|>"


def test_each_token_is_read_once_however_long_the_output(
    monkeypatch: pytest.MonkeyPatch, hf_tokenizer: Tokenizer
) -> None:
    reads: list[int] = []

    def count(token_id: int) -> bytes:
        reads.append(token_id)
        return b"ab"

    monkeypatch.setattr(hf_tokenizer, "token_bytes", count)
    detokenizer = IncrementalDetokenizer(hf_tokenizer)
    assert [detokenizer.push([token_id]) for token_id in range(10, 400)] == ["ab"] * 390
    assert reads == list(range(10, 400))
