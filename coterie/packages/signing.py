"""Ed25519 signatures of packages: over the manifest and the digest of every other file.

The signed message contains the manifest without its signature, so it does not depend on itself. A
key is identified by the first 16 hex digits of the sha256 of its public half.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError, MissingDependency
from coterie.packages.archive import Package
from coterie.packages.manifest import Manifest
from coterie.packages.paths import MANIFEST
from coterie.packages.strict_json import canonical

ALGORITHM = "ed25519"
_DOMAIN = b"coterie-expert-1\n"


def key_id(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()[:16]


def message(manifest: Manifest, files: Mapping[str, str]) -> bytes:
    """The signed message. `files`: path -> sha256 in hex, of all files except the manifest."""
    integrity = {k: v for k, v in manifest.integrity.items() if k != "signature"}
    document = {**manifest.document, "integrity": integrity}
    lines = "".join(f"{path}:{digest}\n" for path, digest in sorted(files.items()))
    return _DOMAIN + canonical(document) + b"\n" + lines.encode("ascii")


def package_message(package: Package) -> bytes:
    files = {name: facts.sha256 for name, facts in package.files.items() if name != MANIFEST}
    return message(package.manifest, files)


def signed(package: Package, private: bytes) -> Manifest:
    """The package's manifest with a signature by `private`, which replaces any other."""
    public = public_of(private)
    integrity = {
        **package.manifest.integrity,
        "files": {n: f.sha256 for n, f in sorted(package.files.items()) if n != MANIFEST},
        "signature_algorithm": ALGORITHM,
        "key_id": key_id(public),
        "pubkey": public.hex(),
    }
    integrity.pop("signature", None)
    manifest = package.manifest.with_section("integrity", integrity)
    files = integrity["files"]
    signature = _library().Ed25519PrivateKey.from_private_bytes(private).sign(
        message(manifest, files)
    )  # fmt: skip
    return manifest.with_section("integrity", {**integrity, "signature": signature.hex()})


def is_valid(public: bytes, signature: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        _library().Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_of(private: bytes) -> bytes:
    key: bytes = (
        _library().Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    )
    return key


def new_key(path: Path) -> bytes:
    """Writes a private key (32 raw bytes, readable only by its owner); returns the public half."""
    private: bytes = _library().Ed25519PrivateKey.generate().private_bytes_raw()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path}: exists; keys are never overwritten", param="key") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})", param="key") from error
    with os.fdopen(handle, "wb") as file:
        file.write(private)
    return public_of(private)


def read_key(path: Path) -> bytes:
    """A private key from its file."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes() if stat.S_ISREG(mode) and path.stat().st_size == 32 else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", param="key") from error
    if len(data) != 32:
        raise ConfigError(
            f"{path}: no private key (32 raw bytes); make one with coterie keys new", param="key"
        )
    if os.name == "posix" and mode & 0o077:
        raise ConfigError(f"{path}: others can read this key; chmod 600 {path}", param="key")
    return data


def read_public(text: str) -> bytes:
    """A public key as `keys new` writes it: 64 hex digits, possibly with words around them."""
    for word in text.split():
        if len(word) == 64:
            try:
                return bytes.fromhex(word)
            except ValueError:
                continue
    raise ConfigError("no public key in it: 64 hex digits are expected", param="key")


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependency("signatures need cryptography: pip install cryptography") from error
    return ed25519
