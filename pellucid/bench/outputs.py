"""Options that name a file to write when the work is done: looked at before it begins. Used by benchmarks and verbs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pellucid.core import PellucidError


def writable(_ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Callback of such an option. Raises PellucidError where the file could not be written, so that no work is lost."""
    if value is None:
        return None
    refusal = f"{param.opts[0]} {value}: can't be written: "
    if value.is_dir():
        raise PellucidError(f"{refusal}it is a folder; name a file")
    if not value.parent.is_dir():
        raise PellucidError(f"{refusal}there is no folder {value.parent}")
    if not os.access(value if value.exists() else value.parent, os.W_OK):
        raise PellucidError(f"{refusal}permission denied")
    return value


save_option = click.option(
    "--save", type=click.Path(path_type=Path), callback=writable, help="Append the JSON line to this file."
)
