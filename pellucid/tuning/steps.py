"""Whole steps of a model, under a plan and with tiles in force, on the card or the CPU. Made by `tuning.workbench`.

The model is its first layers, as many as `SLICE_BYTES` hold and a layer of each kind, with weights that are drawn (of
formats that can't be, read): what a step takes depends on shapes. One layer follows the other, so that launches overlap
as they do when it is served, and the head's weights drive the layers' out of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pellucid.layers.step_tiles import PREFIX, Projection, parse_tile
from pellucid.models.synthetic import SyntheticTensors
from pellucid.quantization.weight import DENSE_SCHEMES
from pellucid.runner.gpu_runner import GPURunner
from pellucid.runner.model_runner import ModelRunner
from pellucid.selection.decode_path import FUSED, captured_prompts
from pellucid.selection.evidence import is_tile_op
from pellucid.selection.memory import weight_items
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.step_plan import ScheduledSequence, StepPlan
from pellucid.traits.model import ModelTraits
from pellucid.traits.tensors import TensorIndex, canonical_name, layer_of
from pellucid.tuning.measure import Question
from pellucid.tuning.problems import CONTEXT
from pellucid.tuning.step_choices import MEASURED, apply_choices
from pellucid.tuning.store import APART
from pellucid.tuning.timing import Timer, copies_for

if TYPE_CHECKING:
    import torch

    from pellucid.layers.fused_step import FusedStep
    from pellucid.models.fused_decoder import FusedDecoder

SLICE_BYTES = 8 << 30
USUAL_ROW, WORST_ROW = 0.05, 0.6
"""How far a row's logits may be from the default's, of their length: half of the rows, where there are `MANY_ROWS`, and
any. Rounding adds up through random layers, and a router's near-tie may turn in some; a row that a tile leaves out, or
gives another's experts, is more than its whole length away."""

MANY_ROWS = 8

STATES = 4
"""Steps of other tokens in a sample. Of few rows some tokens choose one expert more than others, and a candidate whose
rounding moves a choice would be credited with it."""

LEAST_LAYERS = 2
"""Of the last kind in the model, behind those of the other."""


