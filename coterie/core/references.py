"""Names in the settings that mean other parts of the settings: unknown ones, and circles."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from urllib.parse import urlsplit

from coterie.core.aliases import ModelAliases
from coterie.core.config import Config, SpecialistSettings
from coterie.core.encoders import ENCODER, STATIC, EncoderSettings
from coterie.core.ensemble import RemoteSettings
from coterie.core.errors import ConfigError
from coterie.core.request import AUTO

# keys of a specialist that mean nothing for an encoder
_NOT_OF_ENCODERS = (
    "block_size", "replicas", "weight", "adapters", "intents", "checks", "fallback", "moe", "slo",
    "remote",
)  # fmt: skip
_ENCODER_DTYPES = ("auto", "fp32", "bf16")
# keys without a tenant are tenants of their own, named by a digest
_DIGEST = re.compile(r"[0-9a-f]{16}")


def reference_faults(
    config: Config,
    names: Sequence[str],
    checks: Collection[str],
    encoders: Sequence[str] = (),
    structures: Collection[str] = (),
) -> Iterator[ConfigError]:
    """Every fault. `names`: the served names of the specialists, in their order; `checks`: the
    built-in validators that a specialist may name; `encoders`: the names of the encoders;
    `structures`: the intents that exist without being declared."""
    yield from _double_names(config, [*names, *encoders])
    intents = list(dict.fromkeys([*(item.name for item in config.intents), *structures]))
    known_checks = [*checks, *(item.name for item in config.validators)]
    for index, settings in enumerate(config.specialists):
        where = f"specialists.{settings.name or index}"
        yield from _unknown(settings.intents, intents, f"{where}.intents", "an intent")
        yield from _unknown(settings.checks, known_checks, f"{where}.checks", "a check")
        if settings.fallback:
            yield from _unknown([settings.fallback], names, f"{where}.fallback", "a specialist")
        yield from _remote_faults(settings, where)
        if settings.encoder != EncoderSettings():
            param = f"{where}.encoder"
            text = f'{param}: only for a specialist with kind = "{ENCODER}"'
            yield ConfigError(text, param=param)
    yield from _encoder_faults(config, encoders)
    yield from _circles(dict(zip(names, config.specialists, strict=True)))
    for tenant in config.tenants:
        where = f"tenants.{tenant.name}.specialists"
        yield from _unknown(tenant.specialists, [*names, *encoders], where, "a specialist")
        if _DIGEST.fullmatch(tenant.name):
            text = f"tenants: {tenant.name!r} looks like the digest of a key; choose another name"
            yield ConfigError(text, param="tenants")
    yield from _alias_faults(config, [*names, *encoders])


def _alias_faults(config: Config, names: Sequence[str]) -> Iterator[ConfigError]:
    """Whether experts that a target names are installed is not known here."""
    aliases = ModelAliases(config.aliases)
    for item in config.aliases:
        param = f"aliases.{item.name}"
        if item.name in (AUTO, *names):
            text = "is the name of a model, which it would always mean"
            yield ConfigError(f"{param}: {text}", param=param)
        base = item.target.partition(":")[0]
        if item.target not in names and base not in (AUTO, *names):
            further = aliases.target(item.target)
            if further is not None:
                text = f"{item.target!r} is an alias itself; write {further!r}"
                yield ConfigError(f"{param}: {text}", param=param)


def unserved_intents(config: Config) -> list[str]:
    """Declared intents that no specialist serves: the first specialist answers them."""
    served = {name for item in config.specialists for name in item.intents}
    return [item.name for item in config.intents if item.name not in served]


def _double_names(config: Config, names: Sequence[str]) -> Iterator[ConfigError]:
    listed = {
        "specialists": list(names),
        "intents": [item.name for item in config.intents],
        "tenants": [item.name for item in config.tenants],
        "validators": [item.name for item in config.validators],
    }
    for section, given in listed.items():
        for name in dict.fromkeys(given):
            if not name:
                yield ConfigError(f"[[{section}]] without a name", param=section)
            elif given.count(name) > 1:
                text = f"two {section} are named {name!r}; give one another name"
                yield ConfigError(text, param=section)


def _unknown(
    given: Sequence[str], known: Sequence[str], param: str, kind: str
) -> Iterator[ConfigError]:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(known) or '-'}"
            yield ConfigError(f"{param}: {name!r} is not {kind} here; {hint}", param=param)
    for name in dict.fromkeys(given):
        if given.count(name) > 1:
            yield ConfigError(f"{param}: {name!r} is listed twice", param=param)


def _circles(specialists: dict[str, SpecialistSettings]) -> Iterator[ConfigError]:
    """A specialist whose fallbacks lead back to it. Each circle is reported once."""
    reported: set[str] = set()
    for name in specialists:
        chain = [name]
        while (after := specialists[chain[-1]].fallback) in specialists and after not in chain:
            chain.append(after)
        if after != name or name in reported:
            continue
        reported.update(chain)
        param = f"specialists.{name}.fallback"
        if len(chain) == 1:
            yield ConfigError(f"{param}: {name!r} cannot be its own fallback", param=param)
        else:
            shown = " -> ".join([*chain, name])
            yield ConfigError(f"{param}: the fallbacks go in a circle: {shown}", param=param)


def _remote_faults(settings: SpecialistSettings, where: str) -> Iterator[ConfigError]:
    remote = settings.remote
    if not remote.url:
        if remote != RemoteSettings():
            param = f"{where}.remote.url"
            yield ConfigError(f"{param}: a remote specialist needs the URL", param=param)
        return
    yield from _url_faults(remote.url, f"{where}.remote.url")
    if remote.key_env and remote.key_file:
        param = f"{where}.remote"
        yield ConfigError(f"{param}: give key_env or key_file, not both", param=param)
    if not settings.name:
        yield ConfigError(f"{where}: a remote specialist needs a name", param=where)
    local = SpecialistSettings()
    for key in ("model", "dtype", "context", "replicas", "adapters", "moe"):
        if getattr(settings, key) != getattr(local, key):
            param = f"{where}.{key}"
            yield ConfigError(f"{param}: a remote specialist has none here", param=param)


def _encoder_faults(config: Config, encoders: Sequence[str]) -> Iterator[ConfigError]:
    plain = SpecialistSettings()
    for name, settings in zip(encoders, config.encoders, strict=False):
        for key in _NOT_OF_ENCODERS:
            if getattr(settings, key) != getattr(plain, key):
                param = f"specialists.{name}.{key}"
                yield ConfigError(f"{param}: an encoder has none", param=param)
        if settings.dtype not in _ENCODER_DTYPES:
            param = f"specialists.{name}.dtype"
            text = f"{param}: an encoder runs in {', '.join(_ENCODER_DTYPES)}"
            yield ConfigError(text, param=param)
        if not settings.model:
            param = f"specialists.{name}.model"
            text = f'{param}: give a directory of safetensors, or "{STATIC}"'
            yield ConfigError(text, param=param)


def _url_faults(url: str, param: str) -> Iterator[ConfigError]:
    """The message does not repeat the URL: it may hold a key."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        # an invalid port raises
        usable = usable and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        text = f"{param}: write a base URL such as http://host:8000/v1"
        yield ConfigError(text, param=param)
    elif parts.username is not None or parts.password is not None or parts.query:
        text = f"{param}: no keys in a URL; name a variable in key_env or a file in key_file"
        yield ConfigError(text, param=param)
