"""`StepOutput`: what one step did for one request. Made by the worker, crosses processes as it is, read by `output`."""

from __future__ import annotations

from typing import Any, NamedTuple

from pellucid.core import FinishReason, InvalidRequestError, PellucidError, TokenLogprobs


class RequestFailure(NamedTuple):
    """Why one request could not be served or go on. `param` names the field at fault, if the request is at fault."""

    message: str
    param: str | None = None
    is_callers: bool = False

    @classmethod
    def of(cls, error: PellucidError) -> RequestFailure:
        callers = isinstance(error, InvalidRequestError)
        return cls(str(error), error.param if isinstance(error, InvalidRequestError) else None, callers)

    def as_exception(self) -> PellucidError:
        return InvalidRequestError(self.message, self.param) if self.is_callers else PellucidError(self.message)


class StepOutput(NamedTuple):
    """`token_id` is None for a prefill chunk, or when nothing was sampled.

    `prompt_logprobs` and `hidden` belong to this step's rows, the first of which is position `start`. After a
    preemption positions come again, and rows past the prompt may come with them. `failure` is why this request alone
    could not go on; it has ended with "abort". `scheduled_time` (monotonic seconds) is when a step first computed
    tokens of the request; it comes with its first output. `hidden` is a tensor [rows, captured layers * width], typed
    loosely because messages know no torch; it never leaves its process.
    """

    request_id: str
    start: int = 0
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    scheduled_time: float | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    failure: RequestFailure | None = None
    hidden: Any = None
