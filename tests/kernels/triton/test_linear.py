"""`small_linear` against fp64: outputs start as NaN, and NaN lies between the rows that it is given."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is for Linux")

from pellucid.kernels.triton.linear import LinearTile, linear_tile, small_linear  # noqa: E402

TILES = {
    "fma": LinearTile(block_n=4, block_k=128, warps=1),
    "dot": LinearTile(block_n=16, block_k=64, warps=4, dot=True, split=4, stages=2),
}


@pytest.fixture
def normal(device: torch.device, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """Makes random tensors in the compute dtype, other ones at each call."""
    generator = torch.Generator().manual_seed(20)

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    return make


def strided(x: torch.Tensor, gap: int = 8) -> torch.Tensor:
    """The same rows, NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def expected(x, weight, norm=None, eps=0.0, bias=None, activation=None):  # type: ignore[no-untyped-def]
    x, weight = x.double().cpu(), weight.double().cpu()
    if norm is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.double().cpu()
    y = x @ weight.T
    if bias is not None:
        y = y + bias.double().cpu()
    if activation == "silu_mul":
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y


def assert_close(out: torch.Tensor, reference: torch.Tensor) -> None:
    error = (out.double().cpu() - reference).norm() / reference.norm()
    assert error < (1e-2 if out.dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 8, 128), (1, 6, 384), (2, 9, 136), (3, 4, 256), (4, 5, 320)])
def test_a_product_is_that_of_the_definition_at_odd_sizes(kind, rows, n, k, normal) -> None:  # type: ignore[no-untyped-def]
    x, weight = strided(normal(rows, k)), normal(n, k)
    out = strided(torch.full((rows, n), float("nan"), dtype=x.dtype, device=x.device))
    small_linear(x, weight, out, tile=TILES[kind])
    assert_close(out, expected(x, weight))
    assert out._base[:, n:].isnan().all()


@pytest.mark.parametrize("rows", [5, 8, 11, 16])
def test_more_rows_than_lanes_serve_go_through_the_tensor_cores(rows: int, normal) -> None:  # type: ignore[no-untyped-def]
    x, weight, norm = strided(normal(rows, 192)), normal(40, 192), normal(192)
    out = torch.full((rows, 40), float("nan"), dtype=x.dtype, device=x.device)
    small_linear(x, weight, out, norm=norm, eps=1e-6)
    assert linear_tile(40, 192, rows).dot
    assert_close(out, expected(x, weight, norm, 1e-6))


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("k", [128, 328])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 60.0])
def test_the_input_is_normalized_whatever_its_size(kind: str, k: int, scale: float, normal) -> None:  # type: ignore[no-untyped-def]
    x, weight, norm = normal(3, k, scale=scale), normal(16, k), normal(k)
    out = torch.full((3, 16), float("nan"), dtype=x.dtype, device=x.device)
    small_linear(x, weight, out, norm=norm, eps=1e-5, tile=TILES[kind])
    assert_close(out, expected(x, weight, norm, 1e-5))


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("bias", [True, False])
def test_gate_and_up_rows_meet_in_one_output(kind: str, bias: bool, normal) -> None:  # type: ignore[no-untyped-def]
    x, weight, norm = normal(3, 200), normal(2 * 11, 200, scale=0.1), normal(200)
    offsets = normal(22) if bias else None
    out = torch.full((3, 11), float("nan"), dtype=x.dtype, device=x.device)
    small_linear(x, weight, out, norm=norm, eps=1e-6, bias=offsets, activation="silu_mul", tile=TILES[kind])
    assert_close(out, expected(x, weight, norm, 1e-6, offsets, "silu_mul"))


@pytest.mark.parametrize("kind", TILES)
def test_the_residual_is_added_before_the_one_rounding(kind: str, normal) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, before = normal(2, 256), normal(7, 256, scale=0.05), normal(7), normal(2, 7)
    out = strided(before)
    small_linear(x, weight, out, bias=bias, residual=True, tile=TILES[kind])
    reference = expected(x, weight, bias=bias) + before.double().cpu()
    assert_close(out, reference)
    # One rounding: at most half a unit in the last place from the exact sum (and a little for fp32).
    assert ((out.double().cpu() - reference).abs() <= reference.abs() * torch.finfo(out.dtype).eps * 0.51 + 1e-5).all()


def test_rows_beside_one_another_do_not_mix(normal) -> None:  # type: ignore[no-untyped-def]
    """A row of NaN stays one row of NaN."""
    for rows, tile in ((3, TILES["fma"]), (9, TILES["dot"])):
        x, weight = normal(rows, 128), normal(16, 128)
        x[1] = float("nan")
        out = torch.zeros(rows, 16, dtype=x.dtype, device=x.device)
        small_linear(x, weight, out, tile=tile)
        assert out.isnan().any(1).tolist() == [row == 1 for row in range(rows)]


def test_more_than_16_rows_are_refused(normal) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="up to 16 rows, got 17"):
        small_linear(normal(17, 64), normal(8, 64), normal(17, 8))


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
@pytest.mark.parametrize("k", [64, 96, 1024, 1408, 1536, 2048, 2816, 7168, 10944, 14336])
@pytest.mark.parametrize("weight_rows", [16, 576, 2048, 3648, 28672, 151936])
def test_default_tiles_are_powers_of_two_that_fit_every_card(weight_rows: int, k: int, rows: int) -> None:
    tile = linear_tile(weight_rows, k, rows)
    assert tile.dot == (rows > 2)
    for size in (tile.block_n, tile.block_k, tile.warps, tile.split):
        assert size & (size - 1) == 0
    assert tile.block_k // tile.split >= 16
    # 99 KB, the least of all cards, holds the pipeline of weights and input, whose rows are padded to 8 or 16.
    padded = 8 if rows <= 8 else 16
    assert tile.stages * (tile.block_n + padded) * tile.block_k * 2 <= 99 * 1024
