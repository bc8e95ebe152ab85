"""The runner where decode steps are fused: state on the device, one CUDA graph a bucket, steps ahead of the host.

Made by `engine.startup` where the plan's decode path is `fused`. Prompts go through the layered decoder of
`ModelRunner`, short ones from graphs; their first tokens, like all others, are sampled on the device and stay there:

      host     launch n: delta of what changed, graph      launch n + 1: nothing to send, graph     collect n: ring
      device   [ step n: reads tokens, positions; writes the next ones, and the ring )[ step n + 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pellucid.core import PellucidError, Request
from pellucid.kernels.device import device_limits, to_device
from pellucid.kvcache.pool import KVPool
from pellucid.layers.step_tiles import plan_tiles
from pellucid.models.decoder import Decoder
from pellucid.models.fused_decoder import FusedDecoder, TokenRing
from pellucid.models.weights import ProgressCallback
from pellucid.runner.backends import create_called
from pellucid.runner.base import StepResult
from pellucid.runner.compile_ahead import SAMPLED_ROWS
from pellucid.runner.cuda_graphs import CudaGraphs
from pellucid.runner.device_state import DeviceState
from pellucid.runner.model_runner import ComputedStep, ModelRunner, keep
from pellucid.runner.prompt_graphs import PromptGraphs, PromptShape, PromptStep, prompt_shapes
from pellucid.runner.sampler import Constraint, SampledToken, SamplingState, not_finite, sample
from pellucid.selection.bucket import bucket, buckets_up_to
from pellucid.selection.decode_path import captured_prompts
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.step_plan import ScheduledSequence, StepPlan
from pellucid.traits.model import ModelTraits
from pellucid.traits.tensors import TensorIndex

if TYPE_CHECKING:
    import torch

RING = 8
"""Samplings whose tokens are kept: two steps in flight, each of a decode part and a prefill part, and as many again."""


@dataclass(frozen=True, slots=True)
class SampledPart:
    """Rows that one sampling on the device covers, in its order, and its line of the ring.

    `logits` of all its rows where the host samples some of them instead; None where it samples none.
    """

    rows: tuple[ScheduledSequence, ...]
    states: tuple[SamplingState, ...]
    line: int
    logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """`prompts`: what the host samples of a prefill part, or tells of it. `done` is reached when all is computed."""

    parts: tuple[SampledPart, ...]
    prompts: ComputedStep | None
    done: torch.cuda.Event


class GPURunner:
    """`Runner` over the weights, the pool and the requests of a `ModelRunner`. Graphs are captured at the start.

    `buckets`: of decode rows, that steps are prepared for; all that the plan may need, unless given for a measurement.
    `before_steps` is called when the weights are there, and before the first launch of a fused step.
    """

    def __init__(
        self,
        traits: ModelTraits,
        tensors: TensorIndex,
        plan: ExecutionPlan,
        capture: Sequence[int] = (),
        on_progress: ProgressCallback | None = None,
        buckets: Sequence[int] | None = None,
        before_steps: Callable[[], None] = lambda: None,
    ) -> None:
        import torch

        self._layered = layered = ModelRunner(traits, tensors, plan, capture, on_progress)
        before_steps()
        self.plan, self.traits, self.device = plan, traits, layered.device
        most = bucket(plan.max_num_seqs)
        pages = -(-plan.max_model_len // plan.page_size) + 1
        self._state = DeviceState(plan.max_num_seqs, most, pages, self.device)
        # The device writes it, the host reads it: pinned, so that both see the same memory.
        tokens = torch.zeros(RING, most, dtype=torch.int32, pin_memory=True)
        ring = TokenRing(tokens, torch.zeros(1, dtype=torch.int64, device=self.device))
        self._ring, self._ring_step = tokens, ring.step
        self._line = 0
        self._make_fused = partial(
            FusedDecoder, layered.model, layered.pool, self._state, ring, plan.max_model_len, device_limits(self.device)
        )
        self.fused = self.fused_under(plan)
        shapes = prompt_shapes(traits, plan) if buckets is None and plan.cuda_graphs else ()
        buckets = buckets_up_to(plan.max_num_seqs) if buckets is None else buckets
        with torch.inference_mode():
            for rows in buckets:
                # Twice: kernels are compiled and buffers made in the first, and the second must find them made.
                self.fused.step(rows)
                self.fused.step(rows)
            for rows in SAMPLED_ROWS:
                logits = torch.zeros(min(rows, most), traits.vocab_size, device=self.device)
                self.fused.sample(logits, torch.full_like(logits[:, 0], self._state.scratch_slot, dtype=torch.int32))
            torch.cuda.synchronize(self.device)
            self._graphs = CudaGraphs(self.fused.step, buckets) if plan.cuda_graphs else None
            self._prompts = PromptGraphs(shapes, captured_prompts(plan, discover()), self._prompt_step)
            ring.step.zero_()

    @property
    def layered(self) -> ModelRunner:
        """What computes prompts."""
        return self._layered

    def fused_under(self, plan: ExecutionPlan) -> FusedDecoder:
        """A fused decoder over these weights and this state, with the attention and the tiles of `plan`."""
        called = create_called(plan, self._layered.context)
        return self._make_fused(plan_tiles(plan), lambda rows: called.get(plan.backend("attention.decode", rows)))

    @property
    def model(self) -> Decoder:
        """The layered decoder, whose weights the fused one shares."""
        return self._layered.model

    @property
    def pool(self) -> KVPool:
        return self._layered.pool

    def add_request(self, request: Request, constraint: Constraint | None = None) -> None:
        """Start keeping sampling state."""
        self._layered.add_request(request, constraint)

    def remove_request(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._layered.remove_request(request_id)
        self._state.release(request_id)

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Where the device samples every row, and nobody waits for anything but tokens."""
        states = [self._layered.state(row.request_id) for row in plan.scheduled]
        return all(state is None or _on_device(state) for state in states)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin a step, and wait for nothing but a prefill part that the host must finish."""
        try:
            return self._launch(plan)
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """After a launch that was broken off (Ctrl-C): host and device agree again on the ring and on the state."""
        import torch

        torch.cuda.synchronize(self.device)
        self._ring_step.zero_()
        self._line = 0
        self._state.distrust()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        import torch

        parts, prompts = [], None
        with torch.inference_mode():
            decode = self._live(plan.scheduled[: plan.num_decode])
            if decode:
                parts.append(self._decode(*zip(*decode, strict=True)))
            prefill = plan.scheduled[plan.num_decode :]
            if prefill:
                computed = self._prefill(StepPlan(plan.step, prefill, 0, plan.num_tokens - plan.num_decode))
                parts += self._sample_prompts(computed)
                by_host = [None if state is None or _on_device(state) else state for state in computed.states]
                if any(by_host):
                    prompts = replace(computed, states=by_host)
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(tuple(parts), prompts, done)

    def collect(self, pending: LaunchedStep) -> StepResult:
        """The step's tokens, once it is computed."""
        result = StepResult() if pending.prompts is None else self._layered.collect(pending.prompts)
        pending.done.synchronize()
        for part in pending.parts:
            for state, token in zip(part.states, self._sampled(part), strict=True):
                keep(state, token, result)
        return result

    def step(self, plan: StepPlan) -> StepResult:
        """`collect(launch(plan))`."""
        return self.collect(self.launch(plan))

    def fill_state(self, rows: int, context: int) -> None:
        """Make every slot one of a sequence of `context` tokens with pages of its own, and rows 0, 1, ... theirs.

        For measurements of steps without requests. The pool's pages are shared out as far as they go.
        """
        import torch

        state, pages = self._state, -(-context // self.plan.page_size)
        state.positions.fill_(context - 1)
        vocab = self.traits.vocab_size
        state.tokens.copy_(torch.randint(vocab, state.tokens.shape, device=self.device))
        state.row_slots[:rows] = torch.arange(rows, dtype=torch.int32, device=self.device)
        shared = torch.arange(rows * pages, device=self.device) % self.plan.num_kv_pages + 1
        state.page_table[:rows, :pages] = shared.view(rows, pages).to(torch.int32)

    def kept_state(self) -> Callable[[], None]:
        """Restores, by a launch, the state as it is now."""
        return self._state.kept()

    def next_tokens(self, rows: int) -> torch.Tensor:
        """int32 [rows]: what the last step chose for the slots that `fill_state` made."""
        return self._state.tokens[:rows]

    def _live(self, rows: Sequence[ScheduledSequence]) -> list[tuple[ScheduledSequence, SamplingState]]:
        return [(row, state) for row in rows if (state := self._layered.state(row.request_id)) is not None]

    def _decode(self, rows: tuple[ScheduledSequence, ...], states: tuple[SamplingState, ...]) -> SampledPart:
        size = bucket(len(rows))
        self._state.prepare(rows, size, [(state.params, state.seed) for state in states])
        if self._graphs is None:
            self.fused.step(size)
        else:
            self._graphs.replay(size)
        logits = None if all(map(_on_device, states)) else self.fused.logits(size)[: len(rows)]
        return SampledPart(rows, states, self._next_line(), logits)

    def _prefill(self, plan: StepPlan) -> ComputedStep:
        """By a graph, where one holds the chunks and nobody wants more of them than the device's next tokens."""
        states = [self._layered.state(row.request_id) for row in plan.scheduled]
        plain = all(state is None or _on_device(state) for state in states)
        shape = self._prompts.fitting(plan.scheduled) if plain else None
        if shape is None:
            return self._layered.launch(plan)
        return ComputedStep(plan, states, frozenset(), self._prompts.replay(shape, plan.scheduled), ())

    def _prompt_step(self, shape: PromptShape) -> PromptStep:
        layered = self._layered
        backend = layered.attention_backend("prefill", min(shape.rows, self.plan.max_num_batched_tokens))
        return PromptStep(layered.model, layered.pool, backend, shape, device_limits(self.device), self.device)

    def _sample_prompts(self, computed: ComputedStep) -> list[SampledPart]:
        """Sample the prompts that end with this step, but for those that are the host's."""
        import torch

        ended, lines, line = [], [], 0
        for row, state in zip(computed.plan.scheduled, computed.states, strict=True):
            line += len(row.token_ids) if row.request_id in computed.wants_all else int(row.sample)
            if row.sample and state is not None and _on_device(state):
                ended.append((row, state))
                lines.append(line - 1)
        if not ended:
            return []
        logits = computed.logits
        if len(lines) < logits.shape[0]:
            logits = logits[to_device(lines, torch.int64, logits.device)]
        rows, states = zip(*ended, strict=True)
        slots = self._state.place_sampled(rows, [(state.params, state.seed) for state in states])
        self.fused.sample(logits, slots)
        return [SampledPart(rows, states, self._next_line(), None)]

    def _next_line(self) -> int:
        line, self._line = self._line, (self._line + 1) % RING
        return line

    def _sampled(self, part: SampledPart) -> list[SampledToken | PellucidError]:
        """The device's tokens, and the host's for the rows that it samples: which it is, a request's neighbours never
        decide, for the two draw different random numbers."""
        tokens = self._ring[part.line, : len(part.rows)].tolist()
        found: list[SampledToken | PellucidError] = [
            SampledToken(token, None) if token >= 0 else not_finite(state)
            for token, state in zip(tokens, part.states, strict=True)
        ]
        if part.logits is not None:
            by_host = [index for index, state in enumerate(part.states) if not _on_device(state)]
            for index, token in zip(
                by_host, sample(part.logits[by_host].float(), [part.states[i] for i in by_host]), strict=True
            ):
                self._state.forget_token(part.rows[index].request_id)
                found[index] = token
        return found


def _on_device(state: SamplingState) -> bool:
    """Whether the device samples for it: from the model's own logits, and no more than the token is asked for."""
    params = state.params
    return not (
        state.rewrites_logits
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or state.request.capture_hidden
    )
