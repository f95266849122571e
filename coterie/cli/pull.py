"""`coterie pull`: fetches a model to this machine."""

from __future__ import annotations

import argparse

from coterie.cli.options import MODEL_WORDS, fetch
from coterie.cli.terminal import note
from coterie.core.config import load
from coterie.core.encoders import STATIC

HELP = "fetch a model"
EPILOG = """\
examples:
  coterie pull                      the default model
  coterie pull qwen3:4b             by its short name (coterie list --names)
  coterie pull hf:ORG/REPO          from the hub (needs huggingface_hub)
  coterie pull hf:ORG/REPO:Q4_K_M   the GGUF file of that quantisation
  coterie pull --config FILE        every model that its specialists need

What was broken off goes on where it ended. Files are checked by sha256.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_WORDS)
    parser.add_argument("--config", metavar="FILE", help="the models of all its specialists")


def execute(args: argparse.Namespace) -> int:
    models = [args.model]
    if args.config is not None:
        config = load(args.config)
        local = [item for item in config.specialists if not item.remote.url]
        local += [item for item in config.encoders if item.model != STATIC]
        models = list(dict.fromkeys(item.model or None for item in local))
    try:
        for model in models:
            print(fetch(model))
    except KeyboardInterrupt:
        note("coterie: stopped; what has arrived is kept, and the same command goes on there")
        raise
    return 0
