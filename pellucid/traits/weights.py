"""The storage format of weights: decided by the tensors, cross-checked with the config. Used by `traits.config`
for whole models and by the loader, through `weight_format_of`, for single modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pellucid.core import CheckpointError
from pellucid.traits.findings import Findings
from pellucid.traits.keys import REMEDY
from pellucid.traits.model import GQATraits, MLATraits, MoETraits, WeightFormat, WeightTraits
from pellucid.traits.quantization import (
    LINEAR_CLASSES,
    ModuleClass,
    QuantizationRules,
    module_class,
    parse_quantization,
)
from pellucid.traits.tensors import TensorIndex, TensorInfo, TextTensors, canonical_name, is_sampled, layer_of

SCHEMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Scheme of an unquantized weight, by the config's dtype."""

FUSED_PARTS: Mapping[str, tuple[str, ...]] = {
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "experts": ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"),
}
"""Modules that the engine may join, and what they are joined from."""

_PLAIN_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")


def weight_format_of(
    module: str,
    quantization_config: Mapping[str, Any] | None = None,
    tensors: TensorIndex | None = None,
    *,
    dtype: str = "bfloat16",
) -> WeightFormat:
    """How one `module` is stored; for many modules of one checkpoint, keep a `ModuleFormats`. Raises as it does."""
    return ModuleFormats(quantization_config, tensors, dtype=dtype).of(module)


class ModuleFormats:
    """How each module of a checkpoint is stored, whether or not its name has the wrapper prefix.

    The tensors of the module decide. A module of the language model that has none is read from
    `quantization_config` (or the content of hf_quant_config.json); routers, norms and embeddings are never
    quantized by a config, and a vision or audio tower only by tensors that show it. A fused module has the format of
    its parts.
    """

    def __init__(
        self,
        quantization_config: Mapping[str, Any] | None = None,
        tensors: TensorIndex | None = None,
        *,
        dtype: str = "bfloat16",
    ) -> None:
        self._rules = parse_quantization(quantization_config)
        view = TextTensors.of(tensors or {})
        self._modules = {**view.tower_modules, **view.modules}
        self._plain = WeightFormat(SCHEMES.get(dtype, dtype))

    def of(self, module: str) -> WeightFormat:
        """The module's format.

        Raises:
            CheckpointError: the tensors and the config disagree about a module of the language model, or the parts
                of a fused module are stored in different formats.
        """
        parts = self._modules.get(canonical_name(module))
        stored = stored_format(parts, self._rules) if parts else None
        configured = self._rules.format_of(module) if self._rules else None
        if stored is None:
            joined = self._joined(module)
            return joined if joined is not None else configured or self._plain
        if self._rules and module_class(module) in LINEAR_CLASSES and not _agree(stored, configured):
            said = configured or "not quantized"
            raise CheckpointError(f"{module} is stored as {stored} but the quantization config says {said}: {REMEDY}")
        return stored

    def _joined(self, module: str) -> WeightFormat | None:
        head, dot, last = module.rpartition(".")
        if last not in FUSED_PARTS:
            return None
        found = {part: self.of(head + dot + part) for part in FUSED_PARTS[last]}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{part} is {stored}" for part, stored in found.items())
            raise CheckpointError(
                f"{module} cannot be fused, its parts are stored differently ({listed}): load them apart"
            )
        return next(iter(found.values()))


