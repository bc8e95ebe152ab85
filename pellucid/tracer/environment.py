"""The Python environment in which an engine's code is traced: its own pins, for real. Used by `tracer.run`.

What decides must not be a stand-in: the version of `transformers` alone changes what the engines choose. Packages that
the running Python has at the right version are linked, the others come from pip; torch is always linked (the CPU build
will do), everything else that the engine asks for stays absent, for the child to stand in for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import sys
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from pellucid.core import PellucidError
from pellucid.tracer.pip import Progress, reason, run_pip
from pellucid.tracer.requirements import Requirement, parse_requirement
from pellucid.tracer.sources import SourceTree, temporary_folder, versions_in
from pellucid.utils.cache import cache_dir, make_cache_dir

ALWAYS = ("transformers", "numpy", "packaging", "msgspec", "pydantic", "psutil")
"""Needed to run the configuration code of any version, whether its metadata names them or not."""

WHEN_REQUIRED = ("requests", "tokenizers", "huggingface-hub", "safetensors", "compressed-tensors", "humming-kernels")
"""Real where the engine requires them: decisions were seen to differ when a stub answered for one."""

NEEDS_TORCH = ("compressed-tensors", "humming-kernels")
"""Installed without their dependencies, since pip would bring another torch and CUDA's libraries with it."""

_NOT_LINKED = ("triton",)
_LINKS = "_linked"


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter, and the packages that it finds: normalised name -> version."""

    python: Path
    packages: Mapping[str, str]


def environment_for(tree: SourceTree, progress: Progress | None = None) -> Environment:
    """The environment of a version, built once for each set of pins; a link to what is here already takes no network.

    Raises:
        PellucidError: the running Python has no torch, or pip can't install the pins.
    """
    wanted = _wanted(tree)
    torch = _distribution("torch")
    if torch is None:
        raise PellucidError(
            "tracing needs torch in this Python (its CPU build will do): pip install 'pellucid[engine]'"
        )
    folder = cache_dir("trace", "environments", _key(wanted, torch))
    if not _is_whole(folder, wanted):
        make_cache_dir(folder.parent)
        with temporary_folder(folder.parent) as scratch:
            _build(scratch / "env", wanted, str(tree), scratch, progress)
            # Another process may have been faster, and may be running in it.
            if not _is_whole(folder, wanted):
                shutil.rmtree(folder, ignore_errors=True)
                (scratch / "env").rename(folder)
    return Environment(folder / "bin" / "python", _packages(folder))


def _is_whole(folder: Path, wanted: Iterable[Requirement]) -> bool:
    """What is linked may have gone or been upgraded since."""
    found = _packages(folder)
    has_torch = (_site_packages(folder) / _LINKS / "torch").exists()
    return has_torch and all(one.name in found and one.allows(found[one.name]) for one in wanted)


def _wanted(tree: SourceTree) -> tuple[Requirement, ...]:
    names = [*ALWAYS, *(name for name in WHEN_REQUIRED if name in tree.requires)]
    return tuple(tree.requires.get(name, Requirement(name)) for name in names)


def _key(wanted: Iterable[Requirement], torch: Distribution) -> str:
    """What an environment depends on: the pins, the interpreter, and the torch that it links to."""
    parts = [*sorted(map(str, wanted)), sys.base_prefix, sys.version, torch.version, str(torch.locate_file("torch"))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _build(folder: Path, wanted: tuple[Requirement, ...], label: str, scratch: Path, progress: Progress | None) -> None:
    if progress is not None:
        progress(f"building an environment for {label}")
    # Without pip: the running Python's installs into it, and the traced code has no use for it.
    venv.EnvBuilder(symlinks=True).create(folder)
    site_packages = _site_packages(folder)
    here = [_distribution(one.name) for one in wanted]
    if all(found is not None and one.allows(found.version) for one, found in zip(wanted, here, strict=True)):
        linked = ["torch", *(one.name for one in wanted)]
    else:
        _install(folder, wanted, label, scratch, progress)
        linked = ["torch"]
    # Last: pip must never see a link, or it could remove what the link points to.
    links = site_packages / _LINKS
    links.mkdir()
    (site_packages / f"{_LINKS}.pth").write_text(f"{_LINKS}\n", encoding="utf-8")
    for distribution in _with_dependencies(linked):
        for name in _top_level(distribution):
            target = Path(str(distribution.locate_file(name)))
            if target.exists() and not (links / name).is_symlink():
                (links / name).symlink_to(target)


def _install(
    folder: Path, wanted: tuple[Requirement, ...], label: str, scratch: Path, progress: Progress | None
) -> None:
    alone = [one for one in wanted if one.name in NEEDS_TORCH]
    _pip_install(folder, map(str, alone), label, scratch, progress, "--no-deps")
    others = [str(one) for one in wanted if one.name not in NEEDS_TORCH]
    for one in alone:
        found = Distribution.discover(name=one.name, path=[str(_site_packages(folder))])
        requires = [parse_requirement(text) for distribution in found for text in distribution.requires or ()]
        others += [str(one) for one in requires if one is not None and not _is_for_gpu(one.name)]
    _pip_install(folder, others, label, scratch, progress)


def _pip_install(
    folder: Path, packages: Iterable[str], label: str, scratch: Path, progress: Progress | None, *options: str
) -> None:
    names = list(packages)
    if not names:
        return
    command = ("--python", str(folder / "bin" / "python"), "install", "--only-binary=:all:", *options, *names)
    failed = run_pip(command, scratch, f"installing {names[0]} for {label}", progress)
    if failed is not None:
        pins = " ".join(names)
        raise PellucidError(f"pip can't install what {label} is traced with ({pins}): {reason(failed)}")


def _is_for_gpu(name: str) -> bool:
    return name in ("torch", "triton") or name.startswith(("cuda-", "nvidia-"))


def _with_dependencies(names: Iterable[str]) -> list[Distribution]:
    """The distributions of the running Python and all that they require, but for those of kernels."""
    found: dict[str, Distribution] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        distribution = None if name in found or name in _NOT_LINKED else _distribution(name)
        if distribution is not None:
            found[name] = distribution
            requires = (parse_requirement(text) for text in distribution.requires or ())
            pending += [one.name for one in requires if one is not None]
    return list(found.values())


def _distribution(name: str) -> Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _top_level(distribution: Distribution) -> set[str]:
    """Names of the files and folders that it put into site-packages; scripts lie outside."""
    roots = {path.parts[0] for path in distribution.files or ()}
    return {name for name in roots if name not in ("..", "__pycache__") and not name.endswith(".pth")}


def _site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _packages(folder: Path) -> dict[str, str]:
    return versions_in(_site_packages(folder), _site_packages(folder) / _LINKS)
