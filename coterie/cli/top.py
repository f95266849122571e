"""`coterie top`: what each specialist of a running server delivers, live in a terminal.

Two lines for each specialist, 80 columns. Not in a terminal it prints once. There is no line over
all specialists: nobody could act on it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import Any

from coterie.cli.admin_client import ask
from coterie.core.errors import CoterieError

HELP = "latency, correctness and state of each specialist, live"
EPILOG = """\
examples:
  coterie top
  coterie top --url http://127.0.0.1:8000 --interval 5
  coterie top --once

Milliseconds of the last 24 hours: first token (ttft) and gap between tokens
(itl), each p50, p95 and p99; adm: acceptance to first token, p95. A figure with
a ! breaks the specialist's promise. Ctrl-C ends.
"""
WIDTH = 80
_NAME = 20
_CLEAR, _HOME, _REST = "\x1b[2J", "\x1b[H", "\x1b[J"
_LINE_END = "\x1b[K\n"
_ALTERNATE, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_BOLD, _RED, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument("--url", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument(
        "--api-key-file",
        dest="admin_key_file",
        metavar="FILE",
        help="its first key is sent, if the server asks for one",
    )


def execute(args: argparse.Namespace) -> int:
    data = ask(args, "GET", "/v1/slo")["data"]
    if args.once or not sys.stdout.isatty():
        print("\n".join(lines(data)))
        return 0
    sys.stdout.write(_ALTERNATE + _CLEAR)
    try:
        while True:
            draw(lines(data, colour=True), args.interval)
            time.sleep(max(args.interval, 0.2))
            try:
                data = ask(args, "GET", "/v1/slo")["data"]
            except CoterieError as error:
                draw([f"coterie top: {error.message}", "", *lines(data)], args.interval)
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(_BACK)
        sys.stdout.flush()


def draw(shown: list[str], interval: float) -> None:
    """Write over what is there; what does not fit the height is cut."""
    height = shutil.get_terminal_size((WIDTH, 24)).lines
    if len(shown) > height - 1:
        shown = [*shown[: height - 2], f"... and {len(shown) - height + 2} lines"]
    sys.stdout.write(_HOME + "".join(line + _LINE_END for line in shown) + _REST)
    sys.stdout.flush()


def lines(data: list[dict[str, Any]], colour: bool = False) -> list[str]:
    """The view as lines of at most 80 columns."""
    head = f"{'specialist':<{_NAME}} {'state':<13}run wait {'ttft ms':>19} {'itl ms':>16}"
    shown = [f"{_BOLD}{head}{_PLAIN}" if colour else head]
    for item in data:
        state = _state(item)
        first = (
            f"{item['specialist'][:_NAME]:<{_NAME}} {state:<13}"
            f"{item['running']:>3} {item['waiting']:>4} "
            f"{_quantiles(item, 'ttft'):>19} {_quantiles(item, 'itl'):>16}"
        )
        second = (
            f"  adm {_ms(item['admission_to_first_token_p95_s'])}  "
            f"correct {_correctness(item)}  preempted {_share(item['preempted_share'])}"
        )
        if colour and state != "closed":
            first = f"{_RED if item['breaker'] != 'closed' else _YELLOW}{first}{_PLAIN}"
        shown += [first, second if len(second) <= WIDTH else second[:WIDTH]]
    return shown


def _state(item: dict[str, Any]) -> str:
    """The worst that is to be said, in at most 12 letters."""
    if item["breaker"] != "closed":
        is_held = item["held"] and item["breaker"] != "draining"
        return "held" if is_held else str(item["breaker"])
    spikes = {"normal": "closed", "fewer_shadows": "spike 1", "spill": "spike 2"}
    return spikes.get(item["spike"], "spike 3")


def _quantiles(item: dict[str, Any], kind: str) -> str:
    values = item[kind]
    if not values["count"]:
        return "-"
    shown = "/".join(_ms(values[f"{share}_s"]) for share in ("p50", "p95", "p99"))
    return shown + _mark(item["kept"][f"{kind}_p95_s"])


def _mark(is_kept: bool | None) -> str:
    """Shows a promise that is not kept."""
    return "!" if is_kept is False else ""


def _ms(seconds: float | None) -> str:
    """At most five letters."""
    if seconds is None:
        return "-"
    value = seconds * 1000
    if value < 10:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 100_000 else f"{seconds:.0f}s"


def _correctness(item: dict[str, Any]) -> str:
    values, shown = item["correctness"], "unknown"
    if values["rate"] is not None:
        mark = _mark(item["kept"]["correctness"])
        shown = f"{values['rate']:.2f}{mark} [{values['low']:.2f},{values['high']:.2f}]"
    floor = "" if values["floor"] is None else f", floor {values['floor']:g}"
    return f"{shown} of {values['judged']}{floor}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
