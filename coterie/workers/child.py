"""The worker process, `python -m coterie.workers.child SOCKET`: one engine, gone with its parent.

Standard input is the lifeline: the parent writes the `WorkerSpec` (8 bytes of length, then msgpack)
and keeps the pipe open; its end means that the parent is gone. Standard output is the heartbeat: a
byte now and then, from a thread of its own. Signals meant for the whole group are ignored: the
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

# standard input's descriptor
LIFELINE = 0
BEAT_S = 0.5


class WorkerChannel:
    """The child's end of the socket."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        # enough to hand over the last words, not enough to hang on a parent that is gone
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
        # torch is imported here, after the lifeline is watched: loading takes seconds. What an
        # import makes stays to the end: looking for garbage in it would take a tenth longer.
        gc.disable()
        from coterie.workers.host import build_engine

        gc.freeze()
        gc.enable()
        host = build_engine(spec)
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


# Straight from the descriptor: a buffered reader's lock, held by the watching thread, would be
# fatal when the interpreter shuts down.
def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(LIFELINE, size - len(data))
        if not part:
            sys.exit("the parent is gone")
        data += part
    return data


def _heartbeat() -> int:
    """The pipe that was standard output; whatever a library prints goes where the log goes."""
    pipe = os.dup(1)
    os.set_blocking(pipe, False)
    os.dup2(2, 1)
    return pipe


def _beat(pipe: int) -> None:
    while True:
        try:
            os.write(pipe, b".")
        except BlockingIOError:
            # the parent is stopped, and will read what is there
            pass
        except OSError:
            return
        time.sleep(BEAT_S)


def _watch() -> None:
    while os.read(LIFELINE, 1):
        continue
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
