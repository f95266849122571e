"""PEFT directories: adapter_config.json and adapter_model.safetensors, checked completely.

An adapter is read into its own memory: nothing of it points into its file. Pickle is never opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coterie.adapters.base import Adapter
from coterie.adapters.kinds.patch_builder import is_finite
from coterie.adapters.kinds.table import ADAPTERS
from coterie.core.errors import NotFound, WeightsError
from coterie.packages.adapter_kinds import BASE_HEAD, kind_of
from coterie.packages.paths import adapter_digest, chunks_of, open_regular
from coterie.packages.safetensors_header import check_header, header_length

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_MAX_CONFIG_BYTES = 4_000_000
_MAX_WEIGHTS_BYTES = 1 << 33
_ALIGN = 4
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Facts of a directory that need no reading of its weights."""

    kind: str
    num_virtual_tokens: int
    # size of the tensors
    nbytes: int
    base_model_name: str


def describe(directory: Path) -> AdapterFacts:
    """Fast: reads the config and the header of the weights."""
    path = _weights_file(directory)
    try:
        config = parse_config(_read(directory / CONFIG, _MAX_CONFIG_BYTES))
        kind = kind_of(config)
        tokens = ADAPTERS[kind].stored.soft_tokens(config)
        with open_regular(path) as file:
            header = int.from_bytes(file.read(8), "little")
        # reading the header also checks that the tensors fill the file
        with safe_open(path, "pt"):
            nbytes = path.stat().st_size - header - 8
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a sound safetensors file ({error})") from error
    except WeightsError as error:
        raise WeightsError(f"{directory}: {error.message}") from error
    name = config.get("base_model_name_or_path")
    return AdapterFacts(kind, tokens, nbytes, name if isinstance(name, str) else "")


def open_adapter(directory: Path, digest: str) -> Adapter:
    path = _weights_file(directory)
    try:
        return parse_adapter(
            _read(directory / CONFIG, _MAX_CONFIG_BYTES),
            bytearray(_read(path, _MAX_WEIGHTS_BYTES)),
            digest,
        )
    except WeightsError as error:
        raise WeightsError(f"{directory}: {error.message}") from error


def parse_adapter(config: bytes, weights: bytearray, digest: str) -> Adapter:
    """From the bytes of the two files, for callers that have checked them against the digest. The
    adapter keeps `weights` and points into it."""
    table = parse_config(config)
    kind, tensors = kind_of(table), _tensors(weights)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    head = tensors.pop(BASE_HEAD, None)
    if head is None:
        content = ADAPTERS[kind].read(table, tensors)
        return Adapter(digest, kind, content.changes, content.soft, nbytes)
    # PEFT saves the base's LM head with an adapter of it. It is not needed, but must be that of the
    # served model: its row norms are kept for a comparison when composing. The other tensors are
    # copied, because they are in the same buffer as the much larger head.
    content = ADAPTERS[kind].read(table, {name: part.clone() for name, part in tensors.items()})
    if "lm_head" not in content.changes or head.dim() != 2:
        raise WeightsError(f"{BASE_HEAD!r} is there, but no adapter of the LM head")
    norms = head.float().norm(dim=1)
    return Adapter(digest, kind, content.changes, content.soft, nbytes - head.nbytes, norms)


def parse_config(data: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{CONFIG}: not valid JSON") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{CONFIG}: not a JSON object")
    return value


def _weights_file(directory: Path) -> Path:
    path = directory / WEIGHTS
    if path.is_file():
        return path
    pickles = [*directory.glob("adapter_model.bin"), *directory.glob("adapter_model.pt*")]
    if pickles:
        raise WeightsError(
            f"{pickles[0]}: a pickle file, which can run code and is refused. Load the adapter "
            f"with PEFT and save it again with safe_serialization=True, which writes {WEIGHTS}."
        )
    raise WeightsError(
        f"{directory}: no {WEIGHTS} in it. Give a directory that PEFT's save_pretrained wrote."
    )


