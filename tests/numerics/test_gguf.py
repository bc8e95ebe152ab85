"""GGUF files give the logits of the values they store, in every layout that converters have written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import checkpoints, harness
from tests.gguf_checkpoints import write_gguf
from tests.reference import Reference

TOLERANCE = 2e-4


@pytest.mark.parametrize("backend", ["reference-expanded", "cpu_native"])
@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
@pytest.mark.parametrize(
    ("name", "split_kv_b"),
    [("llama", True), ("llama2", True), ("v2lite", True), ("v2lite", False), ("v3", True), ("v3", False)],
)
def test_a_gguf_file_computes_with_the_values_it_stores(
    name: str, split_kv_b: bool, quantization: str, backend: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    held = write_gguf(name, file, quantization, split_kv_b)
    token_ids = checkpoints.prompts(name)[1]
    wanted = Reference(checkpoints.CONFIGS[name], held).logits(token_ids)

    found = harness.logits(file, [[(0, token_ids[:50])], [(0, token_ids[50:])]], backend)

    assert np.abs(found[0] - wanted).max() <= TOLERANCE


@pytest.mark.parametrize("backend", ["reference", "cpu_native"])
@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "mixed"])
@pytest.mark.parametrize("name", ["llama-linear", "v3"])
def test_four_bit_files_and_mixed_files_too(name: str, quantization: str, backend: str, tmp_path: Path) -> None:
    """`llama-linear` is tied: its quantized embedding is the head as well."""
    file = tmp_path / "model.gguf"
    held = write_gguf(name, file, quantization)
    token_ids = checkpoints.prompts(name)[1]
    wanted = Reference(checkpoints.CONFIGS[name], held).logits(token_ids)
    assert np.abs(harness.logits(file, [[(0, token_ids)]], backend)[0] - wanted).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["kimi", "moonlight"])
def test_other_yarn_ramps_and_plain_rope_pass_through_gguf(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    held = write_gguf(name, file)
    token_ids = checkpoints.prompts(name)[0]
    wanted = Reference(checkpoints.CONFIGS[name], held).logits(token_ids)
    assert np.abs(harness.logits(file, [[(0, token_ids)]], "reference")[0] - wanted).max() <= TOLERANCE
