"""The `pellucid` command: the list of verbs, and how errors end. `main` is the entry point of the package."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence

import click

from pellucid import __version__
from pellucid.core import PellucidError
from pellucid.utils.process import spin_briefly

COMMANDS = {
    "chat": ("pellucid.cli.chat:chat", "Talk to a model in the terminal."),
    "generate": ("pellucid.cli.generate:generate", "Continue a prompt, or answer a question."),
    "completion": ("pellucid.cli.completion:completion", "Print the completion script of a shell."),
    "serve": ("pellucid.cli.serve:serve", "Serve a model over HTTP."),
    "bench": ("pellucid.cli.bench:bench", "State the hardware's limit, and measure against it."),
    "profile": ("pellucid.cli.profile:profile", "Show where the time of a decode step goes, by kind of kernel."),
    "trace": ("pellucid.cli.trace:trace", "Show what SGLang or vLLM would choose, and on which line of their code."),
    "doctor": ("pellucid.cli.doctor:doctor", "Say whether `serve` would start, and what to do if not."),
    "tune": ("pellucid.cli.tune:tune", "Measure every choice for a model on this machine, and keep the figures."),
    "explain": ("pellucid.cli.explain:explain", "Show what would run on a machine, and why."),
}
"""Verb -> where its command is, and its line in `--help`: listing the verbs imports none of them."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, so that `--help` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pellucid", message="%(prog)s %(version)s")
def cli() -> None:
    """Pellucid: an LLM engine you can see into."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. A failure the user can act on is one line on stderr and its exit code, no traceback."""
    spin_briefly()
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="pellucid", standalone_mode=False)
    except PellucidError as error:
        _complain(f"error: {error}")
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(0)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" (see: {context.command_path} --help)" if context is not None else ""
        _complain(f"error: {error.format_message()}{where}")
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(line: str) -> None:
    # Where standard error is full or closed, the exit code still says what happened.
    with contextlib.suppress(OSError, ValueError):
        click.echo(line, err=True)
