"""Runs one command behind walls and watches it: time, memory, disk. A program of its own.

Reads the text on 0, leaves 1 to the command's output, and writes one JSON object to 2. Whatever the
command started ends with it: in a process namespace where there is one, else found through /proc
and killed. Imports the standard library and `walls.py`, nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import Any, NoReturn

from coterie.service.validate import walls

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
    walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)
    # whoever is left alone becomes our child
    walls.prctl(walls.PR_SET_CHILD_SUBREAPER, 1)
    # counted before a namespace hides the others
    processes = MAX_PROCESSES + (0 if os.geteuid() == 0 else own_processes())
    standing = walls.namespaces()
    read, write = os.pipe2(os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        first(settings, processes, write)
    os.close(write)
    # ends when the command does, or is replaced: nothing here may hold its input or output
    for handle in (0, 1):
        os.close(handle)
    end = watch(pid, settings)
    kill_all()
    with os.fdopen(read) as told:
        words = [json.loads(line) for line in told]
    for word in words:
        standing += word.get("walls", [])
        # why it was killed, or did not begin, counts more than how it died
        end = end or word.get("end")
    report = {"end": end or ["signal", signal.SIGKILL], "walls": standing}
    os.write(2, json.dumps(report).encode())


def first(settings: dict[str, Any], processes: int, write: int) -> NoReturn:
    """The first process behind the walls: waits for the command and takes everything with it."""
    walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)
    # the first of a namespace sees itself as number one
    own_proc = os.getpid() == 1 and walls.own_proc()
    pid = os.fork()
    if pid == 0:
        become(settings, processes, own_proc, write)
    while True:
        done, status = os.wait()
        if done == pid:
            break
    code = os.waitstatus_to_exitcode(status)
    tell(write, {"end": ["signal", -code] if code < 0 else ["exit", code]})
    os._exit(0)


def become(settings: dict[str, Any], processes: int, own_proc: bool, write: int) -> NoReturn:
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
        standing = walls.other_user(folder, settings["number"])
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        # a change of user takes this back
        walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)
        walls.prctl(walls.PR_SET_NO_NEW_PRIVS, 1)
        standing += walls.files(folder, own_proc) + walls.calls()
        tell(write, {"walls": standing})
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(command[0], command, {})
    except OSError as error:
        tell(write, {"end": ["start", f"{error.strerror or error}"]})
    os._exit(NOT_STARTED)


def tell(write: int, words: dict[str, Any]) -> None:
    os.write(write, json.dumps(words).encode() + b"\n")


def watch(pid: int, settings: dict[str, Any]) -> list[Any] | None:
    """Until it ends by itself (None), or what it had too much of."""
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
    """All that came of the first process; orphans have become our own children."""
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
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
            for thread in threads:
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                waiting += children
        except OSError:
            # gone meanwhile, or a system without /proc
            continue
    return found


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
    """Threads of this user: the limit on processes counts them all."""
    user, count = os.getuid(), 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count
