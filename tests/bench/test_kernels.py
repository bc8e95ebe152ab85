"""Bytes of each kind of launch of a fused step, against numbers computed by hand. The kernels do next to nothing."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pellucid.bench import kernels as bench
from pellucid.layers import fused_step

torch = pytest.importorskip("torch")

CONTEXT = 24
"""Keys of each row."""

NOTHING = {
    "linear": ("small_linear",), "rows_linear": ("rows_linear",), "row_ops": ("rms_norm", "silu_mul"),
    "head": ("finish_step",),
}  # fmt: skip
"""Launchers that are not recorded, and do nothing here either."""


def begun(arguments: dict[str, Any]) -> None:
    arguments["context"].fill_(CONTEXT)


def chosen(arguments: dict[str, Any]) -> None:
    """Row r takes experts 0, 1, 2 and 3 + r. Of several rows the last is padding, where that is told apart."""
    experts = arguments["experts_out" if "experts_out" in arguments else "experts"]
    experts[:] = torch.arange(experts.shape[1])
    experts[:, -1] += torch.arange(experts.shape[0], dtype=torch.int32)
    if experts.shape[0] > 2 and "experts_out" in arguments:
        experts[-1] = -1


def sorted_blocks(arguments: dict[str, Any]) -> None:
    found = arguments["experts"].unique()
    arguments["blocks"].block_experts[: len(found)] = found
    arguments["blocks"].count.fill_(len(found))


DOES: dict[str, Callable[[dict[str, Any]], None]] = {
    "begin_step": begun,
    "router_and_shared": chosen,
    "route_topk": chosen,
    "sort_by_expert": sorted_blocks,
}


@pytest.fixture
def idle_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launcher with its own signature, and nothing behind it but what later launches read."""
    pytest.importorskip("triton", reason="triton is for Linux")
    for name in {**bench.LAUNCHERS, **NOTHING}:
        module = importlib.import_module(f"pellucid.kernels.triton.{name}")
        for launcher in (*bench.LAUNCHERS.get(name, ()), *NOTHING.get(name, ())):
            original = getattr(module, launcher)
            signature = inspect.signature(original)

            def launch(*args: Any, _signature: Any = signature, _name: str = launcher, **options: Any) -> None:
                bound = _signature.bind(*args, **options).arguments
                DOES.get(_name, lambda _: None)(bound)

            monkeypatch.setattr(module, launcher, wraps(original)(launch))


def record(shape: str, rows: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Launches and bytes of each kind in a step of `rows` rows, which are its bucket."""
    from tests.kernels.triton.fused_steps import FusedSteps

    steps = FusedSteps.of(shape, rows, folder, torch.device("cpu"), torch.float16)
    assert steps.bucket == rows
    found = bench.record_step(cast(Any, SimpleNamespace(fused=steps.fused)), rows)
    return {name: (len(kind.launches), kind.num_bytes) for name, kind in found.items()}


# hidden 96, 3 layers of which 2 have experts, 4 heads, latent 32 + 16, nope 16, v 24, 16 experts of 48; 2 bytes each.
HIDDEN, LATENT = 96, 32 + 16


@pytest.mark.parametrize("rows", [1, 4])
def test_bytes_of_an_mla_step_of_few_rows(rows: int, tmp_path: Path, idle_kernels: None) -> None:
    found = record("v3", rows, tmp_path)
    assert found["absorb_rope_write"] == (3, 3 * 4 * 32 * 16 * 2)
    assert found["project 96->88"] == (3, 3 * 2 * (88 * HIDDEN + rows * (HIDDEN + 88)))
    launches, moved = found["split_decode"]
    partial = moved // 3 - rows * CONTEXT * LATENT * 2
    assert (launches, partial % (rows * 4 * 32 * 4)) == (3, 0)
    assert found["combine_project"] == (3, moved - 3 * rows * CONTEXT * LATENT * 2 + 3 * 4 * 24 * 32 * 2)
    assert found["router_and_shared"] == (2, 2 * 2 * (16 * HIDDEN + 2 * 48 * HIDDEN))
    experts = 4 if rows == 1 else 6
    assert found["small_experts_up"] == (2, 2 * experts * 2 * 48 * HIDDEN * 2)
    pairs = rows * 5 * HIDDEN * 4
    assert found["small_experts_down"] == (2, 2 * (experts * HIDDEN * 48 * 2 + HIDDEN * 48 * 2 + pairs))
    assert found["small_head"] == (1, 320 * HIDDEN * 2)
    assert found["begin_step"] == (1, rows * HIDDEN * 2)


def test_bytes_of_experts_that_many_rows_share(
    tmp_path: Path, idle_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_step, "FEW_ROWS", 2)
    found = record("v3", 4, tmp_path)
    # Experts 0 to 6 in all.
    assert found["grouped_up"] == (2, 2 * 7 * 2 * 48 * HIDDEN * 2)
    assert found["grouped_down"] == (2, 2 * (7 * HIDDEN * 48 * 2 + 4 * 4 * HIDDEN * 4))
    assert found["sort_by_expert"] == found["route_topk"] == (2, 0)
    assert found["reduce_pairs"] == (2, 2 * 4 * 4 * HIDDEN * 4)
    assert "small_head" not in found


def test_bytes_of_a_gqa_step(tmp_path: Path, idle_kernels: None) -> None:
    """2 heads of 24 for K and V each."""
    found = record("llama", 2, tmp_path)
    assert found["project 96->192"] == (3, 3 * 2 * (192 * HIDDEN + 2 * (HIDDEN + 192)))
    # q, k and v; then gate and up, and down.
    assert found["project 96->320"] == (3, 3 * 2 * (320 * HIDDEN + 2 * (HIDDEN + 160)))
    assert found["project 160->96"] == (3, 3 * 2 * (160 * HIDDEN + 2 * (160 + HIDDEN)))
    # And the result of both rows, which is written in one part.
    assert found["attend"] == (3, 3 * 2 * (2 * CONTEXT * 2 * 24 * 2 + 2 * 4 * 24))


def test_recording_leaves_nothing_behind(tmp_path: Path, idle_kernels: None) -> None:
    project = fused_step.FusedStep.project
    record("v3", 1, tmp_path)
    assert fused_step.FusedStep.project is project


def test_a_share_is_the_floor_over_the_time() -> None:
    assert bench.KernelTime(1, "x", 3, 4.8, 1.0, 2.0, 0.1, None).share == 0.5
