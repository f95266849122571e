"""One worker process as the gateway sees it: its socket, its lifeline, its exit. No torch here.

A restart makes a new `WorkerProcess` with a new socket, so messages of a dead process cannot be
taken for messages of the next one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import zmq

from coterie.core.errors import InternalError, Unavailable, from_code
from coterie.core.own_folder import make_own_folder, release_own_folder
from coterie.core.private_files import private_folder
from coterie.core.spawn import PIPE, AsyncProcess, adopt, start
from coterie.obs.log import log
from coterie.weights.home import state_dir
from coterie.workers import early, wire
from coterie.workers.contract import ReplicaInfo, WorkerCommand, WorkerReport, WorkerSpec
from coterie.workers.lifeline import LENGTH

# a socket path may have 107 characters; the name of the socket needs up to 16
MAX_DIRECTORY = 90
EXIT_S = 3.0


Info = TypeVar("Info")
Report = TypeVar("Report")
Info_co = TypeVar("Info_co", covariant=True)


class ProcessSpec(Protocol):
    """The part of a spec that every worker process has."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def threads(self) -> int: ...


class ProcessLoaded(Protocol[Info_co]):
    """The first message of a process: what it loaded, or the error."""

    @property
    def info(self) -> Info_co | None: ...
    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...


@dataclass(frozen=True, slots=True)
class WorkerProgram(Generic[Info, Report]):
    """What runs in a worker process, and how its messages are read. Its first one says what was
    loaded; `stop` asks it to end."""

    module: str
    decode_loaded: Callable[[bytes], ProcessLoaded[Info]]
    decode_report: Callable[[bytes], Report]
    stop: object


ENGINE_PROGRAM: WorkerProgram[ReplicaInfo, WorkerReport] = WorkerProgram(
    "coterie.workers.child", wire.decode_loaded, wire.decode_report, WorkerCommand("stop")
)


# of reading what a worker has sent, before others have their turn
TURN_S = 0.005


class WorkerSocket:
    """A PAIR socket on the event loop. ZeroMQ's descriptor is edge-triggered: read until it is
    empty, and check again after every send, because a send may consume the edge. In turns: a worker
    may send as fast as is read."""

    def __init__(self, address: str, on_message: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # no limit here: admission limits the number of commands
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._descriptor: int = self._socket.getsockopt(zmq.FD)
        self._will_read = False
        self._loop.add_reader(self._descriptor, self._read)

    def send(self, command: object) -> bool:
        """False if there is no worker at the other end."""
        if self._socket.closed:
            return False
        try:
            message = wire.encode(command)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InternalError("a value of this request cannot be sent to a worker") from error
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._read_soon()
        return True

    async def read_rest(self) -> None:
        """Of a process that has ended."""
        while self._read_turn():
            await asyncio.sleep(0)

    def _read_soon(self) -> None:
        if not self._will_read:
            self._will_read = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._will_read = False
        if self._read_turn():
            self._read_soon()

    def _read_turn(self) -> bool:
        """Whether there may be more."""
        ends_at = time.monotonic() + TURN_S
        while not self._socket.closed:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._on_message(message)
            if time.monotonic() >= ends_at:
                return True
        return False

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()


class WorkerProcess:
    """One worker process from spawn to exit."""

    def __init__(self, process: AsyncProcess, link: WorkerSocket, stop: object) -> None:
        self._process = process
        self._link = link
        self._stop = stop
        self.pid = process.pid
        self.send = link.send
        # number of heartbeats
        self.beats = 0
        self._listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def spawn(
        cls, spec: WorkerSpec, path: Path, on_report: Callable[[WorkerReport], None]
    ) -> tuple[WorkerProcess, ReplicaInfo]:
        """A process that runs an engine."""
        return await cls.launch(spec, path, on_report, ENGINE_PROGRAM)

    @classmethod
    async def launch(
        cls,
        spec: ProcessSpec,
        path: Path,
        on_report: Callable[[Report], None],
        program: WorkerProgram[Info, Report],
    ) -> tuple[WorkerProcess, Info]:
        """Start a process and wait until it has loaded. Raises the error if it could not load."""
        loaded: asyncio.Future[ProcessLoaded[Info]] = asyncio.get_running_loop().create_future()
        child: WorkerProcess | None = None

        def on_message(message: bytes) -> None:
            try:
                if loaded.done():
                    on_report(program.decode_report(message))
                else:
                    loaded.set_result(program.decode_loaded(message))
            except wire.Unreadable as error:
                # its tokens are lost: another worker produces them again
                log("report_unreadable", level="error", error=error, replica=spec.name)
                if child is not None:
                    child._process.kill()

        address = f"ipc://{path}"
        link = WorkerSocket(address, on_message)
        try:
            process = await _launch(address, spec, program.module)
            child = cls(process, link, program.stop)
            info = await child._until_loaded(loaded, spec)
        except BaseException:
            if child is not None:
                await child.kill()
            link.close()
            raise
        return child, info

    async def _until_loaded(
        self, loaded: asyncio.Future[ProcessLoaded[Info]], spec: ProcessSpec
    ) -> Info:
        exited = asyncio.ensure_future(self._process.wait())
        either: set[asyncio.Future[Any]] = {loaded, exited}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            # the last message of a process that has exited may still arrive
            await asyncio.wait({loaded}, timeout=0.2)
        exited.cancel()
        if not loaded.done():
            raise Unavailable(
                f"worker {spec.name} died while loading {spec.model} "
                f"(exit status {self._process.returncode}); its own words are on standard error"
            )
        word = loaded.result()
        if word.info is None:
            raise from_code(word.code, word.message)
        return word.info

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(4096):
            self.beats += 1

    async def exited(self) -> int:
        """Wait until the process ends; the socket is closed after the last message."""
        code = await self._process.wait()
        await self._link.read_rest()
        self._release()
        return code

    async def stop(self) -> None:
        """Ask the process to stop, wait briefly, then kill it."""
        self._link.send(self._stop)
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_S)
        except TimeoutError:
            await self.kill()
        self._release()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()
        self._release()

    def _release(self) -> None:
        self._link.close()
        self._process.close()


async def _launch(address: str, spec: ProcessSpec, module: str) -> AsyncProcess:
    begun = early.take(spec.threads) if module == ENGINE_PROGRAM.module else None
    messages = [wire.encode(spec)]
    if begun is not None:
        process = await adopt(begun)
        messages.insert(0, address.encode())
    else:
        command = [sys.executable, "-m", module, address]
        env = early.worker_environment(spec.threads)
        process = await start(command, env, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    for message in messages:
        process.stdin.write(LENGTH.pack(len(message)) + message)
    return process


def socket_directory() -> Path:
    """A folder that only this user can enter, with a path short enough for a socket."""
    parent = state_dir() / "run"
    if len(str(parent)) + 16 <= MAX_DIRECTORY:
        private_folder(parent)
        return make_own_folder(parent)
    return make_own_folder(Path(tempfile.gettempdir()), "coterie-run-")


def is_own_directory(directory: Path) -> bool:
    """Whether it still exists and is ours: in /tmp others may take a removed name."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def remove_directory(directory: Path) -> None:
    """Remove the folder with its content. What cannot be removed is logged."""
    try:
        if directory.is_symlink() or not directory.is_dir():
            directory.unlink(missing_ok=True)
        else:
            shutil.rmtree(directory)
    except OSError as error:
        log("run_directory_left", level="warning", error=error)
    release_own_folder(directory)
