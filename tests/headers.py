"""Configs of published models and tensor headers without data. Used by the tests of traits and checkpoints."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pellucid.models.safetensors_header import DTYPE_BITS
from pellucid.traits.tensors import TensorIndex, TensorInfo
from tests import checkpoints

CONFIGS = Path(__file__).parent / "fixtures" / "configs"

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype, shape)."""


def config_names() -> list[str]:
    """Every published config in the fixtures."""
    return sorted(path.stem for path in CONFIGS.glob("*.json") if not path.stem.endswith(".hf_quant"))


def load_config(name: str) -> dict[str, Any]:
    """A fresh copy of a published config."""
    return dict(json.loads((CONFIGS / f"{name}.json").read_text()))


def load_hf_quant(name: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / f"{name}.hf_quant.json").read_text()))


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's keys of a config, nested or not."""
    return dict(config.get("text_config") or config)


def index_of(shapes: Shapes) -> TensorIndex:
    """An index of tensors that exist in name and shape only."""
    return {
        name: TensorInfo(name, dtype, shape, Path("absent.safetensors"), 0, _nbytes(dtype, shape))
        for name, (dtype, shape) in shapes.items()
    }


def tiny_shapes(name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names and shapes of one of `checkpoints.CONFIGS`, in fp32."""
    return {name: ("F32", values.shape) for name, values in checkpoints.tensors_of(name).items()}


def tiny_config(name: str) -> dict[str, Any]:
    return dict(json.loads(json.dumps(checkpoints.CONFIGS[name])))


def write_safetensors(path: Path, shapes: Shapes) -> Path:
    """A valid file whose tensors are all zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8
