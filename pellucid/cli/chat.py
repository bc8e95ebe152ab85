"""`pellucid chat`: a conversation in the terminal, with a model loaded here or with a server (--url)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Generator
from typing import Any

import click
from click.core import ParameterSource

from pellucid.cli.chat_server import AnswerDelta, ChatServer, ServerError, list_names
from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.sampling_options import sampling_options, sampling_params
from pellucid.core import InvalidRequestError

COMMANDS = "Ctrl-C stops an answer, Ctrl-D or /quit ends, /reset starts a new conversation."

Messages = list[dict[str, str]]
Answer = Callable[[Messages], Generator[AnswerDelta]]

# What a model writes must not steer the terminal: of the control characters only newlines and tabs are shown.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@click.command()
@click.argument("model", type=click.Path(), default="smollm2")
@click.option("--system", help="System message.")
@click.option("--url", metavar="URL", help="Talk to the OpenAI-compatible server there; nothing is loaded here.")
@click.option("--api-key", metavar="KEY", envvar="PELLUCID_API_KEY", help="With --url: its key, or PELLUCID_API_KEY.")
@click.option("--model", "served_model", metavar="NAME", help="With --url: one of its models; the first if not given.")
@sampling_options
@engine_options
@click.pass_context
def chat(ctx: click.Context, /, model: str, system: str | None, url: str | None, **options: Any) -> None:
    """Talk to MODEL (a model folder, a GGUF file, a hub name, `demo-mla`; `smollm2` by default), or to a server.

    One line is one turn. Ctrl-C stops an answer, Ctrl-D ends the conversation, /reset starts a new one. Lines may
    also be piped in. Reasoning that a server sends apart is dimmed on a terminal, and left out elsewhere.
    """
    if url is None:
        _refuse(ctx, ("api_key", "served_model"), "is for a server: it needs --url")
        answer = _local_answer(ctx, model, options)
    else:
        own = ("system", "url", "api_key", "served_model", "model")
        engine = [name for name in ctx.params if name not in own and not name.startswith("sampling_")]
        _refuse(ctx, engine, "is for an engine started here: a server (--url) has its own")
        _refuse(ctx, ("model",), "is a model to load here: with --url, --model names one of the server's")
        answer = _server_answer(ctx, url, options)
    _converse(answer, [{"role": "system", "content": system}] if system else [])


def _local_answer(ctx: click.Context, model: str, options: dict[str, Any]) -> Answer:
    """Loads the model. The prefix cache keeps earlier turns warm."""
    params = sampling_params(options, temperature=0.7, top_p=0.95, max_tokens=None)
    from pellucid.cli.loading import load_llm

    llm = load_llm(engine_args(ctx, model), "chat")

    def answer(messages: Messages) -> Generator[AnswerDelta]:
        for delta in llm.stream_chat(messages, params):
            yield AnswerDelta(content=delta.text)

    return answer


def _server_answer(ctx: click.Context, url: str, options: dict[str, Any]) -> Answer:
    """Asks the server for its models unless one was named. Only sampling flags that were typed are sent."""
    params = sampling_params(options, max_tokens=None)
    typed = [name.removeprefix("sampling_") for name in options if name.startswith("sampling_") and _typed(ctx, name)]
    sampling = {name: getattr(params, name) for name in typed}
    server = ChatServer(url, options["api_key"])
    model = options["served_model"]
    if model is None:
        model, *others = server.model_names()
        also = f" (--model: or {list_names(others)})" if others else ""
        click.echo(f"{list_names([model])} at {server.url}{also}", err=True)
    return lambda messages: server.stream_chat(model, messages, sampling)


def _typed(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _refuse(ctx: click.Context, names: Collection[str], why: str) -> None:
    """Raises UsageError for a parameter among `names` that was typed: nothing typed is ignored."""
    for parameter in ctx.command.params:
        if parameter.name in names and _typed(ctx, parameter.name):
            shown = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise click.UsageError(f"{shown} {why}", ctx)


def _converse(answer: Answer, opening: Messages) -> None:
    """Reads turns until the input ends. A turn that fails is taken back and the conversation goes on.

    Raises ServerError where lines are piped in: nobody is there to try again.
    """
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
        screen = _Screen()
        try:
            # Closed at once, also by Ctrl-C: that is what makes a server stop.
            with contextlib.closing(answer(messages)) as deltas:
                for delta in deltas:
                    screen.show(delta)
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False, err=True)
        except (InvalidRequestError, ServerError) as error:
            # Too long, refused by the template, the server gone: the conversation goes on without this turn.
            messages.pop()
            screen.end_line()
            if isinstance(error, ServerError) and not interactive:
                raise
            click.echo(f"error: {error}", err=True)
            continue
        click.echo()
        messages.append({"role": "assistant", "content": screen.content})


class _Screen:
    """Shows one answer on standard output and keeps its content."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._last = ""
        self._reasoning = False
        self.content = ""

    def show(self, delta: AnswerDelta) -> None:
        self.content += delta.content
        if delta.reasoning and self._terminal:
            self._reasoning = True
            self._write(click.style(delta.reasoning.translate(_CONTROLS), dim=True))
            self._last = delta.reasoning[-1]
        if delta.content:
            if self._reasoning:
                self.end_line()
                self._reasoning = False
            self._write(delta.content.translate(_CONTROLS) if self._terminal else delta.content)
            self._last = delta.content[-1]

    def end_line(self) -> None:
        if self._last not in ("", "\n"):
            self._write("\n")
            self._last = "\n"

    def _write(self, text: str) -> None:
        click.echo(text, nl=False)
        sys.stdout.flush()


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