def slice_layers(traits: ModelTraits) -> ModelTraits:
    """The model of the first layers only."""
    weights = {item.name: item.bytes for item in weight_items(traits, 1)}
    ends = sum(size for name, size in weights.items() if name.endswith(("embedding", "lm_head", "final norm")))
    per_layer = max(1, (sum(weights.values()) - ends) // traits.num_layers)
    kinds = traits.moe_layers
    least = LEAST_LAYERS + (kinds.index(True) if True in kinds else 0)
    layers = min(traits.num_layers, max(least, SLICE_BYTES // per_layer))
    return replace(traits, num_layers=layers, moe_layers=kinds[:layers], mtp_layers=0)


def slice_tensors(traits: ModelTraits, tensors: TensorIndex | None, seed: int) -> TensorIndex:
    """Tensors of `traits`, a slice: drawn where every format can be, else those of its layers."""
    forms = traits.weights
    classes = (forms.attention, forms.dense_mlp, forms.routed_experts, forms.shared_experts, forms.lm_head)
    schemes = {form.scheme for form in (*classes, forms.embedding) if form is not None}
    if tensors is None or (schemes <= DENSE_SCHEMES and not forms.exceptions):
        return SyntheticTensors(traits, seed)
    kept = {}
    for name, info in tensors.items():
        place = layer_of(canonical_name(name))
        if place is None or place[0] < traits.num_layers:
            kept[name] = info
    return kept


def unlike(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """How logits [rows, vocab] of a step are not those of the same step with other tiles, or nothing."""
    apart = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
    worst, usual = int(apart.argmax()), float(apart.median())
    if float(apart[worst]) > WORST_ROW:
        return f"has logits in row {worst} that differ by {float(apart[worst]):.3g} of the default's"
    if len(apart) >= MANY_ROWS and usual > USUAL_ROW:
        return f"has logits that differ by {usual:.3g} of the default's in half of the rows"
    return ""


class Steps:
    """Timers of steps. Runners are kept by the choices that shape them, of the last questions only."""

    def __init__(self, traits: ModelTraits, plan: ExecutionPlan, tensors: TensorIndex | None) -> None:
        self._traits, self._plan = slice_layers(traits), plan
        self._tensors = slice_tensors(self._traits, tensors, plan.seed)
        self._runners: dict[ExecutionPlan, Any] = {}

    def check(self, question: Question, candidate: str) -> str:
        """Why the step can't be taken: its logits are not finite, its tokens are not their best, or, of tiles that no
        one checks alone, they are not the default's logits."""
        logits, tokens = self._outcome(question, candidate)
        if not bool(logits.isfinite().all()):
            return "has logits that are not finite"
        if tokens is not None and not bool((logits.gather(1, tokens[:, None])[:, 0] == logits.amax(1)).all()):
            return "chooses tokens that are not the best of its logits"
        if not is_tile_op(question.op) or question.op.startswith(PREFIX) or candidate == question.order[0]:
            return ""
        return unlike(logits, self._outcome(question, question.order[0])[0])

    def timer(self, question: Question, candidate: str) -> Timer:
        return self.timer_under(self._plan_of(question, candidate), question)

    def timer_under(self, plan: ExecutionPlan, question: Question) -> Timer:
        """Of the question's step under a plan."""
        import torch

        rows = question.bucket
        runner = self._runner(plan)
        if not isinstance(runner, GPURunner) or question.op == "step.prefill":
            # As it is served: from a graph, or launched by the host.
            captured_too = question.op == "step.prefill" and rows in captured_prompts(plan, discover())
            return Timer([self._layered(runner, question, captured_too)], torch.device(plan.device), captured_too)
        fused = runner.fused_under(plan)
        with torch.inference_mode():
            states = [self._kept_state(runner, rows, seed) for seed in range(STATES)]
            # Warmed up twice: kernels are compiled and buffers made in the first, and the second must find them made.
            calls = [partial(_step_from, state, fused, rows) for state in states]
            return Timer(calls, runner.device, capture=True, required=True)

    def _outcome(self, question: Question, candidate: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits fp32 [rows, vocab], and the tokens that a fused step chose from them, int64 [rows]."""
        import torch

        plan, rows = self._plan_of(question, candidate), question.bucket
        runner = self._runner(plan)
        if not isinstance(runner, GPURunner) or question.op == "step.prefill":
            return self._layered(runner, question)().float(), None
        fused = runner.fused_under(plan)
        with torch.inference_mode():
            self._fill(runner, rows)
            fused.step(rows)
            tokens = runner.next_tokens(min(rows, plan.max_num_seqs)).long()
            return fused.logits(rows)[: tokens.shape[0]].float(), tokens

    def _plan_of(self, question: Question, candidate: str) -> ExecutionPlan:
        """The plan that a candidate's step is taken under."""
        if is_tile_op(question.op):
            given = (*question.given, (f"{question.op}@{question.bucket}", candidate))
        else:
            given = question.given if candidate == MEASURED else ()
        return apply_choices(self._plan, given)

    def _runner(self, plan: ExecutionPlan) -> Any:
        """A runner of the plan with room for one step; what `fused_under` changes is the default's."""
        pages = -(-min(self._context(plan) + 64, plan.max_model_len) // plan.page_size)
        tokens = max(plan.max_num_batched_tokens, 1)
        room = max(plan.max_num_seqs * pages, -(-(tokens + CONTEXT) // plan.page_size) + 1)
        decisions = []
        for d in plan.decisions:
            if is_tile_op(d.op):
                continue
            if d.op == "attention.decode" and plan.decode_path == FUSED:
                d = self._plan.decision(d.op, d.bucket)
            changes = {"kv.pages": min(plan.num_kv_pages, room), "cuda_graphs": False}
            decisions.append(replace(d, value=changes.get(d.op, d.value), rejected=(), measured=()))
        key = replace(plan, decisions=tuple(decisions))
        if key not in self._runners:
            # Two, for a step and the step it is compared with: their weights must fit beside each other.
            while len(self._runners) > 1:
                self._runners.pop(next(iter(self._runners)))
            if key.decode_path == FUSED:
                self._runners[key] = GPURunner(self._traits, self._tensors, key, buckets=())
            else:
                self._runners[key] = ModelRunner(self._traits, self._tensors, key)
        return self._runners[key]

    def _context(self, plan: ExecutionPlan) -> int:
        return max(1, min(CONTEXT, plan.max_model_len - 64))

    def _fill(self, runner: GPURunner, rows: int, seed: int = 0) -> None:
        """The same tokens and positions every time: each step moves them on."""
        import torch

        torch.manual_seed(seed)
        runner.fill_state(min(rows, runner.plan.max_num_seqs), self._context(runner.plan))

    def _kept_state(self, runner: GPURunner, rows: int, seed: int) -> Callable[[], None]:
        self._fill(runner, rows, seed)
        return runner.kept_state()

    def _layered(
        self, runner: GPURunner | ModelRunner, question: Question, prepared: bool = False
    ) -> Callable[[], torch.Tensor]:
        """A step through the layers: decode rows, or one chunk of a prompt. `prepared`: what it reads is made now."""
        import torch

        layered = runner.layered if isinstance(runner, GPURunner) else runner
        plan = layered.plan
        context, page = self._context(plan), plan.page_size
        if question.op == "step.decode":
            each = -(-context // page)
            count = min(question.bucket, plan.max_num_seqs, max(1, plan.num_kv_pages // each))
            scheduled = tuple(
                ScheduledSequence(str(i), context - 1, (i % self._traits.vocab_size,),
                                  tuple(range(1 + i * each, 1 + (i + 1) * each)), True, False)
                for i in range(count)
            )  # fmt: skip
            step = StepPlan(0, scheduled, count, count)
        else:
            longest = min(plan.max_model_len, plan.num_kv_pages * page)
            tokens = min(question.bucket, longest)
            start = max(0, min(context, longest) - tokens)
            pages = tuple(range(1, 1 + -(-(start + tokens) // page)))
            ids = tuple(i % self._traits.vocab_size for i in range(tokens))
            step = StepPlan(0, (ScheduledSequence("0", start, ids, pages, True, True),), 0, tokens)
        if not prepared:
            return lambda: layered.launch(step).logits
        batch = layered.batch(step)
        return torch.inference_mode()(lambda: layered.model.forward(batch).logits)


def _step_from(restore: Callable[[], None], fused: FusedDecoder, rows: int) -> None:
    """A step moves the state on: it begins from the same every time."""
    restore()
    fused.step(rows)


class Apart:
    """A projection alone: the product as a step launches it, on copies of its weight that no cache holds."""

    def __init__(self, question: Question, plan: ExecutionPlan) -> None:
        import torch

        from pellucid.quantization.weight import dtype_of

        self._projection, self._rows = Projection.of(question.op.removeprefix(APART)), question.bucket
        self._device, self._name, self._dtype = torch.device(plan.device), plan.dtype, dtype_of(plan.dtype)
        n, k, _ = self._projection
        torch.manual_seed(0)
        self._weights = [
            torch.randn(n, k, device=self._device, dtype=self._dtype).div_(k**0.5)
            for _ in range(copies_for(n * k * self._dtype.itemsize, self._device))
        ]
        self._x = torch.randn(self._rows, k, device=self._device, dtype=self._dtype)
        self._norm = torch.rand(k, device=self._device, dtype=self._dtype).add_(0.5)
        self._start = torch.randn(self._rows, n, device=self._device, dtype=self._dtype)

    def check(self, candidate: str) -> str:
        """Against plain torch in fp32, with what a step adds to the product: a norm, SwiGLU, or the residual."""
        import torch

        from pellucid.tuning.gate import TOLERANCES, differs

        step, weight, x = self._step(candidate), self._weights[0], self._x.float()
        normed = torch.nn.functional.rms_norm(x, x.shape[1:], self._norm.float(), 1e-6)
        for norm in (self._norm,) if self._projection.pair else (None, self._norm):
            plain = (x if norm is None else normed) @ weight.float().t()
            if self._projection.pair:
                gate, up = plain.chunk(2, 1)
                plain = torch.nn.functional.silu(gate) * up
            out = self._start[:, : plain.shape[1]].clone()
            residual = norm is None and not self._projection.pair
            wanted = plain + out.float() if residual else plain
            self._project(step, weight, out, norm, residual)
            wrong = differs(out, wanted, TOLERANCES[self._name])
            if wrong:
                return f"{'after a norm, ' if norm is not None else ''}{wrong}"
        return ""

    def timer(self, candidate: str) -> Timer:
        n, k, pair = self._projection
        step = self._step(candidate)
        # Back to the hidden size: added to the residual; all others come behind a norm.
        residual = not pair and n <= k
        norm = None if residual else self._norm
        out = self._start[:, : n // 2 if pair else n].clone()
        calls = [lambda w=weight: self._project(step, w, out, norm, residual) for weight in self._weights]
        return Timer(calls, self._device, capture=True)

    def _project(
        self, step: FusedStep, weight: torch.Tensor, out: torch.Tensor, norm: torch.Tensor | None, residual: bool
    ) -> None:
        activation = "silu_mul" if self._projection.pair else None
        step.project(self._x, weight, out, norm=norm, eps=1e-6, activation=activation, residual=residual)  # type: ignore[arg-type]

    def _step(self, candidate: str) -> FusedStep:
        from pellucid.kernels.device import device_limits
        from pellucid.layers.fused_step import lone_step

        tiles = {(self._projection.op, self._rows): parse_tile(candidate)}
        return lone_step(self._rows, device_limits(self._device), tiles, self._device, self._dtype)
