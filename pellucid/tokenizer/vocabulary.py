"""`Vocabulary`: what a tokenizer is made of, in whatever files it came. The loaders build it, `Tokenizer` owns it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pellucid.core import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The encoder with its added tokens in place, and the facts around it.

    `byte_level` tokens are spelled in GPT-2's byte alphabet; otherwise in SentencePiece's, where U+2581 is a space
    and `<0x41>` a byte. `prefix_ids` and `suffix_ids` go around a prompt (BOS, EOS). `special_token_ids` are left
    out of decoded text. `control_tokens` are the texts that steer the model, hence never taken from a user.
    `named_tokens` maps `bos_token` etc. to text, for chat templates. `eos_sources`: id -> the file that says so.
    """

    backend: Backend
    size: int
    byte_level: bool
    strips_leading_space: bool = False
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_sources: Mapping[int, str] = field(default_factory=dict)
    special_token_ids: frozenset[int] = frozenset()
    control_tokens: frozenset[str] = frozenset()
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


def find_control_tokens(backend: Backend, special_ids: Iterable[int], chat_template: str | None) -> frozenset[str]:
    """Added tokens that steer the model rather than spell text.

    Those flagged special, those the chat template mentions, and those in the shape `<|...|>`: DeepSeek's `<|User|>`
    and most `<think>` are not flagged, yet a user who could write them would speak in another role.
    """
    special, template = frozenset(special_ids), chat_template or ""
    control = set()
    for token_id, token in backend.get_added_tokens_decoder().items():
        text = token.content
        in_bars = text.startswith(("<|", "<\uff5c")) and text.endswith(("|>", "\uff5c>"))
        has_symbol = any(not char.isalnum() and not char.isspace() for char in text)
        if token_id in special or in_bars or (has_symbol and text in template):
            control.add(text)
    return frozenset(control)


def require_token_id(backend: Backend, text: str, role: str) -> int:
    """The id of a token that a config names.

    Raises:
        CheckpointError: the vocabulary has no such token.
    """
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise CheckpointError(
            f"the tokenizer config names {text!r} as {role}, but the vocabulary has no such token; "
            f"the tokenizer files are of different models, download them again"
        )
    return token_id
