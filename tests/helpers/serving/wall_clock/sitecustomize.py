"""Sets the wall clock of a server and its workers: PYTHONPATH names this folder, and CLOCK_OFFSET a
file with the seconds that `time.time` is ahead, as eight bytes."""

from __future__ import annotations

import mmap
import os
import struct
import time

_real = time.time
with open(os.environ["CLOCK_OFFSET"], "r+b") as _file:
    _offset = mmap.mmap(_file.fileno(), 8)


def _set_time() -> float:
    seconds: float = struct.unpack("d", _offset[:8])[0]
    return _real() + seconds


time.time = _set_time
