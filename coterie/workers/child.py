"""The worker process, `python -m coterie.workers.child SOCKET`: one engine. It ends with its
parent: see lifeline.py. Its first message is the `WorkerSpec`; of one that is begun early, with
`-` for the socket, the address is before it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Sequence

import zmq

from coterie.core.errors import CoterieError, InternalError
from coterie.core.free_memory import return_free_memory
from coterie.core.value_check import fault_of
from coterie.obs.log import configure, log
from coterie.workers import wire
from coterie.workers.contract import ReplicaInfo, WorkerCommand, WorkerReport
from coterie.workers.early import ADDRESS_FOLLOWS
from coterie.workers.lifeline import end, end_with_parent, next_message, show_life
from coterie.workers.loop import first_report, serve


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
    show_life()
    if address == ADDRESS_FOLLOWS:
        address = _begun_early()
    spec = wire.decode_spec(next_message())
    configure(spec.log_level)
    end_with_parent()
    channel = WorkerChannel(address)
    try:
        # import torch only now: it takes seconds, and the lifeline must already be watched. What an
        # import makes stays to the end: looking for garbage in it would take a tenth longer.
        # The same holds for the texts of a tokenizer and the objects of a model.
        gc.disable()
        from coterie.workers.host import build_engine

        gc.freeze()
        host = build_engine(spec)
        gc.collect()
        # no collection between two steps looks at what stays
        gc.freeze()
        gc.enable()
        # what reading the file and its vocabulary took
        return_free_memory()
        if (fault := fault_of(host.info, ReplicaInfo)) is not None:
            raise InternalError(f"what was loaded cannot be told: {fault}")
    except CoterieError as error:
        channel.load(wire.LoadOutcome(code=error.code, message=error.message))
        channel.close()
        return 1
    channel.load(wire.LoadOutcome(host.info))
    channel.send(first_report(host))
    try:
        serve(host, channel.receive, channel.send)
    except Exception as error:
        log("engine_died", level="error", error=error, replica=spec.name)
        return 1
    host.close()
    channel.close()
    return 0


def _begun_early() -> str:
    """Imports the engine while nobody has said yet what to load. Returns the socket's address."""
    gc.disable()
    # reported once there is somebody to report it to
    with contextlib.suppress(CoterieError):
        importlib.import_module("coterie.workers.host")
    return next_message().decode()


def _read_command(message: bytes) -> WorkerCommand:
    try:
        return wire.decode_command(message)
    except wire.Mistyped as error:
        command = wire.unread(message)
        log("command_unread", level="error", request_id=command.request_id, reason=str(error))
        return command


if __name__ == "__main__":
    end(main(sys.argv[1]))
