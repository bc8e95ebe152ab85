"""Reads the header of a safetensors file with nothing but the standard library. Used by `models.checkpoint`.

Format: 8 bytes, little-endian header length; that many bytes of JSON, tensor name -> {dtype, shape, data_offsets}
(offsets count from the end of the header); then the data, without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pellucid.core import CheckpointError
from pellucid.traits.tensors import TensorInfo

MOST_HEADER_BYTES = 100_000_000
"""The format's own bound on the header, in bytes."""

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
}
"""Bits per element of each dtype word."""

_REMEDY = "download the file again"


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a file, by name; offsets count from the start of the file.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header is invalid, contradicts itself or does
            not describe exactly the bytes that follow it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header, start = _parse(path, size, file.read(8), file.read)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}): check the path and rights"
        ) from None
    tensors = {
        name: _tensor(path, name, entry, start, size) for name, entry in header.items() if name != "__metadata__"
    }
    _check_layout(path, tensors, start, size)
    return tensors


def _parse(path: Path, size: int, prefix: bytes, read: Callable[[int], bytes]) -> tuple[dict[str, Any], int]:
    """The header object and the offset of the first data byte."""
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: only {size} bytes, not even a header length: {_REMEDY}")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8 or length > MOST_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes but the file has {size}: truncated or not safetensors, {_REMEDY}"
        )
    try:
        header = json.loads(read(length).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({type(error).__name__}): {_REMEDY}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object: {_REMEDY}")
    return header, 8 + length


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name} has no valid dtype, shape and data_offsets: {_REMEDY}")
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {dtype!r}: convert the checkpoint")
    begin, end = offsets
    nbytes = (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name} spans {end - begin} bytes but {dtype} {list(shape)} takes {nbytes}: {_REMEDY}"
        )
    if start + end > size:
        raise CheckpointError(
            f"{path}: tensor {name} ends at byte {start + end} but the file has {size}: truncated, {_REMEDY}"
        )
    return TensorInfo(name, dtype, shape, path, start + begin, nbytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of non-negative integers; None for anything else."""
    if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
        return None
    return tuple(value)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """The tensors lie end to end: [start, a) [a, b) ... [z, size), without overlap, gap or remainder."""
    position, previous = start, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            word = "overlaps" if info.offset < position else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {info.name} {word} {previous}: {_REMEDY}")
        position, previous = info.offset + info.nbytes, info.name
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes follow the last tensor: {_REMEDY}")
