"""The two published cases of selection: equal traits give equal plans (C01), tiles obey the device's limit (C02)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pellucid.hardware.facts import GPU
from pellucid.selection.memory import kv_formula
from pellucid.selection.tiles import attention_widths, largest_tile
from pellucid.traits.backend import SharedMemoryModel
from tests.selection.models import KIMI_K25, machine, plan, rejection

GPU_A = replace(machine("rtx-pro-6000x8-pcie"), gpus=(GPU("GPU-A", 120, 96 << 30, 101376, 188),) * 8)
GPU_B = replace(machine("h200"), gpus=(GPU("GPU-B", 90, 140 << 30, 232448, 132),))

RAGGED_PREFILL = SharedMemoryModel(
    kernel="ragged MLA prefill",
    phase="prefill",
    itemsize=2,
    terms=("M*qk", "N*qk", "N*v", "M*N"),
    tiles=((128, 64), (64, 64), (32, 64)),
)


@pytest.mark.parametrize(
    ("capability", "limit", "tile"),
    [(120, 101376, (64, 64)), (86, 101376, (64, 64)), (90, 232448, (128, 64)), (130, 101376, (64, 64))],
)
def test_the_largest_tile_within_the_limit_is_taken_on_any_capability(capability, limit, tile):
    hardware = replace(GPU_A, gpus=(GPU("any", capability, 96 << 30, limit, 100),) * 8)
    choice = largest_tile(RAGGED_PREFILL, attention_widths(KIMI_K25.attention), hardware.gpus[0].smem_optin_bytes)
    assert choice.tile == tile
    decision = plan(KIMI_K25, hardware).decision("attention.prefill", 1)
    assert decision.value == "triton_mla"
    note = " ".join(decision.because)
    assert f"tile {tile[0]}x{tile[1]}" in note


@pytest.mark.parametrize(("tile", "size"), [((128, 64), 106496), ((64, 64), 73728), ((32, 64), 57344)])
def test_the_closed_form_gives_the_reported_bytes(tile, size):
    assert RAGGED_PREFILL.bytes_needed(tile, {"qk": 192, "v": 128}) == size


def test_the_explanation_of_a_tile_names_both_numbers():
    because = largest_tile(RAGGED_PREFILL, {"qk": 192, "v": 128}, 101376).because
    assert "106496" in because
    assert "101376" in because


def test_a_kernel_none_of_whose_tiles_fits_is_rejected_before_it_is_launched():
    hardware = replace(GPU_A, gpus=(GPU("small", 75, 96 << 30, 49152, 100),) * 8)
    found = rejection(plan(KIMI_K25, hardware).decision("attention.prefill", 1), "triton_mla").misfits
    reason = next(m.reason for m in found if m.kind == "shared_memory")
    assert "57344" in reason
    assert "49152" in reason


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 70272), ("fp8", 35136)])
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_latent_cache_costs_the_same_on_every_rank(dtype, size, ranks):
    itemsize = {"bf16": 2, "fp8": 1}[dtype]
    assert KIMI_K25.kv_bytes_per_token(itemsize, ranks) == size
    assert "61 layers x (kv_lora_rank 512 + rope 64)" in kv_formula(KIMI_K25, dtype, ranks)


@pytest.mark.parametrize("hardware", [GPU_A, GPU_B], ids=["GPU-A", "GPU-B"])
def test_every_choice_has_a_reason(hardware):
    for decision in plan(KIMI_K25, hardware).decisions:
        assert all(decision.because), decision.key


def test_no_rule_of_sm_10_reaches_sm_12():
    found = plan(KIMI_K25, GPU_A)
    for op in ("attention.decode", "moe"):
        decision = found.decision(op, 1)
        assert decision.value not in ("trtllm_mla", "cutlass_mla", "flashinfer_trtllm")
    assert "SM 10.0" in rejection(found.decision("attention.decode", 1), "trtllm_mla").misfits[0].reason
    assert "SM 10.0" in rejection(found.decision("moe", 1), "flashinfer_trtllm").misfits[1].reason


def test_eight_ranks_leave_eight_heads_each():
    found = plan(KIMI_K25, GPU_A)
    assert found.tensor_parallel_size == 8
    assert "8 query heads per rank" in found.decision("attention.decode", 1).because[0]
