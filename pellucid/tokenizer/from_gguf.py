"""A `Vocabulary` from GGUF key/value metadata. Called by `Tokenizer.from_gguf`.

Two of GGUF's kinds: `gpt2` (byte-level BPE with merges) and `llama` (SentencePiece BPE: scores and byte fallback).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pellucid.core import CheckpointError, UnsupportedModelError
from pellucid.tokenizer.bpe import merges_in_order, order_by_score
from pellucid.tokenizer.pre_tokenizers import PreTokenizerRule, build_pre_tokenizer, find_pre_tokenizer
from pellucid.tokenizer.vocabulary import Vocabulary, find_control_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # The format's own spelling.
    "pad_token": "padding_token_id",
}


def read_gguf_metadata(metadata: Mapping[str, object], chat_template: str | None = None) -> Vocabulary:
    """Build the vocabulary; `chat_template` wins over the file's own.

    Raises:
        UnsupportedModelError: a kind of vocabulary, or a pre-tokenizer, that is not known.
        CheckpointError: a key is missing, or the arrays disagree.
    """
    kind = metadata.get(_KEY + "model")
    tokens: list[str] = list(_require(metadata, "tokens"))
    types = list(_optional_array(metadata, "token_type", len(tokens)) or [_NORMAL] * len(tokens))
    if kind == "gpt2":
        rule = find_pre_tokenizer(str(metadata.get(_KEY + "pre", "default")))
        backend = _build_byte_level(metadata, tokens, rule)
        add_bos, add_space = rule.add_bos, False
    elif kind == "llama":
        add_bos, add_space = True, bool(metadata.get(_KEY + "add_space_prefix", True))
        backend = _build_sentencepiece(metadata, tokens, types, add_space)
    else:
        raise UnsupportedModelError(
            f"GGUF vocabulary of kind {kind!r} (tokenizer.ggml.model); this version reads 'gpt2' and 'llama', "
            f"so serve the model from its Hugging Face directory",
            trait=f"tokenizer.ggml.model={kind}",
        )
    _add_tokens(backend, tokens, types)

    special = frozenset(i for i, token_type in enumerate(types) if token_type in (_CONTROL, _UNKNOWN))
    template = chat_template or metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    ids = _named_ids(metadata, len(tokens))
    bos, eos = ids.get("bos_token_id"), ids.get("eos_token_id")
    add_bos = bool(metadata.get(_KEY + "add_bos_token", add_bos))
    add_eos = bool(metadata.get(_KEY + "add_eos_token", False))
    return Vocabulary(
        backend=backend,
        size=len(tokens),
        byte_level=kind == "gpt2",
        strips_leading_space=add_space,
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(eos,) if add_eos and eos is not None else (),
        bos_token_id=bos,
        eos_sources={ids[key]: f"GGUF {_KEY}{key}" for key in _STOP_KEYS if key in ids},
        special_token_ids=special,
        control_tokens=find_control_tokens(backend, special, template),
        named_tokens={name: tokens[ids[key]] for name, key in _NAMED_KEYS.items() if key in ids},
        chat_template=template,
    )


def _build_byte_level(metadata: Mapping[str, object], tokens: list[str], rule: PreTokenizerRule) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import normalizers
    from tokenizers.models import BPE

    vocab = _index(tokens)
    lines = metadata.get(_KEY + "merges")
    if isinstance(lines, Sequence):
        merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
        for left, right in merges:
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise CheckpointError(
                    f"GGUF tokenizer: the merge {left!r} + {right!r} is not made of tokens; "
                    f"the file is damaged, download it again"
                )
    else:
        # Converters of tiktoken vocabularies may leave merges out: there the rank is the id.
        merges = merges_in_order(tokens)
    backend = Backend(BPE(vocab, merges, ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = build_pre_tokenizer(rule)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _build_sentencepiece(
    metadata: Mapping[str, object], tokens: list[str], types: list[int], add_space: bool
) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import normalizers
    from tokenizers.models import BPE

    scores = _require(metadata, "scores")
    if len(scores) < len(tokens):
        raise CheckpointError(f"GGUF tokenizer: {len(scores)} scores for {len(tokens)} tokens; the file is damaged")
    # Control tokens must not be reachable from text: "<" + "s>" would otherwise merge into BOS.
    normal = [i for i, token_type in enumerate(types) if token_type == _NORMAL]
    merges = merges_in_order(order_by_score(tokens, scores, normal))
    unknown = types.index(_UNKNOWN) if _UNKNOWN in types else None
    unk_token = None if unknown is None else tokens[unknown]
    backend = Backend(BPE(_index(tokens), merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    to_blocks = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), to_blocks]) if add_space else to_blocks
    return backend


def _add_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Make control and user-defined tokens match before any cutting of the text. They keep their ids."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=token_type != _USER_DEFINED)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token
        ]
    )


def _index(tokens: list[str]) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise CheckpointError(f"GGUF tokenizer: the token {twice!r} is there twice; the file is damaged")
    return vocab


def _require(metadata: Mapping[str, object], name: str) -> Sequence[Any]:
    value = metadata.get(_KEY + name)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CheckpointError(f"GGUF metadata has no array {_KEY}{name}; the file carries no tokenizer")
    return value


def _optional_array(metadata: Mapping[str, object], name: str, length: int) -> Sequence[Any] | None:
    if metadata.get(_KEY + name) is None:
        return None
    values = _require(metadata, name)
    if len(values) != length:
        raise CheckpointError(f"GGUF tokenizer: {len(values)} entries in {name} for {length} tokens; damaged file")
    return values


def _named_ids(metadata: Mapping[str, object], size: int) -> dict[str, int]:
    """The ids that the metadata names and the vocabulary has, by key without its prefix."""
    keys = dict.fromkeys((*_STOP_KEYS, *_NAMED_KEYS.values()))
    values = {key: metadata.get(_KEY + key) for key in keys}
    return {key: int(value) for key, value in values.items() if isinstance(value, int) and 0 <= value < size}
