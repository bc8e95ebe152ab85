"""Keeps users from writing control tokens: `ControlTokenShield`, used by `Tokenizer` on prompts and on chats.

A control token in user text is spoiled with a mark after each character, so that the encoder does not see it, and
an encoder that removes marks afterwards cuts and encodes the text as ordinary text, all in one pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

MARK = "\ufdd0"
"""A Unicode noncharacter: reserved for use inside one program. The shielded encoder drops it from any text."""

_TRUSTED_ROLES = ("system", "developer", "assistant")


class ControlTokenShield:
    """Encodes text in which chosen stretches cannot become control tokens.

    Sound for control tokens of two or more characters (a single character has nothing to put a mark between).
    """

    def __init__(self, backend: Backend, control_tokens: Iterable[str]) -> None:
        self._source = backend
        self._control = frozenset(token for token in control_tokens if len(token) > 1)
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._control))) or r"(?!)")

    def spoil(self, text: str) -> str:
        """`text` with marks inside, and after, each control token."""
        return self._pattern.sub(lambda match: "".join(char + MARK for char in match.group()), text)

    def spoil_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Chat messages, with whatever comes from outside spoiled: content, name, call id, even an invented role."""
        return [
            message
            if isinstance(message, Mapping) and message.get("role") in _TRUSTED_ROLES
            else self.spoil_value(message)
            for message in messages
        ]

    def spoil_value(self, value: Any) -> Any:
        """A copy of `value` with every text inside lists and objects spoiled, names of members included.

        Raises:
            RecursionError: `value` is nested too deeply.
        """
        if isinstance(value, str):
            return self.spoil(value)
        if isinstance(value, Mapping):
            return {
                self.spoil(key) if isinstance(key, str) else key: self.spoil_value(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.spoil_value(inner) for inner in value]
        return value

    def restore_marks(self, text: str) -> str:
        """`text` of a template that wrote marks as escapes, as ASCII JSON and Python's `repr` do, with real ones."""
        if json.dumps(MARK)[1:-1] not in text:
            return text
        mark = re.compile(_escape_pattern(MARK))
        return self._escaped.sub(lambda match: mark.sub(MARK, match.group()), text)

    @cached_property
    def _escaped(self) -> re.Pattern[str]:
        """A spoiled control token whose marks were escaped, and perhaps its other characters too."""
        mark = _escape_pattern(MARK)
        spellings = (
            "".join(f"(?:{re.escape(char)}|{_escape_pattern(char)}){mark}" for char in token) for token in self._control
        )
        return re.compile("|".join(spellings) or r"(?!)")

    @cached_property
    def backend(self) -> Backend:
        """The encoder that drops marks after it has looked for added tokens. Shares the model: costs no memory."""
        from tokenizers import AddedToken, normalizers
        from tokenizers import Tokenizer as Backend

        source = self._source
        shielded = Backend(source.model)
        drop_marks = normalizers.Replace(MARK, "")
        shielded.normalizer = (
            drop_marks if source.normalizer is None else normalizers.Sequence([drop_marks, source.normalizer])
        )
        if source.pre_tokenizer is not None:
            shielded.pre_tokenizer = source.pre_tokenizer
        # A token matched on normalized text would be found again once the marks are gone.
        shielded.add_tokens(
            [
                AddedToken(
                    token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and token.content not in self._control,
                    special=token.special,
                )
                for _, token in sorted(source.get_added_tokens_decoder().items())
            ]
        )
        return shielded


def _escape_pattern(char: str) -> str:
    """Matches `char` as ASCII JSON has it; JSON inside JSON doubles the backslashes. Linear in a run of these."""
    return re.escape(json.dumps(char)[1:-1]).replace(r"\\", r"(?<!\\)\\+")
