"""One error planted in the engine at a time must move the logits far beyond the tolerance of `test_engine`.

Each is an error that some implementation has shipped. A plant that left the logits alone would mean that the
fixtures cannot see it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pellucid.layers.gqa import GQAAttention
from pellucid.layers.mla import MLAAttention
from pellucid.layers.moe import MoE
from pellucid.layers.rotary import Rotary
from pellucid.models.decoder import Decoder, DecoderLayer
from pellucid.traits.model import MoETraits, RopeTraits, yarn_mscale
from tests import checkpoints, harness
from tests.reference import gate

Array = npt.NDArray[np.float64]
Edit = Callable[[DecoderLayer], DecoderLayer]

WIDE = 100 * 2e-4
"""A hundred tolerances."""


def _mla(layer: DecoderLayer) -> MLAAttention:
    assert isinstance(layer.attention, MLAAttention)
    return layer.attention


def _gqa(layer: DecoderLayer) -> GQAAttention:
    assert isinstance(layer.attention, GQAAttention)
    return layer.attention


def _with_rope(layer: DecoderLayer, **changes: object) -> DecoderLayer:
    """The same layer with another rope table; the softmax scale stays."""
    attention = layer.attention
    rope: RopeTraits = replace(attention.traits.rope, **changes)  # type: ignore[arg-type]
    rotary = Rotary(rope, 256, attention.rotary.table.device)
    return replace(layer, attention=replace(attention, rotary=rotary))


def _no_squared_mscale(layer: DecoderLayer) -> DecoderLayer:
    traits = _mla(layer).traits
    plain = replace(traits, rope=replace(traits.rope, mscale_all_dim=None))
    return replace(layer, attention=replace(_mla(layer), traits=plain))


def _scale_of_the_absorbed_width(layer: DecoderLayer) -> DecoderLayer:
    """576^-1/2 where 192^-1/2 is meant: the default of kernels that see only the latent row."""
    traits = _mla(layer).traits
    absorbed = replace(traits, qk_nope_head_dim=traits.kv_lora_rank)
    attention = replace(_mla(layer), traits=_ScaleOf(traits, absorbed.softmax_scale))  # type: ignore[arg-type]
    return replace(layer, attention=attention)


class _ScaleOf:
    """Traits with another softmax scale."""

    def __init__(self, traits: object, scale: float) -> None:
        self._traits, self.softmax_scale = traits, scale

    def __getattr__(self, name: str) -> object:
        return getattr(self._traits, name)


def _other_pairs(layer: DecoderLayer) -> DecoderLayer:
    return _with_rope(layer, interleaved=not layer.attention.traits.rope.interleaved)


def _yarn_multiplies_cos_and_sin(layer: DecoderLayer) -> DecoderLayer:
    """Plain YaRN's 0.1 ln(factor) + 1, which DeepSeek's pair of mscales cancels."""
    return _with_rope(layer, attention_factor=yarn_mscale(_mla(layer).traits.rope.factor, 1.0))


def _inner_eps(layer: DecoderLayer) -> DecoderLayer:
    _mla(layer).kv_a_norm.eps = 1e-6
    return layer


def _edit_moe(layer: DecoderLayer, **changes: object) -> DecoderLayer:
    return replace(layer, mlp=replace(layer.mlp, **changes)) if isinstance(layer.mlp, MoE) else layer  # type: ignore[arg-type]


def _edit_moe_traits(layer: DecoderLayer, **changes: object) -> DecoderLayer:
    if not isinstance(layer.mlp, MoE):
        return layer
    return _edit_moe(layer, traits=replace(layer.mlp.traits, **changes))  # type: ignore[arg-type]


def _no_outer_eps(layer: DecoderLayer) -> DecoderLayer:
    layer.input_norm.eps = 1e-6
    return layer


PLANTS: list[tuple[str, str, Edit]] = [
    ("v3", "softmax multiplier 1", _no_squared_mscale),
    ("v2lite", "softmax multiplier 1", _no_squared_mscale),
    ("kimi25", "softmax multiplier 1", _no_squared_mscale),
    ("v3", "scale of the absorbed width", _scale_of_the_absorbed_width),
    ("v3", "half-split rope", _other_pairs),
    ("glm-flash", "half-split rope", _other_pairs),
    ("llama", "interleaved rope", _other_pairs),
    ("v3", "cos and sin multiplied", _yarn_multiplies_cos_and_sin),
    ("unequal-mscale", "cos and sin not multiplied", lambda layer: _with_rope(layer, attention_factor=1.0)),
    ("qwen3-yarn", "cos and sin not multiplied", lambda layer: _with_rope(layer, attention_factor=1.0)),
    ("v3", "no yarn", lambda layer: _with_rope(layer, kind="default")),
    ("kimi", "yarn with the usual betas", lambda layer: _with_rope(layer, beta_fast=32.0)),
    ("llama", "llama3 rope as default", lambda layer: _with_rope(layer, kind="default")),
    ("llama-linear", "linear rope as default", lambda layer: _with_rope(layer, kind="default")),
    ("moonlight", "inner eps 1e-6", _inner_eps),
    ("kimi25", "inner eps 1e-6", _inner_eps),
    ("moonlight", "outer eps 1e-6", _no_outer_eps),
    ("v3", "no correction bias", lambda layer: _edit_moe(layer, correction_bias=None)),
    ("kimi", "no correction bias", lambda layer: _edit_moe(layer, correction_bias=None)),
    ("v3", "no normalisation", lambda layer: _edit_moe_traits(layer, normalize=False)),
    ("qwen3-moe", "no normalisation", lambda layer: _edit_moe_traits(layer, normalize=False)),
    ("v2", "normalised", lambda layer: _edit_moe_traits(layer, normalize=True)),
    ("kimi", "no scaling", lambda layer: _edit_moe_traits(layer, scaling=1.0)),
    ("v3", "softmax scores", lambda layer: _edit_moe_traits(layer, scoring="softmax")),
    ("v3", "no groups", lambda layer: _edit_moe_traits(layer, group_rule="none")),
    ("v3", "groups by their largest", lambda layer: _edit_moe_traits(layer, group_rule="max")),
    ("v2", "groups by their two largest", lambda layer: _edit_moe_traits(layer, group_rule="top2_sum")),
    ("v2lite", "no shared experts", lambda layer: _edit_moe(layer, shared_experts=None)),
    ("qwen3", "no q and k norm", lambda layer: replace(layer, attention=replace(_gqa(layer), q_norm=None))),
]


def _deviation(path: Path, wanted: Array, edit: Edit) -> float:
    decoder: Decoder = harness.load(path, "reference")
    planted = replace(decoder, layers=tuple(edit(layer) for layer in decoder.layers))
    name = path.name
    found = harness.Session(planted, harness.attention_backend("reference")).run([[(0, checkpoints.prompts(name)[0])]])
    return float(np.abs(found[0] - wanted).max())


@pytest.mark.parametrize(("name", "what", "edit"), PLANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_planted_error_is_seen(
    name: str,
    what: str,
    edit: Edit,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], dict[int, Array]],
) -> None:
    assert _deviation(checkpoint(name), expected(name)[0], edit) > WIDE


@pytest.mark.parametrize(("left_out", "seen"), [(-np.inf, False), (0.0, True)])
def test_groups_left_out_that_score_zero_are_seen(
    left_out: float,
    seen: bool,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], dict[int, Array]],
) -> None:
    """Biased scores are often negative here, so that a mask of 0 would let experts of other groups in."""
    import torch

    def route(logits: torch.Tensor, traits: MoETraits, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        routing = gate(
            logits.double().numpy(),
            top_k=traits.top_k,
            scoring="sigmoid",
            bias=None if bias is None else bias.double().numpy(),
            num_groups=traits.num_groups,
            topk_groups=traits.topk_groups,
            group_rule=traits.group_rule,
            normalize=traits.normalize,
            scaling=traits.scaling,
            left_out=left_out,
        )
        return torch.from_numpy(routing.experts), torch.from_numpy(routing.weights).float()

    def planted(layer: DecoderLayer) -> DecoderLayer:
        return replace(layer, mlp=replace(layer.mlp, route=route)) if isinstance(layer.mlp, MoE) else layer

    deviation = _deviation(checkpoint("v3"), expected("v3")[0], planted)
    assert deviation > WIDE if seen else deviation < 2e-4
