"""A `Vocabulary` from a checkpoint directory. Called by `Tokenizer.from_directory`.

Two layouts: Hugging Face (`tokenizer.json`) and Kimi's (`tiktoken.model` ranks, names in `tokenizer_config.json`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core import CheckpointError, UnsupportedModelError
from pellucid.tokenizer.bpe import merges_in_order, spell_bytes
from pellucid.tokenizer.pre_tokenizers import KIMI, build_pre_tokenizer
from pellucid.tokenizer.vocabulary import Vocabulary, find_control_tokens, require_token_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

RESERVED_TOKENS = 256
"""A tiktoken.model is followed by this many reserved ids, named in tokenizer_config.json or by their absolute id."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_directory(path: Path, chat_template: str | None = None) -> Vocabulary:
    """Read the tokenizer files of `path`; `chat_template` wins over the directory's own.

    A `tiktoken.model` wins over a `tokenizer.json` beside it: it is the published one, the other a conversion.

    Raises:
        CheckpointError: no tokenizer there, a damaged file, or files of different models.
        UnsupportedModelError: a decoder that is neither byte-level nor SentencePiece.
    """
    config = _read_json(path / "tokenizer_config.json")
    stated = {key: value for key, value in config.items() if value is not None}
    named = _named_tokens(_read_json(path / "special_tokens_map.json") | stated)
    declared = _declared_tokens(config)
    is_tiktoken = (path / "tiktoken.model").is_file()
    if is_tiktoken:
        backend = _build_tiktoken(path / "tiktoken.model", declared)
    elif (path / "tokenizer.json").is_file():
        backend = _load_tokenizer_json(path / "tokenizer.json", declared)
    else:
        raise CheckpointError(
            f"no tokenizer in {path}: it has neither tokenizer.json nor tiktoken.model; download the missing file, "
            f"or convert an older tokenizer.model with transformers' AutoTokenizer(...).save_pretrained()"
        )
    _check_declared(backend, declared, path)
    template = chat_template or _find_chat_template(path, config)

    added = backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special or declared.get(i, {}).get("special")}
    special |= {i for text in _special_texts(config, named) if (i := backend.token_to_id(text)) is not None}
    bos, eos = (
        require_token_id(backend, named[name], name) if name in named else None for name in ("bos_token", "eos_token")
    )
    prefix, suffix = _find_affixes(backend, config, bos, eos)
    byte_level, strips = _read_decoder(backend)
    size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
    return Vocabulary(
        backend=backend,
        size=size,
        byte_level=byte_level,
        strips_leading_space=strips,
        prefix_ids=prefix,
        suffix_ids=suffix,
        bos_token_id=bos if bos is not None else _first_id(_read_json(path / "config.json"), "bos_token_id"),
        eos_sources=_find_eos(path, eos),
        special_token_ids=frozenset(special),
        control_tokens=find_control_tokens(backend, added if is_tiktoken else special, template),
        named_tokens=named,
        chat_template=template,
    )


def _load_tokenizer_json(path: Path, declared: Mapping[int, Mapping[str, Any]]) -> Backend:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    text = path.read_bytes().strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise CheckpointError(f"{path} is not whole JSON (a Git LFS pointer or a broken download?); download it again")
    backend = Backend.from_str(text.decode("utf-8"))
    backend.no_truncation()
    backend.no_padding()
    missing = [token for _, token in sorted(declared.items()) if backend.token_to_id(token["content"]) is None]
    backend.add_tokens(
        [AddedToken(token["content"], normalized=False, special=bool(token.get("special"))) for token in missing]
    )
    return backend


