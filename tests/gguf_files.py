"""Writes tiny checkpoints as GGUF with the `gguf` package, by its own name tables. Used by the tests of reading them.

Only names, shapes and metadata are meant to be right: q and k are not permuted and experts are as drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests import checkpoints
from tests.headers import tiny_config

Arrays = dict[str, npt.NDArray[np.float32]]

_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.\d+\.(\w+)\.weight")


def stacked_experts(tensors: Mapping[str, npt.NDArray[np.float32]]) -> Arrays:
    """Experts of one layer as one tensor [experts, rows, columns]; other tensors as they are."""
    stacks: dict[str, list[npt.NDArray[np.float32]]] = {}
    rest: Arrays = {}
    for name, values in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            rest[name] = values
        else:
            stacks.setdefault(f"{match[1]}.{match[2]}.weight", []).append(values)
    return rest | {name: np.stack(parts) for name, parts in stacks.items()}


def split_kv_b(tensors: Arrays, config: Mapping[str, Any]) -> Arrays:
    """`kv_b_proj` as the two tensors of newer converters: k_b [heads, rank, nope] and v_b [heads, v, rank]."""
    result: Arrays = {}
    for name, values in tensors.items():
        if "kv_b_proj" not in name:
            result[name] = values
            continue
        heads = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        key, value = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        result[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(key.transpose(0, 2, 1))
        result[name.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(value)
    return result


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[np.float32]],
    layers: int = 3,
) -> Path:
    """A GGUF file. Keys of `metadata` without a dot in their first word get the architecture's prefix."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        full = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        add(writer, full, value)
    kind = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, layers)
    for name, values in tensors.items():
        # Converters call the correction bias "e_score_correction.bias" before they look its name up.
        stem, _, suffix = name.replace("correction_bias", "correction.bias").rpartition(".")
        writer.add_tensor(f"{table.get_name(stem) or stem}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that a converter writes for a config, without the architecture's prefix."""
    heads = config["num_attention_heads"]
    metadata: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    if "kv_lora_rank" in config:
        metadata |= mla_metadata(config)
    else:
        head_dim = config.get("head_dim", config["hidden_size"] // heads)
        metadata |= {"rope.dimension_count": head_dim, "attention.key_length": head_dim}
    experts = config.get("n_routed_experts") or config.get("num_experts")
    if experts:
        metadata |= {
            "expert_count": experts,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("type", scaling.get("rope_type")) != "llama3":
        metadata |= {"rope.scaling.type": scaling.get("type", scaling.get("rope_type"))}
        metadata |= {"rope.scaling.factor": float(scaling["factor"])}
        if "original_max_position_embeddings" in scaling:
            metadata["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        if scaling.get("mscale_all_dim"):
            metadata["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
        if scaling.get("beta_fast"):
            metadata["rope.scaling.yarn_beta_fast"] = float(scaling["beta_fast"])
            metadata["rope.scaling.yarn_beta_slow"] = float(scaling["beta_slow"])
    return metadata


def mla_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    nope, rope, rank = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    metadata: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": 2 if config["scoring_func"] == "sigmoid" else 1,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }
    if config["q_lora_rank"] is not None:
        metadata["attention.q_lora_rank"] = config["q_lora_rank"]
    return metadata


def write_tiny_gguf(path: Path, architecture: str, name: str, *, split: bool = False, **metadata: Any) -> Path:
    """A tiny checkpoint of `checkpoints.CONFIGS` as GGUF; `split` writes kv_b as its two halves."""
    config = tiny_config(name)
    tensors = stacked_experts(checkpoints.tensors_of(name))
    if split:
        tensors = split_kv_b(tensors, config)
    return write_gguf(path, architecture, metadata_of(config) | metadata, tensors)
