"""`pellucid doctor`: whether `serve` would start here, or on a machine one does not have, and what to do if not."""

from __future__ import annotations

import json

import click

from pellucid.cli.engine_options import engine_args, engine_options, field_options
from pellucid.cli.serve import PACKAGES
from pellucid.cli.targets import hardware_option
from pellucid.server.args import ServeArgs


@click.command()
@click.argument("model", type=click.Path(), required=False)
@hardware_option
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
@field_options(ServeArgs)
@engine_options
@click.pass_context
def doctor(ctx: click.Context, /, model: str | None, hardware: str, as_json: bool, **options: object) -> None:
    """Check whether `serve` would start MODEL, with the same flags, before any weight is read or downloaded.

    Without MODEL, the machine alone. Each line is ok, warn or fail with a remedy; exit code 0: it would start, 1: not.
    """
    serve_args = ServeArgs(**{name: options[name] for name in ServeArgs.__dataclass_fields__})  # type: ignore[arg-type]
    args = engine_args(ctx, model or "")
    from pellucid.doctor.diagnose import Case, diagnose
    from pellucid.doctor.report import render_report
    from pellucid.hardware import load_hardware

    report = diagnose(Case(args, serve_args, load_hardware(hardware), hardware == "this", PACKAGES))
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else render_report(report))
    ctx.exit(report.exit_code)
