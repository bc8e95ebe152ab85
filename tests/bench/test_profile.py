"""Kernels by kind of work: recorded names, and what a profile of made-up kernels adds up to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pellucid.bench.idle import KernelRun, Window
from pellucid.bench.profile import CLASSES, bar_svg, class_times, classify, profile_of, render
from pellucid.bench.roofline import step_floor
from pellucid.hardware.facts import Speeds
from pellucid.models.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]

NAMES = {
    "attention": [
        "_absorb_rope_write",
        "_split_decode",
        "_combine_project",
        "_combine",
        "_attend",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>(Flash_fwd_params)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>>",
    ],
    "moe": [
        "_experts_up_kernel",
        "_down_row_kernel",
        "_down_rows_kernel",
        "_grouped_up",
        "_grouped_down",
        "_route_kernel",
        "_router_shared_kernel",
        "_reduce_kernel",
        "void at::native::(anonymous namespace)::gatherTopK<float, unsigned int, 2, false>",
    ],
    "dense gemm": [
        "_gemv_kernel",
        "_dot_kernel",
        "_dot_head_kernel",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(Params)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>",
    ],
    "norm, rope, elementwise": [
        "_rms_norm_kernel",
        "_silu_mul_kernel",
        "_norm_rope_write",
        "_latent_write_kernel",
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 6, false, false>",
    ],
    "sampling": [
        "_finish_step_kernel",
        "_partial_best_kernel",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned>>",
    ],
    "embedding": [
        "_begin_step_kernel",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long>",
    ],
    "all-reduce": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage_one_shot<__nv_bfloat16, 2>",
    ],
    "copies": [
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2>, unsigned, 2, 64, 64>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul>>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
    ],
    "other": ["some_kernel_nobody_knows"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_recorded_names(kind: str, name: str) -> None:
    assert classify(name) == kind


def test_every_triton_kernel_of_ours_has_a_class() -> None:
    launched = {
        name
        for path in (ROOT / "pellucid" / "kernels" / "triton").glob("*.py")
        for name in re.findall(r"\b(_\w+)\[\(", path.read_text())
        # Only `bench` launches it, outside steps.
        if path.name != "read.py"
    }
    assert launched
    assert {name for name in launched if classify(name) == "other"} == set()


def test_durations_are_kept_by_class_and_name() -> None:
    found = class_times([("_split_decode", 2.0), ("nvjet_a", 3.0), ("_split_decode", 4.0)])
    assert found == {"attention": {"_split_decode": [2.0, 4.0]}, "dense gemm": {"nvjet_a": [3.0]}}


def window(steps: int) -> Window:
    """Steps of 30 us: attention for 10, a gap of 5, a product for 10 whose end a copy of 6 overlaps, sampling for 1."""
    kernels = []
    for step in range(steps):
        at = 30.0 * step
        kernels += [KernelRun("_split_decode", at, at + 10), KernelRun("nvjet_x", at + 15, at + 25)]
        kernels += [KernelRun("Memcpy DtoH", at + 23, at + 29), KernelRun("_finish_step_kernel", at + 29, at + 30)]
    return Window(8, steps, tuple(kernels))


def test_a_profile_adds_up_for_one_step() -> None:
    traits = Checkpoint.open(ROOT / "tests" / "fixtures" / "configs" / "DeepSeek-V2-Lite.json").report().traits
    floor = step_floor(traits, Speeds(4.6e12, 790e12, "given"), batch=8, context=640)
    profile = profile_of(window(4), floor)
    by_name = {one.name: one for one in profile.classes}
    assert profile.step_us == pytest.approx(30)
    assert profile.gaps_us == pytest.approx(5)
    assert {name: one.us for name, one in by_name.items() if one.us} == pytest.approx(
        {"attention": 10, "dense gemm": 10, "copies": 6, "sampling": 1}
    )
    assert by_name["attention"].launches == 1
    assert by_name["attention"].share == pytest.approx(1 / 3)
    # Work that the step must do shows its floor even where no kernel has its name.
    assert by_name["moe"].us == 0
    known = sum(one.floor_us for one in profile.classes if one.floor_us is not None)
    assert known == pytest.approx(profile.floor_us)
    assert by_name["copies"].floor_us is None
    assert json.loads(json.dumps(profile.to_json()))["concurrency"] == 8
    assert "gaps: nothing runs" in render(profile)


def test_the_bar_is_valid_svg_as_long_as_the_step() -> None:
    traits = Checkpoint.open(ROOT / "tests" / "fixtures" / "configs" / "llama-3.1-8b-bf16.json").report().traits
    floor = step_floor(traits, Speeds(4.6e12, 790e12, "given"), batch=8, context=640)
    profile = profile_of(window(3), floor)
    root = ElementTree.fromstring(bar_svg([profile, profile], "a <b> & c"))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    rows: dict[str, float] = {}
    for box in boxes:
        rows[box.attrib["y"]] = rows.get(box.attrib["y"], 0.0) + float(box.attrib["width"])
    assert len(rows) == 2
    assert all(total == pytest.approx(720, abs=0.1) for total in rows.values())
    titles = {text.text.partition(":")[0] for box in boxes for text in box if text.text}
    assert titles == {"attention", "dense gemm", "copies", "sampling", "gaps"}
    assert titles - {"gaps"} <= set(CLASSES)
