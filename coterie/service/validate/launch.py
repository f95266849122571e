"""A separate program that runs one command in a sandbox and limits its time, memory and disk.

The command reads the text from descriptor 0 and writes its output to 1; this program writes one
JSON object to 2. All processes that the command started end with it: in a process namespace where
there is one, otherwise they are found through /proc and killed. The JSON field `walls` lists the
isolation measures that this system could set up. Imports only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import stat
import struct
import sys
import time
from typing import Any, NoReturn

POLL_S = 0.02
KILL_S = 5.0
MAX_PROCESSES = 32
MAX_FILE_BYTES = 16_000_000
MAX_OPEN_FILES = 64
MAX_DISK_BYTES = 64_000_000
MAX_DISK_FILES = 1_000
NOT_STARTED = 127


def main() -> None:
    settings = json.loads(sys.argv[-1])
    os.chdir(settings["folder"])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # processes whose parent has ended become children of this process
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # count before a namespace hides the other processes
    processes = MAX_PROCESSES + (0 if os.geteuid() == 0 else own_processes())
    walls = namespaces()
    read, write = os.pipe2(os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        first(settings, processes, write)
    os.close(write)
    # the pipes must close when the command ends, so this process must not keep them open
    for handle in (0, 1):
        os.close(handle)
    end = watch(pid, settings)
    kill_all()
    with os.fdopen(read) as lines:
        messages = [json.loads(line) for line in lines]
    for message in messages:
        walls += message.get("walls", [])
        # the reason why it was killed, or did not start, is more important than its exit status
        end = end or message.get("end")
    report = {"end": end or ["signal", signal.SIGKILL], "walls": walls}
    os.write(2, json.dumps(report).encode())


def first(settings: dict[str, Any], processes: int, write: int) -> NoReturn:
    """The first process in the sandbox: waits for the command. When it exits, all others end."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # the first process of a namespace has the process id 1
    sees_own = os.getpid() == 1 and own_proc()
    pid = os.fork()
    if pid == 0:
        become(settings, processes, sees_own, write)
    while True:
        done, status = os.wait()
        if done == pid:
            break
    code = os.waitstatus_to_exitcode(status)
    send(write, {"end": ["signal", -code] if code < 0 else ["exit", code]})
    os._exit(0)


def become(settings: dict[str, Any], processes: int, sees_own: bool, write: int) -> NoReturn:
    folder, command = settings["folder"], settings["command"]
    try:
        os.chdir(folder)
        os.dup2(1, 2)
        seconds = int(settings["timeout_s"]) + 1
        limits = {
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_AS: settings["memory_bytes"],
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
            resource.RLIMIT_NPROC: processes,
            resource.RLIMIT_CORE: 0,
        }
        walls = other_user(folder, settings["number"])
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        # a change of user resets this, so it is set again
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        walls += files(folder, sees_own) + calls()
        send(write, {"walls": walls})
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(command[0], command, {})
    except OSError as error:
        send(write, {"end": ["start", f"{error.strerror or error}"]})
    os._exit(NOT_STARTED)


def send(write: int, message: dict[str, Any]) -> None:
    os.write(write, json.dumps(message).encode() + b"\n")


def watch(pid: int, settings: dict[str, Any]) -> list[Any] | None:
    """Wait until the process ends by itself (None), or return the limit that it exceeded."""
    deadline = time.monotonic() + settings["timeout_s"]
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            return ["timeout", settings["timeout_s"]]
        if memory_of(descendants(pid)) > settings["memory_bytes"]:
            return ["memory", settings["memory_bytes"]]
        if disk_is_full(settings["folder"]):
            return ["disk", MAX_DISK_BYTES]
        time.sleep(POLL_S)
    return None


def kill_all() -> None:
    """Kill all descendants of the first process. Those without a parent are now our children."""
    give_up = time.monotonic() + KILL_S
    while time.monotonic() < give_up:
        for other in descendants(os.getpid()):
            try:
                os.kill(other, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                continue
        except ChildProcessError:
            return
        time.sleep(0.002)


def descendants(pid: int) -> list[int]:
    pids, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
            for thread in threads:
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(word) for word in file.read().split()]
                pids += children
                waiting += children
        except OSError:
            # it has ended in the meantime, or the system has no /proc
            continue
    return pids


def memory_of(pids: list[int]) -> int:
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                _, resident, shared, *_ = file.read().split()
            pages += int(resident) - int(shared)
        except (OSError, ValueError):
            continue
    return pages * resource.getpagesize()


def disk_is_full(folder: str) -> bool:
    size = files = 0
    for path, _, names in os.walk(folder):
        files += len(names) + 1
        for name in names[:MAX_DISK_FILES]:
            try:
                size += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue
        if files > MAX_DISK_FILES or size > MAX_DISK_BYTES:
            return True
    return False