def _read(path: Path, limit: int) -> bytes:
    try:
        if not path.exists():
            raise WeightsError(f"{path.name}: missing")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise WeightsError(f"{path.name}: {size} bytes; at most {limit} are read")
            return b"".join(chunks_of(file, size, path.name))
    except OSError as error:
        raise WeightsError(f"{path.name}: cannot be read ({error.strerror})") from error


def _tensors(data: bytearray) -> dict[str, Tensor]:
    """By name, as views of the data."""
    length = header_length(bytes(data[:8]), len(data), WEIGHTS)
    # no gap, no overlap, no wrong size
    header = check_header(bytes(data[8 : 8 + length]), len(data), WEIGHTS)
    values = torch.frombuffer(data, dtype=torch.uint8)[8 + length :]
    if values.data_ptr() % _ALIGN:
        values = values.clone()
    typed: dict[torch.dtype, Tensor] = {}
    tensors = {}
    for name, entry in header.items():
        dtype = _dtype(name, entry)
        if dtype not in typed:
            typed[dtype] = values[: len(values) // dtype.itemsize * dtype.itemsize].view(dtype)
        tensors[name] = _view(entry, values, typed[dtype])
    _check_finite(tensors, typed)
    return tensors


def _dtype(name: str, entry: Mapping[str, Any]) -> torch.dtype:
    dtype = _TYPES.get(entry["dtype"])
    if dtype is None:
        raise WeightsError(f"{name!r} is {entry['dtype']}; use one of {', '.join(_TYPES)}")
    first, last = entry["data_offsets"]
    if first == last:
        raise WeightsError(f"{name!r} is empty")
    if len(entry["shape"]) not in (1, 2):
        raise WeightsError(f"{name!r} has shape {entry['shape']}: neither vector nor matrix")
    return dtype


def _view(entry: Mapping[str, Any], values: Tensor, whole: Tensor) -> Tensor:
    """`whole` is `values` in the type of the entry."""
    first, last = entry["data_offsets"]
    shape, size = entry["shape"], whole.element_size()
    if first % size:
        return values[first:last].clone().view(whole.dtype).view(shape)
    strides = (1,) if len(shape) == 1 else (shape[1], 1)
    return whole.as_strided(shape, strides, whole.storage_offset() + first // size)


def _check_finite(tensors: Mapping[str, Tensor], typed: Mapping[torch.dtype, Tensor]) -> None:
    # nearly always one type: one check of all values
    if len(typed) == 1 and all(map(is_finite, typed.values())):
        return
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise WeightsError(f"{name!r} holds NaN or infinity")


_DIGEST = re.compile(r"[0-9a-f]{64}")


class AdapterLibrary:
    """Only reads; `packages.registry` writes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def facts(self, digest: str) -> AdapterFacts:
        """Fast: reads the config and the header of a file."""
        return describe(self._directory(digest))

    def load(self, digest: str) -> Adapter:
        """The checked bytes, read into their own memory."""
        directory = self._directory(digest)
        config, weights = bytes(_read_whole(directory / CONFIG)), _read_whole(directory / WEIGHTS)
        actual = adapter_digest(_sha256(config), _sha256(weights))
        if actual != digest:
            raise WeightsError(
                f"adapter {digest[:12]}: the bytes in {directory} are not those it is named by "
                f"(they are {actual[:12]}). Install it again."
            )
        try:
            return parse_adapter(config, weights, digest)
        except WeightsError as error:
            raise WeightsError(f"adapter {digest[:12]}: {error.message}") from error

    def _directory(self, digest: str) -> Path:
        # the digest becomes part of a path
        if _DIGEST.fullmatch(digest) is None:
            raise NotFound(f"{digest[:80]!r} is no adapter's digest")
        directory = self.root / digest
        if not directory.is_dir():
            raise NotFound(f"adapter {digest[:12]} is not in the library; install it again")
        return directory


def _read_whole(path: Path) -> bytearray:
    try:
        with open_regular(path) as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            # one call reads at most 2 GiB
            view, filled = memoryview(data), 0
            while count := file.readinto(view[filled:]):
                filled += count
            view.release()
            del data[filled:]
            return data
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}. Install the adapter again.") from error


def _sha256(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()
