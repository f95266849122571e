"""An `.expert` file as a value: everything checked in one pass, before anything is written.

Small packages are kept in memory. A large one is read a second time to unpack it, and the content
must then have the digests of the first reading.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickletools
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from coterie.core.errors import ConfigError, WeightsError
from coterie.packages import manifest as manifests
from coterie.packages.adapter_kinds import FORMATS, kind_of
from coterie.packages.manifest import Manifest
from coterie.packages.paths import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    adapter_digest,
    check_together,
    chunks_of,
    file_sha256,
    is_tensors,
    open_regular,
)
from coterie.packages.safetensors_header import check_header, header_length
from coterie.packages.strict_json import parse
from coterie.packages.tar_stream import BLOCK, LIMITS, PackageLimits, entries

# packages up to this size are unpacked from memory
_KEEP_BYTES = 64 << 20
# fields of `integrity` that describe the signature
_SIGNATURE_FIELDS = frozenset({"signature", "signature_algorithm", "pubkey", "key_id"})

Source = Path | bytes


@dataclass(frozen=True, slots=True)
class PackageFile:
    """One file of a package."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> PackageFile:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class Package:
    manifest: Manifest
    files: Mapping[str, PackageFile]
    config: ConfigFacts
    source: Source = field(repr=False)
    # contents of text files, and of tensor files if the package is small
    contents: Mapping[str, bytes] = field(repr=False)

    @property
    def digest(self) -> str:
        return adapter_digest(self.files[CONFIG].sha256, self.files[WEIGHTS].sha256)

    def read_text(self, name: str) -> str:
        return self.contents[name].decode()


def inspect(source: Source, limits: PackageLimits = LIMITS, where: str = "") -> Package:
    """Reads and checks the whole package. Writes nothing. `where`: its name in error messages."""
    where = where or _where(source)
    files: dict[str, PackageFile] = {}
    contents: dict[str, bytes] = {}
    total = 0
    with _opened(source, where) as (raw, size):
        if not size:
            # files below /proc also report size 0, and reading one may never end
            raise WeightsError(f"{where}: refused, it is empty.")
        if size > limits.compressed_bytes:
            raise WeightsError(f"{where}: refused, larger than a package may be.")
        for entry in entries(raw, where, limits):
            total += entry.size
            checker = FileChecker(entry.name, entry.size, where, keep=total <= _KEEP_BYTES)
            check_together([*files, entry.name], where)
            for chunk in entry.chunks:
                checker.feed(chunk)
            data = checker.finish()
            files[entry.name] = PackageFile(entry.size, checker.sha256)
            if data is not None:
                contents[entry.name] = data
    return assemble(files, contents, source, where)


def assemble(
    files: Mapping[str, PackageFile], contents: Mapping[str, bytes], source: Source, where: str
) -> Package:
    """The package of these files, each of which was checked alone."""
    for name in (MANIFEST, CONFIG, WEIGHTS):
        if name not in files:
            raise WeightsError(f"{where}: refused, it lacks {name}.")
    manifest = manifests.read(contents[MANIFEST], f"{where}: {MANIFEST}")
    _check_stated(manifest, files, where)
    config = read_config(contents[CONFIG], f"{where}: {CONFIG}")
    return Package(manifest, files, config, source, contents)


def unpack(package: Package, into: Path, names: Callable[[str], bool] = lambda name: True) -> None:
    """Writes the files that `names` accepts below `into`, an empty directory of the caller."""
    selected = {name for name in package.files if names(name)}
    for name in selected & package.contents.keys():
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(package.contents[name])
    missing = selected - package.contents.keys()
    for name, chunks in _streams(package, frozenset(missing)) if missing else ():
        if name in missing:
            _write(into / name, chunks, package.files[name])
            missing.discard(name)
        else:
            for _ in chunks:
                continue
    if missing:
        raise WeightsError(f"{_where(package.source)}: changed while it was read. Try again.")


def repack(package: Package, manifest: Manifest, out: Path) -> Package:
    """The same files with another manifest, which is written unchanged."""
    try:
        folder = tempfile.TemporaryDirectory(prefix=".expert-", dir=out.parent)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})", param="out") from error
    with folder as folder_path:
        unpack(package, Path(folder_path), lambda name: name != MANIFEST)
        files = {name: Path(folder_path, name) for name in package.files if name != MANIFEST}
        return _write_package(files, manifest, out)


def pack(files: Mapping[str, Path], manifest: Manifest, out: Path) -> Package:
    """Writes `files` (package name -> file) and the manifest. Equal input gives equal bytes.

    The manifest's integrity.files is computed here; the written file is read back and checked.
    """
    others = {name: path for name, path in files.items() if name != MANIFEST}
    integrity = {k: v for k, v in manifest.integrity.items() if k not in _SIGNATURE_FIELDS}
    integrity["files"] = {name: file_sha256(path) for name, path in sorted(others.items())}
    return _write_package(others, manifest.with_section("integrity", integrity), out)


def _write_package(files: Mapping[str, Path], manifest: Manifest, out: Path) -> Package:
    text = manifests.write(manifest)
    parts: list[Part] = [(MANIFEST, len(text), lambda: iter((text,)))]
    parts += [_file_part(name, path) for name, path in files.items()]
    package = write_archive(parts, out, check=lambda path: inspect(path, where=str(out)))
    return replace(package, source=out)


def _file_part(name: str, path: Path) -> Part:
    return name, path.stat().st_size, lambda: _chunks(path)


