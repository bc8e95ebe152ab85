"""Weights that no file holds: drawn on the target device from a seed, for a config.json alone.

Used by `models.loading` under `--load-format synthetic`. What they must give, for any depth: finite activations,
tokens that stay apart (so that routing spreads over all experts), and an output that is no repetition.

- Residual branches are damped by 1/sqrt(layers), so the residual's mean square ends near 1.
- Averaging over a context keeps what all tokens share and cancels the rest, so wide attention aligns the tokens layer
  by layer until all of them choose the same experts. Here queries are long, so that a few keys take most of the
  weight, and attention's output is smaller than the MLP's, whose random products keep tokens apart.
- Rows of the embedding, the router and the head have length one: no expert or token is preferred for its row's size.
  The embedding is then small beside the branches, so that a head tied to it does not answer with its own input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.layers.moe import route
from pellucid.models.layout import stacked_shapes
from pellucid.models.weights import SAFETENSORS_SCHEMES, ProgressCallback, Weights
from pellucid.quantization.weight import StoredWeight, dtype_of
from pellucid.selection.args import ITEMSIZE
from pellucid.traits.model import ModelTraits, MoETraits
from pellucid.traits.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

SHARPNESS = 2.5
"""Standard deviation of attention scores: of several hundred keys a few take most of the weight."""

ATTENTION_GAIN = 0.5
"""Attention's output beside the MLP's."""

GATED_MEAN_SQUARE = 0.355
"""Of silu(g) * u for normal g and u."""

BIAS = 0.02
CORRECTION_BIAS = 1e-3

_ONE_LONG = ("embed_tokens", "lm_head", "gate")
_QUERIES = ("q_proj", "q_b_proj")


def settle(traits: ModelTraits, unsaid: Iterable[str] = ()) -> tuple[ModelTraits, tuple[str, ...]]:
    """Traits that only tensors could tell, decided, with a note for each: absent unless named in `unsaid`."""
    present = frozenset(unsaid)
    notes = []

    def decided(name: str) -> bool:
        notes.append(f"{name} is not in the config: {'there' if name in present else 'absent'} in synthetic weights")
        return name in present

    attention, moe = traits.attention, traits.moe
    silent = (name for name in ("qk_norm", "qkv_bias", "o_bias", "bias") if getattr(attention, name, False) is None)
    changes: dict[str, Any] = {name: decided(name) for name in silent}
    attention = replace(attention, **changes)
    if moe is not None:
        if moe.correction_bias is None:
            moe = replace(moe, correction_bias=decided("correction_bias"))
        if moe.scoring is None:
            moe = replace(moe, scoring="sigmoid" if moe.correction_bias else "softmax")
    mlp_bias = decided("mlp_bias") if traits.mlp_bias is None and not all(traits.moe_layers) else traits.mlp_bias
    return replace(traits, attention=attention, moe=moe, mlp_bias=mlp_bias), tuple(notes)


class SyntheticTensors(dict[str, TensorInfo]):
    """Headers of the tensors that would be stored, experts stacked, and the seed that their values come from."""

    def __init__(self, traits: ModelTraits, seed: int) -> None:
        scheme = traits.weights.attention.scheme
        dtype = next(stored for stored, name in SAFETENSORS_SCHEMES.items() if name == scheme)
        super().__init__()
        self.seed = seed
        for name, shape in stacked_shapes(traits).items():
            count = 1
            for size in shape:
                count *= size
            self[name] = TensorInfo(name, dtype, shape, Path("synthetic"), 0, count * ITEMSIZE[scheme])


class SyntheticWeights(Weights):
    """`Weights` whose tensors are drawn on `device` when they are asked for: equal for a seed and a kind of device.

    Every tensor has a generator of its own, so that the order of loading does not matter.
    """

    def __init__(
        self,
        traits: ModelTraits,
        tensors: SyntheticTensors,
        device: torch.device,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        super().__init__(tensors, tensors, on_progress)
        self.device, self._traits, self._seed = device, traits, tensors.seed
        self._routed = 1.0 if traits.moe is None else _routing_length(traits.moe)

    def matrix(self, name: str) -> StoredWeight:
        """As `Weights.matrix`; nothing is read."""
        import torch

        info = self._infos[name]
        scheme = SAFETENSORS_SCHEMES[info.dtype]
        dtype = dtype_of(scheme)
        data = torch.empty(info.shape, dtype=dtype, device=self.device)
        module = name.split(".")[-2]
        if module.endswith("norm"):
            data.fill_(self._query_gain() if module == "q_norm" else 1.0)
        else:
            digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
            generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest) >> 1)
            data.normal_(0.0, self._deviation(name, module, info.shape), generator=generator)
            if module in _ONE_LONG and len(info.shape) == 2:
                data.div_(torch.linalg.vector_norm(data, dim=-1, keepdim=True, dtype=torch.float32))
        self._advance(info.nbytes)
        return StoredWeight(scheme, info.shape, data)

    def _deviation(self, name: str, module: str, shape: tuple[int, ...]) -> float:
        """Of a drawn tensor's values. Outputs have mean square 1 for such inputs, times the gain of their place."""
        if name.endswith("_correction_bias"):
            return CORRECTION_BIAS
        gain = 1.0
        if module in _QUERIES and not getattr(self._traits.attention, "qk_norm", False):
            gain = self._query_gain()
        elif module in ("o_proj", "down_proj"):
            gain = self._traits.num_layers**-0.5
            gain *= ATTENTION_GAIN if module == "o_proj" else GATED_MEAN_SQUARE**-0.5
            gain /= self._routed if ".experts." in name else 1.0
        return gain * (BIAS if name.endswith(".bias") else shape[-1] ** -0.5)

    def _query_gain(self) -> float:
        """Queries times keys, times the softmax scale, have deviation SHARPNESS."""
        a = self._traits.attention
        width = a.qk_head_dim if a.kind == "mla" else a.head_dim
        return float(SHARPNESS / (a.softmax_scale * width**0.5))


class ShapedWeights(Weights):
    """`Weights` whose tensors have shapes and no memory: of a model that only compiles its kernels."""

    def __init__(self, tensors: SyntheticTensors) -> None:
        super().__init__(tensors, tensors, None)

    def matrix(self, name: str) -> StoredWeight:
        """As `Weights.matrix`, on torch's meta device."""
        import torch

        info = self._infos[name]
        scheme = SAFETENSORS_SCHEMES[info.dtype]
        return StoredWeight(scheme, info.shape, torch.empty(info.shape, dtype=dtype_of(scheme), device="meta"))


def _routing_length(moe: MoETraits) -> float:
    """sqrt(E[sum of squared routing weights]) for normal router logits: the experts' outputs together are divided
    by it, and so weigh as much as a dense MLP's."""
    import torch

    logits = torch.randn(512, moe.num_experts, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(moe.num_experts) if moe.correction_bias else None
    _, weights = route(logits, moe, bias)
    return float(weights.square().sum(-1).mean().sqrt())
