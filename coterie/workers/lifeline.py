"""What every worker process has in common: it ends with its parent, and shows that it lives.

Standard input is the lifeline: the parent writes the first message (8 bytes of length, then
msgpack) and keeps the pipe open; when the pipe closes, the parent is gone. Standard output is the
heartbeat: a separate thread writes a byte at intervals. Signals to the whole process group are
ignored: the parent decides when running requests have ended.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
import time

import zmq

# the descriptor of standard input
LIFELINE = 0
BEAT_S = 0.5
# the length before the first message on the child's standard input
LENGTH = struct.Struct("<Q")


def first_message() -> bytes:
    """Starts the heartbeat and waits for the parent's first message."""
    show_life()
    return next_message()


def show_life() -> None:
    """Ignores the group's signals and starts the heartbeat."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_beat, args=(_heartbeat(),), name="heartbeat", daemon=True).start()


def next_message() -> bytes:
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    return _read(length)


def end_with_parent() -> None:
    """From now on, the process ends when its parent does."""
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def end(status: int) -> None:
    """Send what waits in the socket and exit. The interpreter would first free every object of
    torch, which takes half a second."""
    zmq.Context.instance().destroy()
    sys.stderr.flush()
    os._exit(status)


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
