"""Request fields that chat and completions share: sampling, stopping, constraints, streaming. Base of both requests.

Throughout, None means "not asked": null and absent are the same, and defaults are applied in
`server.generation.sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from pellucid.core import MAX_INT, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS
from pellucid.server.errors import bad_request
from pellucid.server.protocol.metadata import Metadata
from pellucid.server.protocol.response_format import ResponseFormat, StructuredOutputsFields

# Lists are bounded: each id costs time and memory. A list of allowed ids may be as long as a large vocabulary.
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1_000_000

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
# JSON has no integer keys: the ids come as strings, and are read as integers.
LogitBias = Annotated[
    dict[int, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_LOGIT_BIASES, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]
# A name that may stand in a header and a log line: the end anchor alone would let a line break through.
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$(?!\n)")]

_CONSTRAINTS = "structured_outputs or response_format"
REMOVED_FIELDS: Mapping[str, str] = {
    "guided_json": "use structured_outputs: {json: ...} or response_format of type json_schema",
    "guided_regex": "use structured_outputs: {regex: ...}",
    "guided_choice": "use structured_outputs: {choice: [...]}",
    "guided_grammar": "use structured_outputs: {grammar: ...}",
    "guided_json_object": "use structured_outputs: {json_object: true} or response_format of type json_object",
    "guided_decoding_backend": f"there is one backend; give the constraint with {_CONSTRAINTS}",
    "guided_whitespace_pattern": f"give the constraint with {_CONSTRAINTS}",
    "structural_tag": f"give the constraint with {_CONSTRAINTS}",
    "use_beam_search": "beam search is not available; use n with sampling",
}


class StreamOptions(Struct, frozen=True):
    """`continuous_usage_stats` puts the usage so far on every chunk, `include_usage` adds a last chunk with it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(Struct, kw_only=True, frozen=True):
    """What every generating endpoint takes, whatever its protocol."""

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
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    request_id: RequestId | None = None
    stream: bool | None = None


class SamplingFields(CommonFields, kw_only=True, frozen=True):
    """The shared fields, with vLLM's names; `regex`, `ebnf`, `json_schema` and `no_stop_trim` are SGLang's.

    `user`, `metadata`, `store`, `service_tier`, `prompt_cache_key` and `safety_identifier` are accepted and have no
    effect.

    Raises (in construction):
        ApiError: 400 where fields contradict each other.
    """

    REFUSED: ClassVar[Mapping[str, str]] = REMOVED_FIELDS
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    allowed_token_ids: Annotated[list[Count], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    stop: StopString | StopStrings | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage_stats(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """The most tokens to generate, None if not asked, and the name of the field that says so."""
        return self.max_tokens, "max_tokens"

    @property
    def logprobs_limit(self) -> tuple[int | None, str]:
        """How many alternatives per generated token, None for no logprobs, and the name of the field."""
        return None, "logprobs"
