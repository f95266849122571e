"""`coterie ensemble`: how the specialists of a running server stand, and what an operator changes.

Everything here takes effect at once, can be taken back, and is in the audit log.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from coterie.cli.admin_client import add_server, ask
from coterie.cli.terminal import ActionMenu, choose, one_line, show, table
from coterie.core.errors import ConfigError

HELP = "show breakers, spikes, canaries and thresholds of a server, and change them"
EPILOG = """\
examples:
  coterie ensemble status --admin-key-file admins.txt
  coterie ensemble demote sql --reason "bad release"
  coterie ensemble restore sql
  coterie ensemble drain sql --wait
  coterie ensemble audit

The key: --admin-key-file, or COTERIE_ADMIN_KEY. coterie ensemble ACTION --help
says more.
"""
_STATUS = """\
examples:
  coterie ensemble status
  coterie ensemble status --json
"""
_DEMOTE = """\
examples:
  coterie ensemble demote sql --reason "bad release"

Its fallback answers; a sample of the requests goes to it too, only to be
judged. Callers that name it still get it.
"""
_RESTORE = """\
examples:
  coterie ensemble restore sql

Undoes a demotion by an operator or by the breaker, a spike, and the ejection of
replicas. Evidence starts anew: a specialist that is still bad is demoted again.
"""
_DRAIN = """\
examples:
  coterie ensemble drain sql --reason "new weights" --wait
  coterie ensemble drain e0r1 --replica

Nothing new begins there, not even shadows; what runs or waits ends as usual.
New requests go to its fallback; those that name it, or for which there is no
fallback, get 529 (saturated). A replica: the others of the specialist take all.
"""
_UNDRAIN = """\
examples:
  coterie ensemble undrain sql
  coterie ensemble undrain e0r1 --replica
"""
_THRESHOLDS = """\
examples:
  coterie ensemble thresholds
  coterie ensemble thresholds query --shadow-below 0.7
  coterie ensemble thresholds query --priority-floor 5
  coterie ensemble thresholds query --clear     back to the configuration
"""
_CANARY = """\
examples:
  coterie ensemble canary spare --intent query --share 5%
  coterie ensemble canary --stop query
  coterie expert promote sql@2.0.0 --canary 5%    the same for an expert

The canary gets a share of the intent's requests. A sequential test compares the
validated pass rates and ends it: the intent becomes its own, or stays.
"""
_AUDIT = """\
examples:
  coterie ensemble audit
  coterie ensemble audit --limit 500 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    menu = ActionMenu(parser)
    _add_server(menu.add("status", status, "how every specialist stands", _STATUS))
    for name, act, about, epilog in (
        ("demote", demote, "let only shadows of a specialist run", _DEMOTE),
        ("restore", restore, "let a specialist answer again", _RESTORE),
    ):
        action = menu.add(name, act, about, epilog)
        action.add_argument("specialist", metavar="SPECIALIST")
        action.add_argument("--reason", default="", metavar="TEXT", help="for the audit log")
        _add_server(action)
    for name, act, about, epilog in (
        ("drain", drain, "let a specialist or a replica finish and take nothing new", _DRAIN),
        ("undrain", undrain, "let it take requests again", _UNDRAIN),
    ):
        action = menu.add(name, act, about, epilog)
        action.add_argument("subject", metavar="NAME", help="of a specialist")
        action.add_argument("--replica", action="store_true", help="NAME is that of a replica")
        action.add_argument("--reason", default="", metavar="TEXT", help="for the audit log")
        if name == "drain":
            action.add_argument("--wait", action="store_true", help="until nothing is in flight")
        _add_server(action)
    action = menu.add("thresholds", thresholds, "show or change those of intents", _THRESHOLDS)
    action.add_argument("intent", nargs="?", metavar="INTENT")
    action.add_argument("--shadow-below", type=float, metavar="P", help="0 to 1")
    action.add_argument("--spill-below", type=float, metavar="P", help="0 to 1")
    action.add_argument("--priority-floor", type=int, metavar="N", help="0 to 9")
    action.add_argument("--clear", action="store_true", help="back to the configuration")
    _add_server(action)
    action = menu.add("canary", canary, "try a specialist on a share of an intent", _CANARY)
    action.add_argument("specialist", nargs="?", metavar="SPECIALIST")
    action.add_argument("--intent", metavar="INTENT")
    action.add_argument("--share", type=share, default=0.05, metavar="P", help="such as 5%%")
    action.add_argument("--stop", metavar="SUBJECT", help="an intent or an expert")
    _add_server(action)
    action = menu.add("audit", audit, "every change, by the server and by operators", _AUDIT)
    action.add_argument("--limit", type=int, default=50, metavar="N", help="(default: 50)")
    _add_server(action)


