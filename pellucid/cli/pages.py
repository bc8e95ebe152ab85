"""Pages that verbs write beside their text. Used by `explain` and `trace`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from pellucid.bench.outputs import writable
from pellucid.cli.engine_options import F


def html_option(text: str) -> Callable[[F], F]:
    """`--html FILE`; `text` is its help."""
    return click.option("--html", type=click.Path(path_type=Path), callback=writable, help=text)


def write_page(path: Path, text: str) -> None:
    """`text` into the file that --html names; says so on standard error. Raises ClickException where it can't."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"--html {path}: can't be written: {error.strerror}") from None
    click.echo(f"wrote {path}", err=True)
