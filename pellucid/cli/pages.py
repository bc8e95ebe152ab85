"""Pages that verbs write beside their text. Used by `explain` and `trace`."""

from __future__ import annotations

from pathlib import Path

import click


def write_page(path: Path, text: str) -> None:
    """`text` into the file that --html names; says so on standard error. Raises ClickException where it can't."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"--html {path}: can't be written: {error.strerror}") from None
    click.echo(f"wrote {path}", err=True)
