"""Which tensors a decoder of given traits is made of, and the strict check of a checkpoint against it. No torch.

Run before the first byte of weights is read: a tensor that is missing, misshapen or left over is an error that
names it, so that no parameter is ever left at a random value and no part of a model is ignored in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pellucid.core import CheckpointError
from pellucid.traits.model import GQATraits, MLATraits, ModelTraits
from pellucid.traits.tensors import TensorInfo, TextTensors

Shape = tuple[int, ...]

OPTIONAL = re.compile(r".*\.rotary_emb\.inv_freq$")
"""Left over by old exporters; rope is computed from the config."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`required`: canonical name -> shape. `ignored`: stored, known, and not needed (name -> why)."""

    required: Mapping[str, Shape]
    ignored: Mapping[str, str]


def decoder_layout(traits: ModelTraits, stored: TextTensors) -> Layout:
    """The tensors to load. `stored` decides only between equivalent forms (stacked or single experts).

    Raises:
        CheckpointError: lists what is missing, misshapen and unexpected.
    """
    required = dict(_required(traits, stored))
    ignored = {name: why for name in stored.by_name if name not in required and (why := _ignorable(name, traits))}
    _check(required, ignored, stored)
    return Layout(required, ignored)


def stacked_shapes(traits: ModelTraits) -> dict[str, Shape]:
    """Canonical name -> shape of a decoder whose experts are stored as one tensor a projection."""
    stacked: dict[str, dict[str, TensorInfo]] = {
        f"model.layers.{layer}.mlp.experts.gate_proj": {} for layer in range(traits.num_layers)
    }
    return dict(_required(traits, TextTensors({}, stacked, {}, {}, {})))


def _required(traits: ModelTraits, stored: TextTensors) -> Iterable[tuple[str, Shape]]:
    hidden = traits.hidden_size
    yield "model.embed_tokens.weight", (traits.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not traits.tied_embeddings:
        yield "lm_head.weight", (traits.vocab_size, hidden)
    for layer in range(traits.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        attention = traits.attention
        parts = _mla(attention, hidden, stored, layer) if attention.kind == "mla" else _gqa(attention, hidden)
        for name, shape in parts:
            yield f"{prefix}self_attn.{name}", shape
        mlp = _moe(traits, stored, layer) if traits.moe_layers[layer] else _mlp("", traits, traits.intermediate_size)
        for name, shape in mlp:
            yield f"{prefix}mlp.{name}", shape


def _gqa(attention: GQATraits, hidden: int) -> Iterable[tuple[str, Shape]]:
    width, kv_width = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    for name, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
        yield f"{name}_proj.weight", (rows, hidden)
        if attention.qkv_bias:
            yield f"{name}_proj.bias", (rows,)
    if attention.qk_norm:
        yield "q_norm.weight", (attention.head_dim,)
        yield "k_norm.weight", (attention.head_dim,)
    yield "o_proj.weight", (hidden, width)
    if attention.o_bias:
        yield "o_proj.bias", (hidden,)


def _mla(attention: MLATraits, hidden: int, stored: TextTensors, layer: int) -> Iterable[tuple[str, Shape]]:
    queries = attention.num_heads * attention.qk_head_dim
    if attention.q_lora_rank is None:
        yield "q_proj.weight", (queries, hidden)
    else:
        yield "q_a_proj.weight", (attention.q_lora_rank, hidden)
        yield "q_a_layernorm.weight", (attention.q_lora_rank,)
        yield "q_b_proj.weight", (queries, attention.q_lora_rank)
        if attention.bias:
            yield "q_a_proj.bias", (attention.q_lora_rank,)
    yield "kv_a_proj_with_mqa.weight", (attention.latent_head_size, hidden)
    if attention.bias:
        yield "kv_a_proj_with_mqa.bias", (attention.latent_head_size,)
    yield "kv_a_layernorm.weight", (attention.kv_lora_rank,)
    heads, nope, v, latent = (
        attention.num_heads, attention.qk_nope_head_dim, attention.v_head_dim, attention.kv_lora_rank
    )  # fmt: skip
    if stored.has_module(layer, "self_attn.k_b_proj"):
        # GGUF since its MLA support: both halves per head, the key half already transposed.
        yield "k_b_proj.weight", (heads, latent, nope)
        yield "v_b_proj.weight", (heads, v, latent)
    else:
        yield "kv_b_proj.weight", (heads * (nope + v), latent)
    yield "o_proj.weight", (hidden, heads * v)
    if attention.bias:
        yield "o_proj.bias", (hidden,)


def _mlp(prefix: str, traits: ModelTraits, width: int) -> Iterable[tuple[str, Shape]]:
    hidden = traits.hidden_size
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield f"{prefix}{name}_proj.weight", shape
        if traits.mlp_bias:
            yield f"{prefix}{name}_proj.bias", shape[:1]


def _moe(traits: ModelTraits, stored: TextTensors, layer: int) -> Iterable[tuple[str, Shape]]:
    moe, hidden = traits.moe, traits.hidden_size
    assert moe is not None
    yield "gate.weight", (moe.num_experts, hidden)
    if moe.correction_bias:
        yield "gate.e_score_correction_bias", (moe.num_experts,)
    width = moe.intermediate_size
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    if stored.has_module(layer, "mlp.experts.gate_proj"):
        for name, shape in shapes.items():
            yield f"experts.{name}_proj.weight", (moe.num_experts, *shape)
    else:
        for expert in range(moe.num_experts):
            for name, shape in shapes.items():
                yield f"experts.{expert}.{name}_proj.weight", shape
    if moe.num_shared_experts:
        yield from _mlp("shared_experts.", traits, moe.shared_intermediate_size)


def _ignorable(name: str, traits: ModelTraits) -> str | None:
    """Why a stored tensor that the decoder does not use is no error; None when it is one."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None and int(layer[1]) >= traits.num_layers:
        return "multi-token-prediction layer"
    if OPTIONAL.match(name):
        return "computed from the config"
    if name == "lm_head.weight" and traits.tied_embeddings:
        return "tied to the embedding"
    return None


def _check(required: Mapping[str, Shape], ignored: Mapping[str, str], stored: TextTensors) -> None:
    missing = [name for name in required if name not in stored.by_name]
    unexpected = [name for name in stored.by_name if name not in required and name not in ignored]
    misshapen = [
        f"{name} is {list(info.shape)}, the config says {list(required[name])}"
        for name, info in stored.by_name.items()
        if name in required and info.shape != required[name]
    ]
    complaints = [
        f"{len(names)} {kind}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
        for kind, names in (("missing", missing), ("misshapen", misshapen), ("unexpected", unexpected))
        if names
    ]
    if complaints:
        raise CheckpointError(
            "the tensors do not match the config: " + "; ".join(complaints) + ". Is the download complete, and is "
            "config.json the one of these weights?"
        )
