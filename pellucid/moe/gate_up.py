"""The form of 16-bit experts that several backends read: [gate | up] in one matrix. Used by them and fused layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pellucid.quantization.weight import StoredWeight

FORM = "gate_up"
"""`BackendTraits.weight_form` of backends whose kernels read `GateUpExperts`."""


@dataclass(frozen=True, slots=True, eq=False)
class GateUpExperts:
    """gate_up [experts, 2 * intermediate, hidden], gate first; down [experts, hidden, intermediate]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(
        cls, gate: StoredWeight, up: StoredWeight, down: StoredWeight, dtype: torch.dtype, device: torch.device
    ) -> GateUpExperts:
        """From the stored experts of a layer: gate, up [experts, intermediate, hidden]; down."""
        import torch

        experts, intermediate, hidden = gate.shape
        gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        down_proj = torch.empty(experts, hidden, intermediate, dtype=dtype, device=device)
        # One expert at a time, so that there is never a second copy of a layer on the device.
        for target, weight in (
            (gate_up[:, :intermediate], gate), (gate_up[:, intermediate:], up), (down_proj, down)
        ):  # fmt: skip
            for expert, matrix in zip(target, weight.matrices(), strict=True):
                expert.copy_(matrix.dequantize(dtype))
        return cls(gate_up, down_proj)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes
