"""Tiny random checkpoints of every shape the engine serves. Used by the tests of loading, numerics and the runner.

A shape is a config.json as its publishers spell it, accepted by transformers, with the dimensions shrunk and the
parts that go wrong kept: YaRN's ramp lies inside the rotated width, prompts are longer than the original context,
norms are far from 1, latents and embeddings are small enough that an eps matters, biases move the router's choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Config = dict[str, Any]
Tensors = dict[str, npt.NDArray[np.float32]]

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
    "moonlight": _deepseek_v3(
        q_lora_rank=None, routed_scaling_factor=2.446, rms_norm_eps=1e-5, n_shared_experts=2
    ),
    "glm-flash": _glm_flash(),
    "odd-mla": _deepseek_v3(**{**_V3, **_ODD}),
    "unequal-mscale": _deepseek_v3(
        routed_scaling_factor=1.0, rope_scaling={**_yarn(1.0), "mscale": 0.5}, attention_bias=True
    ),
    "llama": _shape("llama", "LlamaForCausalLM", _GQA, rope_theta=500000.0, rope_scaling=_LLAMA3_ROPE),
    "llama2": _shape("llama", "LlamaForCausalLM", rope_theta=10000.0, rms_norm_eps=1e-5),
    "llama-linear": _shape("llama", "LlamaForCausalLM", _GQA, rope_scaling={"type": "linear", "factor": 4.0}),
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
    draw = _Draw(np.random.default_rng([SEED, *name.encode()]), config)
    tensors = dict(draw.model())
    if config.get("num_nextn_predict_layers"):
        tensors.update(draw.mtp_layer(tensors))
    if "text_config" in CONFIGS[name]:
        tensors = {f"language_model.{key}": values for key, values in tensors.items()}
        tensors.update(draw.vision())
    return tensors


class _Draw:
    """Random weights, scaled so that logits are of order 1 to 10 and every part has a say in them."""

    def __init__(self, rng: np.random.Generator, config: Config) -> None:
        self.rng, self.config = rng, config
        self.hidden: int = config["hidden_size"]

    def matrix(self, rows: int, columns: int, gain: float = 1.5) -> npt.NDArray[np.float32]:
        return (self.rng.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    def vector(self, size: int, mean: float, deviation: float = 0.3) -> npt.NDArray[np.float32]:
        return (mean + deviation * self.rng.standard_normal(size)).astype(np.float32)

    def model(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        c = self.config
        tied = c["tie_word_embeddings"]
        yield "model.embed_tokens.weight", self.matrix(c["vocab_size"], self.hidden, 2.0 if tied else 0.3)
        for layer in range(c["num_hidden_layers"]):
            for name, values in self.layer(moe=_is_moe(c, layer)):
                yield f"model.layers.{layer}.{name}", values
        yield "model.norm.weight", self.vector(self.hidden, 1.0)
        if not tied:
            yield "lm_head.weight", self.matrix(c["vocab_size"], self.hidden)

    def layer(self, moe: bool) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        yield "input_layernorm.weight", self.vector(self.hidden, 1.0)
        yield "post_attention_layernorm.weight", self.vector(self.hidden, 1.0)
        attention = self.mla() if "kv_lora_rank" in self.config else self.gqa()
        for name, values in attention:
            yield f"self_attn.{name}", values
        for name, values in self.moe() if moe else self.mlp(self.config["intermediate_size"]):
            yield f"mlp.{name}", values

    def gqa(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        c = self.config
        head_dim = c.get("head_dim") or self.hidden // c["num_attention_heads"]
        width, kv_width = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
        for name, rows in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
            yield f"{name}.weight", self.matrix(rows, self.hidden)
            if c["attention_bias"] or c["model_type"] == "qwen2":
                yield f"{name}.bias", self.vector(rows, 0.0)
        yield "o_proj.weight", self.matrix(self.hidden, width)
        if c["attention_bias"]:
            yield "o_proj.bias", self.vector(self.hidden, 0.0)
        if c["model_type"].startswith("qwen3"):
            yield "q_norm.weight", self.vector(head_dim, 1.0)
            yield "k_norm.weight", self.vector(head_dim, 1.0)

    def mla(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        c = self.config
        heads, rank, low, rope = (
            c[key] for key in ("num_attention_heads", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
        )
        width = heads * (c["qk_nope_head_dim"] + rope)
        if low is None:
            yield "q_proj.weight", self.matrix(width, self.hidden)
        else:
            yield "q_a_proj.weight", self.matrix(low, self.hidden, 0.02)
            yield "q_a_layernorm.weight", self.vector(low, 1.0)
            yield "q_b_proj.weight", self.matrix(width, low)
        latent, k_rope = self.matrix(rank, self.hidden, 0.02), self.matrix(rope, self.hidden)
        yield "kv_a_proj_with_mqa.weight", np.concatenate([latent, k_rope])
        yield "kv_a_layernorm.weight", self.vector(rank, 1.0)
        yield "kv_b_proj.weight", self.matrix(heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
        yield "o_proj.weight", self.matrix(self.hidden, heads * c["v_head_dim"])
        if c["attention_bias"]:
            yield "q_a_proj.bias", self.vector(low, 0.0, 0.01)
            yield "kv_a_proj_with_mqa.bias", self.vector(rank + rope, 0.0, 0.01)
            yield "o_proj.bias", self.vector(self.hidden, 0.0)

    def mlp(self, width: int, prefix: str = "") -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        for name, rows, columns in (
            ("gate_proj", width, self.hidden), ("up_proj", width, self.hidden), ("down_proj", self.hidden, width)
        ):  # fmt: skip
            yield f"{prefix}{name}.weight", self.matrix(rows, columns)
            if self.config.get("mlp_bias"):
                yield f"{prefix}{name}.bias", self.vector(rows, 0.0)

    def moe(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        c = self.config
        experts, width = c.get("n_routed_experts") or c["num_experts"], c["moe_intermediate_size"]
        yield "gate.weight", self.matrix(experts, self.hidden)
        if c["model_type"] not in ("deepseek_v2", "qwen3_moe"):
            # With groups, many biased scores are negative: a left-out group must score -inf, not 0.
            yield "gate.e_score_correction_bias", self.vector(experts, -0.6 if c["n_group"] > 1 else 0.0)
        for expert in range(experts):
            yield from self.mlp(width, f"experts.{expert}.")
        if c.get("n_shared_experts"):
            yield from self.mlp(width * c["n_shared_experts"], "shared_experts.")

    def mtp_layer(self, tensors: Tensors) -> Tensors:
        """Stored after the last layer in DeepSeek-V3's files, for speculation; the decoder must pass it over."""
        prefix = f"model.layers.{self.config['num_hidden_layers']}."
        extra = {prefix + name: values for name, values in self.layer(moe=True)}
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            extra[f"{prefix}{norm}.weight"] = self.vector(self.hidden, 1.0)
        extra[prefix + "eh_proj.weight"] = self.matrix(self.hidden, 2 * self.hidden)
        extra[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        extra[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].copy()
        return extra

    def vision(self) -> Tensors:
        return {
            "vision_tower.patch_embed.proj.weight": self.matrix(32, 3 * 14 * 14).reshape(32, 3, 14, 14),
            "vision_tower.encoder.blocks.0.wqkv.weight": self.matrix(96, 32),
            "vision_tower.encoder.final_layernorm.weight": self.vector(32, 1.0),
            "mm_projector.proj.0.weight": self.matrix(128, 128),
        }


def _is_moe(config: Config, layer: int) -> bool:
    if "mlp_layer_types" in config:
        return bool(config["mlp_layer_types"][layer] == "sparse")
    if "n_routed_experts" in config:
        return bool(layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0)
    return "num_experts" in config and layer not in config["mlp_only_layers"]


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
    tensors = dict(_Draw(np.random.default_rng(SEED), config).model())
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


def write_sharded(name: str, directory: Path, dtype: str = "bfloat16", shards: int = 3) -> Path:
    """The same checkpoint rounded to `dtype` (a torch name) over several files with their index.

    The router's correction bias stays fp32, as it does in published checkpoints.
    """
    import torch
    from safetensors.torch import save_file

    target = getattr(torch, dtype)
    tensors = {
        key: torch.from_numpy(values) if "correction_bias" in key else torch.from_numpy(values).to(target)
        for key, values in tensors_of(name).items()
    }
    _write_config({**CONFIGS[name], "torch_dtype": dtype}, directory)
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
