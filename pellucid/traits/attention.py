"""Reads the attention traits, MLA or GQA, from a config and the tensors' names. Used by `traits.config`."""

from __future__ import annotations

from pellucid.core import CheckpointError
from pellucid.traits.findings import Findings
from pellucid.traits.keys import REMEDY, ConfigKeys
from pellucid.traits.model import GQATraits, MLATraits
from pellucid.traits.rope import partial_rotary_factor, read_rope
from pellucid.traits.tensors import TextTensors


def read_attention(
    keys: ConfigKeys, tensors: TextTensors | None, hidden_size: int, norm_eps: float, max_position: int
) -> MLATraits | GQATraits:
    """MLA if and only if `kv_lora_rank` is a positive number, whatever the model is called.

    Raises:
        CheckpointError: a width is missing, or heads do not divide.
    """
    num_heads = keys.required_integer("num_attention_heads", "n_heads", "num_heads", "n_head")
    if keys.integer("kv_lora_rank"):
        return _read_mla(keys, tensors, num_heads, norm_eps, max_position)
    return _read_gqa(keys, tensors, num_heads, hidden_size, max_position)


def _read_mla(
    keys: ConfigKeys, tensors: TextTensors | None, num_heads: int, norm_eps: float, max_position: int
) -> MLATraits:
    rope_dim = keys.required_integer("qk_rope_head_dim", low=0)
    nope_dim = keys.required_integer("qk_nope_head_dim", low=1)
    if rope_dim == 0:
        keys.findings.miss("MLA without rope", "qk_rope_head_dim = 0")
    total = keys.integer("qk_head_dim")
    if total is not None and total != nope_dim + rope_dim:
        keys.findings.conflict(
            f"qk_head_dim = {total} but qk_nope_head_dim + qk_rope_head_dim = {nope_dim + rope_dim}: "
            "the sum is followed"
        )
    keys.find("head_dim")  # Present in some configs, with different meanings; MLA's widths have keys of their own.
    keys.find("num_key_value_heads")  # Counts the heads before compression; the cache holds one row.
    partial = partial_rotary_factor(keys)
    if partial not in (1.0, rope_dim / (nope_dim + rope_dim)):
        keys.findings.miss("partial rotary embedding", f"partial_rotary_factor = {partial:g}")
    return MLATraits(
        num_heads=num_heads,
        kv_lora_rank=keys.required_integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=keys.required_integer("v_head_dim"),
        q_lora_rank=keys.integer("q_lora_rank") or None,
        inner_eps=norm_eps,
        rope=read_rope(keys, dim=rope_dim, interleaved=True, max_position=max_position),
        bias=_stored_or_configured(
            keys.findings,
            keys.flag("attention_bias"),
            _any_bias(tensors, "q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
            "attention_bias",
            absent=False,
        ),
    )


def _read_gqa(
    keys: ConfigKeys, tensors: TextTensors | None, num_heads: int, hidden_size: int, max_position: int
) -> GQATraits:
    num_kv_heads = keys.integer("num_key_value_heads", "num_kv_heads", low=1) or num_heads
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads = {num_heads} does not divide by num_key_value_heads = {num_kv_heads}: {REMEDY}"
        )
    head_dim = keys.integer("head_dim", "attention_head_dim", low=1)
    if head_dim is None:
        if hidden_size % num_heads:
            raise CheckpointError(
                f"hidden_size = {hidden_size} does not divide by num_attention_heads = {num_heads} "
                f"and head_dim is not given: {REMEDY}"
            )
        head_dim = hidden_size // num_heads
    partial = partial_rotary_factor(keys)
    if partial != 1.0:
        keys.findings.miss("partial rotary embedding", f"partial_rotary_factor = {partial:g}")
    configured_bias = keys.flag("attention_bias", "qkv_bias", "use_qkv_bias")
    findings = keys.findings
    return GQATraits(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_rope(keys, dim=head_dim, interleaved=False, max_position=max_position),
        qk_norm=_stored_or_configured(
            findings, keys.flag("use_qk_norm", "qk_norm"), _has_qk_norm(tensors), "use_qk_norm"
        ),
        qkv_bias=_stored_or_configured(
            findings, configured_bias, _any_bias(tensors, "q_proj", "k_proj", "v_proj", "qkv_proj"), "attention_bias"
        ),
        # A true attention_bias covers the output projection in some families and not in others.
        o_bias=_stored_or_configured(
            findings, False if configured_bias is False else None, _any_bias(tensors, "o_proj"), "attention_bias"
        ),
    )


def _any_bias(tensors: TextTensors | None, *modules: str) -> bool | None:
    """Whether layer 0 holds a bias for any of the attention `modules`; None without tensors."""
    if tensors is None:
        return None
    return any(f"self_attn.{module}.bias" in tensors.layers.get(0, ()) for module in modules)


def _has_qk_norm(tensors: TextTensors | None) -> bool | None:
    return None if tensors is None else tensors.has_module(0, "self_attn.q_norm")


def _stored_or_configured(
    findings: Findings, configured: bool | None, stored: bool | None, key: str, absent: bool | None = None
) -> bool | None:
    """The tensors decide; without them the config does; `absent` when neither says anything."""
    if stored is None:
        return absent if configured is None else configured
    if configured is not None and configured != stored:
        findings.conflict(
            f"{key} = {str(configured).lower()} but the tensors {'hold it' if stored else 'do not hold it'}: "
            "the tensors are followed"
        )
    return stored
