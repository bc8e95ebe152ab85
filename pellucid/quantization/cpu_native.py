"""Linear layers by our own C++ kernels for the CPU, compiled on the user's machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.quantization.weight import READABLE_SCHEMES
from pellucid.traits.backend import ANY, BackendTraits, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.context import KernelContext
    from pellucid.kernels.cpu_library import CpuLibrary, PackedWeight
    from pellucid.quantization.weight import StoredWeight

TRAITS = BackendTraits(
    name="cpu_native",
    op="linear",
    summary="own C++ kernels that read the stored format",
    priority=Priority.OWN_NATIVE,
    source="this file",
    built_in=True,
    devices=frozenset({"cpu"}),
    compute_dtypes=frozenset({"fp32"}),
    weight_schemes=READABLE_SCHEMES,
    weight_groups=ANY,
    needs_compiler="c++",
    batch_invariant=True,
)


def create(context: KernelContext) -> CpuNativeLinear:
    return CpuNativeLinear(context.cpu_library)


PACKABLE = frozenset({"fp32", "bf16", "fp16", "q4_0", "q4_1", "q8_0"})
"""Schemes whose bits are kept in memory; any other is dequantized to fp32 at load, then packed as that."""


class CpuNativeLinear:
    """Packed weights, fp32 activations, exact products. Implements `LinearBackend`."""

    def __init__(self, library: CpuLibrary) -> None:
        import torch

        self.library = library
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def prepare(self, weight: StoredWeight, bias: torch.Tensor | None = None) -> PackedKernel:
        return PackedKernel(self.library, self.pack(weight), None if bias is None else bias.float().contiguous())

    def pack(self, weight: StoredWeight) -> PackedWeight:
        """The weight (or the stack of experts) in the kernels' tile layout."""
        if weight.scheme in PACKABLE:
            return self.library.pack(weight.scheme, weight.data, weight.columns)
        return self.library.pack("fp32", weight.dequantize(self.dtype), weight.columns)

    def prepare_headwise(self, weight: torch.Tensor) -> PackedHeadwise:
        return PackedHeadwise(self.library, self.library.pack("fp32", weight.float(), weight.shape[-1]))


class PackedKernel:
    """One packed matrix and its bias."""

    def __init__(self, library: CpuLibrary, weight: PackedWeight, bias: torch.Tensor | None) -> None:
        self.library, self.weight, self.bias = library, weight, bias
        self.rows, self.columns, self.nbytes = weight.rows, weight.columns, weight.nbytes

    def into(self, x: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        self.library.linear(x, self.weight, self.bias, out, accumulate)


class PackedHeadwise:
    """One packed matrix per head."""

    def __init__(self, library: CpuLibrary, weight: PackedWeight) -> None:
        self.library, self.weight = library, weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], x.shape[1], self.weight.rows)
        self.library.batched_linear(x, self.weight, out)
        return out
