"""The MoE layer: router, routed experts, shared experts. Built by `models.loading` for MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.layers.linear import Linear
from pellucid.layers.mlp import MLP
from pellucid.moe.base import MoEKernel
from pellucid.traits.model import MoETraits

if TYPE_CHECKING:
    import torch

Route = Callable[["torch.Tensor", MoETraits, "torch.Tensor | None"], tuple["torch.Tensor", "torch.Tensor"]]
"""What `route` does, by whatever means."""


def route(
    logits: torch.Tensor, traits: MoETraits, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 and weights fp32, both [tokens, top_k], from router logits [tokens, experts].

    The bias (https://arxiv.org/abs/2412.19437 section 2.1.2) moves the choice only; weights come from the unbiased
    scores. Groups left out score -inf, so that a negative biased score inside can't let them back in.
    """
    import torch

    logits = logits.float()
    if traits.scoring == "sigmoid":
        # sigmoid(x) = softmax([x, 0])[0]. torch's own sigmoid takes another path for the last few elements of the whole
        # tensor, so that a row's bits would depend on the batch; its softmax goes row by row.
        scores = torch.stack([logits, torch.zeros_like(logits)], dim=-1).softmax(-1)[..., 0]
    else:
        scores = logits.softmax(-1)
    choice = scores if correction_bias is None else scores + correction_bias
    if traits.group_rule != "none":
        groups = choice.unflatten(-1, (traits.num_groups, -1))  # [tokens, groups, experts per group]
        best = 1 if traits.group_rule == "max" else min(2, groups.shape[-1])
        ranked = groups.topk(best, dim=-1).values.sum(-1)
        kept = torch.zeros_like(ranked, dtype=torch.bool)
        kept.scatter_(-1, ranked.topk(traits.topk_groups, dim=-1).indices, True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    experts = choice.topk(traits.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if traits.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * traits.scaling


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed and shared experts, added to the residual."""

    traits: MoETraits
    gate: Linear
    correction_bias: torch.Tensor | None
    experts: MoEKernel
    shared_experts: MLP | None
    route: Route = route

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual [tokens, hidden] += moe(x)."""
        experts, weights = self.route(self.gate(x), self.traits, self.correction_bias)
        self.experts.add_to(residual, x, experts, weights)
        if self.shared_experts is not None:
            self.shared_experts.add_to(residual, x)
