"""Counts the distinct experts that a real decode batch chooses: a floor under uniform routing is an assumption.

Called by `bench offline`, between requests. It computes with the layers of the loaded decoder, into KV pages that
nobody holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pellucid.kernels.context import KernelContext
from pellucid.kvcache.pool import KVPool
from pellucid.layers.moe import MoE, route
from pellucid.models.decoder import Decoder
from pellucid.quantization.weight import dtype_of
from pellucid.runner.backends import create_backends
from pellucid.runner.forward_batch import build_forward_batch
from pellucid.selection.plan import ExecutionPlan
from pellucid.step_plan import ScheduledSequence, StepPlan

if TYPE_CHECKING:
    import torch


class LoadedModel(Protocol):
    """What is used of the runner."""

    @property
    def device(self) -> torch.device: ...
    @property
    def model(self) -> Decoder: ...
    @property
    def pool(self) -> KVPool: ...
    @property
    def plan(self) -> ExecutionPlan: ...


@dataclass(frozen=True, slots=True)
class CountingMoE:
    """Stands in for a `MoE`, and adds the number of distinct experts of each call to `counts`."""

    moe: MoE
    counts: list[int]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        experts, _ = route(self.moe.gate(x), self.moe.traits, self.moe.correction_bias)
        self.counts.append(len(set(experts.flatten().tolist())))
        self.moe.add_to(residual, x)


def counting_decoder(decoder: Decoder, counts: list[int]) -> Decoder:
    """The same decoder, whose MoE layers count; the one given is not changed."""
    layers = tuple(
        replace(layer, mlp=CountingMoE(layer.mlp, counts)) if isinstance(layer.mlp, MoE) else layer  # type: ignore[arg-type]
        for layer in decoder.layers
    )
    return replace(decoder, layers=layers)


def count_experts(
    runner: LoadedModel, sequences: Sequence[Sequence[int]], positions: Sequence[int], num_pages: int
) -> list[float] | None:
    """Distinct experts a layer, mean over MoE layers, of the decode batch at each of `positions` of `sequences`.

    The pool's first `num_pages` pages are overwritten: nothing may be cached in them. None where they do not suffice.
    """
    import torch

    plan, pool, device = runner.plan, runner.pool, runner.device
    length = max(positions) + 1
    each = -(-length // pool.page_size)
    if each * len(sequences) > num_pages:
        return None
    tables = [tuple(range(1 + i * each, 1 + (i + 1) * each)) for i in range(len(sequences))]
    backends = create_backends(plan, KernelContext(device, dtype_of(plan.dtype), plan.threads)).attention

    def forward(decoder: Decoder, rows: Sequence[ScheduledSequence], decode: bool) -> None:
        tokens = sum(len(row.token_ids) for row in rows)
        step = StepPlan(step=0, scheduled=tuple(rows), num_decode=len(rows) if decode else 0, num_tokens=tokens)
        one = backends["decode", plan.backend("attention.decode", tokens if decode else 1)]
        other = backends["prefill", plan.backend("attention.prefill", 1 if decode else tokens)]
        decoder.forward(build_forward_batch(step, pool, device, one, other, frozenset()))

    with torch.inference_mode():
        for i, ids in enumerate(sequences):
            for start in range(0, length, plan.max_num_batched_tokens):
                chunk = tuple(ids[start : min(length, start + plan.max_num_batched_tokens)])
                forward(runner.model, [ScheduledSequence(str(i), start, chunk, tables[i], False, True)], decode=False)
        found = []
        for position in positions:
            counts: list[int] = []
            rows = [
                ScheduledSequence(str(i), position, (ids[position],), tables[i], False, False)
                for i, ids in enumerate(sequences)
            ]
            forward(counting_decoder(runner.model, counts), rows, decode=True)
            found.append(sum(counts) / len(counts))
    return found
