"""Prompts to checked token ids: `PromptEncoder`. Used by `Engine` and by the server."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.core import InvalidRequestError, Request, SamplingParams, check_token_id
from pellucid.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt ready for the engine. `text` is None when it came as token ids."""

    text: str | None
    token_ids: tuple[int, ...]


Prompt = str | Sequence[int] | EncodedPrompt


class PromptEncoder:
    """One model's tokenizer and limits. Thread-safe: encode long prompts off the event loop.

    Attributes:
        tokenizer: None for a model that came without one; prompts are then token ids.
        vocab_size: rows of the model's embedding.
        eos_token_ids: tokens that end a request, of the model's config and of the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, model_eos_token_ids: Sequence[int]) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        known = (*model_eos_token_ids, *(tokenizer.eos_token_ids if tokenizer is not None else ()))
        # A tokenizer may know more tokens than the model has rows for.
        self.eos_token_ids = tuple(dict.fromkeys(i for i in known if i < vocab_size))

    def encode_prompt(self, prompt: Prompt) -> EncodedPrompt:
        """Token ids of a prompt, checked.

        Raises:
            InvalidRequestError: no tokens, ids outside the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, EncodedPrompt):
            return prompt
        is_text = isinstance(prompt, str)
        token_ids = tuple(self.encode(prompt)) if isinstance(prompt, str) else _checked_ids(prompt)
        for token_id in token_ids:
            check_token_id(token_id, self.vocab_size, "prompt")
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; send at least one token", "prompt")
        return EncodedPrompt(str(prompt) if is_text else None, token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises InvalidRequestError when the model came without a tokenizer."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this model came without a tokenizer (tokenizer.json, tiktoken.model, or in its GGUF); give token ids",
                "prompt",
            )
        return self.tokenizer.encode(text)

    def make_request(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        request_id: str,
        cache_salt: str = "",
        capture_hidden: bool = False,
        arrival_time: float | None = None,
    ) -> Request:
        """A request that arrived at `arrival_time`, by default now.

        Raises:
            InvalidRequestError: parameters that this model can't serve.
        """
        params.check_vocabulary(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; this model came without one", "stop")
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            eos_token_ids=self.eos_token_ids,
            cache_salt=cache_salt,
            capture_hidden=capture_hidden,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
        )


def _checked_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Plain ints of a list, an array or a tensor."""
    try:
        return tuple(operator.index(token_id) for token_id in prompt)
    except TypeError:
        raise InvalidRequestError("a prompt is text or a list of token ids", "prompt") from None
