"""Projections of many rows, weights on the tensor cores' M side, against fp64."""

from __future__ import annotations

import pytest
import torch

from pellucid.kernels.device import DeviceLimits
from tests.kernels.triton.attention_cases import check_close, normal

HAS_CARD = torch.cuda.is_available()


@pytest.fixture
def ops():
    from pellucid.kernels.triton import rows_linear

    return rows_linear


CASES = [
    # rows, outputs, columns, pair, residual, bias, tile
    (17, 200, 272, False, True, True, (64, 64, 1, 4, 3)),
    (20, 200, 272, False, True, False, (64, 64, 4, 4, 3)),
    (32, 96, 192, True, False, True, (64, 64, 1, 4, 3)),
    (40, 128, 320, True, False, False, (128, 64, 2, 4, 3)),
    (5, 64, 128, False, False, False, (64, 64, 2, 4, 3)),
]


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "columns", "pair", "residual", "bias", "tile"), CASES)
def test_rows_are_multiplied(ops, device, dtype, rows, outputs, columns, pair, residual, bias, tile, tma):
    """Sizes that no tile divides; rows of x and out may be apart; the workspace holds NaN, and counts from 0 to 0."""
    tile = ops.RowsTile(*tile, tma=tma)
    weight_rows = outputs * (2 if pair else 1)
    x = normal(rows, columns + 8, seed=1, device=device, dtype=dtype)[:, :columns]
    weight = normal(weight_rows, columns, seed=2, device=device, dtype=dtype) / columns**0.5
    offset = normal(weight_rows, seed=3, device=device, dtype=dtype) if bias else None
    wide = normal(rows, outputs + 8, seed=4, device=device, dtype=dtype)
    if not residual:
        wide.fill_(float("nan"))
    out, before = wide[:, :outputs], wide.double().cpu()
    size, counters = ops.parts_size(weight_rows, rows, tile)
    parts = torch.full((size,), float("nan"), device=device)
    arrived = torch.zeros(counters, dtype=torch.int32, device=device)

    def product() -> None:
        ops.rows_linear(
            x, weight, out, parts, arrived, tile, bias=offset, activation="silu_mul" if pair else None,
            residual=residual,
        )  # fmt: skip

    product()
    wanted = x.double().cpu() @ weight.double().cpu().T
    if offset is not None:
        wanted += offset.double().cpu()
    if pair:
        gate, up = wanted.chunk(2, 1)
        wanted = torch.nn.functional.silu(gate) * up
    if residual:
        wanted += before[:, :outputs]
    check_close(out, wanted)
    beside = wide[:, outputs:].double().cpu()
    assert torch.equal(beside, before[:, outputs:]) if residual else beside.isnan().all()
    assert not arrived.any()
    first = out.clone()
    if not residual:
        product()
        assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device: programs of the interpreter do not run together")
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("rows", [32, 128])
def test_programs_of_a_tile_share_the_adding_up(ops, device, dtype, rows, pair):
    """The same bits as when the last one adds up every slice, many times over."""
    weight = normal(4096, 4096, seed=1, device=device, dtype=dtype) / 64
    x = normal(rows, 4096, seed=2, device=device, dtype=dtype)
    outs = []
    for together in (False, True):
        tile = ops.RowsTile(128, 64, 4, 8, 4, together=together)
        size, counters = ops.parts_size(4096, rows, tile)
        parts = torch.full((size,), float("nan"), device=device)
        arrived = torch.zeros(counters, dtype=torch.int32, device=device)
        for _ in range(50 if together else 1):
            out = torch.full((rows, 2048 if pair else 4096), float("nan"), device=device, dtype=dtype)
            ops.rows_linear(x, weight, out, parts, arrived, tile, activation="silu_mul" if pair else None)
            outs.append(out)
        assert not arrived.any()
    assert all(torch.equal(outs[0], one) for one in outs[1:])


def test_tiles_fit_the_device_and_wait_for_each_other_only_where_all_run(ops):
    for sm, shared in ((80, 166_912), (86, 101_376), (90, 232_448), (100, 232_448), (120, 101_376)):
        limits = DeviceLimits(sm, 132, shared)
        shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 3072), (3648, 2048), (28672, 4100))
        for weight_rows, k in shapes:
            for rows in (2, 8, 16, 17, 32, 64, 128):
                for pair in (False, True):
                    tile = ops.rows_tile(weight_rows, k, rows, pair, limits)
                    if tile is None:
                        continue
                    programs = -(-weight_rows // tile.block_n) * tile.split
                    assert not tile.together or programs <= limits.sm_count
                    assert not tile.tma or (sm >= 90 and k % 8 == 0)
                    assert rows > 16 or (tile.tma and tile.stages >= 4)
                    assert ops.tile_bytes(tile, rows) <= shared


def test_more_rows_than_a_tile_holds_are_refused(ops, device, dtype):
    x, weight = (normal(129, 64, seed=1, device=device, dtype=dtype) for _ in range(2))
    with pytest.raises(ValueError, match="128 rows"):
        ops.rows_linear(x, weight, x, x, x, ops.RowsTile(64, 64, 1, 4, 3))
