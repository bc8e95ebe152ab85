"""FlashInfer's fused CUTLASS MoE: of 16-bit weights here; of quantized ones its limits are declared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.moe.gate_up import GateUpExperts
from pellucid.traits.backend import BackendTraits, Package, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.context import KernelContext
    from pellucid.quantization.weight import StoredWeight

TRAITS = BackendTraits(
    name="flashinfer_cutlass",
    op="moe",
    summary="FlashInfer cutlass_fused_moe, compiled with nvcc on first use",
    priority=Priority.THIRD_PARTY + 30,
    source="FlashInfer 0.6.14 cutlass_fused_moe",
    built_in=True,
    devices=frozenset({"cuda"}),
    sm=frozenset({90, 100, 103, 120, 121}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    weight_schemes=frozenset({"bf16", "fp16", "fp8", "int4", "nvfp4"}),
    scheme_sms=(
        ("fp8", frozenset({90})),
        ("int4", frozenset({90})),
        ("nvfp4", frozenset({100, 103, 120, 121})),
    ),
    prepares=frozenset({"bf16", "fp16"}),
    weight_groups=frozenset({16, 32, 64, 128}),
    shard_multiple_of=64,
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="Not run on hardware by us; the numeric gate decides on yours. nvfp4 on SM 12.0 gave wrong results in some "
    "versions (NVIDIA/cutlass#3096).",
    unverified=frozenset({"sm", "scheme_sms", "weight_groups", "shard_multiple_of"}),
)


def create(context: KernelContext) -> FlashInferCutlassMoE:
    return FlashInferCutlassMoE(context.dtype, context.device)


class FlashInferCutlassMoE:
    """Implements `MoEBackend`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def prepare(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> CutlassExperts:
        # Its first product wants up before gate, so nobody else can read these weights.
        return CutlassExperts(GateUpExperts.of(up, gate, down, self.dtype, self.device))


class CutlassExperts:
    """Sorting, both products, SwiGLU and the weighted sum in one call. Implements `MoEKernel`."""

    def __init__(self, up_gate: GateUpExperts) -> None:
        self._weights, self.nbytes = up_gate, up_gate.nbytes

    def add_to(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        import torch
        from flashinfer.fused_moe import cutlass_fused_moe

        chosen, shares = experts.to(torch.int32).contiguous(), weights.float().contiguous()
        first, second = self._weights.gate_up, self._weights.down
        result = torch.empty_like(out, memory_format=torch.contiguous_format)
        cutlass_fused_moe(x.contiguous(), chosen, shares, first, second, out.dtype, quant_scales=[], output=result)
        out += result
