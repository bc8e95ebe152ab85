"""The one place that knows architectures by name: what GGUF calls a model, and how its keys and tensors translate.

GGUF files carry a name (`general.architecture`) instead of traits, so a few facts have to be looked up by it. The
result is an ordinary config and ordinary tensor names; from there on `traits.config` reads them like any other.
Used by `models.checkpoint` alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.core import CheckpointError
from pellucid.models.gguf_header import GGUFHeader, read_f32_values
from pellucid.models.gguf_rope import rope_scaling_of
from pellucid.traits.model import yarn_mscale
from pellucid.traits.tensors import TensorInfo

ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """What a GGUF architecture's name implies and its metadata does not say.

    `interleaved`: the converter permuted q and k (or left DeepSeek's order), so rotary pairs are dims (2i, 2i+1).
    `config` holds keys that are constant for the architecture.
    """

    interleaved: bool
    config: Mapping[str, Any] = field(default_factory=dict)


_SOFTMAX_ROUTER = {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": True}

GGUF_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(interleaved=True, config=_SOFTMAX_ROUTER),
    "qwen2": GGUFArchitecture(interleaved=False),
    "qwen3": GGUFArchitecture(interleaved=False),
    "qwen3moe": GGUFArchitecture(interleaved=False, config=_SOFTMAX_ROUTER),
    "deepseek2": GGUFArchitecture(interleaved=True),
}

_UNSAID: Mapping[str, tuple[str, ...]] = {
    "qwen2": ("qkv_bias",),
    "qwen2_moe": ("qkv_bias",),
    "qwen3": ("qk_norm",),
    "qwen3_moe": ("qk_norm",),
}
"""Model type of a config.json -> traits of all its models that the config does not state; the tensors do."""


def unsaid_traits(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of traits that a model of this config has although it does not say so. For a config without tensors."""
    return _UNSAID.get(str(config.get("model_type")), ())


# Metadata key after "<architecture>." -> config key. Values pass unchanged.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.key_length": "head_dim",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv",
    "attention.indexer.top_k": "index_topk",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}
_ROPE_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_GATING = {1: "softmax", 2: "sigmoid"}
_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Name inside "blk.N." -> name inside "model.layers.N.". Experts (`*_exps`) stay stacked in one tensor
# [experts, rows, columns], as `mlp.experts.gate_proj`; `attn_k_b` and `attn_v_b` are the two halves of kv_b_proj, per
# head: [heads, kv_lora_rank, qk_nope_head_dim] (already transposed) and [heads, v_head_dim, kv_lora_rank].
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "attn_sinks": "self_attn.sinks",
}
_CORRECTION_BIAS = ("exp_probs_b.bias", "exp_probs_b")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def hf_tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name with no counterpart comes back under its layer, unchanged."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        stem, dot, suffix = name.rpartition(".")
        return f"{_GLOBAL_NAMES.get(stem, stem)}{dot}{suffix}"
    prefix = f"model.layers.{block[1]}."
    if block[2] in _CORRECTION_BIAS:
        return prefix + "mlp.gate.e_score_correction_bias"
    stem, dot, suffix = block[2].rpartition(".")
    return f"{prefix}{_LAYER_NAMES.get(stem, stem)}{dot}{suffix}"


