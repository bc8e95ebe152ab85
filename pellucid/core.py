"""Requests, sampling parameters, outputs and errors: the plain values every layer shares.

Imports nothing of the package and no torch, so that `import pellucid` stays instant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]

MAX_INT = 2**63 - 1
"""What crosses from process to process: 64 bits."""

MAX_LOGPROBS = 64
"""Most alternatives per position that `logprobs` may ask for."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
"""Most stop strings of a request, and the characters that each may have: every character is a state to keep."""


class PellucidError(Exception):
    """A failure the user can act on: one line that names the thing and the remedy.

    The CLI prints it without a traceback and exits with `exit_code`.
    """

    exit_code = 2


class InvalidRequestError(PellucidError):
    """A request that can never be served as asked. `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are longer than the model's context, or than the KV pool."""


class UnsupportedModelError(PellucidError):
    """The model needs a trait that this version does not have. `trait` names it."""

    def __init__(self, message: str, trait: str | None = None) -> None:
        super().__init__(message)
        self.trait = trait


class CheckpointError(PellucidError):
    """A checkpoint file is missing, truncated, or disagrees with its config."""


class PlanError(PellucidError):
    """A flag asks for something that does not fit the model or the hardware."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an output must have. Exactly one field is set.

    `json` is a JSON schema as JSON text ("{}" or "true": any JSON). `regex` must match the whole output. `choice` lists
    the outputs to choose from. `grammar` is in llguidance's dialect of Lark, or in GBNF (with a rule `root ::=`).

    Raises:
        InvalidRequestError: none is set, several are, or one is empty. Whether it can be followed is for the engine to
            say, which knows the vocabulary.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        def refuse(reason: str) -> InvalidRequestError:
            return InvalidRequestError(f"structured_outputs: {reason}", "structured_outputs")

        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise refuse(f"set exactly one of {', '.join(names)}; got {', '.join(given) or 'none'}")
        name, value = given[0], getattr(self, given[0])
        if name == "choice":
            if isinstance(value, str) or not all(isinstance(text, str) for text in value):
                raise refuse("choice is a list of strings")
            object.__setattr__(self, "choice", tuple(value))
            if not value or not all(value):
                raise refuse("choice must have at least one string, and none that is empty")
        elif name == "json_object":
            if value is not True:
                raise refuse(f"json_object must be true or false, got {value!r}")
        elif not isinstance(value, str):
            raise refuse(f"{name} must be text, got {type(value).__name__}")
        elif not value.strip():
            raise refuse(f"{name} must not be empty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop. Names and defaults as in vLLM.

    `temperature=0` is greedy. `top_k=0` (or -1) and `top_p=1` are off. `max_tokens=None` means up to the
    context length, the default is vLLM's. `seed` makes a request reproducible whatever it is batched with.
    Token ids given twice count once. There are at most `MAX_STOP_STRINGS` stop strings of `MAX_STOP_CHARS` characters.
    With `structured_outputs`, `min_tokens` and `ignore_eos` put off the end only while the output's form lets it go on.

    Raises:
        InvalidRequestError: a value outside its range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        # None, or one stop string without its tuple, as OpenAI's API allows.
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop or ()))
        object.__setattr__(self, "stop_token_ids", _distinct(self.stop_token_ids or (), "stop_token_ids"))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _distinct(self.allowed_token_ids, "allowed_token_ids"))
        # -1 is vLLM's other way to say "all".
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name, kind, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (_is_number(value, kind) and low <= value <= high):
                noun = "an integer" if kind is int else "a number"
                raise InvalidRequestError(f"{name} must be {noun} in [{low:g}, {high:g}], got {value!r}", name)
        if not self.repetition_penalty > 0:
            raise InvalidRequestError(
                f"repetition_penalty must be above 0, got {self.repetition_penalty!r}", "repetition_penalty"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", "min_tokens"
            )
        _check_stop_strings(self.stop)
        for token_id, bias in self.logit_bias.items():
            # Minus infinity bans a token; plus infinity would leave the others no probability to speak of.
            if not _is_number(bias, float) or bias == math.inf:
                raise InvalidRequestError(f"logit_bias[{token_id}] must be a number, got {bias!r}", "logit_bias")
        if self.allowed_token_ids == ():
            raise InvalidRequestError("allowed_token_ids must not be empty", "allowed_token_ids")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside `[0, vocab_size)`: on a GPU they would be a device assert.

        Raises:
            InvalidRequestError: `param` names the field that holds the id.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                check_token_id(token_id, vocab_size, name)

    def single(self, index: int) -> SamplingParams:
        """The parameters of the `index`-th of `n` samples: n=1, a seed of its own if seeded, the prompt scored once."""
        # Seeds are 64 bits and wrap around.
        seed = None if self.seed is None else (self.seed + index + MAX_INT + 1) % 2**64 - MAX_INT - 1
        sample = copy(self)
        # Not `replace`, which would check, and copy, long lists of ids for every sample.
        for name, value in (("n", 1), ("seed", seed), ("prompt_logprobs", None if index else self.prompt_logprobs)):
            object.__setattr__(sample, name, value)
        return sample


_RANGES: tuple[tuple[str, type, float, float], ...] = (
    ("n", int, 1, 128),
    ("temperature", float, 0.0, 100.0),
    ("top_p", float, 1e-6, 1.0),
    ("top_k", int, 0, MAX_INT),
    ("min_p", float, 0.0, 1.0),
    ("repetition_penalty", float, 0.0, 100.0),
    ("presence_penalty", float, -2.0, 2.0),
    ("frequency_penalty", float, -2.0, 2.0),
    ("min_tokens", int, 0, MAX_INT),
    ("max_tokens", int, 0, MAX_INT),
    ("logprobs", int, 0, MAX_LOGPROBS),
    ("prompt_logprobs", int, 0, MAX_LOGPROBS),
    ("seed", int, -MAX_INT - 1, MAX_INT),
)


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    return isinstance(value, int) or not math.isnan(value)


def _distinct(token_ids: Iterable[int], param: str) -> tuple[int, ...]:
    """In the order given. Whether they are ids of the vocabulary is for `check_vocabulary` to say."""
    try:
        return tuple(dict.fromkeys(token_ids))
    except TypeError:
        raise InvalidRequestError(f"{param}: token ids are a list of integers", param) from None


def _check_stop_strings(stops: tuple[str, ...]) -> None:
    if not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequestError("stop strings must be text", "stop")
    if not all(stops):
        raise InvalidRequestError("stop strings must not be empty", "stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop may have {MAX_STOP_STRINGS} strings, got {len(stops)}", "stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise InvalidRequestError(f"a stop string may have {MAX_STOP_CHARS} characters, got {longest}", "stop")


def check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError unless `token_id` is an integer in `[0, vocab_size)`."""
    if not isinstance(token_id, int) or isinstance(token_id, bool):
        raise InvalidRequestError(f"{param}: token ids are integers, got {token_id!r}", param)
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(f"{param}: token id {token_id} is outside the vocabulary [0, {vocab_size})", param)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, as the engine takes it. `params.n` is 1 here.

    `eos_token_ids` end it unless `params.ignore_eos`. `cache_salt` is part of the prefix cache's key:
    requests with different salts never share KV. `capture_hidden` asks for hidden-state rows of every
    prompt token (which turns the prefix cache off for this request's reads).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    capture_hidden: bool = False
    arrival_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """One alternative at one position. `rank` is 1 for the most likely token."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token taken (or given, in a prompt) and the most likely alternatives, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds on one monotonic clock. `decode_tok_s` excludes the first token.

    `scheduled_time` is when a step first computed tokens of the request.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    cached_prompt_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    def decode_tok_s(self, output_tokens: int) -> float | None:
        """Output tokens after the first, per second between the first token and the last."""
        if self.finish_time is None or self.first_token_time is None or output_tokens < 2:
            return None
        return (output_tokens - 1) / max(self.finish_time - self.first_token_time, 1e-9)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` samples of a prompt. `stop_reason` is the stop string or token id that ended it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
