"""Settings: one TOML file, checked key by key. Owns names, types, ranges and defaults.

Refuses to know what a setting does. An unknown key is an error that names the nearest known one, so
that a typing mistake never runs silently. `reference()` renders docs/config.md from the same table
that checks the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from coterie.core.adapters import DEFAULTS, AdapterSettings
from coterie.core.dispatch import MoeSettings
from coterie.core.errors import ConfigError
from coterie.core.sections import EngineSettings, ServerSettings, SpecialistSettings
from coterie.core.settings import (
    TASK_TYPES,
    JobSettings,
    RoutingSettings,
    SettingRule,
    ValidatorSettings,
    allowed,
    checked,
    refuse_unknown,
    written,
)

T = TypeVar("T")


_SERVER, _ENGINE = ServerSettings(), EngineSettings()
_ROUTING, _JOBS = RoutingSettings(), JobSettings()


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerSettings = _SERVER
    engine: EngineSettings = _ENGINE
    adapters: AdapterSettings = DEFAULTS
    routing: RoutingSettings = _ROUTING
    jobs: JobSettings = _JOBS
    specialists: tuple[SpecialistSettings, ...] = (SpecialistSettings(),)
    validators: tuple[ValidatorSettings, ...] = ()


_SECTIONS: dict[str, type[Any]] = {
    "server": ServerSettings,
    "engine": EngineSettings,
    "adapters": AdapterSettings,
    "routing": RoutingSettings,
    "jobs": JobSettings,
    "specialists": SpecialistSettings,
    "validators": ValidatorSettings,
}
# sections of which there may be several
_LISTS = ("specialists", "validators")


def load(path: Path | str | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The file's settings with `overrides` on top.

    Overrides use dotted keys, `server.port` or `specialists.0.dtype`; a None value is "not given".
    """
    tree = _read(Path(path)) if path is not None else {}
    for name, value in (overrides or {}).items():
        if value is not None:
            _override(tree, name, value)
    refuse_unknown(tree, _SECTIONS, "")
    if not tree.get("specialists", True):
        raise ConfigError("there must be at least one [[specialists]] table", param="specialists")
    tree.setdefault("specialists", [{}])
    sections: dict[str, Any] = {
        name: _tables(kind, tree.get(name, []), name)
        if name in _LISTS
        else _section(kind, tree.get(name, {}), name)
        for name, kind in _SECTIONS.items()
    }
    config = Config(**sections)
    _check_together(config)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", param=str(path)) from error


def _override(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, rest = key.partition(".")
    if section == "specialists":
        index_text, _, rest = rest.partition(".")
        listed = tree.setdefault("specialists", [{}])
        if not index_text.isdigit() or not isinstance(listed, list):
            raise ConfigError(f"{key}: expected specialists.<number>.<key>", param=key)
        if int(index_text) >= len(listed):
            raise ConfigError(f"{key}: there are {len(listed)} specialists", param=key)
        table = listed[int(index_text)]
    else:
        table = tree.setdefault(section, {})
    *inner, last = rest.split(".")
    for name in inner:
        table = table.setdefault(name, {}) if isinstance(table, dict) else None
    if not last or not isinstance(table, dict):
        raise ConfigError(f"{key}: expected section.key", param=key)
    table[last] = value


def _tables(kind: type[T], listed: Any, name: str) -> tuple[T, ...]:
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise ConfigError(f"{name} must be one or more [[{name}]] tables", param=name)
    return tuple(_section(kind, table, f"{name}.{index}") for index, table in enumerate(listed))


def _section(kind: type[T], table: Any, prefix: str) -> T:
    if not isinstance(table, dict):
        raise ConfigError(f"{prefix} must be a table", param=prefix)
    rules = _rules(kind)
    refuse_unknown(table, rules, prefix)
    return kind(**{name: _value(rules[name], table[name], f"{prefix}.{name}") for name in table})


def _value(rule: SettingRule, value: Any, name: str) -> Any:
    if rule.kind == "table":
        return _section(MoeSettings, value, name)
    return checked(rule, value, name)


def dispatch(given: Mapping[str, Any], prefix: str = "experts") -> MoeSettings:
    """Checked like a file's [specialists.experts]; a None value is "not given"."""
    table = {name: value for name, value in given.items() if value is not None}
    return _section(MoeSettings, table, prefix)


def _rules(kind: type[Any]) -> dict[str, SettingRule]:
    return {item.name: cast(SettingRule, item.metadata["rule"]) for item in fields(kind)}


def _check_together(config: Config) -> None:
    names = [item.name for item in config.specialists if item.name]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two specialists are named {name!r}", param="specialists")
    if "auto" in names:
        raise ConfigError("'auto' is the router's own name", param="specialists")
    for index, item in enumerate(config.validators):
        if not (item.name and item.command and (item.experts or item.task_types)):
            raise ConfigError(
                f"validators.{index} needs a name, a command, and experts or task_types",
                param=f"validators.{index}",
            )
        for kind in item.task_types:
            if kind not in TASK_TYPES:
                listed = ", ".join(TASK_TYPES)
                raise ConfigError(
                    f"validators.{index}.task_types: {kind!r} is none of {listed}",
                    param=f"validators.{index}.task_types",
                )
    if config.engine.max_step_tokens < config.engine.max_sequences:
        raise ConfigError(
            "engine.max_step_tokens is below engine.max_sequences: running streams would stall",
            param="engine.max_step_tokens",
        )
    if config.engine.max_restart_backoff_s < config.engine.restart_backoff_s:
        raise ConfigError(
            "engine.max_restart_backoff_s is below engine.restart_backoff_s",
            param="engine.max_restart_backoff_s",
        )


def reference() -> str:
    """docs/config.md: every key with its type, default and range."""
    lines = ["# Configuration", "", "`coterie serve --config coterie.toml`. Every key is optional."]
    lines.append("A key that is not listed here is an error. Sizes: `400KB`, `2GB`, `2GiB`.")
    for section, kind in (_SECTIONS | {"specialists.experts": MoeSettings}).items():
        title = f"[[{section}]]" if section in _LISTS else f"[{section}]"
        lines += ["", f"## {title}", "", (kind.__doc__ or "").strip(), ""]
        lines += ["| Key | Type | Default | Range | Meaning |", "|---|---|---|---|---|"]
        for item in fields(kind):
            rule = cast(SettingRule, item.metadata["rule"])
            shown = "below" if rule.kind == "table" else f"`{written(item.default)}`"
            lines.append(
                f"| `{item.name}` | {rule.kind} | {shown} | {allowed(rule)} | {rule.doc} |"
            )
    return "\n".join(lines) + "\n"
