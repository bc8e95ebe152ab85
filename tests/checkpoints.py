"""Tiny random checkpoints of every shape the engine serves. Used by the tests of loading, numerics and the runner.

A shape is a config.json as its publishers spell it, accepted by transformers, with the dimensions shrunk and the
parts that go wrong kept: YaRN's ramp lies inside the rotated width, prompts are longer than the original context,
the weights (`random_weights`) leave no part without a say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.random_weights import RandomWeights, Tensors

Config = dict[str, Any]

_COMMON: Config = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2560,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
_MLA: Config = {
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_MOE: Config = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SIGMOID: Config = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
_GQA: Config = {"num_key_value_heads": 2, "rope_theta": 10000.0}


def _yarn(mscale: float, factor: float = 40.0, fast: float = 32.0, slow: float = 1.0) -> Config:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 64,
        "beta_fast": fast,
        "beta_slow": slow,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


def _shape(model_type: str, architecture: str, *parts: Config, **keys: Any) -> Config:
    config: Config = {"architectures": [architecture], "model_type": model_type, **_COMMON}
    for part in (*parts, keys):
        config.update(part)
    return config


def _deepseek_v2(**keys: Any) -> Config:
    scoring = {"scoring_func": "softmax", "norm_topk_prob": False, "n_shared_experts": 2, "rope_theta": 10000.0}
    return _shape("deepseek_v2", "DeepseekV2ForCausalLM", _MLA, _MOE, scoring, keys)


def _deepseek_v3(**keys: Any) -> Config:
    rope = {"rope_theta": 50000.0, "num_nextn_predict_layers": 0}
    return _shape("deepseek_v3", "DeepseekV3ForCausalLM", _MLA, _MOE, _SIGMOID, rope, keys)


_V3: Config = {
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000.0,
    "rope_scaling": _yarn(1.0),
}
_KIMI: Config = {"routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_LLAMA3_ROPE: Config = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _kimi_k25() -> Config:
    text = _deepseek_v3(**_KIMI, rope_scaling=_yarn(1.0, 64.0))
    text["model_type"] = "kimi_k2"
    vision = {"vt_hidden_size": 32, "vt_num_hidden_layers": 1, "vt_num_attention_heads": 2, "patch_size": 14}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
        "media_placeholder_token_id": 302,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def _glm_flash() -> Config:
    keys: Config = {
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "dtype": "float32",
    }
    config = _shape("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _MLA, _MOE, keys)
    for gone in ("first_k_dense_replace", "moe_layer_freq", "torch_dtype"):
        del config[gone]
    return config


_QWEN3: Config = {**_GQA, "head_dim": 32, "rope_theta": 1000000.0}
_QWEN3_YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 640}
_ODD: Config = {
    "vocab_size": 317,
    "hidden_size": 90,
    "intermediate_size": 70,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "moe_intermediate_size": 36,
}

CONFIGS: Mapping[str, Config] = {
    "v2lite": _deepseek_v2(
        q_lora_rank=None, topk_method="greedy", routed_scaling_factor=1.0, rope_scaling=_yarn(0.707)
    ),
    "v2": _deepseek_v2(
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        rope_scaling=_yarn(1.0),
    ),
    "v3": _deepseek_v3(**_V3),
    "v3-mtp": _deepseek_v3(**{**_V3, "num_nextn_predict_layers": 1}),
    "kimi": _deepseek_v3(**_KIMI, rope_scaling=_yarn(1.0, 64.0, 1.0, 1.0)),
    "kimi25": _kimi_k25(),
    "moonlight": _deepseek_v3(q_lora_rank=None, routed_scaling_factor=2.446, rms_norm_eps=1e-5, n_shared_experts=2),
    "glm-flash": _glm_flash(),
    "odd-mla": _deepseek_v3(**{**_V3, **_ODD}),
    "unequal-mscale": _deepseek_v3(
        routed_scaling_factor=1.0,
        rope_scaling={**_yarn(1.0), "mscale": 0.5},
        rope_interleave=False,
        attention_bias=True,
    ),
    "llama": _shape("llama", "LlamaForCausalLM", _GQA, rope_theta=500000.0, rope_scaling=_LLAMA3_ROPE),
    "llama2": _shape("llama", "LlamaForCausalLM", rope_theta=10000.0, rms_norm_eps=1e-5),
    "llama-linear": _shape(
        "llama", "LlamaForCausalLM", _GQA, rope_scaling={"type": "linear", "factor": 4.0}, tie_word_embeddings=True
    ),
    "mistral": _shape("mistral", "MistralForCausalLM", _GQA, head_dim=40, sliding_window=None, rms_norm_eps=1e-5),
    "qwen2": _shape(
        "qwen2", "Qwen2ForCausalLM", _GQA, tie_word_embeddings=True, use_sliding_window=False, sliding_window=4096
    ),
    "qwen3": _shape("qwen3", "Qwen3ForCausalLM", _QWEN3, tie_word_embeddings=True),
    "qwen3-yarn": _shape("qwen3", "Qwen3ForCausalLM", _QWEN3, rope_scaling=_QWEN3_YARN),
    "qwen3-moe": _shape(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _QWEN3,
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
    "odd-gqa": _shape(
        "llama",
        "LlamaForCausalLM",
        {key: _ODD[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
        num_key_value_heads=3,
        head_dim=18,
        rope_theta=10000.0,
        attention_bias=True,
        mlp_bias=True,
    ),
}
"""Every shape by name. `kimi25` is nested (`text_config`) and holds vision tensors; `v3-mtp` holds an MTP layer."""

SEED = 15
"""Chosen so that no routing decision of any prompt is a close call."""

MLA_SHAPES = tuple(name for name, config in CONFIGS.items() if "kv_lora_rank" in (config.get("text_config") or config))


def text_config(config: Config) -> Config:
    """The language model's part of a config."""
    return dict(config.get("text_config") or config)


