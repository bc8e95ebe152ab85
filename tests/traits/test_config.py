"""Traits read from published configs: the values, whatever the spelling, the nesting and the model's name."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from pellucid.traits.config import read_traits
from pellucid.traits.model import GQATraits, MLATraits, ModelTraits
from tests.headers import config_names, load_config, text_of

V3 = {
    "hidden": 7168, "layers": 61, "heads": 128, "q_lora": 1536, "latent": (512, 128, 64, 128), "theta": 1e4,
    "yarn": (40.0, 32.0, 1.0, 1.0, 1.0), "scale": 0.1352337789, "experts": (256, 8, 1, 2048), "dense": (18432, 3),
    "gate": ("sigmoid", True, "top2_sum"), "groups": (8, 4), "normalize": True, "scaling": 2.5, "mtp": 1, "eps": 1e-6,
    "vocab": 129280, "ends": (0, (1,)), "max_position": 163840,
    "weights": ("fp8 block 128x128",) * 4 + ("bf16",),
}  # fmt: skip
V2 = {
    **V3, "hidden": 5120, "layers": 60, "scale": 0.1352337789, "experts": (160, 6, 2, 1536), "dense": (12288, 1),
    "gate": ("softmax", False, "max"), "groups": (8, 3), "normalize": False, "scaling": 16.0, "mtp": 0,
    "vocab": 102400, "ends": (100000, (100001,)), "weights": ("bf16",) * 5,
}  # fmt: skip
V2_LITE = {
    **V2, "hidden": 2048, "layers": 27, "heads": 16, "q_lora": None, "yarn": (40.0, 32.0, 1.0, 0.707, 0.707),
    "scale": 0.1147213868, "experts": (64, 6, 2, 1408), "dense": (10944, 1), "gate": ("softmax", False, "none"),
    "groups": (1, 1), "scaling": 1.0,
}  # fmt: skip
MOONLIGHT = {
    **V2_LITE, "theta": 5e4, "yarn": None, "scale": 0.0721687836, "dense": (11264, 1), "normalize": True,
    "gate": ("sigmoid", True, "none"), "scaling": 2.446, "eps": 1e-5, "vocab": 163840, "ends": (163584, (163586,)),
    "max_position": 8192,
}  # fmt: skip
K2 = {
    **V3, "heads": 64, "theta": 5e4, "yarn": (32.0, 1.0, 1.0, 1.0, 1.0), "scale": 0.1308608000,
    "experts": (384, 8, 1, 2048), "dense": (18432, 1), "gate": ("sigmoid", True, "none"), "groups": (1, 1),
    "scaling": 2.827, "mtp": 0, "vocab": 163840, "ends": (163584, (163585,)), "max_position": 131072,
}  # fmt: skip
K25 = {
    **K2, "yarn": (64.0, 32.0, 1.0, 1.0, 1.0), "scale": 0.1446796258, "eps": 1e-5, "max_position": 262144,
    "weights": ("bf16", "bf16", "int4 group 32 symmetric", "bf16", "bf16"),
}  # fmt: skip
GLM5 = {
    **V3, "hidden": 6144, "layers": 78, "heads": 64, "q_lora": 2048, "latent": (512, 192, 64, 256), "theta": 1e6,
    "yarn": None, "scale": 0.0625, "dense": (12288, 3), "gate": ("sigmoid", True, "none"), "groups": (1, 1),
    "eps": 1e-5, "vocab": 154880, "ends": (None, (154820, 154827, 154829)), "max_position": 202752,
    "weights": ("bf16",) * 5,
}  # fmt: skip
NVFP4 = "nvfp4 group 16 symmetric"
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": V2_LITE,
    "DeepSeek-V2": V2,
    "DeepSeek-V3": V3,
    "DeepSeek-R1": V3,
    "DeepSeek-V3.2": V3,
    "Moonlight-16B-A3B": MOONLIGHT,
    "Kimi-K2-Instruct": K2,
    "Kimi-K2.5": K25,
    "Kimi-K2.5-NVFP4": {**K25, "weights": ("bf16", NVFP4, NVFP4, NVFP4, "bf16")},
    "Kimi-K2.6-NVFP4": {**K25, "ends": (163584, (163586,)), "weights": ("bf16", "bf16", NVFP4, "bf16", "bf16")},
    "Kimi-K2.7-Code-NVFP4": {**K25, "ends": (163584, (163586,)), "weights": ("bf16", "bf16", NVFP4, "bf16", "bf16")},
    "GLM-5": GLM5,
}
FLASH = {
    "architectures": ["AnyName"], "hidden_act": "silu", "attention_bias": False, "hidden_size": 2048,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5, "vocab_size": 154880, "eos_token_id": [154820, 154827, 154829], "dtype": "bfloat16",
    "tie_word_embeddings": False, "first_k_dense_replace": 1, "rope_theta": 1000000, "rope_scaling": None,
    "partial_rotary_factor": 1.0, "topk_method": "noaux_tc",
}  # fmt: skip


def described(traits: ModelTraits) -> dict[str, Any]:
    """Traits of the MLA family in the terms of the table above."""
    mla, moe, weights = traits.attention, traits.moe, traits.weights
    assert isinstance(mla, MLATraits) and moe is not None and mla.rope.interleaved and mla.inner_eps == traits.norm_eps
    assert mla.rope.dim == mla.qk_rope_head_dim and not traits.tied_embeddings and traits.dtype == "bfloat16"
    rope = mla.rope
    yarn = (rope.factor, rope.beta_fast, rope.beta_slow, rope.mscale, rope.mscale_all_dim)
    return {
        "hidden": traits.hidden_size,
        "layers": traits.num_layers,
        "heads": mla.num_heads,
        "q_lora": mla.q_lora_rank,
        "latent": (mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim),
        "theta": rope.theta,
        "yarn": yarn if rope.kind == "yarn" else None,
        "scale": pytest.approx(mla.softmax_scale, abs=1e-9),
        "experts": (moe.num_experts, moe.top_k, moe.num_shared_experts, moe.intermediate_size),
        "dense": (traits.intermediate_size, traits.num_dense_layers),
        "gate": (moe.scoring, moe.correction_bias, moe.group_rule),
        "groups": (moe.num_groups, moe.topk_groups),
        "normalize": moe.normalize,
        "scaling": moe.scaling,
        "mtp": traits.mtp_layers,
        "eps": traits.norm_eps,
        "vocab": traits.vocab_size,
        "ends": (traits.bos_token_id, traits.eos_token_ids),
        "max_position": traits.max_position,
        "weights": tuple(
            map(
                str,
                (
                    weights.attention,
                    weights.dense_mlp,
                    weights.routed_experts,
                    weights.shared_experts,
                    weights.lm_head,
                ),
            )
        ),
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_published_values(name: str) -> None:
    traits = read_traits(load_config(name)).traits
    assert described(traits) == PUBLISHED[name]
    assert traits.moe is not None
    assert traits.moe.shared_intermediate_size == traits.moe.num_shared_experts * traits.moe.intermediate_size
    assert traits.moe_layers == tuple(layer >= traits.num_dense_layers for layer in range(traits.num_layers))


@pytest.mark.parametrize(
    ("name", "itemsize", "expected"),
    [("Kimi-K2.5", 2, 70272), ("Kimi-K2.5", 1, 35136), ("DeepSeek-V2-Lite", 2, 31104), ("DeepSeek-V3", 2, 70272)],
)
def test_kv_bytes_per_token_are_the_latent_row_whatever_the_tensor_parallel_size(
    name: str, itemsize: int, expected: int
) -> None:
    traits = read_traits(load_config(name)).traits
    assert {traits.kv_bytes_per_token(itemsize, size) for size in (1, 2, 8)} == {expected}


@pytest.mark.parametrize(
    ("qk", "rope", "scale", "over_plain"),
    [
        ((128, 64), {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}, 0.14467963, 2.00474),
        ((128, 64), {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}, 0.13523378, 1.873854),
        ((128, 64), {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707, "type": "yarn"}, 0.11472139, 1.589626),
        ((192, 64), {"rope_type": "default", "rope_theta": 1000000.0}, 0.0625, 1.0),
    ],
    ids=["k25", "v3", "v2-lite", "plain-v5-style"],
)
def test_softmax_scale_carries_the_squared_mscale_and_cos_sin_do_not(
    qk: tuple[int, int], rope: dict[str, Any], scale: float, over_plain: float
) -> None:
    config = load_config("Kimi-K2-Instruct")
    config |= {"qk_nope_head_dim": qk[0], "qk_rope_head_dim": qk[1], "rope_scaling": rope}
    if rope.get("type") == "yarn":
        rope["original_max_position_embeddings"] = 4096
    else:
        config["rope_parameters"] = dict(rope)
        del config["rope_theta"]
    attention = read_traits(config).traits.attention
    assert attention.softmax_scale == pytest.approx(scale, abs=1e-7)
    assert attention.softmax_scale * sum(qk) ** 0.5 == pytest.approx(over_plain, abs=1e-6)
    assert attention.rope.cos_sin_multiplier == pytest.approx(1.0, abs=1e-7)
    assert attention.rope.kind == ("yarn" if "type" in rope else "default")


def renamed(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same model under other names, at every level."""
    config = copy.deepcopy(config)
    for level in (config, config.get("text_config") or {}):
        level["architectures"] = [f"Model{rng.randrange(10**6)}ForCausalLM"]
        level["model_type"] = f"family_{rng.randrange(10**6)}"
        level.pop("auto_map", None)
    return config


