"""Experts whose kernel depends on the number of tokens: backends that read one form of weights share them.

Made by `runner.backends` where the plan has several backends for the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from pellucid.moe.base import MoEKernel
from pellucid.moe.gate_up import GateUpExperts

if TYPE_CHECKING:
    import torch

    from pellucid.quantization.weight import StoredWeight


class SharingBackend(Protocol):
    """A `MoEBackend` of the form `gate_up.FORM`."""

    dtype: torch.dtype
    device: torch.device

    def kernel(self, weights: GateUpExperts) -> MoEKernel:
        """Its kernel over weights that others read too."""
        ...


class MoEByBucket:
    """Implements `MoEBackend`. `choose`: tokens -> name of the backend."""

    def __init__(self, backends: Mapping[str, SharingBackend], choose: Callable[[int], str]) -> None:
        self._backends, self._choose = backends, choose

    def prepare(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> ExpertsByBucket:
        first = next(iter(self._backends.values()))
        weights = GateUpExperts.of(gate, up, down, first.dtype, first.device)
        kernels = {name: backend.kernel(weights) for name, backend in self._backends.items()}
        return ExpertsByBucket(weights, kernels, self._choose)


class ExpertsByBucket:
    """Implements `MoEKernel`."""

    def __init__(self, weights: GateUpExperts, kernels: Mapping[str, MoEKernel], choose: Callable[[int], str]) -> None:
        self.weights, self._kernels, self._choose = weights, kernels, choose
        self.nbytes = weights.nbytes

    def add_to(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        self._kernels[self._choose(x.shape[0])].add_to(out, x, experts, weights)
