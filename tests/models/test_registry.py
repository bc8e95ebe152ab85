"""GGUF architectures: names and keys translate so that the traits are those of the original checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pellucid.core import CheckpointError
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.gguf_rope import rope_scaling_of
from pellucid.models.registry import GGUF_ARCHITECTURES, hf_tensor_name
from pellucid.traits.config import read_traits
from pellucid.traits.model import ModelTraits
from tests import checkpoints
from tests.gguf_files import metadata_of, stacked_experts, write_gguf, write_tiny_gguf
from tests.headers import index_of, tiny_config, tiny_shapes

CONVERTED = [
    ("llama", "llama2"),
    ("llama", "llama-linear"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("qwen3", "qwen3-yarn"),
    ("deepseek2", "v2lite"),
    ("deepseek2", "v2"),
    ("deepseek2", "v3"),
    ("deepseek2", "kimi"),
    ("deepseek2", "moonlight"),
]


def original(name: str) -> ModelTraits:
    return read_traits(tiny_config(name), index_of(tiny_shapes(name))).traits


def comparable(traits: ModelTraits) -> ModelTraits:
    """Traits without what GGUF does not carry: the training dtype, and the pairing that its converter changes."""
    attention = replace(traits.attention, rope=replace(traits.attention.rope, interleaved=True))
    return replace(traits, dtype="any", attention=attention)


@pytest.mark.parametrize(("architecture", "name"), CONVERTED)
def test_a_converted_model_has_the_traits_of_its_original(tmp_path: Path, architecture: str, name: str) -> None:
    checkpoint = Checkpoint.open(write_tiny_gguf(tmp_path / "model.gguf", architecture, name))
    report = checkpoint.report()
    assert checkpoint.kind == "gguf"
    assert (report.conflicts, report.missing) == ((), ())
    assert comparable(report.traits) == comparable(original(name))
    assert report.traits.attention.rope.interleaved == (architecture in ("llama", "deepseek2"))
    assert report.traits.attention.softmax_scale == pytest.approx(original(name).attention.softmax_scale, abs=1e-7)
    shapes = {key: values.shape for key, values in stacked_experts(checkpoints.tensors_of(name)).items()}
    assert {key: info.shape for key, info in checkpoint.tensors.items()} == shapes


def test_a_converted_moe_of_qwen_keeps_its_router(tmp_path: Path) -> None:
    config = tiny_config("qwen3-moe") | {"mlp_only_layers": []}
    tensors = stacked_experts(checkpoints.tensors_of("qwen3-moe"))
    for projection in ("gate_proj", "up_proj", "down_proj"):
        del tensors[f"model.layers.1.mlp.{projection}.weight"]
        tensors[f"model.layers.1.mlp.experts.{projection}.weight"] = tensors[
            f"model.layers.0.mlp.experts.{projection}.weight"
        ]
    tensors["model.layers.1.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"]
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", metadata_of(config), tensors)
    report = Checkpoint.open(path).report()
    assert (report.conflicts, report.missing) == ((), ())
    assert report.traits.moe == original("qwen3-moe").moe
    assert report.traits.moe_layers == (True, True, True)


@pytest.mark.parametrize("name", ["v2lite", "v3"])
def test_both_forms_of_kv_b_are_the_same_model(tmp_path: Path, name: str) -> None:
    old = Checkpoint.open(write_tiny_gguf(tmp_path / "old.gguf", "deepseek2", name))
    new = Checkpoint.open(write_tiny_gguf(tmp_path / "new.gguf", "deepseek2", name, split=True))
    assert old.report().traits == new.report().traits
    config = tiny_config(name)
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    prefix = "model.layers.2.self_attn."
    assert new.tensors[prefix + "k_b_proj.weight"].shape == (heads, rank, config["qk_nope_head_dim"])
    assert new.tensors[prefix + "v_b_proj.weight"].shape == (heads, config["v_head_dim"], rank)
    assert new.tensors[prefix + "k_b_proj.weight"].name == "blk.2.attn_k_b.weight"


def test_files_older_than_the_mla_keys_are_read(tmp_path: Path) -> None:
    config = tiny_config("v2lite")
    metadata = metadata_of(config)
    del metadata["attention.key_length_mla"], metadata["attention.value_length_mla"], metadata["expert_gating_func"]
    metadata["attention.key_length"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    metadata["attention.value_length"] = config["v_head_dim"]
    path = write_gguf(tmp_path / "old.gguf", "deepseek2", metadata, stacked_experts(checkpoints.tensors_of("v2lite")))
    assert comparable(Checkpoint.open(path).report().traits) == comparable(original("v2lite"))


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", "qwen3", "qwen3")
    assert Checkpoint.open(tmp_path).report() == Checkpoint.open(path).report()
    write_tiny_gguf(tmp_path / "other.gguf", "qwen3", "qwen3")
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        Checkpoint.open(tmp_path)


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model-00002-of-00003.gguf", "qwen3", "qwen3")
    with pytest.raises(CheckpointError, match="part 2 of 3"):
        Checkpoint.open(path)


def test_embeddings_are_tied_exactly_when_no_output_is_stored(tmp_path: Path) -> None:
    for architecture, name, tied in (("qwen3", "qwen3", True), ("llama", "llama2", False)):
        traits = Checkpoint.open(write_tiny_gguf(tmp_path / f"{name}.gguf", architecture, name)).report().traits
        assert traits.tied_embeddings == tied


def test_partial_rotation_is_a_missing_trait(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", "llama", "llama2", **{"rope.dimension_count": 12})
    assert [entry.trait for entry in Checkpoint.open(path).report().missing] == ["partial rotary embedding"]


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("gemma3", {}, "gemma3"),
        ("deepseek2", {"attention.key_length_mla": 8}, "key_length_mla"),
        ("deepseek2", {"expert_gating_func": 7}, "expert_gating_func"),
    ],
)
def test_metadata_that_cannot_be_read_is_refused_by_file(
    tmp_path: Path, architecture: str, changes: dict[str, Any], named: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture, metadata_of(tiny_config("v3")) | changes, {})
    with pytest.raises(CheckpointError, match=named) as raised:
        Checkpoint.open(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_every_tensor_of_an_architecture_has_a_name_that_the_traits_know(architecture: str) -> None:
    import gguf

    kind = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, 2)
    for tensor in gguf.MODEL_TENSORS[kind]:
        stored = gguf.TENSOR_NAMES[tensor].format(bid=1)
        if stored in ("rope_freqs", "blk.1.attn_rot_embd", "blk.1.exp_probs_b"):
            continue
        translated = hf_tensor_name(f"{stored}.weight").removesuffix(".weight")
        assert translated == "lm_head" or translated.startswith("model."), stored
        assert table.get_name(translated) in (stored, None), stored
    assert hf_tensor_name("blk.4.exp_probs_b.bias") == "model.layers.4.mlp.gate.e_score_correction_bias"
    assert hf_tensor_name("blk.4.attn_q.bias") == "model.layers.4.self_attn.q_proj.bias"


def published_divisors(dim: int, theta: float, factor: float, low: float, high: float, original: int) -> list[float]:
    """Llama 3's rule written out case by case, in float32 as files hold it."""
    divisors = []
    for index in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / dim)
        if wavelength < original / high:
            divisor = 1.0
        elif wavelength > original / low:
            divisor = factor
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisor = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(float(np.float32(divisor)))
    return divisors


