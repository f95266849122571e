"""Model aliases: names of the operator's choice for models of this server, for clients whose model
name cannot be changed. A name may have wildcards."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.settings import key

MAX_ALIASES = 256
# no name of a request that is longer is compared
MAX_NAME = 512
_NAME = re.compile(r"[\w.:@+/*?\[\]!-]{1,128}")
_WILDCARDS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class AliasSettings:
    """Other names for models, for clients whose model name cannot be changed. `*`, `?` and `[...]`
    match as in file names; the longest name that matches is used. A name that a model has always
    means that model. The target is a specialist, also an encoder, an expert, `specialist:expert` or
    `auto`; a tenant needs the right to use it."""

    name: str = key("", "text", "The name that clients send, at most 128 characters.")
    target: str = key("", "text", "The model that answers.")

    @property
    def is_exact(self) -> bool:
        return _WILDCARDS.isdisjoint(self.name)


class ModelAliases:
    """Finds the target of a name."""

    def __init__(self, aliases: Iterable[AliasSettings] = ()) -> None:
        items = tuple(aliases)
        self.exact: Mapping[str, str] = {item.name: item.target for item in items if item.is_exact}
        patterns = [item for item in items if not item.is_exact]
        patterns.sort(key=lambda item: (-len(item.name), item.name))
        self._patterns = [
            (re.compile(fnmatch.translate(item.name)), item.target) for item in patterns
        ]

    def __bool__(self) -> bool:
        return bool(self.exact or self._patterns)

    def target(self, name: str) -> str | None:
        """None if the name is no alias."""
        found = self.exact.get(name)
        if found is not None or len(name) > MAX_NAME:
            return found
        return next((target for pattern, target in self._patterns if pattern.match(name)), None)


NO_ALIASES = ModelAliases()


def read_aliases(table: Any, section: str = "aliases") -> tuple[AliasSettings, ...]:
    """The table of a settings file. Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f'{section} must be a table: "name" = "model"', param=section)
    if len(table) > MAX_ALIASES:
        raise ConfigError(f"{section}: {len(table)} names; at most {MAX_ALIASES}", param=section)
    for name, target in table.items():
        param = f"{section}.{name}"
        if not _NAME.fullmatch(name):
            text = "a name has letters, digits, . _ - : @ + / and wildcards, at most 128"
            raise ConfigError(f"{section}: {name[:80]!r}: {text}", param=section)
        if not isinstance(target, str) or not target or len(target) > MAX_NAME:
            raise ConfigError(f"{param}: must be the name of a model in quotes", param=param)
    return tuple(AliasSettings(name, target) for name, target in table.items())