execute = choose


def status(args: argparse.Namespace) -> int:
    report = ask(args, "GET", "/v1/ensemble")
    rows = [_row(item) for item in report["specialists"]]
    text = table(("specialist", "breaker", "spike", "load", "correct", "of"), rows, _WORDS)
    for item in report["replicas"]:
        if item["draining"]:
            text += f"\nreplica {item['replica']}: draining, {item['in_flight']} in flight"
    for figures in report["canaries"]:
        text += "\n" + _canary_line(figures)
    return show(args, report, text)


def demote(args: argparse.Namespace) -> int:
    return _act(args, "demote")


def restore(args: argparse.Namespace) -> int:
    return _act(args, "restore")


def drain(args: argparse.Namespace) -> int:
    report = _drain(args, "drain")
    while args.wait and _in_flight(report):
        time.sleep(POLL_S)
        report = _drained(args)
    return show(args, report, f"{args.subject}: draining, {_in_flight(report)} in flight")


def undrain(args: argparse.Namespace) -> int:
    report = _drain(args, "undrain")
    return show(args, report, f"{args.subject}: takes requests")


def thresholds(args: argparse.Namespace) -> int:
    given = {
        name: value
        for name in ("shadow_below", "spill_below", "priority_floor")
        if (value := getattr(args, name)) is not None
    }
    if args.intent is None:
        if given or args.clear:
            raise ConfigError("name the intent to change", param="intent")
        intents = ask(args, "GET", "/v1/ensemble")["intents"]
        return show(args, intents, _intents(intents))
    path = f"/v1/ensemble/intents/{quote(args.intent, safe='')}"
    if args.clear:
        if given:
            raise ConfigError("--clear takes no values beside it", param="clear")
        after = ask(args, "DELETE", path)
    elif given:
        after = ask(args, "PATCH", path, given)
    else:
        intents = ask(args, "GET", "/v1/ensemble")["intents"]
        if args.intent not in intents:
            listed = ", ".join(intents) or "none"
            raise ConfigError(f"no intent {args.intent!r}; there are: {listed}", param="intent")
        after = {"intent": args.intent} | intents[args.intent]
    return show(args, after, _intents({args.intent: after}))


def canary(args: argparse.Namespace) -> int:
    if args.stop is not None:
        path = f"/v1/ensemble/canaries/{quote(args.stop, safe='')}"
        report = ask(args, "DELETE", path)
        return show(args, report, f"stopped: {args.stop}")
    if args.specialist is None or args.intent is None:
        raise ConfigError("give a specialist and --intent, or --stop", param="specialist")
    body = {"specialist": args.specialist, "intent": args.intent, "share": args.share}
    report = ask(args, "POST", "/v1/ensemble/canaries", body)
    return show(args, report, _canary_line(report))


