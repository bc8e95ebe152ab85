"""Over every published config and four machines: names and nesting change no plan, and every rejection is right.

The machines: SM 12.0 over PCIe, SM 10.0 with NVLink, SM 9.0, and none with a GPU.
"""

from __future__ import annotations

import copy
import random
from functools import lru_cache
from typing import Any

import pytest

from pellucid.core import PellucidError, UnsupportedModelError
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import Decision, ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.selection.resolve import resolve
from pellucid.selection.slots import expert_formats, linear_classes
from pellucid.traits.config import read_traits
from pellucid.traits.misfit import PREFERENCE_KINDS
from pellucid.traits.model import ModelTraits
from tests.headers import CONFIGS, config_names, load_config, load_hf_quant, text_of
from tests.selection.documented_limits import DOCUMENTED, SOFTWARE, Place, expected_kinds
from tests.selection.models import machine

MACHINES = ("rtx-pro-6000x8-pcie", "b200x8-nvlink", "h200", "cpu")

WRAPPERS = ("text_config", "language_config", "llm_config")


def traits_of(config: dict[str, Any], name: str) -> ModelTraits:
    quantization = load_hf_quant(name) if (CONFIGS / f"{name}.hf_quant.json").exists() else None
    report = read_traits(config, None, quantization)
    report.require_supported()
    return report.traits


@lru_cache
def traits(name: str) -> ModelTraits:
    return traits_of(load_config(name), name)


@lru_cache
def plan_of(name: str, where: str) -> ExecutionPlan:
    return resolve(EngineArgs("model"), traits(name), machine(where))


def supported(name: str) -> bool:
    try:
        traits(name)
    except PellucidError:
        return False
    return True


SUPPORTED = [name for name in config_names() if supported(name)]


def test_the_zoo_has_models_of_both_kinds_of_attention_and_five_formats_of_experts():
    assert len(SUPPORTED) >= 15
    assert {traits(name).attention.kind for name in SUPPORTED} == {"mla", "gqa"}
    schemes = {traits(n).weights.routed_experts.scheme for n in SUPPORTED if traits(n).weights.routed_experts}
    assert schemes >= {"bf16", "fp8", "int4", "nvfp4"}


def renamed(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same model under other names, at every level."""
    config = copy.deepcopy(config)
    for level in (config, *(config[key] for key in WRAPPERS if key in config)):
        level["architectures"] = [f"Model{rng.randrange(10**6)}ForCausalLM"]
        level["model_type"] = f"family_{rng.randrange(10**6)}"
        for key in ("auto_map", "_name_or_path", "name_or_path"):
            level.pop(key, None)
    return config


def variants(config: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Renamed, without its wrapper, in each wrapper with a tower beside it, and with its keys in another order."""
    text = {**config, **text_of(config)}
    text.pop("text_config", None)
    keys = list(config)
    rng.shuffle(keys)
    wrapped = [{key: renamed(text, rng), "vision_config": {"hidden_size": 12}} for key in WRAPPERS]
    return [renamed(config, rng), text, *wrapped, {key: config[key] for key in keys}]


@pytest.mark.parametrize("name", config_names())
def test_renaming_or_nesting_a_config_never_changes_a_plan_nor_a_refusal(name):
    rng = random.Random(name)
    config = load_config(name)
    for variant in variants(config, rng):
        if name not in SUPPORTED:
            with pytest.raises(PellucidError) as refused:
                traits_of(variant, name)
            with pytest.raises(type(refused.value)) as original:
                traits_of(config, name)
            assert isinstance(refused.value, UnsupportedModelError)
            assert refused.value.trait == original.value.trait
            continue
        other = traits_of(variant, name)
        for where in MACHINES:
            assert resolve(EngineArgs("model"), other, machine(where)) == plan_of(name, where), (name, where)


def place(name: str, where: str, decision: Decision) -> Place:
    found = plan_of(name, where)
    op, _, rest = decision.op.partition(".")
    model = traits(name)
    return Place(
        model=model,
        hardware=machine(where),
        device=found.device,
        ranks=found.tensor_parallel_size,
        dtype=found.dtype,
        kv_dtype=found.kv_dtype,
        layout=found.kv_layout,
        page=found.page_size,
        phase=rest if op == "attention" else None,
        weights=expert_formats(model) if op == "moe" else tuple(linear_classes(model).get(rest, {}).values()),
    )


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("name", SUPPORTED)
def test_every_candidates_misfits_are_those_of_its_documented_limits(name, where):
    checked = 0
    for decision in plan_of(name, where).decisions:
        limits = DOCUMENTED.get(decision.op.partition(".")[0])
        if limits is None or decision.bucket is None:
            continue
        here = place(name, where, decision)
        found = {r.candidate: {m.kind for m in r.misfits} - PREFERENCE_KINDS - SOFTWARE for r in decision.rejected}
        if decision.value is not None:
            found[str(decision.value)] = set()
        assert found.keys() == limits.keys()
        for candidate, kinds in found.items():
            wanted = expected_kinds(limits[candidate], here)
            assert kinds == wanted, f"{decision.key}: {candidate}: {limits[candidate].source}"
            checked += 1
    assert checked > 100


def test_every_declared_backend_has_its_limits_written_down_with_a_source():
    declared = {(b.op, b.name) for b in discover() if b.op in DOCUMENTED}
    assert declared == {(op, name) for op, limits in DOCUMENTED.items() for name in limits}
    assert all(limits.source for found in DOCUMENTED.values() for limits in found.values())


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("name", SUPPORTED)
def test_every_rejection_of_the_zoo_has_a_reason_and_names_no_model(name, where):
    for decision in plan_of(name, where).decisions:
        for rejection in decision.rejected:
            assert rejection.misfits, (decision.key, rejection.candidate)
    text = str(plan_of(name, where).to_json()).lower()
    for word in ("forcausallm", "conditionalgeneration", "deepseek_v", "kimi_k", "qwen3_moe"):
        assert word not in text


# What is taken, by machine: PRO 6000, B200, H200, CPU. None where this version has nothing.
GOLDEN = {
    "Kimi-K2.5": {"attention.decode": ("triton_mla", "triton_mla", "triton_mla", "cpu_native"), "moe": (None,) * 4},
    "DeepSeek-V2-Lite": {
        "attention.decode": ("triton_mla", "triton_mla", "triton_mla", "cpu_native"),
        "moe": ("triton_fused", "triton_fused", "triton_fused", "cpu_native"),
    },
    "llama-3.1-8b-bf16": {"attention.decode": ("triton_gqa", "triton_gqa", "triton_gqa", "cpu_native")},
    "qwen3-30b-a3b-bf16": {
        "attention.decode": ("triton_gqa", "triton_gqa", "triton_gqa", "cpu_native"),
        "moe": ("triton_fused", "triton_fused", "triton_fused", "cpu_native"),
    },
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_runs_without_any_measurement_is_our_own_kernel_on_every_machine(name):
    for op, expected in GOLDEN[name].items():
        for where, wanted in zip(MACHINES, expected, strict=True):
            assert plan_of(name, where).decision(op, 1).value == wanted, (op, where)
