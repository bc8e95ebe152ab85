"""Log-probabilities as the endpoints write them: chat's objects, completions' parallel lists, vLLM's prompt form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pellucid.core import Logprob, TokenLogprobs
from pellucid.tokenizer.detokenizer import IncrementalDetokenizer
from pellucid.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0
"""What JSON gets for a probability of zero, as with OpenAI."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chat. `bytes` are the token's own, also where it is half of a character."""
    return {
        "content": [
            {**_chat_token(tokenizer, entry.chosen), "top_logprobs": [_chat_token(tokenizer, one) for one in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, entry: Logprob) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(entry.token_id)
    return {
        "token": spelled.decode("utf-8", errors="replace"),
        "logprob": _finite(entry.logprob),
        "bytes": list(spelled),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of completions, piece by piece.

    `text_offset` counts the characters of the text from the first token on that were complete before the token: half
    of a character has none, whatever its key is, nor has a special token that the text leaves out.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._text = None
        if tokenizer is not None:
            self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens, continues_text=True)
        self._offset = 0

    def take(self, entries: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        """The lists for these tokens (id, and its log-probabilities: None for the first of a prompt).

        Alternatives that are spelled alike share a key, as OpenAI's format has it; the likelier one keeps it.
        """
        tokens, values, tops, offsets = [], [], [], []
        for token_id, entry in entries:
            tokens.append(self._spell(token_id))
            offsets.append(self._offset)
            self._offset += 0 if self._text is None else len(self._text.push([token_id]))
            values.append(None if entry is None else _finite(entry.chosen.logprob))
            tops.append(None if entry is None else self._top(entry))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for one in entry.top:
            top.setdefault(self._spell(one.token_id), _finite(one.logprob))
        top.setdefault(self._spell(entry.chosen.token_id), _finite(entry.chosen.logprob))
        return top

    def _spell(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each token an object by token id; null for the first."""

    def describe(one: Logprob) -> dict[str, Any]:
        spelled = b"" if tokenizer is None else tokenizer.token_bytes(one.token_id)
        text = spelled.decode("utf-8", errors="replace")
        return {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": text}

    return [
        None if entry is None else {str(one.token_id): describe(one) for one in (*entry.top, entry.chosen)}
        for entry in entries
    ]


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST
