"""The dense SwiGLU MLP (https://arxiv.org/abs/2002.05202), also used for shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.kernels.torch_ops import RowOps
from pellucid.layers.linear import Linear

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MLP:
    """down(silu(gate(x)) * up(x)), added to the residual. `gate_up_proj` is [gate | up]."""

    ops: RowOps
    gate_up_proj: Linear
    down_proj: Linear

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual [tokens, hidden] += mlp(x)."""
        self.down_proj.add_to(residual, self.ops.silu_mul(self.gate_up_proj(x)))
