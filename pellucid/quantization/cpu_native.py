"""Linear layers by our own C++ kernels for the CPU, compiled on the user's machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.quantization.weight import READABLE_SCHEMES, join_rows
from pellucid.traits.backend import ANY, BackendTraits, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.context import KernelContext
    from pellucid.kernels.cpu_library import CpuLibrary, PackedWeight
    from pellucid.quantization.weight import StoredWeight

PACKABLE = frozenset({"fp32", "bf16", "fp16", "q4_0", "q4_1", "q8_0"})
"""Schemes whose bits are kept in memory; any other is dequantized to fp32 at load, then packed as that."""

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
    keeps_packed=PACKABLE,
    weight_groups=ANY,
    needs_compiler="c++",
    batch_invariant=True,
)


def create(context: KernelContext) -> CpuNativeLinear:
    return CpuNativeLinear(context.cpu_library)


class CpuNativeLinear:
    """Packed weights, fp32 activations, exact products. Implements `LinearBackend`."""

    def __init__(self, library: CpuLibrary) -> None:
        import torch

        self.library = library
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def prepare(self, weight: StoredWeight, bias: torch.Tensor | None = None) -> PackedKernel:
        return PackedKernel(self.library, self.pack(weight), None if bias is None else bias.float().contiguous())

    def pack(self, *parts: StoredWeight) -> PackedWeight:
        """The rows of all parts in the kernels' tile layout; parts are matrices, or stacks of as many experts.

        One expert at a time is put together or dequantized: a layer of them may be large beside the memory.
        """
        schemes = {part.scheme for part in parts}
        # Stored in two formats, or in one that no kernel reads: their values meet in fp32.
        scheme = schemes.pop() if len(schemes) == 1 and schemes <= PACKABLE else "fp32"

        def values(part: StoredWeight) -> torch.Tensor:
            return part.data if part.scheme == scheme else part.dequantize(self.dtype)

        matrices = (
            values(pieces[0]) if len(pieces) == 1 else join_rows([values(piece) for piece in pieces])
            for pieces in zip(*(part.matrices() for part in parts), strict=True)
        )
        rows = sum(part.rows for part in parts)
        return self.library.pack_each(scheme, matrices, parts[0].count, rows, parts[0].columns)

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
