"""Sampling flags as click options, made from `SamplingParams`. Shared by `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from pellucid.core import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy."),
    "top_p": (float, "Keep the most likely tokens up to this share of the probability."),
    "top_k": (int, "Keep this many of the most likely tokens; 0 keeps all."),
    "min_p": (float, "Keep tokens at least this likely relative to the best."),
    "repetition_penalty": (float, "Above 1 makes tokens seen before less likely."),
    "presence_penalty": (float, "Taken off every token already generated."),
    "frequency_penalty": (float, "Taken off a token for each time it was generated."),
    "max_tokens": (int, "Most tokens to generate; up to the context length when not given."),
    "min_tokens": (int, "Fewest tokens before the model may stop."),
}


def sampling_options(command: F) -> F:
    """Adds the options, and `--stop` (may be repeated) and `--ignore-eos`."""
    for name, (kind, text) in reversed(_OPTIONS.items()):
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, f"sampling_{name}", type=kind, default=None, help=text)(command)
    command = click.option("--stop", "sampling_stop", multiple=True, help="Stop at this text; may be repeated.")(
        command
    )
    return click.option("--ignore-eos", "sampling_ignore_eos", is_flag=True, help="Go on past the end token.")(command)


def sampling_params(values: Mapping[str, Any], **defaults: Any) -> SamplingParams:
    """What was typed, over `defaults`, over `SamplingParams`' own. Raises InvalidRequestError for a bad value."""
    typed = {
        name.removeprefix("sampling_"): value
        for name, value in values.items()
        # By identity: 0 was typed, though it equals False.
        if name.startswith("sampling_") and value is not None and value is not False and value != ()
    }
    return SamplingParams(**{**defaults, **typed})
