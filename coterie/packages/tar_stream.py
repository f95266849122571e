"""Reads a gzipped tar as a stream, and only its simplest form: regular files, one after another.

Every limit is checked before more data is decompressed, so that a decompression bomb costs no more
than its limit. Links, devices, sparse files and extension headers are refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from coterie.core.errors import WeightsError
from coterie.packages.paths import MANIFEST, check_path, is_tensors

BLOCK = 512
_CHUNK_BYTES = 1 << 18
# no limit of the compression ratio for packages smaller than this
_FREE_BYTES = 64 << 20
# a tar file is padded with zeros to the size of a record
_MAX_PADDING_BYTES = 64 << 10
_TYPES = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device",
    b"5": "a directory", b"6": "a pipe", b"S": "a sparse file", b"x": "an extension header",
    b"g": "an extension header", b"L": "an extension header", b"K": "an extension header",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackageLimits:
    """Limits of a package. Bytes are uncompressed unless the name says otherwise."""

    compressed_bytes: int = 2 << 30
    total_bytes: int = 4 << 30
    text_bytes: int = 32 << 20
    # for all files that are not tensors, because they are kept in memory
    texts_bytes: int = 64 << 20
    manifest_bytes: int = 1 << 20
    entries: int = 256
    # uncompressed bytes per compressed byte, beyond the first 64 MiB
    ratio: int = 20


LIMITS = PackageLimits()


@dataclass(frozen=True, slots=True)
class TarEntry:
    name: str
    size: int
    chunks: Iterator[bytes]


def entries(raw: BinaryIO, where: str, limits: PackageLimits = LIMITS) -> Iterator[TarEntry]:
    """The chunks of each file must be consumed before the next file is requested."""
    stream, texts = _Inflated(raw, where, limits), 0
    for _ in range(limits.entries + 1):
        block = stream.read(BLOCK)
        if not any(block):
            break
        name, size = _header(block, where, limits)
        texts += 0 if is_tensors(name) else size
        if texts > limits.texts_bytes:
            raise WeightsError(f"{where}: refused, its texts are larger than an expert's are.")
        yield TarEntry(name, size, stream.chunks(size))
        if any(stream.read(-size % BLOCK)):
            raise WeightsError(f"{where}: refused, bytes are hidden behind {name!r}.")
    else:
        raise WeightsError(f"{where}: refused, more than {limits.entries} files.")
    if any(stream.read(BLOCK)):
        raise WeightsError(f"{where}: refused, its end mark is damaged.")
    stream.expect_end()


def _header(block: bytes, where: str, limits: PackageLimits) -> tuple[str, int]:
    """Name and size of a regular file's header block."""
    if block[257:263] not in (b"ustar\0", b"ustar ") or not _sum_holds(block):
        raise WeightsError(f"{where}: refused, damaged or not a tar archive inside.")
    name, prefix = block[:100].split(b"\0")[0], b""
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].split(b"\0")[0]
    full = b"/".join(part for part in (prefix, name) if part)
    kind = block[156:157]
    if kind not in (b"0", b"\0"):
        what = _TYPES.get(kind, "of an unknown type")
        shown = full[:80].decode("ascii", "replace")
        raise WeightsError(
            f"{where}: refused, the entry {shown!r} is {what}; packages hold regular files only. "
            "Pack the folder with coterie expert pack."
        )
    checked = check_path(full, where)
    size = _octal(block[124:136])
    if size is None or block[157:257].strip(b"\0"):
        raise WeightsError(f"{where}: refused, the header of {checked!r} makes no sense.")
    most = limits.total_bytes if is_tensors(checked) else limits.text_bytes
    if checked == MANIFEST:
        most = limits.manifest_bytes
    if size > most:
        raise WeightsError(f"{where}: refused, {checked!r} has {size} bytes; {most} are allowed.")
    return checked, size


def _sum_holds(block: bytes) -> bool:
    stated = _octal(block[148:156])
    return stated == sum(block[:148]) + 8 * 0x20 + sum(block[156:])


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    if not digits or not digits.isdigit() or any(digit > 0x37 for digit in digits):
        return None
    return int(digits, 8)


class _Inflated:
    """The bytes of one gzip member; data after it is an error."""

    def __init__(self, raw: BinaryIO, where: str, limits: PackageLimits) -> None:
        self._raw, self._where, self._limits = raw, where, limits
        self._gzip = zlib.decompressobj(31)
        self._ready = b""
        self._at = 0
        self._in_bytes = 0
        self._out_bytes = 0

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes."""
        return b"".join(self.chunks(size))

    def chunks(self, size: int) -> Iterator[bytes]:
        while size > 0:
            if self._at == len(self._ready) and not self._more():
                raise WeightsError(f"{self._where}: refused, it ends too early.")
            piece = self._ready[self._at : self._at + size]
            self._at += len(piece)
            size -= len(piece)
            yield piece

    def expect_end(self) -> None:
        """Expects some zeros up to the end of the member, then the end of the file."""
        most = self._out_bytes - len(self._ready) + self._at + _MAX_PADDING_BYTES
        while self._at < len(self._ready) or self._more():
            if any(self._ready[self._at :]) or self._out_bytes > most:
                raise WeightsError(f"{self._where}: refused, bytes follow the archive.")
            self._at = len(self._ready)
        if not self._gzip.eof:
            raise WeightsError(f"{self._where}: refused, it ends too early.")
        if self._gzip.unused_data or self._raw.read(1):
            raise WeightsError(f"{self._where}: refused, bytes follow the archive.")

    def _more(self) -> bool:
        """Decompresses another piece; False at the end of the member or the file."""
        while not self._gzip.eof:
            data = self._gzip.unconsumed_tail or self._raw.read(_CHUNK_BYTES)
            if not self._gzip.unconsumed_tail:
                self._in_bytes += len(data)
            try:
                piece = self._gzip.decompress(data, _CHUNK_BYTES)
            except zlib.error as error:
                raise WeightsError(
                    f"{self._where}: refused, damaged or not a gzip file."
                ) from error
            self._count(len(piece))
            if piece:
                self._ready, self._at = piece, 0
                return True
            if not data:
                return False
        return False

    def _count(self, size: int) -> None:
        limits = self._limits
        self._out_bytes += size
        allowed = max(_FREE_BYTES, limits.ratio * self._in_bytes)
        if self._in_bytes > limits.compressed_bytes or self._out_bytes > limits.total_bytes:
            raise WeightsError(f"{self._where}: refused, larger than a package may be.")
        if self._out_bytes > allowed:
            raise WeightsError(f"{self._where}: refused, it unpacks to far more than its size.")
