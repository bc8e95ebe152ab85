"""Mixture of experts by our own C++ kernels for the CPU, compiled on the user's machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pellucid.quantization.cpu_native import PACKABLE, CpuNativeLinear
from pellucid.quantization.weight import READABLE_SCHEMES
from pellucid.traits.backend import ANY, BackendTraits, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.context import KernelContext
    from pellucid.kernels.cpu_library import CpuLibrary, PackedWeight
    from pellucid.quantization.weight import StoredWeight

TRAITS = BackendTraits(
    name="cpu_native",
    op="moe",
    summary="own C++ kernels that read only the experts taken",
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


def create(context: KernelContext) -> CpuNativeMoE:
    return CpuNativeMoE(context.cpu_library)


class CpuNativeMoE:
    """Packed experts; reads only those that were routed to. Implements `MoEBackend`."""

    def __init__(self, library: CpuLibrary) -> None:
        self.library = library
        self._linear = CpuNativeLinear(library)

    def prepare(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> PackedExperts:
        return PackedExperts(self.library, self._linear.pack(gate, up), self._linear.pack(down))


class PackedExperts:
    """gate_up [experts][2 * intermediate, hidden] and down [experts][hidden, intermediate], packed."""

    def __init__(self, library: CpuLibrary, gate_up: PackedWeight, down: PackedWeight) -> None:
        self.library, self.gate_up, self.down = library, gate_up, down
        self.nbytes = gate_up.nbytes + down.nbytes

    def add_to(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        self.library.moe(x, experts, weights, self.gate_up, self.down, out)
