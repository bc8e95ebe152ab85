"""MODEL and --hardware, as the verbs take them that need neither weights nor a GPU, and lists of concurrencies."""

from __future__ import annotations

from pathlib import Path

import click


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from pellucid.hardware import fixture_names

    return [name for name in ("this", *fixture_names()) if name.startswith(incomplete)]


hardware_option = click.option(
    "--hardware",
    default="this",
    metavar="NAME",
    help="Machine: this one, a known name, or a JSON file.",
    shell_complete=_complete,
)


CONCURRENCY = "1,8,32,128"


def whole_numbers(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Callback of an option such as `1,8,32`."""
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r}: give whole numbers of 1 or more, as in {param.default or CONCURRENCY}")
    return found


def local_path(model: str) -> Path:
    """The path itself when it is one; otherwise the model of that name, downloaded if need be, its JSON files alone."""
    if Path(model).exists():
        return Path(model)
    from pellucid.models.hub import resolve_model

    path = resolve_model(model, weights=False)
    # Only its JSON files were fetched, and the index of the shards would promise what is not here.
    bare = path.is_dir() and not any(path.glob("*.safetensors")) and (path / "config.json").exists()
    return path / "config.json" if bare else path
