"""Models that need something Pellucid has not are refused by the name of the trait, with the sign that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.core import UnsupportedModelError
from pellucid.traits.config import read_traits
from tests.headers import config_names, index_of, load_config, tiny_config, tiny_shapes

REFUSED = {
    "DeepSeek-V3.2": {"sparse attention indexer (DSA)"},
    "DeepSeek-V3.2-NVFP4": {"sparse attention indexer (DSA)"},
    "DeepSeek-V4-Flash": {
        "sparse attention indexer (DSA)", "compressed KV attention", "hash-routed experts", "hyper-connections",
        "grouped output projection", "router scoring 'sqrtsoftplus'", "sliding-window attention", "clamped SwiGLU",
    },
    "GLM-5": {"sparse attention indexer (DSA)"},
    "GLM-5.3": {"sparse attention indexer (DSA)"},
    "glm-5-fp8": {"sparse attention indexer (DSA)"},
    "Kimi-K3": {
        "linear attention", "MLA without rope", "attention output gate", "experts in a latent width",
        "attention residuals", "activation 'situ'",
    },
    "gpt-oss-120b": {"attention sinks", "sliding-window attention", "clamped SwiGLU"},
    "qwen3-next-80b-bf16": {"linear attention", "shared-expert gate", "partial rotary embedding"},
    "nemotron-h-56b-bf16": {"state-space layers (Mamba)", "activation 'relu2'"},
    "nemotron3-nano-bf16": {"state-space layers (Mamba)", "activation 'relu2'"},
    "glm-4.5-air-fp8": {"partial rotary embedding"},
}  # fmt: skip


@pytest.mark.parametrize("name", config_names())
def test_published_models_are_served_or_refused_by_trait(name: str) -> None:
    report = read_traits(load_config(name))
    assert {entry.trait for entry in report.missing} == REFUSED.get(name, set())
    if not report.missing:
        report.require_supported()
        return
    with pytest.raises(UnsupportedModelError) as raised:
        report.require_supported()
    assert raised.value.trait == report.missing[0].trait
    for entry in report.missing:
        assert entry.trait in str(raised.value) and entry.shown_by in str(raised.value)
    for architecture in load_config(name)["architectures"]:
        assert architecture not in str(raised.value)


SIGNS: list[tuple[str, dict[str, Any]]] = [
    ("sparse attention indexer (DSA)", {"index_topk": 2048}),
    ("sparse attention indexer (DSA)", {"layer_types": ["indexed_attention"] * 61}),
    ("state-space layers (Mamba)", {"mamba_num_heads": 8}),
    ("linear attention", {"linear_attn_config": {"num_heads": 8}}),
    ("linear attention", {"full_attention_interval": 4}),
    ("linear attention", {"layer_types": ["linear_attention", "full_attention"]}),
    ("chunked attention", {"attention_chunk_size": 8192}),
    ("chunked attention", {"layer_types": ["chunked_attention"]}),
    ("layer type 'spiral_attention'", {"layer_types": ["spiral_attention"]}),
    ("sliding-window attention", {"sliding_window": 4096}),
    ("sliding-window attention", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}),
    ("sliding-window attention", {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}),
    ("MLA without rope", {"mla_use_nope": True}),
    ("MLA without rope", {"qk_rope_head_dim": 0}),
    ("layers without rope", {"no_rope_layers": [1, 1, 0]}),
    ("attention output gate", {"attn_output_gate": True}),
    ("activation 'gelu'", {"hidden_act": "gelu"}),
    ("attention logit soft-capping", {"attn_logit_softcapping": 50.0}),
    ("final logit soft-capping", {"final_logit_softcapping": 30.0}),
    ("embedding multiplier", {"scale_emb": 12}),
    ("residual multiplier", {"scale_depth": 1.4}),
    ("attention multiplier", {"query_pre_attn_scalar": 256}),
    ("logit multiplier", {"logits_scaling": 8.0}),
    ("partial rotary embedding", {"partial_rotary_factor": 0.5}),
    ("zero experts", {"zero_expert_num": 256}),
    ("scaled MLA latents", {"mla_scale_q_lora": True}),
    ("compressed KV attention", {"compress_ratios": [0, 4, 128]}),
    ("encoder-decoder", {"is_encoder_decoder": True}),
    ("router scoring 'sqrtsoftplus'", {"scoring_func": "sqrtsoftplus"}),
    ("expert choice 'hash'", {"topk_method": "hash"}),
    ("hyper-connections", {"hc_mult": 4}),
    ("shared-expert gate", {"shared_expert_intermediate_size": 512}),
    ("parallel attention and MLP blocks", {"use_parallel_residual": True}),
    ("rope scaling 'longrope'", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}),
    ("rope scaling 'dynamic'", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("position-dependent query scale", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}),
    (
        "rotary embedding per layer type",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
    ),
]


@pytest.mark.parametrize(("trait", "change"), SIGNS)
def test_a_key_that_is_in_use_refuses_any_model(trait: str, change: dict[str, Any]) -> None:
    report = read_traits(load_config("DeepSeek-V3") | change)
    shown = {entry.trait: entry.shown_by for entry in report.missing}
    assert trait in shown
    assert any(word in shown[trait] for word in (*change, *map(str, change.get("rope_parameters", {})), "rope_type"))


UNUSED: list[dict[str, Any]] = [
    {"sliding_window": None},
    {"sliding_window": 4096, "use_sliding_window": False},
    {"sliding_window": 4096, "use_sliding_window": None},
    {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 61},
    {"sliding_window": 10**6},
    {"sliding_window": 4096, "layer_types": ["full_attention"] * 61},
    {"index_topk": None},
    {"linear_attn_config": None},
    {"mla_use_nope": False},
    {"no_rope_layers": [1] * 61},
    {"logits_scaling": 1.0, "embedding_multiplier": 1, "residual_multiplier": 1.0},
    {"partial_rotary_factor": 1.0},
    {"zero_expert_num": 0},
    {"is_encoder_decoder": False, "add_cross_attention": False},
    {"rope_scaling": {"type": "default"}},
    {"hidden_act": "swish"},
    {"full_attention_interval": 1},
    {"attn_logit_softcapping": None},
]


@pytest.mark.parametrize("change", UNUSED)
def test_a_key_that_is_switched_off_refuses_nothing(change: dict[str, Any]) -> None:
    assert read_traits(load_config("DeepSeek-V3") | change).missing == ()


TENSOR_SIGNS: list[tuple[str, str]] = [
    ("attention sinks", "model.layers.0.self_attn.sinks"),
    ("sparse attention indexer (DSA)", "model.layers.1.self_attn.indexer.wk.weight"),
    ("shared-expert gate", "model.layers.1.mlp.shared_expert_gate.weight"),
    ("attention output gate", "model.layers.2.self_attn.g_proj.weight"),
    ("linear attention", "model.layers.0.linear_attn.conv1d.weight"),
    ("router bias", "model.layers.1.mlp.gate.bias"),
    ("LayerNorm", "model.layers.0.input_layernorm.bias"),
    ("norms around each block", "model.layers.0.pre_feedforward_layernorm.weight"),
    ("lm_head bias", "lm_head.bias"),
]


@pytest.mark.parametrize(("trait", "tensor"), TENSOR_SIGNS)
def test_a_tensor_shows_what_no_key_says(trait: str, tensor: str) -> None:
    shapes = {**tiny_shapes("v3"), tensor: ("F32", (4,))}
    report = read_traits(tiny_config("v3"), index_of(shapes))
    shown = {entry.trait: entry.shown_by for entry in report.missing}
    assert trait in shown and tensor.removeprefix("model.layers.")[2:].partition(".")[0] in shown[trait]


def test_norms_over_all_heads_and_post_norms_are_refused() -> None:
    config, shapes = tiny_config("qwen3"), tiny_shapes("qwen3")
    wide = {**shapes, "model.layers.0.self_attn.q_norm.weight": ("F32", (128,))}
    assert [entry.trait for entry in read_traits(config, index_of(wide)).missing] == [
        "query and key norms over all heads"
    ]
    post = {name: value for name, value in shapes.items() if "input_layernorm" not in name}
    assert [entry.trait for entry in read_traits(config, index_of(post)).missing] == ["norms after each block only"]


def test_sinks_are_suspected_from_a_config_and_decided_by_tensors() -> None:
    config = tiny_config("qwen3") | {"sliding_window": 128, "swiglu_limit": 7.0}
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    suspected = {entry.trait: entry.shown_by for entry in read_traits(config).missing}
    assert "would confirm" in suspected["attention sinks"]
    decided = {entry.trait for entry in read_traits(config, index_of(tiny_shapes("qwen3"))).missing}
    assert "attention sinks" not in decided and "sliding-window attention" in decided


def test_an_incomplete_config_of_an_unsupported_model_is_refused_by_trait() -> None:
    config = load_config("DeepSeek-V4-Flash")
    del config["num_attention_heads"]
    with pytest.raises(UnsupportedModelError, match=r"compressed KV.*besides.*num_attention_heads") as raised:
        read_traits(config)
    assert raised.value.trait == "sparse attention indexer (DSA)"
