"""The keys that this machine trusts, from when until when, and what that means for a package.

A JSON file that one process changes at a time. The key of Coterie's own experts is built in and can
be revoked like any other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coterie.core.errors import Forbidden, NotFound, WeightsError
from coterie.packages import signing
from coterie.packages.archive import Package
from coterie.packages.sqlite import only_writer
from coterie.packages.strict_json import canonical, parse

PUBLISHER = Path(__file__).with_name("publisher.json")


@dataclass(frozen=True, slots=True)
class TrustedKey:
    public_key: str
    comment: str = ""
    added_at: float = 0.0
    # seconds since 1970; None = never
    expires_at: float | None = None
    revoked_at: float | None = None
    built_in: bool = False

    @property
    def id(self) -> str:
        return signing.key_id(bytes.fromhex(self.public_key))

    def state(self, now: float) -> str:
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and now >= self.expires_at:
            return "expired"
        return "trusted"


@dataclass(frozen=True, slots=True)
class TrustVerdict:
    """`state`: trusted, unsigned, untrusted (valid, but by a key that is not trusted here),
    revoked, expired, or broken."""

    state: str
    key_id: str = ""
    comment: str = ""
    reason: str = ""

    @property
    def trusted(self) -> bool:
        return self.state == "trusted"

    def require(self, what: str, *, allow_unsigned: bool) -> None:
        """Raises Forbidden unless `what` may be used. A broken, revoked or expired signature is
        always refused, whatever the operator allows."""
        if self.trusted or (allow_unsigned and self.state in ("unsigned", "untrusted")):
            return
        advice = ""
        if self.state == "unsigned":
            advice = (
                " Sign it with coterie expert sign (a directory: pack it first), or allow it "
                "with --allow-unsigned."
            )
        if self.state == "untrusted":
            advice = " Trust the key with coterie keys trust, or pass --allow-unsigned."
        raise Forbidden(f"{what}: refused, {self.reason}.{advice}")


class TrustStore:
    def __init__(self, path: Path) -> None:
        self.path = path

    def keys(self) -> list[TrustedKey]:
        """Oldest first."""
        return sorted(self._read().values(), key=lambda key: (key.added_at, key.id))

    def find(self, key_id: str) -> TrustedKey | None:
        return self._read().get(key_id)

    def trust(
        self, public: bytes, comment: str = "", expires_at: float | None = None
    ) -> TrustedKey:
        """Adds a key, or changes its comment and expiry. A revoked key stays revoked."""
        # refuse values that could not be read back
        parse(canonical({"comment": comment, "expires_at": expires_at}), "the key's comment")
        with self._changing() as keys:
            old = keys.get(signing.key_id(public))
            if old is not None and old.revoked_at is not None:
                raise Forbidden(f"key {old.id}: was revoked and stays so; use a new key")
            key = TrustedKey(public.hex(), comment, time.time(), expires_at)
            keys[key.id] = key
        return key

    def revoke(self, key_id: str) -> TrustedKey:
        """From now on no package signed with it can be installed."""
        with self._changing() as keys:
            matching = [key for key in keys.values() if key_id and key.id.startswith(key_id)]
            if len(matching) != 1:
                count = f"{len(matching)} known keys start" if matching else "no known key starts"
                raise NotFound(f"{count} with {key_id[:32]!r}. See coterie keys list.")
            key = matching[0]
            if key.revoked_at is None:
                key = replace(key, revoked_at=time.time())
            keys[key.id] = key
        return key

    def verify(self, package: Package, now: float | None = None) -> TrustVerdict:
        integrity = package.manifest.integrity
        if not integrity.get("signature"):
            return TrustVerdict("unsigned", reason="it is not signed")
        parts = _signature_parts(dict(integrity))
        if parts is None:
            reason = "its signature is not one that Coterie makes; sign it again"
            return TrustVerdict("broken", reason=reason)
        public, signature = parts
        key_id = signing.key_id(public)
        if not signing.is_valid(public, signature, signing.package_message(package)):
            reason = f"the signature of key {key_id} does not match its contents"
            return TrustVerdict("broken", key_id, reason=reason)
        key = self.find(key_id)
        if key is None:
            return TrustVerdict("untrusted", key_id, reason=f"signed by the unknown key {key_id}")
        state = key.state(time.time() if now is None else now)
        reason = "" if state == "trusted" else f"the key {key_id} that signed it is {state}"
        return TrustVerdict(state, key_id, key.comment, reason)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, TrustedKey]]:
        """The keys, locked against other processes; written if the block ends without an error."""
        with only_writer(self.path.with_name(f"{self.path.name}.lock")):
            keys = self._read()
            yield keys
            self._write(keys)

    def _read(self) -> dict[str, TrustedKey]:
        keys = _load(PUBLISHER, built_in=True) if PUBLISHER.exists() else []
        keys += _load(self.path, built_in=False) if self.path.exists() else []
        return {key.id: key for key in keys}

    def _write(self, keys: dict[str, TrustedKey]) -> None:
        listed = [asdict(key) for key in keys.values() if not _as_built_in(key)]
        for item in listed:
            del item["built_in"]
        text = json.dumps({"version": 1, "keys": listed}, indent=1) + "\n"
        part = self.path.with_name(f"{self.path.name}.part")
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path)


def _as_built_in(key: TrustedKey) -> bool:
    return key.built_in and key.revoked_at is None


def _signature_parts(integrity: dict[str, Any]) -> tuple[bytes, bytes] | None:
    """The public key and the signature, if both have the correct form."""
    if integrity.get("signature_algorithm") != signing.ALGORITHM:
        return None
    try:
        public = bytes.fromhex(integrity["pubkey"])
        signature = bytes.fromhex(integrity["signature"])
    except (KeyError, TypeError, ValueError):
        return None
    if len(public) != 32 or len(signature) != 64:
        return None
    named = integrity.get("key_id", signing.key_id(public))
    return (public, signature) if named == signing.key_id(public) else None


def _load(path: Path, *, built_in: bool) -> list[TrustedKey]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Check it.") from error
    document = parse(data, str(path))
    listed = document.get("keys")
    if not isinstance(listed, list):
        raise WeightsError(f"{path}: holds no list of keys. Mend or remove it.")
    return [_key(item, path, built_in) for item in listed]


def _key(item: Any, path: Path, built_in: bool) -> TrustedKey:
    names = ("public_key", "comment", "added_at", "expires_at", "revoked_at")
    try:
        key = TrustedKey(**{name: item[name] for name in names if name in item}, built_in=built_in)
        times = (key.added_at, key.expires_at, key.revoked_at)
        sound = len(bytes.fromhex(key.public_key)) == 32 and isinstance(key.comment, str)
        sound = sound and all(at is None or isinstance(at, (int, float)) for at in times)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise WeightsError(f"{path}: a key in it makes no sense. Mend or remove it.") from error
    if not sound:
        raise WeightsError(f"{path}: a key in it makes no sense. Mend or remove it.")
    return key
