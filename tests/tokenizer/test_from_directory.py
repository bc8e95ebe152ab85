from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import CheckpointError, UnsupportedModelError
from pellucid.tokenizer.tokenizer import Tokenizer

BASE = 272  # Ranks in the tiny Kimi vocabulary; its reserved ids follow.


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(value | changes))


@pytest.fixture
def hf_copy(hf_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_directory, tmp_path / "copy"))


@pytest.fixture
def kimi_copy(kimi_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kimi_directory, tmp_path / "copy"))


def encode_by_ranks(text: str, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule, literally: join the neighbours that make the lowest rank, leftmost first, until none does."""
    parts = [bytes([byte]) for byte in text.encode()]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(text=st.text("theinrga", max_size=12))
@settings(deadline=None)
def test_kimi_words_get_tiktokens_ids(text: str, kimi_tokenizer: Tokenizer, kimi_ranks: dict[bytes, int]) -> None:
    assert kimi_tokenizer.encode(text) == encode_by_ranks(text, kimi_ranks)


def test_kimi_cuts_han_from_other_letters_and_digits_by_three(kimi_tokenizer: Tokenizer) -> None:
    pieces = kimi_tokenizer._backend.pre_tokenizer.pre_tokenize_str("the你好World 12345's  x")
    text = "the你好World 12345's  x"
    assert [text[start:end] for _, (start, end) in pieces] == [
        "the",
        "你好",
        "World",
        " ",
        "123",
        "45",
        "'s",
        " ",
        " x",
    ]


def test_kimi_reserved_tokens_are_named_by_absolute_id(kimi_tokenizer: Tokenizer) -> None:
    assert kimi_tokenizer.vocab_size == BASE + 256
    assert kimi_tokenizer.encode("<|im_end|><think></think>") == [BASE + 2, BASE + 22, BASE + 23]
    assert kimi_tokenizer.token_bytes(BASE + 255) == f"<|reserved_token_{BASE + 255}|>".encode()
    assert kimi_tokenizer.encode(f"<|reserved_token_{BASE + 5}|>") == [BASE + 5]


def test_kimi_stops_at_the_end_of_turn_though_its_config_says_eos(kimi_tokenizer: Tokenizer) -> None:
    assert kimi_tokenizer.eos_token_ids == (BASE + 1, BASE + 2)
    assert kimi_tokenizer.eos_sources[BASE + 1] == "config.json"
    assert kimi_tokenizer.eos_sources[BASE + 2] == "the chat template ends an assistant's turn with <|im_end|>"


def test_kimi_tool_markers_survive_decoding(kimi_tokenizer: Tokenizer) -> None:
    ids = kimi_tokenizer.encode("<|im_user|><|tool_call_begin|>the<|im_end|>")
    assert kimi_tokenizer.decode(ids) == "<|tool_call_begin|>the"


def test_kimi_ranks_with_a_gap_are_a_truncated_file(kimi_copy: Path) -> None:
    lines = (kimi_copy / "tiktoken.model").read_text().splitlines()
    (kimi_copy / "tiktoken.model").write_text("\n".join(lines[:10] + lines[11:]))
    with pytest.raises(CheckpointError, match="ranks have gaps"):
        Tokenizer.from_directory(kimi_copy)


def test_a_damaged_rank_line_is_named(kimi_copy: Path) -> None:
    (kimi_copy / "tiktoken.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model, line 1"):
        Tokenizer.from_directory(kimi_copy)


def test_kimi_names_of_another_vocabulary_are_refused(kimi_copy: Path) -> None:
    edit_json(kimi_copy / "tokenizer_config.json", added_tokens_decoder={"163607": {"content": "</think>"}})
    with pytest.raises(CheckpointError, match=r"names token 163607, but tiktoken\.model has 272 ranks"):
        Tokenizer.from_directory(kimi_copy)


def test_a_token_at_another_id_than_declared_is_refused(hf_copy: Path) -> None:
    """The wrong tokenizer class for a checkpoint: the config's `</think>` is not where the vocabulary has it."""
    declared = {"1": {"content": "<|im_end|>", "special": True}}
    edit_json(hf_copy / "tokenizer_config.json", added_tokens_decoder=declared)
    with pytest.raises(CheckpointError, match=r"gives '<\|im_end\|>' the id 1, the tokenizer gives it 2"):
        Tokenizer.from_directory(hf_copy)


def test_tokens_that_only_the_config_declares_are_added(hf_copy: Path, hf_tokenizer: Tokenizer) -> None:
    new = hf_tokenizer.vocab_size
    edit_json(hf_copy / "tokenizer_config.json", added_tokens_decoder={str(new): {"content": "<new>", "special": True}})
    tokenizer = Tokenizer.from_directory(hf_copy)
    assert tokenizer.encode("<new>", add_special_tokens=False) == [new]
    assert new in tokenizer.special_token_ids


def test_eos_is_the_union_of_all_files_and_the_template(hf_copy: Path) -> None:
    edit_json(hf_copy / "generation_config.json", eos_token_id=[5, 6])
    edit_json(hf_copy / "config.json", eos_token_id=7)
    tokenizer = Tokenizer.from_directory(hf_copy)
    assert tokenizer.eos_sources == {
        5: "generation_config.json",
        6: "generation_config.json",
        7: "config.json",
        0: "tokenizer_config.json",
        2: "the chat template ends an assistant's turn with <|im_end|>",
    }
    assert tokenizer.eos_token_ids == (5, 6, 7, 0, 2)


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [({}, [0], []), ({"add_bos_token": False}, [], []), ({"add_bos_token": True, "add_eos_token": True}, [0], [0])],
)
def test_bos_and_eos_go_around_a_prompt_as_the_files_say(
    config: dict[str, bool], before: list[int], after: list[int], hf_copy: Path
) -> None:
    edit_json(hf_copy / "tokenizer_config.json", **config)
    tokenizer = Tokenizer.from_directory(hf_copy)
    assert tokenizer.encode("the") == [*before, *tokenizer.encode("the", add_special_tokens=False), *after]


