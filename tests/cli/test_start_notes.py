"""What a start says of its plan in the log: every note once, and every choice with the buckets that it holds for."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pellucid.cli.main import cli
from pellucid.core import PlanError
from pellucid.engine import startup
from pellucid.engine.startup import make_plan, open_model
from pellucid.selection.args import EngineArgs
from pellucid.server.args import ServeArgs
from pellucid.server.launch import _startup_lines, prepare
from pellucid.traits.misfit import Misfit
from pellucid.tuning import start
from pellucid.tuning.session import Tuned

ARGS = EngineArgs("demo-mla", device="cpu")
NOTES = ("step.decode@1: the default stays", "figures of older versions are used")


def tuned_with_notes(_args, _traits, _machine, resolve, *_, **__) -> Tuned:
    return Tuned(resolve({}), {}, NOTES)


def test_the_plan_that_a_server_makes_to_refuse_early_is_not_told_and_that_of_its_engine_once(monkeypatch, caplog):
    monkeypatch.setattr(startup, "tune_plan", tuned_with_notes)
    caplog.set_level(logging.INFO)
    prepare(ARGS, ServeArgs())
    assert not caplog.messages
    make_plan(ARGS, open_model(ARGS.model), measure=True)
    assert tuple(caplog.messages) == NOTES


def test_explain_tells_a_note_once(monkeypatch):
    monkeypatch.setattr(start, "tune_plan", tuned_with_notes)
    shown = CliRunner().invoke(cli, ["explain", "demo-mla", "--device", "cpu", "--json"]).output
    assert [note for note in json.loads(shown)["notes"] if note in NOTES] == list(NOTES)


def test_the_log_of_a_start_has_one_line_an_op_that_names_each_run_of_buckets():
    context, _, plan = prepare(replace(ARGS, max_num_seqs=8), ServeArgs())
    own = plan.decision("attention.decode", 1)
    taken = f"{own.value} ({own.how})"
    assert f"kernels: attention.decode={taken}" in list(_startup_lines(context, plan))
    mixed = [
        replace(d, value="another", how="measured") if d.op == "attention.decode" and d.bucket in (2, 4) else d
        for d in plan.decisions
    ]
    told = list(_startup_lines(context, replace(plan, decisions=tuple(mixed))))
    runs = f"{taken} at 1, another (measured) at 2..4, {taken} at 8 tokens"
    assert [line for line in told if "attention.decode" in line] == [f"kernels: attention.decode={runs}"]
    ops = {d.op for d in plan.decisions if d.op.partition(".")[0] in ("attention", "moe", "linear")}
    assert {line.partition("=")[0] for line in told if line.startswith("kernels: ")} == {f"kernels: {op}" for op in ops}


def test_a_start_of_which_everything_is_known_to_be_wrong_is_refused_before_weights_are_read(monkeypatch):
    wrong = Misfit("moe: whatever fits failed the numeric gate here", "--measure full looks again", "numerics")

    def tuned(_args, _traits, _machine, resolve, *_, **__) -> Tuned:
        return Tuned(replace(resolve({}), blockers=(wrong,)), {}, ())

    monkeypatch.setattr(startup, "tune_plan", tuned)
    with pytest.raises(PlanError, match="failed the numeric gate here"):
        make_plan(ARGS, open_model(ARGS.model))
