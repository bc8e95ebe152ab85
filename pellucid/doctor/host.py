"""The host beside its devices: packages, limits, folders, compilers. `read_host` asks the system, the rest are values.

Called by `doctor.diagnose`. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid.doctor.report import Check, Status
from pellucid.hardware.facts import format_bytes
from pellucid.hardware.probe import package_folders
from pellucid.utils.cache import cache_dir

GROUP = "host"

PYTHONS = ((3, 11), (3, 12))

SPARE_FILES = 256
"""Open files of a server beside its connections: libraries, logs, weights, pipes."""

SHM_FOR_RANKS = 1 << 30
"""Shared memory that several ranks want: NCCL moves data through it where GPUs have no direct path."""

CACHE_ROOM = 2 << 30
"""Free disk that compiled kernels and logs of downloads should find."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the cache as it is now. `free_bytes` is None where it can't be told.

    `executable`: programs and libraries that lie there may run.
    """

    path: Path
    writable: bool
    executable: bool
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Host:
    """Facts of the host. Limits are the soft ones; `resource.RLIM_INFINITY` (-1) is none.

    `shm_bytes` is the free space of /dev/shm, None without one. `c_compiler` and `python_headers` are what Triton's
    launchers are built with. `nccl` is the version of its package.
    """

    python: tuple[int, int]
    missing: Mapping[str, tuple[str, ...]]
    port_problem: str
    open_files: int
    locked_memory: int
    shm_bytes: int | None
    cache: Folder
    hub: Folder
    triton: Folder
    built_kernels: bool
    c_compiler: str | None
    python_headers: bool
    nccl: str | None


def read_host(
    address: tuple[str, int], packages: Mapping[str, Sequence[str]], environ: Mapping[str, str] = os.environ
) -> Host:
    """The facts of this host.

    `address` is what the server would listen on; it is bound for a moment. `packages`: the modules that each extra of
    the package brings.
    """
    folders = package_folders(sys.path)
    nccl = next((v for name, (_, v) in sorted(folders.items(), reverse=True) if name.startswith("nvidia-nccl-")), None)
    shm = Path("/dev/shm")
    return Host(
        python=(sys.version_info.major, sys.version_info.minor),
        missing={extra: tuple(n for n in names if not _installed(n)) for extra, names in packages.items()},
        port_problem=_port_problem(*address),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm_bytes=read_folder(shm).free_bytes if shm.is_dir() else None,
        cache=read_folder(cache_dir()),
        hub=read_folder(hub_folder(environ)),
        triton=read_folder(triton_folder(environ)),
        built_kernels=any(cache_dir("kernels").glob("cpu-*.so")),
        c_compiler=c_compiler(environ),
        python_headers=Path(sysconfig.get_paths(scheme=_headers_scheme())["include"], "Python.h").exists(),
        nccl=nccl,
    )


def hub_folder(environ: Mapping[str, str]) -> Path:
    """Where models of the hub are downloaded to: as huggingface_hub decides, unless `PELLUCID_CACHE` is set."""
    if "PELLUCID_CACHE" in environ:
        return cache_dir("hub")
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    base = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environ.get("HF_HOME") or base / "huggingface").expanduser() / "hub"


def triton_folder(environ: Mapping[str, str]) -> Path:
    """Where Triton keeps compiled kernels."""
    if environ.get("TRITON_CACHE_DIR"):
        return Path(environ["TRITON_CACHE_DIR"])
    return Path(environ.get("TRITON_HOME") or "~").expanduser() / ".triton" / "cache"


def c_compiler(environ: Mapping[str, str]) -> str | None:
    """The one that Triton would take: $CC, else gcc, else clang."""
    names = [environ["CC"]] if environ.get("CC") else ["gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name, path=environ.get("PATH")))), None)


def read_folder(path: Path) -> Folder:
    """The facts of a folder; of one that is not there yet, those of the nearest above it."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        found = os.statvfs(there)
    except OSError:
        return Folder(path, False, False, None)
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK) and not found.f_flag & os.ST_RDONLY
    executable = not found.f_flag & getattr(os, "ST_NOEXEC", 0)
    return Folder(path, writable, executable, found.f_bavail * found.f_frsize)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _headers_scheme() -> str:
    # Debian's own scheme names a folder under /usr/local, where no headers are.
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme


