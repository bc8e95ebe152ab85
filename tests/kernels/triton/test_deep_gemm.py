"""DeepGEMM's experts, and experts of several backends over one form of weights, against the reference in fp64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is for Linux")

from pellucid.kernels.context import KernelContext  # noqa: E402
from pellucid.moe import deep_gemm, triton_fused  # noqa: E402
from pellucid.moe.by_bucket import MoEByBucket  # noqa: E402
from tests.kernels.triton.test_triton_fused import error_of, layer  # noqa: E402, F401 (a fixture)


def grouped_product(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, expert_of_row: torch.Tensor) -> None:
    """What m_grouped_bf16_gemm_nt_contiguous documents: rows of one expert in whole blocks, -1 left alone."""
    assert a.is_contiguous() and b.is_contiguous() and d.is_contiguous() and expert_of_row.dtype == torch.int32
    assert a.shape[0] == d.shape[0] == expert_of_row.shape[0] and a.shape[0] % deep_gemm.BLOCK == 0
    assert b.shape[1:] == (d.shape[1], a.shape[1])
    # What nobody computes is not to be read.
    d.fill_(float("nan"))
    for begin in range(0, a.shape[0], deep_gemm.BLOCK):
        block = slice(begin, begin + deep_gemm.BLOCK)
        (expert,) = expert_of_row[block].unique().tolist()
        if expert >= 0:
            d[block] = (a[block].float() @ b[expert].float().t()).to(d.dtype)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The card's own where it is installed; else its contract."""
    if torch.cuda.is_available():
        pytest.importorskip("deep_gemm")
    else:
        fake = SimpleNamespace(m_grouped_bf16_gemm_nt_contiguous=grouped_product)
        monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    yield


def tolerance(dtype: torch.dtype) -> float:
    return 1e-2 if dtype == torch.bfloat16 else 3e-3


@pytest.mark.parametrize("rows", [1, 3, 37])
def test_the_experts_of_every_token_are_added_to_the_residual(device, dtype, layer, rows):  # noqa: F811
    kernel = deep_gemm.create(KernelContext(device, dtype)).prepare(*layer)
    assert error_of(kernel, layer, rows, device, dtype) < tolerance(dtype)


def test_more_tokens_than_the_workspace_holds_are_taken_in_parts(device, dtype, layer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(deep_gemm, "MAX_PAIRS", 9)
    kernel = deep_gemm.create(KernelContext(device, dtype)).prepare(*layer)
    assert error_of(kernel, layer, 10, device, dtype) < tolerance(dtype)


def test_backends_of_one_form_share_the_weights_and_each_bucket_has_its_own(device, dtype, layer):  # noqa: F811
    context, taken = KernelContext(device, dtype), []

    def choose(tokens: int) -> str:
        taken.append("deep_gemm" if tokens > 8 else "triton_fused")
        return taken[-1]

    backends = {"deep_gemm": deep_gemm.create(context), "triton_fused": triton_fused.create(context)}
    kernel = MoEByBucket(backends, choose).prepare(*layer)
    for rows in (3, 20):
        assert error_of(kernel, layer, rows, device, dtype) < tolerance(dtype)
    assert taken == ["triton_fused", "deep_gemm"]
    assert {one.weights for one in kernel._kernels.values()} == {kernel.weights}
    assert kernel.nbytes == sum(weight.data.nbytes for weight in layer)
