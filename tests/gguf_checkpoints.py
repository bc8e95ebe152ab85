"""The tiny checkpoints as GGUF files, with names, keys and layouts as llama.cpp's converter writes them.

Architectures `llama` (q and k permuted to interleaved rotary pairs) and `deepseek2` (kv_b_proj whole, as in old
files, or split per head with the key half transposed).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.checkpoints import CONFIGS, tensors_of, text_config
from tests.random_weights import Array, Tensors

if TYPE_CHECKING:
    import gguf

_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_MIX = {"attn_v": "Q8_0", "attn_kv_a_mqa": "Q8_0", "ffn_up": "Q4_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "Q8_0"}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(name: str, file: Path, quantization: str = "F32", split_kv_b: bool = True) -> Tensors:
    """Writes shape `name`; returns what the file holds, dequantized and back under Hugging Face names.

    `quantization` is a GGUF type, or "mixed" for several types in one layer, as the published mixes have. Matrices
    whose rows are not whole blocks are then stored as F16; vectors and the router stay F32.
    """
    import gguf

    config = text_config(CONFIGS[name])
    mla = "kv_lora_rank" in config
    writer = gguf.GGUFWriter(file, "deepseek2" if mla else "llama")
    _write_common_keys(writer, config)
    if mla:
        _write_deepseek_keys(writer, config, split_kv_b)
    elif (config.get("rope_scaling") or {}).get("type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    stored = _Stored(writer, quantization)
    held = _add_tensors(stored, config, tensors_of(name), split_kv_b)
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


class _Stored:
    """Adds tensors to a file, each in the type it is stored as, and gives back the stored values."""

    def __init__(self, writer: gguf.GGUFWriter, quantization: str) -> None:
        self.writer, self.quantization = writer, quantization

    def add(self, name: str, values: Array) -> Array:
        import gguf

        values = np.ascontiguousarray(values)
        if self.quantization == "F32" or values.ndim == 1 or "ffn_gate_inp" in name:
            self.writer.add_tensor(name, values)
            return values
        if values.shape[-1] % 32:
            half = values.astype(np.float16)
            self.writer.add_tensor(name, half)
            return half.astype(np.float32)
        mixed = _MIX.get(name.split(".")[-2], "Q4_1")
        kind = gguf.GGMLQuantizationType[mixed if self.quantization == "mixed" else self.quantization]
        blocks = gguf.quantize(values, kind)
        self.writer.add_tensor(name, blocks, raw_dtype=kind)
        return gguf.dequantize(blocks, kind).reshape(values.shape)


def _add_tensors(stored: _Stored, config: dict[str, Any], tensors: Tensors, split_kv_b: bool) -> Tensors:
    held: Tensors = {}
    for key, values in tensors.items():
        module, _, kind = key.rpartition(".")
        if ".experts." in key:
            continue
        if module in _OUTER_NAMES:
            held[key] = stored.add(f"{_OUTER_NAMES[module]}.{kind}", values)
            continue
        layer, inside = module.removeprefix("model.layers.").split(".", 1)
        if kind == "e_score_correction_bias":
            held[key] = stored.add(f"blk.{layer}.exp_probs_b.bias", values)
        elif inside == "self_attn.kv_b_proj" and split_kv_b:
            held[key] = _add_split_kv_b(stored, layer, values, config)
        elif inside in ("self_attn.q_proj", "self_attn.k_proj") and "kv_lora_rank" not in config:
            heads = config["num_attention_heads" if "q_proj" in inside else "num_key_value_heads"]
            kept = stored.add(f"blk.{layer}.{_BLOCK_NAMES[inside]}.{kind}", permuted(values, heads))
            held[key] = unpermuted(kept, heads)
        else:
            held[key] = stored.add(f"blk.{layer}.{_BLOCK_NAMES[inside]}.{kind}", values)
    for layer_id in range(config["num_hidden_layers"]):
        held.update(_add_stacked_experts(stored, config, tensors, layer_id))
    return held


def _add_stacked_experts(stored: _Stored, config: dict[str, Any], tensors: Tensors, layer: int) -> Tensors:
    """All experts of a layer in one tensor [experts, rows, columns] per projection; nothing in a dense layer."""
    held: Tensors = {}
    prefix = f"model.layers.{layer}.mlp.experts."
    if f"{prefix}0.up_proj.weight" not in tensors:
        return held
    for part in ("gate", "up", "down"):
        names = [f"{prefix}{expert}.{part}_proj.weight" for expert in range(config["n_routed_experts"])]
        stack = stored.add(f"blk.{layer}.ffn_{part}_exps.weight", np.stack([tensors[key] for key in names]))
        held.update(zip(names, stack, strict=True))
    return held


def permuted(weight: Array, heads: int) -> Array:
    """Rows (i, i + d/2) of each head become neighbours (2i, 2i + 1)."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: Array, heads: int) -> Array:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _add_split_kv_b(stored: _Stored, layer: str, kv_b: Array, config: dict[str, Any]) -> Array:
    """attn_k_b [heads, rank, nope] (transposed) and attn_v_b [heads, v, rank]; returns kv_b_proj as stored."""
    per_head = kv_b.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    nope = config["qk_nope_head_dim"]
    key = stored.add(f"blk.{layer}.attn_k_b.weight", per_head[:, :nope].swapaxes(1, 2))
    value = stored.add(f"blk.{layer}.attn_v_b.weight", per_head[:, nope:])
    return np.concatenate([key.swapaxes(1, 2), value], axis=1).reshape(kv_b.shape)


def _write_common_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    if "kv_lora_rank" in config:
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)


def _write_deepseek_keys(writer: gguf.GGUFWriter, config: dict[str, Any], split_kv_b: bool) -> None:
    import gguf

    head, v, rope = (
        config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"], config["qk_rope_head_dim"]
    )  # fmt: skip
    if split_kv_b:
        writer.add_head_count_kv(1)
        writer.add_key_length(config["kv_lora_rank"] + rope)
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(v)
    else:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(head)
        writer.add_value_length(v)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["n_group"] > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SIGMOID if config["scoring_func"] == "sigmoid" else gating.SOFTMAX)
    scaling = config.get("rope_scaling")
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def _llama3_divisors(config: dict[str, Any]) -> Array:
    """What each frequency is divided by, which GGUF stores instead of the scaling's keys."""
    scaling = config["rope_scaling"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    divisors: Array = (1 / ((1 - keep) / scaling["factor"] + keep)).astype(np.float32)
    return divisors
