"""Reads what a model is from its config.json and, where they are given, its tensor headers. Entry point of `traits`.

Called by `models.checkpoint` and by `explain`. No torch; nothing here knows an architecture's name. Tensors are
followed where they and the config disagree, and every disagreement is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pellucid.core import CheckpointError, UnsupportedModelError
from pellucid.traits.attention import read_attention
from pellucid.traits.findings import Findings, MissingTrait
from pellucid.traits.keys import REMEDY, ConfigKeys, checked_integer, unwrap_text_config
from pellucid.traits.missing import find_missing_in_config, find_missing_in_tensors
from pellucid.traits.model import ModelTraits
from pellucid.traits.moe import read_moe
from pellucid.traits.quantization import QuantizationRules, parse_quantization
from pellucid.traits.shapes import check_shapes, is_mtp_layer
from pellucid.traits.tensors import TensorIndex, TextTensors
from pellucid.traits.weights import SCHEMES, read_weight_traits, weight_format_of

__all__ = ["MissingTrait", "TraitReport", "read_traits", "weight_format_of"]

MOST_LAYERS = 4096

_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_POSITION_KEYS = ("max_position_embeddings", "model_max_length", "max_sequence_length", "seq_length")
_EPS_KEYS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")
_WIDTH_KEYS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "head_dim",
)
_STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class TraitReport:
    """The traits of a model and how they were found.

    `notes` are neutral, `conflicts` say where two sources disagree and which was followed, `missing` lists what the
    model needs and Pellucid has not.
    """

    traits: ModelTraits
    notes: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    missing: tuple[MissingTrait, ...] = ()

    def require_supported(self) -> None:
        """Raises UnsupportedModelError naming every missing trait, if there is one."""
        if self.missing:
            raise _unsupported(self.missing)


def read_traits(
    config: Mapping[str, Any], tensors: TensorIndex | None = None, hf_quant_config: Mapping[str, Any] | None = None
) -> TraitReport:
    """Read a config.json as parsed, the header of all its tensors, and the content of hf_quant_config.json.

    Without tensors some traits are None and the rest is taken from the config's word.

    Raises:
        CheckpointError: a key is missing or nonsensical, or a tensor's shape contradicts the config.
        UnsupportedModelError: a key is missing from the config of a model that needs a missing trait anyway.
    """
    findings = Findings()
    keys = ConfigKeys(unwrap_text_config(config, findings), findings)
    view = TextTensors.of(tensors) if tensors else None
    find_missing_in_config(keys, findings, has_tensors=view is not None)
    try:
        rules = _quantization(keys, hf_quant_config)
        traits = _read_model(keys, view, rules)
        if view is not None:
            check_shapes(traits, view, findings)
    except CheckpointError as error:
        if findings.missing:
            raise _unsupported(tuple(findings.missing), f"; besides, {error}") from error
        raise
    _check_plausible(keys, traits)
    if view is not None:
        find_missing_in_tensors(view, traits.num_layers, findings)
        for tower, (count, size) in sorted(view.skipped.items()):
            findings.note(f"{tower} is skipped: {count} tensors, {size / 1e6:.1f} MB")
    unread = keys.unread()
    if unread:
        findings.note(f"config keys not read: {', '.join(unread)}")
    return TraitReport(traits, tuple(findings.notes), tuple(findings.conflicts), tuple(findings.missing))


def _unsupported(missing: tuple[MissingTrait, ...], besides: str = "") -> UnsupportedModelError:
    listed = ", ".join(str(entry) for entry in missing)
    message = f"this model needs what Pellucid has not: {listed}{besides}; serve it with an engine that has it"
    return UnsupportedModelError(message, missing[0].trait)


def _read_model(keys: ConfigKeys, tensors: TextTensors | None, rules: QuantizationRules | None) -> ModelTraits:
    hidden_size = keys.required_integer("hidden_size", "n_embd", "d_model")
    num_layers = keys.required_integer(*_LAYER_KEYS)
    if num_layers > MOST_LAYERS:
        raise CheckpointError(f"config key 'num_hidden_layers' is {num_layers}, above {MOST_LAYERS}: {REMEDY}")
    vocab_size = keys.required_integer("vocab_size")
    norm_eps = keys.required_number(*_EPS_KEYS, low=0.0)
    max_position = keys.required_integer(*_POSITION_KEYS)
    attention = read_attention(keys, tensors, hidden_size, norm_eps, max_position)
    width = keys.integer("intermediate_size", "ffn_hidden_size", low=1)
    moe, moe_layers = read_moe(keys, tensors, num_layers, width or 0)
    if width is None and not all(moe_layers):
        raise CheckpointError(f"config key 'intermediate_size' is missing (nor ffn_hidden_size): {REMEDY}")
    dtype = _dtype(keys, tensors)
    tied = _tied(keys, tensors)
    return ModelTraits(
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        norm_eps=norm_eps,
        attention=attention,
        intermediate_size=width or 0,
        moe=moe,
        moe_layers=moe_layers,
        max_position=max_position,
        tied_embeddings=tied,
        mlp_bias=_mlp_bias(keys, tensors, moe_layers),
        weights=read_weight_traits(
            rules,
            tensors,
            attention=attention,
            moe=moe,
            moe_layers=moe_layers,
            tied_embeddings=tied,
            dtype=dtype,
            findings=keys.findings,
        ),
        dtype=dtype,
        mtp_layers=_mtp_layers(keys, tensors, num_layers),
        bos_token_id=next(iter(_token_ids(keys, "bos_token_id", vocab_size)), None),
        eos_token_ids=_token_ids(keys, "eos_token_id", vocab_size),
    )


def _quantization(keys: ConfigKeys, hf_quant_config: Mapping[str, Any] | None) -> QuantizationRules | None:
    """The config's own rules, else those of hf_quant_config.json; where both are, they are compared."""
    own = parse_quantization(keys.mapping("quantization_config"))
    separate = parse_quantization(hf_quant_config)
    if own is None or separate is None:
        return own or separate
    formats = [[stored for _, stored in rules.groups] for rules in (own, separate)]
    if formats[0] != formats[1] or set(own.ignore.patterns) != set(separate.ignore.patterns):
        keys.findings.conflict("quantization_config and hf_quant_config.json differ: quantization_config is followed")
    return own


