"""What runs a step: `Runner`, the interface that `engine.worker` is typed against, and the step's result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from pellucid.core import PellucidError, Request, TokenLogprobs
from pellucid.runner.sampler import Constraint, SampledToken
from pellucid.step_plan import StepPlan

if TYPE_CHECKING:
    import torch

PendingStep = TypeVar("PendingStep")
"""A launched step, never None. What is in it is the runner's own affair."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced, by request id. A row to sample is in `sampled`, or in `failed` with the reason.

    `ended` are the requests whose constraint took the token as the end of the output.
    `prompt_logprobs`: entry i belongs to the token after the i-th row of this step. `hidden`: rows of this step,
    [rows, captured layers * hidden], in the order of `ModelRunner.capture`.
    """

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    failed: dict[str, PellucidError] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    hidden: dict[str, torch.Tensor] = field(default_factory=dict)


# Two steps in flight, n + 1 launched while n computes:
#
#      host    | launch n | launch n+1 | collect n ... commit n, outputs of n | launch n+2 | collect n+1 ...
#      device             [          n          )[             n+1             )[           n+2
#
# Between its launch and its collect, any request of a step may end, and its id may even be given to a new request.
class Runner(Protocol[PendingStep]):
    """Launches steps and collects their results, in the order of the plans.

    Steps are computed one after the other, as they were launched: what a step writes, every later one reads. Pages that
    a step writes in vain may be another request's in the step after it.
    """

    def add_request(self, request: Request, constraint: Constraint | None = None) -> None:
        """Start keeping sampling state."""
        ...

    def remove_request(self, request_id: str) -> None:
        """Forget a request, of which steps in flight may have rows. Unknown ids are ignored."""
        ...

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Whether the step after `plan` may be launched before `plan` is collected.

        If so, its rows may have `UNKNOWN_TOKEN` for the tokens that `plan` samples. False when the host must see a
        result of `plan` first, as where it samples itself, or where a constraint must follow a token.
        """
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin a step, and do not wait for it where the next one may run ahead of it.

        What can't begin before the step in flight is collected may begin in `collect`.
        """
        ...

    def collect(self, pending: PendingStep) -> StepResult:
        """The results of a launched step, for the requests of its launch; those removed since may be missing.

        A step in which nobody is left is never collected, nor are those in flight when `launch` or `collect` raises.
        """
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """`collect(launch(plan))`: for a step that no other runs ahead of."""
        ...
