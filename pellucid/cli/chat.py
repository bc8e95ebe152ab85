"""`pellucid chat`: a conversation in the terminal. The prefix cache keeps earlier turns warm."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.sampling_options import sampling_options, sampling_params
from pellucid.core import InvalidRequestError

COMMANDS = "Ctrl-C stops an answer, Ctrl-D or /quit ends, /reset starts a new conversation."


@click.command()
@click.argument("model", type=click.Path(), default="smollm2")
@click.option("--system", help="System message.")
@sampling_options
@engine_options
@click.pass_context
def chat(ctx: click.Context, /, model: str, system: str | None, **options: Any) -> None:
    """Talk to MODEL (a model folder, a GGUF file, a hub name; the embedded smollm2 by default).

    One line is one turn. Ctrl-C stops an answer, Ctrl-D ends the conversation, /reset starts a new one. Lines may
    also be piped in.
    """
    params = sampling_params(options, temperature=0.7, top_p=0.95, max_tokens=None)
    from pellucid.cli.loading import load_llm

    llm = load_llm(engine_args(ctx, model), "chat")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        # Line editing and history for `input`, where Python has it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        click.echo(COMMANDS, err=True)
    while True:
        line = _read_line(interactive)
        if line is None:
            return
        if line == "/reset":
            messages = list(opening)
            continue
        if line in ("/quit", "/exit"):
            return
        if line.startswith("/"):
            click.echo(COMMANDS if line == "/help" else f"{line} is no command. {COMMANDS}", err=True)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        try:
            for delta in llm.stream_chat(messages, params):
                pieces.append(delta.text)
                click.echo(delta.text, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False, err=True)
        except InvalidRequestError as error:
            # Too long, or refused by the template: the conversation goes on without this turn.
            messages.pop()
            click.echo(f"error: {error}", err=True)
            continue
        click.echo()
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _read_line(interactive: bool) -> str | None:
    """The next turn without its newline; None at the end of input. Ctrl-C clears the line."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        click.echo(err=True)
        return ""
    except EOFError:
        click.echo(err=True)
        return None
