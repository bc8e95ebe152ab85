"""The backends a decoder is built with, chosen by the plan and constructed by `runner.backends`."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.kernels.torch_ops import RowOps
from pellucid.layers.moe import Route, route
from pellucid.moe.base import MoEBackend
from pellucid.quantization.base import LinearBackend


@dataclass(frozen=True, slots=True)
class LayerBackends:
    """What layers are constructed with. Attention comes with each batch, because it may differ by bucket."""

    ops: RowOps
    linear: LinearBackend
    moe: MoEBackend | None
    expands_latent: bool
    """Whether an attention backend of the plan rebuilds K and V from MLA's latent, and needs dense W_UK and W_UV."""
    route: Route = route
    """How experts are chosen from router logits."""
