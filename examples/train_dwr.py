"""Trains the DWR shape (6 layers, 16 experts, 260M parameters) on Python source for some minutes.

    python -m examples.train_dwr OUT [--minutes 6] [--corpus-mb 160]

Needs only torch, tokenizers and safetensors; made for one large GPU. The corpus is the Python
source of the installed packages (files with equal content count once); one file in fifty is held
out.
Writes a directory that `coterie run` loads, and prints the held-out loss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import site
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional

from examples.dwr_torch import DWR, Shape

END = "<|endoftext|>"
HELD_OUT_OF = 50
PEAK_RATE, WARM_SHARE, BALANCE, CLIP = 6e-4, 0.03, 0.01, 1.0
VALIDATION_WINDOWS = 128


@dataclass(frozen=True, slots=True)
class Corpus:
    train: Tensor  # [tokens] int32
    held_out: Tensor
    tokenizer: Tokenizer
    files: int
    text_bytes: int


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sources(limit_bytes: int, folders: list[Path] | None = None) -> tuple[list[str], list[str]]:
    """Training texts, and held-out texts: one in fifty; no content twice."""
    roots = folders or [
        Path(p) for p in {*site.getsitepackages(), sysconfig.get_path("stdlib")} if Path(p).is_dir()
    ]
    seen: set[bytes] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    size = 0
    for path in (file for root in sorted(roots) for file in sorted(root.rglob("*.py"))):
        try:
            raw = path.read_bytes()
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a file with another encoding is not used
        digest = hashlib.sha256(raw).digest()
        if len(raw) < 200 or len(raw) > 1_000_000 or digest in seen:
            continue
        seen.add(digest)
        parts[len(seen) % HELD_OUT_OF == 1].append(text)
        size += len(raw)
        if size >= limit_bytes:
            break
    return parts


def train_tokenizer(texts: list[str], vocab: int, sample_bytes: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    step = max(1, sum(map(len, texts)) // sample_bytes)
    tokenizer.train_from_iterator(texts[::step], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    parts = []
    for start in range(0, len(texts), 2000):
        for item in tokenizer.encode_batch_fast(texts[start : start + 2000]):
            parts.append(np.array([*item.ids, 0], dtype=np.int32))
    return torch.from_numpy(np.concatenate(parts))


def read_corpus(shape: Shape, limit_bytes: int, folders: list[Path] | None = None) -> Corpus:
    began = time.perf_counter()
    train, held_out = sources(limit_bytes, folders)
    size = sum(map(len, train))
    note(f"corpus: {len(train)} files, {size / 1e6:.0f} MB; {len(held_out)} files held out")
    tokenizer = train_tokenizer(train, shape.vocab, 40_000_000)
    note(f"tokenizer: {tokenizer.get_vocab_size()} tokens, {time.perf_counter() - began:.0f} s")
    corpus = Corpus(
        encode(tokenizer, train), encode(tokenizer, held_out), tokenizer, len(train), size
    )
    note(
        f"{len(corpus.train) / 1e6:.1f}M tokens, {len(corpus.held_out) / 1e3:.0f}k held out, "
        f"{time.perf_counter() - began:.0f} s"
    )
    return corpus


class Windows:
    """Random windows of the training tokens; the held-out windows are always the same."""

    def __init__(self, corpus: Corpus, length: int, device: str, seed: int = 0) -> None:
        self.tokens = corpus.train.to(device)
        self.length, self.device = length, device
        self.draw = torch.Generator(device=device).manual_seed(seed)
        count = min(VALIDATION_WINDOWS, len(corpus.held_out) // (length + 1))
        held_out = corpus.held_out[: count * (length + 1)].to(device)
        self.validation = held_out.view(count, length + 1).long()

    def batch(self, rows: int) -> Tensor:
        last = len(self.tokens) - self.length - 1
        starts = torch.randint(last, (rows, 1), device=self.device, generator=self.draw)
        return self.tokens[starts + torch.arange(self.length + 1, device=self.device)].long()


def loss_of(model: DWR, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy per token, and the routers' imbalance."""
    kind = windows.device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
        logits, uneven = model(windows[:, :-1])
    flat = logits.view(-1, logits.shape[-1]).float()
    return functional.cross_entropy(flat, windows[:, 1:].flatten()), uneven


@torch.no_grad()
def validate(model: DWR, windows: Tensor) -> float:
    losses = [loss_of(model, part)[0] * len(part) for part in windows.split(16)]
    return float(torch.stack(losses).sum() / len(windows))


def rate_at(done: float) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    return PEAK_RATE * min(1.0, 0.01 + done / WARM_SHARE) * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class Span:
    """How long training lasts: by time, or by steps (0 = no limit)."""

    minutes: float = 0.0
    steps: int = 0

    def done(self, seconds: float, step: int) -> float:
        """The share of it that has passed."""
        by_clock = seconds / (60 * self.minutes) if self.minutes else 0.0
        return max(by_clock, step / self.steps if self.steps else 0.0)


def train(model: DWR, windows: Windows, span: Span, rows: int) -> dict[str, Any]:
    fused = windows.device == "cuda"
    matrices, vectors = [], []
    for name, parameter in model.named_parameters():
        flat = name.endswith("bias") or parameter.ndim == 1
        (vectors if flat else matrices).append(parameter)
    grouped = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=PEAK_RATE, betas=(0.9, 0.95), fused=fused)
    began, step, curve = time.perf_counter(), 0, []
    while (done := span.done(time.perf_counter() - began, step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(done)
        loss, uneven = loss_of(model, windows.batch(rows))
        (loss + BALANCE * uneven).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0:
            spent = time.perf_counter() - began
            rate = step * rows * windows.length / spent
            shown = loss.item()
            curve.append({"step": step, "loss": round(shown, 4), "tok_s": round(rate)})
            note(f"step {step}: loss {shown:.3f}, load {uneven.item():.3f}, {rate:,.0f} tok/s")
    return {
        "steps": step,
        "tokens": step * rows * windows.length,
        "seconds": round(time.perf_counter() - began, 1),
        "curve": curve,
        "val_loss": round(validate(model, windows.validation), 4),
        "val_tokens": windows.validation[:, 1:].numel(),
    }


def write(model: DWR, tokenizer: Tokenizer, out: Path, notes: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(model.state(), out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(model.shape.config(), indent=1))
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (out / "training.json").write_text(json.dumps(notes, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--corpus-mb", type=int, default=160)
    parser.add_argument("--rows", type=int, default=64, help="windows of 512 tokens per step")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shape = Shape()
    corpus = read_corpus(shape, args.corpus_mb * 1_000_000)
    model = DWR(shape).to(device)
    assert model.num_parameters() == shape.parameters()
    report = train(model, Windows(corpus, shape.positions, device), Span(args.minutes), args.rows)
    report |= {"corpus_files": corpus.files, "corpus_bytes": corpus.text_bytes}
    report |= {
        "corpus_tokens": len(corpus.train),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    write(model, corpus.tokenizer, args.out, report)
    loss, seen = report["val_loss"], report["tokens"] / 1e6
    print(f"val loss {loss:.3f}, perplexity {math.exp(loss):.1f}, {seen:.0f}M tokens")


if __name__ == "__main__":
    main()
