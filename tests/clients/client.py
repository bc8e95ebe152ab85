"""`Client`: one client program, how it is run and how its result is read. `all_clients.CLIENTS` lists them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.environments import Environment
from tests.clients.served import Server

OUTPUT = "output.txt"
"""In a client's folder: what it wrote to stdout and stderr."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a client did, in a few words, and what went wrong: name of the check -> the error. Nothing wrong: it passed.

    `skipped` are checks that did not apply to this server.
    """

    did: str
    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One client on one server: its command, its own folder to write to, and what it needs in its environment."""

    environment: Environment
    server: Server
    folder: Path
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class Client:
    """One client program.

    Attributes:
        prepare: makes its environment, or finds it made.
        command: what to execute; the result belongs in `run.folder`.
        read: the result, from the exit status and what lies in `run.folder`.
        limit_s: the run counts as failed when it takes longer.
        variables: environment variables beside those of every client; an empty one is unset.
        serve_flags: flags of the server that this client needs.
    """

    name: str
    prepare: Callable[[], Environment]
    command: Callable[[Run], list[str]]
    read: Callable[[Run, int], Result]
    limit_s: float = 300.0
    variables: Mapping[str, str] = field(default_factory=dict)
    serve_flags: tuple[str, ...] = ()

    def execute(self, run: Run) -> tuple[Result, float]:
        """The result, and the seconds that the client ran. Whatever it started is ended with it."""
        run.folder.mkdir(parents=True)
        started = time.perf_counter()
        with (run.folder / OUTPUT).open("wb") as sink:
            process = subprocess.Popen(
                self.command(run), cwd=run.folder, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                env=self._variables(), start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                return Result("", {self.name: f"not finished after {self.limit_s:g} s"}), self.limit_s
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.perf_counter() - started
        try:
            return self.read(run, status), seconds
        except (OSError, ValueError, LookupError, TypeError) as error:
            # A result file that is missing, or not in the form that this version of the client writes.
            reason = f"exit status {status}, and no readable result: {type(error).__name__}: {error}"
            return Result("", {self.name: f"{reason}\n{last_lines(run.folder / OUTPUT)}"}), seconds

    def _variables(self) -> dict[str, str]:
        """Nothing of the user's accounts, proxies or Python path; no client may ask the network for anything."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "PATH", "TMPDIR") if name in os.environ}
        common = {
            "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        return {name: value for name, value in {**kept, **common, **self.variables}.items() if value}


def last_lines(path: Path, count: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def find_one(folder: Path, pattern: str) -> Path:
    """The only file of that name below `folder`.

    Raises:
        LookupError: there is none, or there are several.
    """
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise LookupError(f"{len(found)} files are called {pattern} in {folder}, expected one")
    return found[0]
