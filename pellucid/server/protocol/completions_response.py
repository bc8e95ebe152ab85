"""What /v1/completions answers when it does not stream: `Completion`, as `server.openapi` shows it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from pellucid.server.protocol.usage import PromptLogprobs, Usage

CompletionFinishReason = Literal["stop", "length", "abort"]


class CompletionLogprobs(Struct, frozen=True):
    """Lists of one length, an entry per token; null where nothing predicts the token (the first, with `echo`)."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True):
    """`index` counts the samples of the first prompt, then those of the second, and so on."""

    index: int
    text: str
    finish_reason: CompletionFinishReason
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
