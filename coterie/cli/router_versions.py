"""Actions of `coterie router` for trained routers: train, eval, calibrate, promote, rollback.

Each makes or reads version files in a folder; servers read the one in use when they start and when
their settings are loaded again. Nothing here needs a server.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.terminal import ActionMenu, facts, note, show, table
from coterie.core.errors import ConfigError

if TYPE_CHECKING:
    from coterie.routing.classify.traffic import LabelledPrompt
    from coterie.routing.classify.trained import TrainedRouter
    from coterie.routing.classify.versions import RouterVersions

# why a label is refused; {} is a specialist
_REFUSED = {
    "unhealthy": "they were labelled while {} was unhealthy",
    "other_checks": "one check did not judge both {} and its shadow",
}
_FORMAT = """\
FILE has one JSON object a line:
  {"prompt": "Make a slug: Old Maps", "specialist": "url-slug"}
  {"prompt": "What is a slug?", "specialist": "reject"}
`intent` may stand for `specialist`, `body` holds a document, `group` an author.
The calibration log of a server has this form too; its labels from a time when a
specialist was unhealthy are refused and counted.
"""
_TRAIN = f"""\
examples:
  coterie router train traffic.jsonl
  coterie router train traffic.jsonl calibration.jsonl --held-out held_out.jsonl

{_FORMAT}
Stores a new version and puts it into use only by `promote`.
"""
_EVAL = f"""\
examples:
  coterie router eval held_out.jsonl
  coterie router eval held_out.jsonl --version 3f2a --json

{_FORMAT}"""
_CALIBRATE = f"""\
examples:
  coterie router calibrate recent.jsonl

Fits the temperature and the least probability of a viable alternate again, on
prompts that the version was not trained on, and stores the result as a version.

{_FORMAT}"""
_PROMOTE = """\
examples:
  coterie router promote 3f2a --held-out held_out.jsonl

The version and the one in use answer the held-out prompts that neither was
trained on. If it is right less often, or its confidence is much less true, it
is not promoted, and the exit status is 1.
"""
_ROLLBACK = """\
examples:
  coterie router rollback
"""
_VERSIONS = """\
examples:
  coterie router versions
