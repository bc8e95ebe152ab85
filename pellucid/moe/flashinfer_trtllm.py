"""Declaration of TensorRT-LLM's generated MoE kernels, reached through FlashInfer, for datacentre Blackwell."""

from __future__ import annotations

from pellucid.traits.backend import BackendTraits, Package, Priority

TRAITS = BackendTraits(
    name="flashinfer_trtllm",
    op="moe",
    summary="TensorRT-LLM generated kernels, routing included",
    priority=Priority.THIRD_PARTY + 50,
    source="FlashInfer 0.6.14 trtllm_*_moe",
    devices=frozenset({"cuda"}),
    sm=frozenset({100, 103}),
    compute_dtypes=frozenset({"bf16"}),
    weight_schemes=frozenset({"bf16", "fp8", "int4", "nvfp4", "mxfp4"}),
    weight_groups=frozenset({16, 32, 128}),
    shard_multiple_of=128,
    packages=(Package("flashinfer-python"),),
    notes="int4 is its MxInt4 form: groups of 32, symmetric.",
    unverified=frozenset({"weight_schemes", "weight_groups", "shard_multiple_of"}),
)
