"""Opens a checkpoint without reading its weights: config, tensor headers, and from them the report of its traits.

Used by the CLI, by `explain` and by the loader. A directory with safetensors shards, a GGUF file, a directory with
exactly one GGUF file, a directory with a config.json alone, or that file itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pellucid.core import CheckpointError
from pellucid.models.gguf_header import read_gguf_header
from pellucid.models.registry import model_of_gguf
from pellucid.models.safetensors_header import read_safetensors_header
from pellucid.traits.config import TraitReport, read_traits, with_generation_config
from pellucid.traits.tensors import TensorIndex, TensorInfo, canonical_name

__all__ = ["Checkpoint", "CheckpointKind", "canonical_name"]

CheckpointKind = Literal["safetensors", "gguf", "config-only"]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(safetensors|gguf)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint says about itself. `tensors` is empty for `config-only`.

    Keys of `tensors` are Hugging Face names: as stored in safetensors (`canonical_name` strips wrapper prefixes),
    translated from GGUF, whose stored name stays in `TensorInfo.name`. `gguf_metadata` holds GGUF's own keys, the
    vocabulary and chat template among them.
    """

    path: Path
    kind: CheckpointKind
    config: Mapping[str, Any]
    tensors: TensorIndex = field(default_factory=dict)
    hf_quant_config: Mapping[str, Any] | None = None
    generation_config: Mapping[str, Any] | None = None
    gguf_metadata: Mapping[str, Any] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read every header under `path`.

        Raises:
            CheckpointError: nothing to open there, or a file is missing, truncated or invalid; names the file.
        """
        path = Path(path)
        if path.is_dir():
            return _open_directory(path)
        if not path.exists():
            raise CheckpointError(f"{path}: no such file or directory: check the path")
        if path.suffix == ".gguf":
            return _open_gguf(path)
        if path.suffix == ".json":
            quantization = _read_optional_json(path.with_name("hf_quant_config.json"))
            generation = _read_optional_json(path.with_name("generation_config.json"))
            return cls(path, "config-only", _read_json(path), {}, quantization, generation)
        raise CheckpointError(f"{path}: neither a .gguf file nor a config.json: give the checkpoint's directory")

    def require_weights(self) -> None:
        """Raises CheckpointError unless there are weights to load beside the config."""
        if self.kind == "config-only":
            raise CheckpointError(f"{self.path}: a config without weights: download the model's .safetensors files")

    def report(self) -> TraitReport:
        """The model's traits.

        Raises:
            CheckpointError: the config is incomplete, nonsensical, or contradicts the tensors; names the checkpoint.
            UnsupportedModelError: as `read_traits`.
        """
        try:
            report = read_traits(self.config, self.tensors or None, self.hf_quant_config)
            return with_generation_config(report, self.generation_config or {})
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None


def _open_directory(path: Path) -> Checkpoint:
    config_file = path / "config.json"
    ggufs = sorted(path.glob("*.gguf"))
    shards = sorted(path.glob("*.safetensors"))
    indexed = (path / INDEX_FILE).exists()
    if not config_file.exists():
        if shards or indexed:
            raise CheckpointError(f"{config_file}: missing beside the weights: copy it from the model's repository")
        if not ggufs:
            raise CheckpointError(f"{path}: neither config.json nor a .gguf file in it: check the path")
    if ggufs and not shards and not indexed:
        if len(ggufs) > 1:
            raise CheckpointError(f"{path}: {len(ggufs)} .gguf files in it: give the one to open")
        return _open_gguf(ggufs[0])
    config = _read_json(config_file)
    tensors = _read_index(path) if indexed else _read_shards(path, shards)
    return Checkpoint(
        path,
        "safetensors" if tensors else "config-only",
        config,
        tensors,
        _read_optional_json(path / "hf_quant_config.json"),
        _read_optional_json(path / "generation_config.json"),
    )


def _open_gguf(path: Path) -> Checkpoint:
    part = _SHARD.fullmatch(path.name)
    if part is not None and int(part["count"]) > 1:
        raise CheckpointError(
            f"{path}: part {int(part['number'])} of {int(part['count'])}: merge the parts into one file"
        )
    header = read_gguf_header(path)
    config, tensors = model_of_gguf(path, header)
    return Checkpoint(path, "gguf", config, tensors, gguf_metadata=header.metadata)


def _read_index(path: Path) -> dict[str, TensorInfo]:
    """The tensors that the index lists, each found in the shard that it names."""
    index_file = path / INDEX_FILE
    weight_map = _read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index_file}: no weight_map from tensor to file: download it again")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index_file}: names the shard {shard!r}, outside the directory: download it again")
        if not (path / shard).exists():
            raise CheckpointError(f"{path / shard}: missing, but {INDEX_FILE} names it: download the shard")
        headers[shard] = read_safetensors_header(path / shard)
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{path / shard}: tensor {name} is not in it, but {INDEX_FILE} says so: download both"
            )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _read_shards(path: Path, shards: list[Path]) -> dict[str, TensorInfo]:
    """The tensors of a directory without an index: `model.safetensors` if it is there, else of every file."""
    single = path / SINGLE_FILE
    chosen = [single] if single in shards else shards
    tensors: dict[str, TensorInfo] = {}
    for shard in chosen:
        _check_series(shard)
        for name, info in read_safetensors_header(shard).items():
            if name in tensors:
                raise CheckpointError(f"{shard}: tensor {name} is in {tensors[name].file.name} too: remove one of them")
            tensors[name] = info
    return tensors


def _check_series(shard: Path) -> None:
    """A file called `...-00001-of-00003` needs its siblings, index or not."""
    part = _SHARD.fullmatch(shard.name)
    if part is None:
        return
    for number in range(1, int(part["count"]) + 1):
        sibling = shard.with_name(f"{part['stem']}-{number:05d}-of-{part['count']}.safetensors")
        if not sibling.exists():
            raise CheckpointError(
                f"{sibling}: missing, {shard.name} is one of {int(part['count'])}: download the shard"
            )


def _read_optional_json(path: Path) -> dict[str, Any] | None:
    return _read_json(path) if path.exists() else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}): check the path and rights"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object: download it again")
    return content
