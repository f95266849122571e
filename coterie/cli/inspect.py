"""`coterie inspect`: what a model is, and how it is asked by default."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import MODEL_WORDS, fetch
from coterie.cli.terminal import facts, nbytes

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.weights.checkpoint import Checkpoint

HELP = "show what a model is, its sampling and where each value comes from"
EPILOG = """\
examples:
  coterie inspect                   the default model
  coterie inspect hf:ORG/REPO
  coterie inspect model.gguf --json

Sampling is that of a request that sets nothing: generation_config is the
model's own file, recommended are its authors, default is the API. The router
may tune it for coterie's own API and for "auto". No weights are loaded.
"""

# where the system prompt of a chat without a system message comes from
BY_TEMPLATE, BY_CARD, BY_NOBODY = "chat template", "recommended", "none"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=MODEL_WORDS,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    found = inspected(fetch(args.model))
    print(json.dumps(found, indent=2, ensure_ascii=False) if args.json else facts(rows(found)))
    return 0


def inspected(path: Path) -> dict[str, Any]:
    from coterie.core.sampling import default_sampling
    from coterie.models.text.tokenizer import load_tokenizer
    from coterie.weights.checkpoint import GGUFCheckpoint, open_checkpoint

    checkpoint, tokenizer = open_checkpoint(path), load_tokenizer(path)
    config, advice = checkpoint.config, tokenizer.recommended
    values = default_sampling(checkpoint.generation, advice.sampling)
    source, text = system_prompt(tokenizer)
    return {
        "path": str(path),
        "format": "gguf" if isinstance(checkpoint, GGUFCheckpoint) else "safetensors",
        "architecture": ", ".join(config.get("architectures") or ["unknown"]),
        "context": config.get("max_position_embeddings"),
        "chat_template": tokenizer.chat_template is not None,
        "recommended": {"model": advice.name, "source": advice.source} if advice.name else None,
        "weights": _weights(checkpoint),
        "sampling": {name: asdict(value) for name, value in values.items()},
        "system_prompt": {"source": source, "text": text},
    }


def _weights(checkpoint: Checkpoint) -> dict[str, Any]:
    """Bytes in the file, by type, and of the matrices in memory."""
    from coterie.models.weight_sizes import matrix_bytes

    stored: Counter[str] = Counter()
    for name in checkpoint.names():
        stored[checkpoint.stored_as(name)] += checkpoint.extent(name).nbytes
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    return {
        "file_bytes": stored.total(),
        "stored_as": dict(stored.most_common()),
        "memory_bytes": matrix_bytes(checkpoint, "auto", "cpu", tied=tied),
        "gpu_memory_bytes": matrix_bytes(checkpoint, "auto", "cuda", tied=tied),
    }


def system_prompt(tokenizer: Tokenizer) -> tuple[str, str]:
    """Of a chat without a system message: who writes it, and the text if it is the card's."""
    if tokenizer.card_system:
        return BY_CARD, tokenizer.card_system
    return (BY_TEMPLATE if tokenizer.writes_system else BY_NOBODY), ""


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What `inspected` found, for people."""
    advice, system = found["recommended"], found["system_prompt"]
    lines = [
        ("path", found["path"]),
        ("format", found["format"]),
        ("architecture", found["architecture"]),
        ("weights", _sizes(found["weights"])),
        ("context", f"{found['context']} tokens" if found["context"] else "not stated"),
        ("chat template", "yes" if found["chat_template"] else "no"),
        ("recommended", f"{advice['model']}: {advice['source']}" if advice else "nothing is known"),
    ]
    lines += [
        (name, f"{value['value']:g} ({value['source']})")
        for name, value in found["sampling"].items()
    ]
    text = f": {system['text']}" if system["text"] else ""
    return [*lines, ("system prompt", f"{system['source']}{text}")]


def _sizes(weights: dict[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {nbytes(size)}" for kind, size in weights["stored_as"].items())
    return (
        f"{nbytes(weights['file_bytes'])} in the file ({kinds}), {nbytes(weights['memory_bytes'])} "
        f"in memory on a CPU, {nbytes(weights['gpu_memory_bytes'])} on a GPU"
    )
