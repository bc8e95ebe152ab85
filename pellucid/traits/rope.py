"""Reads rotary embedding from a config in either of its spellings. Used by `traits.attention`.

Files written before transformers 5 have `rope_scaling: {type, ...}` beside `rope_theta`; later ones have
`rope_parameters: {rope_type, rope_theta, ...}`. A `rope_scaling` whose type is "default" scales nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pellucid.core import CheckpointError
from pellucid.traits.findings import Findings
from pellucid.traits.keys import REMEDY, ConfigKeys, checked_integer, checked_number
from pellucid.traits.model import RopeTraits

DEFAULT_THETA = 10000.0

_PLAIN = ("default", "mrope")
_NESTED_CHOICE = "full_attention"


def read_rope(keys: ConfigKeys, *, dim: int, interleaved: bool, max_position: int) -> RopeTraits:
    """The rotary traits of a model whose heads rotate `dim` of their dimensions.

    `interleaved` is the default pairing; the key `rope_interleave` wins. An unknown kind of scaling is recorded as a
    missing trait and read as plain rotary embedding.

    Raises:
        CheckpointError: an odd `dim`, or a value of the wrong type or range.
    """
    findings = keys.findings
    if dim % 2:
        raise CheckpointError(f"the rotary width of a head is {dim}, which is odd: {REMEDY}")
    parameters = _merged_parameters(keys)
    theta = _theta(keys, parameters)
    pairing = keys.flag("rope_interleave", "rope_interleaved")
    pairs = interleaved if pairing is None else pairing
    kind = _kind(parameters, findings)
    if parameters.get("mrope_section") is not None:
        findings.note("rope sections for images and video (mrope) are skipped: text positions are plain")
    if parameters.get("llama_4_scaling_beta"):
        beta = parameters["llama_4_scaling_beta"]
        findings.miss("position-dependent query scale", f"llama_4_scaling_beta = {beta!r}")
    if kind in _PLAIN:
        return RopeTraits(dim=dim, theta=theta, interleaved=pairs)
    if kind == "linear":
        return RopeTraits(dim, theta, "linear", pairs, factor=_required(parameters, "factor", low=1.0))
    if kind == "llama3":
        low, high = (_required(parameters, name, low=1e-6) for name in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise CheckpointError(
                f"rope key 'low_freq_factor' is {low:g}, not below high_freq_factor {high:g}: {REMEDY}"
            )
        return RopeTraits(
            dim,
            theta,
            "llama3",
            pairs,
            factor=_required(parameters, "factor", low=1.0),
            original_max_position=_original(keys, parameters, max_position),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        return _yarn(keys, parameters, dim, theta, pairs, max_position)
    findings.miss(f"rope scaling '{kind}'", f"rope_type = {kind!r}")
    return RopeTraits(dim=dim, theta=theta, interleaved=pairs)


def partial_rotary_factor(keys: ConfigKeys) -> float:
    """The share of a head's dimensions that is rotated, under its spellings; 1.0 when nothing is said."""
    factor = keys.number("partial_rotary_factor", "rotary_pct", "rotary_percentage", "rotary_emb_fraction", low=0.0)
    if factor is None:
        nested = _merged_parameters(keys).get("partial_rotary_factor")
        factor = None if nested is None else checked_number(nested, "partial_rotary_factor", low=0.0)
    return 1.0 if factor is None else factor


def _yarn(
    keys: ConfigKeys, parameters: Mapping[str, Any], dim: int, theta: float, interleaved: bool, max_position: int
) -> RopeTraits:
    original = _original(keys, parameters, max_position)
    factor = _optional(parameters, "factor", low=1.0)
    if factor is None:
        factor = max(1.0, max_position / original)
        keys.findings.note(f"yarn without a factor: {factor:g}, from the two context lengths")
    if max_position > original * factor:
        keys.findings.conflict(
            f"max_position_embeddings = {max_position} is above original_max_position_embeddings x factor "
            f"= {original * factor:g}: one of them is mistyped; positions beyond the latter are not trained"
        )
    mscale, mscale_all_dim = _optional(parameters, "mscale"), _optional(parameters, "mscale_all_dim")
    if (mscale is None) != (mscale_all_dim is None):
        keys.findings.conflict("yarn has only one of mscale and mscale_all_dim: implementations disagree on the other")
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"rope key 'truncate' is {truncate!r}, not true or false: {REMEDY}")
    beta_fast, beta_slow = _optional(parameters, "beta_fast", low=1e-6), _optional(parameters, "beta_slow", low=1e-6)
    return RopeTraits(
        dim,
        theta,
        "yarn",
        interleaved,
        factor=factor,
        original_max_position=original,
        beta_fast=32.0 if beta_fast is None else beta_fast,
        beta_slow=1.0 if beta_slow is None else beta_slow,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        attention_factor=_optional(parameters, "attention_factor", low=0.0),
        truncate=truncate,
    )


def _merged_parameters(keys: ConfigKeys) -> dict[str, Any]:
    """Both spellings as one dict without nulls; where they disagree `rope_parameters`, the newer, is followed."""
    older = _flat(keys.mapping("rope_scaling"), keys.findings)
    newer = _flat(keys.mapping("rope_parameters"), keys.findings)
    for name in sorted(older.keys() & newer.keys()):
        if older[name] != newer[name]:
            keys.findings.conflict(
                f"{name} is {older[name]!r} in rope_scaling but {newer[name]!r} in rope_parameters, which is followed"
            )
    return {**older, **newer}


def _flat(parameters: Mapping[str, Any] | None, findings: Findings) -> dict[str, Any]:
    """One level of rope parameters; those given per layer type are reduced to one type, or recorded as missing."""
    if parameters is None:
        return {}
    nested = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    if not nested:
        return {name: value for name, value in parameters.items() if value is not None}
    chosen = nested.get(_NESTED_CHOICE, next(iter(nested.values())))
    if any(value != chosen for value in nested.values()):
        findings.miss("rotary embedding per layer type", f"rope_parameters for {', '.join(sorted(nested))}")
    return {name: value for name, value in chosen.items() if value is not None}


def _kind(parameters: Mapping[str, Any], findings: Findings) -> str:
    kind, older = parameters.get("rope_type"), parameters.get("type")
    if kind is not None and older is not None and kind != older:
        findings.conflict(f"rope_type = {kind!r} but type = {older!r}: rope_type is followed")
    chosen = kind if kind is not None else older if older is not None else "default"
    if not isinstance(chosen, str):
        raise CheckpointError(f"rope key 'rope_type' is {chosen!r}, not a string: {REMEDY}")
    return chosen


def _theta(keys: ConfigKeys, parameters: Mapping[str, Any]) -> float:
    outside = keys.number("rope_theta", "rotary_emb_base", "rotary_embedding_base", low=1.0)
    inside = _optional(parameters, "rope_theta", low=1.0)
    if inside is not None and outside is not None and inside != outside:
        keys.findings.conflict(
            f"rope_theta = {outside:g} but the rope parameters say {inside:g}: the latter is followed"
        )
    theta = outside if inside is None else inside
    if theta is None:
        keys.findings.note(f"rope_theta is not given: {DEFAULT_THETA:g}")
        return DEFAULT_THETA
    return theta


def _original(keys: ConfigKeys, parameters: Mapping[str, Any], max_position: int) -> int:
    name = "original_max_position_embeddings"
    outside = keys.integer(name, low=1)
    if outside is not None:
        return outside
    if parameters.get(name) is None:
        keys.findings.conflict(f"rope scaling without {name}: max_position_embeddings = {max_position} is taken")
        return max_position
    return checked_integer(parameters[name], name, low=1)


def _optional(parameters: Mapping[str, Any], name: str, low: float = float("-inf")) -> float | None:
    value = parameters.get(name)
    return None if value is None else checked_number(value, name, low)


def _required(parameters: Mapping[str, Any], name: str, low: float) -> float:
    value = _optional(parameters, name, low)
    if value is None:
        raise CheckpointError(
            f"rope scaling '{parameters.get('rope_type', parameters.get('type'))}' lacks '{name}': {REMEDY}"
        )
    return value
