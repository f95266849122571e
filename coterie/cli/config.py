"""`coterie config`: checks a file of settings, shows what is in force, and reloads a server's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.admin_client import add_server, ask, server_settings
from coterie.cli.terminal import ActionMenu, choose, facts, show
from coterie.core.config import Config, load
from coterie.core.errors import ConfigError
from coterie.core.settings import written

if TYPE_CHECKING:
    from coterie.core.snapshot import EnsembleConfig

HELP = "check settings, show those in force, reload those of a running server"
EPILOG = """\
examples:
  coterie config check coterie.toml
  coterie config show coterie.toml          every setting, defaults included
  coterie config reload --admin-key-file admins.txt

docs/config.md lists every key; coterie config ACTION --help says more.
"""
_CHECK = """\
examples:
  coterie config check examples/eight.toml  exit code 2 if something is wrong

Reports every fault: unknown names of specialists, intents, checks, tenants and
experts, fallbacks in a circle, missing files, variables and programs. Fetches
and loads nothing, and never prints a key.
"""
_SHOW = """\
examples:
  coterie config show coterie.toml
  coterie config show coterie.toml --json
  coterie config show --url http://127.0.0.1:8000 --admin-key-file admins.txt

With a FILE: what a server started with it would use. Without: what a running
server uses. The digest is the one that receipts carry.
"""
_RELOAD = """\
examples:
  coterie config reload --admin-key-file admins.txt
  coterie config reload --config coterie.toml     address and keys from the file
  kill -HUP PID                                   the same

Tenants, quotas, keys, intents, SLOs, fallbacks, checks, fixed experts,
validators, routing and the ensemble's windows change at once, all of them or
none. What needs a restart (models, replicas, KV, addresses ...) is refused by
name. Requests that have begun keep the settings they began with.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    menu = ActionMenu(parser)
    action = menu.add("check", check, "report every fault of a file", _CHECK)
    action.add_argument("file", metavar="FILE", help="TOML settings")
    _add_json(action)
    action = menu.add("show", show_settings, "the settings in force and their digest", _SHOW)
    action.add_argument("file", nargs="?", metavar="FILE", help="TOML settings")
    add_server(action)
    _add_json(action)
    action = menu.add("reload", reload, "let a running server read its file again", _RELOAD)
    action.add_argument("--config", metavar="FILE", help="TOML settings of the server")
    add_server(action)
    _add_json(action)


execute = choose


def check(args: argparse.Namespace) -> int:
    config, faults = _checked(Path(args.file))
    report: dict[str, Any] = {"file": args.file, "faults": faults}
    if config is None or faults:
        lines = [f"{args.file}: {fault}" for fault in faults]
        show(args, report, "\n".join(lines))
        return 2
    snapshot = _snapshot(config)
    report |= _summary(config, snapshot)
    pairs = [
        ("specialists", ", ".join(report["specialists"])),
        ("engines", "; ".join(", ".join(names) for names in report["engines"])),
        ("digest", snapshot.digest),
    ]
    pairs += [("note", text) for text in report["notes"]]
    return show(args, report, f"{args.file}: no faults\n\n{facts(pairs)}")


def show_settings(args: argparse.Namespace) -> int:
    if args.file is None:
        shown = ask(args, "GET", "/v1/config")
        return show(args, shown, _shown(shown["digest"], shown["settings"], shown["specialists"]))
    config, faults = _checked(Path(args.file))
    if config is None or faults:
        raise ConfigError(faults[0])
    snapshot = _snapshot(config)
    settings, names = asdict(config), list(snapshot.specialists)
    report = {"digest": snapshot.digest, "specialists": names, "settings": settings}
    return show(args, report, _shown(snapshot.digest, settings, names))


def reload(args: argparse.Namespace) -> int:
    done = ask(args, "POST", "/v1/config/reload", server=server_settings(args.config))
    changed = ", ".join(done["changed"]) or "nothing"
    pairs = [("digest", done["digest"]), ("changed", changed)]
    return show(args, done, facts(pairs))


def faults_of(path: Path) -> list[str]:
    """Every fault of the file, in words."""
    return _checked(path)[1]


