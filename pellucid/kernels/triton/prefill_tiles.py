"""Which tiles a prefill call takes: their size from the device's limits, and the query tiles of a ragged batch.

Called by `attention.triton_gqa` and `attention.triton_mla` before the launchers of `prefill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pellucid.core import PlanError
from pellucid.kernels.device import DeviceLimits, to_device


class PrefillTile(NamedTuple):
    """Query rows of a program, keys a step of its loop, warps, and stages of the pipeline that fetches the keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


TILE_FIELDS = 5


def query_tiles(
    spans: Sequence[tuple[int, int, int]], block_m: int, device: torch.device, key_starts: Sequence[int] = ()
) -> torch.Tensor:
    """`tile_rows` on the device: int32 [tiles, TILE_FIELDS], one a program."""
    return to_device(tile_rows(spans, block_m, key_starts), torch.int32, device)


def tile_rows(
    spans: Sequence[tuple[int, int, int]], block_m: int, key_starts: Sequence[int] = ()
) -> list[tuple[int, int, int, int, int]]:
    """Spans (start, stop, context) cut into tiles of at most `block_m` query rows, each with its fields:

        start, stop   rows of the batch
        seen          keys that row `start` sees, every later row one more; 0: padded rows, whose result is zeros
        sequence      number of the span: its row of the page table
        key_start     row of K where the sequence's first key lies (`ragged_prefill` only)

    Those with most keys come first: programs start in this order, and no long one should be left for the end. A tile of
    zeros computes nothing.
    """
    tiles = []
    for sequence, (start, stop, context) in enumerate(spans):
        key_start = key_starts[sequence] if key_starts else 0
        for row in range(start, stop, block_m):
            seen = context - (stop - row) + 1 if context else 0
            tiles.append((row, min(row + block_m, stop), seen, sequence, key_start))
    tiles.sort(key=lambda tile: tile[2], reverse=True)
    return tiles


TILES = ((128, 64), (64, 64), (32, 64))
"""Query rows and keys, in order of preference."""

OPERANDS_IN_SHARED_MEMORY = frozenset({90, 100, 103})
"""Where the tensor cores read Q, K and V from shared memory, so that one more buffer of K and V is in flight."""


def prefill_tile(qk_dim: int, v_dim: int, limits: DeviceLimits, longest: int) -> PrefillTile:
    """The largest tile that fits, with up to three stages; `longest` is the most query rows of one sequence.

    Shared memory in 16-bit values: Q, the probabilities, and K and V once a stage but one, or once a stage where the
    tensor cores read them there. Found by compiling for each capability.

    Raises:
        PlanError: no tile fits the device.
    """
    query, keys = row_width(qk_dim), row_width(qk_dim) + block_width(v_dim)
    slack = 2048
    for block_m, block_n in TILES:
        if block_m > 32 and block_m >= 2 * longest:
            continue
        needed = 2 * (block_m * query + block_n * keys + block_m * block_n)
        if needed > limits.shared_memory:
            continue
        extra = 0 if limits.sm in OPERANDS_IN_SHARED_MEMORY else 1
        stages = max(1, min(3, extra + 1 + (limits.shared_memory - needed - slack) // (2 * block_n * keys)))
        return PrefillTile(block_m, block_n, 8 if block_m == 128 or v_dim > 128 else 4, stages)
    raise PlanError(
        f"prefill of head widths {qk_dim}, {v_dim}: no tile fits in {limits.shared_memory} bytes of shared memory"
    )


def power_below(dim: int) -> int:
    """The largest power of two up to `dim`: 192 is multiplied as 128 + 64, not padded to 256."""
    return 1 << (dim.bit_length() - 1)


def row_width(dim: int) -> int:
    """Columns that the two parts of a Q or K row take."""
    first = power_below(dim)
    return block_width(first) + (block_width(dim - first) if dim > first else 0)


def block_width(dim: int) -> int:
    """What a dim is padded to; 16 is the least that a matrix instruction takes."""
    return max(16, 1 << (dim - 1).bit_length())
