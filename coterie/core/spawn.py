"""The only way in which a running server starts another program: posix_spawn, never fork().

fork() runs the handlers that native libraries registered with pthread_atfork. The handler of
OpenBLAS waits for its own threads. If one of them is inside a matrix product, it waits for ever,
and the event loop with it. asyncio, uvloop and multiprocessing all fork; posix_spawn runs no
handler and copies no page tables.

    process = await start([sys.executable, "-m", "coterie.some.child"], environment(), stdout=PIPE)
    answer = await process.stdout.read()
    status = await process.wait()
    process.close()

`start` is for an event loop, `spawn` for a thread. The program gets its own session (so a Ctrl-C
in the terminal reaches only the server) and only the three standard streams. If it asks to end
with its parent (PR_SET_PDEATHSIG), the parent is the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

# a standard stream is a pipe, nothing, a descriptor of this process (a number) or inherited (None)
PIPE = -1
DEVNULL = -3
Stream = int | None

# if the system gives no descriptor for a process, its end is polled at this interval
_POLL_S = 0.02
_ROOT = str(Path(__file__).resolve().parents[2])


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base` (default: the environment this process was started with), changed so that the program
    imports the same coterie as this process, even from a checkout in another directory."""
    env = unpinned_environment() if base is None else dict(base)
    inherited = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{inherited}" if inherited else _ROOT
    return env


