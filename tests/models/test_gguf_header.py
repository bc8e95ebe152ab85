"""The GGUF header reader against the `gguf` package's own, its speed, and its refusals."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pellucid.core import CheckpointError, PellucidError
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.gguf_header import GGML_TYPES, read_f32_values, read_gguf_header
from tests.gguf_files import write_tiny_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, dimensions: list[int], code: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", code, offset)


def raw(
    *parts: bytes, keys: int = 0, tensors: int = 0, version: int = 3, data: int = 32, magic: bytes = b"GGUF"
) -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)
    return head + bytes(-len(head) % 32) + bytes(data)


@pytest.fixture(scope="module")
def rich_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every kind of metadata value and several storage types."""
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "rich.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4000000000)
    writer.add_int32("a.i32", -4)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "naïve 猫")
    writer.add_array("a.texts", ["", "Ġthe", "猫"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 2.0])
    writer.add_array("a.flags", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("f32.weight", rng.standard_normal((3, 5)).astype(np.float32))
    writer.add_tensor("f16.weight", rng.standard_normal((4, 2, 8)).astype(np.float16))
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"):
        code = getattr(gguf.GGMLQuantizationType, kind)
        packed = gguf.quants.quantize(rng.standard_normal((4, 64)).astype(np.float32), code)
        writer.add_tensor(f"{kind}.weight", packed, raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_is_what_the_gguf_package_reads(rich_file: Path) -> None:
    import gguf

    header, reader = read_gguf_header(rich_file), gguf.GGUFReader(rich_file)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(header.metadata) == theirs
    assert list(header.tensors) == [entry.name for entry in reader.tensors]
    for entry in reader.tensors:
        info = header.tensors[entry.name]
        assert info.shape == tuple(int(size) for size in reversed(entry.shape))
        assert (info.dtype, info.offset, info.nbytes) == (entry.tensor_type.name, entry.data_offset, entry.n_bytes)


def test_the_type_table_is_that_of_the_gguf_package() -> None:
    import gguf

    for code, kind in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(code)
        assert (kind.name, (kind.block, kind.nbytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


def test_small_tensors_are_read_by_value(rich_file: Path) -> None:
    tensors = read_gguf_header(rich_file).tensors
    expected = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    np.testing.assert_array_equal(read_f32_values(tensors["f32.weight"]), expected.ravel())
    with pytest.raises(CheckpointError, match="not F32"):
        read_f32_values(tensors["f16.weight"])


def test_a_large_vocabulary_is_read_in_a_fraction_of_a_second(tmp_path: Path) -> None:
    words = [f"token-{number}" for number in range(50_000)]
    keys = [
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 50_000) + b"".join(map(text, words)),
        text("tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 50_000) + b"".join(map(text, words)),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 50_000) + bytes(200_000),
    ]
    path = tmp_path / "words.gguf"
    path.write_bytes(raw(*keys, keys=3))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        header = read_gguf_header(path)
        seconds.append(time.perf_counter() - begin)
    assert header.metadata["tokenizer.ggml.tokens"] == words
    assert min(seconds) < 0.15


def test_smollm2_has_the_traits_that_its_authors_publish(smollm2_path: Path) -> None:
    checkpoint = Checkpoint.open(smollm2_path)
    traits = checkpoint.report().traits
    assert (traits.hidden_size, traits.num_layers, traits.vocab_size, traits.intermediate_size) == (
        576,
        30,
        49152,
        1536,
    )
    attention = traits.attention
    assert (attention.kind, attention.num_heads, attention.kv_heads_in_cache) == ("gqa", 9, 3)
    assert (attention.rope.theta, attention.rope.interleaved, traits.norm_eps) == (100000.0, True, 1e-5)
    assert traits.tied_embeddings and traits.max_position == 8192
    assert (str(traits.weights.attention), str(traits.weights.embedding)) == ("q4_1", "q8_0")
    assert checkpoint.gguf_metadata is not None and len(checkpoint.gguf_metadata["tokenizer.ggml.tokens"]) == 49152


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "only magic": b"GGUF",
    "other magic": raw(magic=b"GGML"),
    "version 1": raw(version=1),
    "version 9": raw(version=9),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "more keys than there are": raw(keys=2**60),
    "more tensors than there are": raw(tensors=2**60),
    "unknown kind": raw(text("k") + struct.pack("<I", 77), keys=1),
    "long string": raw(struct.pack("<Q", 2**62), keys=1),
    "long array": raw(text("k") + struct.pack("<IIQ", 9, 4, 2**61), keys=1),
    "long string array": raw(text("k") + struct.pack("<IIQ", 9, 8, 2**61), keys=1),
    "nested too deep": raw(text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 6, keys=1),
    "not utf-8": raw(text("k") + struct.pack("<IQ", 8, 1) + b"\xff", keys=1),
    "key twice": raw(*[text("k") + struct.pack("<IB", 0, 1)] * 2, keys=2),
    "tensor twice": raw(tensor("a", [4]), tensor("a", [4], offset=32), tensors=2, data=64),
    "overlap": raw(tensor("a", [16]), tensor("b", [4], offset=32), tensors=2, data=64),
    "beyond the end": raw(tensor("a", [9]), tensors=1),
    "huge dimensions": raw(tensor("a", [2**62, 2**62]), tensors=1),
    "five dimensions": raw(tensor("a", [1] * 5), tensors=1),
    "unknown type": raw(tensor("a", [4], code=5), tensors=1),
    "ragged block": raw(tensor("a", [33], code=2), tensors=1, data=64),
    "misaligned": raw(tensor("a", [4], offset=4), tensors=1),
    "odd alignment": raw(text("general.alignment") + struct.pack("<II", 4, 7), keys=1),
    "zero alignment": raw(text("general.alignment") + struct.pack("<II", 4, 0), keys=1),
    "alignment is text": raw(text("general.alignment") + struct.pack("<I", 8) + text("32"), keys=1),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"broken\.gguf") as raised:
        read_gguf_header(path)
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("fuzz") / "tiny.gguf", "deepseek2", "v3")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), cut=st.booleans(), flips=st.integers(0, 4))
def test_truncated_or_flipped_headers_raise_nothing_but_checkpoint_errors(
    tiny_file: Path, tmp_path: Path, seed: int, cut: bool, flips: int
) -> None:
    rng = random.Random(seed)
    damaged = bytearray(tiny_file.read_bytes())
    header = min(info.offset for info in read_gguf_header(tiny_file).tensors.values())
    for _ in range(flips):
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged[: rng.randrange(len(damaged) - 32)] if cut else damaged)
    checkpoint: Any = None
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError:
        return
    try:
        checkpoint.report()
    except PellucidError as error:
        assert "damaged.gguf" in str(error) or "Pellucid has not" in str(error)
