"""What is said before weights are read: a slow path that the user can leave."""

from __future__ import annotations

from dataclasses import replace

from pellucid.engine.inputs import slow_path_reasons
from pellucid.hardware import load_hardware
from tests.selection.models import SMALL_DENSE, plan


def test_a_machine_without_a_compiler_is_told_so_once_with_the_remedy() -> None:
    machine = load_hardware("cpu")
    bare = replace(machine, cpu=replace(machine.cpu, compiler=None, compiler_version=None))
    [reason] = slow_path_reasons(plan(SMALL_DENSE, bare))
    assert "no C++ compiler" in reason
    assert "apt install g++" in reason


def test_what_was_asked_for_and_costs_speed_is_said() -> None:
    [reason] = slow_path_reasons(plan(SMALL_DENSE, "cpu", dtype="bfloat16"))
    assert "cpu_native" in reason
    assert "fp32" in reason


def test_the_fast_path_and_the_gpu_say_nothing() -> None:
    assert slow_path_reasons(plan(SMALL_DENSE, "cpu")) == ()
    assert slow_path_reasons(plan(SMALL_DENSE, "h200")) == ()
    assert slow_path_reasons(plan(SMALL_DENSE, "cpu", linear_backend="reference", attention_backend="reference")) == ()
