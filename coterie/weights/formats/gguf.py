"""The header of a GGUF file: metadata, and the position of each tensor; of a model in several files
that of all.

Reads versions 2 and 3, little endian. Every count, length, offset and type is checked against the
file before it is used, so that a truncated or malicious file causes a `WeightsError`.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import WeightsError

MAGIC = b"GGUF"

# number in the file -> (name, elements per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}

# types that exist but are not supported: an error names them and what the file would take instead
_OTHER_TYPES: dict[int, tuple[str, int, int]] = {
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip

# bytes per element of the smallest type that suits any matrix that such files have
_LEAST_BYTES = {256: 144 / 256, 32: 18 / 32}

# number of a metadata value type -> numpy type; 7 is bool, 8 string, 9 array
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
            10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Far above every real model and small enough for memory: a wrong count never allocates much.
_MAX_HEADER_BYTES = 1 << 28
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_NAME_BYTES = 1 << 16
_MAX_ARRAY_STRINGS = 1 << 22
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_PARTS = 4096

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_TENSORS = "split.tensors.count"

_AGAIN = "Fetch or convert it again."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """shape is in torch's order (rows first). `offset` counts from the start of the file `path`."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """`path` is the first file, whose metadata are the model's; `sizes` has every file."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    # where the metadata ends, and where the table of tensors after it ends
    metadata_bytes: int
    header_bytes: int
    sizes: dict[Path, int]


def is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as handle:
            return handle.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GGUFFile:
    """The header of `path`, and of the files beside it that are parts of the same model; raises
    WeightsError for anything that is not a valid GGUF file."""
    file = _read_file(path)
    count = file.metadata.get("split.count", 1)
    # metadata alone, as a packed store keeps them, are no part
    alone = not file.tensors and gguf_parts(path.name) is None
    return file if count in (0, 1) or alone else _joined(file, count)


