"""What the bytes of a package's files must be: text, JSON, or safetensors, and never a pickle.

One `Checker` per file, fed while the archive is read, so that nothing has to be written first.
"""

from __future__ import annotations

import hashlib
import io
import pickletools

from coterie.core.errors import WeightsError
from coterie.packages.paths import is_tensors
from coterie.packages.safetensors_header import check_header, header_length

_ARCHIVES = {
    b"PK\x03\x04": "a zip file (torch's pickles are)",
    b"PK\x05\x06": "a zip file",
    b"\x1f\x8b": "a gzip file",
    b"\x93NUMPY": "a numpy file, which may hold pickles",
    b"\x89HDF": "an HDF5 file",
}

# opcodes that name or call what is to be run
_CALLING = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "REDUCE", "EXT1"})
# no text reads as that many of them, and reading millions takes half a minute
_MAX_OPCODES = 10_000


class Checker:
    """Hashes one file and keeps what its checks need: all of a text, the header of tensors."""

    def __init__(self, name: str, size: int, where: str, *, keep: bool) -> None:
        self.name, self.size = name, size
        self._where = f"{where}: {name}"
        self._hasher = hashlib.sha256()
        self._keep = keep or not is_tensors(name)
        self._parts: list[bytes] = []
        self._head = b""
        self._head_needed = 16

    def feed(self, chunk: bytes) -> None:
        self._hasher.update(chunk)
        if self._keep:
            self._parts.append(chunk)
        if len(self._head) >= self._head_needed:
            return
        self._head += chunk
        if is_tensors(self.name) and len(self._head) >= 8:
            self._head_needed = 8 + header_length(self._head, self.size, self._where)
        self._head = self._head[: self._head_needed]

    def finish(self) -> bytes | None:
        """The contents where they were kept. Raises when they are not what the name says."""
        _refuse_archives(self._head[:16], self._where)
        if is_tensors(self.name):
            length = header_length(self._head, self.size, self._where)
            check_header(self._head[8 : 8 + length], self.size, self._where)
            return b"".join(self._parts) if self._keep else None
        data = b"".join(self._parts)
        _check_text(data, self._where)
        return data

    @property
    def sha256(self) -> str:
        return self._hasher.hexdigest()


def _refuse_archives(head: bytes, where: str) -> None:
    for magic, what in _ARCHIVES.items():
        if head.startswith(magic):
            raise WeightsError(f"{where}: refused, it is {what}, not what its name says.")


def _check_text(data: bytes, where: str) -> None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = "a pickle" if data[:1] == b"\x80" else "not UTF-8 text"
        raise WeightsError(f"{where}: refused, it is {what}.") from error
    if b"\0" in data:
        raise WeightsError(f"{where}: refused, it is not text.")
    if _is_pickle(data):
        raise WeightsError(f"{where}: refused, it is a pickle, which can run code.")


def _is_pickle(data: bytes) -> bool:
    """Whether pickle's opcodes, up to their end, call something or make up all of it.

    Old pickles are ASCII. Nothing is executed; texts fail within their first words.
    """
    stream, names = io.BytesIO(data), set()
    try:
        for count, (opcode, _, _) in enumerate(pickletools.genops(stream)):
            names.add(opcode.name)
            if count == _MAX_OPCODES:
                return True
    except (ValueError, UnicodeError, OverflowError, IndexError):
        return False
    whole = len(names) > 3 and not data[stream.tell() :].strip()
    return whole or not names.isdisjoint(_CALLING)
