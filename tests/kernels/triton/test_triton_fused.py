"""The MoE backend on the Triton kernels against the reference backend in fp64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is for Linux")

from pellucid.kernels.context import KernelContext  # noqa: E402
from pellucid.moe import triton_fused  # noqa: E402
from pellucid.moe.reference import ReferenceExperts  # noqa: E402
from pellucid.quantization.weight import StoredWeight, scheme_of  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 5, 48, 24, 2


def stored(shape: tuple[int, ...], dtype: torch.dtype) -> StoredWeight:
    return StoredWeight(scheme_of(dtype), shape, (torch.randn(shape) / shape[-1] ** 0.5).to(dtype))


@pytest.fixture
def layer(dtype):
    """gate, up, down as a checkpoint holds them."""
    torch.manual_seed(0)
    wide, narrow = (EXPERTS, INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    return stored(wide, dtype), stored(wide, dtype), stored(narrow, dtype)


def routed(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """experts int64 and weights fp32, both [rows, TOP_K]."""
    return torch.rand(rows, EXPERTS).topk(TOP_K, dim=-1).indices, torch.rand(rows, TOP_K)


def error_of(kernel, layer, rows: int, device, dtype) -> float:
    x, residual = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, HIDDEN).to(dtype)
    experts, weights = routed(rows)
    expected = residual.double()
    ReferenceExperts(*(weight.data.double() for weight in layer)).add_to(expected, x.double(), experts, weights)
    out = residual.to(device)
    kernel.add_to(out, x.to(device), experts.to(device), weights.to(device))
    return float((out.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 3, 37])
def test_the_experts_of_every_token_are_added_to_the_residual(device, dtype, layer, rows):
    kernel = triton_fused.create(KernelContext(device, dtype)).prepare(*layer)
    assert error_of(kernel, layer, rows, device, dtype) < (1e-2 if dtype == torch.bfloat16 else 3e-3)


def test_more_tokens_than_the_workspace_holds_are_taken_in_parts(device, dtype, layer, monkeypatch):
    monkeypatch.setattr(triton_fused, "MAX_PAIRS", 9)
    monkeypatch.setattr(triton_fused, "ROUNDED_ROWS", 3)
    kernel = triton_fused.create(KernelContext(device, dtype)).prepare(*layer)
    assert error_of(kernel, layer, 10, device, dtype) < (1e-2 if dtype == torch.bfloat16 else 3e-3)


def test_weights_are_kept_as_decode_graphs_read_them(device, dtype, layer):
    gate, up, down = layer
    kernel = triton_fused.create(KernelContext(device, dtype)).prepare(*layer)
    assert kernel.weights.gate_up.cpu().equal(torch.cat([gate.data, up.data], dim=1))
    assert kernel.weights.down.cpu().equal(down.data)
    assert kernel.weights.gate_up.is_contiguous() and kernel.weights.down.is_contiguous()
    assert kernel.nbytes == sum(weight.data.nbytes for weight in layer)


def test_weights_of_the_other_16_bit_format_are_converted(device, dtype, layer):
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    kernel = triton_fused.create(KernelContext(device, dtype)).prepare(*(weight.dense(other) for weight in layer))
    assert kernel.weights.down.dtype == dtype
    assert kernel.weights.down.cpu().equal(layer[2].data.to(other).to(dtype))
