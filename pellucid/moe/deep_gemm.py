"""DeepGEMM's grouped bf16 products over tokens sorted by expert, from the wheel `sgl-deep-gemm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.moe.gate_up import FORM, GateUpExperts
from pellucid.traits.backend import BackendTraits, Package, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.context import KernelContext
    from pellucid.quantization.weight import StoredWeight

TRAITS = BackendTraits(
    name="deep_gemm",
    op="moe",
    summary="DeepGEMM grouped bf16 products, compiled with nvcc on first use",
    priority=Priority.THIRD_PARTY + 20,
    source="sgl-deep-gemm 0.1.5 and 0.2.5: m_grouped_bf16_gemm_nt_contiguous",
    built_in=True,
    devices=frozenset({"cuda"}),
    sm=frozenset({90, 100, 103}),
    compute_dtypes=frozenset({"bf16"}),
    weight_schemes=frozenset({"bf16"}),
    weight_form=FORM,
    shard_multiple_of=128,
    packages=(Package("sgl-deep-gemm"),),
    needs_compiler="nvcc",
    notes="Its products of fp8 blocks are not called by this version. On SM 12.0, where vLLM 0.33 takes it, it crashed "
    "instead of refusing (sglang#18870): not declared. On an H200 it passed the gate, at half the speed of ours.",
    unverified=frozenset({"sm"}),
)

BLOCK = 128
"""Rows of one expert begin at a multiple of it, and are multiplied so many at a time."""

MAX_PAIRS = 1 << 15
"""Pairs at a time. Bounds the workspace: their rows before and after each product lie in memory."""


def create(context: KernelContext) -> DeepGemmMoE:
    return DeepGemmMoE(context.dtype, context.device)


class DeepGemmMoE:
    """Implements `MoEBackend`, and `by_bucket.SharingBackend`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def prepare(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> DeepGemmExperts:
        return self.kernel(GateUpExperts.of(gate, up, down, self.dtype, self.device))

    def kernel(self, weights: GateUpExperts) -> DeepGemmExperts:
        return DeepGemmExperts(weights)


class DeepGemmExperts:
    """Gather, product, SwiGLU, product, weighted sum. Implements `MoEKernel`."""

    def __init__(self, weights: GateUpExperts) -> None:
        self.weights, self.nbytes = weights, weights.nbytes

    def add_to(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        step = max(1, MAX_PAIRS // experts.shape[1])
        for begin in range(0, x.shape[0], step):
            part = slice(begin, begin + step)
            self._add_part(out[part], x[part], experts[part], weights[part])

    def _add_part(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        import deep_gemm
        import torch

        from pellucid.kernels.triton.moe_grouped import ExpertBlocks, sort_by_expert
        from pellucid.kernels.triton.row_ops import silu_mul

        gate_up, down = self.weights.gate_up, self.weights.down
        num_experts, hidden, intermediate = down.shape
        pairs, top_k = experts.numel(), experts.shape[1]
        blocks = ExpertBlocks.allocate(pairs, num_experts, BLOCK, x.device)
        sort_by_expert(experts.contiguous(), blocks)
        there = torch.arange(blocks.max_blocks, device=x.device, dtype=torch.int32) < blocks.count
        # What is behind the last block was never written: -1 is no expert, and its rows are not multiplied.
        expert_of_row = blocks.block_experts.where(there, -1).repeat_interleave(BLOCK)
        pair_of_row = blocks.sorted_pairs.where(there.repeat_interleave(BLOCK), pairs).long()
        rows = pair_of_row.shape[0]

        sorted_x = x[(pair_of_row.clamp(max=pairs - 1) // top_k)]
        wide = x.new_empty(rows, 2 * intermediate)
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(sorted_x, gate_up, wide, expert_of_row)
        act = x.new_empty(rows, intermediate)
        silu_mul(wide, act)
        sorted_out = x.new_empty(rows, hidden)
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(act, down, sorted_out, expert_of_row)

        # Filler rows all go to the place behind the last pair, which nobody reads.
        row_of_pair = pair_of_row.new_empty(pairs + 1)
        row_of_pair[pair_of_row] = torch.arange(rows, device=x.device)
        chosen = sorted_out[row_of_pair[:pairs]].view(-1, top_k, hidden)
        out += torch.bmm(weights[:, None], chosen.float()).squeeze(1).to(out.dtype)
