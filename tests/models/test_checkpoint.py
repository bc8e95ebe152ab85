"""Opening checkpoints: what is found, and that every broken one is refused by file and remedy, never otherwise."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pellucid.core import CheckpointError, PellucidError
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.safetensors_header import read_safetensors_header
from tests import checkpoints
from tests.headers import load_config, tiny_config, tiny_shapes, write_safetensors

INDEX = "model.safetensors.index.json"


def write_tiny(directory: Path, name: str = "v3", shards: int = 1) -> Path:
    """A tiny checkpoint of zeros; with an index when there are several shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_config(name)))
    shapes = tiny_shapes(name)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", shapes)
        return directory
    weight_map = {}
    for number in range(shards):
        shard = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {tensor: shapes[tensor] for tensor in sorted(shapes)[number::shards]}
        write_safetensors(directory / shard, part)
        weight_map.update(dict.fromkeys(part, shard))
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def refused(path: Path, *named: str) -> None:
    """`open` raises a CheckpointError of one line that names the file at fault."""
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(path)
    line = str(raised.value)
    assert "\n" not in line and str(path) in line and ": " in line
    for word in named:
        assert word in line, line


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_is_read_whole_whatever_its_shards(tmp_path: Path, shards: int) -> None:
    checkpoint = Checkpoint.open(write_tiny(tmp_path, shards=shards))
    assert checkpoint.kind == "safetensors"
    assert {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == tiny_shapes("v3")
    checkpoint.require_weights()
    report = checkpoint.report()
    assert report.traits.weights.source == "tensors" and report.conflicts == ()


def test_offsets_lead_to_the_bytes_of_each_tensor(tmp_path: Path) -> None:
    path = checkpoints.write("qwen3", tmp_path / "qwen3")
    values = checkpoints.tensors_of("qwen3")
    tensors = Checkpoint.open(path).tensors
    assert set(tensors) == set(values)
    for name, info in tensors.items():
        data = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
        np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(info.shape), values[name])


def test_a_config_alone_can_be_explained_but_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(load_config("Kimi-K2.5")))
    for path in (tmp_path, file):
        checkpoint = Checkpoint.open(path)
        assert (checkpoint.kind, dict(checkpoint.tensors)) == ("config-only", {})
        assert checkpoint.report().traits.num_layers == 61
        with pytest.raises(CheckpointError, match="without weights"):
            checkpoint.require_weights()


def test_files_beside_the_config_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_config("DeepSeek-V3.1-NVFP4")))
    quantization = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.6}))
    report = Checkpoint.open(tmp_path).report()
    assert str(report.traits.weights.attention) == "nvfp4 group 16 symmetric"
    assert report.traits.eos_token_ids == (1, 7)
    assert any("end tokens 7" in note for note in report.notes)


def test_the_report_names_the_checkpoint_when_config_and_tensors_disagree(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("v3") | {"hidden_size": 97}))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        Checkpoint.open(tmp_path).report()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "neither config.json nor a .gguf")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "directory")
    write_tiny(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    refused(tmp_path / "bare", "config.json: missing")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "[" * 100000, "\xff", '{"a": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "generation_config.json", INDEX])
def test_invalid_json_is_refused_by_file(tmp_path: Path, file: str, text: str) -> None:
    write_tiny(tmp_path)
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    refused(tmp_path, file)


def test_a_missing_shard_is_refused_with_and_without_an_index(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors: missing", "download")
    (tmp_path / INDEX).unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors: missing", "download")


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    moved = next(name for name, shard in index["weight_map"].items() if shard == first)
    for changed in ({moved: second}, {"model.ghost.weight": first}, {moved: "../other.safetensors"}, {moved: 3}):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | changed}))
        refused(tmp_path)


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    write_safetensors(tmp_path / "b.safetensors", {"model.norm.weight": ("F32", (96,))})
    refused(tmp_path, "b.safetensors", "model.norm.weight", "a.safetensors")


def raw(header: Any, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "short": b"\0\0",
    "length beyond the file": struct.pack("<Q", 2**60) + b"{}",
    "not json": raw(b"{nonsense}"),
    "not utf-8": raw(b'{"\xff": 1}'),
    "a list": raw([]),
    "deep": raw(b"[" * 100000),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [2]}}),
    "negative shape": raw({"a": {**ONE, "shape": [-2]}}),
    "boolean shape": raw({"a": {**ONE, "shape": [True, 2]}}),
    "unknown dtype": raw({"a": {**ONE, "dtype": "F7"}}),
    "three offsets": raw({"a": {**ONE, "data_offsets": [0, 4, 8]}}),
    "backward offsets": raw({"a": {**ONE, "data_offsets": [8, 0]}}),
    "beyond the file": raw({"a": ONE}, data=4),
    "trailing bytes": raw({"a": ONE}, data=12),
    "wrong size": raw({"a": {**ONE, "shape": [3]}}),
    "overlap": raw({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, data=12),
    "gap": raw({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, data=20),
    "entry is a number": raw({"a": 3}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_safetensors_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, "model.safetensors")


def test_valid_corners_of_the_format_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(raw({"scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
                          "none": {"dtype": "BF16", "shape": [0, 7], "data_offsets": [4, 4]},
                          "half bytes": {"dtype": "F4", "shape": [2, 4], "data_offsets": [4, 8]}}))  # fmt: skip
    tensors = read_safetensors_header(file)
    assert {name: info.shape for name, info in tensors.items()} == {"scalar": (), "none": (0, 7), "half bytes": (2, 4)}
    file.write_bytes(raw({}, data=0))
    assert read_safetensors_header(file) == {}


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("fuzz"), "v2lite")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), cut=st.booleans(), flips=st.integers(0, 4))
def test_truncated_or_flipped_headers_raise_nothing_but_checkpoint_errors(
    tiny_directory: Path, tmp_path: Path, seed: int, cut: bool, flips: int
) -> None:
    original = (tiny_directory / "model.safetensors").read_bytes()
    (header,) = struct.unpack_from("<Q", original)
    damaged = damage(original, random.Random(seed), header + 8, cut, flips)
    (tmp_path / "config.json").write_bytes((tiny_directory / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(damaged)
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except CheckpointError:
        return
    assert not cut
    try:
        checkpoint.report()
    except PellucidError as error:
        assert str(tmp_path) in str(error) or "Pellucid has not" in str(error)


def damage(content: bytes, rng: random.Random, header: int, cut: bool, flips: int) -> bytes:
    """`content` with bits of its first `header` bytes flipped and, if `cut`, without its end."""
    damaged = bytearray(content)
    for _ in range(flips):
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
    return bytes(damaged[: rng.randrange(len(damaged))]) if cut else bytes(damaged)
