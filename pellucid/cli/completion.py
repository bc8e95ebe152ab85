"""`pellucid completion SHELL`: the script that makes a shell complete Pellucid's verbs and flags."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    For bash: eval "$(pellucid completion bash)"
    """
    from click.shell_completion import get_completion_class

    from pellucid.cli.main import cli

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(cli, {}, "pellucid", "_PELLUCID_COMPLETE").source())
