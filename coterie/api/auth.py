"""API keys: who may ask, and which tenant they are.

A tenant is a stable digest of its key, so that keys never reach logs, caches or workers.
Knows no routes: the door in `exchange.py` asks before anything is read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from coterie.core.errors import ConfigError, Unauthenticated

# without keys everyone is the same tenant
OPEN_TENANT = "local"


def tenant_of(key: bytes) -> str:
    return hashlib.sha256(b"coterie tenant\0" + key).hexdigest()[:16]


class KeyRing:
    """The keys of one `--api-key-file`, read once at start."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(
                f"cannot read the key file {path}: {error.strerror}", param="server.api_key_file"
            ) from error
        keys = [line.strip() for line in lines]
        keys = [key for key in keys if key and not key.startswith(b"#")]
        if not keys:
            raise ConfigError(
                f"the key file {path} holds no key: write one per line",
                param="server.api_key_file",
            )
        return cls(keys)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The tenant whose key the headers carry."""
        given = _key_in(headers)
        if given is None:
            raise Unauthenticated(
                "no API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            )
        # every key is compared, so that the time tells nothing about which one was near
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise Unauthenticated("this API key is not known here")
        return tenant_of(given)


def _key_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    found: bytes | None = None
    for name, value in headers:
        if name == b"x-api-key":
            return value.strip()
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            found = value[7:].strip()
    return found


def is_loopback(host: str) -> bool:
    """Addresses by their range; of names only `localhost`, because any other may point anywhere."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, has_keys: bool, insecure: bool) -> None:
    """Refuses to put an open door on a public address by accident."""
    if is_loopback(host) or has_keys or insecure:
        return
    raise ConfigError(
        f"binding {host} without API keys would let anyone on the network in: "
        "give --api-key-file FILE, or --insecure if that is what you want",
        param="server.host",
    )
