"""`coterie list`: the models on this machine, or the short names that can be fetched."""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import Any

from coterie.cli.terminal import nbytes, show, table

HELP = "list the models on this machine"
EPILOG = """\
examples:
  coterie list
  coterie list --names              short names, here or not
  coterie list --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", action="store_true", help="list the short names of models")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    found = _names() if args.names else _here()
    return show(args, found, _names_table(found) if args.names else _here_table(found))


def _here() -> list[dict[str, Any]]:
    from coterie.weights.sources.names import short_name
    from coterie.weights.sources.source import list_cached

    return [
        {
            "name": short_name(model.source),
            "source": model.source,
            "bytes": model.nbytes,
            "path": str(model.path),
            "fetched": datetime.fromtimestamp(model.fetched_at).astimezone().isoformat(),
        }
        for model in list_cached()
    ]


def _here_table(found: list[dict[str, Any]]) -> str:
    if not found:
        return "no models here yet: coterie pull"
    rows = [
        (item["name"] or "-", item["source"], nbytes(item["bytes"]), item["fetched"][:10])
        for item in found
    ]
    return table(("name", "source", "size", "fetched"), rows, words=("source",))


def _names() -> list[dict[str, Any]]:
    from coterie.weights.sources.names import named_models, short_name
    from coterie.weights.sources.source import list_cached

    here = {short_name(model.source) for model in list_cached()}
    return [
        {
            "name": model.name,
            "source": model.source,
            "bytes": model.nbytes or None,
            "licence": model.licence or None,
            "architecture": model.architecture,
            "can_open": model.can_open,
            "needs": model.needs or None,
            "here": model.name in here,
        }
        for model in named_models()
    ]


def _names_table(found: list[dict[str, Any]]) -> str:
    rows = [
        (
            item["name"],
            nbytes(item["bytes"]) if item["bytes"] else "-",
            item["licence"] or "-",
            "here" if item["here"] else "" if item["can_open"] else "cannot be opened yet",
        )
        for item in found
    ]
    return table(("name", "size", "licence", ""), rows, words=("licence", ""))
