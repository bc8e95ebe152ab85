"""Our Triton MoE kernels: pairs sorted by expert, gate and up in one product. Decode graphs read its weights too."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """16-bit experts on the device, [gate | up] in one matrix. Implements `MoEBackend`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        from pellucid.kernels.device import device_limits
        from pellucid.kernels.triton.moe_grouped import H100_SHARED_MEMORY

        self.dtype, self.device = dtype, device
        self.shared_memory = H100_SHARED_MEMORY
        if device.type == "cuda":
            self.shared_memory = device_limits(device).shared_memory

    def prepare(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> GroupedExperts:
        import torch

        experts, intermediate, hidden = gate.shape
        gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=self.dtype, device=self.device)
        down_proj = torch.empty(experts, hidden, intermediate, dtype=self.dtype, device=self.device)
        # One expert at a time, so that there is never a second copy of a layer on the device.
        for target, weight in (
            (gate_up[:, :intermediate], gate), (gate_up[:, intermediate:], up), (down_proj, down)
        ):  # fmt: skip
            for expert, matrix in zip(target, weight.matrices(), strict=True):
                expert.copy_(matrix.dequantize(self.dtype))
        return GroupedExperts(gate_up, down_proj, self.shared_memory)


class GroupedExperts:
    """gate_up [experts, 2 * intermediate, hidden], down [experts, hidden, intermediate]. Implements `MoEKernel`."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, shared_memory: int) -> None:
        self.gate_up, self.down, self.shared_memory = gate_up, down, shared_memory
        self.nbytes = gate_up.nbytes + down.nbytes

    def add_to(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        step = max(1, MAX_PAIRS // experts.shape[1])
        for begin in range(0, x.shape[0], step):
            part = slice(begin, begin + step)
            self._add_part(out[part], x[part], experts[part], weights[part])

    def _add_part(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        import torch

        from pellucid.kernels.triton import moe_grouped

        num_experts, hidden, intermediate = self.down.shape
        rows, pairs = x.shape[0], experts.numel()
        tiles = moe_grouped.grouped_tiles(pairs, num_experts, hidden, intermediate, self.shared_memory)
        blocks = moe_grouped.ExpertBlocks.allocate(pairs, num_experts, tiles.block_m, x.device)
        act = x.new_empty(pairs, intermediate)
        pair_out = x.new_empty(pairs, hidden, dtype=x.dtype if rows > ROUNDED_ROWS else torch.float32)
        moe_grouped.sort_by_expert(experts.contiguous(), blocks)
        moe_grouped.grouped_up(x, self.gate_up, blocks, act, tile=tiles.up)
        moe_grouped.grouped_down(act, self.down, blocks, weights.contiguous(), pair_out, tile=tiles.down)
        moe_grouped.reduce_pairs(pair_out, out)
