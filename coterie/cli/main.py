"""The `coterie` command: one parser, one table of commands, one place that reports errors.

Uses only the standard library, so that `--help` is fast and `python -m coterie` works where
nothing can be installed. A command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from coterie import __version__
from coterie.cli import (
    bench,
    carve,
    chat,
    client_config,
    config,
    doctor,
    ensemble,
    inspect,
    keys,
    plan,
    ps,
    pull,
    receipts,
    rm,
    router,
    run,
    serve,
    show,
    state,
    sweep,
    top,
    tune,
)
from coterie.cli import list as list_command
from coterie.cli.expert import command as expert
from coterie.cli.store import command as store
from coterie.cli.terminal import width
from coterie.core.errors import ConfigError, CoterieError, InvalidRequest
from coterie.core.private_files import unwritable

# name -> module with HELP, EPILOG, configure(parser) and execute(args)
COMMANDS: dict[str, ModuleType] = {
    "serve": serve,
    "config": config,
    "client-config": client_config,
    "run": run,
    "chat": chat,
    "pull": pull,
    "list": list_command,
    "show": show,
    "rm": rm,
    "ps": ps,
    "inspect": inspect,
    "expert": expert,
    "ensemble": ensemble,
    "top": top,
    "receipts": receipts,
    "keys": keys,
    "router": router,
    "carve": carve,
    "store": store,
    "plan": plan,
    "state": state,
    "doctor": doctor,
    "bench": bench,
    "sweep": sweep,
    "tune": tune,
}

EPILOG = """\
examples:
  coterie serve                     the default model on http://127.0.0.1:8000
  coterie run --prompt "Hello"      one answer, no server
  coterie chat                      talk to a model in this terminal
  coterie pull qwen3:4b             fetch another model
  coterie doctor                    what this machine has, and what is missing

COTERIE_HOME   folder for models, compiled kernels and state
COTERIE_DEBUG  1 = show tracebacks
"""


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, with what was probably meant."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, Sequence[str]]:
        """Ends at what is unknown in the command that it was written for: its flags are known
        here. A misspelt flag is told before one that is missing because of it."""
        if self._subparsers is None:
            # behind -- is no flag
            flags = itertools.takewhile(lambda text: text != "--", args or ())
            self._refuse_unknown([text for text in flags if self._is_unknown_flag(text)])
        found, rest = super().parse_known_args(args, namespace)
        self._refuse_unknown(rest)
        return found, rest

    def _is_unknown_flag(self, text: str) -> bool:
        flag = text.partition("=")[0]
        # argparse takes the beginning of a flag too
        known = any(option.startswith(flag) for option in self._option_string_actions)
        return bool(re.fullmatch(r"--[a-z][a-z-]*", flag)) and not known

    def _refuse_unknown(self, unknown: Sequence[str]) -> None:
        if unknown:
            meant = [
                _meant(text.partition("=")[0], self._option_string_actions) for text in unknown
            ]
            hint = next((text for text in meant if text), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _meant(str(value), [str(choice) for choice in action.choices or ()])
            if isinstance(action, argparse._SubParsersAction):
                # the whole list is what --help shows
                self.error(f"invalid choice: {value!r}{hint}")
            error.message += hint
            raise


def _meant(text: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="coterie",
        description="Serve many experts as one model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"coterie {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=textwrap.fill(module.HELP, width()),
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(command)
        command.set_defaults(execute=module.execute)
    version = commands.add_parser("version", help="print the version", description="The version.")
    version.set_defaults(execute=_version)
    return parser


def _version(_: argparse.Namespace) -> int:
    print(f"coterie {__version__}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status: int = args.execute(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # the reader of our output is gone; do not flush into a closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _explain(error)


def _is_in_home(error: OSError) -> bool:
    """Whether a file or folder of Coterie's own could not be made or written."""
    from coterie.weights.home import home, state_dir

    if not isinstance(error.filename, str | Path):
        return False
    path = Path(error.filename).absolute()
    return any(path.is_relative_to(own) for own in (home(), state_dir()))


def _explain(error: Exception) -> int:
    if os.environ.get("COTERIE_DEBUG") == "1":
        raise error
    if isinstance(error, CoterieError):
        print(f"coterie: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, InvalidRequest)) else 1
    if isinstance(error, OSError) and _is_in_home(error):
        print(f"coterie: {unwritable(error.filename, error).message}", file=sys.stderr)
        return 2
    print(
        f"coterie: unexpected {type(error).__name__}: {error} (COTERIE_DEBUG=1 shows where)",
        file=sys.stderr,
    )
    return 1