def prompts(name: str) -> dict[int, list[int]]:
    """Three random prompts of a shape: the first is longer than twice the original context, so YaRN counts."""
    rng = np.random.default_rng(7)
    vocabulary = text_config(CONFIGS[name])["vocab_size"]
    return {sequence: rng.integers(0, vocabulary, length).tolist() for sequence, length in enumerate((150, 61, 33))}


def tensors_of(name: str) -> Tensors:
    """The tensors of a shape in fp32, by the names its publishers use. The same values at every call."""
    config = text_config(CONFIGS[name])
    draw = RandomWeights(np.random.default_rng([SEED, *name.encode()]), config)
    tensors = dict(draw.model())
    if config.get("num_nextn_predict_layers"):
        tensors.update(draw.mtp_layer(tensors))
    if "text_config" in CONFIGS[name]:
        tensors = {f"language_model.{key}": values for key, values in tensors.items()}
        tensors.update(draw.vision())
    return tensors


def write(name: str, directory: Path) -> Path:
    """config.json and one fp32 model.safetensors of shape `name` in `directory`, which is returned."""
    from safetensors.numpy import save_file

    _write_config(CONFIGS[name], directory)
    save_file(tensors_of(name), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_every_other_layer_moe(directory: Path) -> Path:
    """The shape `v2lite` with `moe_layer_freq` 2: dense, dense, MoE."""
    from safetensors.numpy import save_file

    config = {**CONFIGS["v2lite"], "moe_layer_freq": 2}
    _write_config(config, directory)
    tensors = dict(RandomWeights(np.random.default_rng(SEED), config).model())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_text_only(name: str, directory: Path) -> Path:
    """The language model of a nested shape alone, as transformers' text classes load it."""
    from safetensors.numpy import save_file

    _write_config({**text_config(CONFIGS[name]), "model_type": "deepseek_v3"}, directory)
    kept = {
        key.removeprefix("language_model."): values
        for key, values in tensors_of(name).items()
        if key.startswith("language_model.")
    }
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_sharded(
    name: str, directory: Path, dtype: str = "bfloat16", shards: int = 3, every_expert: bool = False
) -> Path:
    """The same checkpoint rounded to `dtype` (a torch name) over several files with their index.

    The router's correction bias stays fp32, as it does in published checkpoints. `every_expert`: all experts are chosen
    for every token, so that rounding moves weights and never a choice.
    """
    import torch
    from safetensors.torch import save_file

    target = getattr(torch, dtype)
    tensors = {
        key: torch.from_numpy(values) if "correction_bias" in key else torch.from_numpy(values).to(target)
        for key, values in tensors_of(name).items()
    }
    config = {**CONFIGS[name], "torch_dtype": dtype}
    if every_expert and "num_experts_per_tok" in config:
        config["num_experts_per_tok"] = config.get("n_routed_experts") or config["num_experts"]
        config["topk_group"] = config.get("n_group", 1)
    _write_config(config, directory)
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        where.update(dict.fromkeys(part, file))
        save_file(part, directory / file, metadata={"format": "pt"})
    size = sum(values.nbytes for values in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _write_config(config: Config, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