@pytest.mark.parametrize("name", config_names())
def test_traits_do_not_depend_on_names_nor_on_nesting(name: str) -> None:
    config = load_config(name)
    rng = random.Random(name)
    expected = read_traits(config)
    text = {**config, **text_of(config)}
    text.pop("text_config", None)
    variants = [
        renamed(config, rng),
        {**text, "architectures": ["SomethingElseForCausalLM"]},
        {"architectures": ["Wrapper"], "text_config": text, "vision_config": {"hidden_size": 12}},
        {"llm_config": renamed(text, rng), "eos_token_id": config.get("eos_token_id")},
    ]
    for variant in variants:
        report = read_traits(variant)
        assert report.traits == expected.traits
        assert report.missing == expected.missing


def test_three_spellings_of_kimi_k25_are_one_model() -> None:
    given = load_config("Kimi-K2.5")
    other = copy.deepcopy(given)
    other["architectures"] = other["text_config"]["architectures"] = ["SomethingElseForCausalLM"]
    lifted = {**given["text_config"], "architectures": ["DeepseekV3ForCausalLM"]}
    traits = [read_traits(config).traits for config in (given, other, lifted)]
    assert traits[0] == traits[1] == traits[2]
    assert isinstance(traits[0].attention, MLATraits)
    assert (traits[0].attention.qk_head_dim, traits[0].attention.latent_head_size) == (192, 576)
    assert traits[0].attention.kv_heads_in_cache == 1


