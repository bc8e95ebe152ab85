"""What a model may need that Pellucid has not, and the key or tensor that shows it. Used by `traits.config`.

Each entry names a *trait*, never an architecture, so a derived model that nobody has listed is refused by the same
words as the original.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pellucid.traits.findings import Findings
from pellucid.traits.keys import ConfigKeys, shown
from pellucid.traits.quantization import module_class
from pellucid.traits.tensors import TextTensors

SPARSE_INDEXER = "sparse attention indexer (DSA)"
STATE_SPACE = "state-space layers (Mamba)"
LINEAR_ATTENTION = "linear attention"
SLIDING_WINDOW = "sliding-window attention"
CHUNKED_ATTENTION = "chunked attention"
ATTENTION_SINKS = "attention sinks"
OUTPUT_GATE = "attention output gate"
SHARED_EXPERT_GATE = "shared-expert gate"
LAYER_NORM = "LayerNorm"


def _truthy(value: Any) -> bool:
    return bool(value)


def _given(value: Any) -> bool:
    return value is not None


def _not_one(value: Any) -> bool:
    return value != 1 and value is not False


def _above_one(value: Any) -> bool:
    return isinstance(value, int | float) and value > 1


def _not_all_ones(value: Any) -> bool:
    return not (isinstance(value, list) and all(entry == 1 for entry in value))


@dataclass(frozen=True, slots=True)
class _Sign:
    """`trait` is needed when any of `keys` is present and `active` for its value."""

    trait: str
    keys: tuple[str, ...]
    active: Callable[[Any], bool] = _truthy


_SIGNS = (
    _Sign(SPARSE_INDEXER, ("index_topk", "index_n_heads", "indexer_types")),
    _Sign(STATE_SPACE, ("ssm_state_size", "mamba_num_heads", "mamba_n_heads", "mamba_d_state", "state_size")),
    _Sign(STATE_SPACE, ("hybrid_override_pattern", "attn_layer_period", "layers_block_type", "ssm_cfg")),
    _Sign(LINEAR_ATTENTION, ("linear_attn_config", "linear_num_value_heads", "linear_num_heads", "kda_lower_bound")),
    _Sign(LINEAR_ATTENTION, ("full_attention_interval",), _above_one),
    _Sign(OUTPUT_GATE, ("mla_use_output_gate", "attn_output_gate", "use_attention_gate", "use_output_gate")),
    _Sign("MLA without rope", ("mla_use_nope",)),
    _Sign("layers without rope", ("no_rope_layers", "nope_layers"), _not_all_ones),
    _Sign("layers without rope", ("no_rope_layer_interval", "nope_layer_interval")),
    _Sign("scaled MLA latents", ("mla_scale_q_lora", "mla_scale_kv_lora")),
    _Sign("compressed KV attention", ("compress_ratios", "compress_rope_theta")),
    _Sign("grouped output projection", ("o_lora_rank", "o_groups")),
    _Sign("hash-routed experts", ("num_hash_layers",)),
    _Sign("zero experts", ("zero_expert_num", "zero_experts_num")),
    _Sign("experts in a latent width", ("routed_expert_hidden_size", "moe_latent_size")),
    _Sign("hyper-connections", ("hc_mult",), _above_one),
    _Sign("attention residuals", ("attn_res_block_size",)),
    _Sign("clamped SwiGLU", ("swiglu_limit", "swiglu_limits", "swiglu_alpha")),
    _Sign("attention logit soft-capping", ("attn_logit_softcapping",)),
    _Sign("final logit soft-capping", ("final_logit_softcapping", "logits_soft_cap")),
    _Sign("router logit soft-capping", ("router_logit_softcapping",)),
    _Sign("embedding multiplier", ("embedding_multiplier", "scale_emb", "embedding_scale"), _not_one),
    _Sign("residual multiplier", ("residual_multiplier", "residual_scale"), _not_one),
    _Sign("residual multiplier", ("scale_depth",)),
    _Sign("attention multiplier", ("attention_multiplier", "query_pre_attn_scalar"), _given),
    _Sign("logit multiplier", ("logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier"), _not_one),
    _Sign("logit multiplier", ("dim_model_base",)),
    _Sign("encoder-decoder", ("is_encoder_decoder", "add_cross_attention", "encoder_layers")),
    _Sign("cross-attention layers", ("cross_attention_layers", "cross_attention_frequency")),
    _Sign("bidirectional attention", ("use_bidirectional_attention",)),
    _Sign("bidirectional attention", ("is_causal",), lambda value: value is False),
    _Sign(CHUNKED_ATTENTION, ("attention_chunk_size",)),
    _Sign("QKV clipping", ("clip_qkv",)),
    _Sign("ALiBi positions", ("alibi", "use_alibi")),
    _Sign("parallel attention and MLP blocks", ("use_parallel_residual", "parallel_attn", "use_parallel_block")),
    _Sign("KV shared between layers", ("num_kv_shared_layers", "kv_source_layers", "use_cla")),
    _Sign("per-layer inputs", ("hidden_size_per_layer_input",)),
    _Sign("per-layer shapes", ("block_configs", "per_layer_config")),
    _Sign("norms around each block", ("use_sandwich_norm", "use_post_norm")),
    _Sign("gated norms", ("gated_norm_rank",)),
    _Sign(SHARED_EXPERT_GATE, ("shared_expert_intermediate_size",)),
)

# A name inside a layer that ends so, or starts so, needs the trait beside it.
_TENSOR_SIGNS = (
    ("self_attn.indexer.", SPARSE_INDEXER),
    ("self_attn.sinks", ATTENTION_SINKS),
    ("self_attn.g_proj.", OUTPUT_GATE),
    ("self_attn.gate_proj.", OUTPUT_GATE),
    ("linear_attn.", LINEAR_ATTENTION),
    ("mamba.", STATE_SPACE),
    ("mixer.", STATE_SPACE),
    ("mlp.shared_expert_gate.", SHARED_EXPERT_GATE),
    ("mlp.gate.bias", "router bias"),
    ("mlp.router.bias", "router bias"),
    ("input_layernorm.bias", LAYER_NORM),
    ("pre_feedforward_layernorm.", "norms around each block"),
    ("post_feedforward_layernorm.", "norms around each block"),
    ("cross_attn.", "cross-attention layers"),
)

_LAYER_TYPES = {
    "indexed_attention": SPARSE_INDEXER,
    "linear_attention": LINEAR_ATTENTION,
    "kda": LINEAR_ATTENTION,
    "mamba": STATE_SPACE,
    "mamba2": STATE_SPACE,
    "chunked_attention": CHUNKED_ATTENTION,
}
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")


_READ_NAMES = frozenset(
    {
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "mlp.gate",
    }
)
_READ_CLASSES = ("attention", "dense_mlp", "shared_experts")
_HARMLESS = ("rotary_emb", "k_scale", "v_scale")


def find_missing_in_config(keys: ConfigKeys, findings: Findings, *, has_tensors: bool) -> None:
    """Record in `findings` every trait that the config asks for and Pellucid has not.

    Attention sinks, which no key shows, are suspected where there are no tensors to tell.
    """
    for sign in _SIGNS:
        for key in sign.keys:
            value = keys.value(key)
            if value is not None and sign.active(value):
                findings.miss(sign.trait, f"{key} = {shown(value)}")
    for key in _ACTIVATION_KEYS:
        activation = keys.value(key)
        if activation is not None and activation not in ("silu", "swish", "swiglu"):
            findings.miss(f"activation '{activation}'", f"{key} = {shown(activation)}")
    _find_layer_kinds(keys, findings)
    _find_norm(keys, findings)
    if not has_tensors:
        _suspect_sinks(keys, findings)


def _find_layer_kinds(keys: ConfigKeys, findings: Findings) -> None:
    """Windows and other per-layer kinds of attention, only where they are in use."""
    kinds = {str(kind) for kind in keys.sequence("layer_types") or ()}
    window = keys.integer("sliding_window", "sliding_window_size")
    enabled = keys.value("use_sliding_window")
    off = "use_sliding_window" in keys.values and not enabled
    first_windowed = keys.integer("max_window_layers")
    num_layers = keys.integer("num_hidden_layers", "num_layers") or 0
    for kind in sorted(kinds - {"full_attention", "attention", "sliding_attention"}):
        findings.miss(_LAYER_TYPES.get(kind, f"layer type '{kind}'"), f"layer_types has {kind!r}")
    longest = keys.integer("max_position_embeddings")
    if kinds:
        windowed = "sliding_attention" in kinds
    else:
        windowed = not off and (first_windowed is None or first_windowed < num_layers)
    if window and windowed:
        if longest is not None and window >= longest:
            findings.note(f"sliding_window = {window} is not below max_position_embeddings: it never acts")
        else:
            findings.miss(SLIDING_WINDOW, f"sliding_window = {window}")


def _find_norm(keys: ConfigKeys, findings: Findings) -> None:
    if not keys.has("rms_norm_eps", "norm_eps"):
        for key in ("layer_norm_eps", "layer_norm_epsilon"):
            if keys.has(key):
                findings.miss(LAYER_NORM, f"{key} without rms_norm_eps")


def _suspect_sinks(keys: ConfigKeys, findings: Findings) -> None:
    """No config key says that a model has attention sinks; only its tensors do.

    Without them, alternating windows together with a clamped SwiGLU is taken as the sign: the published models with
    sinks have both, and a model with both is refused for those anyway.
    """
    windows = "sliding_attention" in (keys.value("layer_types") or ())
    if windows and keys.has("swiglu_limit"):
        findings.miss(ATTENTION_SINKS, "sliding layer_types with swiglu_limit; self_attn.sinks would confirm it")


def find_missing_in_tensors(tensors: TextTensors, num_layers: int, findings: Findings) -> None:
    """Record in `findings` what the tensors' names show, and tensors of the layers that nothing here reads."""
    names = tensors.layer_names(num_layers)
    for start, trait in _TENSOR_SIGNS:
        found = sorted(name for name in names if name.startswith(start))
        if found:
            findings.miss(trait, f"tensor {found[0]}")
    first = tensors.layers[min(tensors.layers)]
    if "self_attn.o_proj.weight" in first:
        if not any(name.startswith("input_layernorm.") for name in first):
            findings.miss("norms after each block only", "no tensor input_layernorm")
        elif not any(name.startswith("post_attention_layernorm.") for name in first):
            findings.miss("parallel attention and MLP blocks", "no tensor post_attention_layernorm")
    signs = tuple(start for start, _ in _TENSOR_SIGNS)
    unread = sorted(name for name in names if not name.startswith(signs) and not _is_read(name))
    if unread:
        findings.conflict(f"{len(unread)} kinds of tensor in the layers that nothing here reads, first {unread[0]}")
    if "lm_head.bias" in tensors.by_name:
        findings.miss("lm_head bias", "tensor lm_head.bias")


def _is_read(name: str) -> bool:
    if any(word in name for word in _HARMLESS):
        return True
    module = name.rpartition(".")[0]
    return module in _READ_NAMES or module_class(f"model.layers.0.{module}") in _READ_CLASSES
