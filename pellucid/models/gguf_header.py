"""Reads the header of a GGUF file (versions 2 and 3) with nothing but the standard library. Used by
`models.checkpoint`, and by the tokenizer for the vocabulary in the metadata.

Layout: magic, version, tensor count, key count; the metadata; the tensor infos; padding to `general.alignment`; the
data. Sizes and names are as stored; `models.registry` translates names.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pellucid.core import CheckpointError
from pellucid.traits.tensors import TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A storage type: `block` elements along a row take `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


GGML_TYPES: Mapping[int, GGMLType] = {
    code: GGMLType(name, block, nbytes)
    for code, name, block, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
}
"""ggml type code -> storage type."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_REMEDY = "download the file again"


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """`metadata` maps keys to numbers, booleans, strings and lists of them; `tensors` is by stored name.

    Shapes are row-major, [rows, columns], the reverse of the order in the file.
    """

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the header of a GGUF file.

    Raises:
        CheckpointError: the file cannot be read, is truncated, is not GGUF version 2 or 3, or contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size == 0:
                raise CheckpointError(f"{path}: the file is empty: {_REMEDY}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                return _read(_Cursor(path, buffer, size))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}): check the path and rights"
        ) from None


def read_f32_values(info: TensorInfo) -> tuple[float, ...]:
    """The values of a small F32 tensor. Raises CheckpointError when it is not F32 or cannot be read."""
    if info.dtype != "F32":
        raise CheckpointError(f"{info.file}: tensor {info.name} is {info.dtype}, not F32: {_REMEDY}")
    try:
        with info.file.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.nbytes)
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read ({error.strerror or error}): check the path") from None
    return struct.unpack(f"<{info.nbytes // 4}f", data)


class _Cursor:
    """A position in the file's bytes. Every read is checked against the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap, size: int) -> None:
        self.path = path
        self.buffer = buffer
        self.size = size
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}: {_REMEDY}")

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        nbytes = struct.calcsize("<" + code) * count
        if nbytes > self.size - self.position:
            self.fail(f"truncated at byte {self.size}, inside the header")
        values = struct.unpack_from(f"<{count}{code}", self.buffer, self.position)
        self.position += nbytes
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings, each 8 bytes of length and UTF-8. A vocabulary has 10^5 of them: hence the tight loop."""
        if 8 * count > self.size - self.position:
            self.fail(f"truncated at byte {self.size}, inside the header")
        values: list[str] = []
        append, buffer, position, size = values.append, self.buffer, self.position, self.size
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (length,) = length_at(buffer, position)
                start, position = position + 8, position + 8 + length
                if position > size:
                    self.fail(f"truncated at byte {size}, inside a string of the header")
                append(buffer[start:position].decode())
        except struct.error:
            self.fail(f"truncated at byte {size}, inside the header")
        except UnicodeDecodeError:
            self.fail(f"a string near byte {position} is not UTF-8")
        self.position = position
        return values


def _read(cursor: _Cursor) -> GGUFHeader:
    if cursor.buffer[:4] != MAGIC:
        cursor.fail("not a GGUF file (no GGUF magic)")
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in VERSIONS:
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{cursor.path}: GGUF version {version}{hint} is not 2 or 3: convert the file again")
    tensor_count, key_count = cursor.scalars("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            cursor.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = _value(cursor, cursor.scalar("I"))
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        cursor.fail(f"general.alignment is {alignment!r}, not a positive multiple of 8")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, dimensions, code, offset in entries:
        if name in tensors:
            cursor.fail(f"tensor {name} occurs twice")
        if offset % alignment:
            cursor.fail(f"tensor {name} starts at {offset}, not a multiple of {alignment}")
        tensors[name] = _tensor(cursor, name, dimensions, code, start + offset)
    _check_overlap(cursor, tensors)
    return GGUFHeader(version, metadata, tensors)


def _value(cursor: _Cursor, kind: int, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY or depth > 2:
        cursor.fail(f"metadata value of the unknown kind {kind} near byte {cursor.position}")
    inner, count = cursor.scalar("I"), cursor.scalar("Q")
    if inner in _SCALARS:
        return list(cursor.scalars(_SCALARS[inner], count))
    if inner == _STRING:
        return cursor.strings(count)
    return [_value(cursor, inner, depth + 1) for _ in range(count)]


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """One tensor info: name, dimensions (fastest first), type code, offset into the data."""
    name, rank = cursor.string(), cursor.scalar("I")
    if rank > MOST_DIMENSIONS:
        cursor.fail(f"tensor {name} has {rank} dimensions, above {MOST_DIMENSIONS}")
    return name, cursor.scalars("Q", rank), cursor.scalar("I"), cursor.scalar("Q")


def _tensor(cursor: _Cursor, name: str, dimensions: tuple[int, ...], code: int, offset: int) -> TensorInfo:
    kind = GGML_TYPES.get(code)
    if kind is None:
        raise CheckpointError(f"{cursor.path}: tensor {name} has the unknown type {code}: quantize the model otherwise")
    columns = dimensions[0] if dimensions else 1
    if columns % kind.block:
        cursor.fail(f"tensor {name} has rows of {columns} elements, not whole {kind.name} blocks of {kind.block}")
    rows = 1
    for dimension in dimensions[1:]:
        rows *= dimension
    nbytes = rows * (columns // kind.block) * kind.nbytes
    if offset + nbytes > cursor.size:
        cursor.fail(f"tensor {name} ends at byte {offset + nbytes} but the file has {cursor.size}: truncated")
    return TensorInfo(name, kind.name, tuple(reversed(dimensions)), cursor.path, offset, nbytes)


def _check_overlap(cursor: _Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    end, previous = 0, ""
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset < end:
            cursor.fail(f"tensor {info.name} overlaps {previous}")
        end, previous = info.offset + info.nbytes, info.name
