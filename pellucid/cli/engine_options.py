"""The engine's flags as click options, made from `EngineArgs`. Shared by every verb that makes a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from pellucid.selection.args import EngineArgs, flag_name

F = TypeVar("F", bound=Callable[..., Any])


def engine_options(command: F) -> F:
    """Adds one option per field of `EngineArgs`, the model aside: that is the verb's own argument."""
    return field_options(EngineArgs)(command)


def field_options(arguments: type) -> Callable[[F], F]:
    """Adds one option per field of a dataclass of flags; a field without metadata is not a flag."""

    def add(command: F) -> F:
        for field in reversed(fields(arguments)):
            if field.metadata:
                command = click.option(*_names(field.name, field.metadata["type"]), **_settings(field))(command)
        return command

    return add


def engine_args(ctx: click.Context, model: str) -> EngineArgs:
    """What was typed (or set in the environment) as `EngineArgs`; everything else stays None, "not asked"."""
    asked = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    names = [f.name for f in fields(EngineArgs) if f.name != "model"]
    given = {name: ctx.params[name] for name in names if ctx.get_parameter_source(name) in asked}
    return EngineArgs(model=model, **given)


def _names(field: str, kind: type) -> tuple[str, str]:
    flag = flag_name(field)
    return (f"{flag}/{flag_name('no_' + field)}" if kind is bool else flag), field


def _settings(field: Any) -> dict[str, Any]:
    kind, choices = field.metadata["type"], field.metadata["choices"]
    settings = {"default": field.default, "help": field.metadata["help"]}
    if kind is bool:
        return settings
    return {
        **settings,
        "type": click.Choice(choices) if choices else kind,
        "multiple": field.metadata.get("repeated", False),
        "show_default": field.default not in (None, ()),
        "show_envvar": True,
        "envvar": field.metadata.get("variable"),
    }
