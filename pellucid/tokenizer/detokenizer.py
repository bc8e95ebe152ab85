"""Token ids to text while they arrive: one `IncrementalDetokenizer` per output, pushed to by the engine's output.

Works on bytes, not on text: each token has exact bytes, so no earlier token is ever decoded again.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pellucid.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Invariant, for every grouping of the ids: pushed deltas + `flush()` == `tokenizer.decode(all ids)`.

    A delta never ends inside a UTF-8 character: its first bytes wait for the rest, and become U+FFFD (as in
    `decode`) only when the following byte, or `flush`, shows that the rest will not come. O(bytes) per push.

    With `continues_text` the ids follow a text that was shown already, so a leading SentencePiece space is kept:
    decode(prompt) + deltas == decode(prompt + ids).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues_text: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next_space = tokenizer.strips_leading_space and not continues_text

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids add."""
        pieces = [self._token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped]
        return self._emit(self._decoder.decode(b"".join(pieces)))

    def flush(self) -> str:
        """What is left at the end of the output: U+FFFD for a character that was never completed, or nothing."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if text and self._strip_next_space:
            self._strip_next_space = False
            return text.removeprefix(" ")
        return text
