"""Reads the Mixture of Experts from a config and, where they are given, the tensors. Used by `traits.config`.

transformers drops `scoring_func` and `topk_method` when it saves this family, so what the tensors show (a correction
bias, experts in a layer) decides, and a config that says otherwise is reported as a conflict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from pellucid.core import CheckpointError
from pellucid.traits.keys import REMEDY, ConfigKeys, checked_integer
from pellucid.traits.model import GroupRule, MoETraits, Scoring
from pellucid.traits.tensors import TextTensors

EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"

_SCORING_KEYS = ("scoring_func", "moe_router_activation_func", "score_function", "score_func")
_SCALING_KEYS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
_GROUP_KEYS = ("n_group", "num_expert_group")
_SHARED_WIDTH_KEYS = (
    "moe_shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "shared_expert_intermediate_size",
)
_BIASED_METHOD = "noaux_tc"
_MAX_METHOD = "group_limited_greedy"
_PLAIN_METHODS = ("greedy", _MAX_METHOD)


@dataclass(frozen=True, slots=True)
class _Gating:
    """How the router scores; None where only the tensors could tell."""

    scoring: Scoring | None
    correction_bias: bool | None
    method: str | None


def read_moe(
    keys: ConfigKeys, tensors: TextTensors | None, num_layers: int, intermediate_size: int
) -> tuple[MoETraits | None, tuple[bool, ...]]:
    """The MoE traits and, for each layer, whether it is MoE; (None, all False) for a dense model.

    Raises:
        CheckpointError: more experts per token than there are to choose from, groups that do not divide, a layer
            pattern of the wrong length.
    """
    num_experts = keys.integer(*EXPERT_KEYS)
    if not num_experts:
        return None, (False,) * num_layers
    pattern = _layer_pattern(keys, tensors, num_layers)
    top_k = keys.required_integer(
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts"
    )
    width = keys.integer("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", low=1)
    if width is None:
        width = intermediate_size
        keys.findings.note(f"moe_intermediate_size is not given: experts are intermediate_size = {width} wide")
    gating = _read_gating(keys, tensors, pattern)
    num_groups = keys.integer(*_GROUP_KEYS) or 1
    topk_groups = keys.integer("topk_group") or num_groups
    _check_choice(num_experts, top_k, num_groups, topk_groups)
    num_shared, shared_width = _shared_experts(keys, width)
    moe = MoETraits(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        num_shared_experts=num_shared,
        shared_intermediate_size=shared_width,
        scoring=gating.scoring,
        correction_bias=gating.correction_bias,
        normalize=_normalizes(keys, gating),
        scaling=_scaling(keys),
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_rule=_group_rule(keys, gating, num_groups),
    )
    return moe, pattern


def _scaling(keys: ConfigKeys) -> float:
    scaling = keys.number(*_SCALING_KEYS, low=0.0)
    return 1.0 if scaling is None else scaling


def _shared_experts(keys: ConfigKeys, expert_width: int) -> tuple[int, int]:
    """(how many, total width). A width given by itself is one shared expert."""
    count = keys.integer("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    width = keys.integer(*_SHARED_WIDTH_KEYS)
    if count is None:
        count = 1 if width else 0
    if not count:
        return 0, 0
    return count, width or count * expert_width


def _check_choice(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    if num_experts % num_groups:
        raise CheckpointError(f"{num_experts} experts do not divide into n_group = {num_groups} groups: {REMEDY}")
    if topk_groups > num_groups:
        raise CheckpointError(f"topk_group = {topk_groups} is above n_group = {num_groups}: {REMEDY}")
    eligible = num_experts // num_groups * topk_groups
    if top_k > eligible:
        raise CheckpointError(f"num_experts_per_tok = {top_k} is above the {eligible} experts to choose from: {REMEDY}")


def _normalizes(keys: ConfigKeys, gating: _Gating) -> bool:
    given = keys.flag("norm_topk_prob", "moe_renormalize")
    if given is not None:
        return given
    # Sigmoid routers normalise (DeepSeek-V3's default). Configs that count experts as num_local_experts take the
    # softmax over the chosen ones, which is the same.
    chosen_only = keys.has("num_local_experts") and not keys.has("n_routed_experts", "num_experts")
    normalises = chosen_only or gating.scoring == "sigmoid"
    keys.findings.note(f"norm_topk_prob is not given: {'normalised' if normalises else 'not normalised'}")
    return normalises


def _read_gating(keys: ConfigKeys, tensors: TextTensors | None, pattern: tuple[bool, ...]) -> _Gating:
    method = keys.text("topk_method")
    scoring = _configured_scoring(keys)
    bias = _configured_bias(keys, method, scoring)
    if tensors is None:
        if scoring is None and bias is not None:
            scoring = "sigmoid" if bias else "softmax"
        if scoring is None:
            keys.findings.note(
                "scoring_func and topk_method are not given: only the tensors can tell the router's kind"
            )
        return _Gating(scoring, bias, method)
    stored = any(CORRECTION_BIAS in tensors.layers.get(layer, ()) for layer, moe in enumerate(pattern) if moe)
    if bias is not None and bias != stored:
        keys.findings.conflict(
            f"the config {'asks for' if bias else 'has no use for'} {CORRECTION_BIAS} but the tensors "
            f"{'hold it' if stored else 'do not hold it'}: the tensors are followed"
        )
    implied: Scoring = "sigmoid" if stored else "softmax"
    if scoring is None:
        keys.findings.note(f"scoring_func is not given: {implied}, from the tensors")
    elif scoring != implied:
        keys.findings.conflict(
            f"{scoring} scoring {'with' if stored else 'without'} a correction bias is unusual: the config is followed"
        )
    return _Gating(scoring or implied, stored, method)


def _configured_scoring(keys: ConfigKeys) -> Scoring | None:
    scoring = keys.text(*_SCORING_KEYS)
    if scoring in ("softmax", "sigmoid"):
        return cast(Scoring, scoring)
    if scoring is not None:
        keys.findings.miss(f"router scoring '{scoring}'", f"scoring_func = {scoring!r}")
        return None
    grouped = keys.has("topk_method", *_GROUP_KEYS, *_SCALING_KEYS, "use_routing_bias", "moe_router_enable_expert_bias")
    return None if grouped else "softmax"


def _configured_bias(keys: ConfigKeys, method: str | None, scoring: Scoring | None) -> bool | None:
    given = keys.flag("use_routing_bias", "moe_router_enable_expert_bias")
    if given is not None:
        return given
    if method is not None and method not in (*_PLAIN_METHODS, _BIASED_METHOD):
        keys.findings.miss(f"expert choice '{method}'", f"topk_method = {method!r}")
    if method == _BIASED_METHOD:
        return True
    return False if method in _PLAIN_METHODS or scoring == "softmax" else None


def _group_rule(keys: ConfigKeys, gating: _Gating, num_groups: int) -> GroupRule:
    if num_groups == 1 or gating.method == "greedy":
        return "none"
    if gating.method is not None:
        return "max" if gating.method == _MAX_METHOD else "top2_sum"
    rule: GroupRule = "max" if gating.correction_bias is False else "top2_sum"
    source = "no tensors to tell" if gating.correction_bias is None else "from the correction bias"
    keys.findings.note(f"topk_method is not given: group rule {rule} ({source})")
    return rule


def _layer_pattern(keys: ConfigKeys, tensors: TextTensors | None, num_layers: int) -> tuple[bool, ...]:
    configured = _configured_pattern(keys, num_layers)
    if tensors is None:
        return configured
    stored = tuple(tensors.is_moe(layer) for layer in range(num_layers))
    if stored != configured:
        first = next(layer for layer in range(num_layers) if stored[layer] != configured[layer])
        keys.findings.conflict(
            f"the config makes layer {first} {'MoE' if configured[first] else 'dense'} but its tensors are "
            f"{'MoE' if stored[first] else 'dense'}: the tensors are followed"
        )
    return stored


def _configured_pattern(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is MoE, from whichever of the family's keys are there.

    `mlp_layer_types` says it layer by layer; `first_k_dense_replace` and `moe_layer_freq` are DeepSeek's;
    `decoder_sparse_step` and `mlp_only_layers` are Qwen's.
    """
    types = keys.sequence("mlp_layer_types")
    first_dense = keys.integer("first_k_dense_replace") or 0
    frequency = keys.value("moe_layer_freq")
    step = keys.integer("decoder_sparse_step", low=1) or 1
    only_dense = {checked_integer(layer, "mlp_only_layers") for layer in keys.sequence("mlp_only_layers") or ()}
    if types is not None:
        return _pattern_of_types(types, num_layers)
    if isinstance(frequency, list):
        if len(frequency) < num_layers:
            raise CheckpointError(f"moe_layer_freq lists {len(frequency)} layers of {num_layers}: {REMEDY}")
        return tuple(bool(sparse) and layer >= first_dense for layer, sparse in enumerate(frequency[:num_layers]))
    every = 1 if frequency is None else checked_integer(frequency, "moe_layer_freq", low=1)
    return tuple(
        layer >= first_dense and layer % every == 0 and (layer + 1) % step == 0 and layer not in only_dense
        for layer in range(num_layers)
    )


def _pattern_of_types(types: list[object], num_layers: int) -> tuple[bool, ...]:
    unknown = sorted({str(kind) for kind in types} - {"dense", "sparse", "moe"})
    if unknown:
        raise CheckpointError(f"mlp_layer_types has {unknown[0]!r}, neither 'dense' nor 'sparse': {REMEDY}")
    if len(types) < num_layers:
        raise CheckpointError(f"mlp_layer_types lists {len(types)} layers of {num_layers}: {REMEDY}")
    return tuple(kind != "dense" for kind in types[:num_layers])
