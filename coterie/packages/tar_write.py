"""Writes a gzipped tar whose bytes depend on its files alone: no clock, no user, no machine.

Knows no manifest and no signature.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from coterie.core.errors import ConfigError
from coterie.packages.paths import is_tensors
from coterie.packages.tar_stream import BLOCK

_LEVEL = 6
# the most that a block of deflate can hold as it is
_STORED_BYTES = 0xFFFF
# no name, no time, no operating system
_GZIP_HEADER = bytes((0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF))

T = TypeVar("T")
# name, size, and a source of the bytes
Part = tuple[str, int, Callable[[], Iterator[bytes]]]


def write_archive(parts: Iterable[Part], out: Path, check: Callable[[Path], T]) -> T:
    """`out` appears when it is complete and `check` liked it, or not at all."""
    try:
        handle, made = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})", param="out") from error
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in _gzipped(_tarred(sorted(parts, key=lambda part: part[0]))):
                file.write(piece)
        checked = check(Path(made))
        os.chmod(made, 0o644)
        os.replace(made, out)
    except BaseException:
        os.unlink(made)
        raise
    return checked


def _tarred(parts: Iterable[Part]) -> Iterator[tuple[bytes, bool]]:
    """Pieces, each with whether it is worth compressing."""
    for name, size, chunks in parts:
        yield _header(name, size), True
        for chunk in chunks():
            yield chunk, not is_tensors(name)
        yield bytes(-size % BLOCK), True
    yield bytes(2 * BLOCK), True


def _header(name: str, size: int) -> bytes:
    def octal(value: int, width: int) -> bytes:
        return f"{value:0{width - 1}o}\0".encode()

    encoded, prefix = name.encode("ascii"), b""
    if len(encoded) > 100:
        cut = encoded.rfind(b"/", 0, 156)
        prefix, encoded = encoded[:cut], encoded[cut + 1 :]
    fields = (
        encoded.ljust(100, b"\0"), octal(0o644, 8), octal(0, 8), octal(0, 8), octal(size, 12),
        octal(0, 12), b" " * 8, b"0", bytes(100), b"ustar\0", b"00", bytes(64), octal(0, 8),
        octal(0, 8), prefix.ljust(155, b"\0"), bytes(12),
    )  # fmt: skip
    block = bytearray(b"".join(fields))
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def _gzipped(pieces: Iterable[tuple[bytes, bool]]) -> Iterator[bytes]:
    """One gzip member. Trained weights hardly get smaller, and inflating them takes longer than all
    the rest of an installation: they are stored."""
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)
    crc = size = 0
    yield _GZIP_HEADER
    for piece, worth_it in pieces:
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        if worth_it:
            yield deflate.compress(piece)
            continue
        # up to a whole byte; what follows does not refer back
        yield deflate.flush(zlib.Z_FULL_FLUSH)
        yield from _stored(piece)
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)
    yield deflate.flush()
    yield crc.to_bytes(4, "little") + (size & 0xFFFFFFFF).to_bytes(4, "little")


def _stored(data: bytes) -> Iterator[bytes]:
    """Blocks of deflate that hold their bytes as they are."""
    for at in range(0, len(data), _STORED_BYTES):
        block = data[at : at + _STORED_BYTES]
        length = len(block)
        yield b"\0" + length.to_bytes(2, "little") + (length ^ 0xFFFF).to_bytes(2, "little")
        yield block
