"""The step loop: the only place that ties the scheduler to the runner. Driven by `engine.engine`."""

from __future__ import annotations

import time
from collections.abc import Callable

from pellucid.core import InvalidRequestError, Request, StructuredOutputs
from pellucid.engine.step_output import RequestFailure, StepOutput
from pellucid.runner.model_runner import ModelRunner
from pellucid.runner.sampler import Constraint
from pellucid.scheduler.scheduler import Scheduler
from pellucid.step_plan import SchedulerStats, SequenceUpdate, StepPlan


class Worker:
    """One rank: plans, runs and commits steps. A request is known to scheduler and runner or to neither.

    `compile_constraint` makes the constraint of one sample, and is quick for a form that it has seen; None where
    structured outputs can't be had.

    Attributes:
        last_step_tokens: tokens that the latest step computed.
        dropped: the requests that the latest step which raised has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        compile_constraint: Callable[[StructuredOutputs], Constraint] | None = None,
    ) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._compile_constraint = compile_constraint
        self._scheduled: dict[str, float] = {}
        self.last_step_tokens = 0
        self.dropped: tuple[str, ...] = ()

    def add_request(self, request: Request) -> None:
        """Raises InvalidRequestError, and keeps nothing, when the request can never be served."""
        constraint = self._constraint(request)
        self._scheduler.add_request(request)
        self._runner.add_request(request, constraint)

    def _constraint(self, request: Request) -> Constraint | None:
        outputs = request.params.structured_outputs
        if outputs is None:
            return None
        if self._compile_constraint is None:
            raise InvalidRequestError(
                "structured outputs need a tokenizer and llguidance: pip install 'pellucid[serve]'",
                "structured_outputs",
            )
        return self._compile_constraint(outputs)

    def abort(self, request_id: str) -> bool:
        """False when there is no such request."""
        self._runner.remove_request(request_id)
        self._scheduled.pop(request_id, None)
        return self._scheduler.abort(request_id)

    def finish(self, request_id: str, stop_string: str) -> None:
        """A stop string was found in the request's text."""
        self._runner.remove_request(request_id)
        self._scheduled.pop(request_id, None)
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
        self.last_step_tokens = plan.num_tokens
        now = time.monotonic()
        for row in plan.scheduled:
            if row.is_prefill:
                self._scheduled.setdefault(row.request_id, now)
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
                failure = RequestFailure.of(result.failed[row.request_id])
                outputs.append(StepOutput(row.request_id, row.start, finish_reason="abort", failure=failure))
                continue
            update = updates.get(row.request_id)
            prompt_logprobs = tuple(result.prompt_logprobs.get(row.request_id, ()))
            hidden = result.hidden.get(row.request_id)
            if update is None and not prompt_logprobs and hidden is None:
                continue
            update = update or SequenceUpdate(row.request_id, None, None, None, 0, 0)
            if row.request_id in result.ended:
                # A complete output has ended, also where `ignore_eos` or `min_tokens` keep the scheduler from it.
                self._scheduler.abort(row.request_id)
                update = update._replace(finish_reason="stop")
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
                    self._scheduled.pop(row.request_id, None) if update.token_id is not None else None,
                    prompt_logprobs,
                    None,
                    hidden,
                )
            )
            if update.finish_reason is not None:
                self._runner.remove_request(row.request_id)
                self._scheduled.pop(row.request_id, None)
        return outputs

    def _drop(self, plan: StepPlan) -> None:
        """End the requests of a step that gave no result, and free their pages."""
        self.dropped = tuple(row.request_id for row in plan.scheduled)
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