def _checked(path: Path) -> tuple[Config | None, list[str]]:
    """The settings, and every fault in words."""
    from coterie.api.auth import check_exposure, load_keys
    from coterie.core.config import file_faults
    from coterie.service.config_check import config_faults, expected_names, model_faults

    wrong = file_faults(path)
    if wrong:
        return None, [error.message for error in wrong]
    config = load(path)
    found = [*config_faults(config, expected_names(config)), *model_faults(config)]
    faults = [error.message for error in found]
    try:
        keys = load_keys(config.server)
        check_exposure(config.server.host, keys.callers is not None, config.server.insecure)
        keys.check_tenants([item.name for item in config.tenants])
    except ConfigError as error:
        faults.append(error.message)
    try:
        if not faults:
            _snapshot(config)
    except ConfigError as error:
        faults.append(error.message)
    return config, list(dict.fromkeys(faults))


def _snapshot(config: Config) -> EnsembleConfig:
    """What a server would use now. Raises ConfigError if an expert of a specialist is missing."""
    from coterie.core.snapshot import snapshot_of
    from coterie.routing.resolve import check_targets
    from coterie.service.adapters.catalog import AdapterCatalog
    from coterie.service.adapters.fixed import fixed_adapters
    from coterie.service.build import registry_dir
    from coterie.service.config_check import expected_names

    names = expected_names(config)
    if not config.aliases and not any(item.adapters for item in config.specialists):
        return snapshot_of(config, names)
    catalog = AdapterCatalog(registry_dir())
    catalog.read_once()
    check_targets(config.aliases, names, catalog)
    fixed = fixed_adapters(config, names, catalog)
    choices = {name: tuple(item.choice for item in stack) for name, stack in fixed.items()}
    return snapshot_of(config, names, choices)


def _summary(config: Config, snapshot: EnsembleConfig) -> dict[str, Any]:
    from coterie.api.auth import exposed_key_files
    from coterie.core.references import unserved_intents
    from coterie.service.config_check import config_notes, weight_copies

    names = list(snapshot.specialists)
    engines = weight_copies(config, names)
    notes = list(config_notes(config, names))
    notes += [
        f"no specialist serves the intent {name!r}: {names[0]!r} answers it"
        for name in unserved_intents(config)
    ]
    models: dict[str, list[str]] = {}
    for name, item in snapshot.specialists.items():
        if not item.remote.url:
            models.setdefault(item.model, []).append(name)
    for members in models.values():
        copies = [engine for engine in engines if members[0] in engine or members[-1] in engine]
        if len(copies) > 1:
            text = f"{', '.join(members)} have one model, but not one dtype and one [moe]"
            notes.append(f"{text}: its weights are loaded {len(copies)} times")
    notes += [
        f"every user of this machine can read {file}: chmod 600 {file}"
        for file in exposed_key_files(config.server)
    ]
    return {"specialists": names, "engines": engines, "digest": snapshot.digest, "notes": notes}


def _shown(digest: str, settings: dict[str, Any], names: Sequence[str]) -> str:
    """As TOML, defaults included."""
    lines = [f"# digest {digest}"]
    for section, value in settings.items():
        if section == "aliases":
            lines += ["", "[aliases]"]
            lines += [f'"{item["name"]}" = {written(item["target"])}' for item in value]
            continue
        if not isinstance(value, (list, tuple)):
            lines += ["", f"[{section}]", *_table(value, section)]
            continue
        for index, table in enumerate(value):
            named = f"  # {names[index]}" if section == "specialists" else ""
            # encoders are specialists in the file
            title = "specialists" if section == "encoders" else section
            lines += ["", f"[[{title}]]{named}", *_table(table, title)]
    return "\n".join(lines)


def _table(values: dict[str, Any], prefix: str) -> list[str]:
    plain = [
        f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, dict)
    ]
    inner = [
        line
        for key, value in values.items()
        if isinstance(value, dict)
        for line in (f"[{prefix}.{key}]", *_table(value, f"{prefix}.{key}"))
    ]
    return plain + inner


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        import json

        return json.dumps(value, ensure_ascii=False)
    return written(value)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