def test_the_jinja_file_wins_over_the_config_and_an_argument_over_both(hf_copy: Path) -> None:
    (hf_copy / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_directory(hf_copy).chat_template == "from the file"
    assert Tokenizer.from_directory(hf_copy, chat_template="mine").chat_template == "mine"


def test_of_several_named_templates_the_default_is_taken(hf_copy: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    edit_json(hf_copy / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_directory(hf_copy).chat_template == "d"


def test_named_special_tokens_are_skipped_even_if_not_flagged(hf_copy: Path) -> None:
    edit_json(
        hf_copy / "special_tokens_map.json", additional_special_tokens=["<think>"], pad_token="<\uff5cUser\uff5c>"
    )
    tokenizer = Tokenizer.from_directory(hf_copy)
    assert tokenizer.decode(tokenizer.encode("a<\uff5cUser\uff5c>b")) == "ab"
    edit_json(hf_copy / "tokenizer_config.json", additional_special_tokens=["<think>"])
    assert Tokenizer.from_directory(hf_copy).decode(tokenizer.encode("a<think>b")) == "ab"


def test_truncation_stored_in_the_file_is_not_applied(hf_copy: Path, hf_tokenizer: Tokenizer) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    edit_json(hf_copy / "tokenizer.json", truncation=cut)
    text = "the lazy dog " * 5
    assert Tokenizer.from_directory(hf_copy).encode(text) == hf_tokenizer.encode(text)


def test_a_directory_without_a_tokenizer_says_which_files_it_needs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tiktoken\.model"):
        Tokenizer.from_directory(tmp_path)


def test_a_cut_off_file_is_named(hf_copy: Path) -> None:
    text = (hf_copy / "tokenizer.json").read_text()
    (hf_copy / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not whole JSON"):
        Tokenizer.from_directory(hf_copy)


def test_a_config_that_is_not_json_is_named(hf_copy: Path) -> None:
    (hf_copy / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        Tokenizer.from_directory(hf_copy)


def test_a_bos_token_that_the_vocabulary_lacks_is_refused(hf_copy: Path) -> None:
    edit_json(hf_copy / "tokenizer_config.json", bos_token="<bos>")
    with pytest.raises(CheckpointError, match="names '<bos>' as bos_token"):
        Tokenizer.from_directory(hf_copy)


def test_a_decoder_of_another_kind_is_refused_by_name(hf_copy: Path) -> None:
    wordpiece = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    edit_json(hf_copy / "tokenizer.json", decoder=wordpiece)
    with pytest.raises(UnsupportedModelError, match="WordPiece") as caught:
        Tokenizer.from_directory(hf_copy)
    assert caught.value.trait == "tokenizer decoder"
