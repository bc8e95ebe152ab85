"""The child's entry: reads one request on stdin, forks for every model, leaves one JSON result each in its folder.

Started by `tracer.sandbox` with `python -I`; the parent reads `result-<index>.json` when it has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .engine import Outcome, Request, Run
from .engines import ENGINES
from .guard import Guard, limit_resources, restrict_by_kernel
from .simulate import gpu_from_json
from .system_calls import restrict_to_this_process

_MEMORY_GIB = 64
_EXIT_LIMIT = 70


def main() -> None:
    started = time.perf_counter()
    request = _request(json.load(sys.stdin))
    sys.dont_write_bytecode = True
    # Parsers of flags quote it as the program's name.
    sys.argv = [request.engine]
    limit_resources(_MEMORY_GIB, cpu_seconds=int(4 * request.seconds) + 1)
    guard = Guard(request.folder)
    held = restrict_by_kernel(request.folder)
    guard.install()
    engine = ENGINES[request.engine](request)
    failure = None
    try:
        engine.prepare()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever foreign code raises is the answer
        failure = engine.refusal(error)
    seconds = time.perf_counter() - started
    modules = Path(request.folder) / "modules"
    for index, run in enumerate(request.runs):
        path = Path(request.folder) / f"result-{index}.json"
        if failure is not None:
            _write(path, Outcome(refusal={**failure, "ours": True}), seconds, held)
            continue
        guard.in_main = True
        child = os.fork()
        guard.in_main = child != 0
        if child == 0:
            code = _EXIT_LIMIT
            try:
                restrict_to_this_process()
                outcome = engine.run(run)
                _write(path, outcome, seconds, held)
                modules.write_text("\n".join(sys.modules), encoding="utf-8")
                code = 0
            finally:
                os._exit(code)
        _wait(child, request.seconds, path, seconds, held)
        guard.in_main = False
        if index + 1 < len(request.runs):
            _warm(modules)


def _wait(child: int, limit: float, path: Path, seconds: float, held: tuple[str, ...]) -> None:
    """Wait for one run and, if it was killed or took too long, leave a result that says so."""
    deadline = time.monotonic() + limit
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            _write(path, _limit(f"the engine's code took longer than {limit:g} s"), seconds, held)
            return
        time.sleep(0.01)
    if not path.exists():
        _write(path, _limit(f"the engine's code ended the process (status {status})"), seconds, held)


def _warm(modules: Path) -> None:
    """Import what the last run imported, so that the next one starts with it; nothing of its state comes along."""
    names = modules.read_text(encoding="utf-8").splitlines() if modules.exists() else []
    for name in names:
        if name not in sys.modules:
            # A module that fails here fails again, and is heard of, in the run that needs it.
            with suppress(Exception):
                importlib.import_module(name)


def _limit(message: str) -> Outcome:
    return Outcome(refusal={"message": message, "site": None, "ours": True})


def _write(path: Path, outcome: Outcome, seconds: float, held: tuple[str, ...]) -> None:
    values = {**asdict(outcome), "held": held}
    values["seconds"]["import"] = seconds
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values), encoding="utf-8")
    part.rename(path)


def _request(values: dict[str, Any]) -> Request:
    return Request(
        **{
            **values,
            "extension_modules": tuple(values["extension_modules"]),
            "gpu": gpu_from_json(values["gpu"]),
            "runs": tuple(Run(one["model"], tuple(one["flags"])) for one in values["runs"]),
        }
    )
