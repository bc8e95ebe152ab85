"""Our Triton MoE kernels: pairs sorted by expert, gate and up in one product. Decode graphs read its weights too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.moe.gate_up import FORM, GateUpExperts
from pellucid.traits.backend import ANY, BackendTraits, Package, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.context import KernelContext
    from pellucid.quantization.weight import StoredWeight

TRAITS = BackendTraits(
    name="triton_fused",
    op="moe",
    summary="own Triton kernels, tokens sorted by expert",
    priority=Priority.OWN_PORTABLE,
    source="this file",
    built_in=True,
    fused_decode="inside",
    devices=frozenset({"cuda"}),
    sm=ANY,
    compute_dtypes=frozenset({"bf16", "fp16"}),
    weight_schemes=frozenset({"bf16", "fp16"}),
    weight_form=FORM,
    packages=(Package("triton"),),
    notes="Triton compiles for the device it finds. No int4: unpacking takes Triton 6 to 7 instructions a weight.",
)

MAX_PAIRS = 1 << 16
"""Pairs at a time: 8192 tokens that take 8 experts each. Bounds the workspace, which grows with the pairs."""

ROUNDED_ROWS = 512
"""Beyond so many rows a pair's output is kept in the compute dtype: in fp32 it would be too large for L2."""


def create(context: KernelContext) -> TritonFusedMoE:
    return TritonFusedMoE(context.dtype, context.device)


class TritonFusedMoE:
    """16-bit experts on the device. Implements `MoEBackend`, and `by_bucket.SharingBackend`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        from pellucid.kernels.device import device_limits
        from pellucid.kernels.triton.moe_grouped import H100_SHARED_MEMORY

        self.dtype, self.device = dtype, device
        self.shared_memory = H100_SHARED_MEMORY
        if device.type == "cuda":
            self.shared_memory = device_limits(device).shared_memory

    def prepare(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> GroupedExperts:
        return self.kernel(GateUpExperts.of(gate, up, down, self.dtype, self.device))

    def kernel(self, weights: GateUpExperts) -> GroupedExperts:
        """Over weights that others may read too."""
        return GroupedExperts(weights, self.shared_memory)


class GroupedExperts:
    """Implements `MoEKernel`."""

    def __init__(self, weights: GateUpExperts, shared_memory: int) -> None:
        self.weights, self.shared_memory = weights, shared_memory
        self.nbytes = weights.nbytes

    def add_to(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        step = max(1, MAX_PAIRS // experts.shape[1])
        for begin in range(0, x.shape[0], step):
            part = slice(begin, begin + step)
            self._add_part(out[part], x[part], experts[part], weights[part])

    def _add_part(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        import torch

        from pellucid.kernels.triton import moe_grouped

        gate_up, down = self.weights.gate_up, self.weights.down
        num_experts, hidden, intermediate = down.shape
        rows, pairs = x.shape[0], experts.numel()
        tiles = moe_grouped.grouped_tiles(pairs, num_experts, hidden, intermediate, self.shared_memory)
        blocks = moe_grouped.ExpertBlocks.allocate(pairs, num_experts, tiles.block_m, x.device)
        act = x.new_empty(pairs, intermediate)
        pair_out = x.new_empty(pairs, hidden, dtype=x.dtype if rows > ROUNDED_ROWS else torch.float32)
        moe_grouped.sort_by_expert(experts.contiguous(), blocks)
        moe_grouped.grouped_up(x, gate_up, blocks, act, tile=tiles.up)
        moe_grouped.grouped_down(act, down, blocks, weights.contiguous(), pair_out, tile=tiles.down)
        moe_grouped.reduce_pairs(pair_out, out)
