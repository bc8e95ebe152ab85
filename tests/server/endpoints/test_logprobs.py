"""Log-probabilities of completions: keys by token, offsets into the text."""

from __future__ import annotations

import pytest

from pellucid.core import Logprob, TokenLogprobs
from pellucid.server.endpoints.logprobs import CompletionLogprobs
from pellucid.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.grammars import EOS, make_tokenizer

TEXT = "a \U0001f984 b\u00e9c"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def entry(token_id: int) -> tuple[int, TokenLogprobs]:
    one = Logprob(token_id, -0.5, 1)
    return token_id, TokenLogprobs(one, (one,))


def test_offsets_count_characters_where_tokens_are_pieces_of_them(tokenizer: Tokenizer) -> None:
    ids = [
        token_id
        for char in TEXT.encode()
        for token_id in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token_id) == bytes([char])
    ]
    assert len(ids) == len(TEXT.encode())
    whole = CompletionLogprobs(tokenizer).take([entry(token_id) for token_id in ids])
    assert whole["tokens"][2] == "bytes:\\xf0"
    # The four bytes of the emoji begin at 2, the two of \u00e9 at 5.
    assert whole["text_offset"] == [0, 1, 2, 2, 2, 2, 3, 4, 5, 5, 6]
    assert [TEXT[offset] for offset in whole["text_offset"]][-3:] == ["\u00e9", "\u00e9", "c"]
    one_by_one = CompletionLogprobs(tokenizer)
    assert [one_by_one.take([entry(token_id)])["text_offset"][0] for token_id in ids] == whole["text_offset"]


def test_bytes_that_are_no_character_count_as_the_replacement_that_the_text_has(tokenizer: Tokenizer) -> None:
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    ids = [by_bytes[b"\xf0"], by_bytes[b"a"], by_bytes[b"b"]]
    assert tokenizer.decode(ids) == "\ufffdab"
    # What the first byte is shows only with the second.
    assert CompletionLogprobs(tokenizer).take([entry(token_id) for token_id in ids])["text_offset"] == [0, 0, 2]


@pytest.mark.parametrize(("skip", "expected"), [(True, [0, 1, 1]), (False, [0, 1, 1 + len(EOS)])])
def test_special_tokens_count_where_the_text_shows_them(skip: bool, expected: list[int], tokenizer: Tokenizer) -> None:
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    entries = [entry(token_id) for token_id in (by_bytes[b"a"], by_bytes[EOS.encode()], by_bytes[b"b"])]
    assert CompletionLogprobs(tokenizer, skip).take(entries)["text_offset"] == expected
