"""Names of projection tiles, as plans hold them: `projection.6144x4096@8` is `gemv-8x2048-w8`. Used by `fused_step`.

gemv-8x2048-w8-a1024            small_linear in fp32 lanes: weight rows x columns, warps, columns fetched ahead
dot-16x256-w4-p4-s4-a256        small_linear on tensor cores: also parts of the columns, stages
rows-64x128-w4-p2-s8-a128-tma-together      rows_linear
library                         torch's
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pellucid.core import PlanError
from pellucid.selection.plan import ExecutionPlan

if TYPE_CHECKING:
    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.kernels.triton.rows_linear import RowsTile

    Tile = LinearTile | RowsTile | None
    Tiles = Mapping[tuple["Projection", int], Tile]

PREFIX = "projection."
LIBRARY = "library"

_OP = re.compile(r"projection\.(\d+)x(\d+)(\.swiglu)?")
_TILE = re.compile(
    r"(gemv|dot|rows)-(\d+)x(\d+)-w(\d+)(?:-p(\d+))?(?:-s(\d+))?(?:-a(\d+))?(-tma)?(-together)?",
)


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
    from pellucid.kernels.triton.linear import LinearTile

    if tile is None:
        return LIBRARY
    fetched = f"-a{tile.ahead}" if tile.ahead else ""
    if isinstance(tile, LinearTile):
        kind = "dot" if tile.dot else "gemv"
        parts = (f"-p{tile.split}" if tile.split > 1 else "") + (f"-s{tile.stages}" if tile.stages > 1 else "")
        return f"{kind}-{tile.block_n}x{tile.block_k}-w{tile.warps}{parts}{fetched}"
    split = f"-p{tile.split}" if tile.split > 1 else ""
    flags = ("-tma" if tile.tma else "") + ("-together" if tile.together else "")
    return f"rows-{tile.block_n}x{tile.block_k}-w{tile.warps}{split}-s{tile.stages}{fetched}{flags}"


def parse_tile(name: str) -> Tile:
    """Raises PlanError for what `tile_name` did not write."""
    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.kernels.triton.rows_linear import RowsTile

    if name == LIBRARY:
        return None
    found = _TILE.fullmatch(name)
    if found is None:
        raise PlanError(f"{name}: no tile of a projection; one is written as gemv-8x2048-w8, or {LIBRARY}")
    block_n, block_k, warps = (int(found[i]) for i in (2, 3, 4))
    split, stages, ahead = int(found[5] or 1), int(found[6] or 1), int(found[7] or 0)
    if found[1] == "rows":
        return RowsTile(block_n, block_k, split, warps, stages, ahead, bool(found[8]), bool(found[9]))
    return LinearTile(block_n, block_k, warps, found[1] == "dot", split, stages, ahead)


def plan_tiles(plan: ExecutionPlan) -> Tiles:
    """The measured tiles of a plan, by projection and rows of the step; where there is none, the default holds."""
    return {
        (Projection.of(d.op), d.bucket): parse_tile(d.value)
        for d in plan.decisions
        if d.op.startswith(PREFIX) and d.bucket is not None and isinstance(d.value, str)
    }
