"""`coterie show`: what a model is, by its short name, its source or its file. Fetches nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from coterie.cli import inspect
from coterie.cli.options import MODEL_WORDS
from coterie.cli.terminal import facts, nbytes, show
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from coterie.weights.sources.names import NamedModel

HELP = "show the facts of a model, without fetching it"
EPILOG = """\
examples:
  coterie show                      the default model
  coterie show qwen3:4b             here or not
  coterie show model.gguf --json

Of a model that is on this machine also what coterie inspect shows.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_WORDS)
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    from coterie.weights.sources.names import find_named
    from coterie.weights.sources.source import DEFAULT_MODEL, find_here

    text = args.model or DEFAULT_MODEL
    named = find_named(text) or _of_source(text)
    path = find_here(text) if named is None or named.can_open else None
    if path is None and named is None:
        raise WeightsError(f"{text}: not on this machine, so nothing is known: coterie pull {text}")
    report: dict[str, Any] = {} if named is None else {"named": _table_facts(named)}
    pairs = [] if named is None else _table_rows(named, is_here=path is not None)
    if path is not None:
        found = inspect.inspected(path)
        report |= found
        pairs += inspect.rows(found)
    return show(args, report, facts(pairs))


def _of_source(text: str) -> NamedModel | None:
    from coterie.weights.sources.names import find_named, short_name

    return find_named(short_name(text))


def _table_facts(named: NamedModel) -> dict[str, Any]:
    return {
        "name": named.name,
        "source": named.source,
        "file": named.file or None,
        "bytes": named.nbytes or None,
        "licence": named.licence or None,
        "architecture": named.architecture,
        "can_open": named.can_open,
        "needs": named.needs or None,
    }


def _table_rows(named: NamedModel, *, is_here: bool) -> list[tuple[str, str]]:
    rows = [("name", named.name), ("source", named.source)]
    rows += [("licence", named.licence)] if named.licence else []
    if is_here:
        return rows
    rows += [("file", named.file)] if named.file else []
    rows.append(("size", nbytes(named.nbytes) if named.nbytes else "the hub knows"))
    rows.append(("architecture", named.architecture))
    if not named.can_open:
        lacks = f", which needs {named.needs}" if named.needs else ""
        return [*rows, ("state", f"cannot be opened by this version{lacks}")]
    return [*rows, ("state", f"not here: coterie pull {named.name}")]
