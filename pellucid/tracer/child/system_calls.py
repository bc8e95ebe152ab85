"""System calls that the kernel refuses to the child process (seccomp), for native code, which no audit hook sees.

Called by `guard` and `main`. Landlock knows writes to files; this knows what else reaches outside the child's folder:
modes, owners and times of files, System V objects, sessions, priorities, other processes, sockets, mounts, the clock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

# Numbers for x86-64 and AArch64, from the kernel's tables of system calls; -1 where there is no such call.
_REFUSED = {
    # modes, owners, times and attributes of files
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "utimensat": (280, 88), "futimesat": (261, -1), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "open_by_handle_at": (304, 265),
    # System V and POSIX objects, which outlive a process
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
    # programs, sessions, priorities, and processes other than itself
    "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157), "setpgid": (109, 154),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "tkill": (200, 130), "kcmp": (312, 272), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    # sockets, namespaces, mounts, and what would go round this filter
    "socket": (41, 198), "io_uring_setup": (425, 425), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "fanotify_init": (300, 262), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    # the machine itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116),
    "vhangup": (153, 58), "iopl": (172, -1), "ioperm": (173, -1),
}  # fmt: skip
_FORKS = ((57, -1), (58, -1))
_CLONE, _CLONE3, _IOCTL = (56, 220), (435, 435), (16, 29)
_OWN_ONLY = ((302, 261), (203, 122))
"""prlimit64 and sched_setaffinity: the first argument is a process, 0 for itself."""
_SIGNALS = ((62, 129), (234, 131))
"""kill and tgkill."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_NAMESPACES, _THREAD = 0x7E020000, 0x00010000
# FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR need no handle that may write; TIOCSTI types into the user's terminal.
_COMMANDS = (0x40086602, 0x401C5820, 0x5412)

_LOAD, _RETURN = 0x20, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]
"""Code, jumps where true and where false, and operand of classic BPF."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict_calls() -> bool:
    """Refuse what reaches outside, for this process and all that it starts; False where this can't be done here.

    New processes are allowed still, but none leaves the process group, so that killing the group ends them all.
    """
    machine = _machine()
    if machine is None:
        return False
    column, architecture = machine
    body = [one for numbers in _REFUSED.values() for one in _refuse(numbers[column])]
    body += _refuse(_CLONE3[column], errno.ENOSYS)  # its flags lie in memory; the C library then uses clone
    body += _test(_CLONE[column], 0, (_IF_ANY_BIT, 0, 1, _NAMESPACES))
    for command in _COMMANDS:
        body += _test(_IOCTL[column], 1, (_IF_EQUAL, 0, 1, command))
    for numbers in _OWN_ONLY:
        body += _test(numbers[column], 0, (_IF_EQUAL, 1, 0, 0))
    return _install(architecture, body)


def restrict_to_this_process() -> bool:
    """Refuse new processes and signals to others, on top of `restrict_calls`: called in the process of one model."""
    machine = _machine()
    if machine is None:
        return False
    column, architecture = machine
    body = [one for numbers in _FORKS for one in _refuse(numbers[column])]
    body += _test(_CLONE[column], 0, (_IF_ANY_BIT, 1, 0, _THREAD))
    for numbers in _SIGNALS:
        body += _test(numbers[column], 0, (_IF_EQUAL, 1, 0, os.getpid()))
    return _install(architecture, body)


def _machine() -> tuple[int, int] | None:
    known = sys.platform == "linux" and sys.maxsize > 1 << 32 and sys.byteorder == "little"
    return _MACHINES.get(platform.machine()) if known else None


def _install(architecture: int, body: list[Instruction]) -> bool:
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, architecture),
        _returns(errno.EPERM),
        _load_number(),
        (_IF_AT_LEAST, 0, 1, _X32),
        _returns(errno.EPERM),
        *body,
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *one) for one in program)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filters = _Program(len(program), code)
    return bool(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filters), 0, 0) == 0)


def _refuse(number: int, error: int = errno.EPERM) -> list[Instruction]:
    return [] if number < 0 else [(_IF_EQUAL, 0, 1, number), _returns(error)]


def _test(number: int, argument: int, test: Instruction) -> list[Instruction]:
    """Refuse call `number` unless `test` of one of its arguments jumps over the refusal."""
    return [(_IF_EQUAL, 0, 4, number), _argument(argument), test, _returns(errno.EPERM), _load_number()]


def _argument(index: int) -> Instruction:
    """Its lower half: all that is a process, a command or a flag here lies in it."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _load_number() -> Instruction:
    return (_LOAD, 0, 0, _NUMBER)


def _returns(error: int) -> Instruction:
    return (_RETURN, 0, 0, _REFUSE | error)
