"""Recovers llama-3 rope scaling from the divisors that a GGUF file stores instead. Used by `models.registry`.

llama-3 scaling divides the frequency of wavelength w by 1 where w < L/high, by `factor` where w > L/low, and between
them by 1 / ((1 - s)/factor + s) with s = (L/w - low)/(high - low). GGUF keeps only the divisors (`rope_freqs.weight`).
They fix factor, L/low and high/low, and nothing else is needed to compute with: low = 1 is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-4
"""Largest relative difference between stored and recomputed divisors; they are stored as float32."""


def rope_scaling_of(divisors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """A Hugging Face `rope_scaling` with exactly these divisors for frequencies theta^(-2i/dim); None if there is none.

    `divisors` has dim/2 entries. All ones are {"rope_type": "default"}, all alike "linear".
    """
    if not divisors or any(not math.isfinite(divisor) or divisor < 1 - TOLERANCE for divisor in divisors):
        return None
    factor = max(divisors)
    if factor - min(divisors) <= TOLERANCE:
        unscaled = abs(factor - 1) <= TOLERANCE
        return {"rope_type": "default"} if unscaled else {"rope_type": "linear", "factor": _shorten(factor)}
    fitted = _fit(divisors, theta, factor)
    if fitted is None:
        return None
    again = llama3_divisors(
        len(divisors), theta, fitted["factor"], fitted["original_max_position_embeddings"], fitted["high_freq_factor"]
    )
    close = all(abs(a - b) <= TOLERANCE * b for a, b in zip(again, divisors, strict=True))
    return fitted if close else None


def llama3_divisors(count: int, theta: float, factor: float, original: int, high: float) -> list[float]:
    """The `count` divisors of llama-3 scaling with low_freq_factor = 1, for head width 2 * count."""
    result = []
    for index in range(count):
        ratio = original / _wavelength(index, count, theta)
        smooth = min(1.0, max(0.0, (ratio - 1.0) / (high - 1.0)))
        result.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return result


def _wavelength(index: int, count: int, theta: float) -> float:
    return 2 * math.pi * math.pow(theta, index / count)


def _fit(divisors: Sequence[float], theta: float, factor: float) -> dict[str, Any] | None:
    """Solve s = a/w - b through the two outermost divisors strictly between 1 and `factor`."""
    count = len(divisors)
    points = [
        (1 / _wavelength(index, count, theta), (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for index, divisor in enumerate(divisors)
        if 1 + TOLERANCE < divisor < factor * (1 - TOLERANCE)
    ]
    if len(points) < 2:
        return None
    (x0, s0), (x1, s1) = points[0], points[-1]
    slope = (s0 - s1) / (x0 - x1)
    offset = slope * x0 - s0
    if slope <= 0 or offset <= 0:
        return None
    return {
        "rope_type": "llama3",
        "factor": _shorten(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": _shorten(1 + 1 / offset),
        "original_max_position_embeddings": round(slope / offset),
    }


def _shorten(value: float) -> float:
    """Undo float32 noise: 4.0000012 is 4.0."""
    return float(f"{value:.5g}")
