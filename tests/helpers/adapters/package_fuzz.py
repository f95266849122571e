"""Throws broken packages at the registry.

    python -m tests.helpers.adapters.package_fuzz --cases 10000

Every case must end in an installed expert or in a typed refusal, write nothing outside the store
and leave nothing behind in it; and only the bytes that were signed may pass as signed.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.packages.archive import inspect
from coterie.packages.registry import AdapterRegistry
from coterie.packages.signing import package_message, public_of
from coterie.packages.trust import TrustStore
from tests.helpers.adapters import hostile_archives
from tests.helpers.adapters.package_files import signed_file

Mutation = Callable[[random.Random, bytes], bytes]

_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, 1 << 70, 1e308, -0.0, "", "x" * 300, "../..", "\0", "\x1b[2J", "é",
    [], {}, [[]], {"": ""}, ["x"] * 20, "ed25519", "0" * 64, "sha256:" + "f" * 64, "1.0", "2.0",
)  # fmt: skip
_NAMES = (
    b"../evil", b"/abs", b"manifest.json", b"README.md", b"tests/a.json", b"tests/A.json", b"a\\b",
    b"tests/../a.json", b"x.pkl", b"soft_prompts/p.safetensors", b"LICENSE", b"\xff\xfe", b"con",
    b"tests/" + b"a" * 95, b"./manifest.json", b"adapter_model.safetensors", b"", b"tests/a.json/b",
)  # fmt: skip
_NUMBERS = (0, 1, 7, 8, 127, 255, 512, 65_535, 1 << 31, (1 << 48) - 1, (1 << 63) - 1)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, doubled or inserted."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        what = rng.randrange(5)
        if what == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            made[at:at] = rng.randbytes(rng.randint(1, 16))
        elif what == 2:
            del made[at : at + rng.randint(1, 64)]
        elif what == 3:
            made[at:at] = made[at : at + rng.randint(1, 600)]
        elif at < len(made):
            made[at] = rng.choice((0, 1, 0x20, 0x30, 0x37, 0x7F, 0x80, 0xFF))
    return bytes(made)


def package_bytes(rng: random.Random, data: bytes) -> bytes:
    return damaged(rng, data)


def tar_bytes(rng: random.Random, data: bytes) -> bytes:
    return hostile_archives.zipped(damaged(rng, gzip.decompress(data)))


def headers(rng: random.Random, data: bytes) -> bytes:
    """Damaged header blocks whose checksums are right again."""
    tar = bytearray(gzip.decompress(data))
    starts = [at for at in range(0, len(tar), 512) if tar[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(starts)
    block = bytearray(damaged(rng, bytes(tar[at : at + 512])).ljust(512, b"\0")[:512])
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    tar[at : at + 512] = block
    return hostile_archives.zipped(bytes(tar))


def members(rng: random.Random, data: bytes) -> bytes:
    """Entries added, dropped, renamed, retyped and put in another order."""
    entries = _entries(data)
    made = []
    for name, content in entries:
        if rng.random() < 0.9:
            made.append(hostile_archives.entry(name, content))
    for _ in range(rng.randint(1, 3)):
        name, content = rng.choice(_NAMES), rng.choice((b"", b"text", rng.randbytes(20)))
        made.append(
            hostile_archives.entry(name[:100], content, kind=rng.choice((b"0", b"0", b"2", b"5")))
        )
    rng.shuffle(made)
    return hostile_archives.zipped(b"".join(made) + bytes(1024))


def manifest_values(rng: random.Random, data: bytes) -> bytes:
    def change(content: bytes) -> bytes:
        return json.dumps(_changed(rng, json.loads(content))).encode()

    return _with(data, b"manifest.json", change)


def manifest_bytes(rng: random.Random, data: bytes) -> bytes:
    return _with(data, b"manifest.json", lambda content: damaged(rng, content))


def config_values(rng: random.Random, data: bytes) -> bytes:
    def change(content: bytes) -> bytes:
        return json.dumps(_changed(rng, json.loads(content))).encode()

    return _with(data, b"adapter_config.json", change)


def tensor_headers(rng: random.Random, data: bytes) -> bytes:
    def change(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length]
        if rng.random() < 0.5:
            header = json.dumps(_changed(rng, json.loads(header))).encode()
        else:
            header = damaged(rng, header)
        stated = rng.choice((len(header), len(header), rng.choice(_NUMBERS)))
        return stated.to_bytes(8, "little") + header + content[8 + length :]

    return _with(data, b"adapter_model.safetensors", change)


MUTATIONS: tuple[Mutation, ...] = (
    package_bytes, tar_bytes, headers, members, manifest_values, manifest_bytes, config_values,
    tensor_headers,
)  # fmt: skip


def _entries(data: bytes) -> list[tuple[bytes, bytes]]:
    tar, at, found = gzip.decompress(data), 0, []
    while any(tar[at : at + 512]):
        name, size = tar[at : at + 100].rstrip(b"\0"), int(tar[at + 124 : at + 135], 8)
        found.append((name, tar[at + 512 : at + 512 + size]))
        at += 512 + size + -size % 512
    return found


def _with(data: bytes, wanted: bytes, change: Callable[[bytes], bytes]) -> bytes:
    entries = [(n, change(c) if n == wanted else c) for n, c in _entries(data)]
    return hostile_archives.zipped(hostile_archives.tarred(entries))


def _changed(rng: random.Random, value: Any) -> Any:
    """One value somewhere inside is another one, gone, or deeper."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != name}
        return {**value, name: _changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    if type(value) is int and rng.random() < 0.7:
        return rng.choice((value + 1, value - 1, -value, *_NUMBERS))
    return rng.choice(_VALUES)


@dataclass
class Figures:
    cases: int = 0
    accepted: int = 0
    seconds: float = 0.0
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)