def _chunks(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        yield from chunks_of(file, os.fstat(file.fileno()).st_size, str(path))


def _check_stated(manifest: Manifest, files: Mapping[str, PackageFile], where: str) -> None:
    stated = manifest.stated_files()
    if stated is None:
        return
    for name in sorted((files.keys() | stated.keys()) - {MANIFEST}):
        if name not in stated:
            raise WeightsError(f"{where}: refused, {name!r} is not in its manifest.")
        if name not in files:
            raise WeightsError(f"{where}: refused, it lacks {name[:80]!r} of its manifest.")
        if files[name].sha256 != stated[name]:
            raise WeightsError(f"{where}: refused, the digest of {name!r} is not its manifest's.")


def _streams(package: Package, wanted: Collection[str]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """A second reading, which must give the digests of the first."""
    source = package.source
    if isinstance(source, Path) and source.is_dir():
        # a folder may hold other files too, which are not opened
        for name in sorted(wanted):
            yield name, _chunks(source / name)
        return
    with _opened(source, _where(source)) as (raw, _):
        for entry in entries(raw, _where(source)):
            yield entry.name, entry.chunks


def _write(path: Path, chunks: Iterator[bytes], facts: PackageFile) -> None:
    hasher = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for chunk in chunks:
            hasher.update(chunk)
            file.write(chunk)
    if hasher.hexdigest() != facts.sha256:
        raise WeightsError(f"{path.name}: changed while it was read. Try again.")


def _where(source: Source) -> str:
    return "package" if isinstance(source, bytes) else str(source)


@contextmanager
def _opened(source: Source, where: str) -> Iterator[tuple[BinaryIO, int]]:
    """The stream and its size in bytes."""
    if isinstance(source, bytes):
        yield io.BytesIO(source), len(source)
        return
    try:
        if not source.is_file():
            raise WeightsError(f"{where}: no such file. Check the path.")
        with open_regular(source) as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as error:
        raise WeightsError(f"{where}: cannot be read ({error.strerror}). Check it.") from error


_LEVEL = 6
# the most bytes of an uncompressed deflate block
_STORED_BYTES = 0xFFFF
# no name, no time, no operating system
_GZIP_HEADER = bytes((0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF))

T = TypeVar("T")
# name, size, and a source of the bytes
Part = tuple[str, int, Callable[[], Iterator[bytes]]]


def write_archive(parts: Iterable[Part], out: Path, check: Callable[[Path], T]) -> T:
    """`out` appears only when it is complete and `check` accepted it."""
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})", param="out") from error
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in _gzipped(_tarred(sorted(parts, key=lambda part: part[0]))):
                file.write(piece)
        checked = check(Path(draft))
        os.chmod(draft, 0o644)
        os.replace(draft, out)
    except BaseException:
        os.unlink(draft)
        raise
    return checked


def _tarred(parts: Iterable[Part]) -> Iterator[tuple[bytes, bool]]:
    """Pieces of the tar file, each with whether it should be compressed."""
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
    """One gzip member. Trained weights can hardly be compressed, and decompressing them would take
    longer than the rest of an installation: they are stored uncompressed."""
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)
    crc = size = 0
    yield _GZIP_HEADER
    for piece, worth_it in pieces:
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        if worth_it:
            yield deflate.compress(piece)
            continue
        # ends at a whole byte; later data does not refer to earlier data
        yield deflate.flush(zlib.Z_FULL_FLUSH)
        yield from _stored_blocks(piece)
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)
    yield deflate.flush()
    yield crc.to_bytes(4, "little") + (size & 0xFFFFFFFF).to_bytes(4, "little")


def _stored_blocks(data: bytes) -> Iterator[bytes]:
    """Deflate blocks that hold their bytes uncompressed."""
    for at in range(0, len(data), _STORED_BYTES):
        block = data[at : at + _STORED_BYTES]
        length = len(block)
        yield b"\0" + length.to_bytes(2, "little") + (length ^ 0xFFFF).to_bytes(2, "little")
        yield block


_ARCHIVES = {
    b"PK\x03\x04": "a zip file (torch's pickles are)",
    b"PK\x05\x06": "a zip file",
    b"\x1f\x8b": "a gzip file",
    b"\x93NUMPY": "a numpy file, which may hold pickles",
    b"\x89HDF": "an HDF5 file",
}

# pickle opcodes that name or call code
_CALL_OPCODES = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "REDUCE", "EXT1"})
# no text can be read as that many opcodes, and reading millions takes half a minute
_MAX_OPCODES = 10_000


class FileChecker:
    """Hashes one file and keeps what its checks need: a whole text file, or the header of
    tensors."""

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
        """The contents if they were kept. Raises if they do not match what the name says."""
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
    """Whether the data is a pickle: its opcodes, up to their end, call code or fill the whole file.

    Old pickles are ASCII. Nothing is executed; ordinary text fails within its first words.
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
    return whole or not names.isdisjoint(_CALL_OPCODES)


MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    kind: str
    num_virtual_tokens: int
    base_model: str


def read_config(data: bytes, where: str) -> ConfigFacts:
    if len(data) > MAX_BYTES:
        raise WeightsError(f"{where}: refused, {len(data)} bytes are too many for a config.")
    config = parse(data, where)
    kind = kind_of(config, where)
    base = config.get("base_model_name_or_path")
    tokens = FORMATS[kind].soft_tokens(config, where)
    return ConfigFacts(kind, tokens, base if isinstance(base, str) else "")
