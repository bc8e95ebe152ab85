"""The step loop: the only place that ties the scheduler to the runner. Driven by `engine.engine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.core import FinishReason, PellucidError, Request, TokenLogprobs
from pellucid.runner.model_runner import ModelRunner
from pellucid.scheduler.scheduler import Scheduler
from pellucid.step_plan import SchedulerStats, SequenceUpdate, StepPlan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one request. `token_id` is None for a prefill chunk, or when nothing was sampled.

    `prompt_logprobs` and `hidden` belong to this step's rows, the first of which is position `start`. After a
    preemption positions come again, and rows past the prompt may come with them. `error` is why this request alone
    could not go on; it has ended with "abort".
    """

    request_id: str
    start: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: torch.Tensor | None = None
    error: PellucidError | None = None


class Worker:
    """One rank: plans, runs and commits steps. A request is known to scheduler and runner or to neither."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._scheduler, self._runner = scheduler, runner

    def add_request(self, request: Request) -> None:
        """Raises InvalidRequestError, and keeps nothing, when the request can never be served."""
        self._scheduler.add_request(request)
        self._runner.add_request(request)

    def abort(self, request_id: str) -> bool:
        """False when there is no such request."""
        self._runner.remove_request(request_id)
        return self._scheduler.abort(request_id)

    def finish(self, request_id: str, stop_string: str) -> None:
        """A stop string was found in the request's text."""
        self._runner.remove_request(request_id)
        self._scheduler.finish(request_id, stop_string)

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    def step(self) -> list[StepOutput]:
        """One step of the model, or nothing when no request is unfinished.

        A step that raises (a kernel failed, or Ctrl-C) ends the requests it computed; the worker can go on.
        """
        plan = self._scheduler.plan_step()
        if plan is None:
            return []
        try:
            result = self._runner.step(plan)
        except BaseException:
            self._drop(plan)
            raise
        for request_id in result.failed:
            self.abort(request_id)
        tokens = {request_id: token.token_id for request_id, token in result.sampled.items()}
        # The scheduler passes over requests that have ended, but asks for a token of every row.
        tokens |= dict.fromkeys(result.failed, 0)
        updates = {update.request_id: update for update in self._scheduler.commit(plan, tokens)}
        outputs = []
        for row in plan.scheduled:
            if row.request_id in result.failed:
                error = result.failed[row.request_id]
                outputs.append(StepOutput(row.request_id, row.start, finish_reason="abort", error=error))
                continue
            update = updates.get(row.request_id)
            prompt_logprobs = tuple(result.prompt_logprobs.get(row.request_id, ()))
            hidden = result.hidden.get(row.request_id)
            if update is None and not prompt_logprobs and hidden is None:
                continue
            update = update or SequenceUpdate(row.request_id, None, None, None, 0, 0)
            sampled = result.sampled.get(row.request_id)
            outputs.append(
                StepOutput(
                    row.request_id,
                    row.start,
                    update.token_id,
                    None if sampled is None else sampled.logprobs,
                    update.finish_reason,
                    update.stop_reason,
                    update.cached_prompt_tokens,
                    update.preemptions,
                    prompt_logprobs,
                    hidden,
                )
            )
            if update.finish_reason is not None:
                self._runner.remove_request(row.request_id)
        return outputs

    def _drop(self, plan: StepPlan) -> None:
        """End the requests of a step that gave no result, and free their pages."""
        for row in plan.scheduled:
            self.abort(row.request_id)
        self._scheduler.commit(plan, dict.fromkeys((row.request_id for row in plan.scheduled), 0))

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def check_conservation(self) -> None:
        """Raises ConservationError unless free + cached + held pages are all pages."""
        self._scheduler.check_conservation()
