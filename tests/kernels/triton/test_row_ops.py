"""`TritonOps` against `TorchOps` in fp64, on slices as layers cut them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is for Linux")

from pellucid.kernels.torch_ops import TorchOps  # noqa: E402
from pellucid.kernels.triton.row_ops import TritonOps, rms_norm, silu_mul  # noqa: E402


def near(out: torch.Tensor, reference: torch.Tensor) -> bool:
    error = (out.double().cpu() - reference).norm() / reference.norm()
    return bool(error < (1e-2 if out.dtype == torch.bfloat16 else 2e-3))


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double().cpu()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double().cpu()


@pytest.mark.parametrize("width", [1, 24, 128, 1500])
def test_rms_norm_is_that_of_the_definition(width: int, device: torch.device, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, width).to(device, dtype), torch.randn(width).to(device, dtype)
    out = torch.full((3, width), float("nan"), dtype=dtype, device=device)
    rms_norm(x, weight, 1e-5, out)
    assert near(out, exact_norm(x, weight, 1e-5))
    assert torch.equal(TritonOps().rms_norm(x, weight, 1e-5), out)


def test_rms_norm_in_place_leaves_what_lies_beside_a_slice(device: torch.device, dtype: torch.dtype) -> None:
    wide, weight = torch.randn(5, 60).to(device, dtype), torch.randn(33).to(device, dtype)
    before = wide.clone()
    TritonOps().rms_norm(wide[:, 7:40], weight, 1e-6, out=wide[:, 7:40])
    assert near(wide[:, 7:40], exact_norm(before[:, 7:40], weight, 1e-6))
    assert torch.equal(wide[:, :7], before[:, :7])
    assert torch.equal(wide[:, 40:], before[:, 40:])


def test_rms_norm_per_head_of_a_wider_row(device: torch.device, dtype: torch.dtype) -> None:
    wide, weight = torch.randn(20, 3 * 24 + 10).to(device, dtype), torch.randn(24).to(device, dtype)
    before, heads = wide.clone(), wide[:, 10:].unflatten(-1, (3, 24))
    TritonOps().rms_norm(heads, weight, 1e-6, out=heads)
    assert near(heads, exact_norm(before[:, 10:].unflatten(-1, (3, 24)), weight, 1e-6))
    assert torch.equal(wide[:, :10], before[:, :10])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 6), (5, 64)])
def test_rotation_is_that_of_torch_on_the_end_of_each_head(
    heads: int, dim: int, interleaved: bool, device: torch.device, dtype: torch.dtype
) -> None:
    wide = torch.randn(4, heads, dim + 5).to(device, dtype)
    before, table = wide.clone(), torch.randn(50, dim, device=device)
    positions = torch.tensor([49, 0, 7, 7], device=device)
    TritonOps().rope_(wide[..., 5:], table, positions, interleaved)
    reference = before[..., 5:].double().cpu()
    TorchOps().rope_(reference, table.double().cpu(), positions.cpu(), interleaved)
    assert near(wide[..., 5:], reference)
    assert torch.equal(wide[..., :5], before[..., :5])


@pytest.mark.parametrize("width", [1, 70, 1100])
def test_rows_go_to_their_slots_and_padding_nowhere(width: int, device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(4, width + 3).to(device, dtype)[:, 3:]
    cache = torch.full((2, 3, width), -7.0, dtype=dtype, device=device)
    TritonOps().cache_write(x, torch.tensor([4, -1, 0, 5], device=device), cache)
    rows = cache.view(-1, width)
    assert torch.equal(rows[[4, 0, 5]], x[[0, 2, 3]])
    assert (rows[[1, 2, 3]] == -7).all()


@pytest.mark.parametrize(("rows", "n"), [(1, 5), (3, 1030)])
def test_silu_mul_takes_gate_and_up_from_the_two_halves(
    rows: int, n: int, device: torch.device, dtype: torch.dtype
) -> None:
    wide = torch.randn(rows, 2 * n + 6).to(device, dtype)
    gate_up, out = wide[:, : 2 * n], torch.full((rows, n + 2), float("nan"), dtype=dtype, device=device)
    silu_mul(gate_up, out[:, :n])
    gate, up = gate_up.double().cpu().chunk(2, dim=-1)
    assert near(out[:, :n], torch.nn.functional.silu(gate) * up)
    assert out[:, n:].isnan().all()
    assert torch.equal(TritonOps().silu_mul(gate_up), out[:, :n])


def test_no_rows_are_no_work(device: torch.device, dtype: torch.dtype) -> None:
    """A chunk may have no row of some kind."""
    ops, empty = TritonOps(), torch.empty(0, 8, dtype=dtype, device=device)
    assert ops.rms_norm(empty, torch.ones(8, dtype=dtype, device=device), 1e-6).shape == (0, 8)
    assert ops.silu_mul(empty).shape == (0, 4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_cache_row_of_mla_is_normed_rotated_and_written_and_the_queries_are_rotated(
    interleaved: bool, device: torch.device, dtype: torch.dtype
) -> None:
    tokens, heads, nope, rank, rope = 5, 3, 7, 33, 6
    q, wide = torch.randn(tokens, heads, nope + rope), torch.randn(tokens, 4 + rank + rope)
    norm, table = torch.randn(rank), torch.randn(50, rope)
    positions, slots = torch.tensor([49, 0, 7, 7, 1]), torch.tensor([6, 2, -1, 0, 5])
    cache = torch.full((4, 2, rank + rope), float("nan"))
    q, wide, norm, cache = (tensor.to(device, dtype) for tensor in (q, wide, norm, cache))
    exact = [tensor.double().cpu() for tensor in (q, wide, norm, table, cache)]
    places = positions.to(device), interleaved, slots.to(device)
    TritonOps().latent_write(q[..., nope:], wide[:, 4:], norm, 1e-6, table.to(device), *places, cache)
    exact_q, exact_wide, exact_norm, exact_table, exact_cache = exact
    TorchOps().latent_write(
        exact_q[..., nope:],
        exact_wide[:, 4:],
        exact_norm,
        1e-6,
        exact_table,
        positions,
        interleaved,
        slots,
        exact_cache,
    )
    assert near(q, exact_q)
    written = cache.view(-1, rank + rope)
    assert near(written[[6, 2, 0, 5]], exact_cache.view(-1, rank + rope)[[6, 2, 0, 5]])
    assert written[[1, 3, 4, 7]].isnan().all()
