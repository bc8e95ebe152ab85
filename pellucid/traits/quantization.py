"""What a checkpoint's quantization config says about each module. Used by `traits.weights`.

Reads `quantization_config` of compressed-tensors, ModelOpt, fp8, mxfp4, GPTQ and AWQ, and ModelOpt's separate
`hf_quant_config.json`. What the tensors say comes first (`traits.weights`); this is for parameters that headers do
not show, for models without tensors, and for the cross-check.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pellucid.core import CheckpointError
from pellucid.traits.keys import REMEDY, checked_integer
from pellucid.traits.model import WeightFormat
from pellucid.traits.tensors import canonical_name, is_sampled, layer_of, tower_of

ModuleClass = Literal[
    "attention", "dense_mlp", "routed_experts", "shared_experts", "router", "lm_head", "embedding", "norm", "tower",
    "other",
]  # fmt: skip
Syntax = Literal["compressed-tensors", "modelopt", "hf"]

LINEAR_CLASSES: frozenset[ModuleClass] = frozenset(
    {"attention", "dense_mlp", "routed_experts", "shared_experts", "lm_head"}
)

_QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj", "qkv_proj")
_LATENT = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "k_b_proj",
    "v_b_proj",
    "fused_qkv_a_proj_with_mqa",
)
_ATTENTION_LINEAR = frozenset(f"self_attn.{name}" for name in (*_QUERY_KEY_VALUE, *_LATENT, "o_proj"))
_DENSE_LINEAR = frozenset(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj"))
_SHARED = ("mlp.shared_experts.", "mlp.shared_expert.")
_ROUTERS = ("mlp.gate", "mlp.router", "mlp.shared_expert_gate")
_PLAIN_NAME = re.compile(r"[\w.\-]+")
_FP8_KEPT = ("lm_head", "eh_proj", "shared_head.head", "indexer.weights_proj")

_MODELOPT_ALGORITHMS = {
    "NVFP4": WeightFormat("nvfp4", 16),
    "NVFP4_AWQ": WeightFormat("nvfp4_awq", 16),
    "MXFP4": WeightFormat("mxfp4", 32),
    "FP8": WeightFormat("fp8", scale_per="tensor"),
    "FP8_PB_WO": WeightFormat("fp8", 128),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("fp8", scale_per="channel"),
    "W4A16_AWQ": WeightFormat("modelopt_int4_awq", 128),
}


def module_class(module: str) -> ModuleClass:
    """Which class of weights a module belongs to, by its place in the model; wrapper prefixes do not matter."""
    if tower_of(module) is not None:
        return "tower"
    name = canonical_name(module)
    if name == "lm_head":
        return "lm_head"
    if name.endswith("embed_tokens"):
        return "embedding"
    place = layer_of(name)
    inner = name if place is None else place[1]
    if inner in _ATTENTION_LINEAR:
        return "attention"
    if inner in _DENSE_LINEAR:
        return "dense_mlp"
    if inner == "mlp.experts" or inner.startswith("mlp.experts."):
        return "routed_experts"
    if inner.startswith(_SHARED):
        return "shared_experts"
    if inner in _ROUTERS:
        return "router"
    return "norm" if inner.endswith("norm") else "other"


class NamePatterns:
    """An ignore or target list. A module matches whether or not it, or the pattern, has the wrapper prefix.

    compressed-tensors: exact names, or `re:` and a regular expression anchored at the start. ModelOpt: names, which
    cover what is inside them, and shell wildcards. Others: names, beginnings or ends of names at a dot, and regular
    expressions.
    """

    def __init__(self, patterns: Iterable[Any], syntax: Syntax) -> None:
        self.patterns = tuple(str(pattern) for pattern in patterns)
        self.syntax = syntax
        self._names = frozenset(canonical_name(pattern) for pattern in self.patterns if self._is_name(pattern))
        self._wild = {pattern: self._compiled(pattern) for pattern in self.patterns if not self._is_name(pattern)}
        self._tried = tuple(self._wild.values())
        if syntax == "modelopt" and self._wild:  # Hundreds of wildcards, safe to join; a user's flags would not be.
            self._tried = (re.compile("|".join(expression.pattern for expression in self._tried)),)

    def matches(self, module: str) -> bool:
        if not self._names.isdisjoint(self._parts(module)):
            return True
        return any(expression.match(name) for expression in self._tried for name in _spellings(module))

    def unmatched(self, modules: Collection[str]) -> tuple[str, ...]:
        """The patterns that match none of `modules`. Of each layer's experts, wildcards see the first."""
        sample = [module for module in modules if is_sampled(module)]
        parts = {part for module in sample for part in self._parts(module)}
        names = [name for module in sample for name in _spellings(module)]
        return tuple(
            pattern
            for pattern in self.patterns
            if (
                not any(self._wild[pattern].match(name) for name in names)
                if pattern in self._wild
                else canonical_name(pattern) not in parts and canonical_name(pattern) not in modules
            )
        )

    def _parts(self, module: str) -> list[str]:
        """The names by which a plain entry of this list's syntax would mean `module`."""
        name = canonical_name(module)
        if self.syntax == "compressed-tensors":
            return [name]
        words = name.split(".")
        beginnings = [".".join(words[:end]) for end in range(1, len(words) + 1)]
        ends = [".".join(words[start:]) for start in range(1, len(words))]
        return beginnings if self.syntax == "modelopt" else beginnings + ends

    def _is_name(self, pattern: str) -> bool:
        if self.syntax == "compressed-tensors":
            return not pattern.startswith("re:")
        return _PLAIN_NAME.fullmatch(pattern) is not None

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        if self.syntax == "modelopt":
            return re.compile(fnmatch.translate(pattern))
        expression = pattern.removeprefix("re:")
        if self.syntax == "hf":
            expression = rf"(?:{expression})(?:(?<=\.)|(?=\.|$))"
        try:
            return re.compile(expression)
        except re.error as error:
            line = f"quantization config has an invalid pattern {pattern!r} ({error}): {REMEDY}"
            raise CheckpointError(line) from None


