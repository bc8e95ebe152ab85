"""FlashInfer's fused CUTLASS MoE against the reference in fp64, by the contract that it documents.

Its kernels take nvcc minutes to compile, so its own run is left to the numeric gate of `tune`.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is for Linux")

from pellucid.kernels.context import KernelContext  # noqa: E402
from pellucid.moe import flashinfer_cutlass  # noqa: E402
from tests.kernels.triton.test_triton_fused import error_of, layer  # noqa: E402, F401 (a fixture)


def fused_moe(
    x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    output_dtype: torch.dtype, quant_scales: list[torch.Tensor], *, output: torch.Tensor, **others: Any,
) -> None:  # fmt: skip
    """cutlass_fused_moe of 16-bit weights: `first` holds up before gate, and `output` is overwritten."""
    assert not others and not quant_scales and output.dtype == output_dtype
    assert experts.dtype == torch.int32 and shares.dtype == torch.float32
    assert all(t.is_contiguous() for t in (x, experts, shares, first, second, output))
    output.fill_(float("nan"))
    for token, row in enumerate(x.float()):
        total = torch.zeros(output.shape[1], device=x.device)
        for expert, share in zip(experts[token].tolist(), shares[token].tolist(), strict=True):
            up, gate = (first[expert].float() @ row).chunk(2)
            total += share * (second[expert].float() @ (torch.nn.functional.silu(gate) * up))
        output[token] = total.to(output_dtype)


@pytest.mark.parametrize("rows", [1, 37])
def test_the_experts_of_every_token_are_added_to_the_residual(device, dtype, layer, rows, monkeypatch):  # noqa: F811
    library = SimpleNamespace(cutlass_fused_moe=fused_moe)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(fused_moe=library))
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", library)
    kernel = flashinfer_cutlass.create(KernelContext(device, dtype)).prepare(*layer)
    assert error_of(kernel, layer, rows, device, dtype) < (1e-2 if dtype == torch.bfloat16 else 3e-3)
    assert kernel.nbytes == sum(weight.data.nbytes for weight in layer)
