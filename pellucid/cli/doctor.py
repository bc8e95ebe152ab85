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
@click.option(
    "--kernels",
    is_flag=True,
    help="Run every kernel that fits MODEL, too: numeric gate and time. Needs the device; takes a minute or more.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
@field_options(ServeArgs)
@engine_options
@click.pass_context
def doctor(
    ctx: click.Context, /, model: str | None, hardware: str, kernels: bool, as_json: bool, **options: object
) -> None:
    """Check whether `serve` would start MODEL, with the same flags, before any weight is read or downloaded.

    Without MODEL, the machine alone. Each line is ok, warn or fail with a remedy; exit code 0: it would start, 1: not.
    With --kernels, what is wrong on this machine and how fast the rest is, at MODEL's shapes; later starts know it.
    """
    if kernels and not model:
        raise click.UsageError("--kernels runs kernels at the shapes of a model: name MODEL too")
    serve_args = ServeArgs(**{name: options[name] for name in ServeArgs.__dataclass_fields__})  # type: ignore[arg-type]
    args = engine_args(ctx, model or "")
    from pellucid.doctor.diagnose import Case, diagnose
    from pellucid.doctor.report import render_report
    from pellucid.hardware import load_hardware
    from pellucid.utils.progress import StatusLine

    status = StatusLine("measuring")
    try:
        case = Case(args, serve_args, load_hardware(hardware), hardware == "this", PACKAGES, kernels)
        report = diagnose(case, status.update)
    finally:
        status.close()
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else render_report(report))
    ctx.exit(report.exit_code)
