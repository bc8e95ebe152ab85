"""Linear layers in plain torch, weights dequantized at load, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.quantization.weight import READABLE_SCHEMES
from pellucid.traits.backend import ANY, BackendTraits, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.context import KernelContext
    from pellucid.quantization.weight import StoredWeight

TRAITS = BackendTraits(
    name="reference",
    op="linear",
    summary="torch.nn.functional.linear",
    priority=Priority.REFERENCE,
    source="this file",
    built_in=True,
    fused_decode="inside",
    devices=frozenset({"cpu", "cuda"}),
    sm=ANY,
    compute_dtypes=frozenset({"fp32", "bf16", "fp16"}),
    weight_schemes=READABLE_SCHEMES,
    keeps_packed=frozenset(),
    weight_groups=ANY,
)


def create(context: KernelContext) -> ReferenceLinear:
    return ReferenceLinear(context.dtype, context.device)


class ReferenceLinear:
    """Dense `torch` matmul on weights dequantized at load. Implements `LinearBackend`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def prepare(self, weight: StoredWeight, bias: torch.Tensor | None = None) -> DenseKernel:
        dense = weight.dequantize(self.dtype).to(self.device)
        return DenseKernel(dense, None if bias is None else bias.to(self.device, self.dtype))

    def prepare_headwise(self, weight: torch.Tensor) -> DenseHeadwise:
        # Contiguous: W_UK comes transposed, and the fused kernels read this memory too.
        return DenseHeadwise(weight.to(self.device, self.dtype).contiguous())


class DenseKernel:
    """W [rows, columns] and bias [rows] or None, in the compute dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.rows, self.columns = weight.shape
        self.nbytes = weight.nbytes

    def into(self, x: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        import torch

        if x.is_cuda and self.bias is None:
            # The product goes straight where it is wanted: at thousands of rows a copy or a sum of its own is felt.
            if accumulate:
                out.addmm_(x, self.weight.t())
            else:
                torch.mm(x, self.weight.t(), out=out)
            return
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        if accumulate:
            out += y
        else:
            out.copy_(y)


class DenseHeadwise:
    """W [heads, rows, columns], applied head by head."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.einsum("thk,hnk->thn", x, self.weight)
