"""Every kernel of a fused step, at the sizes of real models, fits the shared memory of devices that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT = 101376
"""Bytes a block may ask for on SM 8.6, 8.9 and 12.0, the least of the devices that the plan calls fused."""


@pytest.mark.parametrize(
    ("config", "sm", "rows"),
    [("DeepSeek-V2-Lite", 89, (1, 8, 32)), ("qwen3-30b-a3b-bf16", 120, (1, 16))],
)
def test_every_kernel_of_a_step_fits(config: str, sm: int, rows: tuple[int, ...]) -> None:
    path = ROOT / "tests" / "fixtures" / "configs" / f"{config}.json"
    needs = compile_step(str(path), str(sm), str(LIMIT), ".", *map(str, rows))
    assert {int(count) for _, count, *_ in needs} == set(rows)
    assert len(needs) > 8 * len(rows)
    too_large = [need for need in needs if int(need[2]) > LIMIT]
    assert not too_large


def test_kernels_that_choose_tokens_keep_to_their_registers_everywhere() -> None:
    """Of a vocabulary of 151,936; of one row and of many."""
    path = ROOT / "tests" / "fixtures" / "configs" / "qwen3-30b-a3b-bf16.json"
    needs = compile_step(str(path), "80,86,89,90,100,120", str(LIMIT), "sampling|finish|partial_best", "1", "64")
    assert {name for name, *_ in needs} == {"_sampling_bins_kernel", "_finish_step_kernel", "_partial_best_kernel"}
    assert not [need for need in needs if need[3] != "0"]


def compile_step(*words: str) -> list[list[str]]:
    """The lines of `tests.kernels.triton.compile_step`, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compile_step", *words],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return [line.split() for line in result.stdout.splitlines()]