def gguf_parts(name: str) -> list[str] | None:
    """The names of all files of the split model that a file of this name is a part of."""
    match = _PART.fullmatch(name)
    if match is None or not 0 < int(match["number"]) <= int(match["count"]) <= _MAX_PARTS:
        return None
    stem, count = match["stem"], match["count"]
    return [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def only_gguf(folder: Path) -> Path | None:
    """The one GGUF file in a folder, or the first part of the one that is split."""
    inside = sorted(folder.glob("*.gguf"))
    if not inside or (len(inside) > 1 and gguf_parts(inside[0].name) != [p.name for p in inside]):
        return None
    return inside[0]


def _joined(file: GGUFFile, count: Any) -> GGUFFile:
    """All parts of the model that `file` is one of."""
    names = gguf_parts(file.path.name)
    if names is None or len(names) != count:
        raise WeightsError(
            f"{file.path}: one of {count} parts of a model. Give all their own names again, "
            f"NAME-00001-of-{str(count)[:5]:0>5}.gguf and so on, in one folder."
        )
    parts, tensors = [], {}
    for number, name in enumerate(names):
        path = file.path.with_name(name)
        if not path.exists():
            raise WeightsError(
                f"{path}: missing, part {number + 1} of {count} of this model. Put it beside "
                f"{file.path.name}."
            )
        part = file if path == file.path else _read_file(path)
        for key, wanted in (("split.no", number), ("split.count", count), (_SPLIT_TENSORS, None)):
            wanted = file.metadata.get(key) if wanted is None else wanted
            if part.metadata.get(key) != wanted:
                raise _foreign(path, f"its {key} is {part.metadata.get(key)!r}, not {wanted!r}")
        for tensor in part.tensors.values():
            if tensor.name in tensors:
                raise _foreign(path, f"another part has the tensor {tensor.name!r} too")
            tensors[tensor.name] = tensor
        parts.append(part)
    if len(tensors) != file.metadata.get(_SPLIT_TENSORS):
        told = file.metadata.get(_SPLIT_TENSORS)
        raise _foreign(file.path, f"the parts have {len(tensors)} tensors together, not {told!r}")
    sizes = {part.path: size for part in parts for size in part.sizes.values()}
    return replace(parts[0], tensors=tensors, sizes=sizes)


def _foreign(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path}: not a part of the same model, {what}. Fetch all parts again.")


def _read_file(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            if size < 24:
                raise WeightsError(f"{path}: only {size} bytes, not a GGUF file. {_AGAIN}")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).read()
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read ({error}). Check the path.") from error


class _Reader:
    """A cursor over the mapped file. Every read checks first that the bytes are there."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.end = min(size, _MAX_HEADER_BYTES)
        self.at = 0

    def read(self) -> GGUFFile:
        version = self._version()
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_keys = self._count("metadata keys", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", _MAX_NAME_BYTES)
            if key in metadata:
                raise self.broken(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number("I", f"the type of {key!r}"), key)
        metadata_end = self.at
        raw = [self._tensor() for _ in range(num_tensors)]
        self._refuse_other_types(raw)
        header = self.at
        start = _aligned(header, self._alignment(metadata))
        tensors = self._with_file_offsets(raw, start, self._alignment(metadata))
        sizes = {self.path: self.size}
        return GGUFFile(self.path, version, metadata, tensors, metadata_end, header, sizes)

    def broken(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: damaged GGUF file, {what}. {_AGAIN}")

    def _version(self) -> int:
        magic = self._bytes(4, "the magic")
        if magic != MAGIC:
            raise WeightsError(
                f"{self.path}: not a GGUF file (it starts with {magic!r}). "
                "Give a .gguf file or a directory with safetensors."
            )
        version = self._number("I", "the version")
        if version in (2, 3):
            return version
        if version & 0xFFFF == 0 and version:
            advice = "it is big endian; convert it to little endian"
        else:
            advice = "versions 2 and 3 are read; convert it with a current llama.cpp"
        raise WeightsError(f"{self.path}: GGUF version {version} is not supported, {advice}.")

    def _count(self, what: str, limit: int) -> int:
        count = self._number("Q", f"the number of {what}")
        if count > limit:
            raise self.broken(f"it claims {count} {what} (limit {limit})")
        return count

    def _require_bytes(self, nbytes: int, what: str) -> None:
        if nbytes > self.end - self.at:
            if self.end < self.size:
                raise self.broken(f"its header is longer than {_MAX_HEADER_BYTES} bytes at {what}")
            raise self.broken(
                f"{what} needs {nbytes} bytes at {self.at}, but the file ends at {self.size}"
            )

    def _bytes(self, nbytes: int, what: str) -> bytes:
        self._require_bytes(nbytes, what)
        start = self.at
        self.at = start + nbytes
        return self.data[start : self.at]

    def _number(self, code: str, what: str) -> int:
        width = struct.calcsize("<" + code)
        return int(struct.unpack("<" + code, self._bytes(width, what))[0])

    def _string(self, what: str, limit: int = _MAX_HEADER_BYTES) -> str:
        length = self._number("Q", f"the length of {what}")
        if length > limit:
            raise self.broken(f"{what} claims {length} bytes (limit {limit})")
        try:
            return self._bytes(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is not UTF-8") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self._bytes(dtype.itemsize, repr(key)), dtype)[0].item()
        if kind == _BOOL:
            return self._flag(self._bytes(1, repr(key))[0], key)
        if kind == _STRING:
            return self._string(repr(key))
        if kind == _ARRAY:
            return self._array(key)
        raise self.broken(f"{key!r} has the unknown value type {kind}")

    def _flag(self, value: int, key: str) -> bool:
        if value > 1:
            raise self.broken(f"{key!r} is a bool with the value {value}")
        return value == 1

    def _array(self, key: str) -> Any:
        kind = self._number("I", f"the element type of {key!r}")
        count = self._number("Q", f"the length of {key!r}")
        if kind in _SCALARS or kind == _BOOL:
            dtype = np.dtype(_SCALARS.get(kind, "<u1"))
            raw = self._bytes(count * dtype.itemsize, f"{key!r} with {count} values")
            values = np.frombuffer(raw, dtype)
            return [self._flag(value, key) for value in raw] if kind == _BOOL else values
        if kind == _STRING:
            if count > _MAX_ARRAY_STRINGS:
                raise self.broken(f"{key!r} claims {count} strings (limit {_MAX_ARRAY_STRINGS})")
            self._require_bytes(8 * count, f"{key!r} with {count} strings")
            return self._strings(count, key)
        raise self.broken(f"{key!r} is an array of the unsupported value type {kind}")

    def _strings(self, count: int, key: str) -> list[str]:
        """A tokenizer has hundreds of thousands of strings: one tight loop over the mapped file."""
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        data, at, end = self.data, self.at, self.end
        strings: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    raise struct.error
                strings.append(data[start:at].decode("utf-8"))
        except struct.error as error:
            raise self.broken(f"string {len(strings)} of {key!r} runs past the end") from error
        except UnicodeDecodeError as error:
            raise self.broken(f"string {len(strings)} of {key!r} is not UTF-8") from error
        self.at = at
        return strings

    def _tensor(self) -> TensorInfo:
        """As written in the file: the offset is still relative to the start of the data."""
        name = self._string("a tensor name", _MAX_NAME_BYTES)
        rank = self._number("I", f"the rank of {name!r}")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise self.broken(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._number("Q", f"the shape of {name!r}") for _ in range(rank))[::-1]
        number = self._number("I", f"the type of {name!r}")
        offset = self._number("Q", f"the offset of {name!r}")
        known = TENSOR_TYPES.get(number) or _OTHER_TYPES.get(number)
        if known is None:
            raise self.broken(f"tensor {name!r} has the unknown type {number}")
        kind, block, block_bytes = known
        elements = 1
        for extent in shape:
            elements *= extent
        if elements == 0 or shape[-1] % block:
            raise self.broken(f"tensor {name!r} of type {kind} has the impossible shape {shape}")
        nbytes = elements // block * block_bytes
        return TensorInfo(name, shape, kind, offset, nbytes, self.path)

    def _refuse_other_types(self, tensors: list[TensorInfo]) -> None:
        supported = [kind for kind, _, _ in TENSOR_TYPES.values()]
        others = [info for info in tensors if info.type not in supported]
        if not others:
            return
        stored, whole = (sum(info.nbytes for info in group) for group in (others, tensors))
        least = whole - stored + sum(_least_bytes(info) for info in others)
        raise WeightsError(
            f"{self.path}: {len(others)} of {len(tensors)} tensors, {_megabytes(stored)} of "
            f"{_megabytes(whole)}, are stored as {', '.join(sorted({i.type for i in others}))}, "
            f"which is not supported (the first is {others[0].name!r}). Nothing was loaded. With "
            f"those as Q4_K or Q4_0 the model takes {_megabytes(least)}. Use a file with "
            f"{', '.join(supported)}, or make one from the original weights: llama-quantize "
            "F16.gguf OUT.gguf Q4_K_M."
        )

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        valid = isinstance(value, int) and 8 <= value <= _MAX_ALIGNMENT and not value & (value - 1)
        if not valid:
            raise self.broken(f"general.alignment is {value!r}")
        return int(value)

    def _with_file_offsets(
        self, raw: list[TensorInfo], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        reached = start
        for info in sorted(raw, key=lambda item: item.offset):
            offset = start + info.offset
            if info.name in tensors:
                raise self.broken(f"tensor {info.name!r} appears twice")
            if info.offset % alignment or offset < reached:
                raise self.broken(f"tensor {info.name!r} has the impossible offset {info.offset}")
            reached = offset + info.nbytes
            if reached > self.size:
                raise WeightsError(
                    f"{self.path}: truncated, tensor {info.name!r} ends at byte {reached} but the "
                    f"file has {self.size}. Fetch it again."
                )
            tensors[info.name] = replace(info, offset=offset)
        return tensors


def _aligned(position: int, alignment: int) -> int:
    return (position + alignment - 1) // alignment * alignment


def _least_bytes(info: TensorInfo) -> int:
    """Of a tensor in the smallest supported type that its rows fit; else as fp16."""
    elements = math.prod(info.shape)
    for block, each in _LEAST_BYTES.items():
        if info.shape[-1] % block == 0:
            return round(elements * each)
    return 2 * elements


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
