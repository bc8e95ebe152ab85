"""`FusedStep`: the fixed buffers of one bucket of decode rows, and the matrix product that fused layers share.

Made by `models.fused_decoder`, once a bucket; read by `layers.fused_attention` and `layers.fused_mlp`. Nothing is
allocated while a step runs, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pellucid.attention.base import AttentionBackend, AttentionMetadata
from pellucid.kernels.device import DeviceLimits
from pellucid.kvcache.pool import KVPool
from pellucid.layers.linear import Linear
from pellucid.layers.step_tiles import Projection
from pellucid.quantization.base import HeadwiseKernel

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.kernels.triton.rows_linear import RowsTile
    from pellucid.layers.step_tiles import Tiles

    Scratch = Callable[..., torch.Tensor]

T = TypeVar("T")

FEW_ROWS = 16
"""Up to here the kernels of a step are ours alone: every weight is read once, and by every row."""

FUSED_NORM_ROWS = 2
"""Up to here, on fp32 lanes, each program norms the rows itself. On tensor cores that takes longer than a launch for
all, also where rows are short (it stays a candidate: `LinearTile.norms`)."""


class CalledAttention:
    """Another backend's attention in a fused step. `metadata` is what its decode is called with, in every layer."""

    def __init__(self, backend: AttentionBackend, page_table: torch.Tensor, sequence: torch.Tensor) -> None:
        self.backend = backend
        self._rows = page_table, sequence
        self.metadata = AttentionMetadata(page_table, sequence, sequence, ())

    def begin(self, context: torch.Tensor) -> None:
        """A step begins: what the backend derives from where rows look, it derives anew."""
        self.metadata = AttentionMetadata(*self._rows, context, ())


@dataclass(frozen=True, slots=True)
class FusedStep:
    """One row per sequence. `x` is the residual stream; `sequence` is a row's line of `page_table`, `context` the keys
    it sees, itself included (0: a padded row).

    `scratch(name, *shape, dtype)` is a buffer kept under that name, shared by all layers: its content lasts until the
    next layer of the kind.
    """

    rows: int
    x: torch.Tensor  # [rows, hidden]
    sequence: torch.Tensor  # int32 [rows]
    context: torch.Tensor  # int32 [rows]
    page_table: torch.Tensor  # int32 [slots, pages]
    pool: KVPool
    scratch: Scratch
    max_context: int
    limits: DeviceLimits
    tiles: Tiles = field(default_factory=dict)
    """Measured ones, of any step; other projections take their default."""
    called: CalledAttention | None = None
    """Instead of our own attention."""

    @property
    def pdl(self) -> bool:
        return self.limits.pdl

    @property
    def few(self) -> bool:
        return self.rows <= FEW_ROWS

    def project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        activation: Literal["silu_mul"] | None = None,
        residual: bool = False,
    ) -> None:
        """out = (or += with `residual`) activation(rms_norm(x) weight^T + bias); x [rows, k], weight [n, k]."""
        import torch

        from pellucid.kernels.triton.linear import LinearTile, small_linear
        from pellucid.kernels.triton.row_ops import rms_norm
        from pellucid.kernels.triton.rows_linear import parts_size, rows_linear

        n, k = weight.shape
        pair = activation is not None
        tile = self.tile(Projection(n, k, pair).op, lambda: projection_tile(n, k, self.rows, pair, self.limits))
        inside = isinstance(tile, LinearTile) and (tile.norms or self.rows <= FUSED_NORM_ROWS)
        if norm is not None and not inside:
            normed = self.scratch("normed", self.rows, k)
            rms_norm(x, norm, eps, normed, pdl=self.pdl)
            x, norm = normed, None
        if isinstance(tile, LinearTile):
            small_linear(
                x, weight, out, norm=norm, eps=eps, bias=bias, activation=activation, residual=residual, pdl=self.pdl,
                tile=tile,
            )  # fmt: skip
        elif tile is not None:
            size, counters = parts_size(n, self.rows, tile)
            rows_linear(
                x, weight, out, self.scratch("tile_parts", size, dtype=torch.float32),
                self.scratch("tile_arrived", counters, dtype=torch.int32), tile, bias=bias, activation=activation,
                residual=residual, pdl=self.pdl,
            )  # fmt: skip
        else:
            self._library_project(x, weight, out, bias, activation, residual)

    def tile(self, op: str, default: Callable[[], T]) -> T:
        """The plan's tile of an op (`layers.step_tiles`) at these rows, where it has one."""
        key = op, self.rows
        return cast(T, self.tiles[key]) if key in self.tiles else default()

    def _library_project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Literal["silu_mul"] | None,
        residual: bool,
    ) -> None:
        import torch

        from pellucid.kernels.triton.row_ops import silu_mul

        if residual:
            out.addmm_(x, weight.t())
        elif activation is None:
            torch.mm(x, weight.t(), out=out)
        else:
            wide = self.scratch("gate_up", self.rows, weight.shape[0])
            torch.mm(x, weight.t(), out=wide)
            silu_mul(wide, out, pdl=self.pdl)
        if bias is not None:
            out.add_(bias)


def projection_tile(
    weight_rows: int, k: int, rows: int, pair: bool, limits: DeviceLimits
) -> LinearTile | RowsTile | None:
    """The kernel and tile of a product of `rows` rows with weight [weight_rows, k]. None: the library's."""
    from pellucid.kernels.triton.linear import linear_tile
    from pellucid.kernels.triton.rows_linear import rows_tile

    tile = rows_tile(weight_rows, k, rows, pair, limits) if rows > FUSED_NORM_ROWS else None
    return linear_tile(weight_rows, k, rows) if tile is None and rows <= FEW_ROWS else tile


def lone_step(rows: int, limits: DeviceLimits, tiles: Tiles, device: torch.device, dtype: torch.dtype) -> FusedStep:
    """What of a step `project` needs, and nothing else: for a projection apart."""
    nothing = cast(Any, None)
    scratch = scratch_space(device, dtype)
    return FusedStep(rows, nothing, nothing, nothing, nothing, nothing, scratch, 1, limits, tiles)


def scratch_space(device: torch.device, dtype: torch.dtype) -> Scratch:
    """Buffers by name, which grow to the largest shape asked for: a first step makes them, a second finds them made."""
    import torch

    kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def scratch(name: str, *shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        count, key = math.prod(shape), (name, dtype)
        if key not in kept or kept[key].numel() < count:
            kept[key] = torch.zeros(count, dtype=dtype, device=device)
        return kept[key][:count].view(shape)

    return scratch


def dense(linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight [rows, columns] and bias of a linear layer that is one dense matrix, as the fused path needs it."""
    (kernel,) = linear.kernels
    return kernel.weight, kernel.bias  # type: ignore[attr-defined]


def per_head(kernel: HeadwiseKernel) -> torch.Tensor:
    """The weight [heads, rows, columns] of a headwise kernel that keeps it dense."""
    weight: torch.Tensor = kernel.weight  # type: ignore[attr-defined]
    return weight
