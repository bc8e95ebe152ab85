"""The interface of a MoE backend. Implemented one per file here, called by `layers.moe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pellucid.quantization.weight import StoredWeight

if TYPE_CHECKING:
    import torch


class MoEKernel(Protocol):
    """The routed experts of one layer. `nbytes` is what all of them occupy."""

    nbytes: int

    def add_to(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """out[t] += sum_k weights[t, k] * expert(experts[t, k])(x[t]).

        x, out [tokens, hidden]; experts int64 [tokens, top_k]; weights fp32 [tokens, top_k].
        """
        ...


class MoEBackend(Protocol):
    """Turns the stored experts of a layer into a kernel, once, at load."""

    def prepare(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> MoEKernel:
        """gate, up [experts, intermediate, hidden]; down [experts, hidden, intermediate]."""
        ...
