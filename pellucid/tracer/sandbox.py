"""Starts the child process that runs an engine's code, and reads what it leaves. Used by `tracer.run`.

The child has an empty environment, a folder of its own that is its home and the only place where it may write (the
kernel and an audit hook hold it to that), no network, no programs, limits of memory and time.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pellucid.core import PellucidError

_CHILD = Path(__file__).parent / "child"

# `-I` keeps the package's folder off the import path, so that no module of ours hides one of the engine's.
_BOOTSTRAP = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "trace_child", {str(_CHILD / "__init__.py")!r}, submodule_search_locations=[{str(_CHILD)!r}])
module = sys.modules["trace_child"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from trace_child.main import main
main()
"""

_ERROR_TAIL = 2000
_LARGEST_JSON = 64 << 20
_DEEPEST_JSON = 200


@contextmanager
def child_folder() -> Iterator[Path]:
    """A fresh folder for one child, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="pellucid-trace-", ignore_cleanup_errors=True) as name:
        yield Path(name).resolve()


def run_child(
    python: Path, folder: Path, request: Mapping[str, Any], *, seconds: float, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What the child wrote for each of the request's runs, in their order.

    A run without a result has one that names our limit: the child ended, or took longer than `seconds` in all.

    Raises:
        PellucidError: the interpreter can't be started.
    """
    command = [str(python), "-I", "-X", "utf8", "-c", _BOOTSTRAP]
    # Read back through the same handle: the child may have put a link in its place.
    with (folder / "child.log").open("w+b") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=_environment(folder, environment),
                start_new_session=True,
            )
        except OSError as error:
            raise PellucidError(f"the tracer can't start {python}: {error}") from None
        ended = _finish(process, json.dumps(request).encode(), seconds)
        output.seek(max(0, output.seek(0, os.SEEK_END) - _ERROR_TAIL))
        tail = output.read().decode("utf-8", "replace").strip().splitlines()
    reason = f"it took longer than {seconds:g} s" if ended is None else f"it ended with status {ended}"
    message = f"the child process left no result: {reason}" + (f"; its last line: {tail[-1]}" if tail else "")
    return [_result(folder / f"result-{index}.json", message) for index in range(len(request["runs"]))]


def _finish(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> int | None:
    """Its exit status; None when it had to be killed. Nothing of its process group is left behind."""
    try:
        process.communicate(request, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill_group(process.pid)
        process.wait()
    return process.returncode


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _result(path: Path, message: str) -> dict[str, Any]:
    try:
        values = _read_json(path, links=False)
    except (OSError, ValueError) as error:
        values = {}
        if not isinstance(error, FileNotFoundError):
            message += f"; what it left can't be read: {_reason(error)}"
    if not isinstance(values, dict) or "refusal" not in values:
        return {"refusal": {"message": message, "site": None, "ours": True}}
    return values


def _read_json(path: Path, *, links: bool) -> Any:
    """The value in a file of which nothing is known: it may be a pipe, a device, endless, or nested without end.

    Raises:
        OSError: it can't be read.
        ValueError: it is no regular file, too large, no JSON, or nested deeper than anyone means it.
    """
    # A pipe that nobody writes to opens at once this way, and is then refused.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            text = file.read(_LARGEST_JSON + 1)
    finally:
        os.close(descriptor)
    if len(text) > _LARGEST_JSON:
        raise ValueError(f"it is larger than {_LARGEST_JSON >> 20} MiB")
    try:
        values = json.loads(text)
    except RecursionError:
        values = None
        level: list[Any] = [None]
    else:
        level = [values]
        for _ in range(_DEEPEST_JSON):
            level = [one for value in level for one in _inside(value)]
    if level:
        raise ValueError(f"it is nested deeper than {_DEEPEST_JSON} levels")
    return values


def _reason(error: OSError | ValueError) -> str:
    # The path of the child's folder means nothing to the user.
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _environment(folder: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """From scratch: nothing of the user's environment decides, unless it is named."""
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1)),
        "PYTHONHASHSEED": "0",
        **extra,
    }


def read_config(model: Path) -> dict[str, Any]:
    """The `config.json` of a model directory.

    Raises:
        PellucidError: it is not there, can't be read, or is none.
    """
    try:
        config = _read_json(model / "config.json", links=True)
    except (OSError, ValueError) as error:
        raise PellucidError(f"{model}: no readable config.json ({_reason(error)}); give a model directory") from None
    if not isinstance(config, dict):
        raise PellucidError(f"{model / 'config.json'} holds no JSON object")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isprintable() for name in names):
        raise PellucidError(f"{model / 'config.json'}: `architectures` is {names!r}; it must be a list of names")
    return config


def copy_model(model: Path, target: Path, architecture: str | None = None) -> tuple[str, ...]:
    """Show a model directory to the child without its code; returns notes of what was left out.

    Python files stay behind; `config.json` loses `auto_map`, which would ask for them, and gets `architecture` as its
    first architecture where that is given. Everything else is linked.

    Raises:
        PellucidError: it has no readable `config.json`, or can't be listed.
    """
    config = read_config(model)
    try:
        files = list(model.iterdir())
    except OSError as error:
        raise PellucidError(f"{model}: can't be listed ({error.strerror}); its permissions must allow it") from None
    target.mkdir(parents=True)
    code = [path.name for path in files if path.suffix == ".py"]
    for path in files:
        if path.is_file() and path.suffix != ".py" and path.name != "config.json":
            (target / path.name).symlink_to(path.resolve())
    stripped = _without(config, "auto_map")
    if architecture is not None:
        stripped["architectures"] = [architecture]
    (target / "config.json").write_text(json.dumps(stripped), encoding="utf-8")
    left_out = [f"its Python files ({', '.join(sorted(code))})"] * bool(code)
    left_out += ["`auto_map` of its config.json"] * ("auto_map" in json.dumps(config))
    return (f"the checkpoint's own code is never run: {' and '.join(left_out)} left out",) if left_out else ()


def _without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(one, key) for name, one in value.items() if name != key}
    return [_without(one, key) for one in value] if isinstance(value, list) else value
