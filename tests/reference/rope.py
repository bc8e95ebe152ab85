"""Rotary position embedding in fp64: default, linear, llama3 and yarn, both pair layouts.

Sources: https://arxiv.org/abs/2104.09864 (RoPE), https://arxiv.org/abs/2309.00071 (YaRN), the `rope_scaling` keys of
Llama 3.1, and https://arxiv.org/abs/2405.04434 for the softmax scale that goes with YaRN in MLA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rope:
    """`inverse` [dim/2] are radians per position; cos and sin are multiplied by `multiplier`."""

    inverse: Array
    multiplier: float
    interleaved: bool

    @classmethod
    def of(cls, config: Config, dim: int, interleaved: bool) -> Rope:
        parameters = rope_parameters(config)
        frequencies = float(parameters["rope_theta"]) ** -(np.arange(dim // 2) * 2.0 / dim)
        return cls(_stretched(frequencies, parameters, dim), _multiplier(parameters), interleaved)

    def __call__(self, x: Array, positions: Array) -> Array:
        """Rotates x [tokens, heads, dim] as complex numbers, the pairs being (2i, 2i+1) or (i, i + dim/2)."""
        angles = positions[:, None, None] * self.inverse  # [tokens, 1, dim/2]
        turn = self.multiplier * np.exp(1j * angles)
        half = x.shape[-1] // 2
        if self.interleaved:
            z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)


def rope_parameters(config: Config) -> dict[str, Any]:
    """Either spelling as one dict with `rope_type` and `rope_theta`."""
    merged = dict(config.get("rope_scaling") or {})
    merged.update(config.get("rope_parameters") or {})
    merged.setdefault("rope_type", merged.get("type", "default"))
    merged.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return merged


def softmax_multiplier(config: Config) -> float:
    """m^2 with m = 0.1 mscale_all_dim ln(factor) + 1 for MLA under YaRN, else 1."""
    parameters = rope_parameters(config)
    if parameters["rope_type"] != "yarn" or not parameters.get("mscale_all_dim"):
        return 1.0
    return _m(parameters["factor"], parameters["mscale_all_dim"]) ** 2


def _m(factor: float, mscale: float) -> float:
    return 1.0 + 0.1 * mscale * math.log(factor) if factor > 1 else 1.0


def _multiplier(parameters: Config) -> float:
    if parameters["rope_type"] != "yarn":
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return _m(parameters["factor"], mscale) / _m(parameters["factor"], all_dim)
    return _m(parameters["factor"], 1.0)


def _stretched(frequencies: Array, parameters: Config, dim: int) -> Array:
    """Each frequency kept (weight 1) or divided by `factor` (weight 0), or in between."""
    kind = parameters["rope_type"]
    if kind == "default":
        return frequencies
    if kind == "linear":
        keep = np.zeros_like(frequencies)
    elif kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        turns = parameters["original_max_position_embeddings"] / wavelengths
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    elif kind == "yarn":
        keep = 1.0 - _yarn_ramp(parameters, dim)
    else:
        raise ValueError(f"rope_type {kind}")
    stretched: Array = frequencies * keep + frequencies / parameters["factor"] * (1.0 - keep)
    return stretched


def _yarn_ramp(parameters: Config, dim: int) -> Array:
    """0 for the pairs that turn more than beta_fast times over the original context, 1 for fewer than beta_slow."""
    length, theta = parameters["original_max_position_embeddings"], parameters["rope_theta"]

    def pair_that_turns(times: float) -> float:
        # theta^(-2i/dim) * length = 2 pi times, solved for i.
        return dim / 2 * math.log(length / (2 * math.pi * times)) / math.log(theta)

    first = max(math.floor(pair_that_turns(parameters.get("beta_fast") or 32)), 0)
    last = min(math.ceil(pair_that_turns(parameters.get("beta_slow") or 1)), dim - 1)
    return np.clip((np.arange(dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
