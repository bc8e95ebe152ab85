"""What tensor headers add to a config: they decide, and what contradicts them is reported or refused."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.core import CheckpointError
from pellucid.traits.config import TraitReport, read_traits
from pellucid.traits.model import GQATraits
from tests import checkpoints
from tests.headers import index_of, tiny_config, tiny_shapes

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def read(name: str, drop: tuple[str, ...] = (), **changes: Any) -> TraitReport:
    """The report of a tiny model whose config was changed."""
    config = tiny_config(name) | changes
    for key in drop:
        config.pop(key, None)
    return read_traits(config, index_of(tiny_shapes(name)))


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_header_and_config_of_every_shape_agree(name: str) -> None:
    config = tiny_config(name)
    report = read_traits(config, index_of(tiny_shapes(name)))
    assert report.missing == ()
    biased = name == "qwen2"  # Has biases whatever attention_bias says.
    assert [line for line in report.conflicts if not (biased and line.startswith("attention_bias"))] == []
    assert report.traits.weights.source == "tensors"
    assert str(report.traits.weights.attention) == "fp32"
    alone = read_traits(config).traits
    assert (alone.hidden_size, alone.moe_layers, alone.eos_token_ids) == (
        report.traits.hidden_size,
        report.traits.moe_layers,
        report.traits.eos_token_ids,
    )


@pytest.mark.parametrize("name", ["v3", "kimi", "kimi25", "moonlight", "glm-flash"])
def test_a_correction_bias_means_sigmoid_when_the_config_forgot(name: str) -> None:
    config = tiny_config(name)
    text = config.get("text_config") or config
    expected = read_traits(config, index_of(tiny_shapes(name))).traits
    for key in ("scoring_func", "topk_method"):
        text.pop(key, None)
    report = read_traits(config, index_of(tiny_shapes(name)))
    assert report.traits == expected
    assert expected.moe is not None and expected.moe.scoring == "sigmoid" and expected.moe.correction_bias
    assert any("sigmoid, from the tensors" in note for note in report.notes)


def test_no_correction_bias_means_softmax_and_the_largest_score_per_group() -> None:
    moe = read("v2", drop=("scoring_func", "topk_method")).traits.moe
    assert moe is not None
    assert (moe.scoring, moe.correction_bias, moe.group_rule) == ("softmax", False, "max")


def test_a_gate_that_config_and_tensors_see_differently_is_a_conflict() -> None:
    report = read("v2lite", topk_method="noaux_tc")
    assert report.traits.moe is not None and report.traits.moe.correction_bias is False
    assert any("e_score_correction_bias" in line for line in report.conflicts)
    report = read("v3", scoring_func="softmax")
    assert report.traits.moe is not None and report.traits.moe.scoring == "softmax"
    assert any("unusual" in line for line in report.conflicts)


@pytest.mark.parametrize(("name", "stored"), [("v3", 0), ("v3-mtp", 1)])
@pytest.mark.parametrize("claimed", [None, 0, 1, 2])
def test_mtp_layers_are_counted_not_believed(name: str, stored: int, claimed: int | None) -> None:
    report = read(name, num_nextn_predict_layers=claimed)
    assert report.traits.mtp_layers == stored
    assert any("num_nextn_predict_layers" in line for line in report.conflicts) == ((claimed or 0) != stored)


@pytest.mark.parametrize(("name", "norm", "bias"), [("qwen3", True, False), ("qwen2", False, True)])
def test_query_norms_and_biases_come_from_names(name: str, norm: bool, bias: bool) -> None:
    attention = read(name, drop=("attention_bias",)).traits.attention
    assert isinstance(attention, GQATraits)
    assert (attention.qk_norm, attention.qkv_bias, attention.o_bias) == (norm, bias, False)


def test_the_stored_layers_decide_which_are_moe() -> None:
    report = read("v3", first_k_dense_replace=2)
    assert report.traits.moe_layers == (False, True, True)
    assert any("layer 1" in line for line in report.conflicts)


def test_embeddings_are_tied_when_no_output_matrix_is_stored() -> None:
    assert read("qwen3", drop=("tie_word_embeddings",)).traits.tied_embeddings
    assert not read("llama", drop=("tie_word_embeddings",)).traits.tied_embeddings
    assert any("no lm_head" in line for line in read("qwen3", tie_word_embeddings=False).conflicts)


def test_the_vision_tower_is_skipped_and_its_size_said() -> None:
    notes = " / ".join(read("kimi25").notes)
    assert "vision_tower is skipped: 3 tensors" in notes and "mm_projector is skipped: 1 tensors" in notes


def test_traits_do_not_depend_on_the_wrapper_prefix() -> None:
    config, shapes = tiny_config("v3"), tiny_shapes("v3")
    expected = read_traits(config, index_of(shapes))
    for prefix in ("language_model.", "model.language_model."):
        inner = {name.removeprefix("model.") if prefix.startswith("model.") else name: v for name, v in shapes.items()}
        assert read_traits(config, index_of({prefix + name: v for name, v in inner.items()})) == expected
    short = {"language_model." + name.removeprefix("model."): value for name, value in shapes.items()}
    assert read_traits(config, index_of(short)) == expected


WIDTHS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_routed_experts", "moe_intermediate_size", "n_shared_experts",
]  # fmt: skip


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("key", WIDTHS)
def test_a_number_that_is_off_by_one_is_refused_before_loading(key: str, step: int) -> None:
    config = tiny_config("kimi")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read("kimi", **{key: config[key] + step})


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "head_dim", "intermediate_size", "vocab_size"])
@pytest.mark.parametrize("factor", [2, 3])
def test_a_wrong_width_of_gqa_is_refused_before_loading(key: str, factor: int) -> None:
    config = tiny_config("qwen3")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read("qwen3", **{key: config[key] * factor})


@pytest.mark.parametrize("key", ["kv_lora_rank", "q_lora_rank"])
def test_a_dropped_rank_is_refused_by_the_tensor_that_shows_it(key: str) -> None:
    with pytest.raises(CheckpointError, match="asks for self_attn"):
        read("v3", **{key: None})


@pytest.mark.parametrize(("name", "heads"), [("kimi", 8), ("qwen3", 8)])
def test_the_refusal_names_tensor_shapes_and_keys(name: str, heads: int) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(name, num_attention_heads=heads, num_key_value_heads=2)
    line = str(raised.value)
    assert "self_attn.q" in line and "num_attention_heads" in line and "has shape [" in line and "\n" not in line


def test_missing_layers_experts_and_unread_tensors_are_named() -> None:
    config, shapes = tiny_config("v3"), tiny_shapes("v3")
    fewer = {name: value for name, value in shapes.items() if ".layers.1." not in name}
    with pytest.raises(CheckpointError, match="no layer 1"):
        read_traits(config, index_of(fewer))
    fewer = {name: value for name, value in shapes.items() if ".experts.7." not in name}
    with pytest.raises(CheckpointError, match="15 experts"):
        read_traits(config, index_of(fewer))
    more: Shapes = {**shapes, "model.layers.0.self_attn.new_thing.weight": ("F32", (3,))}
    assert any("self_attn.new_thing" in line for line in read_traits(config, index_of(more)).conflicts)


def test_quantized_columns_are_counted_back_for_the_check() -> None:
    config, shapes = tiny_config("qwen3"), tiny_shapes("qwen3")
    name = "model.layers.0.self_attn.o_proj"
    rows, columns = shapes.pop(f"{name}.weight")[1]
    packed: Shapes = {
        f"{name}.weight": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
    }
    report = read_traits(config, index_of({**shapes, **packed}))
    assert [(kind, str(stored)) for kind, stored in report.traits.weights.exceptions] == [
        ("self_attn.o_proj", "nvfp4 group 16 symmetric")
    ]
    packed[f"{name}.weight"] = ("U8", (rows, columns // 2 - 8))
    with pytest.raises(CheckpointError, match=r"o_proj has shape"):
        read_traits(config, index_of({**shapes, **packed}))
