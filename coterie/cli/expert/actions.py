"""The actions of `coterie expert` on packages and installed experts, and their output."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.expert.state import bases, modules, open_registry, open_trust
from coterie.cli.terminal import facts, narrate, nbytes, note, show, table
from coterie.core.errors import ConfigError, CoterieError, InternalError, WeightsError
from coterie.packages import shipped
from coterie.packages.manifest import BaseModelRef, Manifest

if TYPE_CHECKING:
    from coterie.core.adapters import AdapterCard
    from coterie.packages.registry import AdapterRegistry


def verify(args: argparse.Namespace) -> int:
    from coterie.packages.archive import inspect

    package = inspect(Path(args.file))
    verdict = open_trust().verify(package)
    manifest = package.manifest
    report = {
        "file": args.file,
        "name": manifest.name,
        "version": manifest.version,
        "kind": package.config.kind,
        "digest": package.digest,
        "base_models": [asdict(base) for base in manifest.base_models],
        "files": {name: asdict(file) for name, file in sorted(package.files.items())},
        "signature": asdict(verdict),
    }
    signature = verdict.state + (f": {verdict.reason}" if verdict.reason else "")
    if verdict.trusted:
        signature = f"trusted, key {verdict.key_id} {verdict.comment}".rstrip()
    pairs = [
        ("expert", f"{manifest.name}@{manifest.version}, {package.config.kind}"),
        ("digest", package.digest[:16]),
        ("for", _for(manifest.base_models)),
        ("files", ", ".join(f"{n} ({nbytes(f.size)})" for n, f in sorted(package.files.items()))),
        ("signature", signature),
    ]
    show(args, report, facts(pairs))
    return 0 if verdict.trusted else 1


def install(args: argparse.Namespace) -> int:
    # an unsigned installation is reported; that it worked is the result itself
    narrate(logging.WARNING)
    sources = [*args.source, *(map(str, shipped.files()) if args.shipped else ())]
    if not sources:
        raise ConfigError("FILE_OR_DIR or --shipped is required", param="source")
    if len(sources) > 1 and (args.name or args.version):
        raise ConfigError("--name and --version are for one expert at a time", param="name")
    fingerprints = [base.fingerprint for base in bases(args.base)]
    fitting = modules(args.base)
    from coterie.adapters.check import check_adapter

    registry, trust = open_registry(), open_trust()
    known = {_full_name(card): card.digest for card in registry.cards()}
    cards, lines, failed = [], [], 0
    for source in sources:
        try:
            card = registry.install(
                Path(source),
                trust=trust,
                allow_unsigned=args.allow_unsigned,
                bases=fingerprints,
                name=args.name,
                version=args.version,
                now=args.now,
                # without --base: checks that it is complete, not that it fits
                check=lambda _, folder: check_adapter(folder, fitting, args.adapter_bytes),
            )
        except CoterieError as error:
            if len(sources) == 1:
                raise
            # the others are installed without it
            note(f"coterie: {error.message}")
            failed += 1
            continue
        cards.append(card)
        again = " again" if known.get(_full_name(card)) == card.digest else ""
        line = f"{_full_name(card)}: installed{again} ({card.kind}, {nbytes(card.nbytes)})"
        current = registry.find(card.name)
        if current.version != card.version and current.pinned:
            line += f"; {card.name} is pinned and still means {current.version}"
        elif current.version != card.version:
            line += f"\n  staged: {card.name} means {current.version} until"
            line += f" coterie expert promote {_full_name(card)}"
        lines.append(line)
    registry.sweep()
    _learn(registry)
    report = {"experts": [asdict(card) for card in cards], "failed": failed}
    if len(sources) == 1:
        report = asdict(cards[0])
    show(args, report, "\n".join(lines) or "nothing was installed")
    return 1 if failed else 0


def _learn(registry: AdapterRegistry) -> None:
    """Learns when to use each expert, so that the next server does not have to at its start."""
    from coterie.service.adapters.catalog import ProfileCache, current_profiles
    from coterie.service.adapters.matching import build_matcher, is_learnt

    profiles = ProfileCache().read(registry, registry.cards())
    current = tuple(current_profiles(registry.meanings(), profiles).values())
    if not current or is_learnt(current):
        return
    note(f"coterie: learning when to use {len(current)} expert{'s' * (len(current) > 1)}")
    try:
        build_matcher(current)
    except InternalError as error:
        # the expert is installed anyway, and a server can learn by itself
        note(f"coterie: {error.message}; the next server will try again")


def listing(args: argparse.Namespace) -> int:
    registry = open_registry()
    cards, meanings = registry.cards(), registry.meanings()
    states = _key_states()
    report = [
        {
            **asdict(card),
            "signer_state": _signer_state(card, states),
            "current": meanings.get(card.name) == card,
            "aliases": _aliases(card, meanings),
        }
        for card in cards
    ]
    rows = []
    for item, card in zip(report, cards, strict=True):
        marks = ("*" if item["current"] else "") + (" pinned" if card.pinned else "")
        shown = (card.version, marks.strip() or "-", card.kind, nbytes(card.nbytes))
        rows.append((card.name, *shown, _signer(card, states)))
    headers = ("name", "version", "now", "kind", "size", "signed by")
    none = "no experts installed: coterie expert install FILE"
    text = table(headers, rows, words=("version", "now", "kind", "signed by")) if rows else none
    also = [
        f"{alias} = {_full_name(card)}" for alias, card in meanings.items() if alias != card.name
    ]
    if also:
        text += f"\n\n{facts([('aliases', ', '.join(sorted(also)))])}"
    return show(args, {"experts": report}, text)


def details(args: argparse.Namespace) -> int:
    registry = open_registry()
    card = registry.find(*_name_and_version(args.name))
    manifest = registry.manifest(card)
    aliases = _aliases(card, registry.meanings())
    signer = _signer(card, _key_states())
    pairs = [
        ("expert", _full_name(card)),
        ("about", card.description or "-"),
        ("author", manifest.author or "-"),
        ("kind", f"{card.kind}, {nbytes(card.nbytes)}"),
        ("digest", card.digest),
        ("for", _for(_bases(card, manifest))),
        ("signed by", signer if card.signer else "nobody (allowed with --allow-unsigned)"),
        ("pinned", "yes" if card.pinned else "no"),
        ("aliases", ", ".join(aliases) or "-"),
        ("files", str(registry.library / card.digest)),
    ]
    if card.num_virtual_tokens:
        pairs.insert(4, ("tokens", f"{card.num_virtual_tokens} in front of every prompt"))
    for name in ("capabilities", "limitations", "routing", "evaluation", "quality_metrics"):
        if manifest.document.get(name):
            text = _flat(manifest.document[name])
            if name == "evaluation":
                text = _figures(manifest.document[name]) or text
            pairs.append((name.replace("_", " "), text))
    versions = ", ".join(other.version for other in registry.versions(card.name))
    pairs.append(("versions", versions))
    report = {**asdict(card), "aliases": aliases, "manifest": dict(manifest.document)}
    return show(args, report, facts(pairs))


def remove(args: argparse.Namespace) -> int:
    registry = open_registry()
    name, version = _name_and_version(args.name)
    # servers may be using them: the files are deleted when nobody has requested them for a day
    keep = {card.digest for card in registry.cards()}
    removed = registry.remove(name, version, keep=keep)
    registry.sweep()
    text = ", ".join(_full_name(card) for card in removed)
    return show(args, {"removed": [asdict(card) for card in removed]}, f"{text}: removed")


def pin(args: argparse.Namespace) -> int:
    name, version = _name_and_version(args.name)
    registry = open_registry()
    if version is not None:
        registry.alias(name, name, version)
    card = registry.pin(name, not args.off)
    state = "unpinned" if args.off else "pinned"
    return show(args, asdict(card), f"{_full_name(card)}: {state}")


def alias(args: argparse.Namespace) -> int:
    registry = open_registry()
    if args.off:
        registry.unalias(args.alias)
        return show(args, {"alias": args.alias, "removed": True}, f"{args.alias}: removed")
    if args.name is None:
        raise ConfigError("say which expert: coterie expert alias ALIAS NAME", param="name")
    card = registry.alias(args.alias, *_name_and_version(args.name))
    return show(args, {"alias": args.alias, **asdict(card)}, f"{args.alias}: {_full_name(card)}")


def make_current(args: argparse.Namespace) -> int:
    """Let the name alone mean this version, or the one that was installed last."""
    registry = open_registry()
    name, version = _name_and_version(args.name)
    if version is None:
        version = max(registry.versions(name), key=lambda card: card.installed_at).version
    card = registry.alias(name, name, version)
    return show(args, asdict(card), f"{_full_name(card)}: current")


def rollback(args: argparse.Namespace) -> int:
    name, _ = _name_and_version(args.name)
    card = open_registry().rollback(name)
    return show(args, asdict(card), f"{name}: {_full_name(card)} again")


def _name_and_version(text: str) -> tuple[str, str | None]:
    name, at, version = text.partition("@")
    return name, version if at else None


def _full_name(card: AdapterCard) -> str:
    return f"{card.name}@{card.version}"


def _aliases(card: AdapterCard, meanings: Mapping[str, AdapterCard]) -> list[str]:
    return sorted(name for name, meant in meanings.items() if meant == card and name != card.name)


def _key_states() -> dict[str, str]:
    now = time.time()
    try:
        keys = open_trust().keys()
    except WeightsError as error:
        # installed experts can be listed anyway
        note(f"coterie: {error.message}")
        keys = []
    return {key.id: key.state(now) for key in keys}


def _signer_state(card: AdapterCard, states: Mapping[str, str]) -> str:
    """The current state of its signer's key, which was trusted when the expert was installed."""
    return states.get(card.signer, "unknown") if card.signer else "unsigned"


