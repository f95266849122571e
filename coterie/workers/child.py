"""The worker process, `python -m coterie.workers.child SOCKET`: one engine. It ends with its
parent.

Standard input is the lifeline: the parent writes the `WorkerSpec` (8 bytes of length, then msgpack)
and keeps the pipe open; when the pipe closes, the parent is gone. Standard output is the heartbeat:
a separate thread writes a byte at intervals. Signals to the whole process group are ignored: the
parent decides when running requests have ended.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import zmq

from coterie.core.errors import CoterieError, InternalError
from coterie.core.value_check import fault_of
from coterie.obs.log import configure, log
from coterie.workers import wire
from coterie.workers.contract import ReplicaInfo, WorkerCommand, WorkerReport
from coterie.workers.loop import serve

# the descriptor of standard input
LIFELINE = 0
BEAT_S = 0.5


class WorkerChannel:
    """The socket in the worker process."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        # long enough to send the last messages, short enough not to wait for a parent that is gone
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)

    def load(self, word: wire.LoadOutcome) -> None:
        self._socket.send(wire.encode(word))

    def send(self, report: WorkerReport) -> None:
        self._socket.send(wire.encode_report(report))

    def receive(self, wait: bool) -> Sequence[WorkerCommand]:
        commands = [_read_command(self._socket.recv())] if wait else []
        while True:
            try:
                commands.append(_read_command(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands

    def close(self) -> None:
        self._socket.close()


def main(address: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_beat, args=(_heartbeat(),), name="heartbeat", daemon=True).start()
    (length,) = wire.LENGTH.unpack(_read(wire.LENGTH.size))
    spec = wire.decode_spec(_read(length))
    configure(spec.log_level)
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()
    channel = WorkerChannel(address)
    try:
        # import torch only now: it takes seconds, and the lifeline must already be watched. What an
        # import makes stays to the end: looking for garbage in it would take a tenth longer.
        gc.disable()
        from coterie.workers.host import build_engine

        gc.freeze()
        gc.enable()
        host = build_engine(spec)
        # the model stays too: no collection between two steps looks at it
        gc.freeze()
        if (fault := fault_of(host.info, ReplicaInfo)) is not None:
            raise InternalError(f"what was loaded cannot be told: {fault}")
    except CoterieError as error:
        channel.load(wire.LoadOutcome(code=error.code, message=error.message))
        channel.close()
        return 1
    threading.Thread(target=host.engine.warm_grammars, name="grammars", daemon=True).start()
    channel.load(wire.LoadOutcome(host.info))
    channel.send(WorkerReport(lanes=host.engine.lane_states()))
    try:
        serve(host, channel.receive, channel.send)
    except Exception as error:
        log("engine_died", level="error", error=error, replica=spec.name)
        return 1
    host.close()
    channel.close()
    return 0


def _read_command(message: bytes) -> WorkerCommand:
    try:
        return wire.decode_command(message)
    except wire.Mistyped as error:
        command = wire.unread(message)
        log("command_unread", level="error", request_id=command.request_id, reason=str(error))
        return command


# Reads directly from the descriptor: the watching thread would hold the lock of a buffered reader,
# which is a fatal error when the interpreter shuts down.
def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(LIFELINE, size - len(data))
        if not part:
            sys.exit("the parent is gone")
        data += part
    return data


def _heartbeat() -> int:
    """The pipe that was standard output. From now on, output of libraries goes to the log."""
    pipe = os.dup(1)
    os.set_blocking(pipe, False)
    os.dup2(2, 1)
    return pipe


def _beat(pipe: int) -> None:
    while True:
        try:
            os.write(pipe, b".")
        except BlockingIOError:
            # the pipe is full because the parent is stopped; it will read what is there
            pass
        except OSError:
            return
        time.sleep(BEAT_S)


def _watch() -> None:
    while os.read(LIFELINE, 1):
        continue
    os._exit(0)


def _end(status: int) -> None:
    """Send what waits in the socket and exit. The interpreter would first free every object of
    torch, which takes half a second."""
    zmq.Context.instance().destroy()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(main(sys.argv[1]))