def _spellings(module: str) -> tuple[str, ...]:
    """The names that one module may go by in a pattern: with and without the wrapper prefix."""
    canonical = canonical_name(module)
    bare = canonical.removeprefix("model.")
    names = (module, canonical, f"language_model.{canonical}", f"language_model.{bare}", f"model.language_model.{bare}")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class QuantizationRules:
    """Which modules a config quantizes, and how. `format_of` returns None for a module left as it was.

    `ignore` is the config's own list, `kept` what its method leaves alone without saying so. `groups` are tried in
    order; a group without targets takes every linear module. `named` gives single modules their own format (ModelOpt's
    mixed precision), under canonical names.
    """

    method: str
    groups: tuple[tuple[NamePatterns | None, WeightFormat], ...]
    ignore: NamePatterns
    kept: NamePatterns | None = None
    only: frozenset[ModuleClass] = LINEAR_CLASSES | {"other"}
    named: Mapping[str, WeightFormat] = field(default_factory=dict)

    def format_of(self, module: str) -> WeightFormat | None:
        if canonical_name(module) in self.named:
            return self.named[canonical_name(module)]
        if module_class(module) not in self.only or self.ignore.matches(module):
            return None
        if self.kept is not None and self.kept.matches(module):
            return None
        for targets, stored in self.groups:
            if targets is None or targets.matches(module):
                return stored
        return None

    def parameters(self, *schemes: str) -> WeightFormat | None:
        """The first group's format among `schemes`: bits and group size that a tensor header may not show."""
        formats = [stored for _, stored in self.groups] + list(self.named.values())
        return next((stored for stored in formats if stored.scheme in schemes), None)


