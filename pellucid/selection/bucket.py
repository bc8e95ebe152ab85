"""The one rounding of token counts: tuning, graph capture, planning and serving all call `bucket`."""

from __future__ import annotations


def bucket(tokens: int) -> int:
    """The smallest bucket that holds `tokens`: 1, 2, 4, 8, 16, 32 and so on. Raises ValueError below 1."""
    if tokens < 1:
        raise ValueError(f"a step has at least one token, got {tokens}")
    return 1 << (tokens - 1).bit_length()


def buckets_up_to(tokens: int) -> tuple[int, ...]:
    """Every bucket a step of at most `tokens` tokens can fall into, smallest first."""
    return tuple(1 << power for power in range(bucket(tokens).bit_length()))
