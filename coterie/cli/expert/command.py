"""`coterie expert`: pack, sign, check and install experts (adapters, in an `.expert` file)."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

from coterie.cli.admin_client import add_server, ask
from coterie.cli.ensemble import latest_end, share
from coterie.cli.expert import actions
from coterie.cli.expert import actions as packing
from coterie.cli.expert import evaluate as testing
from coterie.cli.options import size
from coterie.cli.terminal import ActionMenu, choose, show
from coterie.core.adapters import DEFAULTS
from coterie.core.errors import Unavailable

HELP = "pack, sign, verify and install experts: adapters for a base model"
EPILOG = """\
examples:
  coterie expert pack ./my-lora --name sql --version 1.0.0 --base MODEL
  coterie expert sign sql-1.0.0.expert --key my.key
  coterie expert verify sql-1.0.0.expert
  coterie expert install sql-1.0.0.expert
  coterie run MODEL --chat --expert sql --prompt "How many users are there?"
  coterie expert list

An expert is a LoRA, DoRA, IA3 or soft-prompt adapter as PEFT saves it.
coterie expert ACTION --help says more.
"""

_PACK = """\
examples:
  coterie expert pack ./my-lora --name sql --version 1.0.0 --base MODEL
  coterie expert pack ./my-lora --manifest sql.json --out dist/sql.expert

Takes adapter_config.json and adapter_model.safetensors, and manifest.json,
grammar.gbnf, tests/, soft_prompts/, README.md and LICENSE where they are there.
The same files give the same bytes.
"""
_SIGN = """\
examples:
  coterie keys new my.key
  coterie expert sign sql-1.0.0.expert --key my.key
"""
_VERIFY = """\
examples:
  coterie expert verify sql-1.0.0.expert     exit code 1 unless it is trusted
"""
_INSTALL = """\
examples:
  coterie expert install sql-1.0.0.expert
  coterie expert install --shipped         those that come with Coterie
  coterie expert install sql-1.0.0.expert --base MODEL     for this base alone
  coterie expert install ./my-lora --name sql --allow-unsigned

The first version of a name becomes current. A later one is staged: NAME means
the one before until coterie expert promote. --now makes it current at once.
"""
_LIST = """\
examples:
  coterie expert list               * marks the version that a name means
  coterie expert list --json
"""
_SHOW = """\
examples:
  coterie expert show sql
  coterie expert show sql@1.0.0 --json       with the whole manifest
"""
_REMOVE = """\
examples:
  coterie expert remove sql@1.0.0
  coterie expert remove sql         every version

Files stay for a day, for servers that are still running them.
"""
_PIN = """\
examples:
  coterie expert pin sql      newer versions do not change what it means
  coterie expert pin sql --off
"""
_ALIAS = """\
examples:
  coterie expert alias prod sql@1.0.0
  coterie expert alias sql sql@1.0.0         which version sql means
  coterie expert alias prod --off
"""
_PROMOTE = """\
examples:
  coterie expert promote sql@2.0.0
  coterie expert promote sql                     the version installed last
  coterie expert promote sql@2.0.0 --canary 20%
  coterie expert promote sql@2.0.0 --now         without a server, or a canary

Asks a running server. Where checks or a floor (slo.correctness) can judge the
version, it starts a canary: the version gets a share of the requests that would
run with the expert, and a sequential test of the validated pass rates makes it
current, or leaves the one before. One that is undecided after ensemble.canary_s
(a week) ends, and the version stays staged. Elsewhere it becomes current at
once. coterie ensemble status shows a canary, coterie ensemble audit how it
ended.
"""
_ROLLBACK = """\
examples:
  coterie expert rollback sql       what sql meant before its last change
