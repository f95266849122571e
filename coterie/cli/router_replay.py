"""`coterie router replay`: makes logged decisions again, with the same settings or with others."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.cli.expert.state import experts_dir
from coterie.cli.options import count
from coterie.cli.terminal import ActionMenu, facts, show, table
from coterie.core.errors import ConfigError, CoterieError, NotFound

if TYPE_CHECKING:
    from coterie.routing.classify.trained import TrainedRouter
    from coterie.service.receipts.replay import ReplayedDecision, ReplaySummary

_REPLAY = """\
examples:
  coterie router replay                        does each give the same again?
  coterie router replay --version 3f2a         what would this version change?
  coterie router replay --config new.toml      what would these settings change?
  coterie router replay --limit 10000 --json

Servers keep what each decision was made from beside its receipt: features of
the prompt (no text), states of specialists and replicas, the version of the
router and the settings. Without --version and --config every decision must come
out the same, bit for bit; the exit status is 1 if one does not, or is lost.
Names of experts mean the versions that are recorded. With --config, decisions
of settings with none of the file's specialists are lost.
"""
MAX_DECISIONS = 1_000_000
T = TypeVar("T")
# rows that are shown of a table
MAX_ROWS = 20


def add_action(menu: ActionMenu) -> None:
    action = menu.add("replay", replay, "make logged decisions again, and compare", _REPLAY)
    action.add_argument("--version", metavar="V", help="with this version of the trained router")
    action.add_argument("--config", metavar="FILE", help="with the settings of this TOML file")
    action.add_argument(
        "--limit", type=count, default=10_000, metavar="N", help="newest decisions (10000)"
    )
    action.add_argument("--router", metavar="FOLDER", help="folder of versions, or `shipped`")
    action.add_argument("--json", action="store_true", help="print JSON")


def replay(args: argparse.Namespace) -> int:
    if args.limit > MAX_DECISIONS:
        raise ConfigError(f"--limit must be at most {MAX_DECISIONS}", param="limit")
    summary, different = asyncio.run(_replayed(args))
    show(args, _report(summary, different), _text(summary, different, args))
    is_other = args.version is not None or args.config is not None
    wrong = 0 if is_other else summary.outcomes["lost"] + summary.outcomes["changed"]
    return 1 if wrong else 0


async def _replayed(args: argparse.Namespace) -> tuple[ReplaySummary, list[ReplayedDecision]]:
    from coterie.core.config import load
    from coterie.routing.classify.versions import RouterVersions, folder_of
    from coterie.service.adapters.catalog import AdapterCatalog
    from coterie.service.receipts import context as contexts
    from coterie.service.receipts.decisions import decoded
    from coterie.service.receipts.replay import DecisionReplay
    from coterie.service.records.store import RecordStore
    from coterie.weights.home import state_dir

    path = state_dir() / "records.db"
    if not path.is_file():
        raise NotFound(f"no server has kept decisions in {path.parent}")
    store = RecordStore(path, 1, 1)
    try:
        kept, stored = store.contexts(), store.decisions(args.limit)
    finally:
        store.close()
    known = {key: made for key, data in kept.items() if (made := _read(contexts.decoded, data))}
    records = [record for data in stored if (record := _read(decoded, data))]
    other = None
    if args.config is not None:
        config = load(args.config)
        other = partial(contexts.changed, config=config)
        if known and not any(other(context).specialists for context in known.values()):
            raise ConfigError("the file has none of the specialists of the log", param="config")
    settings = [args.router] if args.router else sorted({c.ensemble.router for c in known.values()})
    folders = [RouterVersions(folder_of(setting, state_dir())) for setting in settings]

    def trained(version: str) -> TrainedRouter | None:
        for folder in folders:
            try:
                return folder.read(version)
            except CoterieError:
                continue
        return None

    version = args.version
    if version is not None:
        found = trained(version)
        if found is None:
            raise NotFound(f"no version {version!r} of a router is kept", param="version")
        version = found.version
    catalog = AdapterCatalog(experts_dir())
    await catalog.start()
    try:
        summary, different = DecisionReplay(known, catalog, trained, other, version).run(records)
    finally:
        await catalog.close()
    summary.lose("it was written by another version of Coterie", len(stored) - len(records))
    return summary, different


def _read(decode: Callable[[bytes], T], data: bytes) -> T | None:
    """None for what this version cannot read."""
    import msgspec

    try:
        return decode(data)
    except msgspec.MsgspecError:
        return None


def _report(summary: ReplaySummary, different: list[ReplayedDecision]) -> dict[str, Any]:
    return {
        "decisions": summary.total,
        "same": summary.outcomes["same"],
        "changed": summary.outcomes["changed"],
        "lost": summary.outcomes["lost"],
        "other_answer": summary.other_answer,
        "moves": [
            {"before": before, "after": after, "count": count}
            for (before, after), count in summary.moves.most_common()
        ],
        "losses": dict(summary.losses),
        "different": [
            {
                "request_id": item.record.request_id,
                "outcome": item.outcome,
                "before": item.before,
                "after": item.after,
                "why": item.why,
            }
            for item in different[:1000]
        ],
    }


def _text(
    summary: ReplaySummary, different: list[ReplayedDecision], args: argparse.Namespace
) -> str:
    shown = {
        "decisions": str(summary.total),
        "same": _share(summary.outcomes["same"], summary.total),
        "changed": _share(summary.outcomes["changed"], summary.total),
        "other answer": _share(summary.other_answer, summary.total),
        "lost": _share(summary.outcomes["lost"], summary.total),
    }
    parts = [facts(list(shown.items()))]
    if summary.moves:
        rows = [
            [str(number), before, after]
            for (before, after), number in summary.moves.most_common(MAX_ROWS)
        ]
        parts.append(
            table(["count", "answered", "would answer"], rows, ("answered", "would answer"))
        )
    if summary.losses:
        rows = [[str(number), why] for why, number in summary.losses.most_common(MAX_ROWS)]
        parts.append(table(["count", "lost"], rows, ("lost",)))
    changed = [item for item in different if item.outcome == "changed"][:MAX_ROWS]
    if changed and not summary.moves:
        rows = [[item.record.request_id, item.why] for item in changed]
        parts.append(table(["request", "differs"], rows, ("differs",)))
    if args.version is None and args.config is None and not summary.outcomes["changed"]:
        parts.append("every decision that could be made again came out the same, bit for bit")
    return "\n\n".join(parts)


def _share(number: int, total: int) -> str:
    return f"{number} ({100 * number / total:.2f}%)" if total else "0"
