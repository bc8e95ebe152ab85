"""Frequencies, multipliers and softmax scales of rotary embedding against published figures and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pellucid.layers.rotary import inverse_frequencies
from pellucid.traits.config import read_traits
from pellucid.traits.model import MLATraits, RopeTraits
from tests import checkpoints
from tests.reference import Rope


def _mla(config: dict[str, Any]) -> MLATraits:
    attention = read_traits(config).traits.attention
    assert isinstance(attention, MLATraits)
    return attention


@pytest.mark.parametrize(
    ("factor", "theta", "fast", "first", "last"),
    [
        pytest.param(40.0, 1e4, 32.0, 10, 23, id="V3"),
        pytest.param(32.0, 5e4, 1.0, 19, 20, id="K2-Instruct, a step"),
        pytest.param(64.0, 5e4, 32.0, 8, 20, id="K2.5"),
    ],
)
def test_yarn_ramps_where_the_published_models_do(
    factor: float, theta: float, fast: float, first: int, last: int
) -> None:
    """Pairs up to `first` keep their frequency, from `last` on they are divided by the factor."""
    rope = RopeTraits(64, theta, "yarn", True, factor=factor, original_max_position=4096, beta_fast=fast, beta_slow=1.0)
    plain = theta ** -(np.arange(32) / 32)
    ratio = plain / inverse_frequencies(rope).numpy()
    np.testing.assert_allclose(ratio[: first + 1], 1.0, rtol=1e-12)
    np.testing.assert_allclose(ratio[last:], factor, rtol=1e-12)
    between = ratio[first + 1 : last]
    assert ((between > 1) & (between < factor)).all()
    assert (np.diff(between) > 0).all()


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_frequencies_equal_the_reference_for_every_shape(name: str) -> None:
    config = checkpoints.text_config(checkpoints.CONFIGS[name])
    rope = read_traits(checkpoints.CONFIGS[name]).traits.attention.rope
    wanted = Rope.of(config, rope.dim, rope.interleaved)
    np.testing.assert_allclose(inverse_frequencies(rope).numpy(), wanted.inverse, rtol=1e-12)
    assert rope.cos_sin_multiplier == pytest.approx(wanted.multiplier, rel=1e-12)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
         "beta_slow": 1.0, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 0.7},
    ],
    ids=lambda scaling: "-".join(map(str, scaling.values())),
)  # fmt: skip
def test_frequencies_and_multiplier_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = {**checkpoints.CONFIGS["llama"], "head_dim": 128, "max_position_embeddings": 131072}
    config["rope_scaling"] = scaling
    theirs = LlamaConfig(
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": config["rope_theta"], **scaling},
    )
    wanted, multiplier = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, device="cpu")

    rope = read_traits(config).traits.attention.rope

    np.testing.assert_allclose(inverse_frequencies(rope).numpy(), wanted.double().numpy(), rtol=5e-6)
    assert rope.cos_sin_multiplier == pytest.approx(multiplier)


def _published(nope: int, rope: dict[str, Any]) -> dict[str, Any]:
    config = {**checkpoints.CONFIGS["v3"], "qk_nope_head_dim": nope, "qk_rope_head_dim": 64, **rope}
    if "rope_parameters" in rope:
        del config["rope_theta"]
    return config


def _yarn(factor: float, mscale: float) -> dict[str, Any]:
    return {
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "original_max_position_embeddings": 4096,
        }
    }


_PLAIN = {"rope_type": "default", "rope_theta": 1000000.0}


@pytest.mark.parametrize(
    ("nope", "rope", "scale", "over_plain"),
    [
        pytest.param(128, _yarn(64.0, 1.0), 0.14467963, 2.00474, id="K2.5"),
        pytest.param(128, _yarn(40.0, 1.0), 0.13523378, 1.873854, id="V3"),
        pytest.param(128, _yarn(40.0, 0.707), 0.11472139, 1.589626, id="V2-Lite"),
        pytest.param(192, {"rope_parameters": _PLAIN, "rope_scaling": _PLAIN}, 0.0625, 1.0, id="plain, both spellings"),
    ],
)
def test_softmax_scales_are_those_of_the_published_models(
    nope: int, rope: dict[str, Any], scale: float, over_plain: float
) -> None:
    attention = _mla(_published(nope, rope))
    assert attention.softmax_scale == pytest.approx(scale, abs=1e-8)
    assert attention.softmax_scale * (nope + 64) ** 0.5 == pytest.approx(over_plain, abs=1e-6)
    assert attention.rope.cos_sin_multiplier == 1.0


def test_a_scaling_of_type_default_scales_nothing() -> None:
    rope = _mla(_published(192, {"rope_parameters": _PLAIN, "rope_scaling": _PLAIN})).rope
    np.testing.assert_allclose(inverse_frequencies(rope).numpy(), 1e6 ** -(np.arange(32) / 32), rtol=1e-12)
