"""One environment per client, outside the repository: a venv or an npm folder, made once. Called by `run`.

An environment is known by the hash of its requirements, so that a second run installs nothing and a changed pin makes
a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pellucid.core import PellucidError
from pellucid.utils.cache import cache_dir, make_cache_dir

REQUIREMENTS = Path(__file__).parent / "requirements"
STAMP = ".complete"
PIN = re.compile(r"^(?P<name>[\w.-]+)(\[[\w,]+\])?==(?P<version>\S+)$")


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with one client in it. `bin` holds its commands; `version` is that of the package it is for."""

    folder: Path
    bin: Path
    version: str


def prepare_venv(name: str, package: str) -> Environment:
    """The venv of `requirements/<name>.txt`, in which `package` is the client itself.

    Raises:
        PellucidError: an installation failed; the installer's last line is in the message.
    """
    text = (REQUIREMENTS / f"{name}.txt").read_text()
    pins = dict(_split_pin(line) for line in text.split())
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = _folder(name, f"{python}\n{text}")
    environment = Environment(folder, folder / "bin", pins[package])
    if (folder / STAMP).exists():
        return environment
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], folder.parent, name)
    install = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # torch first and by its pin: left to a client's own range, it is a build for GPUs, of several gigabytes.
    if "torch" in pins:
        index = os.environ.get("TORCH_INDEX")
        _run([*install, *(["--index-url", index] if index else []), f"torch=={pins['torch']}"], folder, name)
    _run([*install, "--requirement", str(REQUIREMENTS / f"{name}.txt")], folder, name)
    (folder / STAMP).touch()
    return environment


def prepare_npm(name: str, package: str) -> Environment:
    """The npm folder of `requirements/<name>/package.json`, in which `package` is the client itself.

    Raises:
        PellucidError: there is no npm, or an installation failed.
    """
    if shutil.which("npm") is None:
        raise PellucidError(f"{name} needs Node.js 20 or newer with npm: apt install nodejs npm")
    text = (REQUIREMENTS / name / "package.json").read_text()
    folder = _folder(name, text)
    environment = Environment(folder, folder / "node_modules" / ".bin", json.loads(text)["dependencies"][package])
    if (folder / STAMP).exists():
        return environment
    shutil.rmtree(folder, ignore_errors=True)
    make_cache_dir(folder)
    (folder / "package.json").write_text(text)
    _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], folder, name)
    (folder / STAMP).touch()
    return environment


def _folder(name: str, requirements: str) -> Path:
    root = cache_dir("clients")
    make_cache_dir(root)
    return root / f"{name}-{hashlib.sha256(requirements.encode()).hexdigest()[:12]}"


def _split_pin(line: str) -> tuple[str, str]:
    found = PIN.match(line)
    if found is None:
        raise PellucidError(f"requirements of clients are pinned, NAME==VERSION: {line!r}")
    return found["name"], found["version"]


def _run(command: list[str], folder: Path, name: str) -> None:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise PellucidError(f"installing the client {name} failed: {lines[-1] if lines else command[-1]}")
