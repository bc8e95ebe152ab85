"""`pellucid explain`: the plan for a model on a machine, with every choice, its reasons and what was not taken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.pages import html_option, write_page
from pellucid.cli.targets import hardware_option
from pellucid.core import PellucidError

if TYPE_CHECKING:
    from pellucid.cli.plan_sources import Source


@click.command()
@click.argument("model", type=click.Path())
@hardware_option
@click.option("--why", metavar="OP@BUCKET", help="One decision in full, such as attention.decode@1 or kv.page_size.")
@click.option("--diff", "other", metavar="OTHER", help="Compare with another model, machine or stored plan.")
@html_option("Write the same as a page to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan itself as JSON.")
@engine_options
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    model: str,
    hardware: str,
    why: str | None,
    other: str | None,
    html: Path | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Show what would run for MODEL (a folder with config.json, or a GGUF file), and why. Needs no GPU and no weights.

    Reads headers only. The plan is the one the engine would run on; what would keep it from starting comes first. MODEL
    may also be a plan that --json, or a server's /plan, has stored: it is shown as it is, whatever this machine is.
    """
    if why is not None and (other is not None or html is not None):
        raise click.UsageError("--why shows one decision; leave out --diff and --html", ctx)
    from pellucid.cli.plan_sources import open_other, open_source

    args = engine_args(ctx, model)
    source = open_source(args, hardware)
    second = None if other is None else open_other(source, args, hardware, other)
    shown = [source] if second is None else [source, second]
    if all(one.subject is None for one in shown):
        typed = ctx.get_parameter_source("hardware") is not ParameterSource.DEFAULT
        _refuse_flags((*(("--hardware", hardware) if typed else ()), *args.command_line()), shown)
    if second is not None:
        _diff(source, second, html, as_json)
    elif why is not None:
        _why(source, why, as_json)
    else:
        _plan(source, html, as_json)


def _refuse_flags(words: Sequence[str], stored: Sequence[Source]) -> None:
    """Raises PellucidError for flags that go into making a plan, where every plan is made already."""
    if words:
        names = " and ".join(one.label for one in stored)
        kind = "is a stored plan" if len(stored) == 1 else "are stored plans"
        remedy = "leave that out, or explain the model that it was made for"
        raise PellucidError(f"{' '.join(words)}: {names} {kind}, which no flag changes; {remedy}")


def _plan(source: Source, html: Path | None, as_json: bool) -> None:
    from pellucid.selection.explain import render

    notes = (*(f"conflict: {line}" for line in source.conflicts), *source.notes)
    if html is not None:
        from pellucid.selection.plan_html import plan_html

        write_page(html, plan_html(source.plan, notes, source.label))
    if as_json:
        values = {**source.plan.to_json(), "notes": source.notes, "conflicts": source.conflicts}
        click.echo(json.dumps(values, indent=2))
    elif html is None:
        click.echo(render(source.plan, notes))


def _why(source: Source, why: str, as_json: bool) -> None:
    from pellucid.selection.explain import render_decision
    from pellucid.selection.lookup import find_decision

    decision = find_decision(source.plan, why)
    click.echo(json.dumps(asdict(decision), indent=2) if as_json else render_decision(source.plan, decision))


def _diff(source: Source, second: Source, html: Path | None, as_json: bool) -> None:
    from pellucid.selection.plan_diff import diff_plans, diff_subjects, render_diff

    names = source.label, second.label
    if source.subject is not None and second.subject is not None:
        found = diff_subjects(names, source.subject, second.subject)
    else:
        found = diff_plans(names, source.plan, second.plan)
    if html is not None:
        from pellucid.selection.plan_html import diff_html

        write_page(html, diff_html(found))
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    elif html is None:
        click.echo(render_diff(found))