"""


def add_actions(menu: ActionMenu) -> None:
    action = menu.add("train", train, "train a router of specialists from traffic", _TRAIN)
    action.add_argument("files", nargs="+", metavar="FILE", help="labelled prompts")
    action.add_argument("--held-out", action="append", metavar="FILE", help="evaluate on these")
    action.add_argument(
        "--calibrate-on",
        action="append",
        metavar="FILE",
        help="calibrate on these; by default parts of FILE are left out in turn",
    )
    action.add_argument("--start", metavar="V", help="version to start from: fewer steps")
    _common(action)
    action = menu.add("eval", evaluate, "how often a router is right", _EVAL)
    action.add_argument("files", nargs="+", metavar="FILE", help="labelled prompts")
    action.add_argument("--version", metavar="V", help="a version; by default the one in use")
    _common(action)
    action = menu.add("calibrate", calibrate, "fit a router's confidence again", _CALIBRATE)
    action.add_argument("files", nargs="+", metavar="FILE", help="labelled prompts")
    action.add_argument("--version", metavar="V", help="a version; by default the one in use")
    _common(action)
    action = menu.add("promote", promote, "put a version into use if it is not worse", _PROMOTE)
    action.add_argument("version", metavar="VERSION", help="its name, or the beginning of it")
    action.add_argument(
        "--held-out", action="append", required=True, metavar="FILE", help="labelled prompts"
    )
    _common(action)
    action = menu.add("rollback", rollback, "put the version before into use", _ROLLBACK)
    _common(action)
    action = menu.add("versions", versions, "the versions and which is in use", _VERSIONS)
    _common(action)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router",
        metavar="FOLDER",
        help="folder of versions, or `shipped`; by default that of --config, or the state folder's",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with an [ensemble] section")
    parser.add_argument("--json", action="store_true", help="print JSON")


def store_of(args: argparse.Namespace) -> RouterVersions:
    from coterie.core.config import load
    from coterie.routing.classify.versions import RouterVersions, folder_of
    from coterie.weights.home import state_dir

    setting = args.router or (load(args.config).ensemble.router if args.config else "")
    return RouterVersions(folder_of(setting, state_dir()))


def train(args: argparse.Namespace) -> int:
    _one_thread()
    from coterie.routing.classify import train as trainer
    from coterie.routing.classify.evaluate import evaluate as quality_of

    items, refused = _read_labels(args.files)
    note(f"coterie: training on {len(items)} prompts")
    store = store_of(args)
    start = store.read(args.start) if args.start else None
    router = store.add(trainer.train(items, _read(args.calibrate_on or ()), start))
    report: dict[str, Any] = {
        "version": router.version,
        "trained_on": dict(router.record.trained_on),
        "refused": refused,
        "temperature": router.calibration.temperature,
        "viable_at": router.calibration.viable_at,
        **router.record.report,
    }
    parts = [_summary(router)]
    parts += [
        _figures(name.replace("_", " "), found) for name, found in router.record.report.items()
    ]
    if args.held_out:
        report["held_out"] = quality_of(router, _fresh(_read(args.held_out), router))
        parts.append(_figures("held out", report["held_out"]))
    parts.append(f"next: coterie router promote {router.version} --held-out FILE")
    return show(args, report, "\n\n".join(parts))


def evaluate(args: argparse.Namespace) -> int:
    from coterie.routing.classify.evaluate import evaluate as quality_of

    router = _version(store_of(args), args.version)
    items = _read(args.files)
    seen = len(items) - len(_fresh(items, router))
    if seen:
        note(f"coterie: {seen} of {len(items)} prompts are among those it was trained on")
    report = quality_of(router, items) | {"trained_on": seen}
    return show(args, report, f"{_summary(router)}\n\n{_figures('evaluated', report)}")


def calibrate(args: argparse.Namespace) -> int:
    from coterie.routing.classify.evaluate import evaluate as quality_of
    from coterie.routing.classify.train import recalibrated

    store = store_of(args)
    router = _version(store, args.version)
    items = _fresh(_read(args.files), router)
    before = quality_of(router, items)
    changed = store.add(recalibrated(router, items))
    after = quality_of(changed, items)
    report = {
        "version": changed.version,
        "parent": router.version,
        "temperature": changed.calibration.temperature,
        "viable_at": changed.calibration.viable_at,
        "calibration_error": after["calibration_error"],
        "calibration_error_before": before["calibration_error"],
        "n": len(items),
    }
    return show(args, report, facts([(name, str(value)) for name, value in report.items()]))


def promote(args: argparse.Namespace) -> int:
    report = store_of(args).promote(args.version, _read(args.held_out))
    parts = [_figures(f"{name} {report[name]['version']}", report[name])
             for name in ("candidate", "current") if report[name]]  # fmt: skip
    parts.append(f"in use: {report['candidate']['version']}; servers read it by config reload")
    return show(args, report, "\n\n".join(parts))


def rollback(args: argparse.Namespace) -> int:
    version = store_of(args).rollback()
    used = version or "none: specialists are chosen by name and by declared intents"
    return show(args, {"version": version}, f"in use: {used}")


def versions(args: argparse.Namespace) -> int:
    store = store_of(args)
    promoted = store.promoted()
    rows: list[dict[str, Any]] = []
    for name in store.names():
        router = store.read(name)
        rows.append(
            {
                "version": name,
                "in_use": bool(promoted) and promoted[-1] == name,
                "labels": list(router.labels),
                "trained_on": sum(router.record.trained_on.values()),
                "right": _share_of(router.record.report),
                "parent": router.record.parent,
            }
        )
    if not rows:
        return show(args, rows, "no trained router here")
    cells = [
        [
            ("* " if row["in_use"] else "  ") + str(row["version"]),
            str(len(row["labels"])),
            str(row["trained_on"]),
            f"{row['right']:.1%}",
        ]
        for row in rows
    ]
    return show(args, rows, table(["version", "labels", "prompts", "right"], cells))


def _share_of(report: Mapping[str, Any]) -> float:
    """Of the prompts that it was calibrated on."""
    return next((float(found["right"]["share"]) for found in report.values()), 0.0)


def _read(files: Sequence[str]) -> list[LabelledPrompt]:
    return _read_labels(files)[0]


def _read_labels(files: Sequence[str]) -> tuple[list[LabelledPrompt], dict[str, int]]:
    """And the number of refused ones, by reason; the user is told."""
    from coterie.routing.classify.traffic import read_labels
    from coterie.routing.match.embed import DEFAULT, EMBEDDERS

    items, refused = read_labels([Path(file) for file in files], EMBEDDERS[DEFAULT]())
    counts = Counter((item.reason, item.specialist) for item in refused)
    for (reason, specialist), count in sorted(counts.items()):
        found = f"{count} of {len(items) + len(refused)} prompts are refused"
        note(f"coterie: {found}: {_REFUSED[reason].format(specialist)}")
    if not items and files:
        raise ConfigError(f"{', '.join(files)}: there are no prompts to use", param="files")
    return items, {f"{reason} {name}": count for (reason, name), count in sorted(counts.items())}


def _fresh(items: Sequence[LabelledPrompt], router: TrainedRouter) -> list[LabelledPrompt]:
    from coterie.routing.classify.versions import saw

    return [item for item in items if not saw(router, item)]


def _version(store: RouterVersions, version: str | None) -> TrainedRouter:
    router = store.read(version) if version else store.current()
    if router is None:
        raise ConfigError(
            f"no version is in use in {store.folder}; give --version", param="version"
        )
    return router


def _summary(router: TrainedRouter) -> str:
    return facts(
        [
            ("version", router.version),
            ("labels", ", ".join(router.labels)),
            ("prompts", str(sum(router.record.trained_on.values()))),
            ("temperature", f"{router.calibration.temperature:.3f}"),
            ("viable at", f"{router.calibration.viable_at:.3f}"),
        ]
    )


def _figures(title: str, report: Mapping[str, Any]) -> str:
    rows = [
        _row("all", report["right"]),
        _row("not reject", report["related"]),
        *(_row(name, entry) for name, entry in report["by_label"].items()),
    ]
    confused = [
        f"  {item['label']} taken for {item['chosen']}: {item['count']}"
        for item in report["confused"][:8]
    ]
    lines = [
        f"{title}: calibration error {report['calibration_error']:.3f}",
        table(["label", "right", "n", "share", "low", "high"], rows),
        *confused,
    ]
    return "\n".join(lines)


def _row(name: str, entry: Mapping[str, Any]) -> list[str]:
    shares = (entry["share"], entry["low_95"], entry["high_95"])
    return [name, str(entry["count"]), str(entry["n"]), *(f"{value:.2%}" for value in shares)]


def _one_thread() -> None:
    """A matrix product on one thread gives the same weights on every run."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
