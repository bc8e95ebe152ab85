"""Configs that are incomplete, nonsensical or at odds with themselves: refused or reported by the key's name."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from pellucid.core import CheckpointError, PellucidError
from pellucid.traits.config import read_traits
from tests.headers import config_names, load_config

REQUIRED = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "rms_norm_eps",
    "max_position_embeddings", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts_per_tok",
]  # fmt: skip


NONSENSE = ["absent", None, "64", -1, True, [], 2.5, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize(
    ("key", "nonsense"),
    [(key, value) for key in REQUIRED for value in NONSENSE if not (key == "rms_norm_eps" and value == 2.5)],
)
def test_a_missing_or_nonsensical_key_is_refused_by_name(key: str, nonsense: Any) -> None:
    config = load_config("DeepSeek-V3")
    if nonsense == "absent":
        del config[key]
    else:
        config[key] = nonsense
    with pytest.raises(CheckpointError, match=key) as raised:
        read_traits(config)
    assert "config.json" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("llama-3.1-8b-bf16", {"num_attention_heads": 33}, "num_key_value_heads"),
        ("llama-3.1-8b-bf16", {"num_attention_heads": 33, "num_key_value_heads": 33}, "head_dim"),
        ("DeepSeek-V3", {"n_group": 7}, "n_group"),
        ("DeepSeek-V3", {"topk_group": 9}, "topk_group"),
        ("DeepSeek-V3", {"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ("DeepSeek-V3", {"qk_rope_head_dim": 63}, "odd"),
        ("DeepSeek-V3", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("DeepSeek-V3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("DeepSeek-V3", {"mlp_layer_types": ["wet"] * 61}, "wet"),
        ("DeepSeek-V3", {"torch_dtype": "float13"}, "float13"),
        ("DeepSeek-V3", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("DeepSeek-V3", {"text_config": [1]}, "text_config"),
        ("DeepSeek-V3", {"kv_lora_rank": -512}, "kv_lora_rank"),
        ("DeepSeek-V3", {"rope_scaling": {"type": "yarn", "factor": "40"}}, "factor"),
        ("DeepSeek-V3", {"rope_scaling": {"type": 4}}, "rope_type"),
        ("DeepSeek-V3", {"rope_scaling": "yarn"}, "rope_scaling"),
        ("llama-3.1-8b-bf16", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "freq_factor"),
        ("DeepSeek-V3", {"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
    ],
)
def test_values_that_cannot_be_together_are_refused_by_name(name: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_traits(load_config(name) | change)


ANYTHING: list[Any] = [
    None, True, 0, -1, 2, 2.5, float("nan"), 10**400, "x", [], [1], ["a", {}], [None], {}, {"a": 1}, {"type": "yarn"},
    {"rope_type": "llama3", "factor": 0}, {"quant_method": "fp8", "modules_to_not_convert": [3, "a*("]},
    {"quant_algo": 4}, {"quant_method": 7}, {"config_groups": {"a": {"weights": {"num_bits": "4"}}}},
    {"quantization": {"quantized_layers": {"a": {}}}},
]  # fmt: skip
SOME_KEYS = ["layer_types", "mlp_layer_types", "sliding_window", "moe_layer_freq", "rope_parameters", "text_config"]


def places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every key of a config with the object that holds it, and some keys that it might have."""
    inner = [place for value in config.values() if isinstance(value, dict) for place in places(value)]
    return [(config, key) for key in [*config, *SOME_KEYS]] + inner


@pytest.mark.parametrize("seed", range(300))
def test_no_value_of_any_key_raises_anything_but_a_line_for_the_user(seed: int) -> None:
    rng = random.Random(seed)
    config = load_config(rng.choice(config_names()))
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(places(config))
        holder[key] = copy.deepcopy(rng.choice(ANYTHING))
    try:
        report = read_traits(config)
    except PellucidError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert hash(report.traits) == hash(read_traits(config).traits)


@pytest.mark.parametrize("config", [None, [], "text", 3])
def test_a_config_that_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(CheckpointError, match="JSON object"):
        read_traits(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": 255}, "n_routed_experts = 256 but num_experts = 255"),
        ({"rope_parameters": {"rope_theta": 50000.0, "rope_type": "yarn"}}, "rope_theta"),
        ({"dtype": "float16"}, "dtype = 'float16' but torch_dtype = 'bfloat16'"),
        ({"max_position_embeddings": 163841}, "max_position_embeddings = 163841"),
        ({"hidden_size": 7169}, "hidden_size = 7169 is odd"),
        ({"eos_token_id": 129281}, "outside the vocabulary"),
        ({"qk_head_dim": 191}, "qk_head_dim = 191"),
        ({"text_config": load_config("DeepSeek-V3") | {"eos_token_id": 3}}, "eos_token_id differs"),
    ],
)
def test_a_config_at_odds_with_itself_is_reported(change: dict[str, Any], said: str) -> None:
    assert said in " / ".join(read_traits(load_config("DeepSeek-V3") | change).conflicts)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2.5", "Kimi-K2-Instruct", "DeepSeek-V2", "qwen3-0.6b"])
def test_clean_published_configs_have_no_conflicts(name: str) -> None:
    assert read_traits(load_config(name)).conflicts == ()
