"""Writes the reference pages, and the files for Grafana and Prometheus, from the code that they
describe; `--check` fails if one is out of date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def cli_reference() -> str:
    """Every command with its options. Not argparse's own text, which differs between Python
    versions."""
    from coterie.cli.main import COMMANDS, EPILOG, build_parser

    lines = ["# Command line", "", "`coterie COMMAND --help` says the same.", ""]
    lines += ["| Command | Purpose |", "|---|---|"]
    lines += [f"| `coterie {name}` | {module.HELP} |" for name, module in COMMANDS.items()]
    lines += ["", "```text", EPILOG.rstrip(), "```"]
    commands = subparsers(build_parser())
    for name, module in COMMANDS.items():
        lines += ["", f"## coterie {name}", "", sentence(module.HELP), ""]
        actions = subparsers(commands[name])
        lines += [] if actions else [*options(commands[name]), ""]
        lines += ["```text", module.EPILOG.rstrip(), "```"]
        for action, parser in actions.items():
            lines += ["", f"### coterie {name} {action}", "", sentence(parser.description or "")]
            lines += ["", *options(parser), "", "```text", (parser.epilog or "").rstrip(), "```"]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def options(parser: argparse.ArgumentParser) -> list[str]:
    rows = [option_row(action) for action in parser._actions[1:]]
    return ["| Option | Meaning |", "|---|---|", *rows]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def option_row(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0 and action.option_strings:
        value = " " + ("\\|".join(map(str, action.choices or ())) or value_name(action))
    name = ", ".join(action.option_strings) or str(action.metavar)
    meaning = (action.help or "").replace("%%", "%")
    if action.default not in (None, False) and "default" not in meaning:
        shown = action.default
        text = ",".join(map(str, shown)) if isinstance(shown, list) else str(shown)
        meaning = f"{meaning} (default: {text})".strip()
    return f"| `{name}{value}` | {meaning} |"


def value_name(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


def openapi() -> str:
    from coterie.api.routes import reference

    return json.dumps(reference(), indent=1, ensure_ascii=False) + "\n"


def config_reference() -> str:
    from coterie.core.config import reference

    return reference()


def metrics_reference() -> str:
    from coterie.obs.metrics import reference

    return reference()


def dashboard() -> str:
    from ops_files import dashboard

    return dashboard()


def alert_rules() -> str:
    from ops_files import rules

    return rules()


PAGES: dict[str, Callable[[], str]] = {
    "docs/cli.md": cli_reference,
    "docs/config.md": config_reference,
    "docs/metrics.md": metrics_reference,
    "docs/api/openapi.json": openapi,
    "ops/grafana.json": dashboard,
    "ops/alerts.yml": alert_rules,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on drift")
    args = parser.parse_args()
    drifted = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        drifted.append(name)
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in drifted:
        print(f"{name}: {'has drifted; run make docs' if args.check else 'written'}")
    return 1 if drifted and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