def model_of_gguf(path: Path, header: GGUFHeader) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The config and the tensor index, under Hugging Face names, of a GGUF file.

    Weights stay as stored: where the converter permuted q and k, the config says `rope_interleave: true` instead.
    `rope_freqs.weight` is read and becomes `rope_scaling`; other tensors keep their entries.

    Raises:
        CheckpointError: an architecture that is not in `GGUF_ARCHITECTURES`, or keys that contradict each other.
    """
    metadata = header.metadata
    name = metadata.get("general.architecture")
    architecture = GGUF_ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None or not isinstance(name, str):
        known = ", ".join(GGUF_ARCHITECTURES)
        raise CheckpointError(
            f"{path}: GGUF architecture {name!r} is not read here (only {known}): use the safetensors checkpoint"
        )
    keys = {key[len(name) + 1 :]: _undo_float32(value) for key, value in metadata.items() if key.startswith(f"{name}.")}
    tensors = {hf_tensor_name(stored): info for stored, info in header.tensors.items() if stored != ROPE_DIVISORS}
    if len(tensors) != len(header.tensors) - (ROPE_DIVISORS in header.tensors):
        raise CheckpointError(f"{path}: two tensors have the same Hugging Face name: convert the file again")
    config: dict[str, Any] = {"rope_interleave": architecture.interleaved, **architecture.config}
    config.update({ours: keys[theirs] for theirs, ours in _KEYS.items() if theirs in keys})
    _add_vocabulary(config, metadata, tensors)
    _add_attention(path, config, keys)
    _add_router(path, config, keys)
    scaling = _rope_scaling(keys, header.tensors.get(ROPE_DIVISORS))
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config, tensors


def _add_vocabulary(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    embedding = tensors.get("model.embed_tokens.weight")
    if "vocab_size" not in config and embedding is not None and embedding.shape:
        config["vocab_size"] = embedding.shape[0]
    if "tokenizer.ggml.bos_token_id" in metadata:
        config["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    ends = [metadata[key] for key in _END_TOKENS if key in metadata]
    if ends:
        config["eos_token_id"] = ends


def _add_attention(path: Path, config: dict[str, Any], keys: Mapping[str, Any]) -> None:
    """Head widths. With MLA, `key_length_mla` is a head (in older files `key_length`), `key_length` a cached row."""
    rope_dim = keys.get("rope.dimension_count")
    if not config.get("kv_lora_rank"):
        width = config.get("head_dim") or _quotient(config.get("hidden_size"), config.get("num_attention_heads"))
        if isinstance(rope_dim, int) and isinstance(width, int) and width and rope_dim != width:
            config["partial_rotary_factor"] = rope_dim / width
        return
    config.pop("head_dim", None)
    head = keys.get("attention.key_length_mla", keys.get("attention.key_length"))
    if type(head) is not int or type(rope_dim) is not int or rope_dim >= head:
        raise CheckpointError(
            f"{path}: key_length_mla = {head!r} and rope.dimension_count = {rope_dim!r} do not make a head: "
            "convert the file again"
        )
    config["qk_rope_head_dim"] = rope_dim
    config["qk_nope_head_dim"] = head - rope_dim
    config["v_head_dim"] = keys.get("attention.value_length_mla", keys.get("attention.value_length"))
    config["num_key_value_heads"] = config.get("num_attention_heads")


def _quotient(total: Any, parts: Any) -> int | None:
    return total // parts if type(total) is int and type(parts) is int and parts > 0 else None


def _add_router(path: Path, config: dict[str, Any], keys: Mapping[str, Any]) -> None:
    """DeepSeek's two routers. A file without `expert_gating_func` was written before there was a choice: softmax."""
    if not config.get("num_experts"):
        for key in _SOFTMAX_ROUTER:
            config.pop(key, None)
        return
    gating = keys.get("expert_gating_func", 1)
    if gating not in _GATING:
        raise CheckpointError(
            f"{path}: expert_gating_func {gating!r} is neither 1 nor 2: use the safetensors checkpoint"
        )
    config["scoring_func"] = _GATING[gating]
    config.setdefault("norm_topk_prob", False)


def _rope_scaling(keys: Mapping[str, Any], divisors: TensorInfo | None) -> dict[str, Any] | None:
    """`rope_scaling` from the keys or from stored divisors; divisors that fit no known rule get a name of their own.

    `yarn_log_multiplier` is 0.1 x mscale_all_dim. Only the pair's ratio multiplies cos and sin, and it is 1 in every
    model that was converted, so mscale is taken equal. `attn_factor` comes on top of YaRN's own multiplier there,
    and instead of it in a config.
    """
    if divisors is not None:
        theta = keys.get("rope.freq_base", 10000.0)
        values = read_f32_values(divisors)
        fitted = rope_scaling_of(values, theta) if isinstance(theta, float) and theta > 1 else None
        return fitted or {"rope_type": "stored divisors (rope_freqs.weight)"}
    kind = keys.get("rope.scaling.type")
    if kind is None or kind == "none":
        return None
    scaling = {ours: keys[theirs] for theirs, ours in _ROPE_KEYS.items() if theirs in keys}
    extra = keys.get("rope.scaling.attn_factor", 1.0)
    if isinstance(extra, float) and extra != 1.0 and isinstance(scaling.get("factor"), float):
        scaling["attention_factor"] = extra * yarn_mscale(scaling["factor"], 1.0)
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if isinstance(multiplier, float) and multiplier:
        scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * multiplier, 6)
    return {"rope_type": kind, **scaling}


def _undo_float32(value: Any) -> Any:
    """The shortest decimal with the same float32: 9.99999974e-06 as stored is 1e-05 as meant."""
    if not isinstance(value, float):
        return value
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except OverflowError:
            return value
    return value
