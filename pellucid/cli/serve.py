"""`pellucid serve`: the HTTP server."""

from __future__ import annotations

import importlib.util

import click

from pellucid.cli.engine_options import engine_args, engine_options, field_options
from pellucid.core import PellucidError
from pellucid.server.args import ServeArgs

PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "zmq", "llguidance", "prometheus_client")

HINTS = {
    "--model": "the model is the first argument: pellucid serve MODEL",
    "--model-path": "the model is the first argument: pellucid serve MODEL",
    "-tp": "spell it --tensor-parallel-size",
    "--tp": "spell it --tensor-parallel-size",
    "--tp-size": "spell it --tensor-parallel-size",
    "--context-length": "here it is --max-model-len",
    "--max-running-requests": "here it is --max-num-seqs",
    "--chunked-prefill-size": "here it is --max-num-batched-tokens",
    "--mem-fraction-static": "here it is --gpu-memory-utilization",
    "--page-size": "here it is --block-size",
    "--moe-runner-backend": "here it is --moe-backend",
    "--tokenizer": "the tokenizer is the model's own, from its folder or its GGUF file; leave the flag out",
    "--trust-remote-code": "no code of a model is ever run; leave the flag out",
    "--enable-auto-tool-choice": "tool calls are on where the model has a form for them; leave the flag out",
    "--enforce-eager": "nothing is captured on this version's backends; leave the flag out",
    "--disable-log-requests": "one line a request, never its text; --log-level warning for none",
    "--enable-metrics": "/metrics is always there; leave the flag out",
    "--ssl-keyfile": "TLS is the reverse proxy's; see docs/operate.md",
    "--ssl-certfile": "TLS is the reverse proxy's; see docs/operate.md",
    "--allowed-origins": "here it is --cors-origin",
}
"""Flags of vLLM and SGLang that people bring along, and what to do instead."""


class ServeCommand(click.Command):
    """Answers flags of other engines by what they are here; click's guess would be by spelling."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for argument in args:
            name = argument.partition("=")[0]
            if name in HINTS:
                raise click.UsageError(f"no such option: {name}; {HINTS[name]}", ctx)
        return super().parse_args(ctx, args)


@click.command(cls=ServeCommand)
@click.argument("model", type=click.Path())
@click.option("--dry-run", is_flag=True, help="Print the plan that would be served with, and stop before weights load.")
@field_options(ServeArgs)
@engine_options
@click.pass_context
def serve(ctx: click.Context, /, model: str, dry_run: bool, **options: object) -> None:
    """Serve MODEL (model folder, GGUF file, hub name, `smollm2` or `demo-mla`) over OpenAI's and Anthropic's APIs.

    The port answers at once; /health/ready says when the model does. SIGTERM lets running requests finish.
    """
    asked = engine_args(ctx, model)
    args = ServeArgs(**{name: options[name] for name in ServeArgs.__dataclass_fields__})  # type: ignore[arg-type]
    check_serve_installed()
    from pellucid.server.launch import prepare, serve

    if dry_run:
        from pellucid.selection.explain import render

        _, files, plan = prepare(asked, args)
        click.echo(render(plan, files.notes))
        return
    serve(asked, args)


def check_serve_installed() -> None:
    """Raises PellucidError naming what the server lacks."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise PellucidError(f"serving needs {', '.join(missing)}: pip install 'pellucid[serve]'")
