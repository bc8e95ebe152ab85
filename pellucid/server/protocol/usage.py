"""Parts that the answers of chat and completions share: usage, prompt logprobs."""

from __future__ import annotations

from msgspec import Struct


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of a request, summed over its prompts and samples; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(Struct, frozen=True):
    """`rank` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One entry per prompt token, by token id; None for the first, which nothing predicts."""
