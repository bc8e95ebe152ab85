"""The C++ linear kernels on odd sizes, strides and every stored format, against fp64 products."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pellucid.kernels.cpu_library import CpuLibrary, PackedWeight

Array = npt.NDArray[np.float64]

DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZED = ("q4_0", "q4_1", "q8_0")
ROWS = (1, 15, 16, 17, 50, 131)
POISON = -777.0


def _weight(scheme: str, rows: int, columns: int, library: CpuLibrary) -> tuple[PackedWeight, Array]:
    """A random matrix packed by the library, and its exact stored values."""
    rng = np.random.default_rng([rows, columns])
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    if scheme in DENSE:
        stored = torch.from_numpy(values).to(DENSE[scheme])
        return library.pack(scheme, stored, columns), stored.double().numpy()
    import gguf

    kind = gguf.GGMLQuantizationType[scheme.upper()]
    blocks = gguf.quantize(values, kind)
    exact = gguf.dequantize(blocks, kind).reshape(rows, columns).astype(np.float64)
    return library.pack(scheme, torch.from_numpy(blocks), columns), exact


def _x(tokens: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(tokens).standard_normal((tokens, columns)).astype(np.float32))


def _run(library: CpuLibrary, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.rows), POISON)
    library.linear(x, weight, None, out, False)
    return out


def _assert_close(found: torch.Tensor, wanted: Array, x: torch.Tensor, exact: Array) -> None:
    """Within fp32 rounding of the sum of magnitudes."""
    bound = x.double().abs().sum(-1, keepdim=True).numpy() * np.abs(exact).max()
    assert (np.abs(found.double().numpy() - wanted) <= 2e-6 * bound + 1e-30).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scheme", [*DENSE, *QUANTIZED])
def test_the_product_is_that_of_the_stored_values(scheme: str, rows: int, library: CpuLibrary) -> None:
    for columns in (32, 96) if scheme in QUANTIZED else (1, 7, 90):
        weight, exact = _weight(scheme, rows, columns, library)
        for tokens in (1, 2, 5, 17):
            x = _x(tokens, columns)
            _assert_close(_run(library, x, weight), x.double().numpy() @ exact.T, x, exact)


@pytest.mark.parametrize("scheme", [*DENSE, *QUANTIZED])
def test_a_row_has_the_same_bits_in_every_batch_and_for_every_thread_count(
    scheme: str, library: CpuLibrary, threaded: CpuLibrary
) -> None:
    """Batches of 1 to 17 take every path of row and tile blocking."""
    weight, _ = _weight(scheme, 131, 96, library)
    x = _x(17, 96)
    alone = torch.cat([_run(library, x[row : row + 1], weight) for row in range(17)])
    for tokens in range(1, 18):
        assert torch.equal(_run(library, x[:tokens], weight), alone[:tokens])
        assert torch.equal(_run(threaded, x[17 - tokens :], weight), alone[17 - tokens :])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scheme", ["fp32", "q4_1"])
def test_strided_rows_bias_and_accumulation(scheme: str, rows: int, library: CpuLibrary) -> None:
    """x and the output are slices of wider rows; what lies beside the output stays."""
    weight, exact = _weight(scheme, rows, 64, library)
    wide_x, wide = _x(6, 70), torch.full((6, rows + 5), POISON)
    x, out = wide_x[:, 3:67], wide[:, 2 : rows + 2]
    bias = torch.from_numpy(np.random.default_rng(0).standard_normal(rows).astype(np.float32))
    wanted = x.double().numpy() @ exact.T + bias.double().numpy()

    library.linear(x, weight, bias, out, False)
    _assert_close(out, wanted, x, exact)
    library.linear(x, weight, bias, out, True)
    _assert_close(out, 2 * wanted, 2 * x, exact)

    assert (wide[:, :2] == POISON).all()
    assert (wide[:, rows + 2 :] == POISON).all()


@pytest.mark.parametrize("scheme", ["fp16", "bf16"])
def test_every_finite_16_bit_pattern_is_read_exactly(scheme: str, library: CpuLibrary) -> None:
    """Subnormals included."""
    bits = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16))
    values = bits.view(DENSE[scheme])
    values = values[values.isfinite()].unsqueeze(1)
    weight = library.pack(scheme, values, 1)
    assert torch.equal(_run(library, torch.ones(1, 1), weight)[0], values[:, 0].float())


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_quantized_code_is_read_exactly(scheme: str, library: CpuLibrary) -> None:
    """One column at a time, with scales that are powers of two and products that are exact."""
    import gguf

    rng = np.random.default_rng(5)
    rows, columns = 48, 64
    header = {"q4_0": 1, "q4_1": 2, "q8_0": 1}[scheme]
    scales = (2.0 ** rng.integers(-6, 6, (rows, columns // 32, header))).astype(np.float16)
    codes = rng.integers(0, 256, (rows, columns // 32, 32 if scheme == "q8_0" else 16), dtype=np.uint8)
    blocks = np.concatenate([scales.view(np.uint8), codes], axis=-1).reshape(rows, -1)
    exact = gguf.dequantize(blocks, gguf.GGMLQuantizationType[scheme.upper()]).reshape(rows, columns)
    weight = library.pack(scheme, torch.from_numpy(blocks), columns)
    assert torch.equal(_run(library, torch.eye(columns), weight).T, torch.from_numpy(exact))


@pytest.mark.parametrize("rows", [1, 16, 25])
def test_one_matrix_per_head(rows: int, library: CpuLibrary, threaded: CpuLibrary) -> None:
    heads, columns = 3, 20
    rng = np.random.default_rng(rows)
    dense = torch.from_numpy(rng.standard_normal((heads, rows, columns)).astype(np.float32))
    weight = library.pack("fp32", dense, columns)
    wide = torch.from_numpy(rng.standard_normal((17, heads, columns + 4)).astype(np.float32))
    x = wide[..., 2 : columns + 2]
    out = torch.full((17, heads, rows), POISON)

    library.batched_linear(x, weight, out)

    wanted = torch.einsum("thk,hnk->thn", x.double(), dense.double()).numpy()
    np.testing.assert_allclose(out.double().numpy(), wanted, rtol=0, atol=2e-5)
    for tokens in (1, 4, 9):
        alone = torch.empty(tokens, heads, rows)
        threaded.batched_linear(x[:tokens], weight, alone)
        assert torch.equal(alone, out[:tokens])
