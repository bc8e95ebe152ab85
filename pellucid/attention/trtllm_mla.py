"""Declaration of TensorRT-LLM's generated MLA decode kernels, reached through FlashInfer, for datacentre Blackwell."""

from __future__ import annotations

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, MLADims, Package, Priority

TRAITS = BackendTraits(
    name="trtllm_mla",
    op="attention",
    summary="TensorRT-LLM generated decode kernels",
    priority=Priority.THIRD_PARTY + 60,
    source="flashinfer/mla/_batch_mla/_backends/trtllm_gen_backend.py at 0661f22",
    phases=frozenset({"decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({100, 103}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, 128), MLADims(256, 64, 64), MLADims(512, 0, 256)}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=frozenset({32, 64}),
    kv_dtypes=frozenset({"bf16", "fp8"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16"}),
    packages=(Package("flashinfer-python"),),
    notes="Its planned wrapper refuses a YaRN softmax scale; the functional call takes the scale as bmm1_scale.",
    unverified=frozenset({"head_rule", "query_lens"}),
)
