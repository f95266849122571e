"""A program for test_child_protocol.py: does what the question says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from coterie.core.child_protocol import serve


def prepare(first: bytes) -> Callable[[bytes], bytes]:
    if first == b"never ready":
        time.sleep(600)
    if first == b"broken":
        sys.exit(3)
    return lambda question: answer(first, question)


def answer(first: bytes, question: bytes) -> bytes:
    what = question.decode()
    if what == "die":
        os._exit(1)
    elif what == "sleep":
        time.sleep(600)
    elif what == "spin":
        while True:
            pass
    elif what == "eat":
        return str(len(bytearray(4 << 30))).encode()
    elif what == "print":
        print("this is no answer", flush=True)
    elif what.startswith("wait "):
        time.sleep(float(what[5:]))
    elif what.startswith("die once "):
        path = what.removeprefix("die once ")
        if not os.path.exists(path):
            open(path, "w").close()
            os._exit(1)
    return b"%d %s %s" % (os.getpid(), first, question[:60])


if __name__ == "__main__":
    serve(prepare, memory_bytes=2 << 30, cpu_s=0.5)
