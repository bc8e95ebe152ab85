"""RMSNorm, rotation, SwiGLU and cache writes in C++ against the same operations in torch and in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pellucid.kernels.cpu_library import CpuLibrary
from pellucid.kernels.torch_ops import RowOps, TorchOps

POISON = -777.0


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.fixture(params=["torch", "cpu_native"])
def ops(request: pytest.FixtureRequest, library: CpuLibrary) -> RowOps:
    return TorchOps() if request.param == "torch" else library


@pytest.mark.parametrize("width", [1, 5, 16, 31, 90, 256])
def test_rms_norm_is_that_of_the_definition(width: int, ops: RowOps) -> None:
    x, weight = _normal(7, width) * 0.01, _normal(width, seed=1)
    for eps in (1e-6, 1e-5):
        wanted = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        torch.testing.assert_close(ops.rms_norm(x, weight, eps).double(), wanted, rtol=2e-6, atol=1e-7)


def test_rms_norm_of_a_slice_leaves_its_surroundings(ops: RowOps) -> None:
    wide, weight = _normal(5, 40), _normal(20, seed=1)
    before, wanted = wide.clone(), ops.rms_norm(wide[:, 6:26].clone(), weight, 1e-6)
    ops.rms_norm(wide[:, 6:26], weight, 1e-6, out=wide[:, 6:26])
    torch.testing.assert_close(wide[:, 6:26], wanted)
    assert torch.equal(wide[:, :6], before[:, :6])
    assert torch.equal(wide[:, 26:], before[:, 26:])


def test_rms_norm_per_head_of_a_wider_row(ops: RowOps) -> None:
    """As q and k norms do: heads side by side, more columns behind them."""
    wide, weight = _normal(5, 3 * 24 + 10), _normal(24, seed=1)
    heads = wide[:, :72].unflatten(-1, (3, 24))
    wanted = torch.stack([ops.rms_norm(heads[:, head].clone(), weight, 1e-6) for head in range(3)], dim=1)
    tail = wide[:, 72:].clone()
    ops.rms_norm(heads, weight, 1e-6, out=heads)
    torch.testing.assert_close(heads, wanted)
    assert torch.equal(wide[:, 72:], tail)


def test_rms_norm_of_zeros_is_zeros(ops: RowOps) -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 33), _normal(33), 1e-6), torch.zeros(2, 33))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_rotation_multiplies_complex_pairs(dim: int, interleaved: bool, ops: RowOps) -> None:
    """x is the end of wider heads, as MLA's rope part is; positions are out of order."""
    wide = _normal(5, 3, dim + 4)
    x = wide[..., 4:]
    before, original = wide[..., :4].clone(), x.double().numpy()
    angles = np.random.default_rng(1).uniform(-3, 3, (50, dim // 2))
    table = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], -1)).float()
    positions = torch.tensor([49, 0, 7, 7, 3])

    ops.rope_(x, table, positions, interleaved)

    turn = np.exp(1j * angles[positions.numpy()])[:, None]
    if interleaved:
        z = (original[..., ::2] + 1j * original[..., 1::2]) * turn
        wanted = np.stack([z.real, z.imag], -1).reshape(original.shape)
    else:
        z = (original[..., : dim // 2] + 1j * original[..., dim // 2 :]) * turn
        wanted = np.concatenate([z.real, z.imag], -1)
    np.testing.assert_allclose(x.double().numpy(), wanted, atol=1e-6)
    assert torch.equal(wide[..., :4], before)


@pytest.mark.parametrize("width", [1, 15, 16, 70])
def test_silu_mul_holds_at_both_ends(width: int, ops: RowOps) -> None:
    gate = torch.linspace(-200, 200, 9 * width).reshape(9, width)
    up = _normal(9, width)
    wanted = gate.double() * gate.double().sigmoid() * up.double()
    found = ops.silu_mul(torch.cat([gate, up], dim=-1))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-30)


def test_cache_writes_go_to_their_slots_and_padding_nowhere(ops: RowOps) -> None:
    cache = torch.full((4, 3, 5), POISON)
    wide = _normal(4, 8)
    x = wide[:, 2:7]
    ops.cache_write(x, torch.tensor([7, -1, 3, 11]), cache)
    rows = cache.view(12, 5)
    for slot, row in ((7, 0), (3, 2), (11, 3)):
        assert torch.equal(rows[slot], x[row])
    untouched = [slot for slot in range(12) if slot not in (7, 3, 11)]
    assert (rows[untouched] == POISON).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_rounded_into_a_cache_of_another_dtype(dtype: torch.dtype, ops: RowOps) -> None:
    """As with `--kv-cache-dtype`: what attention reads later is not what the rows are computed in."""
    cache = torch.full((2, 3, 5), POISON, dtype=dtype)
    x = _normal(2, 8)[:, 2:7]
    ops.cache_write(x, torch.tensor([4, 1]), cache)
    rows = cache.view(6, 5)
    assert torch.equal(rows[[4, 1]], x.to(dtype))
    assert (rows[[0, 2, 3, 5]] == POISON).all()


def test_rows_have_the_same_bits_in_every_batch(library: CpuLibrary, threaded: CpuLibrary) -> None:
    """The wide case is beyond the size from which threads are used."""
    x, weight = _normal(40, 600), _normal(600, seed=1)
    normed, gated = library.rms_norm(x, weight, 1e-6), library.silu_mul(x)
    assert torch.equal(threaded.rms_norm(x, weight, 1e-6), normed)
    assert torch.equal(threaded.silu_mul(x), gated)
    for row in (0, 17, 39):
        assert torch.equal(threaded.rms_norm(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(threaded.silu_mul(x[row : row + 1])[0], gated[row])
