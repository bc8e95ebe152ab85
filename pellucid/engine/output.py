"""From sampled tokens to text: one `OutputBuilder` per request. Used by `engine.engine`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from pellucid.core import (
    CompletionOutput,
    FinishReason,
    PellucidError,
    Request,
    RequestMetrics,
    TokenLogprobs,
)
from pellucid.engine.step_output import StepOutput
from pellucid.tokenizer.detokenizer import IncrementalDetokenizer
from pellucid.tokenizer.stop_strings import StopAutomaton, StopStringMatcher
from pellucid.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


class TextDelta(NamedTuple):
    """What became visible of one sample after a step. `text` may be empty while a stop string may be forming.

    `finish_reason` is set on the last delta of a sample, with its `metrics`. It is "abort" when the sample could not
    go on, and `error` says why.
    """

    request_id: str
    index: int  # type: ignore[assignment]
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = None
    error: PellucidError | None = None


class OutputBuilder:
    """Collects one sample: text, tokens, logprobs, prompt rows, times."""

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        *,
        stops: StopAutomaton,
        continues_text: bool,
        group_id: str | None = None,
    ) -> None:
        """`stops`: of the request's stop strings, shared by its samples. `continues_text`: the prompt was text, and the
        output goes on where it ends. `group_id` is for the deltas."""
        params = request.params
        self.request, self.index = request, index
        self._group_id = request.request_id if group_id is None else group_id
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, params.skip_special_tokens, continues_text=continues_text
            )
        self._stops = StopStringMatcher(stops, params.include_stop_str_in_output)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._hidden: dict[int, torch.Tensor] = {}
        self._text: list[str] = []
        self._scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.metrics = RequestMetrics(request.arrival_time)

    def push(self, output: StepOutput) -> TextDelta:
        """Take one step's output. When a stop string completed, `finish_reason` is "stop" and the caller must end
        the request in the worker."""
        if output.prompt_logprobs:
            # By position: after a preemption the same rows are computed, and sent, again.
            self.prompt_logprobs[output.start : output.start + len(output.prompt_logprobs)] = output.prompt_logprobs
        if output.hidden is not None:
            self._hidden[output.start] = output.hidden
        new_ids: tuple[int, ...] = ()
        text = ""
        if output.token_id is not None:
            if self._first_token_time is None:
                self._first_token_time = time.monotonic()
                self._scheduled_time = output.scheduled_time
            new_ids = (output.token_id,)
            self.token_ids.append(output.token_id)
            if output.logprobs is not None:
                self.logprobs.append(output.logprobs)
            if self._is_shown(output):
                text = self._add_text(new_ids)
        finish, reason = output.finish_reason, output.stop_reason
        if finish is not None and self._stops.matched is None:
            text += self._flush()
        if self._stops.matched is not None:
            finish, reason = "stop", self._stops.matched
        if finish is not None:
            self._finish(finish, reason, output)
        self._text.append(text)
        if finish is None and output.logprobs is None:
            # The usual token.
            return TextDelta(self._group_id, self.index, text, new_ids)
        logprobs = (output.logprobs,) if output.logprobs is not None else ()
        metrics = self.metrics if finish is not None else None
        error = None if output.failure is None else output.failure.as_exception()
        return TextDelta(self._group_id, self.index, text, new_ids, logprobs, finish, reason, metrics, error)

    def result(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.request.params.logprobs is None else tuple(self.logprobs),
            metrics=self.metrics,
        )

    def hidden_rows(self) -> torch.Tensor:
        """[prompt tokens, width]: one row per prompt position."""
        import torch

        count = len(self.request.prompt_token_ids)
        width = next(iter(self._hidden.values())).shape[-1]
        rows = torch.empty(count, width)
        for start, part in self._hidden.items():
            rows[start : start + part.shape[0]] = part[: max(count - start, 0)].float()
        return rows

    def _is_shown(self, output: StepOutput) -> bool:
        """A token that ended the request by its id is not text, unless asked for."""
        ended_by_id = output.finish_reason == "stop"
        return not ended_by_id or self.request.params.include_stop_str_in_output

    def _add_text(self, ids: tuple[int, ...]) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(ids)
        # The text of the first `min_tokens` tokens never holds a stop string, nor the beginning of one.
        return text if len(self.token_ids) <= self.request.params.min_tokens else self._stops.push(text)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        return text if self._stops.matched is not None else text + self._stops.flush()

    def _finish(self, finish: FinishReason, reason: str | int | None, output: StepOutput) -> None:
        self.finish_reason, self.stop_reason = finish, reason
        self.metrics = RequestMetrics(
            self.request.arrival_time,
            scheduled_time=self._scheduled_time,
            first_token_time=self._first_token_time,
            finish_time=time.monotonic(),
            cached_prompt_tokens=output.cached_prompt_tokens,
            preemptions=output.preemptions,
        )
