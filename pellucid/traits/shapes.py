"""Checks a model's traits against the shapes in the tensor headers. Used by `traits.config`.

A config copied from a web page may be off by one; with the headers at hand that is found before a byte is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pellucid.core import CheckpointError
from pellucid.traits.findings import Findings
from pellucid.traits.keys import REMEDY
from pellucid.traits.model import GQATraits, MLATraits, ModelTraits
from pellucid.traits.moe import CORRECTION_BIAS
from pellucid.traits.tensors import TensorInfo, TextTensors

Shape = tuple[int | None, ...]
_Expected = tuple[str, tuple[int, ...], str]

_WHOLE_DTYPES = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I8")
_UNPACKED = ("I32", "U8")


def check_shapes(traits: ModelTraits, tensors: TextTensors, findings: Findings) -> None:
    """Compare every layer's tensors with what `traits` imply.

    Raises:
        CheckpointError: a layer is missing or in excess, or a shape contradicts the config. Names the tensor, both
            shapes and the config keys behind the expected one.
    """
    _check_layers(traits, tensors)
    _check_kind(traits, tensors)
    for module, shape, keys in _expected_outside(traits):
        _compare(tensors.modules.get(module), module, shape, keys)
    for layer in range(traits.num_layers):
        for inner, shape, keys in _expected_inside(traits, traits.moe_layers[layer], tensors, layer):
            module = f"model.layers.{layer}.{inner}"
            _compare(tensors.modules.get(module), module, shape, keys)
        _check_experts(traits, tensors, layer)
    _check_query_norm(traits, tensors, findings)


def stored_shape(parts: Mapping[str, TensorInfo]) -> Shape | None:
    """The logical [..., rows, columns] of a weight, from whichever tensors hold it; None where headers do not say.

    Packed columns are counted back where the packing is exact, and are None where it is not.
    """
    packed = parts.get("weight_packed")
    if packed is not None and len(packed.shape) == 2:
        return (packed.shape[0], 2 * packed.shape[1] if packed.dtype == "U8" else None)
    weight = parts.get("weight")
    if weight is None:
        return None
    if weight.dtype == "U8" and "weight_scale" in parts:
        return (*weight.shape[:-1], 2 * weight.shape[-1])
    return None if weight.dtype in _UNPACKED else weight.shape


def _compare(parts: Mapping[str, TensorInfo] | None, module: str, expected: tuple[int, ...], keys: str) -> None:
    shape = stored_shape(parts) if parts else None
    if shape is None:
        return
    same = len(shape) == len(expected) and all(
        known is None or known == wanted for known, wanted in zip(shape, expected, strict=True)
    )
    if not same:
        raise CheckpointError(
            f"{module} has shape {_render(shape)} but the config ({keys}) makes it {_render(expected)}: {REMEDY}"
        )


def _render(shape: Shape) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def _check_layers(traits: ModelTraits, tensors: TextTensors) -> None:
    absent = [layer for layer in range(traits.num_layers) if layer not in tensors.layers]
    if absent:
        raise CheckpointError(
            f"num_hidden_layers = {traits.num_layers} but the tensors have no layer {absent[0]}: "
            f"download the missing shards or {REMEDY}"
        )
    extra = [layer for layer in sorted(tensors.layers) if layer >= traits.num_layers]
    unexplained = [layer for layer in extra if not is_mtp_layer(tensors, layer)]
    if unexplained:
        raise CheckpointError(
            f"num_hidden_layers = {traits.num_layers} but the tensors have layer {unexplained[0]}, "
            f"which is no multi-token-prediction layer: {REMEDY}"
        )


def _check_kind(traits: ModelTraits, tensors: TextTensors) -> None:
    """The kind of attention that the config describes is the one that layer 0 stores."""
    attention = traits.attention
    if isinstance(attention, MLATraits):
        query = "q_proj" if attention.q_lora_rank is None else "q_a_proj"
        needed = {query: "q_lora_rank", "kv_a_proj_with_mqa": "kv_lora_rank"}
    else:
        needed = {"q_proj": "kv_lora_rank", "k_proj": "kv_lora_rank"}
    for name, key in needed.items():
        if not tensors.has_module(0, f"self_attn.{name}") and not tensors.has_module(0, "self_attn.qkv_proj"):
            raise CheckpointError(
                f"the config ({key}) asks for self_attn.{name} but layer 0 does not hold it: {REMEDY}"
            )


def is_mtp_layer(tensors: TextTensors, layer: int) -> bool:
    """A multi-token-prediction layer joins the embedding and the previous hidden state: `eh_proj`, or `enorm`."""
    return tensors.has_module(layer, "eh_proj") or tensors.has_module(layer, "enorm")


def _check_experts(traits: ModelTraits, tensors: TextTensors, layer: int) -> None:
    if traits.moe is None or not traits.moe_layers[layer]:
        return
    ids = tensors.expert_ids(layer)
    if ids and ids != set(range(traits.moe.num_experts)):
        raise CheckpointError(
            f"layer {layer} stores {len(ids)} experts up to number {max(ids)} but n_routed_experts is "
            f"{traits.moe.num_experts}: download the missing shards or {REMEDY}"
        )

    bias = tensors.layers[layer].get(CORRECTION_BIAS)
    if bias is not None and bias.shape != (traits.moe.num_experts,):
        raise CheckpointError(
            f"layer {layer} {CORRECTION_BIAS} has shape {_render(bias.shape)} but n_routed_experts is "
            f"{traits.moe.num_experts}: {REMEDY}"
        )


def _check_query_norm(traits: ModelTraits, tensors: TextTensors, findings: Findings) -> None:
    """Norms over single heads are ours; some families norm all heads of a token as one vector."""
    norm = tensors.layers[0].get("self_attn.q_norm.weight")
    if isinstance(traits.attention, GQATraits) and norm is not None and norm.shape != (traits.attention.head_dim,):
        findings.miss("query and key norms over all heads", f"self_attn.q_norm.weight has shape {_render(norm.shape)}")


def _expected_outside(traits: ModelTraits) -> Iterator[_Expected]:
    vocabulary = (traits.vocab_size, traits.hidden_size)
    yield "model.embed_tokens", vocabulary, "vocab_size, hidden_size"
    yield "lm_head", vocabulary, "vocab_size, hidden_size"
    yield "model.norm", (traits.hidden_size,), "hidden_size"


def _expected_inside(traits: ModelTraits, is_moe: bool, tensors: TextTensors, layer: int) -> Iterator[_Expected]:
    hidden = traits.hidden_size
    yield "input_layernorm", (hidden,), "hidden_size"
    yield "post_attention_layernorm", (hidden,), "hidden_size"
    if isinstance(traits.attention, MLATraits):
        yield from _expected_mla(traits.attention, hidden)
    else:
        yield from _expected_gqa(traits.attention, hidden)
    moe = traits.moe
    if not is_moe or moe is None:
        yield from _expected_mlp("mlp", hidden, traits.intermediate_size, "intermediate_size")
        return
    yield "mlp.gate", (moe.num_experts, hidden), "n_routed_experts, hidden_size"
    width, key = moe.intermediate_size, "moe_intermediate_size"
    yield from _expected_mlp("mlp.experts.0", hidden, width, key)
    for inner, shape, keys in _expected_mlp("mlp.experts", hidden, width, key):
        yield inner, (moe.num_experts, *shape), f"n_routed_experts, {keys}"
    shared = "shared expert width = n_shared_experts x moe_intermediate_size"
    yield from _expected_mlp("mlp.shared_experts", hidden, moe.shared_intermediate_size, shared)


def _expected_mlp(prefix: str, hidden: int, width: int, key: str) -> Iterator[_Expected]:
    yield f"{prefix}.gate_proj", (width, hidden), f"{key}, hidden_size"
    yield f"{prefix}.up_proj", (width, hidden), f"{key}, hidden_size"
    yield f"{prefix}.down_proj", (hidden, width), f"hidden_size, {key}"


def _expected_mla(mla: MLATraits, hidden: int) -> Iterator[_Expected]:
    heads, qk = mla.num_heads, "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)"
    if mla.q_lora_rank is None:
        yield "self_attn.q_proj", (heads * mla.qk_head_dim, hidden), f"{qk}, hidden_size"
    else:
        yield "self_attn.q_a_proj", (mla.q_lora_rank, hidden), "q_lora_rank, hidden_size"
        yield "self_attn.q_a_layernorm", (mla.q_lora_rank,), "q_lora_rank"
        yield "self_attn.q_b_proj", (heads * mla.qk_head_dim, mla.q_lora_rank), f"{qk}, q_lora_rank"
    latent = "kv_lora_rank + qk_rope_head_dim"
    yield "self_attn.kv_a_proj_with_mqa", (mla.latent_head_size, hidden), f"{latent}, hidden_size"
    yield "self_attn.kv_a_layernorm", (mla.kv_lora_rank,), "kv_lora_rank"
    rows = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    keys = "num_attention_heads x (qk_nope_head_dim + v_head_dim), kv_lora_rank"
    yield "self_attn.kv_b_proj", (rows, mla.kv_lora_rank), keys
    yield "self_attn.k_b_proj", (heads, mla.kv_lora_rank, mla.qk_nope_head_dim), "heads, kv_lora_rank, qk_nope_head_dim"
    yield "self_attn.v_b_proj", (heads, mla.v_head_dim, mla.kv_lora_rank), "heads, v_head_dim, kv_lora_rank"
    yield "self_attn.o_proj", (hidden, heads * mla.v_head_dim), "hidden_size, num_attention_heads x v_head_dim"


def _expected_gqa(gqa: GQATraits, hidden: int) -> Iterator[_Expected]:
    q_width, kv_width = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
    kv_keys = "num_key_value_heads x head_dim, hidden_size"
    yield "self_attn.q_proj", (q_width, hidden), "num_attention_heads x head_dim, hidden_size"
    yield "self_attn.k_proj", (kv_width, hidden), kv_keys
    yield "self_attn.v_proj", (kv_width, hidden), kv_keys
    yield "self_attn.o_proj", (hidden, q_width), "hidden_size, num_attention_heads x head_dim"
