"""`coterie receipts`: who answered the requests of a server, why, and what took the time."""

from __future__ import annotations

import argparse
import re
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from coterie.cli.admin_client import add_server, ask
from coterie.cli.options import count
from coterie.cli.terminal import note, one_line, show, table

HELP = "list the receipts of a server: who answered, how it ended, what took the time"
EPILOG = """\
examples:
  coterie receipts
  coterie receipts --specialist sql --outcome timeout --since 2h
  coterie receipts --tenant acme --since 2026-11-01 --until 2026-11-02 --json
  coterie receipts chatcmpl-fa675ca2                one of them, whole, as JSON

An admin key sees the receipts of all tenants, a key of callers its own.
--since and --until take a time ago (90s, 30m, 2h, 7d), or a date or time (UTC).
"""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
PAGE = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="of one receipt")
    parser.add_argument("--tenant", metavar="NAME")
    parser.add_argument("--specialist", metavar="NAME")
    parser.add_argument("--outcome", metavar="WORD", help="stop, length, overloaded, open ...")
    parser.add_argument("--since", type=moment, metavar="TIME", help="arrived at or after")
    parser.add_argument("--until", type=moment, metavar="TIME", help="arrived before")
    parser.add_argument("--limit", type=count, default=50, metavar="N", help="newest (50)")
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    if args.id is not None:
        args.json = True
        return show(args, ask(args, "GET", f"/v1/receipts/{quote(args.id, safe='')}"), "")
    names = ("tenant", "specialist", "outcome", "since", "until")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    found, before = list[Any](), None
    while len(found) < args.limit:
        page = given | {"limit": min(args.limit - len(found), PAGE)}
        page |= {} if before is None else {"before": before}
        reply = ask(args, "GET", f"/v1/receipts?{urlencode(page)}")
        found += reply["data"]
        before = reply["next"]
        if before is None:
            break
    if before is not None and not args.json:
        note(f"coterie: the newest {len(found)}; --limit N shows more")
    heads = ("arrived", "id", "tenant", "answered", "outcome", "ms", "slowest")
    rows = [_row(item) for item in found]
    words = ("arrived", "id", "tenant", "answered", "outcome", "slowest")
    return show(args, {"receipts": found}, table(heads, rows, words) if rows else "no receipts")


def moment(text: str) -> float:
    """A time ago, or a date or time, as seconds since 1970."""
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if ago:
        return time.time() - float(ago[1]) * _UNITS[ago[2]]
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        problem = f"{text!r}: write 30m, 2h, 7d, 2026-11-01 or 2026-11-01T12:00"
        raise argparse.ArgumentTypeError(problem) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _row(item: dict[str, Any]) -> list[str]:
    plan = item["plan"]
    experts = "".join(f"+{choice['name']}" for choice in plan["adapters"])
    return [
        datetime.fromtimestamp(item["arrived_at"], UTC).strftime("%m-%d %H:%M:%S"),
        one_line(item["request_id"]),
        item["tenant"],
        (plan["specialist"] + experts) or "-",
        item["outcome"],
        f"{item['timings']['total_ms']:.0f}",
        item["slowest"].partition(":")[0] or "-",
    ]
