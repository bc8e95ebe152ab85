"""`pellucid generate`: one prompt in, streamed text out; speed and plan on request."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.sampling_options import sampling_options, sampling_params
from pellucid.core import InvalidRequestError


@click.command()
@click.argument("model", type=click.Path())
@click.option("--prompt", help="The text to continue; read from standard input when not given.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's turn through the model's chat template.")
@click.option("--system", help="System message, with --chat.")
@click.option("--plan", "show_plan", is_flag=True, help="Print the plan afterwards: what ran, and why.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON instead of streaming text.")
@sampling_options
@engine_options
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    model: str,
    *,
    prompt: str | None,
    chat: bool,
    system: str | None,
    show_plan: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue --prompt with MODEL (model folder, GGUF file, hub name, `smollm2` or `demo-mla`), greedily by default.

    Text goes to standard output; the time to the first token and the decode speed to standard error.
    """
    begin = time.monotonic()
    params = sampling_params(options, temperature=0.0, max_tokens=None)
    if system is not None and not chat:
        raise InvalidRequestError("--system is a turn of a conversation; it needs --chat", "system")
    from pellucid.cli.loading import load_llm

    llm = load_llm(engine_args(ctx, model), "chat" if chat else "text")
    ready = time.monotonic()
    if prompt is None:
        if sys.stdin.isatty():
            click.echo("Type the prompt, then Ctrl-D:", err=True)
        # The newline that ends a piped line is not part of what to continue.
        prompt = sys.stdin.read().removesuffix("\n")
    turns = [{"role": "system", "content": system}] if system else []
    tokens = llm.apply_chat_template([*turns, {"role": "user", "content": prompt}]) if chat else prompt
    pieces: list[str] = []
    count, last = 0, None
    for delta in llm.stream(tokens, params):
        pieces.append(delta.text)
        count += len(delta.token_ids)
        last = delta
        if not as_json:
            click.echo(delta.text, nl=False)
            sys.stdout.flush()
    assert last is not None and last.metrics is not None
    summary = {
        "load_s": round(ready - begin, 3),
        "ttft_s": None if last.metrics.ttft_s is None else round(last.metrics.ttft_s, 4),
        "decode_tok_s": _rounded(last.metrics.decode_tok_s(count)),
        "output_tokens": count,
        "finish_reason": last.finish_reason,
    }
    if as_json:
        plan = {"plan": llm.plan.to_json()} if show_plan else {}
        click.echo(json.dumps({"text": "".join(pieces), **summary, **plan}, ensure_ascii=False))
        return
    click.echo()
    parts = [f"load {summary['load_s']} s"]
    if summary["ttft_s"] is not None:
        parts.append(f"first token {summary['ttft_s']} s")
    if summary["decode_tok_s"] is not None:
        parts.append(f"decode {summary['decode_tok_s']} tok/s")
    click.echo(f"[{', '.join(parts)}, {count} tokens, {last.finish_reason}]", err=True)
    if show_plan:
        from pellucid.selection.explain import render

        click.echo("\nIt ran on this plan:\n\n" + render(llm.plan, llm.engine.notes))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
