"""`pellucid trace`: what SGLang or vLLM would choose for a model on a GPU, and on which line of their code."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pellucid.cli.pages import html_option, write_page
from pellucid.cli.trace_many import audit, diff, grid
from pellucid.cli.trace_options import (
    EPILOG,
    Asked,
    engine_argument,
    gpu_option,
    json_option,
    model_option,
    shared_options,
    show,
    status,
    traced,
    tree_of,
)

_ENGINE_NAMED = re.compile(r"(sglang|vllm)(?:==([^@]*))?(?:@(.+))?")


class _Trace(click.Group):
    """Takes `sglang==0.5.9` and `sglang@FOLDER`, the other verbs' ENGINE, for a verb of that engine."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        named = _ENGINE_NAMED.fullmatch(args[0])
        if named is not None:
            engine, version, path = named.groups()
            args = [
                engine,
                *(("--version", version) if version else ()),
                *(("--path", path) if path else ()),
                *args[1:],
            ]
        return super().resolve_command(ctx, args)


@click.group(cls=_Trace)
def trace() -> None:
    """Run an engine's own decision code on a simulated GPU, and show every choice with the line that made it.

    Needs no GPU and no weights. Nothing of the engine is installed: its wheel's sources are read in a closed process.
    """


trace.add_command(audit)
trace.add_command(diff)
trace.add_command(grid)


_EXIT_CODES = "Exit code 1: the engine refuses; 3: the tracer could not follow it to the end."


def _of_one_engine(name: str, title: str) -> click.Command:
    @trace.command(name, help=f"Trace {title}: each choice for a model, and its line.\n\n{_EXIT_CODES}")
    @model_option
    @gpu_option
    @click.option("--version", metavar="X", help="Release to trace, fetched if need be; else the one at hand.")
    @click.option("--path", metavar="FOLDER", help="site-packages folder with an installed copy to trace instead.")
    @click.option("--as", "architecture", metavar="NAME", help="Pretend that config.json names this architecture.")
    @click.option("--field", metavar="NAME", help="One decision in full.")
    @click.option("--log", is_flag=True, help="The lines that the engine would print, too.")
    @html_option("Write the report to this file.")
    @json_option
    @shared_options
    @click.pass_context
    def command(
        ctx: click.Context,
        /,
        model: str,
        gpu: str,
        version: str | None,
        path: str | None,
        architecture: str | None,
        field: str | None,
        log: bool,
        html: Path | None,
        as_json: bool,
        **shared: Any,
    ) -> None:
        from pellucid.tracer.preflight import EXIT_CODES
        from pellucid.tracer.render import render, render_decision, render_log

        engine = name + (f"=={version}" if version else "") + (f"@{path}" if path else "")
        with status() as progress:
            request = Asked(**shared).request(engine, model, gpu, progress, architecture)
            (found,) = traced([request], progress)
        if html is not None:
            from pellucid.tracer.html import to_html

            write_page(html, to_html(found, request.tree.root))
        if as_json:
            click.echo(json.dumps(found.to_json() if field is None else asdict(found.decision(field)), indent=2))
        elif html is None:
            show(render(found) if field is None else render_decision(found, field))
            if log:
                show("\n" + render_log(found))
        if found.refusal is not None:
            ctx.exit(EXIT_CODES["unknown" if found.refusal.ours else "refuses"])

    return command


sglang = _of_one_engine("sglang", "SGLang")
vllm = _of_one_engine("vllm", "vLLM")


@trace.command()
@click.argument("what", nargs=-1, required=True, metavar="ENGINE==VERSION|WHEEL...")
def fetch(what: tuple[str, ...]) -> None:
    """Download sources of engines, and build what running them needs.

    Give releases such as sglang==0.5.9, which pip downloads, or wheel files. Only their Python files are kept.
    """
    from pellucid.tracer.environment import environment_for
    from pellucid.tracer.sources import add_wheel

    for one in what:
        with status() as progress:
            tree = add_wheel(Path(one), progress) if one.endswith(".whl") else tree_of(one, progress)
            environment = environment_for(tree, progress)
        transformers = environment.packages.get("transformers", "?")
        click.echo(f"{tree}: sources in {tree.root}; runs with transformers {transformers} in {environment.python}")


@trace.command(epilog=EPILOG)
@engine_argument
@click.argument("field", metavar="FIELD")
@model_option
@gpu_option
@shared_options
def why(engine: str, field: str, model: str, gpu: str, **shared: Any) -> None:
    """Say why ENGINE gives FIELD its value, quoting lines."""
    from pellucid.tracer.why import why as explain

    with status() as progress:
        (found,) = traced([Asked(**shared).request(engine, model, gpu, progress)], progress)
    show(explain(found, field))


@trace.command(epilog=EPILOG)
@engine_argument
@model_option
@gpu_option
@json_option
@shared_options
@click.pass_context
def preflight(ctx: click.Context, /, engine: str, model: str, gpu: str, as_json: bool, **shared: Any) -> None:
    """Say whether ENGINE would start, and why not.

    Exit code 0: it starts, as far as its choices go; 1: it refuses; 3: that could not be told.
    """
    from pellucid.tracer.preflight import preflight as check
    from pellucid.tracer.preflight import render_preflight

    with status() as progress:
        (found,) = traced([Asked(**shared).request(engine, model, gpu, progress)], progress)
    result = check(found)
    show(json.dumps(result.to_json(), indent=2) if as_json else render_preflight(result))
    ctx.exit(result.exit_code)


@trace.command(epilog=EPILOG)
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@engine_argument
@model_option
@gpu_option
@json_option
@shared_options
@click.pass_context
def verify(ctx: click.Context, /, log: Path, engine: str, model: str, gpu: str, as_json: bool, **shared: Any) -> None:
    """Compare a trace with a real start-up log.

    Give the flags that the server was started with behind `--`. Exit code 0: all that LOG states is as traced; 1:
    something differs; 3: it states nothing that was traced.
    """
    from pellucid.tracer.verify import render_verification
    from pellucid.tracer.verify import verify as compare

    with status() as progress:
        (found,) = traced([Asked(**shared).request(engine, model, gpu, progress)], progress)
    result = compare(found, log.read_text(encoding="utf-8", errors="replace"))
    show(json.dumps(result.to_json(), indent=2) if as_json else render_verification(result))
    ctx.exit(result.exit_code)
