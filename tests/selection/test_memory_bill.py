"""The memory bill against counts done by hand, and the pages that follow from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.selection.memory import bytes_per_weight, count_weights, stored_bytes
from pellucid.traits.model import WeightFormat
from pellucid.traits.tensors import TensorInfo
from tests.selection.models import KIMI_K25, SMALL_DENSE, V2_LITE, machine, plan


def test_the_parameters_of_published_models_are_counted():
    assert sum(w.count for w in count_weights(KIMI_K25)) == pytest.approx(1.026e12, rel=0.002)
    assert sum(w.count for w in count_weights(V2_LITE)) == pytest.approx(15.7e9, rel=0.005)


def test_a_dense_model_is_counted_by_hand():
    per_layer = 1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072
    assert sum(w.count for w in count_weights(SMALL_DENSE)) == 28 * per_layer + 32000 * 1024


@pytest.mark.parametrize("model", [KIMI_K25, V2_LITE, SMALL_DENSE])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_hold_at_least_the_whole_model_and_copies_only_what_cannot_be_cut(model, ranks):
    whole = {w.name: w.count for w in count_weights(model)}
    for share in count_weights(model, ranks):
        assert share.count * ranks >= whole[share.name]
        if share.name not in ("attention", "router"):
            assert share.count * ranks == whole[share.name]
    assert sum(w.count for w in count_weights(model, ranks)) < sum(whole.values())


@pytest.mark.parametrize(
    ("form", "size"),
    [
        (WeightFormat("bf16"), 2.0),
        (WeightFormat("int4", 32), 0.5625),
        (WeightFormat("q4_1", 32, False), 0.625),
        (WeightFormat("q8_0", 32), 1.0625),
        (WeightFormat("nvfp4", 16), 0.5625),
        (WeightFormat("q6_k"), 0.8203125),
    ],
)
def test_a_weight_is_billed_with_its_scales(form, size):
    assert bytes_per_weight(form) == size


def test_pages_and_the_rest_stay_within_the_budget():
    for where in ("h200", "rtx-pro-6000x8-pcie", "cpu", "a100"):
        found = plan(V2_LITE, where)
        bill = found.memory
        used = bill.fixed_bytes + (found.num_kv_pages + 1) * found.page_size * bill.kv_bytes_per_token
        assert used <= bill.budget_bytes
        assert found.max_model_len <= found.num_kv_pages * found.page_size


def test_a_gpu_is_filled_and_a_host_is_not_taken_beyond_what_is_useful():
    gpu = plan(V2_LITE, "h200")
    assert gpu.num_kv_pages == gpu.memory.pages_that_fit(64)
    host = plan(V2_LITE, "cpu", max_model_len=1000, max_num_seqs=2)
    assert host.num_kv_pages == 2 * 16


def test_the_length_is_what_the_pages_hold_when_the_model_allows_more():
    tight = replace(machine("h200"), gpus=(replace(machine("h200").gpus[0], memory_bytes=39 << 30),))
    found = plan(V2_LITE, tight)
    assert found.max_model_len < V2_LITE.max_position
    assert found.max_model_len == found.num_kv_pages * 64


def test_a_cache_of_fp8_costs_half():
    bf16, fp8 = (replace(V2_LITE.attention).kv_elements_per_token() * 27 * size for size in (2, 1))
    assert V2_LITE.kv_bytes_per_token(2) == bf16 == 2 * fp8


def test_grouped_query_heads_are_divided_over_ranks_and_the_latent_is_not():
    assert plan(SMALL_DENSE, "h200x2", tensor_parallel_size=2).memory.kv_bytes_per_token == 28 * 2 * 4 * 128 * 2
    assert plan(V2_LITE, "h200x2", tensor_parallel_size=2).memory.kv_bytes_per_token == 27 * 576 * 2


def test_stored_bytes_are_summed_by_class_and_draft_layers_left_out():
    sizes = {
        "language_model.model.layers.0.self_attn.o_proj.weight": 1,
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": 2,
        "model.layers.1.mlp.experts.3.up_proj.weight_packed": 4,
        "model.layers.1.mlp.experts.3.up_proj.weight_scale": 8,
        "model.layers.2.self_attn.o_proj.weight": 16,
        "vision_tower.encoder.blocks.0.wqkv.weight": 32,
        "lm_head.weight": 64,
    }
    tensors = {name: TensorInfo(name, "BF16", (1,), Path("x"), 0, size) for name, size in sizes.items()}
    assert stored_bytes(tensors, num_layers=2) == {"attention": 3, "routed experts": 12, "lm_head": 64}


def test_a_busy_host_gives_only_what_is_free():
    cpu = machine("cpu").cpu
    busy = replace(machine("cpu"), cpu=replace(cpu, available_bytes=40 << 30))
    assert plan(V2_LITE, "cpu").memory.budget_bytes == cpu.memory_bytes // 2
    assert plan(V2_LITE, busy).memory.budget_bytes == 40 << 30
    assert "free now" in plan(V2_LITE, busy).memory.budget_formula
