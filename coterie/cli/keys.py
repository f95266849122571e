"""`coterie keys`: keys that sign experts, and keys that this machine trusts."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.expert.state import keys_dir, open_registry, open_trust
from coterie.cli.terminal import ActionMenu, choose, facts, show, table
from coterie.core.errors import ConfigError

if TYPE_CHECKING:
    from coterie.packages.trust import TrustedKey

HELP = "make keys that sign experts, and say which keys to trust"
EPILOG = """\
examples:
  coterie keys new my.key           a private key, and my.key.pub to give away
  coterie keys trust their.key.pub --comment "the data team" --expires 365d
  coterie keys list
  coterie keys revoke 0b4b2e7558035f28

Experts are installed when a trusted key signed them.
"""

_NEW = """\
examples:
  coterie keys new my.key
  coterie keys new my.key --trust   and trust it on this machine

The private key is 32 raw bytes that only you can read. Nobody can restore it.
"""
_TRUST = """\
examples:
  coterie keys trust their.key.pub --comment "the data team"
  coterie keys trust \\
    3d3ffe79bfbfdfe3ca840b3108dc43f77b8f5c39423e0b710b7ab872858bb307
  coterie keys trust their.key.pub --expires 2027-12-31
"""
_REVOKE = """\
examples:
  coterie keys revoke 0b4b2e7558035f28

Nothing that it signed is installed from now on; what is installed stays, and is
listed. A revoked key stays revoked.
"""
_LIST = """\
examples:
  coterie keys list --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    menu = ActionMenu(parser)
    action = menu.add("new", new, "make a key pair", _NEW)
    action.add_argument("path", nargs="?", metavar="FILE", help="(default: in the state folder)")
    action.add_argument("--comment", default="", metavar="TEXT", help="whose key it is")
    action.add_argument("--trust", action="store_true", help="trust it on this machine")
    _add_json(action)
    action = menu.add("trust", trust, "install what this key signed", _TRUST)
    action.add_argument("key", metavar="KEY", help="a .pub file, or 64 hex digits")
    action.add_argument("--comment", default="", metavar="TEXT", help="whose key it is")
    action.add_argument("--expires", metavar="WHEN", help="2027-12-31 or 90d (default: never)")
    _add_json(action)
    action = menu.add("revoke", revoke, "never again install what this key signed", _REVOKE)
    action.add_argument("id", metavar="ID", help="a key id, or the start of one")
    _add_json(action)
    _add_json(menu.add("list", listing, "keys that are trusted, expired or revoked", _LIST))


execute = choose


def new(args: argparse.Namespace) -> int:
    from coterie.packages import signing

    path = Path(args.path) if args.path else keys_dir() / "publisher.key"
    public = signing.new_key(path)
    public_path = path.with_name(f"{path.name}.pub")
    public_path.write_text(
        f"ed25519 {public.hex()} {args.comment}".rstrip() + "\n", encoding="utf-8"
    )
    if args.trust:
        open_trust().trust(public, args.comment)
    report = {
        "private_key": str(path),
        "public_key": str(public_path),
        "key_id": signing.key_id(public),
    }
    pairs = [
        ("private key", f"{path} (keep it)"),
        ("public key", f"{public_path} (give it away)"),
        ("key id", signing.key_id(public)),
    ]
    return show(args, report, facts(pairs))


def trust(args: argparse.Namespace) -> int:
    from coterie.packages.signing import read_public

    path = Path(args.key)
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else args.key
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no public key (a .pub file) in it", param="key") from error
    expires_at = None if args.expires is None else _when(args.expires)
    try:
        public = read_public(text)
    except ConfigError as error:
        what = "no public key in it" if path.is_file() else "no such file, and no public key"
        raise ConfigError(f"{args.key}: {what} (64 hex digits)", param="key") from error
    key = open_trust().trust(public, args.comment, expires_at)
    return show(args, _report(key), f"key {key.id}: {_state(key)}")


def revoke(args: argparse.Namespace) -> int:
    key = open_trust().revoke(args.id)
    signed = [f"{c.name}@{c.version}" for c in open_registry().cards() if c.signer == key.id]
    text = f"key {key.id}: revoked"
    if signed:
        text += f"\nit signed what stays installed until you remove it: {', '.join(signed)}"
    return show(args, {**_report(key), "installed": signed}, text)


def listing(args: argparse.Namespace) -> int:
    keys = open_trust().keys()
    rows = [
        (key.id, _state(key), _day(key.added_at) if key.added_at else "built in", key.comment)
        for key in keys
    ]
    headers = ("key", "state", "since", "comment")
    none = "no keys are trusted: coterie keys trust FILE.pub"
    text = table(headers, rows, words=headers) if rows else none
    return show(args, {"keys": [_report(key) for key in keys]}, text)


def _report(key: TrustedKey) -> dict[str, Any]:
    return {"id": key.id, "state": key.state(time.time()), **asdict(key)}


def _state(key: TrustedKey) -> str:
    state = key.state(time.time())
    if state == "trusted" and key.expires_at is not None:
        return f"trusted until {_day(key.expires_at - 1)}"
    return state


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def _when(text: str) -> float:
    """Seconds since 1970: of `90d` from now, or of the end of a day in UTC."""
    days = re.fullmatch(r"(\d{1,5})d", text)
    if days:
        return time.time() + int(days.group(1)) * 86_400
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise ConfigError(f"{text!r}: write 2027-12-31 or 90d", param="expires") from error
    return day.timestamp() + 86_400


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