def _signer(card: AdapterCard, states: Mapping[str, str]) -> str:
    state = _signer_state(card, states)
    return card.signer if state == "trusted" else f"{card.signer} {state}".strip()


def _bases(card: AdapterCard, manifest: Manifest) -> Sequence[BaseModelRef]:
    """From the manifest, or from `--base` when it was installed."""
    if set(card.bases) <= set(manifest.fingerprints):
        return manifest.base_models
    name = manifest.base_models[0].name if manifest.base_models else "a base model"
    return [BaseModelRef(name, fingerprint) for fingerprint in card.bases]


def _for(base_models: Sequence[BaseModelRef]) -> str:
    shown = [f"{base.name} ({base.fingerprint[:12] or 'any file'})" for base in base_models]
    return ", ".join(shown) or "any base model"


def _figures(evaluation: Mapping[str, Any]) -> str:
    """The figures of `coterie expert test` in one line; empty if the section has another form."""
    sides = [evaluation.get(side) for side in ("base", "expert")]
    if not all(isinstance(side, Mapping) and "score" in side for side in sides):
        return ""
    shown = [
        f"{name} {side['score']:.1%} ({side['low_95']:.1%} to {side['high_95']:.1%})"
        for name, side in zip(("base", "expert"), sides, strict=True)
        if side is not None
    ]
    return f"{', '.join(shown)} of {evaluation.get('n')} held-out items, {evaluation.get('metric')}"


