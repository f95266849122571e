"""Makes coterie/routing/data/words.npz from all-MiniLM-L6-v2: one vector per word, 64 numbers each.

    python -m benchmarks.routing_vectors --model DIR [--dim 64] [--out FILE]

DIR holds the model as transformers reads it (Apache-2.0). Every entry of its vocabulary is encoded
by itself, vectors are centred and cut by PCA, and frequent words count less (the vocabulary is
ordered by frequency). Needs torch and transformers; nothing that is shipped does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# rows before it are unused or marks of the model's own; the first words follow
FIRST = 999
# PCA looks at whole words that are neither single characters nor rare pieces
PCA_ROWS = slice(1000, 20000)
SMOOTH = 1e-3
BATCH = 512


def encoded(model_dir: Path, size: int) -> NDArray[np.float32]:
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


def reduced(vectors: NDArray[np.float32], dim: int) -> NDArray[np.float32]:
    centred = vectors - vectors[PCA_ROWS.start :].mean(axis=0)
    axes = np.linalg.svd(centred[PCA_ROWS], full_matrices=False)[2][:dim]
    found = centred @ axes.T
    found /= np.linalg.norm(found, axis=1, keepdims=True).mean()
    # Zipf: the chance of a word falls with its rank
    chance = 1.0 / (np.arange(len(found)) - 900.0).clip(2)
    return (found * (SMOOTH / (SMOOTH + chance / chance.sum()))[:, None])[FIRST:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("words.npz"))
    args = parser.parse_args()
    texts = (args.model / "vocab.txt").read_text(encoding="utf-8").splitlines()
    found = reduced(encoded(args.model, len(texts)), args.dim)
    scales = (np.abs(found).max(axis=1, keepdims=True) / 127).astype(np.float16)
    scales = np.maximum(scales, np.float16(1e-6))
    rounded = np.rint(found / scales.astype(np.float32)).clip(-127, 127).astype(np.int8)
    kept = np.frombuffer("\n".join(texts[FIRST:]).encode(), np.uint8)
    np.savez_compressed(args.out, vocabulary=kept, vectors=rounded, scales=scales)
    print(f"{args.out}: {len(rounded)} words, {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
