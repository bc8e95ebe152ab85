"""Linear layers: one or several stored matrices that share an input. Built by the attention and MLP layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pellucid.quantization.base import LinearBackend, LinearKernel
from pellucid.quantization.weight import StoredWeight, concatenate_rows

if TYPE_CHECKING:
    import torch


class Linear:
    """y = x W^T + b, outputs of several matrices side by side.

    Matrices stored alike become one kernel (one read of x, one launch); others keep a kernel each and write
    into their slice of the output.
    """

    def __init__(
        self, backend: LinearBackend, weights: Sequence[StoredWeight], biases: Sequence[torch.Tensor | None] = ()
    ) -> None:
        import torch

        biases = biases or [None] * len(weights)
        alike = concatenate_rows(weights)
        self.kernels: list[LinearKernel]
        if alike is not None and len({bias is None for bias in biases}) == 1:
            present = [bias for bias in biases if bias is not None]
            self.kernels = [backend.prepare(alike, torch.cat(present) if present else None)]
        else:
            self.kernels = [backend.prepare(w, b) for w, b in zip(weights, biases, strict=True)]
        self.rows = sum(kernel.rows for kernel in self.kernels)
        self.nbytes = sum(kernel.nbytes for kernel in self.kernels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, columns] -> [tokens, rows]."""
        out = x.new_empty(x.shape[0], self.rows)
        if len(self.kernels) == 1:
            self.kernels[0].into(x, out)
            return out
        start = 0
        for kernel in self.kernels:
            kernel.into(x, out[:, start : start + kernel.rows])
            start += kernel.rows
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual [tokens, rows] += x W^T + b."""
        (kernel,) = self.kernels
        kernel.into(x, residual, accumulate=True)
