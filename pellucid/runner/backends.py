"""Constructs the backends that a plan names: module `pellucid.<family>.<backend>`, function `create`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pellucid.attention.base import AttentionBackend
from pellucid.kernels.context import KernelContext
from pellucid.kernels.torch_ops import RowOps, TorchOps
from pellucid.layers.backends import LayerBackends
from pellucid.layers.moe import route
from pellucid.moe.base import MoEBackend
from pellucid.moe.by_bucket import MoEByBucket
from pellucid.quantization.base import HeadwiseKernel, LinearBackend, LinearKernel
from pellucid.quantization.weight import StoredWeight
from pellucid.selection.decode_path import FUSED
from pellucid.selection.plan import ExecutionPlan
from pellucid.traits.backend import Phase

if TYPE_CHECKING:
    import torch

NATIVE = "cpu_native"


@dataclass(frozen=True, slots=True)
class RunnerBackends:
    """What one engine runs on: the layers' backends, and attention per phase and backend name."""

    layers: LayerBackends
    attention: dict[tuple[Phase, str], AttentionBackend]


def create_backends(plan: ExecutionPlan, context: KernelContext) -> RunnerBackends:
    """Every backend the plan uses at some bucket.

    Raises:
        PellucidError: a backend can't be built on this machine.
    """
    attention: dict[tuple[Phase, str], AttentionBackend] = {}
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for phase in phases:
        for name in plan.backends(f"attention.{phase}"):
            attention[phase, name] = _module("attention", name).create(context, phase)
    decided = [d.op for d in plan.decisions]
    # A weight has one prepared form, so the choice at the smallest bucket holds for all of them.
    linear = {op.removeprefix("linear."): plan.backend(op, 1) for op in decided if op.startswith("linear.")}
    moe = _create_moe(plan, context) if "moe" in decided else None
    native = NATIVE in linear.values()
    ops: RowOps = context.cpu_library if native else TorchOps()
    choose = route
    if plan.decode_path == FUSED:
        from pellucid.kernels.triton import routing
        from pellucid.kernels.triton.row_ops import TritonOps

        ops, choose = TritonOps(), routing.route
    layers = LayerBackends(
        ops=ops,
        linear=LinearByScheme(linear, NATIVE if native else "reference", context),
        moe=moe,
        expands_latent=any(backend.expands_latent for backend in attention.values()),
        route=choose,
    )
    return RunnerBackends(layers, attention)


def _create_moe(plan: ExecutionPlan, context: KernelContext) -> MoEBackend:
    names = plan.backends("moe")
    backends: dict[str, Any] = {name: _module("moe", name).create(context) for name in sorted(names)}
    if len(backends) == 1:
        backend: MoEBackend = next(iter(backends.values()))
        return backend
    return MoEByBucket(backends, lambda tokens: plan.backend("moe", tokens))


def create_called(plan: ExecutionPlan, context: KernelContext) -> dict[str, AttentionBackend]:
    """Attention backends, by name, that the plan's fused decode steps call between their own kernels."""
    modules = {name: _module("attention", name) for name in plan.backends("attention.decode")}
    return {name: m.create(context, "decode") for name, m in modules.items() if m.TRAITS.fused_decode == "called"}


def _module(family: str, name: str) -> Any:
    return importlib.import_module(f"pellucid.{family}.{name}")


class LinearByScheme:
    """The plan's linear backend for each stored format. Implements `LinearBackend`."""

    def __init__(self, names: dict[str, str], default: str, context: KernelContext) -> None:
        self.dtype, self.device = context.dtype, context.device
        created: dict[str, LinearBackend] = {
            name: _module("quantization", name).create(context) for name in {*names.values(), default}
        }
        self._by_scheme = {scheme: created[name] for scheme, name in names.items()}
        self._default = created[default]

    def prepare(self, weight: StoredWeight, bias: torch.Tensor | None = None) -> LinearKernel:
        return self._by_scheme.get(weight.scheme, self._default).prepare(weight, bias)

    def prepare_headwise(self, weight: torch.Tensor) -> HeadwiseKernel:
        return self._default.prepare_headwise(weight)
