"""The largest tile whose shared memory fits the device, by closed form. Called by `misfits` and by Triton backends.

The limit is what the driver reports, never a table by compute capability: SM 9.0 and SM 12.0 differ by half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pellucid.traits.backend import SharedMemoryModel, Tile
from pellucid.traits.model import GQATraits, MLATraits


@dataclass(frozen=True, slots=True)
class TileChoice:
    """The tile taken (None when none fits), its bytes, the device's limit, and both numbers in words."""

    tile: Tile | None
    bytes_needed: int
    limit: int
    because: str


def largest_tile(model: SharedMemoryModel, widths: Mapping[str, int], limit: int) -> TileChoice:
    """The first of the model's tiles, in order of preference, that needs at most `limit` bytes.

    When none fits, `bytes_needed` is that of the smallest.
    """
    skipped: list[str] = []
    for tile in model.tiles:
        needed = model.bytes_needed(tile, widths)
        if needed <= limit:
            after = f"; {', '.join(skipped)}" if skipped else ""
            because = f"{model.kernel}: tile {_name(tile)} takes {needed} of {limit} bytes of shared memory{after}"
            return TileChoice(tile, needed, limit, because)
        skipped.append(f"{_name(tile)} needs {needed}")
    smallest = min(model.bytes_needed(tile, widths) for tile in model.tiles)
    because = f"{model.kernel}: no tile fits {limit} bytes of shared memory: {', '.join(skipped)}"
    return TileChoice(None, smallest, limit, because)


def attention_widths(attention: MLATraits | GQATraits) -> dict[str, int]:
    """The symbols of an attention kernel's closed form: widths of one query/key head and one value head."""
    if isinstance(attention, MLATraits):
        return {
            "qk": attention.qk_head_dim,
            "v": attention.v_head_dim,
            "kv_lora_rank": attention.kv_lora_rank,
            "rope": attention.qk_rope_head_dim,
        }
    return {"qk": attention.head_dim, "v": attention.head_dim}


def _name(tile: Tile) -> str:
    return f"{tile[0]}x{tile[1]}"
