"""`make clients`: real client programs against a real server, and one table of how they fared.

    python -m tests.clients.run                                every client, on `pellucid serve smollm2`
    python -m tests.clients.run --only openai_sdk --keep       one of them; its output is kept
    python -m tests.clients.run --base-url http://127.0.0.1:8000 --model NAME --api-key KEY

The exit status is 1 when a client fails. The last line of stdout is the result as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pellucid import __version__
from pellucid.core import PellucidError
from tests.clients.all_clients import CLIENTS
from tests.clients.client import Client, Result, Run
from tests.clients.served import Server, start_server
from tests.clients.tokenizer_folder import write_tokenizer_folder

NAMES = [client.name for client in CLIENTS]
SERVED_NAME = "demo"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a client, or the server itself."""

    client: str
    version: str
    result: Result
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.result.failed

    def to_cells(self) -> tuple[str, ...]:
        skipped = f", {len(self.result.skipped)} skipped" if self.result.skipped else ""
        did = (self.result.did or "-") + skipped
        return self.client, self.version, did, f"{self.seconds:.1f}", "ok" if self.ok else "FAILED"

    def to_json(self) -> dict[str, Any]:
        return {
            "client": self.client, "version": self.version, "ok": self.ok, "seconds": round(self.seconds, 1),
            "did": self.result.did, "failed": dict(self.result.failed), "skipped": list(self.result.skipped),
        }  # fmt: skip


@click.command()
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Run this client; may be repeated.")
@click.option("--base-url", help="Ask this server (no path) instead of starting one.")
@click.option("--model", default="smollm2", help="What to serve; with --base-url, the name that is served there.")
@click.option("--api-key", default="none", help="With --base-url: the key that the server wants.")
@click.option("--keep", is_flag=True, help="Keep what the clients and the server wrote when all is well too.")
def main(only: tuple[str, ...], base_url: str | None, model: str, api_key: str, keep: bool) -> None:
    """Run real client programs against a real server."""
    clients = [client for client in CLIENTS if not only or client.name in only]
    folder = Path(tempfile.mkdtemp(prefix="pellucid-clients-"))
    tokenizer = write_tokenizer_folder(folder / "tokenizer")
    rows: list[Row] = []
    if base_url is not None:
        # What needs flags of its own from the server can't be asked of one that is there already, unless one insists.
        asked = [client for client in clients if only or not client.serve_flags]
        rows += run_clients(asked, Server(base_url.rstrip("/"), model, api_key), folder, tokenizer)
    else:
        for number, flags in enumerate(dict.fromkeys(client.serve_flags for client in clients)):
            group = [client for client in clients if client.serve_flags == flags]
            rows += serve_and_run(group, model, flags, folder / f"server{number}", tokenizer)
    ok = bool(rows) and all(row.ok for row in rows)
    if ok and not keep:
        shutil.rmtree(folder)
    else:
        click.echo(f"what the clients and the server wrote is in {folder}", err=True)
    click.echo(format_table(("client", "version", "did", "seconds", ""), [row.to_cells() for row in rows]))
    click.echo(json.dumps({"ok": ok, "clients": [row.to_json() for row in rows]}))
    sys.exit(0 if ok else 1)


def serve_and_run(
    clients: Sequence[Client], model: str, flags: Sequence[str], folder: Path, tokenizer: Path
) -> Iterator[Row]:
    """The rows of `clients` on a server with `flags`, and the server's own: it gets ready, idle again, and ends."""
    name = " ".join(["pellucid serve", *flags])
    click.echo(f"{name}: starting", err=True)
    started = time.perf_counter()
    try:
        with start_server(model, SERVED_NAME, flags, folder) as server:
            seconds = time.perf_counter() - started
            yield from run_clients(clients, server, folder, tokenizer)
            server.require_idle()
        result = Result("ready, idle after all clients, ended by SIGTERM")
    except PellucidError as error:
        seconds, result = time.perf_counter() - started, Result("", {"server": str(error)})
        click.echo(f"{name}: {error}", err=True)
    yield Row(name, __version__, result, seconds)


def run_clients(clients: Sequence[Client], server: Server, folder: Path, tokenizer: Path) -> Iterator[Row]:
    for client in clients:
        click.echo(f"{client.name}: preparing", err=True)
        try:
            environment = client.prepare()
        except PellucidError as error:
            click.echo(f"{client.name}: {error}", err=True)
            yield Row(client.name, "-", Result("", {"installation": str(error)}), 0)
            continue
        click.echo(f"{client.name} {environment.version}: running", err=True)
        result, seconds = client.execute(Run(environment, server, folder / client.name, tokenizer))
        for check, reason in result.failed.items():
            click.echo(f"{client.name}: FAILED: {check}\n{indent(reason)}", err=True)
        yield Row(client.name, environment.version, result, seconds)


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    main()
