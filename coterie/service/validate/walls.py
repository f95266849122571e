"""Walls around an operator's command, each where the system has it: network, other processes,
files outside its folder, dangerous calls, the server's own user.

Part of `launch.py`, which runs it in a process of its own: the standard library alone, and no
other module of Coterie. Unprivileged where it can be; says which walls stand.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

CLONE_NEWNS = 1 << 17
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = 1 << 28, 1 << 29, 1 << 30, 1 << 27
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_FILTER = 2
# nosuid, nodev, noexec; recursive and private
_MOUNT_PLAIN, _MOUNT_PRIVATE = 2 | 4 | 8, 1 << 14 | 1 << 18
# a user nobody else is; the kernel counts processes by user
_FIRST_USER = 2_000_000_000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 1, 1 << 2, 1 << 3
# make, remove and write, by the version of the interface that knows them
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14

# machine -> (audit number, calls that are refused)
_CALLS = {
    # socket, ptrace, mount, keyctl, add_key, unshare, setns, bpf, userfaultfd, io_uring_setup
    "x86_64": (0xC000003E, (41, 101, 165, 250, 248, 272, 308, 321, 323, 425)),
    "aarch64": (0xC00000B7, (198, 117, 40, 219, 217, 97, 268, 280, 282, 425)),
}
_X32_CALLS = 0x40000000
_LOAD, _EQUAL, _ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000


def call(name: str, *arguments: object) -> bool:
    """A libc function that returns 0 when it worked."""
    return _LIBC is not None and getattr(_LIBC, name)(*arguments) == 0


def prctl(option: int, value: int) -> bool:
    return call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def namespaces() -> list[str]:
    """No network and no other processes, for the children of this one."""
    user, group = os.geteuid(), os.getegid()
    wanted = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    if call("unshare", wanted):
        return ["network", "processes"]
    if not call("unshare", wanted | CLONE_NEWUSER):
        return []
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"),
                       ("gid_map", f"{group} {group} 1")):  # fmt: skip
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return ["network", "processes"]


def own_proc() -> bool:
    """In a process namespace: a /proc that shows what is in it. This process's own view alone."""
    return (
        call("unshare", CLONE_NEWNS)
        and call("mount", None, b"/", None, ctypes.c_ulong(_MOUNT_PRIVATE), None)
        and call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_MOUNT_PLAIN), None)
    )


def other_user(folder: str, number: int) -> list[str]:
    """Root becomes nobody in particular, who owns the folder and nothing else."""
    if os.geteuid() != 0:
        return []
    user = _FIRST_USER + number
    os.chown(folder, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    return ["user"]


def files(folder: str, own_proc: bool) -> list[str]:
    """Landlock: nothing outside the folder can be changed, nor any process outside be seen into.
    Without a /proc of its own, the command can open no more of it than what is about itself."""
    if _LIBC is None:
        return []
    version = _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return []
    changes = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    # file access, TCP (bind and connect), scope (abstract sockets and signals)
    reads = _READ_FILE | _READ_FOLDER
    rules = struct.pack("QQQ", changes | reads, 3, 3)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    handle = _LIBC.syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    if handle < 0:
        return []
    allowed = [(folder, changes | reads), ("/dev/null", _WRITE_FILE)]
    # what is not named cannot be opened: the root is named by what is in it
    allowed += [(f"/{name}", reads) for name in os.listdir("/") if name != "proc" or own_proc]
    allowed += [("/proc/self", reads)]
    for path, rights in allowed:
        _allow(handle, path, rights)
    standing = _LIBC.syscall(_LANDLOCK_RESTRICT, handle, 0) == 0
    os.close(handle)
    return ["files"] if standing else []


def _allow(handle: int, path: str, rights: int) -> None:
    try:
        inside = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        # a link to nowhere, or a place this user cannot see
        return
    if not stat.S_ISDIR(os.fstat(inside).st_mode):
        rights &= _WRITE_FILE | _READ_FILE
    assert _LIBC is not None
    _LIBC.syscall(_LANDLOCK_ADD, handle, 1, struct.pack("=Qi", rights, inside), 0)
    os.close(inside)


def calls() -> list[str]:
    """seccomp: no sockets of any family, no tracing, no namespaces of its own."""
    known = _CALLS.get(platform.machine())
    if known is None or sys.platform != "linux":
        return []
    architecture, refused = known
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, 0), (_ABOVE, len(refused) + 1, 0, _X32_CALLS)]
    # from each, how far it is to the last step
    steps += [(_EQUAL, len(refused) - index, 0, nr) for index, nr in enumerate(refused)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    standing = call("prctl", PR_SET_SECCOMP, _SECCOMP_FILTER, program, 0, 0)
    return ["calls"] if standing else []
