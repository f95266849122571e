"""Commands that have actions of their own: `coterie expert pack`, `coterie keys new`."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable
from typing import Any

from coterie.cli.terminal import width

Act = Callable[[argparse.Namespace], int]


class Menu:
    """Adds actions to a command's parser; without one, the command prints its help."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(act=None, menu_parser=parser)
        self._choices = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")

    def add(self, name: str, act: Act, about: str, epilog: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = self._choices.add_parser(
            name,
            help=about,
            description=textwrap.fill(about, width()),
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(act=act)
        return made


def choose(args: argparse.Namespace) -> int:
    if args.act is None:
        args.menu_parser.print_help()
        return 0
    status: int = args.act(args)
    return status


def show(args: argparse.Namespace, report: Any, text: str) -> int:
    print(json.dumps(report, indent=1) if args.json else text)
    return 0