def _port_problem(host: str, port: int) -> str:
    """Why the server could not listen there; empty when it could."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


# --- from facts to checks -----------------------------------------------------------------------


def host_checks(host: Host, address: tuple[str, int], connections: int, ranks: int, device: str) -> Iterator[Check]:
    """What of the host matters for `connections` clients at once and `ranks` processes on `device`."""
    yield _python(host)
    for extra, missing in host.missing.items():
        yield _packages(extra, missing)
    yield _port(host, address)
    yield _open_files(host, connections)
    if device == "cuda":
        yield _locked_memory(host, ranks)
        yield _shm(host, ranks)
    yield from _folders(host, device)
    if device == "cuda":
        yield _c_compiler(host)
        yield _nccl(host, ranks)


NAMES = (
    *("Python", "packages (engine)", "packages (serve)", "port", "open files", "locked memory", "/dev/shm"),
    *("cache", "hub cache", "Triton's cache", "C compiler", "NCCL"),
)


def unchecked_host(reason: str) -> Iterator[Check]:
    """The same lines of a machine that is not this one."""
    for name in NAMES:
        yield Check(GROUP, name, "not checked", reason)


def _python(host: Host) -> Check:
    version = ".".join(map(str, host.python))
    if host.python in PYTHONS:
        return Check(GROUP, "Python", "ok", version)
    tested = " and ".join(".".join(map(str, one)) for one in PYTHONS)
    return Check(GROUP, "Python", "warn", f"{version}; tested with {tested}", "use one of those")


def _packages(extra: str, missing: tuple[str, ...]) -> Check:
    name = f"packages ({extra})"
    if not missing:
        return Check(GROUP, name, "ok", "all there")
    return Check(GROUP, name, "fail", f"{', '.join(missing)} not installed", f"pip install 'pellucid[{extra}]'")


def _port(host: Host, address: tuple[str, int]) -> Check:
    place = f"{address[0]}:{address[1]}"
    if not host.port_problem:
        return Check(GROUP, "port", "ok", f"{place} is free")
    return Check(GROUP, "port", "fail", f"can't listen on {place}: {host.port_problem}", "another --host or --port")


def _open_files(host: Host, connections: int) -> Check:
    needed = connections + SPARE_FILES
    if host.open_files == resource.RLIM_INFINITY or host.open_files >= needed:
        return Check(GROUP, "open files", "ok", "no limit" if host.open_files < 0 else str(host.open_files))
    found = f"{host.open_files} allowed, {needed} wanted: one for each of {connections} requests that run or wait"
    remedy = f"ulimit -n {max(65536, needed)} (LimitNOFILE= of a systemd unit, --ulimit nofile= of docker)"
    return Check(GROUP, "open files", "warn", found, remedy)


def _locked_memory(host: Host, ranks: int) -> Check:
    if host.locked_memory == resource.RLIM_INFINITY:
        return Check(GROUP, "locked memory", "ok", "no limit")
    found = f"{format_bytes(host.locked_memory)} allowed"
    if ranks == 1:
        return Check(GROUP, "locked memory", "ok", f"{found}; only several ranks may want more")
    remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity of a systemd unit, --ulimit memlock=-1 of docker)"
    return Check(GROUP, "locked memory", "warn", f"{found}; NCCL registers buffers for {ranks} ranks", remedy)


def _shm(host: Host, ranks: int) -> Check:
    if host.shm_bytes is not None and (ranks == 1 or host.shm_bytes >= SHM_FOR_RANKS):
        return Check(GROUP, "/dev/shm", "ok", f"{format_bytes(host.shm_bytes)} free")
    found = "none" if host.shm_bytes is None else f"{format_bytes(host.shm_bytes)} free"
    wanted = f"; {ranks} ranks may want {format_bytes(SHM_FOR_RANKS)}" if ranks > 1 else ""
    return Check(GROUP, "/dev/shm", "warn", found + wanted, "docker run --shm-size=8g, or --ipc=host")


def _folders(host: Host, device: str) -> Iterator[Check]:
    kernels_needed = device == "cpu" and not host.built_kernels
    yield _folder("cache", host.cache, "set PELLUCID_CACHE to a folder", "fail" if kernels_needed else "warn")
    yield _folder("hub cache", host.hub, "set HF_HUB_CACHE to a folder", "warn")
    if device == "cuda":
        yield _folder("Triton's cache", host.triton, "set TRITON_CACHE_DIR to a folder", "fail", runs=True)


def _folder(name: str, folder: Folder, remedy: str, otherwise: Status, runs: bool = False) -> Check:
    """A cache that is written to; `runs`: compiled code is loaded from there."""
    if not folder.writable:
        return Check(GROUP, name, otherwise, f"{folder.path} can't be written", f"{remedy} that can")
    if runs and not folder.executable:
        found = f"{folder.path} is on a mount from which nothing may run (noexec)"
        return Check(GROUP, name, "fail", found, f"{remedy} on another")
    free = "" if folder.free_bytes is None else f", {format_bytes(folder.free_bytes)} free"
    if folder.free_bytes is not None and folder.free_bytes < CACHE_ROOM:
        return Check(GROUP, name, "warn", f"{folder.path}{free}", f"free some space, or {remedy} with more")
    return Check(GROUP, name, "ok", f"{folder.path}{free}")


def _c_compiler(host: Host) -> Check:
    if host.c_compiler is None:
        found = "none found (CC, gcc, clang); Triton builds its launchers with one"
        return Check(GROUP, "C compiler", "fail", found, "apt install gcc, or set CC")
    if not host.python_headers:
        found = f"{host.c_compiler}, but Python.h is missing, which Triton's launchers include"
        return Check(GROUP, "C compiler", "fail", found, f"apt install python{'.'.join(map(str, host.python))}-dev")
    return Check(GROUP, "C compiler", "ok", host.c_compiler)


def _nccl(host: Host, ranks: int) -> Check:
    if host.nccl is not None:
        return Check(GROUP, "NCCL", "ok", host.nccl)
    if ranks == 1:
        return Check(GROUP, "NCCL", "ok", "no package of it; one rank needs none")
    return Check(GROUP, "NCCL", "warn", f"no package of it, and {ranks} ranks talk through it", "pip install torch")
