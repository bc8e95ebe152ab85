"""Kernels built for narrower registers than this machine may have: AVX2's, and the 16 bytes of SSE2 and NEON."""

from __future__ import annotations

import platform
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from pellucid.kernels import cpu_library
from pellucid.kernels.cpu_library import CpuLibrary


def _runs(machine: str) -> bool:
    if platform.machine() != "x86_64":
        return False
    return machine == "x86-64" or {"avx2", "fma", "bmi2", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split())


@pytest.fixture(scope="module", params=["haswell", "x86-64"])
def narrow(request: pytest.FixtureRequest) -> CpuLibrary:
    if not _runs(request.param):
        pytest.skip(f"this machine does not run code for {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        flags = tuple(f"-march={request.param}" if f == "-march=native" else f for f in cpu_library.FLAGS)
        patch.setattr(cpu_library, "FLAGS", flags)
        return CpuLibrary(threads=1)


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "fp16", "q4_0", "q4_1", "q8_0"])
def test_products_are_right_and_have_the_same_bits_in_every_batch(scheme: str, narrow: CpuLibrary) -> None:
    rng = np.random.default_rng(4)
    values = rng.standard_normal((115, 96)).astype(np.float32)
    if scheme.startswith("q"):
        kind = gguf.GGMLQuantizationType[scheme.upper()]
        stored = torch.from_numpy(gguf.quantize(values, kind))
        exact = torch.from_numpy(gguf.dequantize(stored.numpy(), kind)).view(115, 96).double()
    else:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[scheme]
        stored = torch.from_numpy(values).to(dtype)
        exact = stored.double()
    weight = narrow.pack(scheme, stored, 96)
    x = torch.from_numpy(rng.standard_normal((11, 96)).astype(np.float32))
    wanted, first = x.double() @ exact.T, torch.empty(0)
    for tokens in range(11, 0, -1):
        out = torch.empty(tokens, 115)
        narrow.linear(x[:tokens], weight, None, out, False)
        first = out if tokens == 11 else first
        assert torch.equal(out, first[:tokens])
    torch.testing.assert_close(first.double(), wanted, rtol=1e-5, atol=1e-4)


def test_norms_gates_and_attention_agree_with_those_of_this_machine(narrow: CpuLibrary, library: CpuLibrary) -> None:
    rng = np.random.default_rng(5)
    x, weight, cache = (
        torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((6, 74), (74,), (4, 8, 37))
    )
    table, sequence = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([0, 1, 0, 1, 0, 1]).int()
    context = torch.tensor([16, 8, 9, 1, 15, 0]).int()

    def results(one: CpuLibrary) -> list[torch.Tensor]:
        attended = one.paged_attention(
            x.view(6, 2, 37), cache, cache, value_dim=29, value_head_stride=0, num_kv_heads=1,
            page_table=table, sequence=sequence, context=context, scale=0.2,
        )  # fmt: skip
        return [one.rms_norm(x, weight, 1e-6), one.silu_mul(x * 40), attended]

    for found, wanted in zip(results(narrow), results(library), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)
