"""The bench of real backends: answers questions on ops, projections and steps of a model. Runs in `Probe`'s child."""

from __future__ import annotations

from typing import Any

from pellucid.selection.evidence import is_tile_op
from pellucid.selection.plan import ExecutionPlan
from pellucid.traits.model import ModelTraits
from pellucid.traits.tensors import TensorIndex
from pellucid.tuning.measure import Question
from pellucid.tuning.store import APART
from pellucid.tuning.timing import Timer


class Workbench:
    """Implements `gate.Bench`. `plan` is that of the fixed order; `tensors` those of the checkpoint, if there is one.

    It keeps what the last question needs, and nothing of those before: a card holds one layer of it at a time. Without
    `keeps`, nothing outlasts a check: many beside each other hold little.
    """

    def __init__(
        self, traits: ModelTraits, plan: ExecutionPlan, tensors: TensorIndex | None = None, keeps: bool = True
    ) -> None:
        self._keeps = keeps
        self._traits, self._plan, self._tensors = traits, plan, tensors
        self._question: Question | None = None
        self._problem: Any = None
        self._steps: Any = None
        self._timers: dict[str, Timer] = {}

    def start(self) -> None:
        import torch

        if self._plan.device == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
        elif self._plan.decision("threads").how == "asked":
            torch.set_num_threads(self._plan.threads)

    def check(self, question: Question, candidate: str) -> str:
        """As `Bench.check`; the device is waited for, so that what fails there fails here."""
        import torch

        self._turn_to(question)
        with torch.inference_mode():
            wrong = str(
                self._steps.check(question, candidate) if self._whole(question) else self._problem.check(candidate)
            )
        if self._plan.device == "cuda":
            torch.cuda.synchronize()
        if not self._keeps:
            self._forget()
        return wrong

    def sample(self, question: Question, candidate: str) -> float:
        import torch

        self._turn_to(question)
        with torch.inference_mode():
            if candidate not in self._timers:
                self._timers[candidate] = (
                    self._steps.timer(question, candidate) if self._whole(question) else self._problem.timer(candidate)
                )
            return self._timers[candidate].sample()

    def _whole(self, question: Question) -> bool:
        return question.op.startswith("step.") or is_tile_op(question.op)

    def _forget(self) -> None:
        self._timers, self._problem, self._question = {}, None, None
        if self._plan.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _turn_to(self, question: Question) -> None:
        if question == self._question:
            return
        self._forget()
        self._question = question
        if self._whole(question):
            if self._steps is None:
                from pellucid.tuning.steps import Steps

                self._steps = Steps(self._traits, self._plan, self._tensors)
        elif question.op.startswith(APART):
            from pellucid.tuning.steps import Apart

            self._problem = Apart(question, self._plan)
        else:
            from pellucid.tuning.problems import make_problem

            self._problem = make_problem(question, self._traits, self._plan)
