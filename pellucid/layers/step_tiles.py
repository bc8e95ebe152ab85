"""Which kernel and tile each launch of a fused step takes, as plans hold it. Used by `fused_step` and the fused layers.

projection.6144x4096@8 = dot-16x256-w4-p4     a dense weight [6144, 4096] at 8 rows; `.swiglu`: [gate | up]
experts.up@8, experts.down@8                  the chosen experts of few rows
experts.grouped@64                            experts of more rows, in blocks of pairs
lm_head@8                                     the head, with the best token of each part
mla.decode@8, gqa.decode@8                    our own attention

gemv-8x2048-w8-a1024            small_linear in fp32 lanes: weight rows x columns, warps, columns fetched ahead
dot-16x256-w4-p4-s4-a256        small_linear on tensor cores: also parts of the columns, stages
rows-64x128-w4-p2-s8-a128-tma-together      rows_linear
library                         torch's
experts-32x128-w4-s3            moe_small
grouped-64-64x64-gall-w4-s3-128x64-gall-w4-s3       moe_grouped: pairs a block, then up and down
mla-16x64-k64-w8-s3             mla_decode: heads x keys, keys that a split is a multiple of
gqa-64-w4-s2                    gqa_attend: keys
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pellucid.core import PlanError
from pellucid.selection.evidence import is_tile_op
from pellucid.selection.plan import ExecutionPlan

if TYPE_CHECKING:
    from pellucid.kernels.triton import gqa_decode, mla_tiles
    from pellucid.kernels.triton.few_rows import SmallTile
    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.kernels.triton.moe_grouped import GroupedTile, GroupedTiles
    from pellucid.kernels.triton.rows_linear import RowsTile

    Tile = LinearTile | RowsTile | SmallTile | GroupedTiles | mla_tiles.DecodeTile | gqa_decode.DecodeTile | None
    Tiles = Mapping[tuple[str, int], Tile]
    """By op and rows of the step."""

PREFIX = "projection."
EXPERTS_UP, EXPERTS_DOWN, EXPERTS_GROUPED = "experts.up", "experts.down", "experts.grouped"
LM_HEAD = "lm_head"
MLA_DECODE, GQA_DECODE = "mla.decode", "gqa.decode"
LIBRARY = "library"

_OP = re.compile(r"projection\.(\d+)x(\d+)(\.swiglu)?")
_LINEAR = re.compile(
    r"(gemv|dot|rows)-(\d+)x(\d+)-w(\d+)(?:-p(\d+))?(?:-s(\d+))?(?:-a(\d+))?(-tma)?(-together)?(-norm)?"
)
_SMALL = re.compile(r"experts-(\d+)x(\d+)-w(\d+)-s(\d+)")
_MLA = re.compile(r"mla-(\d+)x(\d+)-k(\d+)-w(\d+)-s(\d+)")
_GQA = re.compile(r"gqa-(\d+)-w(\d+)-s(\d+)")
_PRODUCT = r"-(\d+)x(\d+)-g(\d+|all)-w(\d+)-s(\d+)"
_GROUPED = re.compile(rf"grouped-(\d+){_PRODUCT}{_PRODUCT}")


class Projection(NamedTuple):
    """A weight [rows, columns]; with `pair` it is [gate | up] and its outputs meet in SwiGLU."""

    rows: int
    columns: int
    pair: bool = False

    @property
    def op(self) -> str:
        """Its name in a plan: `projection.6144x4096`, or `projection.28672x4096.swiglu`."""
        return f"{PREFIX}{self.rows}x{self.columns}{'.swiglu' if self.pair else ''}"

    @classmethod
    def of(cls, op: str) -> Projection:
        """The inverse of `op`. Raises PlanError."""
        found = _OP.fullmatch(op)
        if found is None:
            raise PlanError(f"{op}: a projection is written as projection.6144x4096")
        return cls(int(found[1]), int(found[2]), found[3] is not None)


def tile_name(tile: Tile) -> str:
    """A tile in one word; `parse_tile` gives back an equal one."""
    from pellucid.kernels.triton import gqa_decode, mla_tiles
    from pellucid.kernels.triton.few_rows import SmallTile
    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.kernels.triton.moe_grouped import GroupedTiles

    if tile is None:
        return LIBRARY
    if isinstance(tile, SmallTile):
        return f"experts-{tile.block_n}x{tile.block_k}-w{tile.warps}-s{tile.stages}"
    if isinstance(tile, GroupedTiles):
        return f"grouped-{tile.block_m}{_product_name(tile.up)}{_product_name(tile.down)}"
    if isinstance(tile, mla_tiles.DecodeTile):
        return f"mla-{tile.block_h}x{tile.block_n}-k{tile.split_keys}-w{tile.warps}-s{tile.stages}"
    if isinstance(tile, gqa_decode.DecodeTile):
        return f"gqa-{tile.block_n}-w{tile.num_warps}-s{tile.num_stages}"
    fetched = f"-a{tile.ahead}" if tile.ahead else ""
    if isinstance(tile, LinearTile):
        kind = "dot" if tile.dot else "gemv"
        parts = (f"-p{tile.split}" if tile.split > 1 else "") + (f"-s{tile.stages}" if tile.stages > 1 else "")
        normed = "-norm" if tile.norms else ""
        return f"{kind}-{tile.block_n}x{tile.block_k}-w{tile.warps}{parts}{fetched}{normed}"
    split = f"-p{tile.split}" if tile.split > 1 else ""
    flags = ("-tma" if tile.tma else "") + ("-together" if tile.together else "")
    return f"rows-{tile.block_n}x{tile.block_k}-w{tile.warps}{split}-s{tile.stages}{fetched}{flags}"


def parse_tile(name: str) -> Tile:
    """Raises PlanError for what `tile_name` did not write."""
    from pellucid.kernels.triton import gqa_decode, mla_tiles
    from pellucid.kernels.triton.few_rows import SmallTile
    from pellucid.kernels.triton.moe_grouped import GroupedTiles

    if name == LIBRARY:
        return None
    # What one kind has, the other may not: its name would say so.
    if (found := _LINEAR.fullmatch(name)) and tile_name(linear := _linear(found)) == name:
        return linear
    if found := _SMALL.fullmatch(name):
        return SmallTile(*map(int, found.groups()))
    if found := _MLA.fullmatch(name):
        return mla_tiles.DecodeTile(*map(int, found.groups()))
    if found := _GQA.fullmatch(name):
        return gqa_decode.DecodeTile(*map(int, found.groups()))
    if found := _GROUPED.fullmatch(name):
        block_m, *parts = found.groups()
        return GroupedTiles(int(block_m), _product(parts[:5]), _product(parts[5:]))
    raise PlanError(f"{name}: no tile of a step; one is written as gemv-8x2048-w8, or {LIBRARY}")


def plan_tiles(plan: ExecutionPlan) -> Tiles:
    """The measured tiles of a plan, by op and rows of the step; where there is none, the default holds."""
    return {
        (d.op, d.bucket): parse_tile(d.value)
        for d in plan.decisions
        if is_tile_op(d.op) and d.bucket is not None and isinstance(d.value, str)
    }


def _linear(found: re.Match[str]) -> LinearTile | RowsTile:
    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.kernels.triton.rows_linear import RowsTile

    block_n, block_k, warps = (int(found[i]) for i in (2, 3, 4))
    split, stages, ahead = int(found[5] or 1), int(found[6] or 1), int(found[7] or 0)
    if found[1] == "rows":
        return RowsTile(block_n, block_k, split, warps, stages, ahead, bool(found[8]), bool(found[9]))
    return LinearTile(block_n, block_k, warps, found[1] == "dot", split, stages, ahead, bool(found[10]))


def _product_name(tile: GroupedTile) -> str:
    from pellucid.kernels.triton.moe_grouped import ALL_BLOCKS

    group = "all" if tile.group_m == ALL_BLOCKS else tile.group_m
    return f"-{tile.block_n}x{tile.block_k}-g{group}-w{tile.warps}-s{tile.stages}"


def _product(parts: list[str]) -> GroupedTile:
    from pellucid.kernels.triton.moe_grouped import ALL_BLOCKS, GroupedTile

    block_n, block_k, group, warps, stages = parts
    return GroupedTile(
        int(block_n), int(block_k), ALL_BLOCKS if group == "all" else int(group), int(warps), int(stages)
    )  # fmt: skip
