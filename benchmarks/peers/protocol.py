"""The protocol of every measured system: JSON lines on standard input and output.

A peer's worker file makes an object with `decode`, `prefill`, `concurrent` and `long_context`, each
returning tokens per second, and passes it to `serve`; a method of another name is another request.
Standard library only: a worker runs in the virtual environment of its peer.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

# workers measure with the processor time of their process instead of the clock on the wall
CPU_TIME = "COTERIE_BENCH_CPU_TIME"
clock = time.process_time if os.environ.get(CPU_TIME) else time.perf_counter


def prompt_ids(count: int, seed: int, vocab: int = 49152) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(16, vocab) for _ in range(count)]


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def serve(peer: Any) -> None:
    """Answers each request line with {"value": what the method returned} or {"error": text}."""
    # a library that prints to standard output must not break the protocol
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        begin = time.perf_counter()
        try:
            answer = {"value": getattr(peer, operation)(**request)}
        except Exception as error:  # reported to the parent, which prints it in the table
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["wall_s"] = time.perf_counter() - begin
        print(json.dumps(answer), file=out, flush=True)
