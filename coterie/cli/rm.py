"""`coterie rm`: removes fetched models from this machine."""

from __future__ import annotations

import argparse

from coterie.cli.terminal import nbytes

HELP = "remove a fetched model"
EPILOG = """\
examples:
  coterie rm qwen3:4b
  coterie rm hf:ORG/REPO:Q4_K_M     as coterie list shows it
  coterie rm qwen3:8b llama3.2      several

Also removes what has arrived of a download that was broken off. Only what
Coterie fetched is removed; a server that runs the model keeps it until it ends.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="short name, source or path of a fetched one",
    )


def execute(args: argparse.Namespace) -> int:
    from coterie.weights.sources.removal import remove

    for text in args.models:
        removed = remove(text)
        print(f"removed {removed.source}: {nbytes(removed.nbytes)} freed")
    return 0
