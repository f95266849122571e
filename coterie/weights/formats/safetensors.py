"""A Hugging Face directory: config.json and one or several safetensors files.

The format is read here and not with the library: a JSON header, then raw tensors. This maps the
files once, copies nothing, and gives a clear message for every fault. Never opens pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coterie.core.errors import WeightsError
from coterie.weights.files import FileExtent, read_json, release, samples, unmap
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES
from coterie.weights.formats.gguf_tensors import decode
from coterie.weights.quantize import Weight

INDEX = "model.safetensors.index.json"

# in a header's metadata: JSON of name -> [GGUF type, shape], for tensors written as plain bytes
BLOCKS_KEY = "coterie.blocks"

_READ = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# every type of the format, for checking sizes; in bits, because some are smaller than a byte
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

# quant_method in config.json -> what people call it
_METHODS = {"fp8": "FP8 in blocks (fp8)", "fbgemm_fp8": "FP8 (fbgemm_fp8)", "mxfp4": "MXFP4"}

_MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 8
_SAMPLE_BYTES = 4096

_AGAIN = "Fetch it again."


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    # from the start of the file
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    data: npt.NDArray[np.uint8]
    data_start: int
    entries: dict[str, _Entry]


class SafetensorsCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        files = _shard_names(path)
        self.config = read_json(path / "config.json")
        _refuse_quantised(path, self.config)
        generation = path / "generation_config.json"
        self.generation = read_json(generation) if generation.exists() else {}
        self._shards = {file: _open_shard(path / file) for file in sorted(set(files.values()))}
        if files.keys() == {""}:
            shard = self._shards[files[""]]
            self._where = dict.fromkeys(shard.entries, shard)
        else:
            self._where = {name: self._located(name, file) for name, file in files.items()}

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def stored_as(self, name: str) -> str:
        return self._entry(name).dtype

    def read(self, name: str) -> Weight:
        entry = self._entry(name)
        if entry.dtype not in _READ and entry.dtype not in BLOCK_SIZES:
            raise WeightsError(
                f"{self._where[name].path}: tensor {name!r} is stored as {entry.dtype}; "
                f"{', '.join(_READ)} are supported. Use a checkpoint in one of them, or GGUF."
            )
        return decode(torch.from_numpy(self.raw(name)), entry.dtype, entry.shape)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        entry = self._entry(name)
        return self._where[name].data[entry.begin : entry.end]

    def extent(self, name: str) -> FileExtent:
        entry = self._entry(name)
        return FileExtent(self._where[name].path, entry.begin, entry.end - entry.begin)

    def unmap(self) -> None:
        for shard in self._shards.values():
            unmap(shard.data)

    def release(self) -> None:
        for shard in self._shards.values():
            release(shard.path, shard.data)

    def fingerprint(self) -> str:
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file, shard in self._shards.items():
            digest.update(f"{file} {len(shard.data)}".encode())
            digest.update(shard.data[: shard.data_start].tobytes())
            spans = [(entry.begin, entry.end - entry.begin) for entry in shard.entries.values()]
            starts = [(begin, min(length, _SAMPLE_BYTES)) for begin, length in spans]
            for sample in samples(shard.path, starts):
                digest.update(sample)
        return digest.hexdigest()

    def _located(self, name: str, file: str) -> _Shard:
        if name not in self._shards[file].entries:
            raise WeightsError(
                f"{self.path / file}: lacks the tensor {name!r} that {INDEX} promises. {_AGAIN}"
            )
        return self._shards[file]

    def _entry(self, name: str) -> _Entry:
        if name not in self._where:
            raise WeightsError(f"{self.path}: has no tensor {name!r}. Is this the right model?")
        return self._where[name].entries[name]


def read_file(path: Path) -> dict[str, Weight]:
    """Every tensor of one safetensors file that does not belong to a model directory."""
    shard, tensors = _open_shard(path), {}
    for name, entry in shard.entries.items():
        if entry.dtype not in _READ:
            raise WeightsError(f"{path}: tensor {name!r} is {entry.dtype}; use {', '.join(_READ)}.")
        raw = torch.from_numpy(shard.data[entry.begin : entry.end])
        tensors[name] = decode(raw, entry.dtype, entry.shape)
    return tensors


def _shard_names(path: Path) -> dict[str, str]:
    """Tensor name -> file; a single file has the key ""."""
    if (path / INDEX).exists():
        return _from_index(path)
    if (path / "model.safetensors").exists():
        return {"": "model.safetensors"}
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if len(names) == 1:
        return {"": names[0]}
    if names:
        raise WeightsError(f"{path}: {len(names)} safetensors files but no {INDEX}. {_AGAIN}")
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        raise WeightsError(
            f"{path}: holds pickle files only, which can run code and are refused. "
            "Convert the model to safetensors."
        )
    raise WeightsError(
        f"{path}: no model.safetensors, {INDEX} or GGUF file in this directory. Check the path."
    )


def _from_index(path: Path) -> dict[str, str]:
    index = path / INDEX
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise WeightsError(f"{index}: no weight_map in it. {_AGAIN}")
    for name, file in files.items():
        plain = isinstance(file, str) and file.endswith(".safetensors")
        if not plain or any(part in file for part in ("/", "\\", "\0")):
            raise WeightsError(
                f"{index}: {name!r} points to {file!r}, not to a safetensors file beside it. "
                f"{_AGAIN}"
            )
    for file in set(files.values()):
        if not (path / file).exists():
            raise WeightsError(f"{path / file}: missing, though {INDEX} names it. {_AGAIN}")
    return files


def _refuse_quantised(path: Path, config: dict[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        method_name = _METHODS.get(str(method), str(method or "an unknown method"))
        raise WeightsError(
            f"{path}: quantised with {method_name}, which is not supported. "
            "Use the unquantised checkpoint with --dtype int8 or int4, or a GGUF file."
        )


def _open_shard(path: Path) -> _Shard:
    try:
        size = path.stat().st_size
        if size < 8:
            raise WeightsError(f"{path}: truncated, only {size} bytes. {_AGAIN}")
        # copy on write: torch uses the pages without a copy, and nothing is written to the file
        data = np.memmap(path, dtype=np.uint8, mode="c", shape=(size,))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read ({error}). Check it.") from error
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise WeightsError(
            f"{path}: truncated or not safetensors (a header of {length} bytes in a file of "
            f"{size}). {_AGAIN}"
        )
    start = 8 + length
    return _Shard(path, data, start, _entries(path, data[8:start].tobytes(), start, size))


def _entries(path: Path, header: bytes, start: int, size: int) -> dict[str, _Entry]:
    try:
        table = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: its header is not valid JSON. {_AGAIN}") from error
    if not isinstance(table, dict):
        raise WeightsError(f"{path}: its header is not a JSON object. {_AGAIN}")
    metadata = table.pop("__metadata__", None)
    entries = {name: _entry_of(path, name, facts, start) for name, facts in table.items()}
    reached = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            raise WeightsError(f"{path}: tensor {name!r} overlaps or leaves a gap. {_AGAIN}")
        reached = entry.end
    if reached != size:
        raise WeightsError(
            f"{path}: truncated or overlong, its tensors end at byte {reached} but the file has "
            f"{size}. {_AGAIN}"
        )
    return {**entries, **_blocks(path, metadata, entries)}


def _blocks(path: Path, metadata: Any, entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """The entries that hold GGUF blocks, with their real type and shape."""
    text = metadata.get(BLOCKS_KEY) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    fault = WeightsError(f"{path}: its metadata {BLOCKS_KEY!r} makes no sense. {_AGAIN}")
    try:
        table = json.loads(text)
        stated = {name: (str(kind), _whole_numbers(shape)) for name, (kind, shape) in table.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise fault from error
    blocks = {}
    for name, (kind, shape) in stated.items():
        entry, (elements, nbytes) = entries.get(name), BLOCK_SIZES.get(kind, (0, 0))
        if entry is None or not shape or not elements or shape[-1] % elements:
            raise fault
        if math.prod(shape) // elements * nbytes != entry.end - entry.begin:
            raise fault
        blocks[name] = _Entry(kind, shape, entry.begin, entry.end)
    return blocks


def _entry_of(path: Path, name: str, facts: Any, start: int) -> _Entry:
    fault = WeightsError(f"{path}: the header entry of tensor {name!r} makes no sense. {_AGAIN}")
    if not isinstance(facts, dict):
        raise fault
    dtype, shape = facts.get("dtype"), _whole_numbers(facts.get("shape"))
    offsets = _whole_numbers(facts.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise fault
    if dtype not in _BITS:
        raise WeightsError(
            f"{path}: tensor {name!r} has the unknown type {dtype!r}; {', '.join(_READ)} are "
            "supported. Use another checkpoint."
        )
    begin, end = offsets
    if begin > end or math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        raise fault
    return _Entry(dtype, shape, start + begin, start + end)


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        return None
    sound = all(type(item) is int and 0 <= item < 1 << 48 for item in value)
    return tuple(value) if sound else None
