"""The SDKs: one script of checks each, which tells its result as TAP. Listed in `all_clients`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.clients.client import OUTPUT, Client, Result, Run, last_lines
from tests.clients.environments import prepare_npm, prepare_venv

SCRIPTS = Path(__file__).parent
TAP_LINE = re.compile(r"^(?P<bad>not )?ok \d+ - (?P<name>.*?)(?: # (?P<directive>SKIP|TODO).*)?$")


def python_client(
    name: str,
    script: str,
    package: str,
    *,
    serve_flags: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Client:
    """A script that runs in the venv of `requirements/<name>.txt`, `package` being the client in it."""

    def command(run: Run) -> list[str]:
        return [
            str(run.environment.bin / "python"),
            str(SCRIPTS / script),
            *_target(run),
            "--api-key",
            run.server.api_key,
        ]

    return Client(
        name=script.removesuffix(".py"), prepare=lambda: prepare_venv(name, package), command=command, read=read_tap,
        limit_s=480, serve_flags=serve_flags, variables=variables or {},
    )  # fmt: skip


def node_client(script: str, package: str, *, serve_flags: tuple[str, ...] = ()) -> Client:
    """A script that Node's own test runner runs, beside the modules of `requirements/node/package.json`."""

    def command(run: Run) -> list[str]:
        # Modules are looked for beside the script, so it goes where they are.
        copy = run.environment.folder / script
        shutil.copyfile(SCRIPTS / script, copy)
        return ["node", "--test-reporter=tap", str(copy), *_target(run), run.server.api_key]

    return Client(
        name=script.removesuffix(".mjs"), prepare=lambda: prepare_npm("node", package), command=command, read=read_tap,
        limit_s=300, serve_flags=serve_flags,
    )  # fmt: skip


def read_tap(run: Run, status: int) -> Result:
    """The result from a script's output: unindented `ok` and `not ok` lines, and what follows the latter."""
    passed, skipped, failed = 0, [], {}
    current: str | None = None
    for line in (run.folder / OUTPUT).read_text(errors="replace").splitlines():
        if found := TAP_LINE.match(line):
            current = None
            if found["bad"]:
                current = found["name"]
                failed[current] = ""
            elif found["directive"]:
                skipped.append(found["name"])
            else:
                passed += 1
        elif line.startswith(("# Subtest", "1..")):
            current = None
        elif current is not None:
            failed[current] += line.removeprefix("# ").rstrip() + "\n"
    if (status != 0 and not failed) or not passed:
        failed[f"exit status {status}"] = last_lines(run.folder / OUTPUT)
    return Result(f"{passed} of {passed + len(failed)} checks", failed, tuple(skipped))


def _target(run: Run) -> list[str]:
    return [run.server.url, run.server.model]
