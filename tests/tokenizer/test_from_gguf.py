from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import CheckpointError, UnsupportedModelError
from pellucid.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from pellucid.tokenizer.tokenizer import Tokenizer

# Recorded from llama.cpp (vocabulary only) on the SmolLM2-135M-Instruct GGUF file.
SMOLLM2_IDS = {
    "Hello, world!": [19556, 28, 905, 17],
    "  two leading spaces": [216, 827, 2899, 5600],
    "a\n\n\n\tb  ": [81, 16506, 197, 82, 256],
    "def f(x):\n    return x ** 2  # square\n": [
        *(1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 216, 907, 5222, 198),
    ],
    "1234567890 3.14159 1,000": [
        *(33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 216, 35, 30, 33, 36, 33, 37, 41, 216, 33, 28, 32, 32, 32),
    ],
    "it's we'LL don't": [269, 506, 392, 23, 16421, 1326, 982],
    "na\u00efve caf\u00e9 \u00dcn\u00efcode": [3546, 46494, 37366, 5549, 246, 94, 25972, 4635],
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8": [
        *(23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226),
    ],
    "\u4f60\u597d\uff0c\u4e16\u754c": [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230],
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440": [155, 249, 46879, 16464, 32547, 41337, 7872, 9175],
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd": [
        *(10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 321, 231, 10813, 235, 116),
        *(15107, 235, 231, 10813, 233, 138),
    ],
    "e\u0301a\u0308": [85, 151, 219, 81, 151, 226],
    "\u00a0\u2003\u3000x": [15442, 321, 221, 12109, 218, 104],
    "\u00bd \u00b2 \u0663\u0664": [16738, 216, 19133, 216, 164, 113, 164, 114],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "<|endoftext|><file_sep>x": [0, 5, 104],
    '{"a": [1, 2, null]}': [39428, 81, 1799, 933, 33, 28, 216, 34, 28, 10034, 28852],
    "https://example.org/a?b=c&d=%20": [4687, 1742, 7434, 30, 2295, 31, 81, 47, 82, 45, 83, 22, 84, 23446, 34, 32],
    "-----=====     ......": [17318, 2031, 45, 289, 32543, 950],
    "\r\n\r\n\t\t": [18682, 1656],
    "": [],
    "The quick brown fox jumps over the lazy dog.": [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30],
}


