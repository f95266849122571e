"""`coterie expert pack` and `sign`: from a PEFT directory to a signed package."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from coterie.cli.expert.state import bases
from coterie.cli.menu import show
from coterie.cli.terminal import facts, nbytes, note
from coterie.core.errors import ConfigError


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
    """The manifest's fields: those of a file, then the flags."""
    from coterie.packages.names import name_from
    from coterie.packages.strict_json import parse

    path = Path(args.manifest) if args.manifest else directory / "manifest.json"
    if args.manifest and not path.is_file():
        raise ConfigError(f"{path}: no such file", param="manifest")
    found = parse(path.read_bytes(), str(path)) if path.is_file() else {}
    given = {name: getattr(args, name) for name in ("name", "version", "description", "author")}
    document = {
        "schema_version": "2.0",
        "name": name_from(directory.resolve().name),
        "base_models": [],
        **found,
        **{name: value for name, value in given.items() if value is not None},
    }
    if "version" not in document:
        raise ConfigError("give --version, such as 1.0.0 (manifest.json has none)", param="version")
    if args.base:
        document["base_models"] = [
            {"name": base.name, "fingerprint": base.fingerprint} for base in bases(args.base)
        ]
    return document