def own_processes() -> int:
    """Number of threads of this user: the limit on processes counts all of them."""
    user, count = os.getuid(), 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

CLONE_NEWNS = 1 << 17
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = 1 << 28, 1 << 29, 1 << 30, 1 << 27
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_FILTER = 2
# mount flags: nosuid, nodev, noexec; recursive and private
_MOUNT_PLAIN, _MOUNT_PRIVATE = 2 | 4 | 8, 1 << 14 | 1 << 18
# first of the user ids that no one else has; the kernel counts processes per user
_FIRST_USER = 2_000_000_000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 1, 1 << 2, 1 << 3
# rights to make, remove and write; later versions of Landlock add two more
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14

# machine -> (audit number, refused system calls)
_CALLS = {
    # socket, ptrace, mount, keyctl, add_key, unshare, setns, bpf, userfaultfd, io_uring_setup
    "x86_64": (0xC000003E, (41, 101, 165, 250, 248, 272, 308, 321, 323, 425)),
    "aarch64": (0xC00000B7, (198, 117, 40, 219, 217, 97, 268, 280, 282, 425)),
}
_X32_CALLS = 0x40000000
_LOAD, _EQUAL, _ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000


def call(name: str, *arguments: object) -> bool:
    """Call a libc function. Whether it worked, which means that it returned 0."""
    return _LIBC is not None and getattr(_LIBC, name)(*arguments) == 0


def prctl(option: int, value: int) -> bool:
    return call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def namespaces() -> list[str]:
    """Namespaces for the children of this process: without network and other processes."""
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    if call("unshare", flags):
        return ["network", "processes"]
    if not call("unshare", flags | CLONE_NEWUSER):
        return []
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"),
                       ("gid_map", f"{group} {group} 1")):  # fmt: skip
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return ["network", "processes"]


def own_proc() -> bool:
    """In a process namespace: mount a /proc that shows only its processes, for this process and its
    children."""
    return (
        call("unshare", CLONE_NEWNS)
        and call("mount", None, b"/", None, ctypes.c_ulong(_MOUNT_PRIVATE), None)
        and call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_MOUNT_PLAIN), None)
    )


def other_user(folder: str, number: int) -> list[str]:
    """Change from root to a user who owns the folder and nothing else."""
    if os.geteuid() != 0:
        return []
    user = _FIRST_USER + number
    os.chown(folder, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    return ["user"]


def files(folder: str, own_proc: bool) -> list[str]:
    """Landlock: the command cannot change anything outside the folder, and cannot look into
    processes outside the sandbox. Without its own /proc it can open only its own entries there."""
    if _LIBC is None:
        return []
    version = _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return []
    changes = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    # three masks: file access, TCP (bind and connect), scope (abstract sockets and signals)
    reads = _READ_FILE | _READ_FOLDER
    rules = struct.pack("QQQ", changes | reads, 3, 3)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    handle = _LIBC.syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    if handle < 0:
        return []
    allowed = [(folder, changes | reads), ("/dev/null", _WRITE_FILE)]
    # paths that are not listed cannot be opened, so every entry of the root folder is listed
    allowed += [(f"/{name}", reads) for name in os.listdir("/") if name != "proc" or own_proc]
    allowed += [("/proc/self", reads)]
    for path, rights in allowed:
        _allow(handle, path, rights)
    is_active = _LIBC.syscall(_LANDLOCK_RESTRICT, handle, 0) == 0
    os.close(handle)
    return ["files"] if is_active else []


def _allow(handle: int, path: str, rights: int) -> None:
    try:
        inside = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        # a broken link, or a path that this user cannot see
        return
    if not stat.S_ISDIR(os.fstat(inside).st_mode):
        rights &= _WRITE_FILE | _READ_FILE
    assert _LIBC is not None
    _LIBC.syscall(_LANDLOCK_ADD, handle, 1, struct.pack("=Qi", rights, inside), 0)
    os.close(inside)


def calls() -> list[str]:
    """seccomp: no sockets of any family, no tracing, no new namespaces."""
    known = _CALLS.get(platform.machine())
    if known is None or sys.platform != "linux":
        return []
    architecture, refused = known
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, 0), (_ABOVE, len(refused) + 1, 0, _X32_CALLS)]
    # each step jumps to the last step (refuse) if the call number is equal
    steps += [(_EQUAL, len(refused) - index, 0, nr) for index, nr in enumerate(refused)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    is_active = call("prctl", PR_SET_SECCOMP, _SECCOMP_FILTER, program, 0, 0)
    return ["calls"] if is_active else []
