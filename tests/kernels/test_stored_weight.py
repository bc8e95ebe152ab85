"""`StoredWeight` in every GGUF format: the check for NaN and infinity, and stacks of experts packed one by one."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pellucid.kernels.cpu_library import CpuLibrary
from pellucid.quantization.cpu_native import CpuNativeLinear
from pellucid.quantization.weight import DENSE_SCHEMES, FP16_PARTS, READABLE_SCHEMES, StoredWeight

GGUF_SCHEMES = sorted(READABLE_SCHEMES - DENSE_SCHEMES)


def _blocks(scheme: str, *shape: int, seed: int = 0) -> StoredWeight:
    """Random codes under random scales, of values around 1."""
    elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[scheme.upper()]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, block_bytes), dtype=np.uint8)
    _, begin, end = FP16_PARTS[scheme]
    scales = rng.uniform(0.001, 0.002, (*data.shape[:-1], (end - begin) // 2)).astype(np.float16)
    data[..., begin:end] = scales.view(np.uint8)
    return StoredWeight(scheme, shape, torch.from_numpy(data.reshape(*shape[:-1], -1)))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("scheme", GGUF_SCHEMES)
def test_one_bad_scale_or_minimum_is_found_in_every_format(scheme: str) -> None:
    """Exactly when the dequantized values are not finite."""
    block_bytes, begin, end = FP16_PARTS[scheme]
    for bits in (0x7C00, 0xFC00, 0x7E00):
        for at in range(begin, end, 2):
            weight = _blocks(scheme, 3, 512)
            assert weight.is_finite()
            assert weight.dequantize(torch.float32).isfinite().all()
            last = weight.data[-1, -block_bytes:]
            last[at : at + 2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
            assert not weight.is_finite()
            assert not weight.dequantize(torch.float32).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_value_is_found_in_a_dense_matrix(dtype: torch.dtype) -> None:
    scheme = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    data = torch.ones(5, 7, dtype=dtype)
    assert StoredWeight(scheme, (5, 7), data).is_finite()
    data[4, 6] = float("nan")
    assert not StoredWeight(scheme, (5, 7), data).is_finite()


@pytest.mark.parametrize("schemes", [("q8_0", "q8_0"), ("q6_k", "q6_k"), ("q4_k", "q8_0"), ("q4_1",), ("q5_k",)])
def test_stacks_packed_one_expert_at_a_time_multiply_as_their_values(
    schemes: tuple[str, ...], library: CpuLibrary
) -> None:
    """Each expert has the rows of every part, whether the parts are stored alike or not."""
    parts = [_blocks(scheme, 3, 20, 256, seed=i) for i, scheme in enumerate(schemes)]
    packed = CpuNativeLinear(library).pack(*parts)
    exact = torch.cat([part.dequantize(torch.float32) for part in parts], dim=1).double()
    assert (packed.data.shape[0], packed.rows, packed.columns) == (3, 20 * len(parts), 256)
    x = torch.from_numpy(np.random.default_rng(9).standard_normal((4, 256)).astype(np.float32))
    for expert in range(3):
        one = type(packed)(
            packed.format, packed.rows, packed.columns, packed.data[expert],
            None if packed.scale is None else packed.scale[expert],
            None if packed.minimum is None else packed.minimum[expert],
        )  # fmt: skip
        out = torch.empty(4, packed.rows)
        library.linear(x, one, None, out, False)
        torch.testing.assert_close(out.double(), x.double() @ exact[expert].T, rtol=1e-5, atol=1e-4)