def read_weight_traits(
    rules: QuantizationRules | None,
    tensors: TextTensors | None,
    *,
    attention: MLATraits | GQATraits,
    moe: MoETraits | None,
    moe_layers: tuple[bool, ...],
    tied_embeddings: bool,
    dtype: str,
    findings: Findings,
) -> WeightTraits:
    """The format of each class of weights; disagreements of tensors and config go to `findings.conflicts`."""
    plain = WeightFormat(SCHEMES.get(dtype, dtype))
    if tensors is None:
        modules: Iterable[str] = _expected_modules(attention, moe, moe_layers)
        formats = {module: (rules.format_of(module) if rules else None) or plain for module in modules}
    else:
        formats = {
            module: stored
            for module, parts in tensors.modules.items()
            if is_sampled(module)
            and _in_model(module, len(moe_layers))
            and (stored := stored_format(parts, rules)) is not None
        }
        if rules is not None:
            _cross_check(rules, formats, plain, tensors, findings)
    counts: dict[ModuleClass, Counter[WeightFormat]] = {}
    for module, stored in formats.items():
        counts.setdefault(module_class(module), Counter())[stored] += 1
    usual = {kind: _most_frequent(counter) for kind, counter in counts.items()}
    embedding = usual.get("embedding", plain)
    exceptions = {
        (_kind_of_module(module), stored)
        for module, stored in formats.items()
        if (kind := module_class(module)) in LINEAR_CLASSES and stored != usual[kind]
    }
    return WeightTraits(
        attention=usual.get("attention", plain),
        dense_mlp=usual.get("dense_mlp", plain),
        routed_experts=None if moe is None else usual.get("routed_experts", plain),
        shared_experts=None if moe is None or not moe.num_shared_experts else usual.get("shared_experts", plain),
        lm_head=embedding if tied_embeddings else usual.get("lm_head", plain),
        embedding=embedding,
        source="config" if tensors is None else "tensors",
        exceptions=tuple(sorted(exceptions, key=str)),
    )


def stored_format(parts: Mapping[str, TensorInfo], rules: QuantizationRules | None = None) -> WeightFormat | None:
    """The format that the tensors of one module show; None when they hold no weight.

    What a header does not show (bits of a packed word, the block of a ragged scale) comes from `rules`.
    """
    if "weight_packed" in parts:
        return _packed_format(parts, rules)
    if "qweight" in parts:
        return _integer_layout(parts, rules)
    for name in ("weight_blocks", "gate_up_proj_blocks", "down_proj_blocks"):
        if name in parts:
            return WeightFormat("mxfp4", 32)
    weight = parts.get("weight")
    if weight is None:
        return None
    if weight.dtype in _PLAIN_DTYPES:
        return WeightFormat(_PLAIN_DTYPES[weight.dtype])
    if weight.dtype in _FP8_DTYPES:
        return _fp8_format(weight, parts, rules)
    if weight.dtype == "U8" and "weight_scale" in parts:
        group = _group_size(2 * weight.shape[-1], parts["weight_scale"])
        return WeightFormat("nvfp4" if parts["weight_scale"].dtype in _FP8_DTYPES else "mxfp4", group)
    if weight.dtype == "I8":
        return WeightFormat("int8", scale_per="tensor" if _is_scalar(parts.get("weight_scale")) else "channel")
    scheme = weight.dtype.lower()
    return WeightFormat(f"gguf_{scheme}" if scheme in ("mxfp4", "nvfp4") else scheme)


def _packed_format(parts: Mapping[str, TensorInfo], rules: QuantizationRules | None) -> WeightFormat:
    packed, scale = parts["weight_packed"], parts.get("weight_scale")
    if packed.dtype == "U8":
        group = _group_size(2 * packed.shape[-1], scale)
        return WeightFormat("mxfp4" if scale is not None and scale.dtype in ("U8", "F8_E8M0") else "nvfp4", group)
    declared = rules.parameters("int4", "int8", "int2", "int3") if rules else None
    scheme = declared.scheme if declared else "int4"
    group = declared.group_size if declared else _group_size(8 * packed.shape[-1], scale)
    symmetric = "weight_zero_point" not in parts
    return WeightFormat(scheme, group, symmetric, None if group else "channel")


def _integer_layout(parts: Mapping[str, TensorInfo], rules: QuantizationRules | None) -> WeightFormat:
    """GPTQ and AWQ share tensor names; the config's method tells them apart, else GPTQ's `g_idx`."""
    if rules is not None and rules.groups:
        return rules.groups[0][1]
    return WeightFormat("gptq_int4" if "g_idx" in parts else "awq_int4")


