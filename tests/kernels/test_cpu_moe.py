"""The routed experts, in C++ and in torch, against fp64 one token and one expert at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pellucid.kernels.cpu_library import CpuLibrary
from pellucid.moe.base import MoEKernel
from pellucid.moe.cpu_native import CpuNativeMoE
from pellucid.moe.reference import ReferenceMoE
from pellucid.quantization.weight import StoredWeight

Array = npt.NDArray[np.float64]
Prepare = Callable[[StoredWeight, StoredWeight, StoredWeight], MoEKernel]

EXPERTS, TOP_K = 6, 3


@pytest.fixture(params=["reference", "cpu_native", "cpu_native, three threads"])
def prepare(request: pytest.FixtureRequest, library: CpuLibrary, threaded: CpuLibrary) -> Prepare:
    if request.param == "reference":
        return ReferenceMoE(torch.float32, torch.device("cpu")).prepare
    return CpuNativeMoE(library if request.param == "cpu_native" else threaded).prepare


def _stored(scheme: str, rows: int, columns: int, seed: int) -> tuple[StoredWeight, Array]:
    values = np.random.default_rng(seed).standard_normal((EXPERTS, rows, columns)).astype(np.float32) / columns**0.5
    shape = (EXPERTS, rows, columns)
    if scheme in ("fp32", "bf16", "fp16"):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[scheme]
        data = torch.from_numpy(values).to(dtype)
        return StoredWeight(scheme, shape, data), data.double().numpy()
    import gguf

    kind = gguf.GGMLQuantizationType[scheme.upper()]
    blocks = gguf.quantize(values, kind)
    exact = gguf.dequantize(blocks, kind).reshape(shape).astype(np.float64)
    return StoredWeight(scheme, shape, torch.from_numpy(blocks)), exact


def _routing(tokens: int, seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts per token, one of them never taken, weights of both signs and one zero."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(EXPERTS - 1)[:TOP_K] for _ in range(tokens)])
    weights = rng.standard_normal((tokens, TOP_K)).astype(np.float32)
    weights[0, 0] = 0
    return torch.from_numpy(experts), torch.from_numpy(weights)


def _wanted(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate: Array, up: Array, down: Array
) -> Array:
    rows, out = x.double().numpy(), np.zeros((x.shape[0], x.shape[1]))
    for token, row in enumerate(rows):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            hidden = gate[expert] @ row
            out[token] += weight * (down[expert] @ (hidden / (1 + np.exp(-hidden)) * (up[expert] @ row)))
    return out


@pytest.mark.parametrize("tokens", [1, 2, 23])
@pytest.mark.parametrize(
    ("schemes", "hidden", "inter"),
    [
        (("fp32", "fp32", "fp32"), 90, 37),
        (("bf16", "bf16", "bf16"), 90, 37),
        (("fp16", "fp16", "fp16"), 17, 5),
        (("q8_0", "q8_0", "q8_0"), 96, 64),
        (("q4_0", "q4_0", "q8_0"), 96, 32),
        (("q4_1", "q4_1", "fp16"), 64, 37),
        (("q4_0", "q8_0", "q4_1"), 64, 96),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_experts_are_added_to_the_residual(
    schemes: tuple[str, str, str], hidden: int, inter: int, tokens: int, prepare: Prepare
) -> None:
    gate, up, down = (
        _stored(scheme, rows, columns, seed)
        for seed, (scheme, rows, columns) in enumerate(
            zip(schemes, (inter, inter, hidden), (hidden, hidden, inter), strict=True)
        )
    )
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((tokens, hidden)).astype(np.float32))
    experts, weights = _routing(tokens)
    out = torch.full((tokens, hidden), 0.5)

    prepare(gate[0], up[0], down[0]).add_to(out, x, experts, weights)

    wanted = 0.5 + _wanted(x, experts, weights, gate[1], up[1], down[1])
    np.testing.assert_allclose(out.double().numpy(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", ["fp32", "q4_1"])
def test_a_token_has_the_same_bits_in_every_batch(scheme: str, library: CpuLibrary, threaded: CpuLibrary) -> None:
    weights = [_stored(scheme, *shape, seed)[0] for seed, shape in enumerate(((64, 96), (64, 96), (96, 64)))]
    kernel = CpuNativeMoE(library).prepare(*weights)
    split = CpuNativeMoE(threaded).prepare(*weights)
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((19, 96)).astype(np.float32))
    experts, factors = _routing(19)
    together = torch.zeros(19, 96)
    kernel.add_to(together, x, experts, factors)
    for rows in (slice(0, 1), slice(18, 19), slice(3, 12), slice(0, 19)):
        alone = torch.zeros(len(x[rows]), 96)
        split.add_to(alone, x[rows], experts[rows], factors[rows])
        assert torch.equal(alone, together[rows])
