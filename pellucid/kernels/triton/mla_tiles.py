"""How the launches of MLA decode are cut, by shapes and the device's limits. Called by `mla_decode` and its callers."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton

from pellucid.kernels.device import DeviceLimits

SPLIT_KEYS = 64
"""Keys of a split are a multiple of this, of half for one row: its result has the bytes of 28 keys at 16 heads."""

WGMMA_SM = frozenset({90})
"""Where 64 heads a program fit: 216 KB of shared memory, and tensor cores that read keys from there."""


class AbsorbTile(NamedTuple):
    """`block_r` rows and `block_c` latent channels of one head a program."""

    block_r: int
    block_c: int
    warps: int = 4


class DecodeTile(NamedTuple):
    """`block_h` heads a program, `block_n` keys a step; a split has a multiple of `split_keys` keys."""

    block_h: int
    block_n: int
    split_keys: int
    warps: int
    stages: int


class ProjectTile(NamedTuple):
    """`block_r` rows and `block_v` value channels a program, which has `block_s` splits of a row in flight."""

    block_r: int
    block_s: int
    block_v: int
    warps: int = 4


def absorb_tile(rows: int, heads: int) -> AbsorbTile:
    """One row: a wave of programs for 16 heads. More rows: weights are read once per 64 rows."""
    return AbsorbTile(min(triton.next_power_of_2(rows), 64), 64 if heads <= 32 else 128)


def decode_tile(rows: int, heads: int, page: int, width: int, limits: DeviceLimits) -> DecodeTile:
    """As many heads and keys a program as the device's shared memory holds; `width` is kv_lora_rank + rope.

    Of 16 heads, two programs share a multiprocessor of 227 KB, but for the tiles of few rows, which fill it.
    """
    split_keys = SPLIT_KEYS if rows > 1 else SPLIT_KEYS // 2
    if heads > 32 and limits.sm in WGMMA_SM:
        block_n = math.gcd(page, 64)
        return DecodeTile(64, block_n, SPLIT_KEYS, 8, 2 if block_n == 64 else 3)
    block_n = math.gcd(page, 32)
    tiles = [
        DecodeTile(16, block_n, split_keys, 4, 3 if block_n == 32 else 5),
        DecodeTile(16, math.gcd(page, 16), split_keys, 4, 2),
    ]
    if heads > 16:
        tiles.insert(0, DecodeTile(32, block_n, split_keys, 8, 3))
    elif rows <= 16 and page % 64 == 0:
        # Three tiles of 64 keys in flight, for steps of too few rows to fill the device.
        tiles.insert(0, DecodeTile(16, 64, SPLIT_KEYS, 8, 3))
    return next((tile for tile in tiles if tile_bytes(tile, width) <= limits.shared_memory), tiles[-1])


def tile_bytes(tile: DecodeTile, width: int) -> int:
    """Shared memory of a program of 16 or 32 heads: tiles of keys on their way, queries, and the weights of keys."""
    return 2 * ((tile.stages - 1) * tile.block_n * width + tile.block_h * width + tile.block_h * tile.block_n)


def project_tile(rows: int, heads: int, v_head_dim: int) -> ProjectTile:
    """Rows and value channels a program such that a wave of programs reads the fewest bytes of partial results."""
    block_r, block_v = 1, min(64, triton.next_power_of_2(v_head_dim))
    while block_r < min(rows, 16) and heads * triton.cdiv(rows, 2 * block_r) * triton.cdiv(v_head_dim, block_v) >= 128:
        block_r *= 2
    while block_v > 16 and heads * triton.cdiv(rows, block_r) * triton.cdiv(v_head_dim, block_v) < 128:
        block_v //= 2
    # Measured at 1, 8, 32 and 128 rows: only at 32 are eight warps better (5.8 us against 8.2).
    return ProjectTile(block_r, 16 // block_r, block_v, warps=8 if 16 < rows <= 64 else 4)


def splits_for(rows: int, heads: int, tile: DecodeTile, width: int, limits: DeviceLimits, max_context: int) -> int:
    """Splits of a row's keys for one wave of programs: two a multiprocessor, or one where a program fills it."""
    fills = tile.block_h == 64 or 2 * tile_bytes(tile, width) > limits.shared_memory
    slots = limits.sm_count if fills else 2 * limits.sm_count
    fit = slots // (rows * triton.cdiv(heads, max(16, tile.block_h)))
    return int(max(1, min(fit, triton.cdiv(max_context, SPLIT_KEYS))))
