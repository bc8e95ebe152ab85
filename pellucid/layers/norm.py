"""RMSNorm (https://arxiv.org/abs/1910.07467), used by every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.kernels.torch_ops import RowOps

if TYPE_CHECKING:
    import torch


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""

    def __init__(self, ops: RowOps, weight: torch.Tensor, eps: float) -> None:
        self.ops, self.weight, self.eps = ops, weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def inplace(self, x: torch.Tensor) -> None:
        """Normalizes x, which may be a slice of wider rows, where it lies."""
        self.ops.rms_norm(x, self.weight, self.eps, out=x)
