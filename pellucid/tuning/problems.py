"""One op at one bucket on the model's real shapes, for every backend: inputs, the reference's output, calls to time.

Made by `tuning.workbench` in the probe's child. Inputs to check are those where mistakes show: pages in any order,
lengths at and past a page's end, rows at positions past the first, prefixes that are cached already, padded rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pellucid.attention.base import AttentionBackend, AttentionMetadata
from pellucid.kernels.context import KernelContext
from pellucid.quantization.weight import DENSE_SCHEMES, StoredWeight, dtype_of
from pellucid.selection.memory import bytes_per_weight
from pellucid.selection.plan import ExecutionPlan
from pellucid.step_plan import ScheduledSequence
from pellucid.traits.backend import Phase
from pellucid.traits.model import ModelTraits
from pellucid.tuning.gate import TOLERANCES, differs
from pellucid.tuning.measure import Question
from pellucid.tuning.timing import Timer, copies_for

if TYPE_CHECKING:
    import torch

CONTEXT = 640
"""Tokens that each sequence of a timed decode step has; fewer where the model's context is shorter."""

MAX_BYTES = 4 << 30
"""Of one layer's weights as drawn here: beyond it an op is not measured apart."""

REFERENCE = "reference"


class Problem(Protocol):
    """What a question on a backend needs: `check` and `timer`, by the candidate's name."""

    def check(self, candidate: str) -> str: ...

    def timer(self, candidate: str) -> Timer: ...


def make_problem(question: Question, traits: ModelTraits, plan: ExecutionPlan) -> Problem:
    """The problem of `attention.*`, `moe` or `linear.*`."""
    import torch

    device = torch.device(plan.device)
    torch.manual_seed(question.bucket)
    family = question.op.partition(".")[0]
    if family == "attention":
        return AttentionProblem(question, traits, plan, device)
    return (
        MoEProblem(question, traits, plan, device) if family == "moe" else LinearProblem(question, traits, plan, device)
    )


