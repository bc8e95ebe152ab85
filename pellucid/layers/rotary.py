"""Rotary position embedding: frequencies from traits, one cos|sin table per model, rotation in place.

Sources: RoPE https://arxiv.org/abs/2104.09864; YaRN https://arxiv.org/abs/2309.00071 section 3; the llama3
rule is the one Llama 3.1's config names (low and high frequency factors around the original context).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pellucid.traits.model import RopeTraits

if TYPE_CHECKING:
    import torch


def inverse_frequencies(rope: RopeTraits) -> torch.Tensor:
    """theta^(-2i/dim) for i < dim/2, stretched as `rope.kind` says; fp64 [dim/2]."""
    import torch

    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    plain = rope.theta**-exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return _yarn(plain, rope)


def _llama3(plain: torch.Tensor, rope: RopeTraits) -> torch.Tensor:
    """Wavelengths beyond the original context are stretched by `factor`, short ones kept, the rest blended."""
    turns = (rope.original_max_position or 0) * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(plain: torch.Tensor, rope: RopeTraits) -> torch.Tensor:
    """Dims that turn more than beta_fast times over the original context are kept, fewer than beta_slow stretched."""
    import torch

    def dim_of(turns: float) -> float:
        length = rope.original_max_position or 0
        return rope.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    # beta_fast == beta_slow makes a step of the ramp (Kimi-K2): avoid 0/0.
    span = high - low or 0.001
    stretch = ((torch.arange(rope.dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


class Rotary:
    """The table [max_position, dim] (cos of dim/2 angles, then sin), and which dims turn together."""

    def __init__(self, rope: RopeTraits, max_position: int, device: torch.device) -> None:
        import torch

        self.interleaved = rope.interleaved
        angles = torch.arange(max_position, dtype=torch.float64)[:, None] * inverse_frequencies(rope)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.cos_sin_multiplier
        self.table = table.to(device, torch.float32).contiguous()