"""


def configure(parser: argparse.ArgumentParser) -> None:
    menu = ActionMenu(parser)
    _configure_pack(menu)
    action = menu.add("sign", packing.sign, "sign a package with a private key", _SIGN)
    action.add_argument("file", metavar="FILE", help="an .expert file; it is rewritten")
    action.add_argument("--key", required=True, metavar="FILE", help="private key (keys new)")
    _add_json(action)
    action = menu.add("verify", actions.verify, "check a package and its signature", _VERIFY)
    action.add_argument("file", metavar="FILE", help="an .expert file")
    _add_json(action)
    _configure_install(menu)
    _add_json(menu.add("list", actions.listing, "list the installed experts", _LIST))
    action = menu.add("show", actions.details, "what an installed expert says of itself", _SHOW)
    _add_name(action)
    action = menu.add("remove", actions.remove, "remove one version of an expert, or all", _REMOVE)
    _add_name(action)
    action = menu.add("pin", actions.pin, "keep a name at the version it means now", _PIN)
    _add_name(action)
    action.add_argument("--off", action="store_true", help="let it move again")
    action = menu.add("alias", actions.alias, "give a version another name", _ALIAS)
    action.add_argument("alias", metavar="ALIAS", help="the other name")
    action.add_argument("name", nargs="?", metavar="NAME", help="an expert, or NAME@VERSION")
    action.add_argument("--off", action="store_true", help="take the alias away")
    _add_json(action)
    action = menu.add("promote", promote, "make a version current, or try it first", _PROMOTE)
    action.add_argument("name", metavar="NAME", help="NAME@VERSION, or NAME")
    way = action.add_mutually_exclusive_group()
    way.add_argument("--canary", type=share, metavar="P", help="the share (default 5%%)")
    way.add_argument("--now", action="store_true", help="at once, in the registry of this machine")
    add_server(action)
    _add_json(action)
    action = menu.add("rollback", actions.rollback, "go back to the version before", _ROLLBACK)
    _add_name(action)
    testing.configure(menu.add("test", testing.execute, testing.HELP, testing.EPILOG))


execute = choose


def promote(args: argparse.Namespace) -> int:
    """At a running server, which knows whether a canary can be judged; or in the registry."""
    if args.now:
        return actions.make_current(args)
    if args.canary is not None:
        body = {"expert": args.name, "share": args.canary}
        report = ask(args, "POST", "/v1/ensemble/canaries", body)
        return show(args, report, _canary_text(report))
    try:
        report = ask(args, "POST", f"/v1/experts/{quote(args.name, safe='@')}/promote")
    except Unavailable as error:
        error.message += f"; without a canary: coterie expert promote {args.name} --now"
        raise
    figures = report["canary"]
    text = f"{report['id']}: current; no checks and no floor, so no canary"
    return show(args, report, text if figures is None else _canary_text(figures))


def _canary_text(figures: dict[str, Any]) -> str:
    text = f"{figures['label']} gets {figures['share']:.0%} until a test has decided"
    return text + latest_end(figures)


def _configure_pack(menu: ActionMenu) -> None:
    action = menu.add("pack", packing.pack, "make an .expert file of a PEFT directory", _PACK)
    action.add_argument("directory", metavar="DIR", help="as PEFT's save_pretrained writes it")
    action.add_argument("--out", metavar="FILE", help="(default: NAME-VERSION.expert)")
    action.add_argument("--manifest", metavar="FILE", help="JSON (default: DIR/manifest.json)")
    action.add_argument("--name", help="a-z 0-9 . _ - (default: the manifest's, or DIR's name)")
    action.add_argument("--version", metavar="V", help="such as 1.2.0")
    action.add_argument("--description", metavar="TEXT", help="one sentence")
    action.add_argument("--author", metavar="TEXT")
    action.add_argument(
        "--base",
        action="append",
        metavar="MODEL",
        help="a model it is for; its fingerprint is recorded (repeatable)",
    )
    _add_json(action)


def _configure_install(menu: ActionMenu) -> None:
    action = menu.add("install", actions.install, "install a package or a PEFT directory", _INSTALL)
    action.add_argument(
        "source", nargs="*", metavar="FILE_OR_DIR", help="an .expert file or a PEFT directory"
    )
    action.add_argument(
        "--shipped", action="store_true", help="those that come with Coterie, for the default model"
    )
    action.add_argument(
        "--allow-unsigned", action="store_true", help="even if no trusted key signed it (logged)"
    )
    action.add_argument(
        "--now", action="store_true", help="current at once, also if another version is current"
    )
    action.add_argument("--name", help="call it this")
    action.add_argument("--version", metavar="V", help="give it this version")
    action.add_argument(
        "--base", action="append", metavar="MODEL", help="it must be for this model"
    )
    action.add_argument(
        "--adapter-bytes",
        type=size,
        default=DEFAULTS.device_bytes,
        metavar="SIZE",
        help="as the server has it: what cannot fit is refused (default 512MB)",
    )
    _add_json(action)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="an installed expert, or NAME@VERSION")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
