"""The adapters that specialists always run with: from the names in the settings to digests."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from coterie.core.adapters import MAX_STACK, AdapterCard, AdapterProfile
from coterie.core.config import Config
from coterie.core.errors import ConfigError, InvalidRequest
from coterie.core.plan import AdapterChoice
from coterie.routing.resolve import (
    FixedAdapter,
    first_conflict,
    full_name,
    too_long,
    with_required,
)
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.workers.adapter_names import parse

FixedAdapters = Mapping[str, tuple[FixedAdapter, ...]]


def fixed_adapters(config: Config, names: Sequence[str], catalog: AdapterCatalog) -> FixedAdapters:
    """By specialist, with the digests that the names mean now. Raises ConfigError if an adapter is
    not installed or cannot run with the others."""
    found = {
        name: _stack(settings.adapters, catalog, f"specialists.{name}.adapters")
        for name, settings in zip(names, config.specialists, strict=True)
        if settings.adapters
    }
    if found and not config.adapters.device_bytes:
        raise ConfigError(
            f"specialists.{next(iter(found))}.adapters: this server runs no experts: "
            "adapters.device_bytes is 0",
            param="adapters.device_bytes",
        )
    return found


def check_base(specialist: str, fixed: Sequence[FixedAdapter], fingerprint: str) -> None:
    """Refuse adapters that were made for another model."""
    for item in fixed:
        card = item.profile.card
        if card.bases and fingerprint not in card.bases:
            bases = ", ".join(base[:12] for base in card.bases)
            param = f"specialists.{specialist}.adapters"
            raise ConfigError(
                f"{param}: {full_name(item.profile)} was made for another base model ({bases}), "
                f"not for that of {specialist!r} ({fingerprint[:12]})",
                param=param,
            )


def _stack(listed: Sequence[str], catalog: AdapterCatalog, param: str) -> tuple[FixedAdapter, ...]:
    named = [_named(text, param) for text in listed]
    profiles = [_profile(name, catalog, param) for name, _ in named]
    digests = [profile.card.digest for profile in profiles]
    if len(set(digests)) < len(digests):
        raise ConfigError(f"{param}: an expert is listed twice", param=param)
    stack = with_required(profiles, _finder(catalog))
    if isinstance(stack, str):
        raise ConfigError(f"{param}: {stack}", param=param)
    if len(stack) > MAX_STACK:
        raise ConfigError(f"{param}: at most {MAX_STACK} experts run together", param=param)
    pair, short = first_conflict(stack), too_long(stack)
    if pair is not None:
        text = f"{full_name(pair[0])} and {full_name(pair[1])} are incompatible"
        raise ConfigError(f"{param}: {text}", param=param)
    if short is not None:
        text = f"{full_name(short)} runs with at most {short.max_chain - 1} others"
        raise ConfigError(f"{param}: {text}", param=param)
    required = sorted(stack[len(profiles) :], key=lambda item: (item.load_order, item.card.name))
    weights = [weight for _, weight in named] + [1.0] * len(required)
    return tuple(
        FixedAdapter(AdapterChoice(full_name(item), item.card.digest, weight), item)
        for item, weight in zip([*profiles, *required], weights, strict=True)
    )


def _named(text: str, param: str) -> tuple[str, float]:
    try:
        return parse(text)
    except InvalidRequest as error:
        raise ConfigError(f"{param}: {error.message}", param=param) from None


def _profile(text: str, catalog: AdapterCatalog, param: str) -> AdapterProfile:
    name, _, version = text.partition("@")
    card = catalog.find(name, version)
    if card is None:
        raise ConfigError(f"{param}: {_missing(text, catalog)}", param=param)
    if catalog.is_damaged(card.digest):
        text = f"the files of {card.name}@{card.version} are damaged; install it again"
        raise ConfigError(f"{param}: {text}", param=param)
    return catalog.profile(card)


def _missing(text: str, catalog: AdapterCatalog) -> str:
    name, at, version = text.partition("@")
    current: AdapterCard | None = catalog.find(name, "")
    if at and current is not None:
        return f"the expert {name!r} has no version {version!r} here; it has {current.version!r}"
    near = difflib.get_close_matches(name, list(catalog.names()), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ": coterie expert install FILE"
    return f"the expert {text!r} is not installed{hint}"


def _finder(catalog: AdapterCatalog) -> Callable[[str], AdapterProfile | None]:
    def find(text: str) -> AdapterProfile | None:
        name, _, version = text.partition("@")
        card = catalog.find(name, version)
        return None if card is None else catalog.profile(card)

    return find