def parse_quantization(config: Mapping[str, Any] | None) -> QuantizationRules | None:
    """The rules in a `quantization_config` or in the content of `hf_quant_config.json`; None when there are none.

    Raises:
        CheckpointError: the config is malformed.
    """
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise CheckpointError(f"the quantization config is {config!r}, not a JSON object: {REMEDY}")
    if isinstance(config.get("quantization"), Mapping):
        return _modelopt(config["quantization"])
    method = str(config.get("quant_method") or ("modelopt" if config.get("quant_algo") else "compressed-tensors"))
    if method.startswith("modelopt"):
        return _modelopt(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    ignore = NamePatterns([*_listed(config, "modules_to_not_convert"), *_listed(config, "ignored_layers")], "hf")
    if method == "fp8":
        return QuantizationRules(method, ((None, _block_fp8(config)),), ignore, NamePatterns(_FP8_KEPT, "hf"))
    if method == "mxfp4":
        experts: frozenset[ModuleClass] = frozenset({"routed_experts"})
        return QuantizationRules(method, ((None, WeightFormat("mxfp4", 32)),), ignore, only=experts)
    kept = None if config.get("lm_head") else NamePatterns(["lm_head"], "hf")
    return QuantizationRules(method, ((None, _integer_format(method, config)),), ignore, kept)


def _block_fp8(config: Mapping[str, Any]) -> WeightFormat:
    block = config.get("weight_block_size")
    if block is None:
        return WeightFormat("fp8", scale_per="tensor")
    if not isinstance(block, list) or len(block) != 2 or block[0] != block[1]:
        raise CheckpointError(f"weight_block_size is {block!r}: only square blocks are known")
    return WeightFormat("fp8", checked_integer(block[0], "weight_block_size", low=1))


def _integer_format(method: str, config: Mapping[str, Any]) -> WeightFormat:
    bits = config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size"))
    symmetric = config.get("sym", not config.get("zero_point", False))
    scheme = f"{method}_int{bits}" if bits else method
    size = checked_integer(group, "group_size", low=1) if isinstance(group, int) and group > 0 else None
    return WeightFormat(scheme, size, bool(symmetric))


def _modelopt(config: Mapping[str, Any]) -> QuantizationRules | None:
    algorithm = config.get("quant_algo")
    ignore = NamePatterns([*_listed(config, "exclude_modules"), *_listed(config, "ignore")], "modelopt")
    layers = config.get("quantized_layers")
    if isinstance(layers, Mapping):
        named = {
            canonical_name(name): _modelopt_format(entry)
            for name, entry in layers.items()
            if isinstance(entry, Mapping)
        }
        return QuantizationRules("modelopt", (), ignore, named=named)
    if algorithm is None:
        return None
    return QuantizationRules("modelopt", ((None, _modelopt_format(config)),), ignore)


def _modelopt_format(entry: Mapping[str, Any]) -> WeightFormat:
    algorithm, group = str(entry.get("quant_algo")), entry.get("group_size")
    known = _MODELOPT_ALGORITHMS.get(algorithm.upper(), WeightFormat(f"modelopt_{algorithm.lower()}"))
    if group is None or known.scale_per is not None:
        return known
    return WeightFormat(known.scheme, checked_integer(group, "group_size", low=1), known.symmetric)


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationRules:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"quantization_config has no config_groups: {REMEDY}")
    ignore = NamePatterns(_listed(config, "ignore"), "compressed-tensors")
    parsed = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"quantization_config group '{name}' says nothing about weights: {REMEDY}")
        targets = _listed(group, "targets")
        patterns = None if not targets or "Linear" in targets else NamePatterns(targets, "compressed-tensors")
        parsed.append((patterns, _compressed_format(weights)))
    return QuantizationRules("compressed-tensors", tuple(parsed), ignore)


def _compressed_format(weights: Mapping[str, Any]) -> WeightFormat:
    bits = checked_integer(weights.get("num_bits", 8), "num_bits", low=1)
    strategy, group = weights.get("strategy"), weights.get("group_size")
    symmetric = weights.get("symmetric", True) is not False
    if weights.get("type") == "float":
        if bits == 4:
            size = checked_integer(group if group else 16, "group_size", low=1)
            return WeightFormat("mxfp4" if size == 32 else "nvfp4", size)
        if strategy == "block":
            return _block_fp8({"weight_block_size": weights.get("block_structure")})
        if strategy == "group":
            return WeightFormat("fp8_rowwise", checked_integer(group, "group_size", low=1))
        return WeightFormat("fp8", scale_per="channel" if strategy == "channel" else "tensor")
    if strategy in ("group", "tensor_group") or (strategy is None and group):
        return WeightFormat(f"int{bits}", checked_integer(group, "group_size", low=1), symmetric)
    return WeightFormat(f"int{bits}", None, symmetric, "tensor" if strategy == "tensor" else "channel")


def _listed(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise CheckpointError(f"quantization config key '{key}' is {value!r}, not a list: {REMEDY}")
    return value