def drawable(question: Question, traits: ModelTraits) -> bool:
    """Whether weights for it can be drawn here: dense ones that a device has room for."""
    family = question.op.partition(".")[0]
    if family == "moe" and traits.moe is not None:
        form = traits.weights.routed_experts or traits.weights.dense_mlp
        count = 3 * traits.moe.num_experts * traits.moe.intermediate_size * traits.hidden_size
        return form.scheme in DENSE_SCHEMES and count * bytes_per_weight(form) <= MAX_BYTES
    return family != "linear" or question.op.partition(".")[2] in DENSE_SCHEMES


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sequences over a pool: `queries[i]` new tokens of sequence i, the last of which sees `contexts[i]` keys."""

    metadata: AttentionMetadata
    tokens: int
    pages: int


class AttentionProblem:
    """One layer's attention, from queries [tokens, heads, width] to outputs per head, over a paged cache.

    For latent attention that includes W_UK and W_UV, which backends apply in different places.
    """

    def __init__(self, question: Question, traits: ModelTraits, plan: ExecutionPlan, device: torch.device) -> None:
        self.traits, self.device, self.dtype = traits.attention, device, dtype_of(plan.dtype)
        self.kv_dtype, self.page, self.bucket = dtype_of(plan.kv_dtype), plan.page_size, question.bucket
        self.phase: Phase = "decode" if question.op.endswith("decode") else "prefill"
        self.longest, self.name, self.captured = plan.max_model_len, plan.dtype, plan.prompt_graphs
        self.context = KernelContext(device, self.dtype, plan.threads if plan.device == "cpu" else None)
        self._backends: dict[str, AttentionBackend] = {}
        self._case: tuple[tuple[torch.Tensor, torch.Tensor, _Rows], torch.Tensor] | None = None
        a = self.traits
        if a.kind == "mla":
            self.key_up = self._drawn(a.num_heads, a.qk_nope_head_dim, a.kv_lora_rank) / a.kv_lora_rank**0.5
            self.value_up = self._drawn(a.num_heads, a.v_head_dim, a.kv_lora_rank) / a.kv_lora_rank**0.5

    def check(self, candidate: str) -> str:
        if self._case is None:
            rows = self._rows(*_awkward(self.phase, self.bucket, self.page, self.longest))
            q, pool = self._queries(rows.tokens), self._pool(rows.pages)
            self._case = (q, pool, rows), self._call(REFERENCE, q, pool, rows)()
        inputs, wanted = self._case
        return differs(self._call(candidate, *inputs)(), wanted, TOLERANCES[self.name])

    def timer(self, candidate: str) -> Timer:
        context = max(1, min(CONTEXT, self.longest))
        if self.phase == "decode":
            rows = self._rows([1] * self.bucket, [context] * self.bucket)
        else:
            # One chunk of a prompt; a short one ends a long prompt.
            tokens = min(self.bucket, self.longest)
            rows = self._rows([tokens], [max(tokens, context)])
        first = self._pool(rows.pages)
        pools = [first, *(first.clone() for _ in range(copies_for(first.nbytes, self.device) - 1))]
        q = self._queries(rows.tokens)
        calls = [self._call(candidate, q, pool, rows) for pool in pools]
        return Timer(calls, self.device, capture=self._is_captured(candidate))

    def _is_captured(self, candidate: str) -> bool:
        """As it is served: steps of short prompts by our kernels. The reference can't be."""
        if self.phase == "decode":
            return candidate != REFERENCE
        traits = importlib.import_module(f"pellucid.attention.{candidate}").TRAITS
        return self.bucket <= self.captured and candidate != REFERENCE and traits.fused_decode == "inside"

    def _call(self, name: str, q: torch.Tensor, pool: torch.Tensor, rows: _Rows) -> Callable[[], torch.Tensor]:
        import torch

        a, meta = self.traits, rows.metadata
        # One for all calls, as in an engine: some have workspaces of a hundred megabytes.
        if name not in self._backends:
            self._backends[name] = importlib.import_module(f"pellucid.attention.{name}").create(
                self.context, self.phase
            )
        backend = self._backends[name]
        if a.kind == "gqa":
            return lambda: backend.gqa(
                q, pool[0], pool[1], meta, num_kv_heads=a.num_kv_heads, scale=a.softmax_scale
            )  # fmt: skip
        rank, scale, nope = a.kv_lora_rank, a.softmax_scale, a.qk_nope_head_dim
        if backend.expands_latent:
            return lambda: backend.mla_expanded(
                q, pool[0], meta, kv_lora_rank=rank, scale=scale, expand=self._expand
            )  # fmt: skip

        def absorbed() -> torch.Tensor:
            latent = torch.einsum("thn,hnk->thk", q[..., :nope], self.key_up)
            out = backend.mla(
                torch.cat([latent, q[..., nope:]], -1), pool[0], meta, kv_lora_rank=rank, scale=scale
            )  # fmt: skip
            return torch.einsum("thk,hvk->thv", out, self.value_up)

        return absorbed

    def _expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        linear = torch.nn.functional.linear
        key, value = (
            linear(rows, weight.flatten(0, 1)).view(-1, *weight.shape[:2]) for weight in (self.key_up, self.value_up)
        )
        return key, value

    def _rows(self, queries: Sequence[int], contexts: Sequence[int]) -> _Rows:
        import torch

        from pellucid.runner.forward_batch import attention_metadata

        counts = [-(-max(context, 1) // self.page) for context in contexts]
        order = torch.randperm(sum(counts)).add_(1).tolist()
        rows = []
        for count, query, context in zip(counts, queries, contexts, strict=True):
            pages, order = tuple(order[:count]), order[count:]
            decoding = self.phase == "decode"
            rows.append(ScheduledSequence("", context - query, (0,) * query, pages, decoding, not decoding))
        meta = attention_metadata(rows, self.device)
        if 0 in contexts:
            spans = tuple(s._replace(context=c) for s, c in zip(meta.spans, contexts, strict=True))
            meta = AttentionMetadata(meta.page_table, meta.sequence, meta.context.clamp_min(0), spans)
        return _Rows(meta, sum(queries), sum(counts) + 1)

    def _queries(self, tokens: int) -> torch.Tensor:
        a = self.traits
        return self._drawn(tokens, a.num_heads, a.qk_head_dim if a.kind == "mla" else a.head_dim)

    def _pool(self, pages: int) -> torch.Tensor:
        a = self.traits
        planes, width = (1, a.latent_head_size) if a.kind == "mla" else (2, a.num_kv_heads * a.head_dim)
        return self._drawn(planes, pages, self.page, width).to(self.kv_dtype)

    def _drawn(self, *shape: int) -> torch.Tensor:
        return _normal(self.device, self.dtype, *shape)


class MoEProblem:
    """One layer's routed experts, added to a residual. Every token's experts are drawn, without preference."""

    def __init__(self, question: Question, traits: ModelTraits, plan: ExecutionPlan, device: torch.device) -> None:
        assert traits.moe is not None
        self.traits, self.hidden, self.device, self.dtype = traits.moe, traits.hidden_size, device, dtype_of(plan.dtype)
        self.scheme = (traits.weights.routed_experts or traits.weights.dense_mlp).scheme
        self.bucket, self.name = question.bucket, plan.dtype
        self.context = KernelContext(device, self.dtype, plan.threads if plan.device == "cpu" else None)
        self._kernels: dict[str, Any] = {}
        experts, width = self.traits.num_experts, self.traits.intermediate_size
        shapes = ((experts, width, self.hidden), (experts, width, self.hidden), (experts, self.hidden, width))
        self._stored = [_stored(self.scheme, device, *shape) for shape in shapes]

    def check(self, candidate: str) -> str:
        x, residual = (_normal(self.device, self.dtype, self.bucket, self.hidden) for _ in range(2))
        routing, found = self._routing(), []
        for name in (candidate, REFERENCE):
            out = residual.clone()
            self._kernel(name).add_to(out, x, *routing)
            found.append(out - residual)
        return differs(found[0], found[1], TOLERANCES[self.name])

    def timer(self, candidate: str) -> Timer:
        kernel, out = self._kernel(candidate), _normal(self.device, self.dtype, self.bucket, self.hidden)
        x = _normal(self.device, self.dtype, self.bucket, self.hidden)
        touched = min(self.bucket * self.traits.top_k, self.traits.num_experts)
        bytes_read = touched * 3 * self.hidden * self.traits.intermediate_size * x.itemsize
        routings = [self._routing() for _ in range(copies_for(bytes_read, self.device))]
        calls = [lambda one=one: kernel.add_to(out, x, *one) for one in routings]
        return Timer(calls, self.device, capture=candidate != REFERENCE)

    def _kernel(self, name: str) -> Any:
        if name not in self._kernels:
            # One beside the reference, or the layer would be there many times.
            self._kernels = {n: k for n, k in self._kernels.items() if n == REFERENCE}
            backend = importlib.import_module(f"pellucid.moe.{name}").create(self.context)
            self._kernels[name] = backend.prepare(*self._stored)
        return self._kernels[name]

    def _routing(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scores = torch.rand(self.bucket, self.traits.num_experts, device=self.device)
        weights, experts = scores.softmax(-1).topk(self.traits.top_k, dim=-1)
        return experts, (weights / weights.sum(-1, keepdim=True)).float()


class LinearProblem:
    """One of each dense projection of the model that is stored in the question's scheme, one after the other."""

    def __init__(self, question: Question, traits: ModelTraits, plan: ExecutionPlan, device: torch.device) -> None:
        from pellucid.tuning.projections import MAX_ROWS, projections_of

        self.device, self.dtype, self.name, self.bucket = device, dtype_of(plan.dtype), plan.dtype, question.bucket
        self.context = KernelContext(device, self.dtype, plan.threads if plan.device == "cpu" else None)
        scheme = question.op.partition(".")[2]
        shapes = [(p.rows, p.columns) for p in projections_of(traits, MAX_ROWS)] + [
            (traits.vocab_size, traits.hidden_size)
        ]
        self._stored = [_stored(scheme, device, *shape) for shape in shapes]
        self._kernels: dict[str, list[Any]] = {}

    def check(self, candidate: str) -> str:
        for stored, mine, reference in zip(
            self._stored, self._prepared(candidate), self._prepared(REFERENCE), strict=True
        ):
            x = _normal(self.device, self.dtype, self.bucket, stored.columns)
            before = _normal(self.device, self.dtype, self.bucket, stored.rows)
            for accumulate in (False, True):
                found, wanted = before.clone(), before.clone()
                mine.into(x, found, accumulate=accumulate)
                reference.into(x, wanted, accumulate=accumulate)
                wrong = differs(found, wanted, TOLERANCES[self.name])
                if wrong:
                    return f"[{stored.rows}, {stored.columns}]: {wrong}"
        return ""

    def timer(self, candidate: str) -> Timer:
        kernels, calls = self._prepared(candidate), []
        for stored, kernel in zip(self._stored, kernels, strict=True):
            x = _normal(self.device, self.dtype, self.bucket, stored.columns)
            calls.append(_product(kernel, x, x.new_empty(self.bucket, stored.rows)))
        return Timer(calls, self.device, capture=True)

    def _prepared(self, name: str) -> list[Any]:
        if name not in self._kernels:
            backend = importlib.import_module(f"pellucid.quantization.{name}").create(self.context)
            self._kernels[name] = [backend.prepare(stored) for stored in self._stored]
        return self._kernels[name]


def _product(kernel: Any, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    return lambda: kernel.into(x, out)


def _awkward(phase: Phase, bucket: int, page: int, longest: int) -> tuple[list[int], list[int]]:
    """Query rows and contexts of sequences, `bucket` tokens in all, in which no two rows are read alike."""
    if phase == "decode":
        lengths = [page, page + 1, 1, 3 * page - 1, 2, 5 * page + 7, page - 1, 2 * page]
        contexts = [min(lengths[i % len(lengths)] + i // len(lengths), longest) or 1 for i in range(bucket)]
        if bucket > 1:
            # A padded row between others, and those at the end of a bucket that is not full.
            contexts[1] = 0
            contexts[bucket - bucket // 4 :] = [0] * (bucket // 4)
        return [1] * bucket, contexts
    first = max(1, bucket // 2) if bucket > 1 else 1
    counts = [count for count in (first, bucket // 4, bucket - first - bucket // 4) if count]
    prefixes = [0, page + 3, 2 * page] if bucket > 1 else [page + 3]
    counts = [min(count, longest) for count in counts]
    return counts, [min(count + prefix, longest) for count, prefix in zip(counts, prefixes, strict=False)]


def _normal(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, device=device, dtype=dtype)


def _stored(scheme: str, device: torch.device, *shape: int) -> StoredWeight:
    """Weights whose products with normal inputs have about their length."""
    weight = _normal(device, dtype_of(scheme), *shape)
    return StoredWeight(scheme, shape, weight.div_(shape[-1] ** 0.5))
