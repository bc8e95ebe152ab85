"""What the child process may do: read anything, write in its own folder only, no sockets, no programs.

Installed before any code of the engine runs. The kernel enforces it where it can (Landlock, seccomp, limits of
resources); an audit hook of the interpreter says the same to Python code on every machine, with a reason that a
traceback shows.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any

from .system_calls import restrict_calls

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATH_EVENTS = {
    "os.chflags": 1, "os.chmod": 1, "os.chown": 1, "os.link": 2, "os.lockf": 0, "os.mkdir": 1, "os.mkfifo": 1,
    "os.mknod": 1, "os.remove": 1, "os.removexattr": 1, "os.rename": 2, "os.rmdir": 1, "os.setxattr": 1,
    "os.symlink": 2, "os.truncate": 1, "os.utime": 1, "shutil.chown": 1, "shutil.rmtree": 1,
}  # fmt: skip
"""Audit events that change the file system, and how many of their first arguments are paths."""

_DENIED = (
    "ftplib.", "http.client.", "imaplib.", "nntplib.", "os.exec", "os.fork", "os.forkpty", "os.kill",
    "os.killpg", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "poplib.",
    "pty.spawn", "signal.pthread_kill", "smtplib.", "socket.", "subprocess.Popen", "syslog.", "telnetlib.", "urllib.",
)  # fmt: skip
_HARMLESS = ("socket.gethostname",)

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_EXECUTE = 1
# WRITE_FILE, REMOVE_DIR, REMOVE_FILE, MAKE_CHAR to MAKE_SYM; REFER since version 2, TRUNCATE 3, IOCTL_DEV 5.
_WRITE_RIGHTS = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2, 5: 0xFFF2}
_WRITE_FILE_AND_TRUNCATE = 0x4002
_TCP_RIGHTS, _TCP_SINCE = 0b11, 4
_SCOPES, _SCOPES_SINCE = 0b11, 6
"""No abstract sockets and no signals to processes outside."""


class Guard:
    """The rules for one process. `in_main` holds only while `main` starts or ends the process of a model."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self.in_main = False

    def install(self) -> None:
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = bool(flags & _WRITES) if isinstance(flags, int) else any(one in (mode or "") for one in "wax+")
            if writes:
                self._check(event, path)
        elif event in _PATH_EVENTS:
            for path in arguments[: _PATH_EVENTS[event]]:
                self._check(event, path)
        elif event in ("os.fork", "os.kill") and self.in_main:
            return
        elif event.startswith(_DENIED) and event not in _HARMLESS:
            raise PermissionError(f"the tracer's child process may not do {event}: it has no network and no programs")

    def _check(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            return
        # Resolved, so that neither `..` nor a link leads out.
        real = os.path.realpath(os.fsdecode(path))
        if real != os.devnull and real != self.folder and not real.startswith(self.folder + os.sep):
            raise PermissionError(f"the tracer's child process may not {event} {real}: only its own folder is writable")


def limit_resources(memory_gib: int, cpu_seconds: int, file_mib: int = 64) -> None:
    """Bounds of this process and of those that it forks: address space, processor time, size of a file, core dumps."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_gib << 30),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_mib << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def restrict_by_kernel(folder: str) -> tuple[str, ...]:
    """Let the kernel refuse what the hook refuses: for native code, which no hook sees.

    Returns what holds now: "network" (a network of its own, with nothing in it) and "files"; neither is certain to be
    there, since it needs a kernel that has it and a user who may.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    held = []
    if libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        held.append("network")
    # Both, whichever fails: a file is held only where its mode and owner are, too.
    confined = (_restrict_files(libc, folder), restrict_calls())
    if all(confined):
        held.append("files")
    return tuple(held)


def _restrict_files(libc: ctypes.CDLL, folder: str) -> bool:
    version = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    rights = _WRITE_RIGHTS[max(one for one in _WRITE_RIGHTS if one <= version)]
    attributes = _RulesetAttributes(
        rights | _EXECUTE,
        _TCP_RIGHTS if version >= _TCP_SINCE else 0,
        _SCOPES if version >= _SCOPES_SINCE else 0,
    )
    # Older kernels refuse a structure longer than they know.
    fields = 3 if version >= _SCOPES_SINCE else 2 if version >= _TCP_SINCE else 1
    ruleset = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(8 * fields), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    # Engines open the null device for writing; it holds nothing.
    for path, allowed in ((folder, rights), (os.devnull, rights & _WRITE_FILE_AND_TRUNCATE)):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathBeneath(allowed, descriptor)
        libc.syscall(_LANDLOCK_ADD, ruleset, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
        os.close(descriptor)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    failed = libc.syscall(_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)
    return not failed