def _build_tiktoken(path: Path, declared: Mapping[int, Mapping[str, Any]]) -> Backend:
    """Kimi's layout as a BPE encoder that gives tiktoken's ids."""
    from tokenizers import AddedToken, decoders
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    tokens = [spell_bytes(token) for token in _read_ranks(path)]
    size = len(tokens)
    outside = [i for i in declared if not size <= i < size + RESERVED_TOKENS]
    if outside:
        raise CheckpointError(
            f"{path.with_name('tokenizer_config.json')} names token {outside[0]}, but {path.name} has {size} ranks, "
            f"so reserved ids are {size} to {size + RESERVED_TOKENS - 1}; the files are of different models"
        )
    vocab = {token: rank for rank, token in enumerate(tokens)}
    backend = Backend(BPE(vocab, merges_in_order(tokens), ignore_merges=KIMI.ignore_merges))
    backend.pre_tokenizer = build_pre_tokenizer(KIMI)
    backend.decoder = decoders.ByteLevel()
    reserved = []
    for token_id in range(size, size + RESERVED_TOKENS):
        token = declared.get(token_id, {"content": f"<|reserved_token_{token_id}|>", "special": True})
        reserved.append(AddedToken(token["content"], normalized=False, special=bool(token.get("special", True))))
    backend.add_tokens(reserved)
    return backend


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens of a tiktoken file in rank order; each line is base64, a space, the rank."""
    ranked: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranked[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{path}, line {number}: not 'base64 rank'; download the file again") from error
    if not ranked or max(ranked) != len(ranked) - 1:
        raise CheckpointError(f"{path}: ranks have gaps; the file is truncated, download it again")
    return [ranked[rank] for rank in range(len(ranked))]


def _check_declared(backend: Backend, declared: Mapping[int, Mapping[str, Any]], path: Path) -> None:
    """Every token that the config pins to an id must have it: a wrong tokenizer class shows here, not in the output."""
    for token_id, token in declared.items():
        found = backend.token_to_id(token["content"])
        if found != token_id:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'} gives {token['content']!r} the id {token_id}, the tokenizer gives "
                f"it {found}; the tokenizer files are of different models, download them again"
            )


def _find_affixes(
    backend: Backend, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after a text: what the post-processor of tokenizer.json puts, unless the config says otherwise."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    prefix, suffix = tuple(full[:start]), tuple(full[start + len(bare) :])
    if isinstance(add_bos := config.get("add_bos_token"), bool):
        prefix = (bos,) if add_bos and bos is not None else ()
    if isinstance(add_eos := config.get("add_eos_token"), bool):
        suffix = (eos,) if add_eos and eos is not None else ()
    return prefix, suffix


def _read_decoder(backend: Backend) -> tuple[bool, bool]:
    """(byte-level?, one leading space is dropped?) from the decoder's own description."""
    if backend.decoder is None:
        raise UnsupportedModelError("tokenizer.json has no decoder, so ids have no text", trait="tokenizer decoder")
    parts = list(_walk_types(json.loads(backend.decoder.__getstate__())))
    types = {part["type"] for part in parts}
    if "ByteLevel" in types:
        return True, False
    if not types <= {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise UnsupportedModelError(
            f"tokenizer.json has a decoder of {', '.join(sorted(types))}; byte-level and SentencePiece are supported",
            trait="tokenizer decoder",
        )
    strips = any(part["type"] == "Strip" and part.get("start") == 1 for part in parts)
    prepends = any(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts)
    return False, strips or prepends


def _walk_types(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield node
    for child in node.get("decoders", ()):
        yield from _walk_types(child)


def _find_eos(path: Path, tokenizer_eos: int | None) -> dict[int, str]:
    """Every id that some file calls the end: the files of one checkpoint often disagree, and each may be right."""
    sources: dict[int, str] = {}
    for name in ("generation_config.json", "config.json"):
        config = _read_json(path / name)
        for part in (config, config.get("text_config")):
            for token_id in _ids(part, "eos_token_id"):
                sources.setdefault(token_id, name)
    if tokenizer_eos is not None:
        sources.setdefault(tokenizer_eos, "tokenizer_config.json")
    return sources


def _find_chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja`, else the config's own; of several named ones, `default`."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", next(iter(by_name.values()), None))
    return template if isinstance(template, str) else None


def _declared_tokens(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {int(token_id): token for token_id, token in config.get("added_tokens_decoder", {}).items()}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: _text_of(config.get(name)) for name in _NAMED}
    return {name: text for name, text in texts.items() if text}


def _special_texts(config: Mapping[str, Any], named: Mapping[str, str]) -> list[str]:
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    entries = extra.values() if isinstance(extra, dict) else extra
    return [*named.values(), *filter(None, map(_text_of, entries))]


def _text_of(token: Any) -> str | None:
    """A token's text: configs give the text itself, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(config: Any, key: str) -> list[int]:
    value = config.get(key) if isinstance(config, dict) else None
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _first_id(config: Mapping[str, Any], key: str) -> int | None:
    return next((i for part in (config, config.get("text_config")) for i in _ids(part, key)), None)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file, or nothing where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object; download it again")
    return value
