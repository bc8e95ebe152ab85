"""Where backends are constructed: device, dtype, and libraries that are built once. Made by `runner.backends`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.cpu_library import CpuLibrary


@dataclass(frozen=True)
class KernelContext:
    """Passed to the `create` function of every backend module."""

    device: torch.device
    dtype: torch.dtype
    threads: int | None = None

    @cached_property
    def cpu_library(self) -> CpuLibrary:
        """The C++ CPU kernels, built on first use. Raises PellucidError without a working compiler."""
        from pellucid.kernels.cpu_library import CpuLibrary

        return CpuLibrary(self.threads)