def _dtype(keys: ConfigKeys, tensors: TextTensors | None) -> str:
    given = keys.text("dtype", "torch_dtype")
    if given is not None and given != "auto":
        dtype = given.removeprefix("torch.")
        if dtype not in SCHEMES:
            raise CheckpointError(f"config key 'dtype' is {given!r}, none of {', '.join(SCHEMES)}: {REMEDY}")
        return dtype
    embedding = tensors.by_name.get("model.embed_tokens.weight") if tensors else None
    dtype = _STORED_DTYPES.get(embedding.dtype, "bfloat16") if embedding else "bfloat16"
    keys.findings.note(f"dtype is not given: {dtype}")
    return dtype


def _tied(keys: ConfigKeys, tensors: TextTensors | None) -> bool:
    """Whether the output projection is the embedding; a stored lm_head decides when the config is silent."""
    given = keys.flag("tie_word_embeddings")
    stored = None if tensors is None else "lm_head" in tensors.modules
    if given is None:
        if stored is None:
            keys.findings.note("tie_word_embeddings is not given: not tied")
        return stored is False
    if stored is True and given:
        keys.findings.note("lm_head is stored although tie_word_embeddings is true: the embedding is used")
    if stored is False and not given:
        keys.findings.conflict("tie_word_embeddings is false but no lm_head is stored: the config is followed")
    return given


def _mlp_bias(keys: ConfigKeys, tensors: TextTensors | None, moe_layers: tuple[bool, ...]) -> bool | None:
    given = keys.flag("mlp_bias")
    if tensors is None or all(moe_layers):
        return given
    stored = "mlp.gate_proj.bias" in tensors.layers.get(moe_layers.index(False), ())
    if given is not None and given != stored:
        keys.findings.conflict(f"mlp_bias = {str(given).lower()} but the tensors say otherwise: they are followed")
    return stored


def _mtp_layers(keys: ConfigKeys, tensors: TextTensors | None, num_layers: int) -> int:
    """Multi-token-prediction layers that are really stored; without tensors, the config's word and a note."""
    said = keys.integer(*_MTP_KEYS) or 0
    if tensors is None:
        if said:
            keys.findings.note(f"{said} multi-token-prediction layers according to the config, not verified")
        return said
    stored = sum(layer >= num_layers and is_mtp_layer(tensors, layer) for layer in tensors.layers)
    stored += len({name.split(".")[2] for name in tensors.by_name if name.startswith("mtp.layers.")})
    if stored != said:
        keys.findings.conflict(f"num_nextn_predict_layers = {said} but {stored} are stored: the tensors are followed")
    return stored


def _token_ids(keys: ConfigKeys, name: str, vocab_size: int) -> tuple[int, ...]:
    value = keys.value(name)
    if value is None:
        return ()
    ids = tuple(checked_integer(entry, name) for entry in (value if isinstance(value, list) else [value]))
    outside = [token_id for token_id in ids if token_id >= vocab_size]
    if outside:
        keys.findings.conflict(f"{name} = {outside[0]} is outside the vocabulary of {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _check_plausible(keys: ConfigKeys, traits: ModelTraits) -> None:
    """Odd widths never occur in published models: such a config was mistyped or altered on the way."""
    for key in _WIDTH_KEYS:
        value = keys.values.get(key)
        if isinstance(value, int) and value % 2:
            keys.findings.conflict(f"{key} = {value} is odd, which no published model has: {REMEDY}")
    moe = traits.moe
    if moe is not None and moe.normalize and moe.scoring == "softmax" and moe.scaling != 1.0:
        keys.findings.conflict(
            f"softmax routing with both norm_topk_prob and routed_scaling_factor = {moe.scaling:g}: "
            "implementations disagree on whether normalised weights are scaled; here they are"
        )


def with_generation_config(report: TraitReport, generation_config: Mapping[str, Any]) -> TraitReport:
    """The report with the end tokens that generation_config.json adds: some models stop on those alone."""
    findings = Findings(list(report.notes), list(report.conflicts))
    keys = ConfigKeys(generation_config, findings)
    ids = _token_ids(keys, "eos_token_id", report.traits.vocab_size)
    added = [token_id for token_id in ids if token_id not in report.traits.eos_token_ids]
    if not added:
        return report
    findings.note(f"generation_config.json adds the end tokens {', '.join(map(str, added))}")
    traits = replace(report.traits, eos_token_ids=(*report.traits.eos_token_ids, *added))
    return TraitReport(traits, tuple(findings.notes), tuple(findings.conflicts), report.missing)
