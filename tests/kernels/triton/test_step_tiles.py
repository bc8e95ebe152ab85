"""A fused step gives the same logits whatever tiles its plan has for its launches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from pellucid.core import SamplingParams
from pellucid.kernels.device import DeviceLimits, device_limits
from pellucid.layers import fused_step
from pellucid.layers.step_tiles import (
    EXPERTS_DOWN,
    EXPERTS_GROUPED,
    EXPERTS_UP,
    GQA_DECODE,
    LM_HEAD,
    MLA_DECODE,
    parse_tile,
)
from pellucid.models.fused_decoder import FusedDecoder
from pellucid.selection.plan import ExecutionPlan
from pellucid.tuning.measure import Question
from pellucid.tuning.projections import projections_of
from pellucid.tuning.steps import Apart
from tests.kernels.triton.fused_steps import PAGE, PAGES, FusedSteps


@pytest.mark.parametrize("name", ["library", "gemv-64x128-w1", "rows-64x64-w4-p2-s2"])
def test_a_step_with_measured_tiles_gives_the_logits_of_the_default_ones(
    name: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Of two rows, which norm themselves in a projection of the default: others need a norm before it."""
    rows = 2
    steps = FusedSteps.of("llama", rows, tmp_path, device, dtype)
    prompts = torch.randint(3, 300, (rows, 9), generator=torch.Generator().manual_seed(1)).tolist()
    steps.layered([steps.row(i, 0, prompts[i][:-1], prefill=True) for i in range(rows)])
    decode = [steps.row(i, 8, prompts[i][-1:]) for i in range(rows)]
    wanted = steps.layered(decode)

    tiles = {(p.op, rows): parse_tile(name) for p in projections_of(steps.decoder.traits, rows)}
    limits = device_limits(device) if device.type == "cuda" else DeviceLimits(86, 4, 99 << 10)
    measured = FusedDecoder(
        steps.decoder, steps.pool, steps.state, steps.ring, PAGE * PAGES, limits, tiles
    )  # fmt: skip
    steps.state.prepare(decode, rows, [_greedy()] * rows)
    measured.step(rows)
    # As in `test_fused_decoder`: two random layers in bf16 differ by percents, whatever multiplies.
    tolerance = 0.15 if dtype == torch.bfloat16 else 3e-3
    found = measured.logits(rows)[:rows].double()
    assert (found - wanted.double()).norm() < tolerance * wanted.double().norm()


def _greedy() -> tuple[SamplingParams, int]:
    return SamplingParams(temperature=0), 1


@pytest.mark.parametrize("name", ["library", "gemv-16x128-w2", "dot-16x128-w1", "rows-64x64-w4-p2-s2"])
@pytest.mark.parametrize("op", ["apart.projection.96x160", "apart.projection.192x96.swiglu"])
def test_a_tile_alone_is_checked_with_what_a_step_adds_to_its_product(
    op: str, name: str, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pellucid.kernels import device as devices
    from pellucid.kernels.triton import row_ops

    bench = Apart(
        Question(op, 5, (name,)), cast(ExecutionPlan, SimpleNamespace(device=device.type, dtype=_name(dtype)))
    )
    if device.type == "cpu":
        monkeypatch.setattr(devices, "device_limits", lambda _: DeviceLimits(86, 4, 99 << 10))
    assert bench.check(name) == ""
    norm = row_ops.rms_norm
    monkeypatch.setattr(row_ops, "rms_norm", lambda x, *rest, **options: norm(x * 1.1 + 0.1, *rest, **options))
    assert bench.check(name).startswith("after a norm, ")
    if name.startswith(("gemv", "dot")):
        # Where each program norms its rows, that launch is not there.
        assert bench.check(f"{name}-norm") == ""


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp16"


@pytest.mark.parametrize(
    ("shape", "rows", "few", "tiles"),
    [
        (
            "qwen3-moe",
            1,
            16,
            {
                EXPERTS_UP: "experts-4x64-w2-s3",
                EXPERTS_DOWN: "experts-4x64-w2-s2",
                LM_HEAD: "gemv-64x128-w1",
                GQA_DECODE: "gqa-16-w4-s2",
            },
        ),
        ("v3", 1, 16, {MLA_DECODE: "mla-32x16-k32-w4-s2"}),
        ("qwen3-moe", 3, 16, {EXPERTS_UP: "experts-16x32-w4-s2", EXPERTS_DOWN: "experts-32x32-w4-s2"}),
        ("qwen3-moe", 3, 2, {EXPERTS_GROUPED: "grouped-32-64x64-gall-w4-s3-64x64-gall-w4-s3"}),
    ],
)
def test_a_step_with_other_tiles_has_the_logits_of_the_default(
    shape: str,
    rows: int,
    few: int,
    tiles: dict[str, str],
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    wide_tiles: None,
) -> None:
    from pellucid.kernels.triton import head

    monkeypatch.setattr(fused_step, "FEW_ROWS", few)
    monkeypatch.setattr(head, "MAX_ROWS", few)
    steps = FusedSteps.of(shape, rows, tmp_path, device, torch.float16)
    prompts = torch.randint(3, 200, (rows, 9), generator=torch.Generator().manual_seed(1)).tolist()
    steps.layered([steps.row(i, 0, prompts[i][:-1], prefill=True) for i in range(rows)])
    decode = [steps.row(i, 8, prompts[i][-1:]) for i in range(rows)]
    wanted = steps.step(decode).clone()

    limits = device_limits(device) if device.type == "cuda" else DeviceLimits(86, 4, 99 << 10)
    parsed = {(op, steps.bucket): parse_tile(name) for op, name in tiles.items()}
    other = FusedDecoder(steps.decoder, steps.pool, steps.state, steps.ring, PAGE * PAGES, limits, parsed)
    launched = []
    tile = fused_step.FusedStep.tile
    monkeypatch.setattr(
        fused_step.FusedStep, "tile", lambda self, op, default: launched.append(op) or tile(self, op, default)
    )
    steps.state.prepare(decode, steps.bucket, [_greedy()] * rows)
    other.step(steps.bucket)
    found = other.logits(steps.bucket)[:rows].float()
    assert set(tiles) <= set(launched)
    assert (found - wanted).norm() < 1e-2 * wanted.norm()
    assert not torch.equal(found, torch.zeros_like(found))
