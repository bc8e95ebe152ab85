"""`pellucid bench offline`: the command on a tiny config, and what it must not count as speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pellucid.bench.bandwidth import measure_speeds
from pellucid.bench.idle import KernelRun, random_prompts, union_us
from pellucid.bench.offline import Load, Repetition, degeneracy, sized
from pellucid.cli.main import cli
from pellucid.core import InvalidRequestError, PellucidError
from pellucid.selection.args import EngineArgs
from tests import checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.text_config(checkpoints.CONFIGS["v2"])))
    return tmp_path


def invoke(folder: Path, *words: str) -> list[str]:
    quick = ("--load-format", "synthetic", "--threads", "1", "--input-tokens", "9", "--output-tokens", "6")
    result = CliRunner().invoke(cli, ["bench", "offline", str(folder), *quick, *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_the_command_prints_the_floor_before_the_speed_and_json_last(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "offline.jsonl"
    lines = invoke(folder, "--concurrency", "1,3", "--save", str(saved))
    record: dict[str, Any] = json.loads(lines[-1])
    assert json.loads(saved.read_text()) == record
    floor, speed = (
        next(i for i, line in enumerate(lines) if word in line) for word in ("C=3: floor", "% of the floor")
    )
    assert next(i for i, line in enumerate(lines) if "C=1: floor" in line) < speed < floor
    assert [cell["concurrency"] for cell in record["cells"]] == [1, 3]
    for cell in record["cells"]:
        assert cell["invalid"] == []
        assert 0 < cell["floor_s"] <= cell["floor_uniform_s"] * 1.2
        assert cell["tokens_per_s"] == pytest.approx(cell["concurrency"] / cell["decode_step_s"]["median"])
        assert cell["share_of_floor"] == pytest.approx(cell["floor_s"] / cell["decode_step_s"]["median"])
        assert cell["ttft_s"]["max"] < cell["end_to_end_s"]["max"]
        # 4 of 16 experts a token.
        assert 4 <= cell["distinct_experts"]["median"] <= min(16, 4 * cell["concurrency"])
        assert cell["idle"] is None
    decisions = {(d["op"], d["bucket"]): d["value"] for d in record["decisions"]}
    assert decisions["load_format", None] == "synthetic"
    assert decisions["enable_prefix_caching", None] is False
    assert decisions["attention.decode", 1] == "cpu_native"
    assert {"commit", "date", "command", "machine", "torch", "speeds"} <= set(record)


def test_json_alone(folder: Path) -> None:
    (line,) = invoke(folder, "--concurrency", "2", "--json")
    assert json.loads(line)["cells"][0]["concurrency"] == 2


def test_profiling_on_a_cpu_is_one_clear_line(folder: Path) -> None:
    arguments = ["profile", str(folder), "--load-format", "synthetic", "--device", "cpu"]
    with pytest.raises(PellucidError, match="needs a CUDA device"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([(1, 2, 3, 4), (1, 2, 3, 4)], "all 2 sequences are equal"),
        ([(1, 2, 3, 4), (7, 7, 7, 1)], "1 of 2 sequences are one token"),
        ([(1, 2, 3, 4), (1, 2, 3)], "not every sequence has 4 tokens"),
    ],
)
def test_degenerate_outputs_are_told(outputs: list[tuple[int, ...]], reason: str) -> None:
    assert any(reason in found for found in degeneracy(outputs, 4))


def test_a_healthy_output_is_not_degenerate() -> None:
    assert degeneracy([(1, 2, 1, 2), (3, 4, 5, 6)], 4) == []
    assert degeneracy([(1, 2, 3, 4)], 4) == []


def test_a_step_lies_between_the_last_first_token_and_the_end() -> None:
    assert Repetition(2.0, 7.0, (), ()).step_s(6) == 1.0


def test_the_prefix_cache_is_off_and_can_not_be_asked_for() -> None:
    load = Load((1, 32), 512, 256)
    args = sized(EngineArgs("x"), load)
    assert (args.enable_prefix_caching, args.max_num_seqs, args.max_model_len) == (False, 32, 768)
    assert sized(EngineArgs("x", max_num_seqs=4, max_model_len=99), load).max_num_seqs == 4
    with pytest.raises(InvalidRequestError, match="--enable-prefix-caching"):
        sized(EngineArgs("x", enable_prefix_caching=True), load)
    with pytest.raises(InvalidRequestError, match="--output-tokens"):
        Load((1,), 512, 1)


def test_no_two_prompts_share_their_first_token() -> None:
    prompts = random_prompts(50, 7, 60, seed=3)
    assert len({prompt[0] for prompt in prompts}) == 50
    assert all(len(prompt) == 7 and max(prompt) < 60 for prompt in prompts)
    assert prompts == random_prompts(50, 7, 60, seed=3) != random_prompts(50, 7, 60, seed=4)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), min_size=1, max_size=12))
def test_busy_time_counts_each_moment_once(spans: list[tuple[int, int]]) -> None:
    kernels = [KernelRun("k", start, start + length) for start, length in spans]
    moments = {moment for start, length in spans for moment in range(start, start + length)}
    assert union_us(kernels) == len(moments)


def test_speeds_are_measured_with_their_spread() -> None:
    measured = measure_speeds(torch.device("cpu"), torch.float32, nbytes=1 << 22, width=64, runs=3)
    assert len(measured.read) == len(measured.matrix) == 3
    speeds = measured.speeds()
    assert min(measured.read) <= speeds.read_bandwidth <= max(measured.read)
    assert "measured in this run" in speeds.source
