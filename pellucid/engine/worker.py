"""The step loop: the only place that ties the scheduler to the runner. Driven by `engine.engine`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pellucid.core import InvalidRequestError, Request, StructuredOutputs
from pellucid.engine.step_output import RequestFailure, StepOutput
from pellucid.runner.base import Runner, StepResult
from pellucid.runner.sampler import Constraint
from pellucid.scheduler.scheduler import Scheduler
from pellucid.step_plan import SchedulerStats, SequenceUpdate, StepPlan


@dataclass(slots=True)
class _Step:
    """A plan in flight. `live` are the requests that still want its rows; `pending` is None before its launch."""

    plan: StepPlan
    live: set[str]
    pending: Any = None


class Worker:
    """One rank: plans, runs and commits steps. A request is known to scheduler and runner or to neither.

    Where the runner can, a step is launched before the one in flight is collected. Requests that end meanwhile have
    rows there still, of which nothing is told.

    `compile_constraint` makes the constraint of one sample, and is quick for a form that it has seen; None where
    structured outputs can't be had.

    Attributes:
        last_step_tokens: tokens that the latest step computed.
        dropped: the requests that were in flight in the latest step which raised; it has ended them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Any],
        compile_constraint: Callable[[StructuredOutputs], Constraint] | None = None,
    ) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._compile_constraint = compile_constraint
        self._in_flight: deque[_Step] = deque()
        self._scheduled: dict[str, float] = {}
        self.last_step_tokens = 0
        self.dropped: tuple[str, ...] = ()

    def add_request(self, request: Request) -> None:
        """Raises InvalidRequestError, and keeps nothing, when the request can never be served."""
        constraint = self._constraint(request)
        # A step in flight may still compute a row of an ended one by this name; a runner computes steps in order.
        self._scheduler.forget_ended(request.request_id)
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
        self._forget(request_id)
        known = self._scheduler.abort(request_id)
        self._abandon_deserted()
        return known

    def finish(self, request_id: str, stop_string: str) -> None:
        """A stop string was found in the request's text."""
        self._forget(request_id)
        self._scheduler.finish(request_id, stop_string)
        self._abandon_deserted()

    @property
    def runner(self) -> Runner[Any]:
        return self._runner

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    def step(self) -> list[StepOutput]:
        """The results of one step of the model, or nothing when no request is unfinished.

        Where the runner can run ahead, the step after it is launched first, and is in flight when this returns.
        A step that raises (a kernel failed, or Ctrl-C) ends the requests in flight; the worker can go on.
        """
        step = self._in_flight[0] if self._in_flight else self._register(self._scheduler.plan_step())
        if step is None:
            return []
        self.last_step_tokens = step.plan.num_tokens
        try:
            return self._commit(step, self._run(step))
        except BaseException:
            self._drop()
            raise

    def _register(self, plan: StepPlan | None) -> _Step | None:
        """Count a plan as in flight before it is launched: a launch that raises ends its requests too."""
        if plan is None:
            return None
        now = time.monotonic()
        for row in plan.scheduled:
            if row.is_prefill:
                self._scheduled.setdefault(row.request_id, now)
        self._in_flight.append(_Step(plan, {row.request_id for row in plan.scheduled}))
        return self._in_flight[-1]

    def _run(self, step: _Step) -> StepResult:
        """The result of the oldest step, once the one after it is launched if that can be."""
        if self._runner.can_run_ahead(step.plan):
            if step.pending is None:
                step.pending = self._runner.launch(step.plan)
            ahead = self._register(self._scheduler.plan_ahead())
            if ahead is not None:
                ahead.pending = self._runner.launch(ahead.plan)
        return self._runner.step(step.plan) if step.pending is None else self._runner.collect(step.pending)

    def _commit(self, step: _Step, result: StepResult) -> list[StepOutput]:
        """End what failed, let the scheduler take the tokens, and tell what came of every row that is still wanted."""
        failed = {request_id: error for request_id, error in result.failed.items() if request_id in step.live}
        for request_id in failed:
            self._forget(request_id)
            self._scheduler.abort(request_id)
        tokens = {request_id: token.token_id for request_id, token in result.sampled.items()}
        updates = {update.request_id: update for update in self._scheduler.commit(step.plan, tokens)}
        self._in_flight.popleft()
        outputs = []
        for row in step.plan.scheduled:
            if row.request_id in failed:
                failure = RequestFailure.of(failed[row.request_id])
                outputs.append(StepOutput(row.request_id, row.start, finish_reason="abort", failure=failure))
                continue
            update = updates.get(row.request_id)
            prompt_logprobs = tuple(result.prompt_logprobs.get(row.request_id, ()))
            hidden = result.hidden.get(row.request_id)
            if row.request_id not in step.live or (update is None and not prompt_logprobs and hidden is None):
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
                self._forget(row.request_id)
        self._abandon_deserted()
        return outputs

    def _forget(self, request_id: str) -> None:
        """Of a request that ends: what the steps in flight compute for it is nobody's."""
        self._runner.remove_request(request_id)
        self._scheduled.pop(request_id, None)
        for step in self._in_flight:
            step.live.discard(request_id)

    def _abandon_deserted(self) -> None:
        """Free the pages of a step in flight in which nobody is left, without waiting for it."""
        while self._in_flight and not self._in_flight[0].live:
            self._scheduler.commit(self._in_flight.popleft().plan, {})

    def _drop(self) -> None:
        """End the requests of the steps in flight, which give no result, and free their pages."""
        steps = list(self._in_flight)
        self.dropped = tuple(
            dict.fromkeys(row.request_id for s in steps for row in s.plan.scheduled if row.request_id in s.live)
        )
        self._in_flight.clear()
        for request_id in self.dropped:
            self.abort(request_id)
        self._scheduler.drop_in_flight()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def check_conservation(self) -> None:
        """Raises ConservationError unless free + cached + held pages are all pages."""
        self._scheduler.check_conservation()
