"""manifest.json of an `.expert`, read strictly and kept completely.

Schema 2.0 is written; 1.0 (`base_model` and `adapters`) can also be read. Fields that Coterie does
not know stay in the document and are covered by its signature.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.core.errors import CoterieError, InvalidRequest, WeightsError
from coterie.core.request import AUTO
from coterie.packages.paths import MANIFEST, WEIGHTS
from coterie.packages.strict_json import parse

SCHEMAS = ("1.0", "2.0")
MAX_BYTES = 1 << 20
_MAX_BASES = 64
_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_TEXTS = ("description", "author")
_MAPS = ("routing", "constraints", "perf", "quality_metrics", "evaluation", "training", "integrity")
_LISTS = ("capabilities", "limitations")


@dataclass(frozen=True, slots=True)
class BaseModelRef:
    """A model that the expert was made for. Each file of a model has its own fingerprint."""

    name: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str
    version: str
    base_models: tuple[BaseModelRef, ...]
    # the whole document, as JSON values; this is what is signed. It must not be modified
    document: Mapping[str, Any]

    @property
    def description(self) -> str:
        return str(self.document.get("description", ""))

    @property
    def author(self) -> str:
        return str(self.document.get("author", ""))

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(sorted({base.fingerprint for base in self.base_models if base.fingerprint}))

    @property
    def integrity(self) -> Mapping[str, Any]:
        return self.section("integrity")

    @property
    def capabilities(self) -> tuple[str, ...]:
        return tuple(str(item) for item in self.document.get("capabilities", ()))

    def section(self, name: str) -> Mapping[str, Any]:
        """`routing`, `evaluation` and so on; empty if it does not exist."""
        value = self.document.get(name, {})
        return value if isinstance(value, dict) else {}

    def with_section(self, name: str, value: Mapping[str, Any]) -> Manifest:
        document = {**self.document, name: dict(value)}
        return Manifest(self.name, self.version, self.base_models, document)

    def stated_files(self) -> dict[str, str] | None:
        """Path -> sha256 as the manifest lists them, without the manifest itself; None = no
        list."""
        return _stated(self.integrity.get("files"))


def read(data: bytes, where: str = MANIFEST) -> Manifest:
    if len(data) > MAX_BYTES:
        raise WeightsError(f"{where}: refused, {len(data)} bytes are too many for a manifest.")
    return from_document(parse(data, where), where)


def from_document(document: Mapping[str, Any], where: str = MANIFEST) -> Manifest:
    schema = document.get("schema_version", "2.0")
    if schema not in SCHEMAS:
        raise WeightsError(
            f"{where}: refused, schema_version {str(schema)[:20]!r} is unknown; "
            f"{' and '.join(SCHEMAS)} are read."
        )
    _check_types(document, where)
    try:
        name = check_name(document.get("name"))
        version = check_version(document.get("version"))
    except CoterieError as error:
        raise WeightsError(f"{where}: refused, {error.message}") from error
    bases = _old_bases(document, where) if schema == "1.0" else _bases(document, where)
    integrity = document.get("integrity", {})
    if "files" in integrity and _stated(integrity["files"]) is None:
        raise WeightsError(f"{where}: refused, integrity.files is no map of sha256 digests.")
    return Manifest(name, version, bases, dict(document))


def write(manifest: Manifest) -> bytes:
    """Readable text; equal documents give equal bytes."""
    text = json.dumps(
        dict(manifest.document), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False
    )
    return f"{text}\n".encode()


def _check_types(document: Mapping[str, Any], where: str) -> None:
    for names, kind, called in (
        (_TEXTS, str, "a text"),
        (_MAPS, dict, "an object"),
        (_LISTS, list, "a list"),
    ):
        for name in names:
            if name in document and not isinstance(document[name], kind):
                raise WeightsError(f"{where}: refused, {name} is not {called}.")


def _bases(document: Mapping[str, Any], where: str) -> tuple[BaseModelRef, ...]:
    listed = document.get("base_models", [])
    if not isinstance(listed, list) or len(listed) > _MAX_BASES:
        raise WeightsError(f"{where}: refused, base_models is no list of models.")
    return tuple(_base(item, where) for item in listed)


def _old_bases(document: Mapping[str, Any], where: str) -> tuple[BaseModelRef, ...]:
    """Schema 1.0: one model, and a list of adapters, of which the package can hold exactly one."""
    adapters = document.get("adapters", [])
    if not isinstance(adapters, list) or len(adapters) > 1:
        raise WeightsError(
            f"{where}: refused, a package holds one adapter. Pack each adapter by itself."
        )
    for item in adapters:
        path = item.get("path", WEIGHTS) if isinstance(item, dict) else None
        if path != WEIGHTS:
            raise WeightsError(
                f"{where}: refused, its adapter is not {WEIGHTS}. Convert it to PEFT's files."
            )
    base = document.get("base_model")
    return () if base is None else (_base(base, where),)


def _base(item: Any, where: str) -> BaseModelRef:
    if isinstance(item, str):
        return BaseModelRef(item)
    name = item.get("name") if isinstance(item, dict) else None
    fingerprint = item.get("fingerprint", "") if isinstance(item, dict) else None
    if not isinstance(name, str) or not isinstance(fingerprint, str):
        raise WeightsError(f"{where}: refused, a base model without a name in it.")
    if fingerprint and not _SHA256.fullmatch(fingerprint):
        raise WeightsError(f"{where}: refused, the fingerprint of {name[:60]!r} is no sha256.")
    return BaseModelRef(name, fingerprint.removeprefix("sha256:"))


def _stated(files: Any) -> dict[str, str] | None:
    pairs: list[tuple[Any, Any]]
    if isinstance(files, dict):
        pairs = list(files.items())
    elif isinstance(files, list) and all(isinstance(item, dict) for item in files):
        pairs = [(item.get("path"), item.get("sha256")) for item in files]
    else:
        return None
    stated: dict[str, str] = {}
    for path, digest in pairs:
        match = _SHA256.fullmatch(digest) if isinstance(digest, str) else None
        if not isinstance(path, str) or match is None or path in stated:
            return None
        # a manifest cannot contain its own digest, but old packers wrote one
        if path != MANIFEST:
            stated[path] = match.group(1)
    return stated


_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NUMBER = "([0-9]{1,9})"
_LABEL = "([0-9a-z][0-9a-z.-]{0,39})"
_VERSION = re.compile(rf"{_NUMBER}(?:\.{_NUMBER})?(?:\.{_NUMBER})?(?:-{_LABEL})?")


def check_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == AUTO:
        raise InvalidRequest(
            f"{_shown(name)} is no name for an expert: use up to 64 of a-z 0-9 . _ -, "
            "with a letter or digit first, and not auto.",
            param="name",
        )
    return name


def check_version(version: object) -> str:
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise InvalidRequest(
            f"{_shown(version)} is no version: write 1.2.0, or 1.2.0-rc1.", param="version"
        )
    return version


def name_from(text: str) -> str:
    """The nearest permitted name, for a directory without a manifest."""
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:64]
    return cleaned if _NAME.fullmatch(cleaned) and cleaned != AUTO else "expert"


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Known names that are similar to a mistyped one, the most likely first."""
    return difflib.get_close_matches(name, known, n=3, cutoff=0.5)


def version_of(digest: str) -> str:
    """For adapters without a version: it is made from the digest."""
    return f"0.0.0-{digest[:12]}"


def version_order(version: str) -> tuple[tuple[int, ...], bool, tuple[tuple[bool, int, str], ...]]:
    """Sorts like semantic versions: a pre-release comes before its release."""
    match = _VERSION.fullmatch(version)
    if match is None:
        return (0, 0, 0), False, ()
    numbers = tuple(int(part or 0) for part in match.group(1, 2, 3))
    label = match.group(4)
    parts = label.split(".") if label else []
    ranks = tuple((not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts)
    return numbers, label is None, ranks


def _shown(value: object) -> str:
    return repr(value)[:80]
