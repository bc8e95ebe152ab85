"""Request fields that responses and messages share, most of them this server's own. Base of both requests.

The names and meanings are those of a chat request; see `sampling_fields`.
"""

from __future__ import annotations

from typing import Any

from pellucid.server.protocol.chat import check_template_arguments
from pellucid.server.protocol.sampling_fields import CommonFields


class GenerationFields(CommonFields, kw_only=True, frozen=True):
    """Sampling, the chat template's arguments, the cache's salt. None means "not asked".

    Raises (in construction):
        ApiError: 400 for a template argument that is the server's own to give.
    """

    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_template_arguments(self.chat_template_kwargs)

    def sampling(self) -> dict[str, Any]:
        """What is asked, by its names in `SamplingParams`."""
        return {name: getattr(self, name) for name in _SAMPLING}


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos",
)  # fmt: skip