def _fp8_format(weight: TensorInfo, parts: Mapping[str, TensorInfo], rules: QuantizationRules | None) -> WeightFormat:
    """`weight_scale_inv` [row blocks, column blocks] is DeepSeek's; one value or a column come as `weight_scale`."""
    blocks, scale = parts.get("weight_scale_inv"), parts.get("weight_scale")
    if blocks is None or len(blocks.shape) != 2:
        if _is_scalar(scale):
            return WeightFormat("fp8", scale_per="tensor")
        assert scale is not None
        if scale.shape[0] == weight.shape[0] and scale.shape[1:] in ((), (1,)):
            return WeightFormat("fp8", scale_per="channel")
    declared = rules.parameters("fp8") if rules else None
    block = declared.group_size if declared and declared.group_size else 128
    return WeightFormat("fp8", block)


def _group_size(columns: int, scale: TensorInfo | None) -> int | None:
    if scale is None or not scale.shape or not scale.shape[-1] or scale.shape[-1] == 1:
        return None
    return columns // scale.shape[-1]


def _is_scalar(scale: TensorInfo | None) -> bool:
    return scale is None or scale.shape in ((), (1,), (1, 1))


def _agree(stored: WeightFormat, configured: WeightFormat | None) -> bool:
    if configured is None:
        return stored.scheme in SCHEMES.values()
    same_group = None in (stored.group_size, configured.group_size) or stored.group_size == configured.group_size
    return stored.scheme == configured.scheme and same_group


def _cross_check(
    rules: QuantizationRules,
    formats: Mapping[str, WeightFormat],
    plain: WeightFormat,
    tensors: TextTensors,
    findings: Findings,
) -> None:
    """Report, one line per kind of module, where the config and the tensors differ; the tensors are followed."""
    differing: dict[tuple[str, str, str], list[str]] = {}
    for module, stored in formats.items():
        if module_class(module) not in LINEAR_CLASSES:
            continue
        configured = rules.format_of(module)
        if not _agree(stored, configured):
            key = (_kind_of_module(module), str(stored), str(configured or plain))
            differing.setdefault(key, []).append(module)
    for (kind, stored_as, configured_as), examples in differing.items():
        findings.conflict(
            f"{kind} is stored as {stored_as} but the quantization config says {configured_as} "
            f"({len(examples)} seen, first {examples[0]}): the tensors are followed"
        )
    biases = {f"{module}.bias": parts for module, parts in tensors.modules.items() if "bias" in parts}
    idle = rules.ignore.unmatched({**tensors.modules, **tensors.tower_modules, **biases})
    if idle:
        findings.conflict(
            f"{len(idle)} of {len(rules.ignore.patterns)} entries of the quantization ignore list match no tensor, "
            f"first {idle[0]!r}"
        )


def _in_model(module: str, num_layers: int) -> bool:
    place = layer_of(module)
    return place is None or place[0] < num_layers


def _kind_of_module(module: str) -> str:
    """The module's name without layer and expert numbers, for instance `mlp.experts.gate_proj`."""
    place = layer_of(canonical_name(module))
    name = module if place is None else place[1]
    return ".".join(word for word in name.split(".") if not word.isdigit())


def _most_frequent(counter: Counter[WeightFormat]) -> WeightFormat:
    return min(counter, key=lambda stored: (-counter[stored], str(stored)))


def _expected_modules(
    attention: MLATraits | GQATraits, moe: MoETraits | None, moe_layers: tuple[bool, ...]
) -> Iterable[str]:
    """Names of the linear modules that a model of these traits stores; of each layer's experts, the first."""
    if isinstance(attention, MLATraits):
        query = ("q_proj",) if attention.q_lora_rank is None else ("q_a_proj", "q_b_proj")
        names = (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    else:
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    yield "lm_head"
    yield "model.embed_tokens"
    for layer, is_moe in enumerate(moe_layers):
        prefix = f"model.layers.{layer}"
        yield from (f"{prefix}.self_attn.{name}" for name in names)
        if not is_moe:
            yield from (f"{prefix}.mlp.{name}" for name in mlp)
            continue
        yield from (f"{prefix}.mlp.experts.0.{name}" for name in mlp)
        if moe is not None and moe.num_shared_experts:
            yield from (f"{prefix}.mlp.shared_experts.{name}" for name in mlp)
