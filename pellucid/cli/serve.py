"""`pellucid serve`: the HTTP server."""

from __future__ import annotations

import importlib.util

import click

from pellucid.cli.engine_options import engine_args, engine_options, field_options
from pellucid.core import PellucidError
from pellucid.selection.args import EngineArgs
from pellucid.server.args import ServeArgs

PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "zmq", "llguidance", "prometheus_client")


@click.command()
@click.argument("model", type=click.Path())
@click.option("--dry-run", is_flag=True, help="Print the plan that would be served with, and stop before weights load.")
@field_options(ServeArgs)
@engine_options
@click.pass_context
def serve(ctx: click.Context, /, model: str, dry_run: bool, **options: object) -> None:
    """Serve MODEL (a model folder, a GGUF file, a hub name, or `smollm2`) over OpenAI's API and Anthropic's messages.

    The port answers at once; /health/ready says when the model does. SIGTERM lets running requests finish.
    """
    asked = engine_args(ctx, model)
    args = ServeArgs(**{name: options[name] for name in ServeArgs.__dataclass_fields__})  # type: ignore[arg-type]
    if dry_run:
        _print_plan(asked, args)
        return
    check_serve_installed()
    from pellucid.server.launch import serve

    serve(asked, args)


def _print_plan(asked: EngineArgs, args: ServeArgs) -> None:
    args.keys()
    from pellucid.engine.startup import make_plan, open_model
    from pellucid.selection.explain import render

    files = open_model(asked.model)
    click.echo(render(make_plan(asked, files), files.notes))


def check_serve_installed() -> None:
    """Raises PellucidError naming what the server lacks."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise PellucidError(f"serving needs {', '.join(missing)}: pip install 'pellucid[serve]'")
