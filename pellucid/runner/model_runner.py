"""One model on one device: builds it, runs a step, samples. Called by `engine.worker` with the scheduler's plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import AttentionBackend
from pellucid.core import PellucidError, Request, TokenLogprobs
from pellucid.kernels.context import KernelContext
from pellucid.kvcache.pool import KVPool
from pellucid.layers.batch import ForwardBatch
from pellucid.models.loading import load_decoder
from pellucid.models.weights import ProgressCallback
from pellucid.quantization.weight import dtype_of
from pellucid.runner.backends import create_backends
from pellucid.runner.base import StepResult
from pellucid.runner.forward_batch import build_forward_batch
from pellucid.runner.sampler import Constraint, SampledToken, SamplingState, logprobs_of, sample
from pellucid.selection.plan import ExecutionPlan
from pellucid.step_plan import ScheduledSequence, StepPlan
from pellucid.traits.backend import Phase
from pellucid.traits.model import ModelTraits
from pellucid.traits.tensors import TensorIndex

if TYPE_CHECKING:
    import torch


__all__ = ["ModelRunner", "StepResult"]


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose forward pass is launched and whose rows are not sampled.

    `states`: of each row, as it was at the launch; None where the request had ended. `wants_all`: requests whose every
    row has logits.
    """

    plan: StepPlan
    states: list[SamplingState | None]
    wants_all: frozenset[str]
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class ModelRunner:
    """The decoder, its KV pool and the sampling state of live requests.

    `capture`: 0-based layers whose output is returned for requests with `capture_hidden`.

    Raises:
        CheckpointError: the tensors do not make the model that the traits describe.
        PellucidError: a backend of the plan can't be built.
    """

    def __init__(
        self,
        traits: ModelTraits,
        tensors: TensorIndex,
        plan: ExecutionPlan,
        capture: Sequence[int] = (),
        on_progress: ProgressCallback | None = None,
    ) -> None:
        import torch

        if plan.device == "cpu" and plan.decision("threads").how == "asked":
            # Process-wide, so only on request: our own kernels have their own threads.
            torch.set_num_threads(plan.threads)
        self.device = torch.device(plan.device)
        self.plan, self.traits, self.capture = plan, traits, tuple(capture)
        self.context = KernelContext(self.device, dtype_of(plan.dtype), plan.threads)
        backends = create_backends(plan, self.context)
        self._attention = backends.attention
        self.model = load_decoder(traits, tensors, backends.layers, plan.max_model_len, on_progress)
        self.pool = KVPool(
            traits.attention, traits.num_layers, plan.num_kv_pages, plan.page_size, dtype_of(plan.kv_dtype), self.device
        )
        self._states: dict[str, SamplingState] = {}
        self._unseeded = 0

    def add_request(self, request: Request, constraint: Constraint | None = None) -> None:
        """Start keeping sampling state. A request without a seed gets one of its own from the engine's.

        `constraint` is this request's alone. It follows tokens as they are sampled; a preemption computes them again,
        but never samples them again.
        """
        seed = request.params.seed
        if seed is None:
            self._unseeded += 1
            seed = self.plan.seed * 1_000_003 + self._unseeded
        self._states[request.request_id] = SamplingState(request, seed, constraint)

    def remove_request(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def state(self, request_id: str) -> SamplingState | None:
        """Of a live request."""
        return self._states.get(request_id)

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """False: tokens are sampled by the host."""
        return False

    def step(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows, write their KV, and sample where the plan says so."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> ComputedStep:
        """Compute the plan's rows and write their KV."""
        import torch

        live = [self._states.get(row.request_id) for row in plan.scheduled]
        wants_all = frozenset(
            s.request.request_id for s in live if s is not None and s.params.prompt_logprobs is not None
        )
        wants_hidden = any(s is not None and s.request.capture_hidden for s in live)
        with torch.inference_mode():
            output = self.model.forward(self.batch(plan, wants_all), self.capture if wants_hidden else ())
        return ComputedStep(plan, live, wants_all, output.logits, output.hidden)

    def batch(self, plan: StepPlan, wants_all: frozenset[str] = frozenset()) -> ForwardBatch:
        """What the decoder reads of a plan. `wants_all` as in `ComputedStep`."""
        decode, prefill = max(plan.num_decode, 1), max(plan.num_tokens - plan.num_decode, 1)
        backends = (self.attention_backend("decode", decode), self.attention_backend("prefill", prefill))
        return build_forward_batch(plan, self.pool, self.device, *backends, wants_all)

    def attention_backend(self, phase: Phase, tokens: int) -> AttentionBackend:
        """The plan's, for so many tokens of a phase."""
        return self._attention[phase, self.plan.backend(f"attention.{phase}", tokens)]

    def collect(self, pending: ComputedStep) -> StepResult:
        """Hand every row's results to its request, and sample where the plan says so."""
        import torch

        with torch.inference_mode():
            return _results(pending)


def _results(pending: ComputedStep) -> StepResult:
    import torch

    logits, hidden, wants_all = pending.logits, pending.hidden, pending.wants_all
    result = StepResult()
    chosen_rows, states = [], []
    row = logit = 0
    for scheduled, state in zip(pending.plan.scheduled, pending.states, strict=True):
        count = len(scheduled.token_ids)
        taken = count if scheduled.request_id in wants_all else int(scheduled.sample)
        if state is not None and scheduled.request_id in wants_all:
            result.prompt_logprobs[scheduled.request_id] = _prompt_logprobs(
                logits[logit : logit + count], scheduled, state
            )
        if state is not None and hidden and state.request.capture_hidden:
            result.hidden[scheduled.request_id] = torch.cat([h[row : row + count] for h in hidden], dim=-1)
        row, logit = row + count, logit + taken
        if state is not None and scheduled.sample:
            chosen_rows.append(logit - 1)
            states.append(state)
    if states:
        picked = logits if len(chosen_rows) == logits.shape[0] else logits[chosen_rows]
        for state, found in zip(states, sample(picked, states), strict=True):
            keep(state, found, result)
    return result


def keep(state: SamplingState, found: SampledToken | PellucidError, result: StepResult) -> None:
    """Put what was sampled into the state and the result."""
    request_id = state.request.request_id
    if isinstance(found, SampledToken):
        try:
            state.append(found.token_id)
        except PellucidError as error:
            found = error
    if isinstance(found, PellucidError):
        result.failed[request_id] = found
        return
    result.sampled[request_id] = found
    if state.constraint is not None and state.constraint.finished:
        result.ended.add(request_id)


def _prompt_logprobs(logits: torch.Tensor, row: ScheduledSequence, state: SamplingState) -> list[TokenLogprobs]:
    """Logprobs of the prompt tokens that follow the positions of this row."""
    prompt, count = state.request.prompt_token_ids, state.params.prompt_logprobs or 0
    following = prompt[row.start + 1 : row.start + 1 + logits.shape[0]]
    return [logprobs_of(values, token, count) for values, token in zip(logits, following, strict=False)]
