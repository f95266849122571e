"""One interface to a model's weights, for every file format.

`open_checkpoint` presents a GGUF file or a directory of safetensors with Hugging Face names and
config keys. A tensor is read only when requested, as stored. Pickle files are never opened.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from coterie.core.errors import WeightsError
from coterie.weights.files import FileExtent, release, samples, unmap
from coterie.weights.formats.gguf import GGUFFile, TensorInfo, is_gguf, only_gguf, read_gguf
from coterie.weights.formats.gguf_blocks import NotFinite
from coterie.weights.formats.gguf_config import (
    PERMUTED,
    ROPE_FACTORS,
    hf_config,
    hf_generation,
    tensor_names,
)
from coterie.weights.formats.gguf_tensors import map_files, read_tensor
from coterie.weights.formats.safetensors import SafetensorsCheckpoint
from coterie.weights.quantize import Weight, dense

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# bytes of each tensor that are hashed into the fingerprint, together with the header
_SAMPLE_BYTES = 4096


class Checkpoint(Protocol):
    """`config` and `generation` have the keys of config.json and generation_config.json."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_as(self, name: str) -> str: ...

    def read(self, name: str) -> Weight: ...

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of the tensor as stored, its rows in the order of `read`."""
        ...

    def extent(self, name: str) -> FileExtent:
        """Where `name` is on disk, with its rows in the file's order."""
        ...

    def unmap(self) -> None:
        """Gives back the memory that reading has filled; tensors that were read stay valid."""
        ...

    def release(self) -> None:
        """The same, and drops the files' pages from the system's cache."""
        ...

    def fingerprint(self) -> str: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file or any part of a split one, a directory with one, or a Hugging Face directory of
    safetensors."""
    path = Path(path)
    if path.is_dir():
        inside = only_gguf(path)
        if inside is not None and not (path / "config.json").exists():
            return GGUFCheckpoint(inside)
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise WeightsError(f"{path}: no such file or directory. Check the path.")
    if path.suffix in _PICKLES and not is_gguf(path):
        raise WeightsError(
            f"{path}: pickle files can run code and are refused. Convert the model to safetensors."
        )
    if path.suffix == ".safetensors":
        raise WeightsError(
            f"{path}: give the directory that holds it, with config.json and the tokenizer."
        )
    return GGUFCheckpoint(path)


class GGUFCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: GGUFFile = read_gguf(path)
        self._data = map_files(self._file)
        factors = self._file.tensors.get(ROPE_FACTORS)
        self.config = hf_config(self._file, None if factors is None else self._values(factors))
        self.generation = hf_generation(self._file)
        self._names = tensor_names(self._file)
        self._permuted = str(self._file.metadata["general.architecture"]) in PERMUTED

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def stored_as(self, name: str) -> str:
        return self._info(name).type

    def read(self, name: str) -> Weight:
        info = self._info(name)
        try:
            return read_tensor(self._data, info, self._row_order(info))
        except NotFinite:
            raise NotFinite(f"{info.path}: tensor {info.name!r}: ") from None

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        info = self._info(name)
        data = self._data[info.path][info.offset : info.offset + info.nbytes]
        order = self._row_order(info)
        return data if order is None else data.reshape(info.shape[0], -1)[order].reshape(-1)

    def extent(self, name: str) -> FileExtent:
        info = self._info(name)
        return FileExtent(info.path, info.offset, info.nbytes)

    def unmap(self) -> None:
        for data in self._data.values():
            unmap(data)

    def release(self) -> None:
        for path, data in self._data.items():
            release(path, data)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        file = self._file
        digest.update(self._data[file.path][: file.header_bytes].tobytes())
        for path, size in file.sizes.items():
            digest.update(str(size).encode())
            own = [info for info in file.tensors.values() if info.path == path]
            starts = [(info.offset, min(info.nbytes, _SAMPLE_BYTES)) for info in own]
            for sample in samples(path, starts):
                digest.update(sample)
        return digest.hexdigest()

    def without_tensors(self) -> bytes:
        """A GGUF file with this file's metadata and no tensors: enough for a tokenizer."""
        head = bytearray(self._data[self._file.path][: self._file.metadata_bytes].tobytes())
        head[8:16] = bytes(8)  # the number of tensors
        return bytes(head)

    def take_header(self) -> GGUFFile:
        """The header for a tokenizer, once: its texts are not kept here after that."""
        metadata = self._file.metadata
        texts = [key for key, value in metadata.items() if isinstance(value, list)]
        kept = {key: value for key, value in metadata.items() if key not in texts}
        taken, self._file = self._file, replace(self._file, metadata=kept)
        return taken

    def _info(self, name: str) -> TensorInfo:
        if name not in self._names:
            raise WeightsError(f"{self.path}: has no tensor {name!r}. Convert the model again.")
        return self._file.tensors[self._names[name]]

    def _values(self, info: TensorInfo) -> list[float]:
        values: list[float] = dense(read_tensor(self._data, info, None)).flatten().tolist()
        return values

    def _row_order(self, info: TensorInfo) -> npt.NDArray[np.int64] | None:
        """Reverts the converter's reordering of q and k: pairs (2i, 2i+1) back to halves (i,
        i+d/2).

        Only whole rows move, so this works for quantised rows as well.
        """
        part = info.name.split(".")[-2]
        if not self._permuted or part not in ("attn_q", "attn_k"):
            return None
        key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
        heads, rows = self.config[key], info.shape[0]
        if rows != heads * self.config["head_dim"]:
            raise WeightsError(
                f"{self.path}: tensor {info.name!r} has {rows} rows, not {heads} heads of "
                f"{self.config['head_dim']}. Convert the model again."
            )
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
