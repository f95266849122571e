"""`--config FILE --specialist NAME`: commands that load a model take it, its precision, its MoE
settings and its experts from a file of settings."""

from __future__ import annotations

import argparse
import difflib

from coterie.cli.options import MOE_FLAGS
from coterie.core.config import Config, SpecialistSettings, load
from coterie.core.errors import ConfigError
from coterie.core.moe import AUTOMATIC

# settings of a specialist and of an engine that have a flag of the same name
_OWN = ("model", "dtype", "context")
_ENGINE = ("device", "threads", "kv_bytes", "capture_graphs")


def add_specialist(parser: argparse.ArgumentParser, many: str = "the first") -> None:
    group = parser.add_argument_group("a specialist of a server's settings, instead of a MODEL")
    group.add_argument("--config", metavar="FILE", help="TOML settings of the server")
    group.add_argument(
        "--specialist", metavar="NAME", help=f"with --config: this one (default: {many})"
    )


def specialists(args: argparse.Namespace) -> list[str]:
    """The names that `--config` and `--specialist` mean: one, or all of the file; empty without
    `--config`."""
    if args.config is None:
        if args.specialist is not None:
            raise ConfigError("--specialist needs --config FILE", param="specialist")
        return []
    names = _names(load(args.config))
    if args.specialist is None:
        return names
    return [names[index_of(names, args.specialist)]]


def index_of(names: list[str], name: str) -> int:
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(names)}"
    raise ConfigError(f"--specialist: {name!r} is not in the file; {hint}", param="specialist")


def use_specialist(args: argparse.Namespace, name: str | None = None) -> argparse.Namespace:
    """The arguments with the settings of the specialist `name`, by default of the one that they
    name or of the first, where no flag was given. Without `--config` they stay as they are."""
    listed = specialists(args)
    if not listed:
        return args
    config = load(args.config)
    settings = config.specialists[index_of(_names(config), name or listed[0])]
    if settings.remote.url:
        raise ConfigError(
            f"{settings.name!r} is remote: no model of it is here; ask the server for it by name",
            param="specialist",
        )
    used = argparse.Namespace(**vars(args))
    for key in _OWN:
        _fill(used, key, getattr(settings, key), getattr(SpecialistSettings(), key))
    for key in _ENGINE:
        _fill(used, key, getattr(config.engine, key), getattr(type(config.engine)(), key))
    for key in MOE_FLAGS:
        _fill(used, key, getattr(settings.moe, key), getattr(AUTOMATIC, key))
    # `coterie expert test` names one expert, which runs alone
    if settings.adapters and not isinstance(getattr(used, "expert", ""), str):
        used.expert = [*settings.adapters, *(used.expert or [])]
    return used


def _fill(args: argparse.Namespace, key: str, value: object, default: object) -> None:
    """Flags of the command line have priority."""
    if hasattr(args, key) and getattr(args, key) is None and value != default:
        setattr(args, key, value)


def _names(config: Config) -> list[str]:
    if all(item.name for item in config.specialists):
        return [item.name for item in config.specialists]
    # imports more than a bare checkout may have
    from coterie.service.config_check import expected_names

    return expected_names(config)
