"""Output of commands: progress, tables and key-value lists that fit the terminal.

Progress goes to stderr, results to stdout. Uses rich for the bar if it is installed.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Tick = Callable[[int, int | None], None]


def width() -> int:
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _LineHandler(logging.Handler):
    """The log as lines for people; a line that repeats the one before is left out."""

    _last = ""

    def emit(self, record: logging.LogRecord) -> None:
        about = [getattr(record, name, None) for name in ("model", "reason")]
        line = ": ".join(["coterie", record.getMessage(), *[str(text) for text in about if text]])
        if line != self._last:
            note(line)
        self._last = line


def narrate(level: int = logging.INFO) -> None:
    """Shows what this process logs while it works, as plain lines."""
    logger = logging.getLogger("coterie")
    if not any(isinstance(handler, _LineHandler) for handler in logger.handlers):
        handler = _LineHandler()
        handler.setLevel(level)
        logger.addHandler(handler)
        logger.setLevel(min(level, logging.INFO))


@contextmanager
def progress(label: str, unit: str = "") -> Iterator[Tick]:
    """A callback for (bytes done, bytes in total), or numbers of `unit`. Shows nothing until it is
    called."""
    bar = _rich_bar(label, unit) if sys.stderr.isatty() else None
    tick: Any = bar or _LineProgress(label, unit)
    try:
        yield tick
    finally:
        tick.close()


class _LineProgress:
    """For logs and pipes: a line at the start, then one every few seconds."""

    INTERVAL_S = 3.0

    def __init__(self, label: str, unit: str = "") -> None:
        self.label, self.unit = label, unit
        self.shown_at = 0.0
        # the first call: what an earlier process has fetched counts for no speed
        self.begun: tuple[float, int] | None = None

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        self.begun = self.begun or (now, done)
        if done != total and now - self.shown_at < self.INTERVAL_S:
            return
        self.shown_at = now
        if self.unit:
            note(f"{self.label}: {done} of {total} {self.unit}")
            return
        share = f"{100 * done // total:3d}% of {total / 1e6:.0f} MB" if total else ""
        note(f"{self.label}: {share or f'{done / 1e6:.0f} MB'}{self._rate(now, done, total)}")

    def _rate(self, now: float, done: int, total: int | None) -> str:
        began, before = self.begun or (now, done)
        if now <= began or done <= before:
            return ""
        speed = (done - before) / (now - began)
        left = f", {duration((total - done) / speed)} left" if total and done < total else ""
        return f", {nbytes(speed)}/s{left}"

    def close(self) -> None:
        self.shown_at = 0.0


def _rich_bar(label: str, unit: str = "") -> Any:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.table import Column
    except ImportError:
        return None

    class Bar:
        def __init__(self) -> None:
            amounts: tuple[Any, ...] = (
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            if unit:
                amounts = (MofNCompleteColumn(), unit, TimeElapsedColumn())
            # a long name gives way, so that the figures stay on the line
            name = TextColumn(
                "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            columns = (name, BarColumn(16), *amounts)
            self.view = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task: Any = None

        def __call__(self, done: int, total: int | None) -> None:
            if self.task is None:
                self.view.start()
                self.task = self.view.add_task(label, total=total)
            self.view.update(self.task, completed=done, total=total)

        def close(self) -> None:
            if self.task is not None:
                self.view.stop()

    return Bar()


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """`name  value` lines; long values are wrapped after their names."""
    indent = max(len(name) for name, _ in pairs) + 2
    lines: list[str] = []
    for name, value in pairs:
        columns = max(width() - indent, 20)
        first, *rest = textwrap.wrap(value, columns, break_on_hyphens=False) or [""]
        lines.append(f"{name:<{indent}}{first}")
        lines += [" " * indent + line for line in rest]
    return "\n".join(lines)


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str] = ()
) -> str:
    """Aligned columns: numbers to the right, the first column and those in `words` to the left; one
    block per row if the terminal is too narrow."""
    grid = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in grid) for i in range(len(headers))]
    if sum(widths) + 2 * (len(widths) - 1) > width():
        return "\n\n".join(facts(list(zip(headers, row, strict=True))) for row in rows)
    lines = []
    for row in grid:
        cells = [
            cell.ljust(size) if header in (headers[0], *words) else cell.rjust(size)
            for header, cell, size in zip(headers, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def nbytes(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """In its two largest units: `8 s`, `2 min 5 s`, `1 h 20 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


Act = Callable[[argparse.Namespace], int]


class ActionMenu:
    """Adds actions to a command's parser; without an action, the command prints its help."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(act=None, menu_parser=parser)
        self._choices = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")

    def add(self, name: str, act: Act, about: str, epilog: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = self._choices.add_parser(
            name,
            help=about,
            description=textwrap.fill(about, width()),
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(act=act)
        return parser


def choose(args: argparse.Namespace) -> int:
    if args.act is None:
        args.menu_parser.print_help()
        return 0
    status: int = args.act(args)
    return status


def one_line(text: str) -> str:
    """Somebody else's text on one line, without what would steer the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def show(args: argparse.Namespace, report: Any, text: str) -> int:
    print(json.dumps(report, indent=1) if args.json else text)
    return 0
