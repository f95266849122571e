"""`coterie ps`: which models a running server has loaded."""

from __future__ import annotations

import argparse
from typing import Any

from coterie.cli.admin_client import ask
from coterie.cli.terminal import nbytes, show, table

HELP = "show the models that a running server has loaded"
EPILOG = """\
examples:
  coterie ps
  coterie ps --url http://127.0.0.1:8000 --json

The size is that of weights and keys and values together.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument(
        "--api-key-file",
        dest="admin_key_file",
        metavar="FILE",
        help="its first key is sent, if the server asks for one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    found = ask(args, "GET", "/api/ps")["models"]
    rows = [_row(model) for model in found]
    headers = ("name", "size", "memory", "context", "precision")
    text = table(headers, rows, words=("memory", "precision"))
    return show(args, found, text if rows else "no model is loaded")


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(model["name"]).removesuffix(":latest"),
        nbytes(model["size"]),
        "GPU" if model["size_vram"] else "RAM",
        str(model["context_length"]),
        str(model["details"]["quantization_level"]),
    )