class ChildProcess:
    """A started program, for a thread that may wait for it. `stdin`, `stdout` and `stderr` are
    blocking binary files where a pipe was requested."""

    def __init__(self, pid: int, pipes: Sequence[BinaryIO | None]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = pipes
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._descriptor = _pidfd(pid)

    def fileno(self) -> int | None:
        """Readable when the process has ended; None where the system has no such descriptor."""
        return self._descriptor

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        # only one thread reaps, and none sends a signal meanwhile: a reaped pid may belong to a new
        # process
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    # another part of this process reaped it
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    if self._descriptor is not None:
                        os.close(self._descriptor)
                        self._descriptor = None
            return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            descriptor = self._descriptor
            if descriptor is None:
                time.sleep(_POLL_S)
            else:
                ended = select.poll()
                ended.register(descriptor, select.POLLIN)
                # bounded: a second waiter may have reaped it and closed the descriptor
                ended.poll(1000)
        return code

    def kill(self, group: bool = False) -> None:
        """Does nothing to a process that has ended. `group`: also all processes of its group."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)

    def close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: Stream = DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
) -> ChildProcess:
    """Raises OSError if the program cannot be started."""
    with _streams((stdin, stdout, stderr)) as (ours, theirs):
        actions: list[tuple[int, ...]] = [
            *((os.POSIX_SPAWN_DUP2, fd, target) for target, fd in theirs.items()),
            *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable()),
        ]
        pid = os.posix_spawn(
            command[0],
            list(command),
            dict(env),
            file_actions=actions,
            setsid=True,
            # signals that Python ignores would be ignored by the program too
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            setsigmask=[],
        )
        return ChildProcess(pid, [_file(ours.pop(target, None), target) for target in range(3)])


class _Input(asyncio.StreamReaderProtocol):
    """For a pipe that is written to. asyncio's own protocol cannot be aborted once it is closed."""

    lost = False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        super().connection_lost(error)


class AsyncProcess:
    """A started program, for an event loop: its pipes are asyncio streams."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._input = _Input(asyncio.StreamReader())
        self._reading: list[asyncio.BaseTransport] = []
        self._watch()
        self.pid = child.pid
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    async def wait(self) -> int:
        """Waits for the end of the process; its pipes may still hold unread output."""
        return await asyncio.shield(self._exited)

    def kill(self, group: bool = False) -> None:
        self._child.kill(group)

    def close(self) -> None:
        """Closes the pipes and drops unread output. A process that reads its input sees the end of
        it."""
        if self.stdin is not None and not self._input.lost:
            self.stdin.transport.abort()
        for transport in self._reading:
            transport.close()
        # a pipe that belongs to a transport is closed by the transport
        self._child.close()

    async def connect(self) -> None:
        child = self._child
        if child.stdin is not None:
            pipe, child.stdin = child.stdin, None
            transport, _ = await self._loop.connect_write_pipe(lambda: self._input, pipe)
            self.stdin = asyncio.StreamWriter(transport, self._input, None, self._loop)
        if child.stdout is not None:
            pipe, child.stdout = child.stdout, None
            self.stdout = await self._reader(pipe)
        if child.stderr is not None:
            pipe, child.stderr = child.stderr, None
            self.stderr = await self._reader(pipe)

    async def _reader(self, pipe: BinaryIO) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        self._reading.append(transport)
        return reader

    def _watch(self) -> None:
        descriptor = self._child.fileno()
        if descriptor is None:
            threading.Thread(target=self._wait, name="wait-for-exit", daemon=True).start()
        else:
            self._loop.add_reader(descriptor, self._ended, descriptor)

    def _ended(self, descriptor: int) -> None:
        # before poll, which closes the descriptor
        self._loop.remove_reader(descriptor)
        code = self._child.poll()
        if code is not None:
            self._exited.set_result(code)

    def _wait(self) -> None:
        code = self._child.wait()
        # if the loop is closed, nobody waits
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._exited.set_result, code)


async def start(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: Stream = DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
) -> AsyncProcess:
    """Like `spawn`, on the event loop, which is blocked until the program is loaded: a
    millisecond."""
    return await adopt(spawn(command, env, stdin=stdin, stdout=stdout, stderr=stderr))


async def adopt(child: ChildProcess) -> AsyncProcess:
    """A process of `spawn` for the event loop. Kills it if that is cancelled."""
    process = AsyncProcess(child)
    connecting = asyncio.ensure_future(process.connect())
    try:
        # if uvloop is cancelled while it takes over a pipe, the pipe is closed twice
        await asyncio.shield(connecting)
    except BaseException:
        process.kill()
        await asyncio.shield(_close_when_connected(process, connecting))
        raise
    return process


async def _close_when_connected(process: AsyncProcess, connecting: asyncio.Future[None]) -> None:
    await asyncio.wait([connecting])
    process.close()
    await process.wait()


@contextlib.contextmanager
def _streams(wanted: Sequence[Stream]) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """The ends of this process and those of the program, by standard stream. Closes what
    remains."""
    ours: dict[int, int] = {}
    theirs: dict[int, int] = {}
    opened: list[int] = []
    try:
        for target, stream in enumerate(wanted):
            if stream == PIPE:
                read, write = (_above_standard(fd) for fd in os.pipe())
                ours[target], theirs[target] = (write, read) if target == 0 else (read, write)
                opened.append(theirs[target])
            elif stream == DEVNULL:
                theirs[target] = _above_standard(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
                opened.append(theirs[target])
            elif stream is not None:
                theirs[target] = stream
        yield ours, theirs
    finally:
        for descriptor in (*ours.values(), *opened):
            os.close(descriptor)


def _above_standard(descriptor: int) -> int:
    """Moves a descriptor above 2. A server started without standard streams gets 0 to 2 for
    files."""
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def _inheritable() -> Iterator[int]:
    """Python opens no inheritable descriptor; the process that started the server, or a library,
    may."""
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        # the descriptor of the listing itself is closed by now
        with contextlib.suppress(OSError):
            if descriptor > 2 and os.get_inheritable(descriptor):
                yield descriptor


def _file(descriptor: int | None, target: int) -> BinaryIO | None:
    return None if descriptor is None else os.fdopen(descriptor, "wb" if target == 0 else "rb")


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)
_before: dict[str, str | None] = {}


def pin_native_threads() -> None:
    """Call it before the native libraries are loaded: they read their variable only once."""
    for name in VARIABLES:
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = "1"


def unpinned_environment() -> dict[str, str]:
    """This process's environment as it was before `pin_native_threads`."""
    env = dict(os.environ)
    for name, value in _before.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env
