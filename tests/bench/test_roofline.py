"""The floor of a step: the weights are the memory bill's, the published figures come out, units are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pellucid.bench.roofline import all_reduce_seconds, machine_speeds, step_floor
from pellucid.cli.bench import bench
from pellucid.core import PellucidError
from pellucid.hardware import load_hardware
from pellucid.hardware.facts import Speeds
from pellucid.models.checkpoint import Checkpoint
from pellucid.selection.memory import bytes_per_weight, count_weights
from pellucid.traits.model import ModelTraits

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
EARLIER = Speeds(4.3e12, 790e12, "a copy, and a product, on an H200")
"""What the published floors below were computed with."""


def traits(name: str) -> ModelTraits:
    return Checkpoint.open(CONFIGS / name).report().traits


ZOO = sorted(path.name for path in CONFIGS.glob("*.json") if ".hf_quant" not in path.name)


@pytest.mark.parametrize(
    ("name", "batch", "context", "ranks", "gigabytes", "milliseconds"),
    [
        ("DeepSeek-V2-Lite.json", 1, 128, 1, 4.90, 1.141),
        ("DeepSeek-V2-Lite.json", 8, 1024, 1, 18.15, 4.22),
        ("DeepSeek-V2-Lite.json", 128, 1024, 1, 35.1, 8.16),
        ("llama-3.1-8b-bf16.json", 1, 1024, 1, 15.14, 3.52),
        ("llama-3.1-8b-bf16.json", 128, 1024, 1, 32.2, 7.49),
        ("qwen3-30b-a3b-bf16.json", 32, 1024, 1, 56.3, 13.1),
    ],
)
def test_the_floor_is_the_one_computed_by_hand(
    name: str, batch: int, context: int, ranks: int, gigabytes: float, milliseconds: float
) -> None:
    floor = step_floor(traits(name), EARLIER, batch=batch, context=context, ranks=ranks)
    assert floor.num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert floor.seconds * 1e3 == pytest.approx(milliseconds, rel=0.005)
    assert floor.tokens_per_second == pytest.approx(batch / floor.seconds)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("ranks", [1, 8])
def test_with_every_expert_hit_the_weights_read_are_those_of_the_memory_bill(name: str, ranks: int) -> None:
    model = traits(name)
    experts = None if model.moe is None else float(model.moe.num_experts)
    floor = step_floor(model, EARLIER, batch=1, context=1, ranks=ranks, distinct_experts=experts, link="pcie")
    read = sum(op.layers * op.num_bytes for op in floor.ops if op.name != "attention over the cache")
    bill = {w.name: w.count * bytes_per_weight(w.form) for w in count_weights(model, ranks)}
    looked_up = bill.pop("embedding")
    if model.tied_embeddings:
        bill["lm_head"] = looked_up
    assert read == pytest.approx(sum(bill.values()))


def test_a_step_never_gets_cheaper_with_more_sequences_or_longer_ones() -> None:
    model = traits("DeepSeek-V2-Lite.json")
    times = [[step_floor(model, EARLIER, batch=b, context=c).seconds for c in (1, 100, 5000)] for b in (1, 2, 16, 300)]
    assert all(row == sorted(row) for row in times)
    assert all(list(column) == sorted(column) for column in zip(*times, strict=True))


def test_counted_experts_replace_the_expected_ones_and_more_than_there_are_is_refused() -> None:
    model = traits("DeepSeek-V2-Lite.json")
    expected = step_floor(model, EARLIER, batch=8, context=1)
    counted = step_floor(model, EARLIER, batch=8, context=1, distinct_experts=6)
    assert expected.distinct_experts == pytest.approx(64 * (1 - (58 / 64) ** 8))
    one_expert = 26 * 3 * 2048 * 1408 * 2
    assert expected.num_bytes - counted.num_bytes == pytest.approx((64 * (1 - (58 / 64) ** 8) - 6) * one_expert)
    with pytest.raises(PellucidError, match="65 distinct experts"):
        step_floor(model, EARLIER, batch=8, context=1, distinct_experts=65)


def test_small_messages_go_one_shot_and_large_ones_in_rings() -> None:
    small = all_reduce_seconds(1024, 8, "pcie")
    large = all_reduce_seconds(1 << 24, 8, "pcie")
    assert min(small, key=small.__getitem__) == "one-shot"
    assert min(large, key=large.__getitem__) == "two-shot"
    # Of 8 GPUs behind PCIe switches, measured elsewhere: one-shot 7.5 us at 1 KB, NCCL 24 us at some KB.
    assert small["one-shot"] == pytest.approx(7.5e-6, rel=0.3)
    assert all_reduce_seconds(8192, 8, "pcie")["ring"] == pytest.approx(24e-6, rel=0.3)
    with pytest.raises(PellucidError, match="no model of links"):
        all_reduce_seconds(1024, 2, "none")


def test_communication_is_told_apart_from_the_floor() -> None:
    model = traits("DeepSeek-V2-Lite.json")
    floor = step_floor(model, EARLIER, batch=1, context=1024, ranks=2, link="nvlink")
    assert floor.all_reduce is not None
    assert floor.all_reduce.count == 2 * model.num_layers
    assert floor.tokens_per_second == pytest.approx(1 / (floor.seconds + floor.all_reduce_seconds))


def test_speeds_are_those_given_else_those_known_else_asked_for() -> None:
    known, unknown = load_hardware("h200"), load_hardware("cpu")
    assert machine_speeds(known, None, None) == known.speeds
    mixed = machine_speeds(known, 1e12, None)
    assert (mixed.read_bandwidth, mixed.matrix_flops) == (1e12, known.speeds.matrix_flops if known.speeds else 0)
    assert machine_speeds(unknown, 1e11, 1e12) == Speeds(1e11, 1e12, "bandwidth and matrix rate as given")
    with pytest.raises(PellucidError, match="give --bandwidth"):
        machine_speeds(unknown, 1e11, None)


def test_the_command_prints_a_table_and_the_same_as_json() -> None:
    model = str(CONFIGS / "DeepSeek-V2-Lite.json")
    arguments = ["roofline", model, "--hardware", "h200", "--concurrency", "1,64"]
    shown = CliRunner().invoke(bench, [*arguments, "--ops"], catch_exceptions=False).output
    assert "4.60 TB/s and 790 TFLOP/s a GPU: measured" in shown
    assert "routed experts" in shown
    found = json.loads(CliRunner().invoke(bench, [*arguments, "--json"], catch_exceptions=False).output)
    assert [floor["batch"] for floor in found["floors"]] == [1, 64]
    for floor in found["floors"]:
        assert f"{floor['seconds'] * 1e3:9.3f}" in shown


def test_bad_numbers_and_too_many_ranks_are_one_line() -> None:
    model = str(CONFIGS / "DeepSeek-V2-Lite.json")
    wrong = CliRunner().invoke(bench, ["roofline", model, "--hardware", "h200", "--concurrency", "1,no"])
    assert "give whole numbers of 1 or more" in wrong.output
    with pytest.raises(PellucidError, match="h200 has 1 GPUs"):
        CliRunner().invoke(bench, ["roofline", model, "--hardware", "h200", "-tp", "2"], catch_exceptions=False)
