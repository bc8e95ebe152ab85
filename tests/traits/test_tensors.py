"""Names of tensors: wrapper prefixes, towers, layers."""

from __future__ import annotations

import pytest

from pellucid.traits.tensors import TextTensors, canonical_name, layer_of, tower_of
from tests.headers import index_of


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("language_model.model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("language_model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("model.language_model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head", "lm_head"),
        ("language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("vision_tower.encoder.blocks.3.wo.weight", "vision_tower.encoder.blocks.3.wo.weight"),
    ],
)
def test_wrapper_prefixes_do_not_matter(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical
    assert canonical_name(canonical) == canonical


@pytest.mark.parametrize(
    ("name", "tower"),
    [
        ("vision_tower.patch_embed.proj.weight", "vision_tower"),
        ("mm_projector.proj.0.weight", "mm_projector"),
        ("model.visual.blocks.0.norm.weight", "visual"),
        ("model.layers.0.input_layernorm.weight", None),
        ("language_model.model.norm.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_towers_are_told_from_the_language_model(name: str, tower: str | None) -> None:
    assert tower_of(name) == tower


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.61.eh_proj.weight", (61, "eh_proj.weight")),
        ("model.layers.0.mlp.experts.17.up_proj", (0, "mlp.experts.17.up_proj")),
        ("model.layers.x.mlp", None),
        ("model.layers.²2.mlp", None),
        ("model.layers.1", None),
        ("model.norm.weight", None),
    ],
)
def test_a_layer_is_read_from_a_name(name: str, place: tuple[int, str] | None) -> None:
    assert layer_of(name) == place


def test_the_text_view_groups_by_module_and_layer_and_sets_towers_aside() -> None:
    view = TextTensors.of(
        index_of(
            {
                "language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed": ("I32", (4, 2)),
                "language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale": ("BF16", (4, 1)),
                "language_model.model.layers.1.mlp.experts.3.up_proj.weight_packed": ("I32", (4, 2)),
                "language_model.lm_head.weight": ("BF16", (4, 2)),
                "vision_tower.a.weight": ("BF16", (3,)),
                "vision_tower.b.weight": ("BF16", (5,)),
            }
        )
    )
    assert set(view.modules["model.layers.1.mlp.experts.0.up_proj"]) == {"weight_packed", "weight_scale"}
    assert view.expert_ids(1) == {0, 3} and view.is_moe(1) and not view.is_moe(0)
    assert view.skipped == {"vision_tower": (2, 16)}
    assert view.by_name["lm_head.weight"].name == "language_model.lm_head.weight"
    assert view.layer_names(2) == set()
