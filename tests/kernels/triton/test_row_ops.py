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


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (6, 2, 24), (9, 3, 64)])
def test_queries_and_cache_rows_of_gqa_are_normed_rotated_and_written_in_one_launch(
    heads: int, kv_heads: int, dim: int, interleaved: bool, norm: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """As the plain operations one after another do it; padding goes nowhere, and k and v are left as they were."""
    tokens, width = 4, kv_heads * dim
    qkv = torch.randn(tokens, heads * dim + 2 * width).to(device, dtype)
    norms = (torch.rand(dim).to(device, dtype), torch.rand(dim).to(device, dtype)) if norm else None
    table, positions = torch.randn(50, dim, device=device), torch.tensor([49, 0, 7, 7], device=device)
    slots = torch.tensor([4, -1, 0, 5], device=device)
    caches = [torch.full((2, 3, width), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    before = qkv.clone()
    q = TritonOps().gqa_write(qkv, norms, 1e-6, table, positions, interleaved, slots, *caches)

    exact = [torch.full((2, 3, width), float("nan"), dtype=torch.float64) for _ in range(2)]
    wide, plain_norms = before.double().cpu(), None if norms is None else tuple(w.double().cpu() for w in norms)
    where = table.double().cpu(), positions.cpu(), interleaved, slots.cpu()
    exact_q = TorchOps().gqa_write(wide, plain_norms, 1e-6, *where, *exact)
    assert q.shape == (tokens, heads, dim) and near(q, exact_q)
    for cache, wanted in zip(caches, exact, strict=True):
        rows, wanted_rows = cache.view(-1, width), wanted.view(-1, width)
        assert near(rows[[4, 0, 5]], wanted_rows[[4, 0, 5]])
        assert rows[[1, 2, 3]].isnan().all()
    assert torch.equal(qkv[:, heads * dim :], before[:, heads * dim :])
