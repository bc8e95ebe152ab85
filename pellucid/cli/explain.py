"""`pellucid explain`: the plan for a model on a machine, with every choice, its reasons and what was not taken."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.targets import hardware_option, local_path


@click.command()
@click.argument("model", type=click.Path())
@hardware_option
@click.option("--why", metavar="OP@BUCKET", help="One decision in full, such as attention.decode@1 or kv.page_size.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan itself as JSON.")
@engine_options
@click.pass_context
def explain(ctx: click.Context, /, model: str, hardware: str, why: str | None, as_json: bool, **_: Any) -> None:
    """Show what would run for MODEL (a folder with config.json, or a GGUF file), and why. Needs no GPU and no weights.

    Reads headers only. The plan is the one the engine would run on; what would keep it from starting comes first.
    """
    from pellucid.hardware import load_hardware
    from pellucid.models.checkpoint import Checkpoint
    from pellucid.selection.explain import find_decision, render, render_decision
    from pellucid.selection.memory import stored_bytes
    from pellucid.selection.resolve import resolve

    checkpoint = Checkpoint.open(local_path(model))
    report = checkpoint.report()
    report.require_supported()
    stored = stored_bytes(checkpoint.tensors, report.traits.num_layers)
    plan = resolve(engine_args(ctx, model), report.traits, load_hardware(hardware), stored_bytes=stored)
    if why is not None:
        decision = find_decision(plan, why)
        click.echo(json.dumps(asdict(decision), indent=2) if as_json else render_decision(decision))
    elif as_json:
        click.echo(json.dumps({**plan.to_json(), "notes": report.notes, "conflicts": report.conflicts}, indent=2))
    else:
        conflicts = tuple(f"conflict: {line}" for line in report.conflicts)
        click.echo(render(plan, (*conflicts, *report.notes)))
