"""What is known of a tensor before its bytes are read, and the names they go by. Used by `traits` and `models`.

A `TensorIndex` maps a tensor's name to its `TensorInfo`. Names are the Hugging Face ones, as stored; GGUF names are
translated when the file is opened. `TextTensors` is the same index seen from the language model: wrapper prefixes
stripped, vision and audio towers set aside, tensors grouped by module and by layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. `shape` is row-major; `offset` counts from the start of `file`, both in bytes.

    `dtype` is the container's own word: BF16, F8_E4M3, I32 ... (safetensors) or Q4_1, Q6_K ... (GGUF). `name` is the
    name in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


TensorIndex = Mapping[str, TensorInfo]

TOWERS = frozenset(
    {
        "aligner",
        "audio_model",
        "audio_tower",
        "image_newline",
        "mm_projector",
        "multi_modal_projector",
        "patch_merger",
        "vision_embed_tokens",
        "vision_encoder",
        "vision_language_adapter",
        "vision_model",
        "vision_tower",
        "visual",
    }
)
"""First name component of the parts of a multimodal checkpoint that are not the language model."""

_WRAPPERS = ("model.language_model.", "language_model.")
_LAYERS = "model.layers."
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")
_EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
_EXPERTS = "mlp.experts."


def canonical_name(name: str) -> str:
    """The language model's own name of a tensor or module: wrapper prefix stripped, `model.` kept or added.

    `language_model.model.layers.3.x`, `language_model.layers.3.x` and `model.language_model.layers.3.x` are all
    `model.layers.3.x`; `language_model.lm_head` is `lm_head`. Other names come back unchanged.
    """
    for prefix in _WRAPPERS:
        if name.startswith(prefix):
            inner = name[len(prefix) :]
            return inner if inner.startswith(("model.", "lm_head")) else "model." + inner
    return name


def tower_of(name: str) -> str | None:
    """The vision or audio component that a tensor or module belongs to; None for the language model."""
    first = name.removeprefix("model.").partition(".")[0]
    return first if first in TOWERS else None


def layer_of(name: str) -> tuple[int, str] | None:
    """(layer, name inside the layer) of a canonical name; None outside the layers."""
    if not name.startswith(_LAYERS):
        return None
    number, _, inner = name[len(_LAYERS) :].partition(".")
    return (int(number), inner) if inner and number.isascii() and number.isdigit() and len(number) < 10 else None


def is_sampled(module: str) -> bool:
    """Whether a module stands for its kind: experts of one layer are stored alike, so their first is enough."""
    return ".experts." not in module or ".experts.0." in module or not _EXPERT_NUMBER.search(module)


@dataclass(frozen=True, slots=True)
class TextTensors:
    """The language model's part of a tensor index.

    `by_name` uses canonical names. `modules[module][suffix]` groups what belongs to one weight, for instance
    `weight_packed` and `weight_scale`. `layers[i]` maps names inside layer i. `skipped` counts what is not the
    language model: tower -> (tensors, bytes); `tower_modules` holds the names of its modules.
    """

    by_name: dict[str, TensorInfo]
    modules: dict[str, dict[str, TensorInfo]]
    layers: dict[int, dict[str, TensorInfo]]
    skipped: dict[str, tuple[int, int]]
    tower_modules: dict[str, dict[str, TensorInfo]]

    @classmethod
    def of(cls, tensors: TensorIndex) -> TextTensors:
        view = cls({}, {}, {}, {}, {})
        for stored, info in tensors.items():
            name = canonical_name(stored)
            place = layer_of(name)
            tower = tower_of(stored) if place is None else None
            module, _, suffix = name.rpartition(".")
            if tower is not None:
                count, size = view.skipped.get(tower, (0, 0))
                view.skipped[tower] = (count + 1, size + info.nbytes)
                view.tower_modules.setdefault(module, {})[suffix] = info
                continue
            view.by_name[name] = info
            view.modules.setdefault(module, {})[suffix] = info
            if place is not None:
                view.layers.setdefault(place[0], {})[place[1]] = info
        return view

    def has_module(self, layer: int, module: str) -> bool:
        """Whether layer `layer` stores anything under `module`, for instance `self_attn.q_norm`."""
        return f"model.layers.{layer}.{module}" in self.modules

    def is_moe(self, layer: int) -> bool:
        return any(name.startswith(_EXPERTS) for name in self.layers.get(layer, ()))

    def expert_ids(self, layer: int) -> set[int]:
        """Ids of the experts stored one by one in a layer; empty where they are stacked in one tensor."""
        matches = (_EXPERT.match(name) for name in self.layers.get(layer, ()))
        return {int(match[1]) for match in matches if match is not None}

    def layer_names(self, num_layers: int) -> set[str]:
        """Every distinct name inside the first `num_layers` layers, experts left out."""
        return {
            name
            for layer, names in self.layers.items()
            if layer < num_layers
            for name in names
            if not name.startswith(_EXPERTS)
        }