def read_tokenizer_metadata(path: Path) -> dict[str, object]:
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def encode_by_scores(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's rule, literally: join the neighbours that make the best-scored piece; the rest in bytes."""
    tokens, scores, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    piece_ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joined = [(a + b, i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in piece_ids]
        if not joined:
            break
        piece, i = min(joined, key=lambda pair: (-scores[piece_ids[pair[0]]], pair[1]))
        parts[i : i + 2] = [piece]
    ids: list[int] = []
    for part in parts:
        ids += [piece_ids[part]] if part in piece_ids else [3 + byte for byte in part.encode()]
    return ids


@settings(deadline=None)
@given(text=st.text() | st.text("the 12\n'sé👍\t", max_size=30))
def test_the_same_vocabulary_gives_the_same_ids_from_gguf_and_from_tokenizer_json(
    text: str, gguf_metadata: dict[str, Any], hf_tokenizer: Tokenizer
) -> None:
    expected = hf_tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    ids = Tokenizer.from_gguf(gguf_metadata).encode(text, allow_special=False)
    assert ids == expected


@settings(deadline=None)
@given(text=st.text("the lowinrs<>/世界é👍", max_size=20))
def test_sentencepiece_ids_follow_the_scores(text: str, sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    assert ids == encode_by_scores(text, sentencepiece_metadata)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_sentencepiece_adds_bos_and_the_space_after_each_special_token(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    (the,) = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.token_bytes(the) == b" the"
    assert tokenizer.encode("the</s>the") == [1, the, 2, the]
    bare = Tokenizer.from_gguf(sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.decode(bare.encode(" the")) == " the"
    assert bare.encode(" the", add_special_tokens=False) == [the]


def test_a_user_defined_token_is_matched_but_not_skipped(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    (user,) = tokenizer.encode("<usr>", add_special_tokens=False)
    assert tokenizer.decode([user]) == "<usr>"
    assert user not in tokenizer.special_token_ids


def test_facts_come_from_the_metadata(gguf_metadata: dict[str, Any]) -> None:
    more = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 9999}
    tokenizer = Tokenizer.from_gguf(gguf_metadata | more)
    assert tokenizer.vocab_size == len(gguf_metadata["tokenizer.ggml.tokens"])
    assert tokenizer.bos_token_id == 0
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.eos_sources == {2: "GGUF tokenizer.ggml.eos_token_id", 1: "GGUF tokenizer.ggml.eot_token_id"}
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]).endswith("x<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("pre", "stated", "expected"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)],
)
def test_bos_follows_the_file_and_else_the_pre_tokenizers_habit(
    pre: str, stated: bool | None, expected: bool, gguf_metadata: dict[str, Any]
) -> None:
    metadata = gguf_metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": stated}
    if stated is None:
        del metadata["tokenizer.ggml.add_bos_token"]
    assert (Tokenizer.from_gguf(metadata).encode("the")[0] == 0) is expected


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 123  x", ["it", "'s", " 123", " ", " x"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("llama-bpe", "DON'T 12345\n\n x", ["DON", "'T", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "x 12\r\n  y", ["x", " ", "1", "2", "\r\n", " ", " y"]),
        ("gpt-4o", "HelloWorld's", ["Hello", "World's"]),
        ("deepseek-v3", "日本x 1234!ok", ["日本", "x", " ", "123", "4", "!ok"]),
        ("deepseek-llm", "a b\n12", ["a", " b", "\n", "12"]),
        ("kimi-k2", "ab你好cd 1234", ["ab", "你好", "cd", " ", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_text_is_cut_by_the_rule_of_its_name(
    pre: str, text: str, pieces: list[str], gguf_metadata: dict[str, Any]
) -> None:
    backend = Tokenizer.from_gguf(gguf_metadata | {"tokenizer.ggml.pre": pre})._backend
    assert [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_qwen_text_is_composed_first(gguf_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_known_rule_loses_no_text(pre: str, gguf_metadata: dict[str, Any]) -> None:
    text = "Café's 12345\n\n\tx  =  日本語 한국어 👍🏽 --- \r\n ½²"
    tokenizer = Tokenizer.from_gguf(gguf_metadata | {"tokenizer.ggml.pre": pre})
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_pre_tokenizer_is_refused_by_name_with_the_remedy(gguf_metadata: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'surprise'.*Hugging Face directory.*Known: .*smollm") as caught:
        Tokenizer.from_gguf(gguf_metadata | {"tokenizer.ggml.pre": "surprise"})
    assert caught.value.trait == "tokenizer.ggml.pre=surprise"


def test_an_unknown_kind_of_vocabulary_is_refused_by_name(gguf_metadata: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        Tokenizer.from_gguf(gguf_metadata | {"tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.tokens": None}, "no array tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["t zzz"]}, "merge 't' \\+ 'zzz' is not made of tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries in token_type"),
        ({"tokenizer.ggml.tokens": ["a"] * 420, "tokenizer.ggml.token_type": None}, "token 'a' is there twice"),
        ({"tokenizer.ggml.model": "llama"}, "no array tokenizer.ggml.scores"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "1 scores for"),
    ],
)
def test_arrays_that_disagree_are_a_damaged_file(
    changes: dict[str, object], reason: str, gguf_metadata: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Tokenizer.from_gguf(gguf_metadata | changes)


def test_without_merges_the_ids_are_the_ranks(kimi_ranks: dict[bytes, int], kimi_tokenizer: Tokenizer) -> None:
    tokens = [kimi_tokenizer._backend.id_to_token(rank) for rank in kimi_ranks.values()]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "kimi-k2", "tokenizer.ggml.tokens": tokens}
    text = "the other thing 你好  aaaaa\n\n"
    assert Tokenizer.from_gguf(metadata).encode(text) == kimi_tokenizer.encode(text)


def test_smollm2_gives_llama_cpps_ids_quickly(smollm2_path: Path) -> None:
    metadata = read_tokenizer_metadata(smollm2_path)

    def best_of_three(work: Callable[[], object]) -> float:
        """Seconds; a machine that is busy with something else must not decide."""
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    tokenizer = Tokenizer.from_gguf(metadata)
    assert {text: tokenizer.encode(text) for text in SMOLLM2_IDS} == SMOLLM2_IDS
    assert all(tokenizer.decode(ids, skip_special_tokens=False) == text for text, ids in SMOLLM2_IDS.items())
    assert tokenizer.eos_token_ids == (2,)
    assert best_of_three(lambda: Tokenizer.from_gguf(metadata)) < 1.0
    text = Path(__file__).read_text(encoding="utf-8") * 20
    assert len(tokenizer.encode(text)) > 80_000
    assert best_of_three(lambda: tokenizer.encode(text)) < 2.0
