"""The interfaces of a linear backend. Implemented by `reference` and `cpu_native`, called by `layers.linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pellucid.quantization.weight import StoredWeight

if TYPE_CHECKING:
    import torch


class LinearKernel(Protocol):
    """One prepared matrix. `nbytes` is what it occupies and what a decode step reads."""

    rows: int
    columns: int
    nbytes: int

    def into(self, x: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        """out [tokens, rows] = (or +=) x [tokens, columns] W^T + bias; out may have any row stride."""
        ...


class HeadwiseKernel(Protocol):
    """One small dense matrix per attention head: the two halves of MLA's kv_b projection."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, columns] -> [tokens, heads, rows]."""
        ...


class LinearBackend(Protocol):
    """Turns stored weights into kernels, once, at load."""

    dtype: torch.dtype
    device: torch.device

    def prepare(self, weight: StoredWeight, bias: torch.Tensor | None = None) -> LinearKernel: ...

    def prepare_headwise(self, weight: torch.Tensor) -> HeadwiseKernel:
        """weight: dense [heads, rows, columns]."""
        ...
