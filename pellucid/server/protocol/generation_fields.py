"""Request fields that responses and messages share, most of them this server's own. Base of both requests.

The names and meanings are those of a chat request; see `sampling_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from pellucid.core import MAX_INT
from pellucid.server.protocol.chat import check_template_arguments
from pellucid.server.protocol.sampling_fields import Count, LogitBias, RequestId


class GenerationFields(Struct, kw_only=True, frozen=True):
    """Sampling, the chat template's arguments, the cache's salt. None means "not asked".

    Raises (in construction):
        ApiError: 400 for a template argument that is the server's own to give.
    """

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)] | None = None
    logit_bias: LogitBias | None = None
    stop_token_ids: list[Count] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    request_id: RequestId | None = None
    stream: bool | None = None

    def __post_init__(self) -> None:
        check_template_arguments(self.chat_template_kwargs)

    def sampling(self) -> dict[str, Any]:
        """What is asked, by its names in `SamplingParams`."""
        return {name: getattr(self, name) for name in _SAMPLING}


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos",
)  # fmt: skip
