"""pip as a process: downloads an engine's wheel, installs the child's packages. Used by `sources` and `environment`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pellucid.core import PellucidError

Progress = Callable[[str], None]
"""Called with one line now and then while something long goes on."""

PLATFORMS = tuple(
    f"--platform={name}_x86_64" for name in ("manylinux1", "manylinux2014", *(f"manylinux_2_{n}" for n in range(5, 45)))
)
"""The engines are released for Linux x86-64; their sources can be read anywhere."""

_NO_INDEX = ("from versions: none)", "Could not fetch URL", "ConnectionError", "Failed to establish", "name resolution")


def download(name: str, version: str, folder: Path, progress: Progress | None = None) -> Path:
    """The wheel of a released version, downloaded into `folder`.

    Raises:
        PellucidError: there is no such version, or the package index can't be reached.
    """
    python = f"--python-version={sys.version_info.major}.{sys.version_info.minor}"
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--implementation=cp", python, *PLATFORMS)
    command = ("download", *options, "--dest", str(folder), f"{name}=={version}")
    failed = run_pip(command, folder, f"downloading {name} {version}", progress)
    if failed is None:
        return next(folder.glob("*.whl"))
    if any(text in failed for text in _NO_INDEX):
        raise PellucidError(
            f"{name} {version} is not in the cache and the package index can't be reached; where it can, run "
            f"`pip download --no-deps {name}=={version}`, then here `pellucid trace fetch FILE.whl`"
        )
    if known := re.search(r"from versions: ([^)]+)\)", failed):
        newest = ", ".join(known[1].split(", ")[-5:])
        raise PellucidError(f"there is no wheel of {name} {version} for Linux x86-64; the newest are {newest}")
    raise PellucidError(f"pip can't download {name} {version}: {reason(failed)}")


def run_pip(arguments: Sequence[str], folder: Path, label: str, progress: Progress | None = None) -> str | None:
    """Run pip with its temporary files in `folder`, telling `progress` how much lies there; its output if it failed.

    Raises:
        PellucidError: the running Python has no pip.
    """
    if importlib.util.find_spec("pip") is None:
        raise PellucidError(f"tracing uses pip, which this Python ({sys.executable}) lacks; run: python -m ensurepip")
    settings = ("--disable-pip-version-check", "--no-input", "--retries=1")
    environment = {**os.environ, "TMPDIR": str(folder)}
    output = folder / "pip.log"
    if progress is not None:
        progress(label)
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *settings, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
        try:
            while not _has_ended(process, within=0.5):
                if progress is not None:
                    progress(f"{label}: {_size(folder) / 1e6:.0f} MB")
        finally:
            process.kill()
            process.wait()
    return None if process.returncode == 0 else output.read_text(encoding="utf-8", errors="replace")


def _has_ended(process: subprocess.Popen[bytes], within: float) -> bool:
    try:
        process.wait(within)
    except subprocess.TimeoutExpired:
        return False
    return True


def reason(output: str) -> str:
    """pip's own: its last line that says ERROR, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")


def _size(folder: Path) -> int:
    """Bytes of the files below, passing over those that pip moves away meanwhile (`os.walk` does so too)."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total
