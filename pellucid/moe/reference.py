"""Mixture of experts in plain torch: the reference every other backend is compared with, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.quantization.weight import READABLE_SCHEMES
from pellucid.traits.backend import ANY, BackendTraits, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.context import KernelContext
    from pellucid.quantization.weight import StoredWeight

TRAITS = BackendTraits(
    name="reference",
    op="moe",
    summary="plain torch, one expert at a time, weights dequantized at load",
    priority=Priority.REFERENCE,
    source="this file",
    built_in=True,
    devices=frozenset({"cpu", "cuda"}),
    sm=ANY,
    compute_dtypes=frozenset({"fp32", "bf16", "fp16"}),
    weight_schemes=READABLE_SCHEMES,
    keeps_packed=frozenset(),
    weight_groups=ANY,
)


def create(context: KernelContext) -> ReferenceMoE:
    return ReferenceMoE(context.dtype, context.device)


class ReferenceMoE:
    """Expert by expert, on the rows routed to it. Implements `MoEBackend`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def prepare(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> ReferenceExperts:
        return ReferenceExperts(*(w.dequantize(self.dtype).to(self.device) for w in (gate, up, down)))


class ReferenceExperts:
    """gate, up [experts, intermediate, hidden]; down [experts, hidden, intermediate]."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        self.gate, self.up, self.down = gate, up, down
        self.nbytes = gate.nbytes + up.nbytes + down.nbytes

    def add_to(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        import torch

        linear = torch.nn.functional.linear
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for expert in experts.unique().tolist():
            token, slot = (experts == expert).nonzero(as_tuple=True)
            rows = x[token]
            hidden = torch.nn.functional.silu(linear(rows, self.gate[expert])) * linear(rows, self.up[expert])
            y = linear(hidden, self.down[expert]).float()
            total.index_add_(0, token, y * weights[token, slot, None])
        out += total.to(out.dtype)
