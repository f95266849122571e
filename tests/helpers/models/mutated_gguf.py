"""Loads mutations of valid GGUF files and runs each that loads: `python -m ... FIRST COUNT BASE...`

A base is a file, or the first part of a split one; seeds take them in turn. Most mutations are
blind; others put a wrong value where a field of the table of tensors is, or into a block's scales,
or drop, exchange or repeat a part. Prints a line of JSON for each: its seed, what happened, its
seconds and how far the memory of the process grew. A process of its own, because a fault in native
code ends it.
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
from coterie.weights.formats.gguf import TENSOR_TYPES, gguf_parts, read_gguf
from coterie.workers.contract import WorkerSpec
from coterie.workers.host import build_engine

# values at which sizes, offsets and counts tend to overflow
EXTREMES = (0, 1, 2, 7, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
MAX_STEPS = 200
# of a block
TENSOR_BYTES = {name: nbytes for name, _, nbytes in TENSOR_TYPES.values()}


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


def aimed(data: bytearray, base: Path, draw: random.Random) -> None:
    """Changes a shape, type, offset or scale of one tensor, or a field that says what is a part."""
    info = draw.choice(list(read_gguf(base).tensors.values()))
    name = info.name.encode()
    if info.path != base or draw.random() < 0.1:
        at = data.find(b"split." + draw.choice((b"no", b"count", b"tensors.count")))
        if at > 0:
            data[at + draw.randrange(12, 24)] ^= 1 << draw.randrange(8)
        return
    table = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    kind, rank = draw.randrange(5), len(info.shape)
    if kind == 0:
        extent = draw.choice((*EXTREMES, *(16 * draw.randrange(64) for _ in range(3))))
        struct.pack_into("<Q", data, table + 4 + 8 * draw.randrange(rank), extent)
    elif kind == 1:
        struct.pack_into("<I", data, table + 4 + 8 * rank, draw.randrange(45))
    elif kind == 2:
        offset = draw.choice((*EXTREMES, 32 * draw.randrange(64), info.offset + 32))
        struct.pack_into("<Q", data, table + 8 + 8 * rank, offset)
    elif kind == 3:
        struct.pack_into("<I", data, table, draw.choice((0, 1, 2, 3, 4, 5, 2**31)))
    else:
        block = TENSOR_BYTES[info.type]
        at = info.offset + draw.randrange(info.nbytes // block) * block
        at += 208 if info.type == "Q6_K" else 0
        struct.pack_into("<H", data, at, draw.choice((0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x0001)))


def write_mutation(base: Path, folder: Path, seed: int) -> Path:
    """A mutation of all files of the model in `folder`, which is emptied first."""
    draw = random.Random(seed)
    for old in folder.iterdir():
        old.unlink()
    names = gguf_parts(base.name) or [base.name]
    changed = draw.randrange(len(names))
    for number, name in enumerate(names):
        source = base.with_name(name)
        data = source.read_bytes()
        if number == changed and draw.random() < 0.4:
            whole = bytearray(data)
            aimed(whole, source, draw)
            data = bytes(whole)
        elif number == changed:
            data = mutated(data, read_gguf(source).header_bytes, seed)
        folder.joinpath(name).write_bytes(data)
    if len(names) > 1 and draw.random() < 0.3:
        first, second = (folder / name for name in draw.sample(names, 2))
        match draw.randrange(3):
            case 0:
                first.unlink()
            case 1:
                first.write_bytes(second.read_bytes())
            case _:
                first.rename(folder / "swapped")
                second.rename(first)
                (folder / "swapped").rename(second)
    return folder / names[draw.randrange(len(names))]


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
    first, count, bases = int(sys.argv[1]), int(sys.argv[2]), [Path(each) for each in sys.argv[3:]]
    folder = bases[0].with_name("mutated")
    folder.mkdir(exist_ok=True)
    for base in bases:
        assert outcome(base) == "ran"
    for seed in range(first, first + count):
        base = bases[seed % len(bases)]
        path = write_mutation(base, folder, seed)
        # seen by a reader even if the process dies of it
        print(json.dumps({"seed": seed, "base": base.name}), flush=True)
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        try:
            found = outcome(path)
        except BaseException as error:
            found = f"untyped: {type(error).__name__}: {error}"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        line = {
            "seed": seed,
            "base": base.name,
            "found": found,
            "seconds": time.monotonic() - begun,
            "grown": grown,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