def audit(args: argparse.Namespace) -> int:
    report = ask(args, "GET", f"/v1/ensemble/audit?limit={args.limit}")
    lines = []
    for item in report["data"]:
        at = datetime.fromtimestamp(item["at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        lines.append(f"{at}  {item['kind']:<18} {item['subject']}  ({item['actor']})")
        if item["details"]:
            lines.append("    " + _details(item["details"]))
    return show(args, report, "\n".join(lines) or "no changes yet")


def share(text: str) -> float:
    """`5%` or `0.05`."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write 5% or 0.05") from None
    if not 0 < value <= 0.5:
        raise argparse.ArgumentTypeError("a canary takes more than 0% and at most 50%")
    return value


_WORDS = ("specialist", "breaker", "spike")
# between two looks at what is still in flight
POLL_S = 0.5


def _act(args: argparse.Namespace, action: str) -> int:
    path = f"/v1/ensemble/specialists/{quote(args.specialist, safe='')}/{action}"
    report = ask(args, "POST", path, {"reason": args.reason})
    held = " by an operator" if report["held"] else ""
    return show(args, report, f"{args.specialist}: {report['breaker']}{held}")


def _drain(args: argparse.Namespace, action: str) -> dict[str, Any]:
    kind = "replicas" if args.replica else "specialists"
    path = f"/v1/ensemble/{kind}/{quote(args.subject, safe='')}/{action}"
    report: dict[str, Any] = ask(args, "POST", path, {"reason": args.reason})
    return report


def _drained(args: argparse.Namespace) -> dict[str, Any]:
    """How it stands now; what somebody undrained meanwhile is not waited for."""
    status = ask(args, "GET", "/v1/ensemble")
    key, rows = (
        ("replica", status["replicas"]) if args.replica else ("specialist", status["specialists"])
    )
    found = [row for row in rows if row[key] == args.subject and row["draining"]]
    if not found:
        raise ConfigError(f"{args.subject} is not draining any more", param=key)
    return dict(found[0])


def _in_flight(report: dict[str, Any]) -> int:
    if "in_flight" in report:
        return int(report["in_flight"])
    return int(report["running"]) + int(report["waiting"])


def _row(item: dict[str, Any]) -> list[str]:
    held = " (operator)" if item["held"] else ""
    correctness = item["correctness"]
    return [
        item["specialist"],
        item["breaker"] + held,
        item["spike"],
        f"{item['load']:.2f}",
        shown_correctness(correctness),
        str(correctness["judged"]),
    ]


def shown_correctness(values: dict[str, Any]) -> str:
    if values["rate"] is None:
        return "unknown"
    return f"{values['rate']:.3f} [{values['low']:.3f}, {values['high']:.3f}]"


def _canary_line(figures: dict[str, Any]) -> str:
    name = figures.get("label") or figures.get("candidate", "")
    counts = " against ".join(
        f"{figures[f'{side}_valid']}/{figures[f'{side}_judged']}" + _cut_open(figures, side)
        for side in ("candidate", "current")
    )
    return (
        f"canary {name} for {figures['subject']}, {figures['share']:.0%}: {counts} valid, evidence "
        f"{figures['evidence_not_worse']:g} for and {figures['evidence_worse']:g} against, "
        f"{figures['needed']:g} needed" + latest_end(figures)
    )


def latest_end(figures: dict[str, Any]) -> str:
    """When a canary ends undecided; empty for a server of an earlier release."""
    ends_at = figures.get("ends_at")
    return f", until {_value('ends_at', ends_at)} at the latest" if ends_at else ""


def _cut_open(figures: dict[str, Any], side: str) -> str:
    """Answers that their callers cut and that could still have become valid."""
    count = figures.get(f"{side}_open", 0)
    return f" (+{count} cut)" if count else ""


def _intents(intents: dict[str, dict[str, Any]]) -> str:
    if not intents:
        return "no intents are configured"
    heads = ("intent", "shadow below", "spill below", "priority floor", "set by")
    rows = [
        [
            name,
            f"{item['shadow_below']:g}",
            f"{item['spill_below']:g}",
            str(item["priority_floor"]),
            "operator" if item["overridden"] else "configuration",
        ]
        for name, item in intents.items()
    ]
    return table(heads, rows, ("intent", "set by"))


def _details(details: dict[str, Any]) -> str:
    shown = {name: value for name, value in details.items() if not isinstance(value, dict)}
    return ", ".join(f"{name} {_value(name, value)}" for name, value in shown.items())


def _value(name: str, value: Any) -> str:
    if name.endswith("_at") and isinstance(value, int | float):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%SZ}" if value else "-"
    if isinstance(value, float):
        # no exponents: evidence and limits are read, not computed with
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return one_line(str(value))


def _add_server(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