def _flat(value: Any) -> str:
    """A section of the manifest as one line of text."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, list):
        texts = [_flat(item) for item in value]
        return (" " if all(text.endswith(".") for text in texts) else ", ").join(texts)
    return value if isinstance(value, str) else json.dumps(value)


def pack(args: argparse.Namespace) -> int:
    from coterie.packages import archive
    from coterie.packages.directory import collect
    from coterie.packages.manifest import from_document

    directory = Path(args.directory)
    collected = collect(directory)
    manifest = from_document(_document(args, directory))
    out = Path(args.out or f"{manifest.name}-{manifest.version}.expert")
    package = archive.pack(collected.files, manifest, out)
    if collected.left_out:
        note(f"coterie: left out: {', '.join(collected.left_out[:10])}")
    if not package.manifest.fingerprints:
        note("coterie: no --base given: nothing keeps it from being used with another model")
    size = out.stat().st_size
    report = {
        "file": str(out),
        "name": manifest.name,
        "version": manifest.version,
        "kind": package.config.kind,
        "digest": package.digest,
        "bytes": size,
        "files": sorted(package.files),
        "left_out": list(collected.left_out),
    }
    pairs = [
        ("file", f"{out} ({nbytes(size)})"),
        ("expert", f"{manifest.name}@{manifest.version}, {package.config.kind}"),
        ("digest", package.digest[:16]),
        ("files", ", ".join(sorted(package.files))),
    ]
    return show(args, report, facts(pairs))


def sign(args: argparse.Namespace) -> int:
    from coterie.packages import signing
    from coterie.packages.archive import inspect, repack

    path = Path(args.file)
    private = signing.read_key(Path(args.key))
    package = inspect(path)
    repack(package, signing.signed(package, private), path)
    key_id = signing.key_id(signing.public_of(private))
    return show(args, {"file": str(path), "key_id": key_id}, f"{path}: signed by key {key_id}")


def _document(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The manifest's fields: those of a file, replaced by those of flags."""
    from coterie.packages.manifest import name_from
    from coterie.packages.strict_json import parse

    path = Path(args.manifest) if args.manifest else directory / "manifest.json"
    if args.manifest and not path.is_file():
        raise ConfigError(f"{path}: no such file", param="manifest")
    from_file = parse(path.read_bytes(), str(path)) if path.is_file() else {}
    from_flags = {
        name: getattr(args, name) for name in ("name", "version", "description", "author")
    }
    document = {
        "schema_version": "2.0",
        "name": name_from(directory.resolve().name),
        "base_models": [],
        **from_file,
        **{name: value for name, value in from_flags.items() if value is not None},
    }
    if "version" not in document:
        raise ConfigError("give --version, such as 1.0.0 (manifest.json has none)", param="version")
    if args.base:
        document["base_models"] = [
            {"name": base.name, "fingerprint": base.fingerprint} for base in bases(args.base)
        ]
    return document
