"""How weights are stored: from tensor headers, from quantization configs, and where the two disagree."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.core import CheckpointError
from pellucid.traits.config import read_traits, weight_format_of
from pellucid.traits.model import WeightFormat
from pellucid.traits.weights import ModuleFormats
from tests.headers import index_of, load_config, load_hf_quant, tiny_config, tiny_shapes

Shapes = dict[str, tuple[str, tuple[int, ...]]]

BF16 = WeightFormat("bf16")
INT4 = WeightFormat("int4", 32)
NVFP4 = WeightFormat("nvfp4", 16)
FP8 = WeightFormat("fp8", 128)
K25 = load_config("Kimi-K2.5")["text_config"]["quantization_config"]
LAYER = "language_model.model.layers.5"
DOWN = f"{LAYER}.mlp.experts.17.down_proj"
DOWN_TENSORS: Shapes = {
    f"{DOWN}.weight_packed": ("I32", (7168, 256)),
    f"{DOWN}.weight_scale": ("BF16", (7168, 64)),
    f"{DOWN}.weight_shape": ("I32", (2,)),
}
K25_MODULES = {
    f"{LAYER}.self_attn.q_a_proj": BF16,
    f"{LAYER}.self_attn.fused_qkv_a_proj_with_mqa": BF16,
    f"{LAYER}.self_attn.kv_b_proj": BF16,
    DOWN: INT4,
    f"{LAYER}.mlp.experts.17.gate_proj": INT4,
    f"{LAYER}.mlp.experts": INT4,
    f"{LAYER}.mlp.shared_experts.gate_up_proj": BF16,
    "language_model.model.layers.0.mlp.down_proj": BF16,
    f"{LAYER}.mlp.gate": BF16,
    "language_model.lm_head": BF16,
    "vision_tower.encoder.blocks.3.mlp.fc0": BF16,
    "mm_projector.linear_1": BF16,
}


@pytest.mark.parametrize("module", K25_MODULES)
@pytest.mark.parametrize("tensors", [DOWN_TENSORS, {}], ids=["one expert stored", "config alone"])
def test_only_the_routed_experts_of_kimi_k25_are_int4(module: str, tensors: Shapes) -> None:
    expected = K25_MODULES[module]
    assert weight_format_of(module, K25, index_of(tensors)) == expected
    assert weight_format_of(module.removeprefix("language_model."), K25, index_of(tensors)) == expected


@pytest.mark.parametrize(
    ("tensors", "module"),
    [
        ({f"{LAYER}.self_attn.o_proj.weight_packed": ("I32", (8, 1))}, f"{LAYER}.self_attn.o_proj"),
        ({f"{DOWN}.weight": ("BF16", (8, 8))}, DOWN),
        ({f"{DOWN}.weight": ("BF16", (8, 8))}, DOWN.removeprefix("language_model.")),
    ],
    ids=["ignored but packed", "quantized but plain", "without the prefix"],
)
def test_tensors_at_odds_with_the_config_are_an_error_that_names_both(tensors: Shapes, module: str) -> None:
    with pytest.raises(CheckpointError, match=r"is stored as .* but the quantization config says"):
        weight_format_of(module, K25, index_of(tensors))


def test_a_packed_tensor_decides_for_a_tower() -> None:
    name = "vision_tower.encoder.blocks.3.mlp.fc0"
    tensors: Shapes = {f"{name}.weight_packed": ("I32", (8, 4)), f"{name}.weight_scale": ("BF16", (8, 1))}
    assert weight_format_of(name, K25, index_of(tensors)).scheme == "int4"


def test_a_fused_module_with_parts_stored_differently_is_an_error_that_names_them() -> None:
    config = {**K25, "ignore": ["re:.*q_a_proj.*"]}
    with pytest.raises(CheckpointError, match=r"q_a_proj is bf16, kv_a_proj_with_mqa is int4 group 32 symmetric"):
        weight_format_of(f"{LAYER}.self_attn.fused_qkv_a_proj_with_mqa", config)
    formats = ModuleFormats(config)
    assert formats.of(f"{LAYER}.self_attn.q_a_proj") == BF16
    assert formats.of(f"{LAYER}.mlp.shared_experts.gate_up_proj") == INT4


STORED: list[tuple[str, Shapes, WeightFormat]] = [
    ("plain bf16", {"weight": ("BF16", (64, 64))}, BF16),
    ("plain fp32", {"weight": ("F32", (64, 64))}, WeightFormat("fp32")),
    ("fp8 block", {"weight": ("F8_E4M3", (576, 256)), "weight_scale_inv": ("F32", (5, 2))}, FP8),
    ("fp8 one block", {"weight": ("F8_E4M3", (1, 128)), "weight_scale_inv": ("F32", (1, 1))}, FP8),
    ("fp8 one scale", {"weight": ("F8_E4M3", (64, 64)), "weight_scale_inv": ("F32", ())}, WeightFormat(
        "fp8", scale_per="tensor")),
    ("fp8 per tensor", {"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("F32", ())}, WeightFormat(
        "fp8", scale_per="tensor")),
    ("fp8 per channel", {"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("F32", (64, 1))}, WeightFormat(
        "fp8", scale_per="channel")),
    ("packed int4", {"weight_packed": ("I32", (64, 16)), "weight_scale": ("BF16", (64, 4))}, INT4),
    ("packed int4 asymmetric", {"weight_packed": ("I32", (64, 16)), "weight_scale": ("BF16", (64, 4)),
     "weight_zero_point": ("I32", (8, 4))}, WeightFormat("int4", 32, symmetric=False)),
    ("modelopt nvfp4", {"weight": ("U8", (64, 64)), "weight_scale": ("F8_E4M3", (64, 8)),
     "weight_scale_2": ("F32", ()), "input_scale": ("F32", ())}, NVFP4),
    ("packed nvfp4", {"weight_packed": ("U8", (64, 64)), "weight_scale": ("F8_E4M3", (64, 8)),
     "weight_global_scale": ("F32", (1,))}, NVFP4),
    ("packed mxfp4", {"weight_packed": ("U8", (64, 64)), "weight_scale": ("U8", (64, 4))}, WeightFormat("mxfp4", 32)),
    ("gptq", {"qweight": ("I32", (8, 64)), "g_idx": ("I32", (64,))}, WeightFormat("gptq_int4")),
    ("awq", {"qweight": ("I32", (64, 8)), "qzeros": ("I32", (1, 8))}, WeightFormat("awq_int4")),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "expected"), [row[1:] for row in STORED], ids=[row[0] for row in STORED])
def test_a_header_shows_how_its_weight_is_stored(parts: Shapes, expected: WeightFormat) -> None:
    module = "model.layers.1.mlp.experts.0.up_proj"
    tensors = index_of({f"{module}.{suffix}": value for suffix, value in parts.items()})
    assert weight_format_of(module, None, tensors) == expected


CT_FP8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "experts": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
        "rest": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    },
    "ignore": ["lm_head"],
}
PER_TENSOR, PER_CHANNEL = WeightFormat("fp8", scale_per="tensor"), WeightFormat("fp8", scale_per="channel")
CONFIGURED: list[tuple[str, dict[str, Any], dict[str, WeightFormat]]] = [
    ("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]},
     {"self_attn.o_proj": FP8, "mlp.gate": BF16, "input_layernorm": BF16, "eh_proj": BF16}),
    ("fp8 list", {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.3.self_attn", "down_proj"]},
     {"self_attn.o_proj": BF16, "mlp.shared_experts.down_proj": BF16, "mlp.shared_experts.up_proj": PER_TENSOR}),
    ("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
     {"self_attn.o_proj": BF16, "mlp.experts.1.up_proj": WeightFormat("mxfp4", 32), "mlp.down_proj": BF16}),
    ("groups", CT_FP8, {"self_attn.o_proj": PER_CHANNEL, "mlp.experts.1.up_proj": NVFP4}),
    ("modelopt", {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*self_attn*"]}},
     {"self_attn.o_proj": BF16, "mlp.experts.1.up_proj": NVFP4}),
    ("modelopt parent", {"quant_algo": "FP8", "ignore": ["model.layers.3.mlp"]},
     {"self_attn.o_proj": PER_TENSOR, "mlp.experts.1.up_proj": BF16}),
    ("modelopt mixed", {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.layers.3.self_attn.o_proj": {"quant_algo": "FP8"},
        "model.layers.3.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}},
     {"self_attn.o_proj": PER_TENSOR, "mlp.down_proj": NVFP4, "mlp.up_proj": BF16}),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
     {"self_attn.o_proj": WeightFormat("gptq_int4", 128)}),
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
     {"self_attn.o_proj": WeightFormat("awq_int4", 64, symmetric=False)}),
    ("unknown", {"quant_method": "shrinkray"}, {"self_attn.o_proj": WeightFormat("shrinkray")}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), [row[1:] for row in CONFIGURED], ids=[row[0] for row in CONFIGURED])
def test_a_config_says_which_modules_are_quantized_and_how(
    config: dict[str, Any], expected: dict[str, WeightFormat]
) -> None:
    formats = ModuleFormats(config)
    assert formats.of("lm_head") == formats.of("language_model.lm_head")
    assert {module: formats.of(f"model.layers.3.{module}") for module in expected} == expected


def test_every_pattern_of_a_list_keeps_its_own_flags_and_groups() -> None:
    ignore = ["re:.*(o)_pr(?P<x>o)j", "re:(?i).*SELF_ATTN.*q_(?P<x>a)_.*", "re:.*k(v)_b_proj"]
    formats = ModuleFormats({**K25, "ignore": ignore})
    for module, expected in {"o_proj": BF16, "q_a_proj": BF16, "kv_b_proj": BF16, "q_b_proj": INT4}.items():
        assert formats.of(f"{LAYER}.self_attn.{module}") == expected


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_methods_that_never_quantize_the_head_leave_it_alone(method: str) -> None:
    assert weight_format_of("lm_head", {"quant_method": method, "bits": 4}) == BF16


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}},
        {**K25, "ignore": ["re:(unclosed"]},
        {**K25, "ignore": "lm_head"},
        {"quant_method": "fp8", "weight_block_size": [1, 128]},
        ["fp8"],
    ],
)
def test_a_malformed_quantization_config_is_refused(config: Any) -> None:
    with pytest.raises(CheckpointError):
        weight_format_of("lm_head", config)


def test_mixed_formats_within_a_class_are_listed() -> None:
    weights = read_traits(load_config("DeepSeek-V3.1-NVFP4"), None, load_hf_quant("DeepSeek-V3.1-NVFP4")).traits.weights
    assert (weights.attention, weights.routed_experts, weights.dense_mlp) == (BF16, NVFP4, NVFP4)
    assert weights.exceptions == (("self_attn.o_proj", NVFP4),)
    assert weights.lm_head == BF16


@pytest.mark.parametrize("name", ["Kimi-K2.6-NVFP4", "Kimi-K2.7-Code-NVFP4"])
def test_two_copies_of_a_quantization_config_are_compared(name: str) -> None:
    config, copy = load_config(name), load_hf_quant(name)
    assert read_traits(config, None, copy).conflicts == ()
    copy["quantization"]["exclude_modules"].pop()
    assert any("hf_quant_config.json differ" in line for line in read_traits(config, None, copy).conflicts)


def quantized_shapes(name: str, kinds: tuple[str, ...]) -> Shapes:
    """A tiny model whose modules of `kinds` are stored as packed int4 in groups of 8."""
    shapes: Shapes = {}
    for tensor, (dtype, shape) in tiny_shapes(name).items():
        if len(shape) == 2 and any(kind in tensor for kind in kinds):
            module, (rows, columns) = tensor.removesuffix(".weight"), shape
            shapes[f"{module}.weight_packed"] = ("I32", (rows, columns // 8))
            shapes[f"{module}.weight_scale"] = ("BF16", (rows, columns // 8))
            shapes[f"{module}.weight_shape"] = ("I32", (2,))
        else:
            shapes[tensor] = (dtype, shape)
    return shapes


def int4_config(name: str) -> dict[str, Any]:
    config = tiny_config(name)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}
    target = config.get("text_config") or config
    target["quantization_config"] = {**K25, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    return config


@pytest.mark.parametrize("name", ["kimi", "kimi25"])
def test_a_published_ignore_list_agrees_with_a_checkpoint_of_its_kind(name: str) -> None:
    config = int4_config(name)
    report = read_traits(config, index_of(quantized_shapes(name, (".experts.",))))
    assert report.conflicts == ()
    weights = report.traits.weights
    assert (weights.routed_experts, str(weights.shared_experts)) == (WeightFormat("int4", 8), "fp32")
    assert weights == read_traits(config).traits.weights


def test_tensors_are_followed_where_the_ignore_list_is_wrong() -> None:
    config = int4_config("kimi")
    report = read_traits(config, index_of(quantized_shapes("kimi", (".experts.", "o_proj"))))
    assert report.traits.weights.exceptions == (("self_attn.o_proj", WeightFormat("int4", 8)),)
    assert [line for line in report.conflicts if line.startswith("self_attn.o_proj is stored as int4 group 8")]
    report = read_traits(config, index_of(tiny_shapes("kimi")))
    assert str(report.traits.weights.routed_experts) == "fp32"
    assert any(line.startswith("mlp.experts.up_proj is stored as fp32") for line in report.conflicts)


def test_ignore_patterns_that_match_no_tensor_are_reported() -> None:
    config = int4_config("kimi")
    config["quantization_config"]["ignore"] = [*K25["ignore"], "re:.*vision_tower.*", "model.layers.0.self_attn.oproj"]
    conflicts = read_traits(config, index_of(quantized_shapes("kimi", (".experts.",)))).conflicts
    assert [line for line in conflicts if "2 of 6 entries" in line and "vision_tower" in line]
