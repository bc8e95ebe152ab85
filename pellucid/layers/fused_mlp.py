"""The MLP half of a layer in fused kernels: the same sums as `layers.mlp` and `layers.moe`, in two to five launches.

Made by `models.fused_decoder` from the loaded layers, whose weights they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.layers.fused_step import FusedStep, dense
from pellucid.layers.mlp import MLP
from pellucid.layers.moe import MoE
from pellucid.layers.norm import RMSNorm
from pellucid.layers.step_tiles import EXPERTS_DOWN, EXPERTS_GROUPED, EXPERTS_UP
from pellucid.moe.gate_up import GateUpExperts

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.triton.moe_grouped import ExpertBlocks
    from pellucid.kernels.triton.routing import RoutingRule


@dataclass(frozen=True, slots=True)
class FusedMLP:
    """norm + [gate | up] + SwiGLU -> down."""

    norm: RMSNorm
    layer: MLP

    def add_to(self, step: FusedStep) -> None:
        """step.x += mlp(norm(step.x))."""
        gate_up, _ = dense(self.layer.gate_up_proj)
        down, _ = dense(self.layer.down_proj)
        act = step.scratch("act", step.rows, down.shape[1])
        step.project(step.x, gate_up, act, norm=self.norm.weight, eps=self.norm.eps, activation="silu_mul")
        step.project(act, down, step.x, residual=True)


@dataclass(frozen=True, slots=True)
class FusedMoE:
    """Few rows: router beside the shared experts -> the chosen experts' gate and up -> every down and the residual.

    More rows: cuBLAS for router and shared experts, and grouped products over rows sorted by expert.
    """

    norm: RMSNorm
    layer: MoE
    experts: GateUpExperts
    rule: RoutingRule
    counter: torch.Tensor
    blocks: dict[int, ExpertBlocks]
    """By rows of the step: made when a step of so many rows is computed for the first time."""

    @classmethod
    def of(cls, norm: RMSNorm, layer: MoE) -> FusedMoE:
        import torch

        from pellucid.kernels.triton.routing import RoutingRule

        experts = getattr(layer.experts, "weights", None)
        assert isinstance(experts, GateUpExperts), "the plan takes the fused path with this form of experts only"
        counter = torch.zeros(1, dtype=torch.int32, device=norm.weight.device)
        return cls(norm, layer, experts, RoutingRule.of(layer.traits), counter, {})

    def add_to(self, step: FusedStep) -> None:
        """step.x += moe(norm(step.x))."""
        if step.few:
            self._few(step)
        else:
            self._many(step)

    def _few(self, step: FusedStep) -> None:
        import torch

        from pellucid.kernels.triton import moe_small
        from pellucid.kernels.triton.row_ops import rms_norm

        layer, traits, x, rows = self.layer, self.layer.traits, step.x, step.rows
        routed, (gate, _) = self.experts, dense(layer.gate)
        shared_up, shared_down = self._shared()
        shared_act = None if shared_down is None else step.scratch("shared_act", rows, shared_down.shape[1])
        experts = step.scratch("experts", rows, traits.top_k, dtype=torch.int32)
        weights = step.scratch("weights", rows, traits.top_k, dtype=torch.float32)
        normed = step.scratch("normed", rows, x.shape[1])
        source, norm, norms = (x, self.norm.weight, normed) if rows == 1 else (normed, None, None)
        if norm is None:
            rms_norm(x, self.norm.weight, self.norm.eps, normed, pdl=step.pdl)
        moe_small.router_and_shared(
            source, norm, self.norm.eps, gate,
            step.scratch("router", rows, traits.num_experts, dtype=torch.float32), shared_up, shared_act,
            correction_bias=layer.correction_bias, rule=self.rule, experts_out=experts, weights_out=weights,
            counter=self.counter, normed=norms, context=step.context, pdl=step.pdl,
        )  # fmt: skip
        act = step.scratch("act", rows * traits.top_k, traits.intermediate_size)
        up = step.tile(EXPERTS_UP, lambda: moe_small.up_tile(x.shape[1], rows))
        down = step.tile(EXPERTS_DOWN, lambda: moe_small.down_tile(traits.intermediate_size, rows))
        moe_small.small_experts_up(normed, None, self.norm.eps, experts, routed.gate_up, act, pdl=step.pdl, tile=up)
        pairs = rows * (traits.top_k + 1)
        moe_small.small_experts_down(
            act, experts, weights, routed.down, shared_act, shared_down, x,
            step.scratch("pairs", pairs, x.shape[1], dtype=torch.float32), pdl=step.pdl, tile=down,
        )  # fmt: skip

    def _many(self, step: FusedStep) -> None:
        import torch

        from pellucid.kernels.triton import moe_grouped
        from pellucid.kernels.triton.routing import route_topk
        from pellucid.kernels.triton.row_ops import rms_norm

        layer, traits, x, rows = self.layer, self.layer.traits, step.x, step.rows
        routed, (gate, _) = self.experts, dense(layer.gate)
        shared_up, shared_down = self._shared()
        normed = step.scratch("normed", rows, x.shape[1])
        rms_norm(x, self.norm.weight, self.norm.eps, normed, pdl=step.pdl)
        logits = step.scratch("router", rows, traits.num_experts)
        torch.mm(normed, gate.t(), out=logits)
        experts = step.scratch("experts", rows, traits.top_k, dtype=torch.int32)
        weights = step.scratch("weights", rows, traits.top_k, dtype=torch.float32)
        route_topk(logits, self.rule, layer.correction_bias, experts, weights, pdl=step.pdl)
        pairs, experts_in_all = rows * traits.top_k, traits.num_experts
        shape = pairs, experts_in_all, x.shape[1], traits.intermediate_size, step.limits.shared_memory
        tiles = step.tile(EXPERTS_GROUPED, lambda: moe_grouped.grouped_tiles(*shape))
        if rows not in self.blocks:
            self.blocks[rows] = moe_grouped.ExpertBlocks.allocate(pairs, experts_in_all, tiles.block_m, x.device)
        blocks = self.blocks[rows]
        moe_grouped.sort_by_expert(experts, blocks, pdl=step.pdl)
        act = step.scratch("act", pairs, traits.intermediate_size)
        moe_grouped.grouped_up(normed, routed.gate_up, blocks, act, tile=tiles.up, pdl=step.pdl)
        out = step.scratch("pairs", pairs, x.shape[1], dtype=torch.float32)
        moe_grouped.grouped_down(act, routed.down, blocks, weights, out, tile=tiles.down, pdl=step.pdl)
        if shared_up is not None and shared_down is not None:
            shared_act = step.scratch("shared_act", rows, shared_down.shape[1])
            step.project(normed, shared_up, shared_act, activation="silu_mul")
            step.project(shared_act, shared_down, x, residual=True)
        moe_grouped.reduce_pairs(out, x, pdl=step.pdl)

    def _shared(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        shared = self.layer.shared_experts
        return (None, None) if shared is None else (dense(shared.gate_up_proj)[0], dense(shared.down_proj)[0])
