"""The plan that `doctor` shows is the one that `serve` makes and `explain` prints: with what was measured here."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import pytest
from click.testing import CliRunner

from pellucid.cli.main import cli
from pellucid.cli.plan_sources import open_source
from pellucid.cli.serve import PACKAGES
from pellucid.doctor.diagnose import Case, diagnose
from pellucid.doctor.plan import plan_checks
from pellucid.engine.startup import make_plan, open_model
from pellucid.hardware import load_hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.memory import stored_bytes
from pellucid.selection.resolve import resolve
from pellucid.selection.view import rows
from pellucid.server.args import ServeArgs
from pellucid.tuning.start import tune_plan
from tests.doctor.simulated import MOE, OTHER_MOE, SLOW, TINY, TINY_FLAGS
from tests.selection.models import V2_LITE
from tests.tuning.simulated import SimulatedBench, gpu_machine, resolver

FAST = {"reference": 10.0, "cpu_native": 100.0}
"""Not the default's order."""


def measure_here(model, bench, **flags):
    """What `pellucid tune` leaves in this machine's store, had the candidates these figures."""
    args = EngineArgs(str(model), measure="full", measure_seconds=3600, **{**TINY_FLAGS, **flags})
    files, machine = open_model(str(model)), load_hardware("this")
    stored = stored_bytes(files.checkpoint.tensors, files.traits.num_layers)
    make = partial(resolve, args, files.traits, machine, stored_bytes=stored)
    tensors = files.checkpoint.tensors
    return tune_plan(args, files.traits, machine, make, tensors, True, bench=bench, clock=bench.clock)


def shown(model, hardware=None, is_here=True, **flags) -> dict[str, str]:
    """The lines of the plan's buckets."""
    args = EngineArgs(str(model), **{**TINY_FLAGS, **flags})
    case = Case(args, ServeArgs(port=0), hardware or load_hardware("this"), is_here, PACKAGES)
    return {c.name: c.found for c in diagnose(case).checks if c.group == "plan" and "@" in c.name}


def told(plan) -> dict[str, str]:
    return {row.title: f"{row.value}  ({row.how})" for row in rows([d for d in plan.decisions if d.bucket is not None])}


@pytest.mark.parametrize("wrong", [{}, {"cpu_native": "row 2 differs"}])
@pytest.mark.parametrize("flags", [{}, {"measure": "off"}, {"moe_backend": "cpu_native"}, {"max_num_seqs": 1}])
def test_doctor_explain_and_serve_make_one_plan_of_what_was_measured_here(tiny, wrong, flags):
    args = EngineArgs(str(tiny), **{**TINY_FLAGS, **flags})
    default = told(make_plan(args, open_model(str(tiny))))
    assert shown(tiny, **flags) == default
    measure_here(tiny, SimulatedBench(FAST, wrong), **{k: v for k, v in flags.items() if k != "measure"})
    plan = make_plan(args, open_model(str(tiny)))
    assert shown(tiny, **flags) == told(plan) == told(open_source(args, "this").plan)
    assert (told(plan) == default) is ("measure" in flags)


def test_the_command_names_what_was_measured_and_what_came_of_it(tiny):
    before = CliRunner().invoke(cli, ["doctor", str(tiny), *TINY]).output
    measure_here(tiny, SimulatedBench({**FAST, "default": 10.0, "measured": 20.0}))
    after = CliRunner().invoke(cli, ["doctor", str(tiny), *TINY]).output
    assert "(measured)" not in before and "note" not in before
    assert "step.decode@1: the default stays" in after and after.count("step.decode@1: ") == 1


def test_of_a_machine_that_is_described_nothing_is_known_even_when_it_is_like_this_one(tiny, tmp_path):
    default = shown(tiny)
    measure_here(tiny, SimulatedBench(FAST))
    assert shown(tiny, load_hardware("this"), is_here=False) == default != shown(tiny)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(asdict(load_hardware("this"))))
    described = CliRunner().invoke(cli, ["doctor", str(tiny), *TINY, "--hardware", str(path)])
    assert described.exit_code == 0 and "(measured)" not in described.output


def test_what_is_known_to_be_wrong_keeps_a_plan_from_starting(tiny):
    wrong = {"cpu_native": "row 2 differs", "reference": "row 3 differs"}
    measure_here(tiny, SimulatedBench({}, wrong))
    result = CliRunner().invoke(cli, ["doctor", str(tiny), *TINY, "--json"])
    failed = {c["name"] for c in json.loads(result.output)["checks"] if c["status"] == "fail"}
    assert result.exit_code == 1 and {"moe", "attention.decode"} <= failed


def test_known_figures_are_read_without_torch_and_in_two_seconds(tiny, tmp_path):
    measure_here(tiny, SimulatedBench(FAST))
    code = (
        "import sys; from pellucid.cli.main import cli;"
        f"cli.main(['doctor', {str(tiny)!r}, *{TINY!r}], standalone_mode=False);"
        "print('torch' in sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PELLUCID_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "reference  (measured)" in run.stdout and run.stdout.splitlines()[-1] == "False"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


# --- on a card ----------------------------------------------------------------------------------


def on_a_card(times, wrong=None):
    bench = SimulatedBench({**SLOW, "default": 500.0, "measured": 480.0, **times}, wrong or {})
    args = EngineArgs("model", measure="full", measure_seconds=3600)
    return tune_plan(args, V2_LITE, gpu_machine(), resolver(), {}, True, bench=bench, clock=bench.clock).plan


def test_measured_tiles_of_decode_steps_are_one_line():
    pytest.importorskip("triton", reason="triton is for Linux")
    plan = on_a_card({"library": 45.0})
    known = {d.op for d in plan.decisions} - {d.op for d in resolver()({}).decisions}
    found = {check.name: check.found for check in plan_checks(plan, ())}
    count = sum(d.op in known for d in plan.decisions)
    assert count > 3 and found["tiles"].startswith(f"{count} of decode steps  (measured")
    assert not any(name.partition("@")[0] in known for name in found)
    assert "tiles" not in {check.name for check in plan_checks(resolver()({}), ())}


@pytest.mark.parametrize(
    ("times", "wrong", "is_slow"),
    [
        ({"reference": 1.0}, {}, False),
        ({}, {MOE: "row 2 differs", OTHER_MOE: "row 2 differs"}, True),
    ],
)
def test_plain_torch_is_a_slow_path_unless_it_was_measured_to_be_the_fastest(times, wrong, is_slow):
    plan = on_a_card(times, wrong)
    assert plan.backends("moe") == {"reference"}
    slow = [check.found for check in plan_checks(plan, ()) if check.name == "slow path" and "moe" in check.found]
    assert bool(slow) is is_slow