@pytest.mark.parametrize(("dim", "factor"), [(128, 8.0), (64, 32.0)])
def test_the_published_llama3_scaling_is_recovered_from_its_divisors(dim: int, factor: float) -> None:
    divisors = published_divisors(dim, 500000.0, factor, 1.0, 4.0, 8192)
    assert rope_scaling_of(divisors, 500000.0) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@settings(max_examples=200, deadline=None)
@given(
    dim=st.sampled_from([64, 96, 128, 256]),
    theta=st.sampled_from([1e4, 1e5, 5e5, 1e6]),
    factor=st.sampled_from([1.5, 2.0, 4.0, 8.0, 32.0, 64.0]),
    low=st.sampled_from([0.5, 1.0, 2.0]),
    span=st.sampled_from([2.0, 4.0, 8.0]),
    original=st.sampled_from([512, 2048, 8192, 32768]),
)
def test_recovered_scaling_computes_the_stored_divisors(
    dim: int, theta: float, factor: float, low: float, span: float, original: int
) -> None:
    divisors = published_divisors(dim, theta, factor, low, low * span, original)
    assume(len({round(divisor, 3) for divisor in divisors}) >= 5 and max(divisors) == factor)
    found = rope_scaling_of(divisors, theta)
    assert found is not None
    again = published_divisors(
        dim, theta, found["factor"], 1.0, found["high_freq_factor"], found["original_max_position_embeddings"]
    )
    np.testing.assert_allclose(again, divisors, rtol=1e-3)


@pytest.mark.parametrize(
    ("divisors", "expected"),
    [
        ([1.0, 1.0, 1.0], {"rope_type": "default"}),
        ([4.0, 4.0, 4.0], {"rope_type": "linear", "factor": 4.0}),
        ([1.0, 7.0, 3.0, 8.0], None),
        ([1.0, 1.0, 8.0, 8.0], None),
        ([0.5, 1.0, 2.0], None),
        ([1.0, float("nan"), 2.0], None),
        ([], None),
    ],
)
def test_divisors_of_no_known_rule_are_not_guessed(divisors: list[float], expected: dict[str, Any] | None) -> None:
    assert rope_scaling_of(divisors, 10000.0) == expected


def test_stored_divisors_become_the_rope_scaling_of_the_model(tmp_path: Path) -> None:
    divisors = published_divisors(32, 1000000.0, 8.0, 1.0, 16.0, 4096)
    tensors = checkpoints.tensors_of("qwen3") | {"rope_freqs.weight": np.array(divisors, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "qwen3", metadata_of(tiny_config("qwen3")), tensors)
    report = Checkpoint.open(path).report()
    rope = report.traits.attention.rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.original_max_position) == ("llama3", 8.0, 1.0, 4096)
    assert rope.high_freq_factor == pytest.approx(16.0, rel=1e-4)
    tensors["rope_freqs.weight"] = np.linspace(1, 9, 16).astype(np.float32) ** 2
    path = write_gguf(tmp_path / "n.gguf", "qwen3", metadata_of(tiny_config("qwen3")), tensors)
    (missing,) = Checkpoint.open(path).report().missing
    assert "rope_freqs.weight" in missing.trait
