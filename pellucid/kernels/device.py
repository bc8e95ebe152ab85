"""What sizes of tiles and grids depend on, read from a CUDA device, and how values get there. Used by attention, MoE,
the fused layers and the runners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

PDL_SM = frozenset({90, 100, 103, 110, 120, 121})
"""Where a kernel may start before the one ahead of it has ended, and load its weights meanwhile."""

TMA_SM = PDL_SM
"""Where descriptors copy tiles to shared memory."""


class DeviceLimits(NamedTuple):
    """Compute capability (90 for 9.0), multiprocessors, and bytes of shared memory that one block may ask for."""

    sm: int
    sm_count: int
    shared_memory: int

    @property
    def pdl(self) -> bool:
        """Whether launches may overlap (programmatic dependent launch)."""
        return self.sm in PDL_SM

    @property
    def tma(self) -> bool:
        """Whether tiles can be copied by descriptors (tensor memory accelerator)."""
        return self.sm in TMA_SM


def device_limits(device: torch.device) -> DeviceLimits:
    """Read from the driver."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        10 * found.major + found.minor, found.multi_processor_count, found.shared_memory_per_block_optin
    )


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of (nested) numbers. The host waits for nothing: from memory that is not pinned it would wait for all
    that it has launched before."""
    import torch

    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