ALIASES = {
    "n_routed_experts": ["num_experts", "num_local_experts"],
    "num_experts_per_tok": ["num_experts_per_token", "moe_topk"],
    "n_shared_experts": ["num_shared_experts"],
    "n_group": ["num_expert_group"],
    "norm_topk_prob": ["moe_renormalize"],
    "scoring_func": ["moe_router_activation_func", "score_function"],
    "num_hidden_layers": ["num_layers"],
    "intermediate_size": ["ffn_hidden_size"],
    "moe_intermediate_size": ["expert_ffn_hidden_size"],
    "num_nextn_predict_layers": ["num_mtp_layers"],
    "torch_dtype": ["dtype"],
    "max_position_embeddings": ["model_max_length"],
}


@pytest.mark.parametrize(("key", "alias"), [(key, alias) for key, aliases in ALIASES.items() for alias in aliases])
def test_every_spelling_of_a_key_means_the_same(key: str, alias: str) -> None:
    config = load_config("DeepSeek-V3")
    expected = read_traits(config).traits
    config[alias] = config.pop(key)
    assert read_traits(config).traits == expected


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2-Instruct", "Moonlight-16B-A3B", "llama-3.1-8b-bf16"])
def test_both_spellings_of_rope_are_one_rope(name: str) -> None:
    config = load_config(name)
    expected = read_traits(config).traits
    scaling = config.pop("rope_scaling", None) or {"type": "default"}
    kind = scaling.pop("type", None) or scaling.pop("rope_type")
    config["rope_parameters"] = {**scaling, "rope_type": kind, "rope_theta": config.pop("rope_theta")}
    assert read_traits(config).traits == expected
    config["rope_scaling"] = dict(config["rope_parameters"])
    assert read_traits(config).traits == expected


@pytest.mark.parametrize("ids", [7, [7], [7, 9, 7]])
def test_end_tokens_come_as_one_or_as_a_list(ids: int | list[int]) -> None:
    config = load_config("DeepSeek-V3") | {"eos_token_id": ids}
    assert read_traits(config).traits.eos_token_ids == ((7, 9) if ids == [7, 9, 7] else (7,))


def test_glm_47_flash_reads_the_same_from_each_of_its_spellings() -> None:
    saved_again = {key: value for key, value in FLASH.items() if key not in ("first_k_dense_replace", "rope_theta")}
    saved_again["mlp_layer_types"] = ["dense"] + ["sparse"] * 46
    saved_again["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000}
    saved_again["rope_interleave"] = True
    traits = read_traits(FLASH).traits
    assert read_traits(saved_again).traits == traits
    expected = {
        **GLM5, "hidden": 2048, "layers": 47, "heads": 20, "q_lora": 768, "experts": (64, 4, 1, 1536),
        "dense": (10240, 1), "scaling": 1.8, "mtp": 0,
    }  # fmt: skip
    assert described(traits) == expected


def test_rope_interleave_wins_over_the_default_of_either_attention() -> None:
    mla, gqa = load_config("DeepSeek-V3"), load_config("qwen3-0.6b")
    assert read_traits(mla).traits.attention.rope.interleaved
    assert not read_traits(mla | {"rope_interleave": False}).traits.attention.rope.interleaved
    assert not read_traits(gqa).traits.attention.rope.interleaved
    assert read_traits(gqa | {"rope_interleave": True}).traits.attention.rope.interleaved


@pytest.mark.parametrize("rank", [None, 0])
def test_without_a_positive_latent_rank_attention_is_gqa(rank: int | None) -> None:
    config = load_config("qwen3-0.6b") | {"kv_lora_rank": rank}
    attention = read_traits(config).traits.attention
    assert isinstance(attention, GQATraits)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 8, 128)


def test_head_dim_defaults_to_the_hidden_size_shared_out_among_heads() -> None:
    attention = read_traits(load_config("llama-3.1-8b-bf16")).traits.attention
    assert isinstance(attention, GQATraits)
    assert attention.head_dim == 128


def test_what_only_tensors_can_tell_is_none_without_them() -> None:
    config = load_config("llama-3.1-8b-bf16")
    del config["attention_bias"], config["mlp_bias"]
    traits = read_traits(config).traits
    assert isinstance(traits.attention, GQATraits)
    assert (traits.attention.qk_norm, traits.attention.qkv_bias, traits.mlp_bias) == (None, None, None)
    saved = load_config("DeepSeek-V3")
    del saved["scoring_func"], saved["topk_method"]
    report = read_traits(saved)
    assert report.traits.moe is not None
    assert (report.traits.moe.scoring, report.traits.moe.correction_bias) == (None, None)
    assert any("only the tensors can tell" in note for note in report.notes)


def test_layer_patterns_of_both_families() -> None:
    qwen = load_config("qwen3-30b-a3b-bf16") | {"num_hidden_layers": 6}
    assert read_traits(qwen).traits.moe_layers == (True,) * 6
    sparse = read_traits(qwen | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}).traits
    assert sparse.moe_layers == (False, True, False, False, False, True)
    deepseek = load_config("DeepSeek-V3") | {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}
    assert read_traits(deepseek).traits.moe_layers == (False, False, True, False, True, False)
    listed = deepseek | {"first_k_dense_replace": 0, "moe_layer_freq": [0, 1, 1, 0, 1, 1]}
    assert read_traits(listed).traits.moe_layers == (False, True, True, False, True, True)


def test_what_is_skipped_and_what_is_not_understood_is_said() -> None:
    config = load_config("Kimi-K2.5")
    config["text_config"]["a_new_key"] = 3
    notes = " / ".join(read_traits(config).notes)
    assert "text_config is read; vision_config skipped" in notes
    assert "config keys not read: a_new_key" in notes