class Fuzzer:
    """One sandbox: a store deep inside it, and everything around the store watched."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        make = root / "make"
        make.mkdir(parents=True)
        key = make / "key"
        self.package = signed_file(make, key, description="An expert for fuzzing").read_bytes()
        self.bare = hostile_archives.good()
        self.message = package_message(inspect(self.package))
        self.trust = TrustStore(root / "trust.json")
        self.trust.trust(public_of(key.read_bytes()))
        self.store = root / "a" / "b" / "store"
        self.registry = AdapterRegistry(self.store)
        self.figures = Figures()

    def run(self, cases: int, first: int = 0) -> Figures:
        started = time.perf_counter()
        around = self._around()
        for number in range(first, first + cases):
            self._case(number)
            self.figures.cases += 1
            if self._around() != around:
                self.figures.faults.append(f"case {number}: wrote outside the store")
        self.figures.seconds += time.perf_counter() - started
        return self.figures

    def _case(self, number: int) -> None:
        rng = random.Random(f"{self.seed}:{number}")
        mutation = MUTATIONS[number % len(MUTATIONS)]
        allow = rng.random() < 0.5
        # a changed signed package rarely gets further than its digests; a bare one does
        data = mutation(rng, self.package if rng.random() < 0.4 else self.bare)
        try:
            card = self.registry.install(data, trust=self.trust, allow_unsigned=allow)
        except CoterieError as error:
            self.figures.refusals[type(error).__name__] += 1
        except Exception as error:
            told = f"case {number} {mutation.__name__}: {type(error).__name__}: {error}"
            self.figures.faults.append(told)
        else:
            self.figures.accepted += 1
            self.registry.manifest(card)
            if (card.signer or not allow) and package_message(inspect(data)) != self.message:
                self.figures.faults.append(f"case {number}: passed as signed, and was changed")
            self.registry.remove(card.name)
        left = [path.name for path in self.store.glob("*/*")]
        if left:
            self.figures.faults.append(f"case {number} {mutation.__name__}: left {left[:3]}")

    def _around(self) -> list[str]:
        inside = str(self.store)
        return sorted(str(p) for p in self.root.rglob("*") if not str(p).startswith(inside))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="coterie-fuzz-") as made:
        figures = Fuzzer(Path(made), args.seed).run(args.cases)
    print(f"{figures.cases} cases in {figures.seconds:.1f} s: {figures.accepted} installed")
    for name, count in figures.refusals.most_common():
        print(f"  refused as {name}: {count}")
    print("\n".join(figures.faults[:50]) or "no crash, no write outside the store")
    return 1 if figures.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
