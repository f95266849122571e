"""Loads mutations of a valid GGUF file and runs each that loads: `python -m ... BASE FIRST COUNT`.

Prints a line of JSON for each: its seed, what happened, its seconds and how far the memory of the
process grew. A process of its own, because a fault in native code ends it.
"""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import struct
import sys
import time
from pathlib import Path

from coterie.core.errors import CoterieError
from coterie.core.events import Failed, Finished
from coterie.core.lane import LaneConfig
from coterie.core.plan import Assignment, Rejected
from coterie.core.request import Limits, Sampling
from coterie.weights.formats.gguf import read_gguf
from coterie.workers.contract import WorkerSpec
from coterie.workers.host import build_engine

# values at which sizes, offsets and counts tend to overflow
EXTREMES = (0, 1, 2, 7, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
MAX_STEPS = 200


def mutated(whole: bytes, header: int, seed: int) -> bytes:
    draw = random.Random(seed)
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        # most faults are in the header, where every byte has a meaning
        at = draw.randrange(header if draw.random() < 0.85 else len(data))
        kind = draw.randrange(7)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at] = draw.randrange(256)
        elif kind == 2:
            form = draw.choice(("<I", "<Q"))
            raw = struct.pack(form, draw.choice(EXTREMES) % 2 ** (8 * struct.calcsize(form)))
            data[at : at + len(raw)] = raw
        elif kind == 3:
            del data[at : at + draw.choice((1, 4, 8, 100))]
        elif kind == 4:
            data[at:at] = draw.randbytes(draw.choice((1, 4, 8, 100)))
        elif kind == 5:
            other = draw.randrange(header)
            size = draw.choice((4, 8, 32))
            data[at : at + size] = data[other : other + size]
        else:
            del data[draw.randrange(len(data)) :]
        if not data:
            break
        header = min(header, len(data))
    return bytes(data)


def outcome(path: Path) -> str:
    """How the file ended: refused, or ran. Anything else than a typed error is raised."""
    lane = LaneConfig("m", max_sequences=2, context=64)
    try:
        host = build_engine(
            WorkerSpec("m", str(path), (lane,), threads=1, kv_bytes=4_000_000, device="cpu")
        )
    except CoterieError as error:
        assert error.message.strip(), "an error says what is wrong"
        return f"refused: {type(error).__name__}"
    try:
        ids = tuple(index % 4 for index in range(5))
        asked = Assignment(
            "r", "m", ids, Sampling(temperature=0.0, seed=1), Limits(max_tokens=3),
            (), "", "t", None, time.monotonic(),
        )  # fmt: skip
        verdict = host.engine.add(asked)
        if isinstance(verdict, Rejected):
            return f"rejected: {verdict.code}"
        for _ in range(MAX_STEPS):
            for event in host.engine.step():
                if isinstance(event, Failed):
                    return f"failed: {event.code}"
                if isinstance(event, Finished):
                    return "ran"
        raise AssertionError("it does not end")
    finally:
        host.close()


def main() -> None:
    faulthandler.enable()
    base, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    whole, header = base.read_bytes(), read_gguf(base).header_bytes
    path = base.with_name("mutated.gguf")
    assert outcome(base) == "ran"
    for seed in range(first, first + count):
        path.write_bytes(mutated(whole, header, seed))
        # seen by a reader even if the process dies of it
        print(json.dumps({"seed": seed}), flush=True)
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        try:
            found = outcome(path)
        except BaseException as error:
            found = f"untyped: {type(error).__name__}: {error}"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        seconds = time.monotonic() - begun
        line = {"seed": seed, "found": found, "seconds": seconds, "grown": grown}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
